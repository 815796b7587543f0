// Where the time went: a bar per cause beside what is usual.

import { familyClass, hatched } from "../colours.js";
import { h } from "../dom.js";
import { count, ms, signedMs } from "../format.js";
import { causeName } from "./verdict.js";

const SHOWN = 10; // causes before the rest is folded

/**
 * @param {import("../shapes.js").RequestView} view
 * @returns {HTMLElement}
 */
export function timesOf(view) {
  const { causes, baseline_count: of } = view;
  const most = Math.max(...causes.map((c) => Math.max(c.ms, c.usual_ms ?? 0)), 1e-9);
  const table = (/** @type {import("../shapes.js").CauseBar[]} */ list, /** @type {boolean} */ named) =>
    h(
      "table",
      { class: "table bars" },
      h("caption", { class: "sr" }, "Time by cause beside the usual time"),
      h(
        "thead",
        { class: named ? null : "sr" },
        h(
          "tr",
          {},
          h("th", { scope: "col" }, "cause"),
          h("th", { scope: "col", class: "bar-cell" }, h("span", { class: "sr" }, "bar")),
          h("th", { scope: "col", class: "num" }, "time"),
          h("th", { scope: "col", class: "num" }, "usual"),
          h("th", { scope: "col", class: "num" }, "more"),
        ),
      ),
      h("tbody", {}, list.map((bar) => barRow(bar, most, view.verdict.cause))),
    );
  const rest = causes.slice(SHOWN);
  return h(
    "section",
    { class: "card", "aria-labelledby": "times" },
    h(
      "div",
      { class: "head" },
      h("h2", { id: "times" }, "Where the time went"),
      h("span", { class: "soft small" }, of ? `usual: median of ${count(of, "ordinary request")}` : "no baseline yet"),
    ),
    table(causes.slice(0, SHOWN), true),
    rest.length > 0 && h("details", {}, h("summary", {}, `${rest.length} more`), table(rest, false)),
  );
}

/**
 * @param {import("../shapes.js").CauseBar} bar
 * @param {number} most ms, the whole width
 * @param {string} verdict its cause
 */
function barRow(bar, most, verdict) {
  const width = (/** @type {number} */ value) => `${Math.max((value / most) * 100, value > 0 ? 0.5 : 0).toFixed(2)}%`;
  const usual = bar.usual_ms;
  const both = () => [
    h("div", { class: `bar ${familyClass(bar.cause)}${hatched(bar.cause) ? " hatch" : ""}`, vars: { width: width(bar.ms) } }),
    usual !== null && h("div", { class: "bar usual", vars: { width: width(usual) } }),
  ];
  return h(
    "tr",
    { class: bar.cause === verdict ? "guilty" : null },
    h("th", { scope: "row" }, causeName(bar.cause), h("div", { class: "bar-under", "aria-hidden": "true" }, both())),
    h("td", { class: "bar-cell", "aria-hidden": "true" }, both()),
    h("td", { class: "num" }, ms(bar.ms)),
    h("td", { class: "num soft" }, usual === null ? "–" : ms(usual)),
    h("td", { class: "num" }, bar.excess_ms > 0 ? signedMs(bar.excess_ms) : ""),
  );
}
