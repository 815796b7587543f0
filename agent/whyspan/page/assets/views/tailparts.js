/** What the tail says in words and tables: the headline, the ranking of causes, what is selected, the numbers of the charts. */

import { button, h } from "../dom.js";
import { familyClass, shades } from "../colours.js";
import { causeTag, moment } from "../filters.js";
import { count, ms, percent, when } from "../format.js";
import { changed, go, hrefTo } from "../route.js";
import { binText, usedBins } from "./tailcharts.js";

/** @typedef {import("../charts.js").Span} Span */
/** @typedef {import("./tailcharts.js").Bin} Bin */
/** @typedef {{ cause: string, ms: number, requests: number }} Rank */

export const OTHER = "other";

/** @param {number[]} values */
function total(values) {
  return values.reduce((a, b) => a + b, 0);
}

/**
 * Causes by what they cost, greatest first, `other` last.
 *
 * @param {any} view @param {number} [from] first step @param {number} [to] behind the last
 * @returns {Rank[]}
 */
export function ranks(view, from = 0, to = undefined) {
  return Object.keys(view.by_cause)
    .map((cause) => ({ cause, ms: total(view.by_cause[cause].slice(from, to)), requests: total((view.by_cause_requests[cause] ?? []).slice(from, to)) }))
    .filter((r) => r.ms > 0 || r.requests > 0)
    .sort((a, b) => Number(a.cause === OTHER) - Number(b.cause === OTHER) || b.ms - a.ms);
}

/** The list's filters that keep what the tail is about. @param {URLSearchParams} params @param {Record<string, string | number | null>} [more] */
export function listOf(params, more = {}) {
  const kept = new URLSearchParams();
  for (const key of ["service", "since", "until"]) if (params.get(key)) kept.set(key, params.get(key) ?? "");
  return changed(kept, more);
}

/** @param {any} view @param {URLSearchParams} params */
export function summary(view, params) {
  const all = ranks(view);
  const [first] = all;
  const lost = total(all.map((r) => r.ms));
  const p99 = view.quantiles.p99?.filter((/** @type {number | null} */ v) => v !== null) ?? [];
  /** @type {[string, string, string][]} */
  const figures = [
    [count(view.requests), view.requests === 1 ? "request" : "requests", ""],
    [count(view.slow), `slow${view.requests ? `, ${percent(view.slow / view.requests)}` : ""}`, hrefTo("requests", listOf(params))],
    [count(view.failed), "failed", hrefTo("requests", listOf(params, { which: "failed" }))],
  ];
  if (p99.length) figures.push([ms(Math.max(...p99)), "highest P99", ""]);
  return [
    first && lost > 0
      ? h("p", { class: "lead" }, h("a", { href: hrefTo("requests", listOf(params, { cause: known(first.cause), sort: "excess" })) }, causeTag(first.cause)),
          ` makes up ${percent(first.ms / lost)} of the slow part: ${ms(first.ms)} lost in ${count(first.requests, "request")}.`)
      : h("p", { class: "lead" }, view.requests ? "No request lost time to a cause." : ""),
    h("ul", { class: "figures" }, figures.map(([figure, label, href]) =>
      h("li", {}, h("span", { class: "figure" }, figure), href ? h("a", { href }, label) : h("span", { class: "soft" }, label)))),
    view.partial ? h("p", { class: "soft small" }, "The store does not reach back to the beginning of this time.") : null,
  ];
}

/** @param {string} cause a cause that the list can be filtered by, or nothing */
export function known(cause) {
  return cause === OTHER ? "" : cause;
}

/** What the slow part is made of. @param {any} view @param {URLSearchParams} params */
export function ranked(view, params) {
  const rows = ranks(view);
  if (!rows.length) return h("p", { class: "soft" }, "No request was slow or failed in this time.");
  const most = Math.max(...rows.map((r) => r.ms)) || 1;
  const all = total(rows.map((r) => r.ms)) || 1;
  const shade = shades(Object.keys(view.by_cause));
  return h("table", { class: "table ranks" },
    h("thead", {}, h("tr", {},
      h("th", { scope: "col" }, "Cause"), h("th", { scope: "col", class: "num" }, "Lost"),
      h("th", { scope: "col", class: "num" }, "Share"), h("th", { scope: "col", class: "num" }, "Requests"))),
    h("tbody", {}, rows.map((r) => {
      const href = hrefTo("requests", listOf(params, { cause: known(r.cause), sort: "excess" }));
      return h("tr", { class: `${familyClass(r.cause)} shade-${shade.get(r.cause) ?? 0}` },
        h("th", { scope: "row" },
          r.cause === OTHER ? h("span", { class: "cause" }, causeTag(r.cause)) : h("a", { class: "over", href }, causeTag(r.cause)),
          h("span", { class: "meter", "aria-hidden": "true", vars: { "--part": `${(r.ms / most) * 100}%` } })),
        h("td", { class: "num" }, ms(r.ms)),
        h("td", { class: "num" }, percent(r.ms / all)),
        h("td", { class: "num" }, count(r.requests)));
    })));
}

/**
 * @param {any} view @param {Span} span seconds @param {URLSearchParams} params @param {() => void} clear
 */
export function timeSelected(view, span, params, clear) {
  const step = view.step_ms / 1e3;
  const start = (view.times_unix_ms[0] ?? 0) / 1e3;
  const last = view.times_unix_ms.length;
  const from = Math.max(Math.floor((span.from - start) / step + 1e-6), 0);
  const to = Math.min(Math.max(Math.ceil((span.to - start) / step - 1e-6), from + 1), last);
  const [a, b] = [(start + from * step) * 1e3, (start + to * step) * 1e3];
  const found = ranks(view, from, to);
  const [first] = found;
  const slow = total(found.map((r) => r.requests));
  const times = { since: moment(a), until: moment(b) };
  return picked(
    [h("span", { class: "strong" }, `${when(a)} – ${when(b)}`), ` ${count(slow, "slow or failed request")}`, first ? [", most lost to ", causeTag(first.cause)] : ""].flat(),
    [
      button("Show them", () => go("requests", listOf(params, times)), { class: "btn primary" }),
      button("Zoom in", () => go("tail", changed(params, times))),
    ],
    clear,
  );
}

/** @param {Bin[]} bins @param {URLSearchParams} params @param {() => void} clear */
export function latencySelected(bins, params, clear) {
  const [first, last] = [bins[0], bins.at(-1)];
  if (!first || !last) return null;
  const slow = total(bins.flatMap((b) => Object.values(b.slow_by_cause)));
  const limits = { min_ms: first.lower_ms || null, max_ms: last.upper_ms };
  const all = count(total(bins.map((b) => b.requests)), "request");
  return picked(
    [h("span", { class: "strong" }, binText({ ...first, upper_ms: last.upper_ms })), ` ${all}, ${count(slow)} of them slow or failed`],
    [button("Show them", () => go("requests", listOf(params, { ...limits, which: slow ? null : "all" })), { class: "btn primary" })],
    clear,
  );
}

/** @param {import("../dom.js").Child[]} text @param {HTMLElement[]} actions @param {() => void} clear */
function picked(text, actions, clear) {
  return h("div", { class: "picked row", role: "status" }, h("span", {}, text), actions, button("Clear", clear, { class: "btn quiet" }));
}

/** The numbers of the charts, for who would rather read them. @param {any} view */
export function dataTables(view) {
  const causes = Object.keys(view.by_cause);
  const steps = times(view).map((t, i) => ({ t, i })).filter(({ i }) => view.counts[i] > 0 || causes.some((c) => view.by_cause_requests[c]?.[i] > 0));
  return h("details", { class: "card numbers" }, h("summary", {}, "The charts as tables"),
    numbers("By time", ["From", "Requests", "P50", "P90", "P99", "First token P99", ...causes], steps.map(({ t, i }) => [
      when(t), count(view.counts[i]),
      ...["p50", "p90", "p99"].map((q) => ms(view.quantiles[q]?.[i])), ms(view.ttft_quantiles.p99?.[i]),
      ...causes.map((c) => (view.by_cause[c][i] ? ms(view.by_cause[c][i]) : "")),
    ])),
    numbers("By latency", ["Latency", "Requests", ...causes], usedBins(view.histogram).map((b) => [
      binText(b), count(b.requests), ...causes.map((c) => (b.slow_by_cause[c] ? count(b.slow_by_cause[c]) : "")),
    ])));
}

/** @param {string} label @param {string[]} heads @param {string[][]} rows the first cell is the row's head */
function numbers(label, heads, rows) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, h("table", { class: "table" },
    h("caption", { class: "sr" }, label),
    h("thead", {}, h("tr", {}, heads.map((text, i) => h("th", { scope: "col", class: i ? "num" : null }, text)))),
    h("tbody", {}, rows.map(([head, ...cells]) => h("tr", {}, h("th", { scope: "row" }, head), cells.map((text) => h("td", { class: "num" }, text)))))));
}

/** @param {any} view @returns {number[]} */
function times(view) {
  return view.times_unix_ms;
}
