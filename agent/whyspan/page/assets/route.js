/** Where the page is: `#/requests?cause=cpu&since=1h`. The place is the whole state of a view, so that it can be sent to a colleague. */

/** @typedef {{ name: string, params: URLSearchParams }} Route */

/** What stays when one goes from one view to another. */
export const KEPT = ["service", "since", "until"];

/**
 * Read a place. `#/request/ID` gives the route `request` with `id` among its parameters.
 *
 * @param {string} hash
 * @returns {Route}
 */
export function parseRoute(hash) {
  const [path = "", query = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const [first = "", second = ""] = path.split("/", 2);
  const params = new URLSearchParams(query);
  if (second) params.set("id", decode(second));
  return { name: first || "tail", params };
}

/** @param {string} text */
function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // not an encoding: as it is
  }
}

/**
 * The address of a place, for a link.
 *
 * @param {string} route
 * @param {URLSearchParams | Record<string, string | number | null | undefined>} [params] empty ones are left out
 */
export function hrefTo(route, params = {}) {
  const kept = new URLSearchParams();
  let id = "";
  const entries = params instanceof URLSearchParams ? [...params] : Object.entries(params);
  for (const [key, value] of entries) {
    if (value === null || value === undefined || value === "") continue;
    if (key === "id") id = "/" + encodeURIComponent(String(value));
    else kept.set(key, String(value));
  }
  const query = kept.toString().replaceAll("%3A", ":"); // times stay readable
  return `#/${route}${id}${query ? "?" + query : ""}`;
}

/** The address of a request. @param {string} id */
export function requestHref(id) {
  return hrefTo("request", { id });
}

/**
 * Go to a place.
 *
 * @param {string} route
 * @param {Parameters<typeof hrefTo>[1]} [params]
 * @param {{ replace?: boolean }} [options] replace: the present place does not stay in the history
 */
export function go(route, params = {}, { replace = false } = {}) {
  const href = hrefTo(route, params);
  if (href === location.hash) dispatchEvent(new Event("hashchange")); // the browser sees no change: shown anew all the same
  else if (replace) location.replace(href);
  else location.hash = href;
}

/**
 * A copy of *params* with some changed; an empty value takes one out.
 *
 * @param {URLSearchParams} params
 * @param {Record<string, string | number | null | undefined>} changes
 */
export function changed(params, changes) {
  const copy = new URLSearchParams(params);
  for (const [key, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === "") copy.delete(key);
    else copy.set(key, String(value));
  }
  return copy;
}
