// Stacks merged into a tree, as boxes: where each lies, what is folded or zoomed, and what it says.

import { plain } from "../dom.js";
import { count, percent } from "../format.js";

/** @typedef {import("../shapes.js").CodeTree} CodeTree */
/** @typedef {{ kind: string, name: string, place: string }} Frame */
/**
 * @typedef {object} Box
 * @property {number} node its index; of a fold that of the outermost frame in it
 * @property {number} last the innermost frame in it
 * @property {number} frames how many it stands for: 1, or those of a fold
 * @property {number} row
 * @property {number} from 0..1 of the width
 * @property {number} to
 * @property {boolean} above it calls what is zoomed into
 */
/** @typedef {{ zoom: number, unfolded: boolean, opened: Set<number> }} Look zoom: a node, -1: all is shown */

/** Frames that are left before a run of them divides, or comes to what is most of it. */
const KEPT = 3;
/** Fewer are not folded. */
const FEWEST = 3;
const MOST = 500; // characters

/** The same words as `whyspan explain` has for a frame. @param {Frame} f */
export function frameText(f) {
  if (!f.place) return plain(f.name, MOST);
  if (f.kind === "thread") return plain(`${f.name}, ${f.place}`, MOST);
  return plain(f.kind === "python" ? `${f.name} (${f.place})` : `${f.name} [${f.place}]`, MOST);
}

/** Where it is, in short. @param {Frame} f */
export function placeText(f) {
  return plain(f.place.slice(f.place.lastIndexOf("/") + 1), MOST);
}

/** @param {CodeTree} tree @param {number} [samples] all of the tree's without */
export function countText(tree, samples = tree.samples) {
  return count(samples, tree.blocked ? "long wait" : "sample");
}

/** @param {CodeTree} tree @param {number} index */
export function shareText(tree, index) {
  const { samples, own } = tree.nodes[index];
  const inner = own && own < samples ? `, innermost in ${count(own)}` : own ? ", innermost in all" : "";
  return `${count(samples)} of ${countText(tree)}, ${percent(tree.samples ? samples / tree.samples : 0)}${inner}`;
}

/** At which lines a function was seen; empty where that was one. @param {CodeTree} tree @param {number} index */
export function linesText(tree, index) {
  const { lines } = tree.nodes[index];
  return lines.length ? `line ${lines.map(([line, n]) => `${line} in ${count(n)}`).join(", ")}` : "";
}

/** @param {CodeTree} tree @param {Box} box */
export function boxText(tree, box) {
  return box.frames > 1 ? foldText(tree, box) : frameText(tree.nodes[box.node]);
}

/** @param {CodeTree} tree @param {Box} box a fold */
function foldText(tree, { node, last, frames }) {
  return plain(`${frames} frames: ${tree.nodes[node].name} … ${tree.nodes[last].name}`, MOST);
}

/** @param {CodeTree} tree @returns {number[][]} indices of what each node calls */
export function childrenOf(tree) {
  /** @type {number[][]} */
  const children = tree.nodes.map(() => []);
  tree.nodes.forEach((n, i) => n.parent >= 0 && children[n.parent].push(i));
  return children;
}

/**
 * Runs of frames that only lead to the next: the outermost of what is folded of each, and the innermost.
 *
 * @param {CodeTree} tree
 * @param {number[][]} children
 * @returns {Map<number, number>}
 */
export function foldsOf(tree, children) {
  const { nodes, top } = tree;
  const only = (/** @type {number} */ i) => {
    const [child] = children[i];
    return children[i].length === 1 && nodes[child].samples === nodes[i].samples ? child : -1;
  };
  /** @type {Map<number, number>} */
  const folds = new Map();
  nodes.forEach((n, i) => {
    if (n.parent >= 0 && only(n.parent) === i) return; // not the first of a run
    const run = [i];
    for (let next = only(i); next >= 0; next = only(next)) run.push(next);
    const first = n.kind === "thread" ? 1 : 0;
    const told = run.indexOf(top);
    const end = (told >= 0 ? told + 1 : run.length) - KEPT;
    if (end - first >= FEWEST) folds.set(run[first], run[end - 1]);
  });
  return folds;
}

/**
 * @param {CodeTree} tree
 * @param {number[][]} children
 * @param {Map<number, number>} folds
 * @param {Look} look
 * @returns {{ boxes: Box[], rows: number }} the outermost first
 */
export function boxesOf(tree, children, folds, { zoom, unfolded, opened }) {
  const { nodes } = tree;
  const left = zoom < 0 ? 0 : nodes[zoom].start;
  const width = Math.max(zoom < 0 ? tree.samples : nodes[zoom].samples, 1);
  /** @type {Box[]} */
  const boxes = [];
  let rows = 0;
  /** @param {number} node @param {number} row */
  const place = (node, row) => {
    const { start, samples } = nodes[node];
    const from = Math.max((start - left) / width, 0);
    const to = Math.min((start + samples - left) / width, 1);
    if (to <= from) return;
    const last = (unfolded || opened.has(node) ? undefined : folds.get(node)) ?? node;
    boxes.push({ node, last, frames: nodes[last].depth - nodes[node].depth + 1, row, from, to, above: last < zoom });
    rows = Math.max(rows, row + 1);
    for (const child of children[last]) place(child, row + 1);
  };
  nodes.forEach((n, i) => n.parent < 0 && place(i, 0));
  return { boxes, rows };
}
