// Which code the request's time went to: a chart of its stacks by cause, and the same as a list.

import { fill, h, name, plain } from "../dom.js";
import { count, percent } from "../format.js";
import { countText, frameText, linesText } from "./frames.js";
import { Icicle, kindClass } from "./icicle.js";

/** @typedef {import("../shapes.js").CodeTree} CodeTree */

const MOST = 600; // characters of a sentence
const DEEPEST = 24; // levels that are set in
const KINDS = new Map([["python", "Python"], ["native", "native"], ["kernel", "kernel"], ["other", "not known, or not shown"]]);

/**
 * @param {import("../shapes.js").RequestView} view
 * @returns {HTMLElement | null}
 */
export function codeOf(view) {
  const { trees, left_out: more, sampled } = view.code;
  if (!trees.length) {
    if (!view.row.slow || sampled !== false) return null;
    return h("p", { class: "soft small no-code" }, "No code is named: no CPU sampler ran during this request. ", h("code", {}, "whyspan probes"), " says why.");
  }
  const body = h("div", { class: "code-body" });
  const show = (/** @type {number} */ i) => fill(body, partsOf(trees[i]));
  show(0);
  return h(
    "section",
    { class: "card code", "aria-labelledby": "code" },
    h(
      "div",
      { class: "head" },
      h("h2", { id: "code" }, "Code"),
      trees.length > 1 ? chooser(trees, show) : h("span", { class: "mono soft" }, labelOf(trees[0])),
      more > 0 && h("span", { class: "soft small" }, `${count(more, "cause")} more not shown`),
    ),
    body,
  );
}

/** @param {CodeTree} tree */
function labelOf(tree) {
  return `${plain(tree.cause, 60)}: ${countText(tree)}`;
}

/** @param {CodeTree[]} trees @param {(i: number) => void} show */
function chooser(trees, show) {
  const change = (/** @type {any} */ e) => show(e.target.selectedIndex);
  return h("label", { class: "field" }, "of", h("select", { on: { change } }, trees.map((tree) => h("option", {}, labelOf(tree)))));
}

/** @param {CodeTree} tree @returns {(Node | false)[]} */
function partsOf(tree) {
  const chart = new Icicle(tree);
  return [
    tree.sentence !== "" && h("p", { class: "code-sentence" }, h("bdi", {}, plain(tree.sentence, MOST))),
    tree.work.length > 0 && workOf(tree),
    h("div", { class: "row ice-bar" }, legendOf(tree), h("span", { class: "grow" }), chart.whole, chart.every),
    chart.element,
    listOf(tree),
  ];
}

/** @param {CodeTree} tree */
function workOf(tree) {
  const kinds = tree.work.map((w, i) => [i > 0 && ", ", name(w.name, 60), ` in ${count(w.value)}`]);
  return h("p", {}, h("span", { class: "soft" }, "kind of work: "), kinds.flat(), ` of ${countText(tree)}`);
}

/** @param {CodeTree} tree */
function legendOf(tree) {
  const seen = new Set(tree.nodes.map((n) => n.kind));
  const entry = (/** @type {string} */ mark, /** @type {string} */ text) => h("li", {}, h("span", { class: mark, "aria-hidden": "true" }), text);
  const kinds = [...KINDS].filter(([kind]) => seen.has(kind)).map(([kind, text]) => entry(`swatch ${kindClass(kind)}`, text));
  return h("ul", { class: "tl-legend small soft", "aria-label": "Legend" }, kinds, tree.top >= 0 && entry("ice-key", "where most of it was"));
}

/** The tree as a list, for whoever reads rather than looks. Made when it is opened. @param {CodeTree} tree */
function listOf(tree) {
  const body = h("tbody");
  const columns = ["seen in", "share", "innermost in", "level", "frame"];
  const table = h(
    "table",
    { class: "table code-list" },
    h("caption", { class: "sr" }, "Frames, each below the one that called it"),
    h("thead", {}, h("tr", {}, columns.map((c, i) => h("th", { scope: "col", class: i < 4 ? "num" : null }, c)))),
    body,
  );
  const details = h(
    "details",
    {},
    h("summary", {}, "The code as a list"),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "The code as a list" }, table),
  );
  details.addEventListener("toggle", () => body.childElementCount || fill(body, tree.nodes.map((n, i) => rowOf(tree, n, i))));
  return details;
}

/** @param {CodeTree} tree @param {import("../shapes.js").CodeNode} n @param {number} i */
function rowOf(tree, n, i) {
  const lines = linesText(tree, i);
  return h(
    "tr",
    { class: i === tree.top ? "guilty" : null },
    h("td", { class: "num" }, count(n.samples)),
    h("td", { class: "num" }, percent(tree.samples ? n.samples / tree.samples : 0)),
    h("td", { class: "num" }, n.own ? count(n.own) : "–"),
    h("td", { class: "num soft" }, n.depth + 1),
    h("td", { class: "mono", vars: { "--level": Math.min(n.depth, DEEPEST) } }, name(frameText(n), 500), lines !== "" && h("span", { class: "soft" }, ` ${lines}`)),
  );
}
