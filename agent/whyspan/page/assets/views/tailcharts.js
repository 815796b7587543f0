/** The charts of the tail. Each is a `Chart` with a legend. */

import { familyClass, hatched, shaded, shades, token } from "../colours.js";
import { Chart, axis, layerAt, seriesFill, stacked, timeAxis, uPlot } from "../charts.js";
import { fill, h } from "../dom.js";
import { swatch } from "../filters.js";
import { count, ms, when } from "../format.js";

/** @typedef {import("../charts.js").Span} Span */
/** @typedef {{ chart: Chart, legend: HTMLElement }} Panel */
/** @typedef {{ select: (span: Span | null) => void, pick: (index: number, cause?: string) => void }} Handlers */

/** Px that the y axis takes, in all charts, so that their plots stand below each other. */
const Y_SIZE = 62;
const TIME_SYNC = "whyspan-tail-time";
const QUANTILES = /** @type {const} */ ([["p50", "P50"], ["p90", "P90"], ["p99", "P99"]]);

/** @param {any} view */
function seconds(view) {
  return view.times_unix_ms.map((/** @type {number} */ t) => t / 1e3);
}

/** The whole time asked for, also where nothing was. @param {any} view @returns {[number, number]} */
function reach(view) {
  const times = view.times_unix_ms;
  return [(times[0] ?? 0) / 1e3, ((times.at(-1) ?? 0) + view.step_ms) / 1e3];
}

/** @param {number} value */
function msTick(value) {
  return value === 0 ? "0" : ms(value, 2);
}

/** @returns {uPlot.Axis} */
function msAxis() {
  return axis({ size: Y_SIZE, space: 28, values: (_u, splits) => splits.map(msTick) });
}

/**
 * Quantiles over time.
 *
 * @param {() => any} view the TailView
 * @param {"quantiles" | "ttft_quantiles"} which
 * @param {Handlers} handlers
 * @param {AbortSignal} signal
 * @returns {Panel}
 */
export function quantilesOverTime(view, which, { select, pick }, signal) {
  const values = () => QUANTILES.map(([key]) => view()[which][key] ?? []);
  const say = (/** @type {number} */ i) => {
    const at = view().times_unix_ms[i];
    const parts = QUANTILES.map(([, label], q) => `${label} ${ms(values()[q]?.[i])}`);
    return `${when(at)}: ${parts.join(", ")}, ${count(view().counts[i], "request")}`;
  };
  const chart = new Chart({
    label: which === "quantiles" ? "Latency over time: P50, P90 and P99" : "Time to first token over time: P50, P90 and P99",
    height: 170,
    data: () => /** @type {any} */ ([seconds(view()), ...values()]),
    options: () => ({
      scales: { x: { time: true, range: () => reach(view()) }, y: { range: (_u, _lo, hi) => [0, (hi || 1) * 1.15] } },
      axes: [timeAxis(), msAxis()],
      series: [{}, ...QUANTILES.map(([key, label]) => ({
        label, stroke: token(`--${key}`), width: key === "p99" ? 2 : 1.25, dash: key === "p50" ? [3, 3] : [], points: { size: 4, show: lonely },
      }))],
      cursor: { sync: { key: TIME_SYNC, scales: ["x", null] } },
    }),
    say, select, pick: (index) => pick(index),
    spanOf: (i) => stepSpan(view(), i),
  }, signal);
  const legend = h("span", { class: "legend" }, QUANTILES.map(([key, label]) => h("span", { class: "key" }, h("span", { class: `line ${key}`, "aria-hidden": "true" }), label)));
  return { chart, legend };
}

/** Whether points are drawn: no line shows one without neighbours. @param {uPlot} u @param {number} series */
function lonely(u, series) {
  const values = u.data[series] ?? [];
  return values.some((v, i) => v !== null && (values[i - 1] ?? null) === null && (values[i + 1] ?? null) === null);
}

/** @param {any} view @param {number} index @returns {Span} */
function stepSpan(view, index) {
  const from = (view.times_unix_ms[index] ?? 0) / 1e3;
  return { from, to: from + view.step_ms / 1e3 };
}

/**
 * Excess by cause, stacked, over time.
 *
 * @param {() => any} view
 * @param {Handlers} handlers
 * @param {AbortSignal} signal
 * @returns {Panel}
 */
export function causesOverTime(view, { select, pick }, signal) {
  const legend = h("span", { class: "legend" });
  const causes = () => Object.keys(view().by_cause);
  const sums = () => stacked(causes().map((cause) => view().by_cause[cause]));
  /** @param {number} i */
  const say = (i) => {
    const parts = causes().filter((c) => view().by_cause[c][i] > 0).sort((a, b) => view().by_cause[b][i] - view().by_cause[a][i])
      .map((c) => `${c} ${ms(view().by_cause[c][i])} (${view().by_cause_requests[c]?.[i] ?? 0})`);
    const rest = parts.length > 3 ? ` and ${parts.length - 3} more` : "";
    return `${when(view().times_unix_ms[i])}: ${parts.slice(0, 3).join(", ") || "nothing lost"}${rest}`;
  };
  const chart = new Chart({
    label: "Time lost by slow requests over time, by cause",
    height: 170,
    data: () => /** @type {any} */ ([seconds(view()), ...layersOf(sums())]),
    options: () => ({
      scales: { x: { time: true, range: () => reach(view()) }, y: { range: (_u, _lo, hi) => [0, (hi || 1) * 1.15] } },
      axes: [timeAxis(), msAxis()],
      series: [{}, ...barSeries(causes()).reverse()],
      cursor: { sync: { key: TIME_SYNC, scales: ["x", null] }, points: { show: false } },
    }),
    say, select,
    pick: (index, y) => pick(index, causes()[layerAt(sums(), index, y)] ?? ""),
    spanOf: (i) => stepSpan(view(), i),
  }, signal);
  fill(legend, causeKeys(causes()));
  return { chart, legend };
}

/** @param {string[]} causes */
export function causeKeys(causes) {
  const shade = shades(causes);
  return causes.map((c) => h("span", { class: `key shade-${shade.get(c)} ${familyClass(c)}` }, swatch(c), c));
}

/** Nothing is drawn where nothing is. @param {number[][]} sums @returns {(number | null)[][]} in the order of drawing: the whole first */
function layersOf(sums) {
  return sums.map((values) => values.map((v) => v || null)).reverse();
}

/** Bars of stacked sums, the lowest layer first. @param {string[]} causes @param {-1 | 0 | 1} [align] @returns {uPlot.Series[]} */
function barSeries(causes, align = 1) {
  const shade = shades(causes);
  const paths = uPlot.paths.bars?.({ size: [align ? 0.92 : 0.86, 64], align });
  return causes.map((cause) => {
    const tint = shaded(cause, shade.get(cause));
    return { label: cause, stroke: token("--card"), width: 0.75, fill: seriesFill(tint, hatched(cause)), points: { show: false }, ...(paths ? { paths } : {}) };
  });
}

/** @typedef {{ lower_ms: number, upper_ms: number | null, requests: number, slow_by_cause: Record<string, number> }} Bin */

/** The bins that hold something, and those between them. @param {Bin[]} bins */
export function usedBins(bins) {
  const used = bins.map((b) => b.requests > 0 || Object.keys(b.slow_by_cause).length > 0);
  const first = used.indexOf(true);
  return first < 0 ? [] : bins.slice(first, used.lastIndexOf(true) + 1);
}

/** @param {Bin} bin */
export function binText(bin) {
  return bin.upper_ms === null ? `${ms(bin.lower_ms)} and more` : `${ms(bin.lower_ms)} – ${ms(bin.upper_ms)}`;
}

/**
 * How many requests took how long: all above, the slow ones by cause below. The axis has one place per bin.
 *
 * @param {() => any} view
 * @param {{ select: (bins: Bin[]) => void, pick: (bin: Bin, cause: string) => void }} handlers
 * @param {AbortSignal} signal
 * @returns {{ charts: Chart[], legend: HTMLElement }}
 */
export function distribution(view, { select, pick }, signal) {
  const bins = () => usedBins(view().histogram);
  const places = () => bins().map((_b, i) => i);
  const causes = () => Object.keys(view().by_cause).filter((c) => bins().some((b) => (b.slow_by_cause[c] ?? 0) > 0));
  const layers = () => causes().map((c) => bins().map((b) => b.slow_by_cause[c] ?? 0));
  /** @param {number} i */
  const say = (i) => {
    const bin = bins()[i];
    if (!bin) return "";
    const slow = causes().filter((c) => bin.slow_by_cause[c]).map((c) => `${c} ${bin.slow_by_cause[c]}`);
    return `${binText(bin)}: ${count(bin.requests, "request")}${slow.length ? `; slow: ${slow.join(", ")}` : ""}`;
  };
  /** @param {Span | null} span */
  const chosen = (span) => select(span ? bins().filter((_b, i) => i + 0.5 > span.from && i - 0.5 < span.to) : []);
  const shared = () => ({
    scales: { x: { time: false, range: () => /** @type {[number, number]} */ ([-0.5, Math.max(bins().length, 1) - 0.5]) }, y: { range: /** @type {uPlot.Range.Function} */ ((_u, _lo, hi) => [0, (hi || 1) * 1.15]) } },
    cursor: { sync: { key: "whyspan-tail-bins", scales: /** @type {[string, null]} */ (["x", null]) }, points: { show: false } },
  });
  const counts = () => axis({ size: Y_SIZE, space: 24, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6], values: (_u, splits) => splits.map((v) => (Number.isInteger(v) ? count(v) : "")) });
  const common = { say, select: chosen, spanOf: (/** @type {number} */ i) => ({ from: i - 0.5, to: i + 0.5 }) };
  const all = new Chart({
    ...common, label: "Requests by latency", height: 96,
    data: () => /** @type {any} */ ([places(), bins().map((b) => b.requests)]),
    options: () => ({
      ...shared(),
      axes: [axis({ size: 6, values: () => [], ticks: { show: false }, grid: { show: false } }), counts()],
      series: [{}, { label: "all", stroke: token("--usual"), width: 0, fill: token("--usual"), points: { show: false }, paths: /** @type {any} */ (uPlot.paths.bars)({ size: [0.86, 64], align: 0 }) }],
    }),
    pick: (i) => bins()[i] && pick(/** @type {Bin} */ (bins()[i]), ""),
  }, signal);
  const slow = new Chart({
    ...common, label: "Slow and failed requests by latency and cause", height: 150,
    data: () => /** @type {any} */ ([places(), ...layersOf(stacked(layers()))]),
    options: () => ({
      ...shared(),
      axes: [axis({ size: 24, space: 62, grid: { show: false }, incrs: [1, 2, 3, 4, 5, 10, 20], values: (_u, splits) => splits.map((i) => edge(bins()[i])) }), counts()],
      series: [{}, ...barSeries(causes(), 0).reverse()],
    }),
    pick: (i, y) => bins()[i] && pick(/** @type {Bin} */ (bins()[i]), causes()[layerAt(stacked(layers()), i, y)] ?? ""),
  }, signal);
  const legend = h("span", { class: "legend" }, h("span", { class: "key" }, h("span", { class: "swatch usual", "aria-hidden": "true" }), "all requests, above"), h("span", { class: "key soft" }, "slow by cause, below"));
  return { charts: [all, slow], legend };
}

/** @param {Bin | undefined} bin */
function edge(bin) {
  return bin ? (bin.upper_ms === null ? `> ${ms(bin.lower_ms, 2)}` : `≤ ${ms(bin.upper_ms, 2)}`) : "";
}
