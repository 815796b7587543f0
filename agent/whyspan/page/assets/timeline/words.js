// A piece of a lane in words: for the tooltip, the line below the timeline, and the table.

import { plain } from "../dom.js";
import { ns, percent, quantity } from "../format.js";
import { firstAfter } from "./tracks.js";

const MOST = 200; // characters of a name or a detail

/** What a thread's states mean, for people. */
const STATES = new Map([
  ["running", "running"],
  ["runnable", "waiting for a CPU"],
  ["throttled", "throttled by a CPU quota"],
  ["blocked", "blocked"],
  ["wakeup", "woken, not yet running"],
  ["unknown", "state unknown"],
]);

/**
 * @typedef {object} Words
 * @property {string} what cause, or the phase's or step's name
 * @property {string} cause empty where it has none
 * @property {string} state
 * @property {string} where the lane
 * @property {string} at
 * @property {string} length
 * @property {string} detail
 * @property {boolean} inferred
 */

/**
 * @param {import("./tracks.js").Track} track
 * @param {number} piece
 * @returns {Words}
 */
export function wordsOf(track, piece) {
  const { lane } = track;
  const [start, end, state, cause, detail, inferred] = lane.spans[piece];
  const thread = lane.kind === "thread";
  return {
    what: thread ? cause : state || cause,
    cause,
    state: thread ? (STATES.get(state) ?? state) : "",
    where: lane.tid ? `${plain(lane.label, MOST)} [${lane.tid}]` : plain(lane.label, MOST),
    at: ns(start, 5),
    length: ns(end - start),
    detail: plain(detail, MOST),
    inferred,
  };
}

/**
 * The same as one line.
 * @param {Words} w
 */
export function sentenceOf(w) {
  const parts = [`${w.what}${w.inferred ? " (inferred)" : ""}`, `at ${w.at} for ${w.length}`, w.where, w.state, w.detail];
  return parts.filter(Boolean).join(" · ");
}

/**
 * The value of a counter at *time* with its unit; empty before its first.
 * @param {import("./tracks.js").Track} track
 * @param {number} time
 */
export function valueAt(track, time) {
  const i = firstAfter(track.at, time) - 1;
  return i < 0 ? "" : measure(track.value[i], track.lane.unit);
}

/**
 * A value of a counter with its unit.
 * @param {number} value
 * @param {string} unit
 */
export function measure(value, unit) {
  if (unit === "ratio") return percent(value);
  return quantity(value, unit === "count" ? "" : unit);
}
