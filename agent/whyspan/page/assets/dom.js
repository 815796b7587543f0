/**
 * Builds elements. What is shown comes from watched processes and their clients: it only ever becomes text.
 *
 * @typedef {Node | string | number | null | undefined | false} Child
 */

/** Characters that act instead of showing: controls, direction marks and overrides, separators, lone surrogates. */
const ACTING = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

/** What a value may take on the page, characters; the rest is cut with a sign. */
export const MAX_TEXT = 2000;

/**
 * Return *value* with every character that acts written out as `\uXXXX`, and cut to *max* characters.
 *
 * @param {unknown} value
 * @param {number} [max]
 */
export function plain(value, max = MAX_TEXT) {
  let text = String(value ?? "");
  if (text.length > max) text = text.slice(0, Math.max(max - 1, 0)) + "…";
  return text.replace(ACTING, (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));
}

/** Properties of an element: no handler as text, no markup, and links only to where a page may go. */
const REFUSED = /^(on|innerHTML$|outerHTML$|srcdoc$|style$)/i;

/**
 * Return *href* where it is a place that a link may go to (http, https, or relative), else an empty text.
 *
 * @param {string} href
 */
export function safeHref(href) {
  try {
    const url = new URL(href, document.baseURI);
    return url.protocol === "http:" || url.protocol === "https:" || href.startsWith("#") ? href : "";
  } catch {
    return "";
  }
}

/**
 * Make an element: `h("td", {class: "num", title: "…"}, text, node, …)`.
 *
 * `class` and every other name is an attribute; `on` is a record of listeners, `data` of data attributes, `vars` of
 * CSS custom properties and other style properties (set through the object model, which a strict content policy
 * allows). A false or null attribute is left out, a true one is empty. Texts go through `plain`.
 *
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {Record<string, any>} [props]
 * @param {...(Child | Child[])} children
 * @returns {HTMLElementTagNameMap[K]}
 */
export function h(tag, props = {}, ...children) {
  return /** @type {HTMLElementTagNameMap[K]} */ (build(document.createElement(tag), props, children));
}

/**
 * The same for SVG.
 *
 * @param {string} tag
 * @param {Record<string, any>} [props]
 * @param {...(Child | Child[])} children
 * @returns {SVGElement}
 */
export function svg(tag, props = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  return /** @type {SVGElement} */ (build(element, props, children));
}

/**
 * @param {HTMLElement | SVGElement} element
 * @param {Record<string, any>} props
 * @param {(Child | Child[])[]} children
 */
function build(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === false || value === null || value === undefined) continue;
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, /** @type {any} */ (listener));
    } else if (name === "data") {
      for (const [key, text] of Object.entries(value)) element.dataset[key] = plain(text);
    } else if (name === "vars") {
      for (const [key, text] of Object.entries(value)) element.style.setProperty(key, String(text));
    } else if (REFUSED.test(name)) {
      throw new Error(`${name} is not a property that this page sets`);
    } else if (name === "href" || name === "src") {
      const href = safeHref(String(value));
      if (href) element.setAttribute(name, href);
    } else if (name === "value") {
      element.setAttribute(name, String(value)); // goes back to the server as it came
    } else {
      element.setAttribute(name, value === true ? "" : plain(value));
    }
  }
  append(element, children);
  return element;
}

/**
 * @param {Node} parent
 * @param {(Child | Child[])[]} children
 */
function append(parent, children) {
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false) continue;
    parent.appendChild(child instanceof Node ? child : document.createTextNode(plain(child)));
  }
}

/**
 * Put *children* in place of all that is in *parent*.
 *
 * @param {Element} parent
 * @param {...(Child | Child[])} children
 */
export function fill(parent, ...children) {
  const fragment = document.createDocumentFragment();
  append(fragment, children);
  parent.replaceChildren(fragment);
}

/**
 * A name that somebody else chose: its direction does not leak into its surroundings; cut, with the whole (bounded)
 * as its title.
 *
 * @param {unknown} value
 * @param {number} [max]
 */
export function name(value, max = 80) {
  const text = String(value ?? "");
  return h("bdi", { class: "name", title: text.length > max ? text : null }, plain(text, max));
}

/**
 * A link that looks like a button, or a button.
 *
 * @param {string} label
 * @param {(event: Event) => void} click
 * @param {Record<string, any>} [props]
 */
export function button(label, click, props = {}) {
  return h("button", { type: "button", class: "btn", ...props, on: { click } }, label);
}
