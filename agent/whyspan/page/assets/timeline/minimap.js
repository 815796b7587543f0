// The whole request in a strip: where the path's time went, and which part of it is shown.

import { Ints, RUN, runsOf } from "./columns.js";
import { WAITING } from "./tracks.js";

export const MINIMAP_HEIGHT = 26; // px
const GRIP = 6; // px at an edge of the window that drag that edge

const strip = new Ints();

export class Minimap {
  /**
   * @param {HTMLCanvasElement} canvas
   * @param {import("./tracks.js").Track} path the critical path as one track
   * @param {import("./window.js").Span} span
   * @param {() => void} changed
   * @param {AbortSignal} signal
   */
  constructor(canvas, path, span, changed, signal) {
    this.canvas = canvas;
    this.path = path;
    this.span = span;
    /** @type {HTMLCanvasElement | null} the strip without the window: it changes with size and scheme only */
    this.ground = null;
    this.drag(changed, signal);
  }

  /**
   * @param {import("./pens.js").Pens} pens
   * @param {number} width CSS px
   * @param {number} ratio device pixels per CSS pixel
   */
  draw(pens, width, ratio) {
    const { canvas, span } = this;
    const ctx = canvas.getContext("2d");
    if (!ctx || width <= 0) return;
    if (!this.ground) {
      this.ground = document.createElement("canvas");
      for (const each of [canvas, this.ground]) {
        each.width = Math.round(width * ratio);
        each.height = Math.round(MINIMAP_HEIGHT * ratio);
      }
      const pen = this.ground.getContext("2d");
      if (pen) this.drawGround(pen, pens, width, ratio);
    }
    ctx.setTransform(1, 0, 0, 1, 0, 0);
    ctx.clearRect(0, 0, canvas.width, canvas.height);
    ctx.drawImage(this.ground, 0, 0);
    ctx.scale(ratio, ratio);
    const left = Math.round((span.from / span.wall) * width);
    const right = Math.max(Math.round((span.to / span.wall) * width), left + 2);
    ctx.globalAlpha = 0.72;
    ctx.fillStyle = pens.card;
    ctx.fillRect(0, 0, left, MINIMAP_HEIGHT);
    ctx.fillRect(right, 0, width - right, MINIMAP_HEIGHT);
    ctx.globalAlpha = 1;
    ctx.strokeStyle = pens.accent;
    ctx.lineWidth = 1.5;
    ctx.strokeRect(left + 0.75, 0.75, Math.max(right - left - 1.5, 1), MINIMAP_HEIGHT - 1.5);
  }

  /**
   * @param {CanvasRenderingContext2D} pen
   * @param {import("./pens.js").Pens} pens
   * @param {number} width
   * @param {number} ratio
   */
  drawGround(pen, pens, width, ratio) {
    pen.scale(ratio, ratio);
    pen.fillStyle = pens.sunk;
    pen.fillRect(0, 0, width, MINIMAP_HEIGHT);
    runsOf(this.path, 0, this.span.wall, Math.floor(width), strip);
    for (let i = 0; i < strip.length; i += RUN) {
      const [x, wide, family, look] = [strip.data[i], strip.data[i + 1], strip.data[i + 2], strip.data[i + 3]];
      pen.fillStyle = pens.fill(family, look);
      if (look & WAITING) pen.fillRect(x, MINIMAP_HEIGHT - 12, wide, 8);
      else pen.fillRect(x, 4, wide, MINIMAP_HEIGHT - 8);
    }
  }

  /** The strip is to be drawn anew: its size or the scheme changed. */
  forget() {
    this.ground = null;
  }

  /**
   * A drag on the window moves it, on an edge moves the edge, elsewhere chooses a new one.
   * @param {() => void} changed
   * @param {AbortSignal} signal
   */
  drag(changed, signal) {
    const { canvas, span } = this;
    /** @type {{ kind: string, at: number, from: number, to: number } | null} */
    let held = null;
    /** @param {PointerEvent} event */
    const xOf = (event) => event.clientX - canvas.getBoundingClientRect().left;
    /** @param {number} x */
    const timeAt = (x) => (x / Math.max(canvas.clientWidth, 1)) * span.wall;
    /** @param {number} x */
    const kindAt = (x) => {
      const width = canvas.clientWidth;
      const [left, right] = [(span.from / span.wall) * width, (span.to / span.wall) * width];
      if (span.whole) return "new";
      if (Math.abs(x - left) <= GRIP) return "left";
      if (Math.abs(x - right) <= GRIP) return "right";
      return x > left && x < right ? "move" : "new";
    };
    canvas.addEventListener(
      "pointerdown",
      (event) => {
        if (event.button !== 0) return;
        canvas.setPointerCapture(event.pointerId);
        const x = xOf(event);
        held = { kind: kindAt(x), at: timeAt(x), from: span.from, to: span.to };
        event.preventDefault();
      },
      { signal },
    );
    canvas.addEventListener(
      "pointermove",
      (event) => {
        const x = xOf(event);
        if (!held) {
          const kind = kindAt(x);
          canvas.style.cursor = kind === "move" ? "grab" : kind === "new" ? "crosshair" : "ew-resize";
          return;
        }
        const time = timeAt(x);
        const moved = time - held.at;
        if (held.kind === "move") span.set(held.from + moved, held.to + moved);
        else if (held.kind === "left") span.set(Math.min(held.from + moved, held.to), held.to);
        else if (held.kind === "right") span.set(held.from, Math.max(held.to + moved, held.from));
        else span.set(Math.min(held.at, time), Math.max(held.at, time));
        changed();
      },
      { signal },
    );
    for (const type of /** @type {const} */ (["pointerup", "pointercancel"])) {
      canvas.addEventListener(
        type,
        (event) => {
          if (held?.kind === "new" && Math.abs(timeAt(xOf(event)) - held.at) * canvas.clientWidth < 3 * span.wall) {
            // A click: the window goes there.
            const width = held.to - held.from;
            span.set(held.at - width / 2, held.at + width / 2);
            changed();
          }
          held = null;
        },
        { signal },
      );
    }
  }
}
