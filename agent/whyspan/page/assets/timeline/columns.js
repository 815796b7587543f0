// Level of detail: what of a lane, of the path and of a counter there is to draw when many pieces share a pixel.

import { SPARSE_SHIFT, firstAfter } from "./tracks.js";

/** Integers of an entry of `Ints`. */
export const RUN = 5;
const FAMILY_SLOTS = 256;

/** A growing list of entries of RUN integers, emptied and used again on every frame. */
export class Ints {
  constructor() {
    this.data = new Int32Array(RUN * 1024);
    this.length = 0;
  }

  /**
   * @param {number} a
   * @param {number} b
   * @param {number} c
   * @param {number} d
   * @param {number} [e]
   */
  push(a, b, c, d, e = -1) {
    if (this.length + RUN > this.data.length) {
      const bigger = new Int32Array(this.data.length * 2);
      bigger.set(this.data);
      this.data = bigger;
    }
    this.data[this.length] = a;
    this.data[this.length + 1] = b;
    this.data[this.length + 2] = c;
    this.data[this.length + 3] = d;
    this.data[this.length + 4] = e;
    this.length += RUN;
  }
}

const spent = new Float64Array(FAMILY_SLOTS);
const touched = new Uint8Array(FAMILY_SLOTS);
const longest = new Float64Array(FAMILY_SLOTS); // the longest part of each family, and whose it is
const longestPiece = new Int32Array(FAMILY_SLOTS);

/**
 * Fills *out* with the runs to draw of a track in the window, as (x, width, family, look, piece or -1): at most two per
 * pixel, whatever the number of pieces. A pixel that pieces share goes to the family with most of its time, in the look
 * of that family's longest part; `look >> SPARSE_SHIFT` then says how little of the pixel's time they fill.
 * @param {import("./tracks.js").Track} track
 * @param {number} from ns, left edge
 * @param {number} to ns, right edge
 * @param {number} width pixels
 * @param {Ints} out
 */
export function runsOf(track, from, to, width, out) {
  out.length = 0;
  const scale = width / (to - from);
  const { start, end, family, look, count } = track;
  let column = -1; // the pixel whose parts are being gathered
  let kinds = 0;
  for (let i = firstAfter(end, from); i < count && start[i] < to; i++) {
    const left = Math.max((start[i] - from) * scale, 0);
    const right = Math.min((end[i] - from) * scale, width);
    const first = left | 0;
    const last = right | 0;
    // At most three parts: in the pixel where it starts, over whole pixels, in the pixel where it ends.
    let x = first;
    if (left > first || last === first) {
      if (column !== first) {
        flush(track, scale, column, kinds, out);
        column = first;
        kinds = 0;
      }
      kinds = gather(family[i], (last === first ? right : first + 1) - left, i, kinds);
      x++;
    }
    if (last > x) {
      flush(track, scale, column, kinds, out);
      column = -1;
      kinds = 0;
      append(out, x, last - x, family[i], look[i], i);
    }
    if (right > last && last > first) {
      if (column !== last) {
        flush(track, scale, column, kinds, out);
        column = last;
        kinds = 0;
      }
      kinds = gather(family[i], right - last, i, kinds);
    }
  }
  flush(track, scale, column, kinds, out);
}

/**
 * Counts a part of a piece in the present pixel.
 * @param {number} kind family
 * @param {number} part of the pixel
 * @param {number} piece
 * @param {number} kinds families in the pixel until now
 * @returns {number} and with this
 */
function gather(kind, part, piece, kinds) {
  if (spent[kind] === 0) touched[kinds++] = kind;
  spent[kind] += part > 0 ? part : 1e-9;
  if (part >= longest[kind]) {
    longest[kind] = part;
    longestPiece[kind] = piece;
  }
  return kinds;
}

/**
 * Adds the run of a pixel that parts were gathered in, and forgets them.
 * @param {import("./tracks.js").Track} track
 * @param {number} scale pixels per ns
 * @param {number} column -1: none
 * @param {number} kinds
 * @param {Ints} out
 */
function flush(track, scale, column, kinds, out) {
  if (column < 0) return;
  let winner = touched[0];
  let all = 0;
  for (let k = 0; k < kinds; k++) {
    const kind = touched[k];
    all += spent[kind];
    if (spent[kind] > spent[winner]) winner = kind;
  }
  for (let k = 0; k < kinds; k++) spent[touched[k]] = longest[touched[k]] = 0;
  const piece = longestPiece[winner];
  if ((track.end[piece] - track.start[piece]) * scale >= 1) {
    // The edge of a piece that has pixels of its own: the piece ends at the nearer pixel's edge.
    if (kinds > 1 || all >= 0.5) append(out, column, 1, winner, track.look[piece], piece);
  } else {
    const sparse = 3 - Math.min(Math.floor(all * 4), 3);
    append(out, column, 1, winner, track.look[piece] | (sparse << SPARSE_SHIFT), -1);
  }
}

/**
 * Adds a run, as a longer last one where they join and are of one piece, or shared and look alike.
 * @param {Ints} out
 * @param {number} x
 * @param {number} width
 * @param {number} family
 * @param {number} look
 * @param {number} piece
 */
function append(out, x, width, family, look, piece) {
  const { data, length } = out;
  const last = length - RUN;
  if (
    length > 0 &&
    data[last] + data[last + 1] === x &&
    data[last + 2] === family &&
    data[last + 3] === look &&
    data[last + 4] === piece
  ) {
    data[last + 1] += width;
  } else {
    out.push(x, width, family, look, piece);
  }
}

/**
 * Fills *level* with the path's horizontal pieces as (x, width, y, step of the path) and *handed* with its hand-overs
 * as (x, top, bottom, arrival y, number of them); the arrival is -1 where several share the pixel. One line: each hand-over joins the
 * end of one level to the start of the next.
 * @param {import("./tracks.js").Walk} walk
 * @param {number} from
 * @param {number} to
 * @param {number} width
 * @param {ArrayLike<number>} yOf the y of each track
 * @param {Ints} level
 * @param {Ints} handed
 */
export function pathOf(walk, from, to, width, yOf, level, handed) {
  level.length = 0;
  handed.length = 0;
  const scale = width / (to - from);
  let i = firstAfter(walk.end, from);
  if (i >= walk.count) return;
  let y = yOf[walk.track[Math.max(i - 1, 0)]];
  if (i === 0) y = yOf[walk.track[0]];
  let column = -1;
  let top = 0;
  let bottom = 0;
  let moves = 0;
  for (; i < walk.count && walk.start[i] < to; i++) {
    const x = Math.max(Math.round((walk.start[i] - from) * scale), 0);
    const next = yOf[walk.track[i]];
    if (next !== y) {
      if (x !== column) {
        if (moves) handed.push(column, top, bottom, moves === 1 ? y : -1, moves);
        column = x;
        top = bottom = y;
        moves = 0;
      }
      if (next < top) top = next;
      if (next > bottom) bottom = next;
      moves++;
      y = next;
    }
    const stop = Math.min(Math.round((walk.end[i] - from) * scale), width);
    if (stop <= x) continue;
    const { data, length } = level;
    if (length > 0 && data[length - RUN] + data[length - RUN + 1] === x && data[length - RUN + 2] === y) {
      data[length - RUN + 1] += stop - x;
    } else {
      level.push(x, stop - x, y, i);
    }
  }
  if (moves) handed.push(column, top, bottom, moves === 1 ? y : -1, moves);
}

/**
 * Calls *each* with (x, least, most, last) for every pixel that has points of a counter, and first with the value that
 * holds at the left edge, where there is one.
 * @param {import("./tracks.js").Track} track
 * @param {number} from
 * @param {number} to
 * @param {number} width
 * @param {(x: number, least: number, most: number, last: number) => void} each
 */
export function levelsOf(track, from, to, width, each) {
  const { at, value } = track;
  const scale = width / (to - from);
  let i = firstAfter(at, from);
  if (i > 0) each(0, value[i - 1], value[i - 1], value[i - 1]);
  while (i < at.length && at[i] <= to) {
    const x = Math.floor((at[i] - from) * scale);
    let least = value[i];
    let most = value[i];
    let last = value[i];
    for (i++; i < at.length && Math.floor((at[i] - from) * scale) === x; i++) {
      last = value[i];
      if (last < least) least = last;
      if (last > most) most = last;
    }
    each(x, least, most, last);
  }
}
