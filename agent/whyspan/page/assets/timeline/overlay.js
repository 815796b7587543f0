// Paints what lies over the lanes: the critical path, the first byte, the selection, the pointer's time.

import { ns } from "../format.js";
import { Ints, RUN, pathOf } from "./columns.js";
import { AXIS } from "./layout.js";

const levels = new Ints();
const handovers = new Ints();
const ROOM = 5; // px between hand-overs that are drawn in full
const FAINTEST = 0.08;

/**
 * How strongly a hand-over is drawn, 0..1: fully where there is room around it.
 * @param {number} i its place in `handovers`
 */
function strength(i) {
  const { data, length } = handovers;
  const before = i > 0 ? data[i] - data[i - RUN] : ROOM;
  const after = i + RUN < length ? data[i + RUN] - data[i] : ROOM;
  const apart = (before + after) / 2 / data[i + 4];
  return apart >= ROOM ? 1 : Math.max(apart / ROOM, FAINTEST);
}

/**
 * The critical path: one line under the pieces it runs through, and across the lanes where it is handed over.
 * @param {CanvasRenderingContext2D} ctx
 * @param {import("./draw.js").Scene} scene
 */
export function drawWalk(ctx, scene) {
  const { layout, pens, tracks, walk, scroll, from, to, width } = scene;
  const yOf = new Int32Array(tracks.length);
  for (const row of layout.rows) yOf[row.track] = row.y + row.line + (row.pinned ? 0 : layout.pinned - scroll);
  pathOf(walk, from, to, width - layout.gutter, yOf, levels, handovers);
  const left = layout.gutter;
  const { data, length } = handovers;
  // Hand-overs too close to be told apart become a tint that the lanes are seen through.
  ctx.fillStyle = pens.card;
  for (let i = 0; i < length; i += RUN) {
    if (strength(i) === 1) ctx.fillRect(data[i] + left - 2, data[i + 1], 5, data[i + 2] - data[i + 1]);
  }
  ctx.fillStyle = pens.ink;
  for (let i = 0; i < length; i += RUN) {
    const [x, top, bottom] = [data[i] + left, data[i + 1], data[i + 2]];
    const full = strength(i);
    ctx.globalAlpha = full;
    ctx.fillRect(full === 1 ? x - 1 : x, top - 1, full === 1 ? 2 : 1, bottom - top + 2);
  }
  ctx.globalAlpha = 1;
  for (let i = 0; i < levels.length; i += RUN) {
    ctx.fillRect(levels.data[i] + left - 1, levels.data[i + 2] - 1, levels.data[i + 1] + 1, 2);
  }
  // Where there is room, a dot tells where a hand-over arrives.
  let last = -Infinity;
  for (let i = 0; i < handovers.length; i += RUN) {
    const x = handovers.data[i];
    const arrival = handovers.data[i + 3];
    const next = i + RUN < handovers.length ? handovers.data[i + RUN] : Infinity;
    if (arrival >= 0 && x - last > 7 && next - x > 7) {
      ctx.beginPath();
      ctx.arc(x + left, arrival, 3.5, 0, 2 * Math.PI);
      ctx.fill();
    }
    last = x;
  }
}

/**
 * First byte, what is picked, the pointer's time and the span being chosen.
 * @param {CanvasRenderingContext2D} ctx
 * @param {import("./draw.js").Scene} scene
 */
export function drawMarks(ctx, scene) {
  const { from, to, width, height, layout, pens, tracks, firstNs, picked, pointer, brush, scroll } = scene;
  const plot = width - layout.gutter;
  /** @param {number} t */
  const xOf = (t) => layout.gutter + ((t - from) / (to - from)) * plot;
  if (firstNs !== null && firstNs >= from && firstNs <= to) {
    const x = Math.round(xOf(firstNs));
    ctx.fillStyle = pens.accent;
    for (let y = AXIS; y < height; y += 6) ctx.fillRect(x, y, 1, 3);
    ctx.beginPath();
    ctx.moveTo(x - 4, AXIS - 6);
    ctx.lineTo(x + 5, AXIS - 6);
    ctx.lineTo(x + 0.5, AXIS);
    ctx.fill();
  }
  if (picked) {
    const row = layout.rows[picked.track];
    const track = tracks[picked.track];
    const y = row.y + row.bar + (row.pinned ? 0 : layout.pinned - scroll);
    const [x, stop] = [Math.max(xOf(track.start[picked.piece]), layout.gutter), Math.min(xOf(track.end[picked.piece]), width)];
    if (stop >= layout.gutter && x <= width && (row.pinned || y >= layout.pinned - row.bar)) {
      ctx.strokeStyle = pens.card;
      ctx.lineWidth = 4;
      ctx.strokeRect(Math.round(x) - 1.5, y - 1.5, Math.max(Math.round(stop - x), 2) + 2, row.barHeight + 3);
      ctx.strokeStyle = pens.accent;
      ctx.lineWidth = 2;
      ctx.strokeRect(Math.round(x) - 1.5, y - 1.5, Math.max(Math.round(stop - x), 2) + 2, row.barHeight + 3);
    }
  }
  if (brush) {
    const [a, b] = [Math.min(...brush), Math.max(...brush)];
    ctx.globalAlpha = 0.18;
    ctx.fillStyle = pens.accent;
    ctx.fillRect(a, AXIS, b - a, height);
    ctx.globalAlpha = 1;
    timeLabel(ctx, scene, (a + b) / 2, ns(((b - a) / plot) * (to - from)));
  } else if (pointer !== null && pointer >= layout.gutter) {
    ctx.fillStyle = pens.soft;
    ctx.fillRect(Math.round(pointer), AXIS, 1, height);
    timeLabel(ctx, scene, pointer, ns(from + ((pointer - layout.gutter) / plot) * (to - from), 5));
  }
}

/**
 * A time on the axis, over what is there.
 * @param {CanvasRenderingContext2D} ctx
 * @param {import("./draw.js").Scene} scene
 * @param {number} x its middle
 * @param {string} text
 */
function timeLabel(ctx, { width, pens }, x, text) {
  const wide = ctx.measureText(text).width + 10;
  const left = Math.min(Math.max(x - wide / 2, 0), width - wide);
  ctx.fillStyle = pens.ink;
  ctx.fillRect(left, 2, wide, AXIS - 5);
  ctx.fillStyle = pens.card;
  ctx.textAlign = "left";
  ctx.fillText(text, left + 5, AXIS / 2);
}
