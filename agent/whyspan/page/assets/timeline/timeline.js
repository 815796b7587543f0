// The timeline of one request: lanes, the critical path across them, a window of time that moves.

import { onScheme } from "../colours.js";
import { ns } from "../format.js";
import { partsOf } from "./controls.js";
import { drawScene } from "./draw.js";
import { layoutOf } from "./layout.js";
import { Minimap } from "./minimap.js";
import { pensOf } from "./pens.js";
import { steer } from "./steer.js";
import { pathTrack, toTrack, toWalk } from "./tracks.js";
import { Span } from "./window.js";

const MOST_HEIGHT = 620; // px; lanes beyond scroll

export class Timeline {
  /**
   * @param {import("../shapes.js").RequestView} view
   * @param {AbortSignal} signal ends its listeners
   */
  constructor(view, signal) {
    this.tracks = view.lanes.map(toTrack);
    this.walk = toWalk(view.path, this.tracks);
    this.firstNs = view.first_ns;
    this.span = new Span(view.wall_ns);
    /** @type {import("./tracks.js").Spot | null} */
    this.picked = null;
    /** @type {number | null} */
    this.pointer = null;
    /** @type {[number, number] | null} */
    this.brush = null;
    this.scroll = 0;
    this.room = 0; // px that there were for all of it, and device pixels for each, at the last layout
    this.ratio = 0;
    this.width = 0;
    this.height = 0;
    this.frame = 0;
    this.drawn = false;
    /** @type {Set<() => void>} called after the window or the selection changed */
    this.watchers = new Set();
    this.layout = layoutOf(this.tracks, 1000);
    this.parts = partsOf();
    const ctx = this.parts.canvas.getContext("2d", { alpha: false });
    if (!ctx) throw new Error("this browser gives no 2D canvas");
    this.ctx = ctx;
    /** @type {import("./pens.js").Pens | null} made on the first frame and after a change of scheme */
    this.pens = null;
    this.minimap = new Minimap(this.parts.strip, pathTrack(this.walk), this.span, () => this.changed(), signal);
    this.listen(signal);
    steer(this, signal);
    this.changed();
  }

  /** @param {AbortSignal} signal */
  listen(signal) {
    const sized = new ResizeObserver(() => this.resize());
    sized.observe(this.parts.root);
    signal.addEventListener("abort", () => {
      sized.disconnect();
      cancelAnimationFrame(this.frame);
    });
    onScheme(() => {
      this.pens = null;
      this.minimap.forget();
      this.request();
    }, signal);
    const { view } = this.parts;
    view.addEventListener("scroll", () => {
      this.scroll = view.scrollTop;
      this.request();
    }, { signal });
  }

  get plot() {
    return Math.max(this.width - this.layout.gutter, 1);
  }

  resize() {
    const { root, view, space, canvas } = this.parts;
    const ratio = devicePixelRatio || 1;
    if (root.clientWidth <= 0 || (root.clientWidth === this.room && ratio === this.ratio)) return;
    this.room = root.clientWidth;
    this.ratio = ratio;
    this.layout = layoutOf(this.tracks, root.clientWidth);
    const whole = this.layout.pinned + this.layout.scrolled;
    this.height = Math.min(whole, MOST_HEIGHT);
    view.style.height = `${this.height + 2}px`; // with its border
    space.style.height = `${whole}px`;
    this.width = view.clientWidth; // without the scroll bar, which may just have come
    this.layout = layoutOf(this.tracks, this.width);
    canvas.style.width = `${this.width}px`;
    canvas.style.height = `${this.height}px`;
    canvas.width = Math.round(this.width * ratio);
    canvas.height = Math.round(this.height * ratio);
    this.minimap.forget();
    this.draw(); // a canvas with a new size is empty: not on the next frame, now
  }

  /** Draws on the next frame, once. */
  request() {
    if (!this.frame) this.frame = requestAnimationFrame(() => this.draw());
  }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    if (!this.width) return;
    const { ratio } = this;
    this.ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.pens ??= pensOf(this.ctx);
    const { tracks, walk, layout, pens, width, height, scroll, firstNs, picked, pointer, brush } = this;
    const { from, to } = this.span;
    drawScene(this.ctx, { tracks, walk, layout, pens, from, to, width, height, scroll, firstNs, picked, pointer, brush });
    this.minimap.draw(pens, this.parts.root.clientWidth, ratio);
    if (!this.drawn) performance.mark("whyspan:drawn"); // when a person first sees it
    this.drawn = true;
  }

  /** The window or the selection changed. */
  changed() {
    const { from, to, whole } = this.span;
    this.parts.shown.textContent = whole ? `whole request, ${ns(to - from)}` : `${ns(from, 5)} – ${ns(to, 5)} (${ns(to - from)})`;
    this.request();
    for (const watcher of this.watchers) watcher();
  }

  /**
   * @param {number} factor
   * @param {number} [share] of the plot's width, the time that stays
   * @returns {boolean} whether anything moved
   */
  zoom(factor, share = this.pickedShare()) {
    const { from, to } = this.span;
    this.span.zoom(factor, Math.min(Math.max(share, 0), 1));
    const moved = from !== this.span.from || to !== this.span.to;
    if (moved) this.changed();
    return moved;
  }

  /** Where the picked piece is in the window, 0..1; the middle without one in sight. */
  pickedShare() {
    if (!this.picked) return 0.5;
    const track = this.tracks[this.picked.track];
    const middle = (track.start[this.picked.piece] + track.end[this.picked.piece]) / 2;
    const share = (middle - this.span.from) / this.span.width;
    return share >= 0 && share <= 1 ? share : 0.5;
  }

  /** @param {number} share of the window's width, later when positive */
  panBy(share) {
    this.span.pan(share * this.span.width);
    this.changed();
  }

  showAll() {
    this.span.set(0, this.span.wall);
    this.changed();
  }
}
