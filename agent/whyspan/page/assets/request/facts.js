// What else is known of the request, the process that served it, and what its engine said.

import { h, name } from "../dom.js";
import { bytes, count, ns, percent, stamp } from "../format.js";

/** @typedef {[string, any][]} Pairs */

/**
 * @param {import("../shapes.js").RequestView} view
 * @param {{ inferred: number, unknown: number }} doubt ns of the path that are not fact
 * @returns {HTMLElement[]} cards
 */
export function factsOf(view, doubt) {
  return [
    card("Request", "request", requestPairs(view, doubt)),
    card("Process", "process", processPairs(view.process)),
    card("Engine", "engine", enginePairs(view.engine)),
  ].filter((c) => c !== null);
}

/**
 * @param {string} title
 * @param {string} id
 * @param {Pairs} pairs those without a value are left out
 * @returns {HTMLElement | null}
 */
function card(title, id, pairs) {
  const shown = pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined && value !== false);
  if (!shown.length) return null;
  return h(
    "section",
    { class: "card", "aria-labelledby": `facts-${id}` },
    h("div", { class: "head" }, h("h2", { id: `facts-${id}` }, title)),
    h("dl", { class: "facts" }, shown.flatMap(([key, value]) => [h("dt", {}, key), h("dd", {}, value instanceof Node ? value : name(value, 300))])),
  );
}

/**
 * @param {import("../shapes.js").RequestView} view
 * @param {{ inferred: number, unknown: number }} doubt
 * @returns {Pairs}
 */
function requestPairs(view, doubt) {
  const { row, request: r, wall_ns: wall } = view;
  const share = (/** @type {number} */ part) => percent(wall ? part / wall : 0);
  return [
    ["started", stamp(row.start_unix_ms)],
    ["took", ns(wall, 4)],
    ["first byte", view.first_ns === null ? "none was sent" : `after ${ns(view.first_ns, 4)}`],
    ["accounted for", `${share(view.accounted_ns)}; inferred ${share(doubt.inferred)}, unknown ${share(doubt.unknown)}`],
    ["events lost", view.lost_events ? count(view.lost_events) : ""],
    ["slow because", r.slow_reason],
    ["trace", row.trace_id && h("code", {}, name(row.trace_id, 32), r.trace_id_source ? ` (${r.trace_id_source})` : "")],
    ["request id", r.request_id && h("code", {}, name(r.request_id, 128))],
    ["ended by", r.ended_by],
    ["head", r.head === "whole" ? "" : r.head],
    ["body sent", `${count(r.chunks, "write")}, ${bytes(r.response_bytes)}`],
    ["body received", bytes(r.request_bytes)],
    ["client", [r.agent, r.client_port ? `port ${r.client_port}` : ""].filter(Boolean).join(", ")],
    ["attempts before", r.attempt ? count(r.attempt) : ""],
    ["waited at its sender", r.client_wait_ns > 0 ? `${ns(r.client_wait_ns)} (its own clock)` : ""],
    ["tenant", row.tenant],
  ];
}

/**
 * @param {import("../shapes.js").ProcessView | null} p
 * @returns {Pairs}
 */
function processPairs(p) {
  if (!p) return [];
  return [
    ["process", `${p.comm} ${p.tgid}` + (p.vpid ? ` (${p.vpid} inside)` : "")],
    ["program", p.exe],
    ["CPUs", p.cpus_allowed ? `${p.cpus_allowed} of ${p.cpu_count}` : ""],
    ["cgroup", p.cgroup && h("code", {}, name(p.cgroup, 200))],
    ["container", p.container_id && h("code", {}, name(p.container_id.slice(0, 12), 12))],
    ["pod", p.pod_uid && h("code", {}, name(p.pod_uid, 64))],
  ];
}

/**
 * @param {Record<string, any> | null} e EngineFacts
 * @returns {Pairs}
 */
function enginePairs(e) {
  if (!e) return [];
  const prompt = e.prompt_tokens ? `${count(e.prompt_tokens)}, ${count(e.cached_tokens)} of them cached` : "";
  return [
    ["engine", [e.engine, e.version].filter(Boolean).join(" ")],
    ["marks", e.state],
    ["model", e.model],
    ["prompt tokens", prompt],
    ["output tokens", e.output_tokens !== undefined ? count(e.output_tokens) + (e.n > 1 ? ` in ${e.n} completions` : "") : ""],
    ["steps", e.steps ? `${count(e.steps)}${e.batch ? `, batch ${e.batch}` : ""}` : ""],
    ["KV pool", e.kv_usage >= 0 ? `${percent(e.kv_usage)} used at most` : ""],
    ["preempted", e.preemptions ? `${count(e.preemptions, "time")}, ${count(e.recomputed_tokens, "token")} recomputed` : ""],
    ["engine's request", e.request_id && h("code", {}, name(e.request_id, 128))],
    ["template", e.template],
    ["core process", e.core_tgid ? String(e.core_tgid) : ""],
  ];
}
