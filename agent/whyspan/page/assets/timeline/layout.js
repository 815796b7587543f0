// Where each lane lies: rows below an axis, the phases pinned above what scrolls.

export const AXIS = 22; // px, height of the time axis
const LABEL = 15; // px, the line of a lane's name where there is no room beside it
const NARROW = 620; // px, below which names go above their lanes

/**
 * @typedef {object} Row
 * @property {number} track
 * @property {number} y top, px, in the whole of its part (pinned or scrolled)
 * @property {number} height
 * @property {number} bar top of its bars, below y
 * @property {number} barHeight
 * @property {number} line where the path runs, below y
 * @property {number} label the middle of its name's line, below y
 * @property {boolean} pinned
 */

/**
 * @typedef {object} Layout
 * @property {Row[]} rows
 * @property {number} gutter px, the names' width
 * @property {number} pinned px, height of axis and phases
 * @property {number} scrolled px, height of the rest
 */

/** Height of bars by kind of lane, px. */
const BARS = new Map([["phase", 18], ["thread", 14], ["steps", 12], ["gpu", 12], ["counter", 30]]);

/**
 * @param {import("./tracks.js").Track[]} tracks
 * @param {number} width px
 * @returns {Layout}
 */
export function layoutOf(tracks, width) {
  const narrow = width < NARROW;
  /** @type {Row[]} */
  const rows = [];
  let pinned = AXIS;
  let scrolled = 0;
  tracks.forEach((track, i) => {
    const kind = track.lane.kind;
    const isPinned = kind === "phase";
    const head = narrow && !isPinned ? LABEL : 0;
    const barHeight = BARS.get(kind) ?? 12;
    const height = head + barHeight + (kind === "thread" ? 13 : 9);
    const bar = head + 4;
    rows.push({
      track: i,
      y: isPinned ? pinned : scrolled,
      height,
      bar,
      barHeight,
      line: bar + barHeight + (kind === "thread" ? 5 : 2),
      label: narrow ? Math.ceil(LABEL / 2) + 1 : bar + barHeight / 2,
      pinned: isPinned,
    });
    if (isPinned) pinned += height;
    else scrolled += height;
  });
  return { rows, gutter: narrow ? 0 : Math.min(220, Math.round(width * 0.18)), pinned, scrolled };
}

/**
 * Returns round times to mark between *from* and *to*, at least *apart* px from each other.
 * @param {number} from ns
 * @param {number} to ns
 * @param {number} width px
 * @param {number} [apart]
 * @returns {{ step: number, times: number[] }}
 */
export function ticksOf(from, to, width, apart = 90) {
  const wanted = ((to - from) * apart) / Math.max(width, 1);
  let step = 10 ** Math.ceil(Math.log10(Math.max(wanted, 1)));
  for (const part of [0.2, 0.5]) {
    if (step * part >= wanted) {
      step *= part;
      break;
    }
  }
  step = Math.max(Math.round(step), 1);
  const times = [];
  for (let t = Math.ceil(from / step) * step; t <= to; t += step) times.push(t);
  return { step, times };
}

/** Units of time, ns each, greatest first. */
const UNITS = /** @type {const} */ ([["s", 1e9], ["ms", 1e6], ["µs", 1e3], ["ns", 1]]);

/**
 * Returns a tick's text: all ticks of an axis have the same unit and as many digits as their step needs.
 * @param {number} time ns
 * @param {number} step ns between ticks
 * @param {number} greatest ns, the axis's end
 */
export function tickText(time, step, greatest) {
  const [unit, size] = UNITS.find(([, each]) => greatest >= each) ?? UNITS[3];
  const digits = Math.max(Math.ceil(-Math.log10(step / size) - 1e-9), 0);
  return `${(time / size).toFixed(digits)}\u202f${unit}`;
}
