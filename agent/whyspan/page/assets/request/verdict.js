// Why this request was slow: the sentence, who did it, what shows it, what was ruled out, what to do.

import { h, name, plain } from "../dom.js";
import { ms, percent } from "../format.js";
import { familyClass, hatched } from "../colours.js";

const MOST = 500; // characters of a sentence

/**
 * A cause with its swatch.
 * @param {string} cause
 */
export function causeName(cause) {
  const hatch = hatched(cause) ? " hatch" : "";
  const swatch = h("span", { class: `swatch ${familyClass(cause)}${hatch}`, "aria-hidden": "true" });
  return h("span", { class: `cause ${familyClass(cause)}` }, swatch, name(cause, 60));
}

/**
 * @param {import("../shapes.js").RequestView} view
 * @returns {HTMLElement}
 */
export function verdictOf(view) {
  const { row, verdict } = view;
  if (!verdict.sentence && !verdict.cause) {
    return h(
      "section",
      { class: "card verdict", "aria-labelledby": "verdict" },
      h("h2", { id: "verdict", class: "sentence" }, "Not slow: kept as a sample of ordinary requests."),
    );
  }
  const facts = [
    h("span", { class: "strong" }, causeName(verdict.cause)),
    h("span", {}, `${ms(verdict.excess_ms)} ${view.baseline_count ? "more than usual" : "in all"}`),
    h("span", {}, `${percent(verdict.share)} of all excess`),
    h("span", { title: "0: a guess, 1: sure" }, `confidence ${verdict.confidence.toFixed(2)}`),
    row.phase ? h("span", {}, "in ", name(row.phase, 20)) : null,
    verdict.code ? h("span", {}, "in ", h("code", {}, name(verdict.code, 300))) : null,
    view.baseline_count ? null : h("span", { class: "chip note" }, "no baseline yet: absolute times"),
  ];
  return h(
    "section",
    { class: `card verdict ${familyClass(verdict.cause)}`, "aria-labelledby": "verdict" },
    h("h2", { id: "verdict", class: "sentence" }, h("bdi", {}, plain(verdict.sentence || `The cause is ${verdict.cause}.`, MOST))),
    h("div", { class: "row verdict-facts" }, facts),
  );
}

/**
 * Who did it, as one line.
 * @param {import("../shapes.js").CulpritView} culprit
 */
function culpritLine(culprit) {
  if (!culprit.kind && !culprit.name) return null;
  const ids = [];
  if (culprit.tgid) ids.push(`process ${culprit.tgid}`);
  if (culprit.tid) ids.push(`thread ${culprit.tid}`);
  const kind = culprit.kind && culprit.kind !== culprit.name ? `${culprit.kind} ` : "";
  return h(
    "span",
    {},
    h("span", { class: "soft" }, kind),
    h("span", { class: "strong" }, name(culprit.name, 160)),
    ids.length > 0 && h("span", { class: "soft" }, ` (${ids.join(", ")})`),
    culprit.detail && h("span", {}, ": ", name(culprit.detail, 300)),
    culprit.trace_id && h("span", { class: "soft" }, " trace ", h("code", {}, name(culprit.trace_id, 32))),
  );
}

/**
 * Culprit, evidence, fix and other causes.
 * @param {import("../shapes.js").RequestView} view
 * @returns {HTMLElement | null}
 */
export function groundsOf(view) {
  const { verdict } = view;
  const culprit = culpritLine(verdict.culprit);
  const parts = [
    culprit && [h("h3", {}, "Culprit"), h("p", {}, culprit)],
    verdict.fix && [h("h3", {}, "What to do"), h("p", {}, h("bdi", {}, plain(verdict.fix, MOST)))],
    verdict.evidence.length > 0 && [
      h("h3", {}, "Evidence"),
      h("ul", {}, verdict.evidence.map((line) => h("li", {}, h("bdi", {}, plain(line, MOST))))),
    ],
    verdict.others.length > 0 && [
      h("h3", {}, "Slow by these, too"),
      h(
        "ul",
        {},
        verdict.others.map((o) => {
          const who = culpritLine(o.culprit);
          return h("li", {}, causeName(o.cause), ` ${ms(o.excess_ms)}, ${percent(o.share)} of all excess`, who && [": ", who]);
        }),
      ),
    ],
  ].filter(Boolean);
  if (!parts.length) return null;
  return h("section", { class: "card grounds", "aria-label": "Culprit, evidence and fix" }, parts.flat());
}

/**
 * What was considered and set aside, and the check that did it.
 * @param {import("../shapes.js").RuledOutView[]} ruledOut
 * @returns {HTMLElement | null}
 */
export function ruledOutOf(ruledOut) {
  if (!ruledOut.length) return null;
  const near = ruledOut.filter((r) => r.near);
  const rest = ruledOut.filter((r) => !r.near);
  /** @param {import("../shapes.js").RuledOutView[]} list */
  const rows = (list) =>
    h("dl", { class: "ruled" }, list.flatMap((r) => [h("dt", {}, name(r.cause, 40)), h("dd", {}, h("bdi", {}, plain(r.check, MOST)))]));
  return h(
    "section",
    { class: "card", "aria-labelledby": "ruled" },
    h("div", { class: "head" }, h("h2", { id: "ruled" }, "Ruled out")),
    near.length > 0 && rows(near),
    rest.length > 0 &&
      h("details", { open: near.length === 0 && rest.length <= 6 }, h("summary", {}, near.length ? `${rest.length} more` : `${rest.length} causes`), rows(rest)),
  );
}
