/** What a view is about: which service, which time, and (for the list) which requests. The address bar holds it. */

import { button, h, name } from "./dom.js";
import { when } from "./format.js";
import { FAMILIES, family, familyClass, hatched } from "./colours.js";

export const DEFAULT_SINCE = "1h";
const RANGES = /** @type {const} */ ([["15m", "15 min"], ["1h", "1 h"], ["6h", "6 h"], ["1d", "24 h"], ["7d", "7 days"]]);

/** @typedef {(changes: Record<string, string | null>) => void} Change */

/** The time asked for, as the server reads it. @param {URLSearchParams} params @param {string} [otherwise] */
export function timeQuery(params, otherwise = DEFAULT_SINCE) {
  return { since: params.get("since") || otherwise, until: params.get("until") ?? "" };
}

/** Whether the time asked for ends now, so that news belong to it. @param {URLSearchParams} params */
export function endsNow(params) {
  return !params.get("until");
}

/** A moment in the address bar. @param {number} unixMs */
export function moment(unixMs) {
  return new Date(unixMs).toISOString();
}

/** A cause with its swatch. @param {string} cause @param {boolean} [inferred] */
export function causeTag(cause, inferred = false) {
  return h("span", { class: `cause ${familyClass(cause)}` }, swatch(cause, inferred), name(cause, 40));
}

/** @param {string} cause @param {boolean} [inferred] */
export function swatch(cause, inferred = false) {
  return h("span", { class: `swatch ${familyClass(cause)}${hatched(cause, inferred) ? " hatch" : ""}`, "aria-hidden": "true" });
}

/**
 * A choice of one value, with an entry for all, which also says what it is a choice of.
 *
 * @param {string} label
 * @param {string} value the present one
 * @param {(string | [string, string])[]} options values, or values with what is shown
 * @param {(value: string) => void} choose
 * @param {string} [all] what the entry for all says
 */
export function choice(label, value, options, choose, all = `any ${label.toLowerCase()}`) {
  /** @type {[string, string][]} */
  const pairs = options.map((o) => (typeof o === "string" ? [o, o] : o));
  if (value && !pairs.some(([v]) => v === value)) pairs.unshift([value, value]);
  const select = h(
    "select",
    { on: { change: () => choose(select.value) }, "data-filter": label.toLowerCase() },
    all ? h("option", { value: "" }, all) : null,
    pairs.map(([v, shown]) => h("option", { value: v, selected: v === value }, shown.length > 60 ? shown.slice(0, 59) + "…" : shown)),
  );
  if (value) select.classList.add("set");
  return h("label", { class: "field" }, h("span", { class: "sr" }, label), select);
}

/** Causes, and above those of a family the family itself. @param {string[]} causes @returns {[string, string][]} */
export function causeOptions(causes) {
  /** @type {[string, string][]} */
  const options = [];
  for (const fam of FAMILIES) {
    const own = causes.filter((c) => family(c) === fam);
    const prefix = own[0]?.split(".", 1)[0] ?? "";
    if (own.length > 1 && own.every((c) => c.startsWith(prefix + "."))) options.push([prefix, `${prefix}.* (any)`]);
    for (const cause of own) options.push([cause, cause]);
  }
  return options;
}

/**
 * The service and the time.
 *
 * @param {URLSearchParams} params
 * @param {string[] | null} services null: there is no choice of one
 * @param {Change} change
 */
export function scope(params, services, change) {
  const service = params.get("service") ?? "";
  const since = params.get("since") || DEFAULT_SINCE;
  const fixed = Boolean(params.get("until")) || !/^\d+[smhd]$/.test(since);
  const ranges = h(
    "div",
    { class: "segments", role: "group", "aria-label": "Time" },
    RANGES.map(([value, label]) =>
      button(label, () => change({ since: value, until: null, cursor: null, from: null }), {
        "aria-pressed": String(!fixed && value === since),
      }),
    ),
  );
  return [
    services && choice("Service", service, services, (value) => change({ service: value, cursor: null, from: null }), "all services"),
    ranges,
    fixed ? fixedTime(params, change) : RANGES.some(([v]) => v === since) ? null : h("span", { class: "chip" }, `last ${since}`),
  ];
}

/** @param {URLSearchParams} params @param {Change} change */
function fixedTime(params, change) {
  const [from, to] = [shownTime(params.get("since")), shownTime(params.get("until"))];
  return removable(`${from || "start"} – ${to || "now"}`, "time", () => change({ since: null, until: null, cursor: null, from: null }));
}

/** @param {string | null} text */
function shownTime(text) {
  const at = Date.parse(text ?? "");
  return Number.isNaN(at) ? (text ?? "") : when(at);
}

/**
 * A filter that is set, and what takes it off.
 *
 * @param {string} label @param {string} what @param {() => void} remove
 */
export function removable(label, what, remove) {
  return h("span", { class: "chip" }, name(label, 60), button("×", remove, { class: "x", "aria-label": `Remove the filter by ${what}` }));
}
