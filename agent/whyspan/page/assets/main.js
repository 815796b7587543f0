/** The shell: header, routes, scheme, what is shown while waiting and when something fails. */

import { ApiError, onLiveState, startLive, stopLive } from "./api.js";
import { schemeChanged } from "./colours.js";
import { button, fill, h } from "./dom.js";
import { KEPT, go, hrefTo, parseRoute } from "./route.js";

/**
 * A view fills *root* and keeps it up to date until *signal* is aborted; it resolves when it shows something.
 *
 * @typedef {{ show: (root: HTMLElement, params: URLSearchParams, signal: AbortSignal) => Promise<void> }} View
 * @typedef {{ title: string, tab: string, load: () => Promise<View> }} Entry
 */

/**
 * What the place in the address needs is loaded first, the rest when that is shown.
 *
 * @type {Record<string, Entry>}
 */
const VIEWS = {
  tail: { title: "Tail", tab: "tail", load: () => import("./views/tail.js") },
  requests: { title: "Requests", tab: "requests", load: () => import("./views/requests.js") },
  request: { title: "Request", tab: "requests", load: () => import("./views/request.js") },
  host: { title: "Host", tab: "host", load: () => import("./views/host.js") },
};
const TABS = /** @type {const} */ ([["tail", "Tail", "1"], ["requests", "Requests", "2"], ["host", "Host", "3"]]);
const SCHEMES = /** @type {const} */ (["system", "light", "dark"]);
const LIVE_TEXT = { connecting: "connecting", live: "live", polling: "no stream, asking every 10 s", off: "paused" };

const top = /** @type {HTMLElement} */ (document.getElementById("top"));
const main = /** @type {HTMLElement} */ (document.getElementById("main"));
const status = /** @type {HTMLElement} */ (document.getElementById("status"));
const tabs = h("nav", { class: "tabs", "aria-label": "Views" });
let leave = new AbortController();
let shown = "";

/** Say something to people who do not see the page. @param {string} text */
function say(text) {
  status.textContent = text;
}

/** @param {string} current @param {URLSearchParams} params */
function drawTabs(current, params) {
  const kept = new URLSearchParams(KEPT.flatMap((key) => (params.get(key) ? [[key, params.get(key) ?? ""]] : [])));
  fill(
    tabs,
    TABS.map(([name, label, key]) =>
      h("a", { href: hrefTo(name, kept), "aria-current": name === current ? "page" : null, "aria-keyshortcuts": key }, label),
    ),
  );
}

/** @param {unknown} error @param {() => void} again */
function failure(error, again) {
  const known = error instanceof ApiError;
  const gone = known && error.status === 404;
  return h(
    "section",
    { class: "notice error", role: "alert" },
    h("h1", {}, gone ? "Not in the store" : "This could not be shown"),
    h("p", {}, known ? error.message : "The page made a mistake. The browser's console has its details."),
    h("p", { class: "row" }, button("Try again", again), h("a", { href: hrefTo("requests") }, "All requests")),
  );
}

/**
 * Find what *element* is in a view that takes the place of its own, so that who works by keyboard stays where they are.
 *
 * @param {HTMLElement} root
 * @param {Element | null} element
 * @returns {HTMLElement | null}
 */
function sameIn(root, element) {
  if (!(element instanceof HTMLElement) || element === main || !main.contains(element)) return null;
  const known = (/** @type {HTMLElement} */ e) => e.dataset.filter ?? e.getAttribute("aria-label") ?? e.textContent?.replace(/[▲▼]/g, "");
  const alike = /** @type {NodeListOf<HTMLElement>} */ (root.querySelectorAll(element.tagName));
  return [...alike].find((e) => known(e) === known(element)) ?? null;
}

/** The cookie has run out: the server now answers with its form. */
function loggedOut() {
  return h("section", { class: "notice warn", role: "alert" }, h("h1", {}, "A token is needed"), h("p", {}, button("Log in", () => location.reload())));
}

/** @param {Entry} entry @returns {Promise<View>} */
async function loaded(entry) {
  try {
    return await entry.load();
  } catch {
    throw new ApiError(0, "whyspan serve does not answer: a part of the page could not be loaded");
  }
}

/** Show the place in the address bar. */
async function show() {
  if (location.hash.startsWith("#token=")) history.replaceState(null, "", "#/tail"); // known already: out of sight
  leave.abort();
  leave = new AbortController();
  const { signal } = leave;
  const { name, params } = parseRoute(location.hash);
  const entry = VIEWS[name] ?? VIEWS.tail;
  if (!entry) return;
  document.title = `${entry.title} · whyspan`;
  drawTabs(entry.tab, params);
  // laid out behind the present view, so that it can measure itself, and put in its place when it is ready
  const root = h("div", { class: "view pending", data: { place: location.hash } });
  main.append(root);
  signal.addEventListener("abort", () => root.classList.contains("pending") && root.remove(), { once: true });
  document.body.classList.add("busy");
  try {
    const view = await loaded(entry);
    if (signal.aborted) return;
    await view.show(root, params, signal);
    if (signal.aborted) return;
    root.classList.remove("pending");
    const focused = shown === name ? sameIn(root, document.activeElement) : null;
    main.replaceChildren(root);
    focused?.focus({ preventScroll: true });
  } catch (error) {
    if (signal.aborted) return;
    if (error instanceof ApiError && error.status === 401) {
      fill(main, loggedOut());
    } else {
      if (!(error instanceof ApiError)) console.error(error);
      fill(main, failure(error, show));
    }
  } finally {
    if (!signal.aborted) document.body.classList.remove("busy");
  }
  if (shown && shown !== name) {
    scrollTo(0, 0);
    main.focus({ preventScroll: true });
    say(document.title);
  }
  shown = name;
}

/** @returns {(typeof SCHEMES)[number]} */
function storedScheme() {
  const kept = readStored();
  return SCHEMES.find((s) => s === kept) ?? "system";
}

function readStored() {
  try {
    return localStorage.getItem("whyspan.scheme");
  } catch {
    return null; // storage is off: the system's scheme
  }
}

/** @param {(typeof SCHEMES)[number]} scheme */
function useScheme(scheme) {
  if (scheme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = scheme;
  try {
    localStorage.setItem("whyspan.scheme", scheme);
  } catch {
    // storage is off: it holds until the page is closed
  }
  schemeChanged();
}

function schemePicker() {
  const now = storedScheme();
  return h(
    "select",
    { class: "quiet", "aria-label": "Colours", on: { change: (/** @type {any} */ e) => useScheme(e.target.value) } },
    SCHEMES.map((s) => h("option", { value: s, selected: s === now }, { system: "Auto", light: "Light", dark: "Dark" }[s])),
  );
}

function liveSwitch() {
  const dot = h("span", { class: "dot", "aria-hidden": "true" });
  const text = h("span");
  let on = true;
  const toggle = h("button", { type: "button", class: "btn quiet live", "aria-pressed": "true", on: { click: flip } }, dot, text);
  function flip() {
    on = !on;
    toggle.setAttribute("aria-pressed", String(on));
    if (on) startLive();
    else stopLive();
  }
  onLiveState((state) => {
    toggle.dataset.state = state;
    toggle.title = `Updates: ${LIVE_TEXT[state]}. Press to ${on ? "pause" : "go on"}.`;
    text.textContent = state === "off" ? "Paused" : "Live";
  });
  return toggle;
}

/** @param {KeyboardEvent} event */
function shortcut(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  if (event.target instanceof HTMLElement && event.target.closest("input, select, textarea, [data-keys]")) return;
  const tab = TABS.find(([, , key]) => key === event.key);
  if (!tab) return;
  const { params } = parseRoute(location.hash);
  go(tab[0], Object.fromEntries(KEPT.map((key) => [key, params.get(key)])));
}

async function start() {
  useScheme(storedScheme());
  const brand = h("a", { class: "brand", href: "#/tail", title: "Why an LLM request was slow" }, "whyspan");
  fill(top, brand, tabs, h("span", { class: "grow" }), liveSwitch(), schemePicker());
  const skip = document.querySelector(".skip");
  skip?.addEventListener("click", (event) => {
    event.preventDefault();
    main.focus();
  });
  document.addEventListener("keydown", shortcut);
  addEventListener("hashchange", show);
  await show();
  for (const entry of Object.values(VIEWS)) loaded(entry).catch(() => undefined); // it is tried again when it is needed
  startLive();
}

void start();
