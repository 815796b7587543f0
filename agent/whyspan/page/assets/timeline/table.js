// The timeline as a table: the same pieces, for whoever reads rather than looks. Made when it is opened.

import { familyClass, hatched } from "../colours.js";
import { button, fill, h, name } from "../dom.js";
import { count, ns } from "../format.js";
import { pick } from "./picking.js";
import { firstAfter } from "./tracks.js";
import { measure, wordsOf } from "./words.js";

const PAGE = 100; // rows at a time

/**
 * The pieces of the critical path in the window by time, then those of every other lane.
 * @param {import("./timeline.js").Timeline} t
 * @returns {import("./tracks.js").Spot[]}
 */
export function spotsIn(t) {
  const { walk, tracks, span } = t;
  const spots = [];
  /** @type {Set<number>} */
  const walked = new Set(walk.track);
  for (let i = firstAfter(walk.end, span.from); i < walk.count && walk.start[i] < span.to; i++) {
    spots.push({ track: walk.track[i], piece: walk.piece[i] });
  }
  tracks.forEach((track, i) => {
    if (walked.has(i)) return;
    for (let p = firstAfter(track.end, span.from); p < track.count && track.start[p] < span.to; p++) {
      spots.push({ track: i, piece: p });
    }
  });
  return spots;
}

/**
 * @param {import("./timeline.js").Timeline} t
 * @returns {HTMLDetailsElement}
 */
export function tableOf(t) {
  let first = 0;
  let longest = false;
  const head = h("div", { class: "row tl-pages" });
  const body = h("tbody");
  const columns = ["at", "for", "state", "cause or name", "lane", "detail"];
  const table = h(
    "table",
    { class: "table tl-table" },
    h("caption", { class: "sr" }, "Pieces of the critical path and of the other lanes, in the time shown above"),
    h("thead", {}, h("tr", {}, columns.map((c, i) => h("th", { scope: "col", class: i < 2 ? "num" : null }, c)))),
    body,
  );
  const details = h(
    "details",
    { class: "tl-details" },
    h("summary", {}, "The timeline as a table"),
    head,
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "The timeline as a table" }, table),
  );

  const draw = () => {
    if (!details.open) return;
    const spots = spotsIn(t);
    if (longest) {
      /** @param {import("./tracks.js").Spot} s */
      const length = (s) => t.tracks[s.track].end[s.piece] - t.tracks[s.track].start[s.piece];
      spots.sort((a, b) => length(b) - length(a));
    }
    first = Math.max(Math.min(first, Math.floor((spots.length - 1) / PAGE) * PAGE), 0);
    const last = Math.min(first + PAGE, spots.length);
    /** @param {number} to */
    const go = (to) => () => {
      first = to;
      draw();
    };
    fill(
      head,
      h("span", { class: "soft" }, spots.length ? `${count(first + 1)}–${count(last)} of ${count(spots.length)} pieces` : "no pieces in this window"),
      button("Back", go(first - PAGE), { disabled: first === 0 }),
      button("More", go(first + PAGE), { disabled: last >= spots.length }),
      button("Longest first", () => {
        longest = !longest;
        first = 0;
        draw();
      }, { "aria-pressed": String(longest) }),
      counters(t),
    );
    fill(body, spots.slice(first, last).map((spot) => row(t, spot)));
  };
  let waiting = 0;
  t.watchers.add(() => {
    // A moving window would make it anew on every frame.
    clearTimeout(waiting);
    if (details.open) waiting = setTimeout(draw, 150);
  });
  details.addEventListener("toggle", draw);
  return details;
}

/**
 * @param {import("./timeline.js").Timeline} t
 * @param {import("./tracks.js").Spot} spot
 */
function row(t, spot) {
  const w = wordsOf(t.tracks[spot.track], spot.piece);
  const here = t.picked?.track === spot.track && t.picked.piece === spot.piece;
  const swatch = w.cause
    ? h("span", { class: `swatch ${familyClass(w.cause)}${hatched(w.cause, w.inferred) ? " hatch" : ""}`, "aria-hidden": "true" })
    : null;
  return h(
    "tr",
    { class: here ? "picked" : null },
    h("td", { class: "num" }, button(w.at, () => pick(t, spot), { class: "btn quiet", "aria-label": `Show the piece at ${w.at}` })),
    h("td", { class: "num" }, w.length),
    h("td", { class: "nowrap" }, w.state),
    h("td", {}, h("span", { class: "cause" }, swatch, name(w.what, 40)), w.inferred && h("span", { class: "soft" }, " (inferred)")),
    h("td", {}, name(w.where, 60)),
    h("td", {}, name(w.detail, 120)),
  );
}

/**
 * What the counters hold at most, for whoever cannot see their curves.
 * @param {import("./timeline.js").Timeline} t
 */
function counters(t) {
  const texts = t.tracks.filter((track) => track.lane.kind === "counter" && track.at.length).map((track) => {
    const at = track.value.indexOf(track.most);
    return `${track.lane.label}: at most ${measure(track.most, track.lane.unit)}, at ${ns(track.at[Math.max(at, 0)])}`;
  });
  return texts.length ? h("span", { class: "sr" }, texts.join("; ")) : null;
}
