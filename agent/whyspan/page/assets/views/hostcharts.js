/** The host's figures over time: one small chart per group. */

import { Chart, axis, timeAxis } from "../charts.js";
import { token } from "../colours.js";
import { fill, h } from "../dom.js";
import { moment } from "../filters.js";
import { bytes, ms, percent, quantity, when } from "../format.js";

/** @typedef {import("../shapes.js").HostView} HostView */
/** @typedef {import("../shapes.js").Series} Series */
/** @typedef {{ group: string, unit: string, keys: string[] }} Group */
/** @typedef {{ element: HTMLElement, update: () => void }} HostChart */

/** Titles of the groups, in the order in which they are shown; others come behind, by name. */
const TITLES = /** @type {Record<string, string>} */ ({
  pressure: "Pressure: time in which tasks waited",
  throttled: "Throttled by a CPU quota",
  cpu: "CPU",
  load: "Tasks that run or want to",
  memory: "Memory",
  probes: "What the probes cost, of a core",
  losses: "Lost, over time",
});
const SYNC = "whyspan-host-time";
/** Lines beyond this many are told apart by nobody: the highest are drawn. */
const MAX_LINES = 6;
/** The colours and dashes of lines, in turn. */
const LINES = /** @type {const} */ ([["--c-python", []], ["--c-cpu", []], ["--c-net", []], ["--c-memory", [6, 3]], ["--c-lock", [6, 3]], ["--c-io", [6, 3]]]);

/** What an axis reaches at least, by unit: next to nothing is drawn as such. */
const LEAST = /** @type {Record<string, number>} */ ({ ratio: 0.02, cores: 0.02, bytes: 1 << 20, "1/s": 0.1 });
/** Steps of an axis of bytes. */
const POWERS = Array.from({ length: 50 }, (_v, i) => 2 ** i);

/** @param {string} unit @param {number | null | undefined} value @param {string} [group] */
function shown(unit, value, group = "") {
  if (value === null || value === undefined) return "–";
  if (unit === "ratio" || (unit === "cores" && group === "probes")) return percent(value);
  if (unit === "cores") return `${quantity(value)} ${value === 1 ? "core" : "cores"}`;
  if (unit === "bytes") return bytes(value);
  if (unit === "ms/s") return `${ms(value)}/s`;
  if (unit === "1/s") return quantity(value, "/s");
  if (unit === "count") return quantity(value);
  return quantity(value, unit);
}

/** Series that have values, by group and unit. @param {HostView} view @returns {Group[]} */
export function groupsOf(view) {
  /** @type {Map<string, Series[]>} */
  const groups = new Map();
  for (const series of view.series) {
    if (!series.values.some((v) => v !== null)) continue;
    if (series.group === "losses" && !series.values.some((v) => v)) continue; // the table says so
    const key = `${series.group}\n${series.unit}`;
    groups.set(key, [...(groups.get(key) ?? []), series]);
  }
  const order = Object.keys(TITLES);
  const rank = (/** @type {Group} */ g) => (order.indexOf(g.group) + order.length + 1) % (order.length + 1);
  const most = (/** @type {Series} */ s) => Math.max(...s.values.map((v) => v ?? 0));
  return [...groups.entries()]
    .map(([key, series]) => {
      const [group = "", unit = ""] = key.split("\n");
      const kept = series.length > MAX_LINES ? [...series].sort((a, b) => most(b) - most(a)).slice(0, MAX_LINES) : series;
      return { group, unit, keys: kept.map((s) => s.key) };
    })
    .sort((a, b) => rank(a) - rank(b) || a.group.localeCompare(b.group));
}

/**
 * @param {() => HostView} view
 * @param {Group} group
 * @param {(span: { since: string, until: string }) => void} zoom a span of time was chosen
 * @param {AbortSignal} signal
 * @returns {HostChart}
 */
export function seriesChart(view, { group, unit, keys }, zoom, signal) {
  const title = TITLES[group] ?? group;
  const series = () => keys.map((key) => view().series.find((s) => s.key === key));
  const times = () => view().times_unix_ms;
  /** @param {number} i */
  const say = (i) => `${when(times()[i] ?? 0)}: ${series().map((s) => `${s?.label} ${shown(unit, s?.values[i], group)}`).join(", ")}`;
  const least = LEAST[unit] ?? 1;
  const chart = new Chart({
    label: `${title} over time`,
    height: 130,
    data: () => /** @type {any} */ ([times().map((t) => t / 1e3), ...series().map((s) => s?.values ?? [])]),
    options: () => ({
      scales: {
        x: { time: true, range: () => [(times()[0] ?? 0) / 1e3, ((times().at(-1) ?? 0) + view().step_ms) / 1e3] },
        y: { range: (_u, _lo, hi) => [0, Math.max((hi || 0) * 1.08, least)] },
      },
      axes: [timeAxis({ space: 80 }), axis({ size: 72, space: 26, ...(unit === "bytes" ? { incrs: POWERS } : {}), values: (_u, splits) => splits.map((v) => (v === 0 ? "0" : shown(unit, v, group))) })],
      series: [{}, ...keys.map((key, i) => {
        const [property, dash] = LINES[i % LINES.length] ?? LINES[0];
        return { label: key, stroke: token(property), width: 1.5, dash: [...dash], points: { show: false } };
      })],
      cursor: { sync: { key: SYNC, scales: ["x", null] } },
    }),
    say,
    select: (span) => span && zoom({ since: moment(span.from * 1e3), until: moment(span.to * 1e3) }),
  }, signal);
  const legend = h("span", { class: "legend" });
  fill(legend, series().map((s, i) => h("span", { class: "key" }, h("span", { class: `line host-${i % LINES.length}`, "aria-hidden": "true" }), s?.label)));
  const element = h("section", { class: "card", "aria-label": title }, h("div", { class: "head" }, h("h2", {}, title), legend), chart.element);
  return { element, update: () => chart.update() };
}
