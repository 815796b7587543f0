// Paints one frame of the timeline. Everything costs by the pixel, not by the piece.

import { Ints, RUN, levelsOf, runsOf } from "./columns.js";
import { AXIS, tickText, ticksOf } from "./layout.js";
import { drawMarks, drawWalk } from "./overlay.js";
import { FONT } from "./pens.js";
import { SPARSE_SHIFT, WAITING } from "./tracks.js";
import { measure } from "./words.js";

const runs = new Ints();
/** What a run loses of its strength for each quarter of the time that its pieces do not fill. */
const FAINTER = 0.22;

/**
 * @typedef {object} Scene
 * @property {import("./tracks.js").Track[]} tracks
 * @property {import("./tracks.js").Walk} walk
 * @property {import("./layout.js").Layout} layout
 * @property {import("./pens.js").Pens} pens
 * @property {number} from ns
 * @property {number} to ns
 * @property {number} width px, gutter included
 * @property {number} height px
 * @property {number} scroll px
 * @property {number | null} firstNs first byte
 * @property {{ track: number, piece: number } | null} picked
 * @property {number | null} pointer px, where the pointer is
 * @property {[number, number] | null} brush px, a span being chosen
 */

/**
 * @param {CanvasRenderingContext2D} ctx scaled to CSS pixels
 * @param {Scene} scene
 */
export function drawScene(ctx, scene) {
  const { layout, pens, width, height } = scene;
  ctx.font = FONT;
  ctx.textBaseline = "middle";
  ctx.fillStyle = pens.card;
  ctx.fillRect(0, 0, width, height);
  drawTicks(ctx, scene);

  ctx.save();
  clip(ctx, 0, layout.pinned, width, height - layout.pinned);
  for (const row of layout.rows) {
    const y = row.y + layout.pinned - scene.scroll;
    if (!row.pinned && y < height && y + row.height > layout.pinned) drawRow(ctx, scene, row, y);
  }
  ctx.restore();
  ctx.fillStyle = pens.card;
  for (const row of layout.rows) if (row.pinned) drawRow(ctx, scene, row, row.y);

  ctx.save();
  clip(ctx, layout.gutter, layout.pinned, width - layout.gutter, height - layout.pinned);
  drawWalk(ctx, scene);
  if (!layout.gutter) {
    // Names lie over their lanes: the path passes behind them.
    for (const row of layout.rows) {
      const y = row.y + layout.pinned - scene.scroll;
      if (!row.pinned && y < height) drawName(ctx, scene, row, scene.tracks[row.track], y);
    }
  }
  ctx.restore();
  drawMarks(ctx, scene);
}

/**
 * @param {CanvasRenderingContext2D} ctx
 * @param {number} x
 * @param {number} y
 * @param {number} width
 * @param {number} height
 */
function clip(ctx, x, y, width, height) {
  ctx.beginPath();
  ctx.rect(x, y, Math.max(width, 0), Math.max(height, 0));
  ctx.clip();
}

/**
 * @param {CanvasRenderingContext2D} ctx
 * @param {Scene} scene
 */
function drawTicks(ctx, { from, to, width, height, layout, pens }) {
  const plot = width - layout.gutter;
  const { step, times } = ticksOf(from, to, plot);
  ctx.textAlign = "left";
  for (const t of times) {
    const x = layout.gutter + Math.round(((t - from) / (to - from)) * plot);
    ctx.fillStyle = pens.rule;
    ctx.fillRect(x, 0, 1, height);
    ctx.fillStyle = pens.soft;
    const text = tickText(t, step, to);
    if (x + 5 + ctx.measureText(text).width < width) ctx.fillText(text, x + 4, AXIS / 2);
  }
  ctx.fillStyle = pens.line;
  ctx.fillRect(0, AXIS - 1, width, 1);
}

/**
 * @param {CanvasRenderingContext2D} ctx
 * @param {Scene} scene
 * @param {import("./layout.js").Row} row
 * @param {number} y
 */
function drawRow(ctx, scene, row, y) {
  const { layout, pens, width } = scene;
  const track = scene.tracks[row.track];
  ctx.fillStyle = pens.rule;
  ctx.fillRect(0, y + row.height - 1, width, 1);
  if (track.lane.kind === "counter") drawCounter(ctx, scene, row, track, y);
  else drawBars(ctx, scene, row, track, y);
  if (layout.gutter) drawName(ctx, scene, row, track, y);
}

/**
 * @param {CanvasRenderingContext2D} ctx
 * @param {Scene} scene
 * @param {import("./layout.js").Row} row
 * @param {import("./tracks.js").Track} track
 * @param {number} y
 */
function drawName(ctx, { layout, pens, width }, row, track, y) {
  const { lane } = track;
  const room = (layout.gutter || width) - 14;
  let more = lane.tid ? String(lane.tid) : "";
  if (lane.kind === "counter") more = `max ${measure(track.most, lane.unit)}`;
  const moreWidth = more ? ctx.measureText(more).width + 8 : 0;
  const name = pens.fit(lane.label, room - moreWidth);
  ctx.textAlign = "left";
  if (!layout.gutter) {
    ctx.globalAlpha = 0.85;
    ctx.fillStyle = pens.card;
    ctx.fillRect(3, y + row.label - 7, ctx.measureText(name).width + moreWidth + 5, 13);
    ctx.globalAlpha = 1;
  }
  ctx.fillStyle = pens.ink;
  ctx.fillText(name, 6, y + row.label);
  if (!more) return;
  ctx.fillStyle = pens.soft;
  if (layout.gutter) {
    ctx.textAlign = "right";
    ctx.fillText(more, layout.gutter - 8, y + row.label);
    ctx.textAlign = "left";
  } else {
    ctx.fillText(more, 6 + ctx.measureText(name).width + 8, y + row.label);
  }
}

/**
 * @param {CanvasRenderingContext2D} ctx
 * @param {Scene} scene
 * @param {import("./layout.js").Row} row
 * @param {import("./tracks.js").Track} track
 * @param {number} y
 */
function drawBars(ctx, { from, to, width, layout, pens }, row, track, y) {
  const { gutter } = layout;
  runsOf(track, from, to, width - gutter, runs);
  const { data, length } = runs;
  const top = y + row.bar;
  const low = Math.round(row.barHeight * 0.45); // a thread that waits
  for (let i = 0; i < length; i += RUN) {
    const [x, wide, family, look] = [data[i] + gutter, data[i + 1], data[i + 2], data[i + 3]];
    const gap = wide >= 4 ? 1 : 0; // neighbours stay apart
    ctx.fillStyle = pens.fill(family, look);
    ctx.globalAlpha = 1 - (look >> SPARSE_SHIFT) * FAINTER;
    if (look & WAITING) ctx.fillRect(x, top + row.barHeight - low, wide - gap, low);
    else ctx.fillRect(x, top, wide - gap, row.barHeight);
  }
  ctx.globalAlpha = 1;
  for (let i = 0; i < length; i += RUN) {
    const [x, wide, family, look, piece] = [data[i] + gutter, data[i + 1], data[i + 2], data[i + 3], data[i + 4]];
    if (piece < 0 || wide < 24) continue;
    const waits = (look & WAITING) !== 0;
    const text = pens.fit(nameOf(track.lane.kind, track.lane.spans[piece]), wide - 8);
    if (!text) continue;
    if (waits) {
      // Above the low bar, where the ground is the card's.
      ctx.fillStyle = pens.soft;
      ctx.fillText(text, x + 3, top + (row.barHeight - low) / 2 - 0.5);
    } else {
      const colour = pens.text(family, look);
      if (!colour) continue;
      ctx.fillStyle = colour;
      ctx.fillText(text, x + 4, top + row.barHeight / 2 + 0.5);
    }
  }
}

/**
 * What is written on a piece.
 * @param {string} kind of its lane
 * @param {import("../shapes.js").Piece} piece
 */
function nameOf(kind, [, , state, cause, detail]) {
  if (kind === "thread") return cause;
  return kind === "steps" ? detail || state : state || detail;
}

/**
 * @param {CanvasRenderingContext2D} ctx
 * @param {Scene} scene
 * @param {import("./layout.js").Row} row
 * @param {import("./tracks.js").Track} track
 * @param {number} y
 */
function drawCounter(ctx, { from, to, width, layout, pens }, row, track, y) {
  const { gutter } = layout;
  const bottom = y + row.bar + row.barHeight;
  // A share is drawn against the whole, everything else against its own greatest.
  const scale = track.lane.unit === "ratio" ? Math.max(track.most, 1) : track.most;
  /** @param {number} value */
  const rise = (value) => (scale > 0 ? Math.max((value / scale) * (row.barHeight - 1), 0) : 0);
  let x = -1;
  let value = 0;
  /** @param {number} until */
  const area = (until) => {
    if (x < 0 || until <= x) return;
    const high = rise(value);
    ctx.fillStyle = pens.sunk;
    ctx.fillRect(gutter + x, bottom - high, until - x, high);
    ctx.fillStyle = pens.soft;
    ctx.fillRect(gutter + x, bottom - high - 1, until - x, 1);
  };
  levelsOf(track, from, to, width - gutter, (at, least, most, last) => {
    area(at);
    const [low, high] = [rise(Math.min(least, value)), rise(Math.max(most, value))];
    ctx.fillStyle = pens.soft;
    if (x >= 0) ctx.fillRect(gutter + at, bottom - high - 1, 1, high - low + 1);
    x = at;
    value = last;
  });
  area(width - gutter);
}
