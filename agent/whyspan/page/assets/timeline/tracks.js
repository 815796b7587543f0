// The lanes of a request as typed arrays: what is drawn, searched and walked on every frame.

import { FAMILIES, family as familyOf } from "../colours.js";

/** Bits of `Track.look`. */
export const WAITING = 1;
export const INFERRED = 2;
export const UNKNOWN_STATE = 4;
/** Of a run of pieces that share pixels, how much of the time they cover: 0 all, 3 a quarter or less. */
export const SPARSE_SHIFT = 3;
const UNKNOWN_FAMILY = FAMILIES.indexOf("unknown");
const FAINT = 3 << SPARSE_SHIFT;
/** A step that served this request, as the server calls it; others' are fainter. */
const OWN_STEP = "step";
/** The family index of what is no cause: phases, steps, streams. */
export const PLAIN = 255;

const RUNS = new Set(["running", ""]);
const WAITS = new Set(["runnable", "throttled", "blocked", "wakeup"]);
const FAMILY_INDEX = new Map(FAMILIES.map((name, i) => [/** @type {string} */ (name), i]));

/** @typedef {import("../shapes.js").Lane} Lane */

/**
 * @typedef {object} Track
 * @property {Lane} lane
 * @property {number} count
 * @property {Float64Array} start
 * @property {Float64Array} end
 * @property {Uint8Array} family index in FAMILIES, or PLAIN
 * @property {Uint8Array} look WAITING | INFERRED | UNKNOWN_STATE
 * @property {Set<number>} families that occur
 * @property {number} looks that occur, all bits
 * @property {Float64Array} at of a counter
 * @property {Float64Array} value of a counter
 * @property {number} most of a counter
 */

/**
 * The critical path: for each step of it the track, the piece in it, its time and its looks.
 * @typedef {object} Walk
 * @property {number} count
 * @property {Int32Array} track
 * @property {Int32Array} piece
 * @property {Float64Array} start
 * @property {Float64Array} end
 * @property {Uint8Array} family
 * @property {Uint8Array} look
 * @property {number} inferred ns of it
 * @property {number} unknown ns of it
 */

/** A piece of a track. @typedef {{ track: number, piece: number }} Spot */

/**
 * @param {Lane} lane
 * @returns {Track}
 */
export function toTrack(lane) {
  const spans = lane.spans ?? [];
  const points = lane.points ?? [];
  const count = spans.length;
  /** @type {Track} */
  const track = {
    lane,
    count,
    start: new Float64Array(count),
    end: new Float64Array(count),
    family: new Uint8Array(count),
    look: new Uint8Array(count),
    families: new Set(),
    looks: 0,
    at: new Float64Array(points.length),
    value: new Float64Array(points.length),
    most: 0,
  };
  /** @type {Map<string, number>} */
  const families = new Map();
  const ofThread = lane.kind === "thread";
  let looks = 0;
  for (let i = 0; i < count; i++) {
    const span = spans[i];
    const state = span[2];
    const cause = span[3];
    track.start[i] = span[0];
    track.end[i] = span[1];
    let family = families.get(cause);
    if (family === undefined) {
      family = cause ? (FAMILY_INDEX.get(familyOf(cause)) ?? PLAIN) : PLAIN;
      families.set(cause, family);
      track.families.add(family);
    }
    track.family[i] = family;
    let look = span[5] ? INFERRED : 0;
    if (ofThread && WAITS.has(state)) look |= WAITING;
    else if (ofThread && !RUNS.has(state)) look |= UNKNOWN_STATE;
    else if (lane.kind === "steps" && state !== OWN_STEP) look |= FAINT;
    track.look[i] = look;
    looks |= look;
  }
  track.looks = looks;
  for (let i = 0; i < points.length; i++) {
    track.at[i] = points[i][0];
    track.value[i] = points[i][1];
    if (points[i][1] > track.most) track.most = points[i][1];
  }
  return track;
}

/**
 * Returns the critical path over *tracks*; what names no piece is left out.
 * @param {[number, number][]} path
 * @param {Track[]} tracks
 * @returns {Walk}
 */
export function toWalk(path, tracks) {
  const most = path.length;
  /** @type {Walk} */
  const walk = {
    count: 0,
    track: new Int32Array(most),
    piece: new Int32Array(most),
    start: new Float64Array(most),
    end: new Float64Array(most),
    family: new Uint8Array(most),
    look: new Uint8Array(most),
    inferred: 0,
    unknown: 0,
  };
  let count = 0;
  for (let k = 0; k < most; k++) {
    const on = tracks[path[k][0]];
    const i = path[k][1];
    if (!on || !(i >= 0 && i < on.count)) continue;
    const look = on.look[i];
    const length = on.end[i] - on.start[i];
    walk.track[count] = path[k][0];
    walk.piece[count] = i;
    walk.start[count] = on.start[i];
    walk.end[count] = on.end[i];
    walk.family[count] = on.family[i];
    walk.look[count++] = look;
    if (look & UNKNOWN_STATE || on.family[i] === UNKNOWN_FAMILY) walk.unknown += length;
    else if (look & INFERRED) walk.inferred += length;
  }
  if (count < most) {
    for (const key of /** @type {const} */ (["track", "piece", "start", "end", "family", "look"])) {
      Object.assign(walk, { [key]: walk[key].subarray(0, count) });
    }
  }
  walk.count = count;
  return walk;
}

/**
 * Returns the first index whose value is greater than *key*; *sorted* ascends.
 * @param {Float64Array} sorted
 * @param {number} key
 */
export function firstAfter(sorted, key) {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (sorted[middle] > key) high = middle;
    else low = middle + 1;
  }
  return low;
}

/**
 * Returns the index of the piece that covers most of [from, to], or -1.
 * @param {Track} track
 * @param {number} from
 * @param {number} to
 */
export function pieceWithin(track, from, to) {
  let best = -1;
  let most = 0;
  for (let i = firstAfter(track.end, from); i < track.count && track.start[i] < to; i++) {
    const shared = Math.min(track.end[i], to) - Math.max(track.start[i], from);
    if (shared > most) {
      most = shared;
      best = i;
    }
  }
  return best;
}

/**
 * The critical path as one track: its pieces by time, whatever their lanes.
 * @param {Walk} walk
 * @returns {Track}
 */
export function pathTrack({ count, start, end, family, look }) {
  const none = new Float64Array(0);
  const lane = { key: "path", kind: "thread", label: "critical path", tgid: 0, tid: 0, spans: [], points: [], unit: "" };
  return { lane, count, start, end, family, look, families: new Set(), looks: 0, at: none, value: none, most: 0 };
}

/**
 * Where on the path a piece is, or -1.
 * @param {Walk} walk
 * @param {Track[]} tracks
 * @param {Spot} spot
 */
export function stepOf(walk, tracks, spot) {
  const start = tracks[spot.track].start[spot.piece];
  for (let i = firstAfter(walk.start, start) - 1; i >= 0 && walk.start[i] === start; i--) {
    if (walk.track[i] === spot.track && walk.piece[i] === spot.piece) return i;
  }
  return -1;
}
