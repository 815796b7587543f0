/** The tail: how long requests take over time, and what the slow part is made of. A click or a brush leads to the requests. */

import { get, onNews } from "../api.js";
import { button, fill, h } from "../dom.js";
import { endsNow, moment, scope, timeQuery } from "../filters.js";
import { changed, go } from "../route.js";
import { causesOverTime, distribution, quantilesOverTime } from "./tailcharts.js";
import { dataTables, known, latencySelected, listOf, ranked, ranks, summary, timeSelected } from "./tailparts.js";

/** @typedef {import("../charts.js").Span} Span */

/** Between two looks: the whole time is counted anew. */
const REST_MS = 5_000;

/**
 * @param {HTMLElement} root
 * @param {URLSearchParams} params service, since, until; `of`: ttft
 * @param {AbortSignal} signal
 */
export async function show(root, params, signal) {
  const ask = () => get("tail", { service: params.get("service"), ...timeQuery(params) }, signal);
  let view = await ask();
  if (signal.aborted) return;
  const now = () => view;
  const selection = h("div", { class: "selection" });
  const [bar, headline, ranking, tables] = [h("div", { class: "row filters" }), h("div", { class: "headline" }), h("div"), h("div")];

  /** @param {number} index @param {string} [cause] */
  const atStep = (index, cause = "") => {
    const from = view.times_unix_ms[index];
    if (from !== undefined) go("requests", listOf(params, { cause: known(cause), since: moment(from), until: moment(from + view.step_ms) }));
  };
  /** @param {Span | null} span seconds; one selection at a time on the page */
  const selectTime = (span) => {
    for (const panel of [latency, causes]) panel.chart.mark(span);
    if (span) bins.charts.forEach((chart) => chart.mark(null));
    fill(selection, span && timeSelected(view, span, params, () => selectTime(null)));
  };
  /** @param {import("./tailcharts.js").Bin[]} chosen */
  const selectLatency = (chosen) => {
    if (chosen.length) for (const panel of [latency, causes]) panel.chart.mark(null);
    else for (const chart of bins.charts) chart.mark(null);
    fill(selection, chosen.length ? latencySelected(chosen, params, () => selectLatency([])) : null);
  };
  const ttft = params.get("of") === "ttft";
  const latency = quantilesOverTime(now, ttft ? "ttft_quantiles" : "quantiles", { select: selectTime, pick: atStep }, signal);
  const causes = causesOverTime(now, { select: selectTime, pick: atStep }, signal);
  const bins = distribution(now, {
    select: selectLatency,
    pick: (bin, cause) => go("requests", listOf(params, { cause: known(cause), min_ms: bin.lower_ms || null, max_ms: bin.upper_ms, which: cause ? null : "all" })),
  }, signal);

  const draw = () => {
    fill(bar, scope(params, view.services, (changes) => go("tail", changed(params, changes))));
    fill(headline, summary(view, params));
    fill(ranking, ranked(view, params));
    fill(tables, dataTables(view));
  };
  draw();
  const of = (/** @type {string} */ label, /** @type {string | null} */ value) =>
    button(label, () => go("tail", changed(params, { of: value }), { replace: true }), { "aria-pressed": String(ttft === (value === "ttft")) });
  const nothing = view.requests === 0 && ranks(view).length === 0;
  fill(root, h("h1", { class: "sr" }, "Tail"), bar, nothing ? empty(params) : [
    headline,
    h("div", { class: "tail" },
      h("section", { class: "card over-time", "aria-label": "Over time" },
        h("div", { class: "head" },
          h("h2", {}, ttft ? "Time to first token" : "Latency"),
          h("div", { class: "segments", role: "group", "aria-label": "Of" }, of("Whole", null), of("First token", "ttft")),
          latency.legend),
        latency.chart.element,
        h("div", { class: "head" }, h("h2", {}, "Time lost, by cause"), causes.legend),
        causes.chart.element),
      h("section", { class: "card made-of", "aria-label": "Causes" }, h("div", { class: "head" }, h("h2", {}, "What the slow part is made of")), ranking),
      h("section", { class: "card bins", "aria-label": "Distribution" },
        h("div", { class: "head" }, h("h2", {}, "Distribution of latency"), bins.legend),
        bins.charts.map((chart) => chart.element))),
    selection,
    tables,
  ]);

  onNews(async () => {
    if (!endsNow(params) || selection.hasChildNodes()) return; // who selects wants it to hold still
    const fresh = await ask().catch(() => null); // the next news asks again
    if (!fresh || signal.aborted) return;
    const same = Object.keys(fresh.by_cause).join() === Object.keys(view.by_cause).join();
    view = fresh;
    draw();
    for (const chart of [latency.chart, causes.chart, ...bins.charts]) same ? chart.update() : chart.rebuild();
  }, signal, REST_MS);
}

/** @param {URLSearchParams} params */
function empty(params) {
  const filtered = params.get("service") || params.get("until") || params.get("since");
  return h("section", { class: "empty card" },
    h("h2", {}, "No requests in this time"),
    h("p", {}, filtered ? "Choose another service or a longer time." : "Nothing was stored in the last hour. Is the collector running?"),
    h("p", { class: "row centred" }, button("Last 7 days", () => go("tail", { since: "7d" })), button("The host", () => go("host"))));
}
