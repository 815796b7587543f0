/** Charts by uPlot, in the page's colours, with a selection that works by pointer and by keyboard. */

import uPlot from "./vendor/uplot/uPlot.esm.js";
import { hatch, onScheme, token } from "./colours.js";
import { h } from "./dom.js";

/** @typedef {{ from: number, to: number }} Span in values of the x axis */
/**
 * @typedef {object} ChartOptions
 * @property {string} label what it shows, for people who do not see it
 * @property {() => uPlot.AlignedData} data
 * @property {() => Omit<uPlot.Options, "width" | "height">} options made again when the colours change
 * @property {number} height px
 * @property {(index: number) => string} say a point in words, for the keyboard
 * @property {(span: Span | null) => void} [select] a span was chosen, or none
 * @property {(index: number, y: number, event: Event) => void} [pick] a point was clicked, or Enter pressed on it
 * @property {(index: number) => Span} [spanOf] the span that a point stands for
 */

/** A chart that follows its width and the colours. */
export class Chart {
  /** @param {ChartOptions} options @param {AbortSignal} signal */
  constructor(options, signal) {
    this.options = options;
    this.said = h("div", { class: "sr", "aria-live": "polite" });
    this.box = h("div", {
      class: "plot", tabindex: "0", role: "group", "data-keys": true, "aria-roledescription": "chart",
      "aria-label": `${options.label}. Arrow keys move, Shift and arrow keys select, Enter opens, Escape clears.`,
      vars: { "--plot-height": `${options.height}px` },
    });
    this.readout = h("div", { class: "readout", "aria-hidden": "true" });
    this.element = h("div", { class: "plot-frame" }, this.box, this.readout, this.said);
    /** @type {uPlot | null} */
    this.plot = null;
    this.index = -1;
    this.anchor = -1;
    const sizes = new ResizeObserver(() => this.fit());
    sizes.observe(this.box);
    signal.addEventListener("abort", () => (sizes.disconnect(), this.plot?.destroy()), { once: true });
    onScheme(() => this.rebuild(), signal);
    this.box.addEventListener("keydown", (event) => this.key(event), { signal });
  }

  fit() {
    const width = Math.floor(this.box.clientWidth);
    if (width < 1) return;
    if (this.plot) this.plot.setSize({ width, height: this.options.height });
    else this.build(width);
  }

  rebuild() {
    const selected = this.selected();
    this.plot?.destroy();
    this.plot = null;
    this.fit();
    if (selected) this.mark(selected);
  }

  /** @param {number} width */
  build(width) {
    const { select, pick, say, height } = this.options;
    const made = this.options.options();
    const plot = new uPlot(
      {
        ...made, width, height,
        cursor: {
          points: { size: 6 }, drag: { x: Boolean(select), y: false, setScale: false, dist: 4 }, focus: { prox: -1 },
          ...made.cursor,
        },
        legend: { show: false },
        hooks: {
          ...made.hooks,
          setSelect: [(u) => select?.(u.select.width > 0 ? spanOfPixels(u) : null)],
          setCursor: [(u) => {
            const at = u.cursor.idx;
            this.readout.textContent = at === null || at === undefined || (u.cursor.left ?? -1) < 0 ? "" : say(at);
          }],
        },
      },
      this.options.data(),
      this.box,
    );
    if (pick) {
      let down = 0;
      plot.over.addEventListener("pointerdown", (event) => (down = event.clientX));
      plot.over.addEventListener("click", (event) => {
        if (Math.abs(event.clientX - down) > 3 || plot.cursor.idx === null || plot.cursor.idx === undefined) return;
        pick(plot.cursor.idx, plot.posToVal(event.offsetY, "y"), event);
      });
    }
    this.plot = plot;
  }

  /** New data of the same series. */
  update() {
    if (this.plot) this.plot.setData(this.options.data());
  }

  /** @returns {Span | null} */
  selected() {
    return this.plot && this.plot.select.width > 0 ? spanOfPixels(this.plot) : null;
  }

  /** Show a span as selected, or none, without telling anybody. @param {Span | null} span */
  mark(span) {
    const plot = this.plot;
    if (!plot) return;
    const left = span ? plot.valToPos(span.from, "x") : 0;
    const right = span ? plot.valToPos(span.to, "x") : 0;
    plot.setSelect({ left, width: Math.max(right - left, 0), top: 0, height: span ? plot.over.clientHeight : 0 }, false);
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const plot = this.plot;
    const xs = plot?.data[0] ?? [];
    if (!plot || xs.length === 0) return;
    const moves = /** @type {Record<string, number>} */ ({ ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -xs.length, End: xs.length });
    const step = moves[event.key];
    if (step !== undefined) {
      event.preventDefault();
      const before = this.index < 0 ? (step > 0 ? -1 : xs.length) : this.index;
      if (event.shiftKey && this.anchor < 0) this.anchor = Math.max(before, 0);
      if (!event.shiftKey) this.anchor = -1;
      this.index = Math.min(Math.max(before + step, 0), xs.length - 1);
      this.moveTo(plot, this.index);
      if (event.shiftKey) this.selectByKeys(plot);
    } else if (event.key === "Enter" && this.index >= 0) {
      event.preventDefault();
      this.options.pick?.(this.index, Number.NaN, event);
    } else if (event.key === "Escape") {
      this.anchor = -1;
      this.mark(null);
      this.options.select?.(null);
    }
  }

  /** @param {uPlot} plot @param {number} index */
  moveTo(plot, index) {
    plot.setCursor({ left: plot.valToPos(Number(plot.data[0][index]), "x"), top: plot.over.clientHeight / 2 });
    this.said.textContent = this.options.say(index);
  }

  /** @param {uPlot} plot */
  selectByKeys(plot) {
    const { spanOf, select } = this.options;
    const [a, b] = [Math.min(this.anchor, this.index), Math.max(this.anchor, this.index)];
    const xs = plot.data[0];
    const span = spanOf ? { from: spanOf(a).from, to: spanOf(b).to } : { from: Number(xs[a]), to: Number(xs[b]) };
    this.mark(span);
    select?.(span);
  }
}

/** @param {uPlot} plot @returns {Span} */
function spanOfPixels(plot) {
  const { left, width } = plot.select;
  return { from: plot.posToVal(left, "x"), to: plot.posToVal(left + width, "x") };
}

/**
 * An axis in the page's colours.
 *
 * @param {Partial<uPlot.Axis>} [more]
 * @returns {uPlot.Axis}
 */
export function axis(more = {}) {
  return {
    stroke: token("--soft"),
    font: `11px ${token("--axis-font")}`,
    grid: { stroke: token("--rule"), width: 1 },
    ticks: { stroke: token("--rule"), width: 1, size: 4 },
    gap: 4,
    ...more,
  };
}

/** The axis of time: 24 hours, and the date where the day is another one. @param {Partial<uPlot.Axis>} [more] */
export function timeAxis(more = {}) {
  return axis({
    size: (_u, values) => (values?.some((v) => String(v).includes("\n")) ? 34 : 20),
    space: 64,
    values: (_u, splits, _i, _space, step) => splits.map((s, i) => tick(s, splits[i - 1], step)),
    ...more,
  });
}

/** @param {number} seconds @param {number | undefined} before @param {number} step */
function tick(seconds, before, step) {
  const d = new Date(seconds * 1e3);
  const two = (/** @type {number} */ v) => String(v).padStart(2, "0");
  const day = (before === undefined ? new Date() : new Date(before * 1e3)).toDateString() !== d.toDateString();
  const time = step >= 86_400 ? "" : `${two(d.getHours())}:${two(d.getMinutes())}` + (step < 60 ? `:${two(d.getSeconds())}` : "");
  return day ? `${time}\n${two(d.getMonth() + 1)}-${two(d.getDate())}` : time;
}

/** A series' fill: its colour, or a hatch of it. @param {string} value @param {boolean} hatch_ @returns {uPlot.Series.Fill} */
export function seriesFill(value, hatch_) {
  return (u) => (hatch_ ? hatch(u.ctx, value) : value);
}

/**
 * Stack series: each becomes the sum of itself and those before it.
 *
 * @param {(number | null)[][]} series
 * @returns {number[][]}
 */
export function stacked(series) {
  /** @type {number[][]} */
  const sums = [];
  for (const values of series) {
    const below = sums.at(-1);
    sums.push(values.map((v, i) => (v ?? 0) + (below?.[i] ?? 0)));
  }
  return sums;
}

/** Which of stacked *sums* a height at *index* falls into, or -1. @param {number[][]} sums @param {number} index @param {number} y */
export function layerAt(sums, index, y) {
  return y < 0 ? -1 : sums.findIndex((values) => y <= (values[index] ?? 0));
}

export { uPlot };
