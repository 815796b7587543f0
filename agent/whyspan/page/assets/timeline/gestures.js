// Mouse, wheel, touch and pen on the timeline: pan, zoom, pick, choose a span.

const CLICK = 4; // px a pointer may move and still click
const SCROLLING_MS = 250; // a wheel this soon after the page scrolled goes on scrolling it
const WHEEL_LINE = 16; // px of a wheel's line

/**
 * What gestures ask for; x and y in CSS pixels from the timeline's corner.
 * @typedef {object} Asked
 * @property {(pixels: number) => void} pan
 * @property {(pixels: number) => void} scroll
 * @property {(factor: number, x: number) => boolean} zoom false: nothing moved
 * @property {(x: number, y: number) => void} pick
 * @property {(x: number, y: number) => void} fit
 * @property {(x: number | null, y: number) => void} hover null: the pointer left
 * @property {(from: number, to: number, done: boolean) => void} brush
 * @property {(x: number, y: number) => boolean} onAxis a drag from there chooses a span
 */

/**
 * @param {HTMLElement} element
 * @param {Asked} asked
 * @param {AbortSignal} signal
 */
export function listenTo(element, asked, signal) {
  /** @type {Map<number, { x: number, y: number }>} */
  const down = new Map();
  let start = { x: 0, y: 0 };
  let moved = false;
  let brushing = false;
  let apart = 0; // px between two fingers
  let lastScroll = -Infinity;

  /** @param {{ clientX: number, clientY: number }} event */
  const place = (event) => {
    const box = element.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  const spread = () => {
    const [a, b] = [...down.values()];
    return Math.max(Math.hypot(a.x - b.x, a.y - b.y), 10);
  };
  const middle = () => {
    const all = [...down.values()];
    return all.reduce((sum, p) => sum + p.x, 0) / all.length;
  };

  addEventListener("scroll", () => (lastScroll = performance.now()), { signal, passive: true });

  element.addEventListener(
    "wheel",
    (event) => {
      const unit = event.deltaMode === 0 ? 1 : WHEEL_LINE;
      const [dx, dy] = [event.deltaX * unit, event.deltaY * unit];
      const sideways = event.shiftKey ? dx || dy : Math.abs(dx) > Math.abs(dy) ? dx : 0;
      if (sideways) {
        event.preventDefault();
        asked.pan(sideways);
        return;
      }
      // A pinch on a touch pad comes as a wheel with ctrl. Else a page that is being scrolled goes on to be.
      if (!event.ctrlKey && performance.now() - lastScroll < SCROLLING_MS) return;
      const factor = Math.exp(Math.max(Math.min(dy, 240), -240) * (event.ctrlKey ? 0.01 : 0.0022));
      if (asked.zoom(factor, place(event).x) || event.ctrlKey) event.preventDefault();
    },
    { signal, passive: false },
  );

  element.addEventListener(
    "pointerdown",
    (event) => {
      if (event.button !== 0) return;
      const at = place(event);
      down.set(event.pointerId, at);
      element.setPointerCapture(event.pointerId);
      if (down.size === 1) {
        start = at;
        moved = false;
        brushing = event.shiftKey || asked.onAxis(at.x, at.y);
      } else if (down.size === 2) {
        moved = true;
        brushing = false;
        apart = spread();
      }
    },
    { signal },
  );

  element.addEventListener(
    "pointermove",
    (event) => {
      const at = place(event);
      const before = down.get(event.pointerId);
      if (!before) {
        asked.hover(at.x, at.y);
        return;
      }
      if (down.size === 2) {
        const center = middle();
        down.set(event.pointerId, at);
        asked.pan(center - middle());
        const now = spread();
        asked.zoom(apart / now, middle());
        apart = now;
        return;
      }
      if (!moved && Math.hypot(at.x - start.x, at.y - start.y) < CLICK) return;
      if (!moved) asked.hover(null, 0);
      moved = true;
      down.set(event.pointerId, at);
      if (brushing) {
        asked.brush(start.x, at.x, false);
      } else {
        asked.pan(before.x - at.x);
        if (event.pointerType === "mouse") asked.scroll(before.y - at.y);
      }
    },
    { signal },
  );

  /** @param {PointerEvent} event */
  const up = (event) => {
    const at = place(event);
    if (!down.delete(event.pointerId)) return;
    if (down.size === 0) {
      if (brushing && moved) asked.brush(start.x, at.x, event.type === "pointerup");
      else if (!moved && event.type === "pointerup") asked.pick(at.x, at.y);
      brushing = false;
    }
  };
  element.addEventListener("pointerup", up, { signal });
  element.addEventListener("pointercancel", up, { signal });
  element.addEventListener("pointerleave", () => down.size || asked.hover(null, 0), { signal });
  element.addEventListener(
    "dblclick",
    (event) => {
      const at = place(event);
      asked.fit(at.x, at.y);
    },
    { signal },
  );
}
