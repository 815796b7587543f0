/**
 * One colour per family of causes. The colours themselves are custom properties of style.css (`--c-cpu`…), one set per
 * scheme; they keep apart for colour-blind people (`tests/page/test_colours.py`). Inferred and unknown time is hatched.
 */

/** Families, in the order in which legends show them. */
export const FAMILIES = /** @type {const} */ ([
  "cpu", "memory", "io", "lock", "python", "net", "client", "engine", "pools", "observer", "gpu", "work", "unknown",
]);

/** @typedef {(typeof FAMILIES)[number]} Family */

/** Kinds of time that are named but belong to no rule. */
const POOLS = new Set(["python.pool_exhausted", "python.fd_exhausted"]);

/** @param {string} cause @returns {Family} */
export function family(cause) {
  if (POOLS.has(cause)) return "pools";
  const first = /** @type {Family} */ (cause.split(".", 1)[0]);
  return FAMILIES.includes(first) ? first : "unknown";
}

/** @param {string} cause @param {boolean} [inferred] whether its time is drawn with a hatch */
export function hatched(cause, inferred = false) {
  return inferred || family(cause) === "unknown";
}

/** @type {Map<string, string>} values of custom properties under the present scheme */
const cache = new Map();
/** @type {Set<() => void>} */
const listeners = new Set();

/** The value of a custom property under the present scheme. @param {string} property such as `--c-cpu` */
export function token(property) {
  let value = cache.get(property);
  if (value === undefined) {
    value = getComputedStyle(document.documentElement).getPropertyValue(property).trim() || "#888";
    cache.set(property, value);
  }
  return value;
}

/** The colour of a cause or family, for a canvas. Elements take `familyClass` and follow the scheme by themselves. @param {string} cause */
export function colour(cause) {
  return token(`--c-${family(cause)}`);
}

/** The class that gives an element `--fam`, its family's colour. @param {string} cause */
export function familyClass(cause) {
  return `fam-${family(cause)}`;
}

/**
 * Number the causes of each family, so that two of one family side by side differ: 0 is the family's own colour, 1 and 2
 * are nearer to the ink,
 * or to the ground where the colour is dark already.
 *
 * @param {string[]} causes in the order in which they are shown
 * @returns {Map<string, number>}
 */
export function shades(causes) {
  /** @type {Map<Family, number>} */
  const used = new Map();
  return new Map(causes.map((cause) => {
    const number = used.get(family(cause)) ?? 0;
    used.set(family(cause), number + 1);
    return [cause, Math.min(number, SHADES.length - 1)];
  }));
}

/** How much of the family's colour a shade has, percent. The same as `.shade-1`, `.shade-2`. */
const SHADES = [100, 55, 30];

/** Families whose colour is dark in the light scheme. The same as `--mix` in views.css. @type {Set<string>} */
const LOW = new Set(["io", "engine", "pools", "observer", "gpu"]);

/** The colour of a cause in a shade. @param {string} cause @param {number} [shade] */
export function shaded(cause, shade = 0) {
  return shade ? `color-mix(in oklab, ${colour(cause)} ${SHADES[shade]}%, ${token(LOW.has(family(cause)) ? "--low" : "--ink")})` : colour(cause);
}

/** @type {Map<string, CanvasPattern>} */
const patterns = new Map();

/**
 * How a piece is filled on a canvas: its family's colour, or a hatch of it for what is inferred or unknown.
 *
 * @param {CanvasRenderingContext2D} ctx
 * @param {string} cause
 * @param {boolean} [inferred]
 * @returns {string | CanvasPattern}
 */
export function fillOf(ctx, cause, inferred = false) {
  return hatched(cause, inferred) ? hatch(ctx, colour(cause)) : colour(cause);
}

/**
 * @param {CanvasRenderingContext2D} ctx
 * @param {string} strokes colour of the strokes; the ground is the same, thin
 * @returns {string | CanvasPattern}
 */
export function hatch(ctx, strokes) {
  const known = patterns.get(strokes);
  if (known) return known;
  const tile = document.createElement("canvas");
  const size = (tile.width = tile.height = 8);
  const pen = tile.getContext("2d");
  if (!pen) return strokes;
  pen.fillStyle = token("--card"); // opaque: what lies below does not shine through
  pen.fillRect(0, 0, size, size);
  pen.globalAlpha = 0.3;
  pen.fillStyle = strokes;
  pen.fillRect(0, 0, size, size);
  pen.globalAlpha = 1;
  pen.strokeStyle = strokes;
  pen.lineWidth = 2.5;
  pen.beginPath();
  for (const shift of [-size, 0, size]) {
    pen.moveTo(shift - 1, size + 1);
    pen.lineTo(shift + size + 1, -1);
  }
  pen.stroke();
  const pattern = ctx.createPattern(tile, "repeat");
  if (!pattern) return strokes;
  patterns.set(strokes, pattern);
  return pattern;
}

/**
 * Call *listener* when the scheme changes: what is drawn on a canvas is then drawn again.
 *
 * @param {() => void} listener
 * @param {AbortSignal} [signal] ends it
 */
export function onScheme(listener, signal) {
  listeners.add(listener);
  signal?.addEventListener("abort", () => listeners.delete(listener), { once: true });
}

/** The scheme has changed. */
export function schemeChanged() {
  cache.clear();
  patterns.clear();
  for (const listener of [...listeners]) listener();
}

for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", schemeChanged);
