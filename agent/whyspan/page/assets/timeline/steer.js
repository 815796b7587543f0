// Buttons, keys and gestures of the timeline.

import { button, fill } from "../dom.js";
import { listenTo } from "./gestures.js";
import { AXIS } from "./layout.js";
import { choose, fitPicked, hover, laneBy, pick, spotAt, walkBy } from "./picking.js";

/** Zoom of a key or a button. */
const NEARER = 0.6;
/** Part of the window that an arrow moves it by. */
const MOVE = 0.15;

/**
 * @param {import("./timeline.js").Timeline} t
 * @param {AbortSignal} signal
 */
export function steer(t, signal) {
  const { view, canvas, bar, shown } = t.parts;
  /** @param {string} label @param {string} title @param {() => void} act */
  const tool = (label, title, act) => button(label, act, { title, "aria-label": title });
  fill(
    bar,
    tool("−", "Zoom out (−)", () => t.zoom(1 / NEARER)),
    tool("+", "Zoom in (+)", () => t.zoom(NEARER)),
    tool("Whole", "Whole request (0)", () => t.showAll()),
    tool("‹ Path", "Path: previous piece (P)", () => walkBy(t, -1)),
    tool("Path ›", "Path: next piece (N)", () => walkBy(t, 1)),
    shown,
  );

  pick(t, null);

  /** @type {Record<string, (shift: boolean) => void>} */
  const keys = {
    ArrowLeft: (shift) => t.panBy(shift ? -0.9 : -MOVE),
    ArrowRight: (shift) => t.panBy(shift ? 0.9 : MOVE),
    ArrowUp: () => laneBy(t, -1),
    ArrowDown: () => laneBy(t, 1),
    "+": () => t.zoom(NEARER),
    "=": () => t.zoom(NEARER),
    "-": () => t.zoom(1 / NEARER),
    0: () => t.showAll(),
    Home: () => t.panBy(-Infinity),
    End: () => t.panBy(Infinity),
    n: () => walkBy(t, 1),
    p: () => walkBy(t, -1),
    Enter: () => fitPicked(t),
  };
  view.addEventListener(
    "keydown",
    (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "Escape" && t.picked) {
        pick(t, null);
        event.stopPropagation(); // it does not leave the request, too
        return;
      }
      const act = keys[event.key.length === 1 ? event.key.toLowerCase() : event.key];
      if (!act) return;
      act(event.shiftKey);
      event.preventDefault();
      event.stopPropagation();
    },
    { signal },
  );

  listenTo(
    canvas,
    {
      pan: (pixels) => t.panBy(pixels / t.plot),
      scroll: (pixels) => (view.scrollTop += pixels),
      // Over the names a wheel scrolls the lanes.
      zoom: (factor, x) => x >= t.layout.gutter && t.zoom(factor, (x - t.layout.gutter) / t.plot),
      pick: (x, y) => {
        view.focus({ preventScroll: true });
        pick(t, spotAt(t, x, y));
      },
      fit: (x, y) => {
        pick(t, spotAt(t, x, y));
        fitPicked(t);
      },
      hover: (x, y) => hover(t, x, y),
      brush: (from, to, done) => choose(t, from, to, done),
      onAxis: (_, y) => y < AXIS,
    },
    signal,
  );
}
