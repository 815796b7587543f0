// One request, whole: what `whyspan serve` shows and what `whyspan explain --html` writes.

import { h, name } from "../dom.js";
import { ms, stamp } from "../format.js";
import { requestHref } from "../route.js";
import { legendOf } from "../timeline/legend.js";
import { tableOf } from "../timeline/table.js";
import { Timeline } from "../timeline/timeline.js";
import { codeOf } from "./code.js";
import { factsOf } from "./facts.js";
import { threadsOf } from "./threads.js";
import { timesOf } from "./times.js";
import { groundsOf, ruledOutOf, verdictOf } from "./verdict.js";

/**
 * Fills *root* with a request and returns its timeline.
 * @param {Element} root
 * @param {import("../shapes.js").RequestView} view
 * @param {AbortSignal} signal ends what listens
 * @param {{ alone?: boolean }} [options] alone: there is no page around that other requests could be shown in
 */
export function report(root, view, signal, { alone = false } = {}) {
  const timeline = new Timeline(view, signal);
  const lanes = h(
    "section",
    { class: "card", "aria-labelledby": "timeline" },
    h("div", { class: "head" }, h("h2", { id: "timeline" }, "Timeline"), legendOf(timeline.tracks, view.first_ns !== null)),
    timeline.parts.root,
    tableOf(timeline),
  );
  const grounds = [groundsOf(view), ruledOutOf(view.ruled_out)].filter((c) => c !== null);
  root.classList.add("stack");
  root.append(
    headOf(view, alone),
    verdictOf(view),
    ...[lanes, codeOf(view)].filter((part) => part !== null),
    h("div", { class: "split" }, grounds.length > 0 && h("div", { class: "stack" }, grounds), timesOf(view)),
    ...[threadsOf(view)].filter((part) => part !== null),
    h("div", { class: "split facts-cards" }, factsOf(view, timeline.walk)),
  );
  return timeline;
}

/**
 * @param {import("../shapes.js").RequestView} view
 * @param {boolean} alone
 */
function headOf(view, alone) {
  const { row, request } = view;
  const answered = row.outcome === "reset" || row.outcome === "killed" ? row.outcome : row.status || row.outcome;
  const how = answered === row.outcome && request.ended_by ? `${answered} (${request.ended_by})` : String(answered);
  return h(
    "header",
    { class: "request-head" },
    h("h1", {}, h("span", { class: "soft" }, name(row.method, 10), " "), name(row.route, 160)),
    h(
      "div",
      { class: "row" },
      h("span", { class: row.failed ? "chip fail" : "chip" }, name(how, 60)),
      h("span", { class: "strong" }, ms(row.latency_ms)),
      row.ttft_ms !== null && h("span", {}, `first byte ${ms(row.ttft_ms)}`),
      h("span", {}, h("span", { class: "soft" }, "service "), name(row.service, 60)),
      row.model && h("span", {}, h("span", { class: "soft" }, "model "), name(row.model, 60)),
      row.tenant && h("span", {}, h("span", { class: "soft" }, "tenant "), name(row.tenant, 60)),
      h("span", { class: "soft" }, stamp(row.start_unix_ms)),
      h("span", { class: "grow" }),
      h("span", { class: "row" }, view.links.map((link) => linkOf(link, alone))),
    ),
  );
}

/**
 * @param {import("../shapes.js").Link} link
 * @param {boolean} alone
 */
function linkOf(link, alone) {
  if (link.kind === "request") {
    return alone ? h("span", {}, name(link.label, 80), " ", h("code", {}, name(link.href, 80))) : h("a", { href: requestHref(link.href) }, name(link.label, 80));
  }
  const external = /^https?:/.test(link.href);
  if (!external) return h("span", { class: "soft" }, name(link.label, 80), ": ", h("code", {}, name(link.href, 120)));
  return h("a", { href: link.href, rel: "noreferrer noopener", target: "_blank" }, name(link.label, 80));
}
