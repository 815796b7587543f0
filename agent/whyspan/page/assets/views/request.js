// One request: asked for by its id, then shown whole. It does not change any more.

import { get } from "../api.js";
import { report } from "../request/report.js";

/**
 * @param {HTMLElement} root
 * @param {URLSearchParams} params id
 * @param {AbortSignal} signal
 */
export async function show(root, params, signal) {
  const view = await get(`requests/${encodeURIComponent(params.get("id") ?? "")}`, {}, signal);
  report(root, view, signal);
}
