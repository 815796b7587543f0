// What is under the pointer, what is picked, and how the selection moves.

import { fill, h } from "../dom.js";
import { AXIS } from "./layout.js";
import { firstAfter, pieceWithin, stepOf } from "./tracks.js";
import { sentenceOf, valueAt, wordsOf } from "./words.js";

const NEAR = 3; // px around the pointer in which a piece is looked for
const LEAST_BRUSH = 4; // px of a span chosen by dragging

/** What can be done, where nothing is picked. */
const hint = () =>
  h("span", { class: "soft" }, "Click a piece for its details. Wheel, pinch or + − zoom, drag or arrows move, a drag on the axis picks a span.");

/**
 * @typedef {import("./timeline.js").Timeline} Timeline
 * @typedef {import("./tracks.js").Spot} Spot
 */

/**
 * The row at a height, if any.
 * @param {Timeline} t
 * @param {number} y
 */
function rowAt(t, y) {
  const { rows, pinned } = t.layout;
  const inner = y < pinned ? y : y - pinned + t.scroll;
  return rows.find((row) => row.pinned === y < pinned && inner >= row.y && inner < row.y + row.height);
}

/**
 * The time at a place, ns.
 * @param {Timeline} t
 * @param {number} x
 */
function timeAt(t, x) {
  return t.span.from + ((x - t.layout.gutter) / t.plot) * t.span.width;
}

/**
 * The piece at a place, else null.
 * @param {Timeline} t
 * @param {number} x
 * @param {number} y
 * @returns {Spot | null}
 */
export function spotAt(t, x, y) {
  const row = x < t.layout.gutter ? undefined : rowAt(t, y);
  if (!row) return null;
  const perPixel = t.span.width / t.plot;
  const time = timeAt(t, x);
  const track = t.tracks[row.track];
  let piece = pieceWithin(track, time - perPixel / 2, time + perPixel / 2);
  if (piece < 0) piece = pieceWithin(track, time - NEAR * perPixel, time + NEAR * perPixel);
  return piece < 0 ? null : { track: row.track, piece };
}

/**
 * @param {Timeline} t
 * @param {Spot | null} spot
 */
export function pick(t, spot) {
  t.picked = spot;
  if (spot) {
    const words = wordsOf(t.tracks[spot.track], spot.piece);
    const step = stepOf(t.walk, t.tracks, spot);
    const on = step < 0 ? "not on the critical path" : `piece ${step + 1} of ${t.walk.count} on the critical path`;
    fill(t.parts.said, h("bdi", {}, sentenceOf(words)), h("span", { class: "soft" }, ` · ${on}`));
    bringIn(t, spot);
  } else {
    fill(t.parts.said, hint());
  }
  t.changed();
}

/**
 * Shows the picked piece alone, with a little around it.
 * @param {Timeline} t
 */
export function fitPicked(t) {
  if (!t.picked) return;
  const track = t.tracks[t.picked.track];
  const [start, end] = [track.start[t.picked.piece], track.end[t.picked.piece]];
  t.span.set(start - (end - start) * 0.25, end + (end - start) * 0.25);
  t.changed();
}

/**
 * Picks the next piece of the critical path, or the one before.
 * @param {Timeline} t
 * @param {number} by
 */
export function walkBy(t, by) {
  const { walk, picked, tracks, span } = t;
  if (!walk.count) return;
  let next = 0;
  const step = picked ? stepOf(walk, tracks, picked) : -1;
  if (step >= 0) next = step + by;
  else next = firstAfter(walk.end, picked ? tracks[picked.track].start[picked.piece] : span.from);
  next = Math.min(Math.max(next, 0), walk.count - 1);
  pick(t, { track: walk.track[next], piece: walk.piece[next] });
}

/**
 * Picks, in the next lane with pieces in the window, the one nearest in time.
 * @param {Timeline} t
 * @param {number} by
 */
export function laneBy(t, by) {
  const { picked, tracks, span } = t;
  const time = picked ? tracks[picked.track].start[picked.piece] : (span.from + span.to) / 2;
  for (let i = (picked ? picked.track : by > 0 ? -1 : tracks.length) + by; i >= 0 && i < tracks.length; i += by) {
    const track = tracks[i];
    const at = Math.min(firstAfter(track.end, Math.max(time, span.from)), track.count - 1);
    for (const piece of [at, at - 1]) {
      if (piece >= 0 && track.start[piece] < span.to && track.end[piece] > span.from) {
        pick(t, { track: i, piece });
        return;
      }
    }
  }
}

/**
 * Moves window and lanes so that a piece is in sight.
 * @param {Timeline} t
 * @param {Spot} spot
 */
function bringIn(t, spot) {
  const track = t.tracks[spot.track];
  const [start, end] = [track.start[spot.piece], track.end[spot.piece]];
  if (end <= t.span.from || start >= t.span.to) t.span.reveal(start, end);
  const row = t.layout.rows[spot.track];
  if (row.pinned) return;
  const room = t.height - t.layout.pinned;
  const { view } = t.parts;
  if (row.y < t.scroll) view.scrollTop = row.y;
  else if (row.y + row.height > t.scroll + room) view.scrollTop = row.y + row.height - room;
}

/**
 * @param {Timeline} t
 * @param {number | null} x null: the pointer is elsewhere
 * @param {number} y
 */
export function hover(t, x, y) {
  t.pointer = x;
  t.request();
  const { tip, canvas } = t.parts;
  const row = x === null ? undefined : rowAt(t, y);
  const track = row && t.tracks[row.track];
  const spot = x === null ? null : spotAt(t, x, y);
  const counted = track?.lane.kind === "counter" && x !== null && x >= t.layout.gutter ? valueAt(track, timeAt(t, x)) : "";
  canvas.style.cursor = y < AXIS ? "crosshair" : spot ? "pointer" : "";
  if (spot && track) {
    const w = wordsOf(track, spot.piece);
    fill(
      tip,
      h("strong", {}, w.what, w.inferred && " (inferred)"),
      h("span", {}, `${w.length}, from ${w.at}`),
      h("bdi", {}, [w.where, w.state].filter(Boolean).join(" · ")),
      w.detail && h("bdi", { class: "soft" }, w.detail),
    );
  } else if (counted && track) {
    fill(tip, h("strong", {}, counted), h("bdi", {}, track.lane.label));
  } else if (track && x !== null && x < t.layout.gutter) {
    fill(tip, h("bdi", {}, track.lane.label), track.lane.tid ? h("span", {}, `thread ${track.lane.tid}, process ${track.lane.tgid}`) : null);
  }
  tip.hidden = x === null || !(spot || counted || (track && x < t.layout.gutter));
  if (tip.hidden || x === null) return;
  // Beside the pointer, on the side with more room.
  const left = x > t.width / 2 ? x - tip.offsetWidth - 14 : x + 14;
  tip.style.left = `${Math.max(Math.min(left, t.width - tip.offsetWidth), 0)}px`;
  tip.style.top = `${Math.max(y + 18 + tip.offsetHeight > t.height ? y - tip.offsetHeight - 10 : y + 18, 0)}px`;
}

/**
 * A span is being chosen by dragging; when *done* it is shown.
 * @param {Timeline} t
 * @param {number} from px
 * @param {number} to px
 * @param {boolean} done
 */
export function choose(t, from, to, done) {
  const { gutter } = t.layout;
  const [a, b] = [from, to].map((x) => Math.min(Math.max(x, gutter), t.width)).sort((p, q) => p - q);
  t.brush = done ? null : [a, b];
  if (done && b - a >= LEAST_BRUSH) t.span.set(timeAt(t, a), timeAt(t, b));
  t.changed();
}
