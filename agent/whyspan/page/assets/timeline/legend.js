// What the timeline's colours and marks mean: only those that this request has.

import { FAMILIES, familyClass } from "../colours.js";
import { h } from "../dom.js";
import { INFERRED, UNKNOWN_STATE, WAITING } from "./tracks.js";

/**
 * @param {import("./tracks.js").Track[]} tracks
 * @param {boolean} hasFirst whether a first byte is marked
 */
export function legendOf(tracks, hasFirst) {
  /** @type {Set<number>} */
  const families = new Set();
  let looks = 0;
  for (const track of tracks) {
    for (const family of track.families) families.add(family);
    looks |= track.looks;
  }
  const entries = FAMILIES.filter((_, i) => families.has(i)).map((family) => entry(`swatch ${familyClass(family)}`, family));
  const sample = `swatch ${familyClass("work")}`;
  if (looks & WAITING) entries.push(entry(`${sample} low`, "low: waiting"));
  if (looks & (INFERRED | UNKNOWN_STATE)) entries.push(entry(`${sample} hatch`, "hatched: inferred or unknown"));
  entries.push(entry("tl-key-path", "critical path"));
  if (hasFirst) entries.push(entry("tl-key-first", "first byte"));
  return h("ul", { class: "tl-legend small soft", "aria-label": "Legend" }, entries);
}

/**
 * @param {string} mark its class
 * @param {string} text
 */
function entry(mark, text) {
  return h("li", {}, h("span", { class: mark, "aria-hidden": "true" }), text);
}
