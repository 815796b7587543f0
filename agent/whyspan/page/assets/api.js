/** Asks the server. Every address is relative to the page, so that it works behind a path prefix. */

/** Longer than the server takes at most (page/api.py: 10 s for its turn, 20 s of work): what it says of that is clearer. */
const TIMEOUT_MS = 35_000;
/** Without a stream of events the page asks again this often. */
const POLL_MS = 10_000;
/** Events that come closer than this count as one: a busy store has something new all the time. */
const GATHER_MS = 1_000;

/** The server's answer was no. `status` 0: there was no answer. */
export class ApiError extends Error {
  /** @param {number} status @param {string} message */
  constructor(status, message) {
    super(message);
    this.name = "ApiError";
    this.status = status;
  }
}

/** @typedef {URLSearchParams | Record<string, string | number | boolean | null | undefined>} Query */

/**
 * @param {string} path below `api/`
 * @param {Query} [query] empty values are left out
 */
export function apiUrl(path, query = {}) {
  const url = new URL(`api/${path}`, document.baseURI);
  url.hash = "";
  const entries = query instanceof URLSearchParams ? [...query] : Object.entries(query);
  for (const [key, value] of entries) {
    if (value !== null && value !== undefined && value !== "" && value !== false) url.searchParams.set(key, String(value));
  }
  return url;
}

/**
 * Ask for JSON.
 *
 * @param {string} path below `api/`
 * @param {Query} [query]
 * @param {AbortSignal} [signal]
 * @returns {Promise<any>}
 * @throws {ApiError} the server refused, or did not answer
 */
export async function get(path, query = {}, signal = undefined) {
  const late = AbortSignal.timeout(TIMEOUT_MS);
  const either = signal ? AbortSignal.any([signal, late]) : late;
  let answer;
  try {
    answer = await fetch(apiUrl(path, query), { signal: either, headers: { accept: "application/json" }, credentials: "same-origin" });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, late.aborted ? `no answer within ${TIMEOUT_MS / 1e3} s` : "whyspan serve does not answer");
  }
  if (answer.ok) return answer.json();
  let message = `HTTP ${answer.status}`;
  try {
    const body = await answer.json();
    if (typeof body.error === "string") message = body.error;
  } catch {
    // no JSON: a proxy's page; the status says enough
  }
  throw new ApiError(answer.status, message);
}

/** @typedef {"connecting" | "live" | "polling" | "off"} LiveState */

/**
 * What is new: `requests`, or `status` (figures of the host and the agent alone).
 *
 * @typedef {"requests" | "status"} News
 */

/** @type {Set<(news: News) => void>} */
const changeListeners = new Set();
/** @type {Set<(state: LiveState) => void>} */
const stateListeners = new Set();
/** @type {EventSource | null} */
let source = null;
/** @type {LiveState} */
let state = "off";
/** @type {number | undefined} */
let gather;
/** @type {number | undefined} */
let poll;
/** @type {News} */
let gathered = "status";

/** @param {LiveState} next */
function become(next) {
  if (state === next) return;
  state = next;
  for (const listener of stateListeners) listener(state);
}

function tell() {
  gather = undefined;
  if (document.hidden) return; // asked again when it is seen again
  const news = gathered;
  gathered = "status";
  for (const listener of [...changeListeners]) listener(news);
}

/** @param {News} news */
function heard(news) {
  if (news === "requests") gathered = news;
  gather ??= setTimeout(tell, GATHER_MS);
}

/** Begin to listen for news of the store. */
export function startLive() {
  if (source) return;
  become("connecting");
  source = new EventSource(apiUrl("live"));
  source.addEventListener("open", () => {
    clearInterval(poll);
    poll = undefined;
    become("live");
  });
  source.addEventListener("message", (event) => heard(event.data === "status" ? "status" : "requests"));
  source.addEventListener("error", () => {
    become("polling"); // the browser tries again by itself, except after a refusal
    poll ??= setInterval(() => heard("requests"), POLL_MS);
  });
}

/** Stop listening. */
export function stopLive() {
  source?.close();
  source = null;
  clearInterval(poll);
  clearTimeout(gather);
  poll = gather = undefined;
  become("off");
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden && source) heard("requests");
});

/**
 * Call *listener* when the store may have something newer, until *signal* ends it: never again before it is done, and
 * not more often than *everyMs*, since the server works on the host that it shows.
 *
 * @param {(news: News) => void | Promise<void>} listener
 * @param {AbortSignal} signal
 * @param {number} [everyMs]
 */
export function onNews(listener, signal, everyMs = 2_000) {
  if (signal.aborted) return;
  let resting = false;
  /** @type {News | null} */
  let waiting = null;
  /** @param {News} news */
  async function hear(news) {
    if (resting) {
      waiting = waiting === "requests" ? waiting : news;
      return;
    }
    resting = true;
    waiting = null;
    try {
      await listener(news);
      await new Promise((resolve) => setTimeout(resolve, everyMs));
    } finally {
      resting = false;
    }
    if (waiting && !signal.aborted) void hear(waiting);
  }
  changeListeners.add(hear);
  signal.addEventListener("abort", () => changeListeners.delete(hear), { once: true });
}

/** Call *listener* with the state of the stream, now and when it changes. @param {(state: LiveState) => void} listener */
export function onLiveState(listener) {
  stateListeners.add(listener);
  listener(state);
}
