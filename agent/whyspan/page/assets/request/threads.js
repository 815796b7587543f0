// What all threads of a process were in while one of them stalled.

import { h, name, plain } from "../dom.js";
import { count, ms, ns } from "../format.js";
import { frameText } from "./frames.js";
import { kindClass } from "./icicle.js";

const FRAMES = 6; // of a group before the rest is folded
const GROUPS = 8;

/**
 * @param {import("../shapes.js").RequestView} view
 * @returns {HTMLElement | null}
 */
export function threadsOf(view) {
  const { snapshots } = view.code;
  if (!snapshots.length) return null;
  return h(
    "section",
    { class: "card threads", "aria-labelledby": "threads" },
    h("div", { class: "head" }, h("h2", { id: "threads" }, "Threads while it stalled")),
    snapshots.flatMap(snapshotOf),
  );
}

/** @param {import("../shapes.js").SnapshotView} s */
function snapshotOf(s) {
  const all = s.groups.reduce((sum, g) => sum + g.count, s.left_out);
  const rest = s.groups.slice(GROUPS);
  return [
    h("h3", {}, name(s.process || "process", 60), ` [${s.tgid}] at ${ns(s.at_ns)}: ${count(all, "thread")}`),
    h("ul", { class: "groups" }, s.groups.slice(0, GROUPS).map(groupOf)),
    rest.length > 0 && h("details", {}, h("summary", {}, `${count(rest.length, "group")} more`), h("ul", { class: "groups" }, rest.map(groupOf))),
    s.left_out > 0 && h("p", { class: "soft" }, `${count(s.left_out, "more thread")}, not shown`),
  ];
}

/** @param {import("../shapes.js").ThreadGroupView} g */
function groupOf(g) {
  const names = [...new Set(g.threads)].slice(0, 3).join(", ");
  const state = g.syscall ? `${g.state} in ${g.syscall}` : g.state;
  const rest = g.frames.slice(FRAMES);
  return h(
    "li",
    { class: g.stalled ? "stalled" : null },
    h(
      "div",
      { class: "row" },
      g.stalled && h("span", { class: "chip note" }, "stalled"),
      g.count > 1 && h("span", { class: "strong" }, `${count(g.count, "thread")}:`),
      h("span", { class: "strong" }, name(names, 200)),
      h("span", {}, name(state, 100)),
      g.for_ms > 0 && h("span", { class: "soft" }, `for ${ms(g.for_ms)}`),
    ),
    g.frames.length > 0 && framesOf(g.frames.slice(0, FRAMES)),
    rest.length > 0 && h("details", {}, h("summary", {}, `${count(rest.length, "frame")} more`), framesOf(rest)),
  );
}

/** @param {import("../shapes.js").FrameView[]} frames */
function framesOf(frames) {
  return h("ol", { class: "frames mono" }, frames.map((f) => h("li", { class: kindClass(f.kind) }, h("bdi", {}, plain(frameText(f))))));
}
