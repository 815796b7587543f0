/** The list of requests: filtered, sorted, a page at a time, newest first as they come. */

import { get, onNews } from "../api.js";
import { button, fill, h } from "../dom.js";
import { causeOptions, choice, endsNow, removable, scope, timeQuery } from "../filters.js";
import { count, ms } from "../format.js";
import { changed, go, hrefTo } from "../route.js";
import { drawRows, ROW_LIMIT, sortOf, table } from "./rows.js";

/** Filters of the list by their names in the address and the API: what the choice is called, and which facet fills it. */
const FILTERS = /** @type {const} */ ([
  ["cause", "Cause", "causes"],
  ["culprit", "Culprit", "culprits"],
  ["tenant", "Tenant", "tenants"],
  ["model", "Model", "models"],
  ["route", "Route", "routes"],
]);
/** Which requests, by `which` of the address; none is those that were slow or failed. */
const WHICH = /** @type {const} */ ([["", "Slow or failed"], ["failed", "Failed"], ["all", "All stored"]]);
/** Filters that a choice shows. */
const NAMED = [...FILTERS.map(([key]) => key), "outcome"];
const OUTCOMES = ["ok", "error", "reset", "killed", "lost", "open"];

/**
 * What is asked of the server.
 *
 * @param {URLSearchParams} params
 */
export function listQuery(params) {
  const which = params.get("which") ?? "";
  const { sort, order } = sortOf(params);
  /** @type {Record<string, string>} */
  const query = { service: params.get("service") ?? "", ...timeQuery(params), sort, order };
  for (const key of [...NAMED, "min_ms", "max_ms"]) query[key] = params.get(key) ?? "";
  if (which === "") query.slow = "true";
  if (which === "failed") query.failed = "true";
  return query;
}

/** @typedef {import("../shapes.js").Facets} Facets */

/** Facets stay for so long: whoever goes from filter to filter has them at once. */
const FACETS_MS = 30_000;
/** @type {Facets | null} */
let lastFacets = null;
let lastScope = "";
let lastAsked = 0;

/** What the requests of a service and a time can be filtered by. @param {Record<string, string>} asked @returns {Promise<Facets>} */
async function facetsOf(asked) {
  const wanted = new URLSearchParams(asked).toString();
  if (wanted !== lastScope) lastFacets = null;
  if (lastFacets && Date.now() - lastAsked < FACETS_MS) return lastFacets;
  /** @type {Facets} */
  const found = await get("facets", asked);
  [lastFacets, lastScope, lastAsked] = [found, wanted, Date.now()];
  return found;
}

/**
 * @param {HTMLElement} root
 * @param {URLSearchParams} params filters, sort, order, cursor, from (how many come before)
 * @param {AbortSignal} signal
 */
export async function show(root, params, signal) {
  const cursor = params.get("cursor") ?? "";
  const from = Math.max(Number(params.get("from")) || 0, 0);
  const query = listQuery(params);
  const ask = () => get("requests", { ...query, limit: ROW_LIMIT, cursor }, signal);
  const coming = facetsOf({ service: query.service ?? "", since: query.since ?? "", until: query.until ?? "" });
  const page = await ask(); // the list does not wait for what it can be filtered by
  if (signal.aborted) return;
  const body = h("tbody", { role: "rowgroup" });
  const [counted, pager, newer] = [h("span", { class: "strong" }), h("nav", { class: "row pager", "aria-label": "Pages" }), h("div", { class: "newer", role: "status" })];
  let seen = page;

  /** @param {any} next @param {boolean} [mark] */
  const draw = (next, mark = false) => {
    drawRows(body, next.rows, { showService: !params.get("service"), known: mark ? new Set(seen.rows.map((/** @type {any} */ r) => r.id)) : null });
    seen = next;
    const last = from + next.rows.length;
    counted.textContent = next.total === 0 ? "None" : `${count(from + 1)}–${count(last)} of ${count(next.total, "request")}`;
    fill(pager,
      from ? h("a", { class: "btn", href: hrefTo("requests", changed(params, { cursor: null, from: null })) }, "First page") : null,
      next.next ? h("a", { class: "btn", rel: "next", href: hrefTo("requests", changed(params, { cursor: next.next, from: last })) }, "Next page") : null);
    fill(newer);
  };
  draw(page);

  /** @param {Record<string, string | null>} changes */
  const change = (changes) => go("requests", changed(params, { cursor: null, from: null, ...changes }));
  const [scopes, filters] = [h("div", { class: "row filters" }), h("div", { class: "row filters choose" })];
  /** @param {Facets | null} facets null: not known yet */
  const drawFilters = (facets) => {
    fill(scopes, scope(params, facets?.services ?? [], change));
    fill(filters, which(params, change), choices(params, facets, change), limits(params, change));
  };
  const had = lastFacets;
  drawFilters(had);
  coming.then((facets) => facets !== had && !signal.aborted && drawFilters(facets), () => undefined); // the list is good without
  const empty = page.rows.length === 0;
  fill(root,
    h("h1", { class: "sr" }, "Requests"),
    scopes,
    filters,
    h("section", { class: "card list", "aria-label": "Requests" },
      h("div", { class: "head" }, counted, newer, h("span", { class: "grow" }), sorter(params, change)),
      empty ? nothing(params, change) : table(params, body),
      pager));
  body.addEventListener("keydown", walk, { signal });

  onNews(async (news) => {
    if (news !== "requests" || !endsNow(params) || cursor) return;
    const fresh = await ask().catch(() => null); // the next news asks again
    if (!fresh || signal.aborted) return;
    const known = new Set(seen.rows.map((/** @type {any} */ r) => r.id));
    const more = fresh.rows.filter((/** @type {any} */ r) => !known.has(r.id)).length;
    if (!more) return;
    if (empty) return go("requests", params); // there is a table now
    const inUse = body.matches(":hover") || body.contains(document.activeElement);
    if (!inUse) draw(fresh, true);
    else fill(newer, button(`${count(more)} new`, () => draw(fresh, true), { class: "btn primary" })); // rows stay under the pointer
  }, signal);
}

/** @param {URLSearchParams} params @param {import("../filters.js").Change} change */
function which(params, change) {
  const now = params.get("which") ?? "";
  return h("div", { class: "segments", role: "group", "aria-label": "Which" },
    WHICH.map(([value, label]) => button(label, () => change({ which: value }), { "aria-pressed": String(now === value) })));
}

/** @param {URLSearchParams} params @param {Facets | null} facets @param {import("../filters.js").Change} change */
function choices(params, facets, change) {
  return [
    ...FILTERS.map(([key, label, facet]) => {
      const value = params.get(key) ?? "";
      const found = facets?.[facet] ?? [];
      const options = key === "cause" ? causeOptions(found) : found;
      return !facets || options.length > 1 || value ? choice(label, value, options, (v) => change({ [key]: v })) : null; // one: nothing to choose
    }),
    choice("Outcome", params.get("outcome") ?? "", OUTCOMES, (v) => change({ outcome: v })),
  ];
}

/** Limits that no choice shows, and what takes all filters off. @param {URLSearchParams} params @param {import("../filters.js").Change} change */
function limits(params, change) {
  const [min, max] = [params.get("min_ms"), params.get("max_ms")];
  const range = min && max ? `${ms(Number(min))} – ${ms(Number(max))}` : min ? `at least ${ms(Number(min))}` : `at most ${ms(Number(max))}`;
  const off = Object.fromEntries([...NAMED, "min_ms", "max_ms"].map((key) => [key, null]));
  return [
    min || max ? removable(range, "latency", () => change({ min_ms: null, max_ms: null })) : null,
    filtered(params) ? button("Clear", () => change(off), { class: "btn quiet", "aria-label": "Clear the filters" }) : null,
  ];
}

/** @param {URLSearchParams} params */
function filtered(params) {
  return [...NAMED, "min_ms", "max_ms"].some((key) => params.get(key));
}

/** The order, where the columns' heads are not seen (a narrow page). @param {URLSearchParams} params @param {import("../filters.js").Change} change */
function sorter(params, change) {
  const { sort, order } = sortOf(params);
  const options = /** @type {[string, string][]} */ ([["start-desc", "newest"], ["start-asc", "oldest"], ["latency-desc", "slowest"], ["ttft-desc", "latest first token"], ["excess-desc", "most lost"]]);
  return h("span", { class: "narrow-only" }, choice("Order", `${sort}-${order}`, options, (v) => {
    const [s = "", o = ""] = v.split("-");
    change({ sort: s, order: o });
  }, ""));
}

/** @param {URLSearchParams} params @param {import("../filters.js").Change} change */
function nothing(params, change) {
  const slow = !params.get("which");
  return h("div", { class: "empty" },
    h("h2", {}, slow ? "No slow request" : "No request"),
    h("p", {}, filtered(params) ? "None in this time fits the filters." : slow ? "None in this time was slow." : "None was stored in this time."),
    h("p", { class: "row centred" },
      slow ? button("All stored requests", () => change({ which: "all" })) : null,
      button("Last 7 days", () => change({ since: "7d", until: null }))));
}

/** Arrow keys go from request to request. @param {KeyboardEvent} event */
function walk(event) {
  const step = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 }[event.key];
  if (!step || !(event.target instanceof HTMLElement)) return;
  const links = [...(event.target.closest("tbody")?.querySelectorAll("a.over") ?? [])];
  const at = links.indexOf(event.target);
  const next = links[at + step];
  if (at < 0 || !(next instanceof HTMLElement)) return;
  event.preventDefault();
  next.focus();
}

