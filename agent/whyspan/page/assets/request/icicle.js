// A tree of stacks as a chart: the outermost frame on top, each as wide as the samples that it was seen in.

import { button, fill, h, name } from "../dom.js";
import { boxesOf, boxText, childrenOf, foldsOf, linesText, placeText, shareText } from "./frames.js";

/** @typedef {import("./frames.js").Box} Box */

const ROW = 22; // px, the height of a row
const HINT = "Click a frame to zoom in. Arrow keys walk the frames, Enter zooms, Escape shows all again.";
/** Which of the page's colours a kind has. */
const COLOURS = new Map([["thread", "work"], ["python", "python"], ["native", "net"], ["kernel", "client"]]);

/** The class that gives an element the colour of a kind of frame. @param {string} kind */
export function kindClass(kind) {
  return `fam-${COLOURS.get(kind) ?? "unknown"}`;
}

/** The chart, with what is above and below it. */
export class Icicle {
  /** @param {import("../shapes.js").CodeTree} tree */
  constructor(tree) {
    this.tree = tree;
    this.children = childrenOf(tree);
    this.folds = foldsOf(tree, this.children);
    /** @type {import("./frames.js").Look} */
    this.look = { zoom: -1, unfolded: false, opened: new Set() };
    /** @type {Box[]} */
    this.boxes = [];
    this.at = -1; // the node that the keys are on
    this.plot = h("div", { class: "ice-plot", "aria-hidden": "true" });
    this.tip = h("div", { class: "tl-tip", hidden: true, "aria-hidden": "true" });
    this.said = h("p", { class: "ice-said", "aria-live": "polite" }, h("span", { class: "soft" }, HINT));
    this.whole = button("Whole", () => (this.view.focus(), this.zoomTo(-1)), { hidden: true, "aria-label": "Whole chart" });
    this.every = button("All frames", () => this.unfold(), { "aria-pressed": "false", hidden: !this.folds.size });
    this.view = h(
      "div",
      {
        class: "ice-view", tabindex: 0, role: "group", "data-keys": true, "aria-roledescription": "chart",
        "aria-label": "Stacks of the code, outermost frame on top. Arrow keys walk the frames, Enter zooms in, Escape shows all again. The list below holds the same.",
        on: {
          keydown: (/** @type {KeyboardEvent} */ e) => this.key(e),
          focus: () => this.view.matches(":focus-visible") && this.go(this.boxOf(this.at) ?? this.boxOf(tree.top) ?? this.boxes[0]),
          blur: () => this.mark(-1),
        },
      },
      this.plot,
    );
    this.plot.addEventListener("click", (e) => this.click(e));
    this.plot.addEventListener("pointermove", (e) => this.point(e));
    this.plot.addEventListener("pointerleave", () => (this.tip.hidden = true));
    this.element = h("div", { class: "ice" }, h("div", { class: "tl-frame" }, this.view, this.tip), this.said);
    this.draw();
  }

  draw() {
    const { boxes, rows } = boxesOf(this.tree, this.children, this.folds, this.look);
    this.boxes = boxes;
    this.plot.style.setProperty("height", `${rows * ROW}px`);
    fill(this.plot, boxes.map((box, i) => this.box(box, i)));
    this.whole.hidden = this.look.zoom < 0;
    if (document.activeElement === this.view) this.mark(this.at);
  }

  /** @param {Box} box @param {number} i */
  box(box, i) {
    const { nodes, top } = this.tree;
    const node = nodes[box.node];
    const fold = box.frames > 1;
    const classes = ["ice-box", kindClass(node.kind), fold && "fold", box.above && "above", box.node === top && "top"];
    const place = fold || node.kind === "other" ? "" : node.kind === "thread" ? node.place : placeText(node);
    return h(
      "div",
      {
        class: classes.filter(Boolean).join(" "),
        data: { box: i },
        vars: { left: `${box.from * 100}%`, width: `${(box.to - box.from) * 100}%`, top: `${box.row * ROW}px` },
      },
      h("span", { class: "ice-text" }, name(fold ? boxText(this.tree, box) : node.name, 200), place && h("span", { class: "ice-place" }, name(place, 200))),
    );
  }

  /** @param {number} node @returns {Box | undefined} the box that shows it */
  boxOf(node) {
    return this.boxes.find((b) => b.node <= node && node <= b.last && this.within(node, b));
  }

  /** @param {number} node @param {Box} box */
  within(node, box) {
    for (let at = box.last; at >= box.node; at = this.tree.nodes[at].parent) if (at === node) return true;
    return false;
  }

  /** @param {Box} box */
  words(box) {
    const { tree } = this;
    return [boxText(tree, box), shareText(tree, box.last), box.frames > 1 ? "" : linesText(tree, box.node)].filter(Boolean);
  }

  /** Show a node as the one that the keys are on; -1: none. @param {number} node */
  mark(node) {
    for (const element of this.plot.querySelectorAll(".at")) element.classList.remove("at");
    const box = node < 0 ? undefined : this.boxOf(node);
    const element = box && this.plot.children[this.boxes.indexOf(box)];
    element?.classList.add("at");
    return element;
  }

  /** Go to a box and say what it is. @param {Box | undefined} box */
  go(box) {
    if (!box) return;
    this.at = box.node;
    this.tip.hidden = true;
    this.mark(box.node)?.scrollIntoView({ block: "nearest", inline: "nearest" });
    const [what, ...more] = this.words(box);
    fill(this.said, h("span", { class: "mono" }, what), ` · ${more.join(" · ")}`);
  }

  /** Zoom in, out of what is zoomed into, or open a fold. @param {Box} box */
  act(box) {
    if (box.frames > 1) {
      this.look.opened.add(box.node);
      this.at = box.node;
      this.draw();
      this.go(this.boxOf(box.node));
      return;
    }
    const all = this.tree.nodes[box.node].samples === this.tree.samples;
    this.zoomTo(all || box.node === this.look.zoom ? -1 : box.node, box.node);
  }

  /** @param {number} node -1: all @param {number} [at] where the keys are then */
  zoomTo(node, at = this.look.zoom) {
    this.look.zoom = node;
    this.draw();
    this.go(this.boxOf(at) ?? this.boxes[0]);
  }

  unfold() {
    this.look.unfolded = !this.look.unfolded;
    this.look.opened.clear();
    this.every.setAttribute("aria-pressed", String(this.look.unfolded));
    this.draw();
  }

  /** @param {Event} event @returns {Box | undefined} */
  under(event) {
    const element = event.target instanceof Element ? /** @type {HTMLElement | null} */ (event.target.closest(".ice-box")) : null;
    return element ? this.boxes[Number(element.dataset.box)] : undefined;
  }

  /** @param {MouseEvent} event */
  click(event) {
    const box = this.under(event);
    if (box) this.act(box);
  }

  /** @param {PointerEvent} event */
  point(event) {
    const box = this.under(event);
    this.tip.hidden = !box || event.pointerType === "touch";
    const frame = this.tip.parentElement;
    if (!box || !frame || this.tip.hidden) return;
    const [what, ...more] = this.words(box);
    fill(this.tip, h("span", { class: "mono strong" }, what), more.map((text) => h("span", {}, text)));
    const around = frame.getBoundingClientRect();
    const left = Math.min(event.clientX - around.left + 12, around.width - this.tip.offsetWidth);
    this.tip.style.setProperty("left", `${Math.max(left, 0)}px`);
    this.tip.style.setProperty("top", `${event.clientY - around.top + 16}px`);
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const here = this.boxOf(this.at);
    const next = this.next(event.key, here);
    if (next) this.go(next);
    else if ((event.key === "Enter" || event.key === " ") && here) this.act(here);
    else if (event.key === "Escape" && this.look.zoom >= 0) this.zoomTo(-1);
    else if (!event.key.startsWith("Arrow")) return;
    event.preventDefault();
  }

  /** @param {string} key @param {Box | undefined} here @returns {Box | undefined} where a key leads */
  next(key, here) {
    if (key === "Home") return this.boxes[0];
    if (key === "End") return this.boxes.reduce((a, b) => (b.row > a.row ? b : a), this.boxes[0]);
    if (!here) return key.startsWith("Arrow") ? this.boxes[0] : undefined;
    if (key === "ArrowUp") return this.boxOf(this.tree.nodes[here.node].parent);
    if (key === "ArrowDown") return this.children[here.last].map((c) => this.boxOf(c)).find(Boolean);
    const row = this.boxes.filter((b) => b.row === here.row);
    if (key === "ArrowLeft") return row[row.indexOf(here) - 1];
    return key === "ArrowRight" ? row[row.indexOf(here) + 1] : undefined;
  }
}
