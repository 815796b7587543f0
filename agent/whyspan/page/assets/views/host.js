/** The host: pressure and quotas, the state and the cost of the probes, what the agent itself uses and loses. */

import { get, onNews } from "../api.js";
import { fill, h, name } from "../dom.js";
import { endsNow, scope, timeQuery } from "../filters.js";
import { age, bytes, count, ms, percent, quantity, uptime } from "../format.js";
import { changed, go } from "../route.js";
import { groupsOf, seriesChart } from "./hostcharts.js";

/** @typedef {import("../shapes.js").HostView} HostView */

/** Probes in these states see all that they are for. */
const SEES = new Set(["attached"]);
/** Between two looks: the agent tells of itself every 10 s. */
const LOOK_MS = 10_000;

/**
 * @param {HTMLElement} root
 * @param {URLSearchParams} params since, until
 * @param {AbortSignal} signal
 */
export async function show(root, params, signal) {
  /** @returns {Promise<HostView>} */
  const ask = () => get("host", timeQuery(params), signal);
  let view = await ask();
  if (signal.aborted) return;
  const [state, tables, charts] = [h("div"), h("div", { class: "split" }), h("div", { class: "charts" })];
  /** @type {import("./hostcharts.js").HostChart[]} */
  let drawn = [];
  let leave = new AbortController();
  signal.addEventListener("abort", () => leave.abort(), { once: true });

  const drawCharts = () => {
    leave.abort();
    leave = new AbortController();
    drawn = groupsOf(view).map((group) => seriesChart(() => view, group, (span) => go("host", changed(params, span)), leave.signal));
    fill(charts, drawn.map((d) => d.element));
  };
  const draw = () => {
    fill(state, running(view));
    fill(tables, probes(view), h("div", { class: "column" }, agent(view), services(view), losses(view), sinks(view), gpus(view)));
  };
  draw();
  drawCharts();
  fill(root, h("h1", { class: "sr" }, "Host"),
    h("div", { class: "row filters" }, scope(params, null, (changes) => go("host", changed(params, changes)))),
    untold(view) ? nothing() : [state, charts, tables]);

  onNews(async () => {
    if (!endsNow(params)) return;
    const fresh = await ask().catch(() => null); // the next news asks again
    if (!fresh || signal.aborted) return;
    if (untold(view)) return untold(fresh) ? undefined : go("host", params); // there is something now
    const same = fresh.series.map((s) => s.key).join() === view.series.map((s) => s.key).join();
    view = fresh;
    draw();
    if (same) for (const chart of drawn) chart.update();
    else drawCharts();
  }, signal, LOOK_MS);
}

/** Whether nothing is known of the host at all. @param {HostView} view */
function untold(view) {
  return view.collector_unix_ms === null && !view.series.some((s) => s.values.some((v) => v !== null));
}

function nothing() {
  return h("section", { class: "empty card" },
    h("h2", {}, "No collector has written to this store"),
    h("p", {}, "The host, the probes and what they cost are known from the first seconds of ", h("code", {}, "whyspan run"), " on."));
}

/** @param {HostView} view */
function running(view) {
  if (view.running) return null;
  const last = view.collector_unix_ms;
  return h("p", { class: "notice warn", role: "status" },
    last === null ? "No collector has written to this store." : `The collector has not told of itself since ${age(Date.now() - last)}: what is below is from then.`);
}

/** @typedef {import("../dom.js").Child} Child */

/** @param {string} title @param {...(Child | Child[])} content */
function card(title, ...content) {
  return h("section", { class: "card", "aria-label": title }, h("div", { class: "head" }, h("h2", {}, title)), content.flat());
}

/**
 * @param {string} label what the table is
 * @param {[string, boolean][]} heads text and whether its column has numbers
 * @param {Child[][]} rows the first cell is the row's head
 */
function grid(label, heads, rows) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, h("table", { class: "table" },
    h("thead", {}, h("tr", {}, heads.map(([text, num]) => h("th", { scope: "col", class: num ? "num" : null }, text)))),
    h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((cell, i) =>
      i === 0 ? h("th", { scope: "row", class: "rowhead" }, cell) : h("td", { class: heads[i]?.[1] ? "num" : null }, cell)))))));
}

/** @param {HostView} view */
function probes(view) {
  const order = [...view.probes].sort((a, b) => b.core_ratio - a.core_ratio || a.name.localeCompare(b.name));
  const cost = order.reduce((sum, p) => sum + p.core_ratio, 0);
  return h("section", { class: "card", "aria-label": "Probes" },
    h("div", { class: "head" }, h("h2", {}, "Probes"), order.length ? h("span", { class: "soft" }, `${percent(cost)} of a core in all, measured by the kernel`) : null),
    order.length ? grid("Probes, their state and cost", [["Probe", false], ["State", false], ["Hits", true], ["Per hit", true], ["Of a core", true], ["Lost", true]],
      order.map((p) => [
        h("span", { title: p.title }, name(p.name, 40)),
        h("span", { class: SEES.has(p.state) ? "good" : "warn", title: p.reason || null }, p.state || "unknown", p.reason ? h("span", { class: "soft small block" }, name(p.reason, 120)) : null),
        p.hits_per_s ? quantity(p.hits_per_s, "/s") : "–",
        p.ns_per_hit ? ms(p.ns_per_hit / 1e6) : "–",
        p.hits_per_s ? percent(p.core_ratio) : "–",
        p.lost ? h("span", { class: "bad" }, count(p.lost)) : "0",
      ])) : h("p", { class: "soft" }, "No probe has told of itself."));
}

/** @param {HostView} view */
function agent(view) {
  const told = view.agent.filter((a) => a.tgid > 0);
  return card("The agent itself", told.length
    ? grid("The agent's processes", [["Process", false], ["Of a core", true], ["Memory", true], ["Up", true]],
        told.map((a) => [h("span", {}, a.name, h("span", { class: "soft" }, ` ${a.tgid}`)), percent(a.core_ratio), bytes(a.rss_bytes), uptime(a.uptime_s)]))
    : h("p", { class: "soft" }, "None has told of itself."));
}

/** @param {HostView} view */
function services(view) {
  return card("Watched", view.services.length
    ? grid("Watched services", [["Service", false], ["Processes", true], ["CPU quota", true]],
        view.services.map((s) => [name(s.service, 48), count(s.processes), s.cpu_limit === null ? h("span", { class: "soft" }, "none") : count(s.cpu_limit, "CPU")]))
    : h("p", { class: "soft" }, "No process is watched."));
}

/** @param {HostView} view */
function losses(view) {
  const lost = view.losses.filter((l) => l.value > 0);
  return card("Lost", lost.length
    ? grid("What was lost", [["What", false], ["Lost", true]], lost.map((l) => [name(l.name, 60), h("span", { class: "bad" }, count(l.value))]))
    : view.collector_unix_ms === null ? h("p", { class: "soft" }, "Not known: no collector has told of it.") : h("p", { class: "good" }, "Nothing was lost or dropped."));
}

/** @param {HostView} view */
function sinks(view) {
  if (!view.sinks.length) return null;
  return card("Where findings go", grid("Sinks", [["Sink", false], ["State", false], ["Details", false]], view.sinks.map((s) => [
    name(s.name, 40),
    s.state ? h("span", { class: "bad" }, name(s.state, 120)) : h("span", { class: "good" }, "arrives"),
    h("span", { class: "soft small" }, Object.entries(s.details).filter(([, v]) => v !== "" && v !== null).map(([k, v]) => `${k.replaceAll("_", " ")} ${typeof v !== "number" ? v : k.endsWith("bytes") ? bytes(v) : count(v)}`).join(", ")),
  ])));
}

/** @param {HostView} view */
function gpus(view) {
  return card("GPUs", view.gpus.length
    ? view.gpus.map((gpu) => h("dl", { class: "facts" }, Object.entries(gpu).map(([k, v]) => [h("dt", {}, k.replaceAll("_", " ")), h("dd", {}, name(v))]).flat()))
    : h("p", { class: "soft" }, view.gpu_state || "None is known."));
}
