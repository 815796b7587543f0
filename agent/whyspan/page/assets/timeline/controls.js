// The elements of the timeline.

import { h } from "../dom.js";
import { MINIMAP_HEIGHT } from "./minimap.js";

const HELP =
  "Timeline of the request. Left and right arrows move, plus and minus zoom, 0 shows all, N and P walk the critical" +
  " path, up and down change lanes, Enter zooms to the selection. The table below holds the same.";

/** Makes the elements; `root` holds them all. */
export function partsOf() {
  const canvas = h("canvas", { class: "tl-canvas", "aria-hidden": "true" });
  const strip = h("canvas", { class: "tl-strip", "aria-hidden": "true", vars: { height: `${MINIMAP_HEIGHT}px` } });
  const space = h("div", { class: "tl-space" }, canvas);
  const view = h(
    "div",
    { class: "tl-view", tabindex: 0, role: "application", "aria-roledescription": "timeline", "aria-label": HELP },
    space,
  );
  const tip = h("div", { class: "tl-tip", hidden: true, "aria-hidden": "true" });
  const shown = h("output", { class: "tl-shown soft" });
  const said = h("p", { class: "tl-said", "aria-live": "polite" });
  const bar = h("div", { class: "tl-bar row", role: "group", "aria-label": "Zoom and critical path" });
  const root = h("div", { class: "tl" }, bar, strip, h("div", { class: "tl-frame" }, view, tip), said);
  return { root, bar, strip, view, space, canvas, tip, shown, said };
}
