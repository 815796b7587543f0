/** Rows of the list of requests: the table, its columns, and how a request is drawn in one line. */

import { familyClass, hatched } from "../colours.js";
import { fill, h, name } from "../dom.js";
import { causeTag } from "../filters.js";
import { age, ms, percent, signedMs, stamp, when } from "../format.js";
import { changed, hrefTo, requestHref } from "../route.js";

/** @typedef {import("../shapes.js").Row} Row */

/** Rows of a page. */
export const ROW_LIMIT = 100;
const SORTS = ["start", "latency", "ttft", "excess"];
const TRACE_DIGITS = 8;

/** Heads of the columns: what they say, what sorts by them, their class. */
const COLUMNS = /** @type {const} */ ([
  ["Time", "start", ""],
  ["Request", "", ""],
  ["Latency", "latency", "num"],
  ["First token", "ttft", "num"],
  ["Cause", "", ""],
  ["Lost", "excess", "num"],
  ["Confidence", "", "num"],
  ["Culprit", "", ""],
]);

/** The order in the address, or the newest first. @param {URLSearchParams} params */
export function sortOf(params) {
  const sort = params.get("sort") ?? "";
  return { sort: SORTS.includes(sort) ? sort : "start", order: params.get("order") === "asc" ? "asc" : "desc" };
}

/** @param {URLSearchParams} params @param {HTMLElement} body */
export function table(params, body) {
  const { sort, order } = sortOf(params);
  // roles said outright: on a narrow page the rows are laid out as blocks, which would take them away
  return h("table", { class: "table requests", role: "table", "aria-label": "Requests" },
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, COLUMNS.map(([label, key, cls]) => {
      if (!key) return h("th", { scope: "col", role: "columnheader", class: cls || null }, label);
      const now = key === sort;
      const next = now && order === "desc" ? "asc" : "desc";
      return h("th", { scope: "col", role: "columnheader", class: cls || null, "aria-sort": now ? (order === "asc" ? "ascending" : "descending") : null },
        h("a", { class: "sort", href: hrefTo("requests", changed(params, { sort: key, order: next, cursor: null, from: null })) },
          label, h("span", { class: "arrow", "aria-hidden": "true" }, now ? (order === "asc" ? "▲" : "▼") : "")));
    }))),
    body);
}

/**
 * @param {HTMLElement} body
 * @param {Row[]} rows
 * @param {{ showService: boolean, known: Set<string> | null }} options `known`: those shown before; others are marked as new
 */
export function drawRows(body, rows, { showService, known }) {
  const longest = scaleOf(rows);
  const nowMs = Date.now();
  fill(body, rows.map((row) => drawn(row, longest, nowMs, showService, known !== null && !known.has(row.id))));
}

/** @param {Row} row @param {number} longest ms @param {number} nowMs @param {boolean} showService @param {boolean} isNew */
function drawn(row, longest, nowMs, showService, isNew) {
  const td = (/** @type {string} */ cls, /** @type {import("../dom.js").Child[]} */ ...children) => h("td", { role: "cell", class: cls }, children);
  return h("tr", { role: "row", class: `${familyClass(row.cause || "unknown")}${isNew ? " fresh" : ""}`, data: { id: row.id } },
    td("c-time nowrap", h("time", { datetime: new Date(row.start_unix_ms).toISOString(), title: `${stamp(row.start_unix_ms)}, ${age(nowMs - row.start_unix_ms)}` }, when(row.start_unix_ms, nowMs))),
    td("c-request",
      outcomeChip(row),
      h("a", { class: "over", href: requestHref(row.id), title: `Trace ${row.trace_id}` }, h("span", { class: "soft small" }, name(row.method, 12), " "), name(row.route || "(no route)", 60)),
      showService && row.service ? h("span", { class: "soft" }, " ", name(row.service, 32)) : null,
      h("span", { class: "soft mono trace" }, " ", row.trace_id.slice(0, TRACE_DIGITS))),
    td("c-latency num", lengthBar(row, longest), h("span", { class: "figure" }, ms(row.latency_ms))),
    td("c-ttft num", h("span", { class: "tag" }, "first token "), ms(row.ttft_ms)),
    td("c-cause", row.cause ? causeTag(row.cause) : h("span", { class: "soft" }, "–")),
    td("c-lost num", row.excess_ms ? signedMs(row.excess_ms) : h("span", { class: "soft" }, "–")),
    td("c-sure num", row.cause ? h("span", { title: `Confidence ${percent(row.confidence)}; ${percent(row.share)} of what this request lost` }, percent(row.confidence)) : h("span", { class: "soft" }, "–")),
    td("c-culprit", row.culprit ? h("span", {}, h("span", { class: "soft" }, `${row.culprit_kind} `), name(row.culprit, 40)) : h("span", { class: "soft" }, "–")));
}

/** What the whole width of a bar stands for: the longest, but for the one in twenty that would make the others vanish. @param {Row[]} rows */
function scaleOf(rows) {
  const sorted = rows.map((r) => r.latency_ms).sort((a, b) => a - b);
  return Math.max(sorted[Math.floor((sorted.length - 1) * 0.95)] ?? 0, 1e-9) * 1.1;
}

/** How long it took beside the others of this page; the part lost to its cause in the cause's colour. @param {Row} row @param {number} longest */
function lengthBar(row, longest) {
  const whole = Math.min(row.latency_ms / longest, 1) * 100;
  const lost = Math.min(row.excess_ms / Math.max(row.latency_ms, 1e-9), 1);
  return h("span", { class: row.latency_ms > longest ? "length beyond" : "length", "aria-hidden": "true", vars: { "--whole": `${whole}%`, "--lost-ratio": lost } },
    h("span", { class: hatched(row.cause || "unknown") ? "lost hatch" : "lost" }));
}

/** @param {Row} row */
function outcomeChip(row) {
  if (!row.failed && row.outcome === "ok") return null;
  const text = row.outcome === "error" || row.outcome === "ok" ? String(row.status || row.outcome) : row.status ? `${row.outcome} ${row.status}` : row.outcome;
  return h("span", { class: `chip ${row.failed ? "fail" : "note"}` }, text);
}
