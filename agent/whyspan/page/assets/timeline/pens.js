// What the timeline is painted with: fills by family and look, text that is read on them.

import { FAMILIES, fillOf, hatch, token } from "../colours.js";
import { plain } from "../dom.js";
import { INFERRED, PLAIN, UNKNOWN_STATE } from "./tracks.js";

export const FONT = '11px system-ui, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif';
/** The luminance on which black and white are read equally well, at 4.6:1 (WCAG 2). */
const HALF_WAY = 0.179;
const MAX_WIDTHS = 4000; // texts whose width is kept

/**
 * @typedef {object} Pens
 * @property {(family: number, look: number) => string | CanvasPattern} fill
 * @property {(family: number, look: number) => string} text the colour of text on that fill, empty where none is read
 * @property {(text: string, px: number) => string} fit the text cut to a width, empty where nothing fits
 * @property {string} ink
 * @property {string} soft
 * @property {string} card
 * @property {string} sunk
 * @property {string} line
 * @property {string} rule
 * @property {string} accent
 */

/**
 * The pens of the present scheme. Made again when it changes.
 * @param {CanvasRenderingContext2D} ctx
 * @returns {Pens}
 */
export function pensOf(ctx) {
  const usual = token("--usual");
  /** @type {Map<number, string | CanvasPattern>} */
  const fills = new Map();
  /** @type {Map<number, string>} */
  const texts = new Map();
  /** @type {Map<string, number>} */
  const widths = new Map();

  /** @param {string} text */
  function widthOf(text) {
    let width = widths.get(text);
    if (width === undefined) {
      if (widths.size >= MAX_WIDTHS) widths.clear();
      width = ctx.measureText(text).width;
      widths.set(text, width);
    }
    return width;
  }

  return {
    fill(family, look) {
      const key = family | ((look & (INFERRED | UNKNOWN_STATE)) << 8);
      let fill = fills.get(key);
      if (fill === undefined) {
        const striped = (look & (INFERRED | UNKNOWN_STATE)) !== 0;
        if (family === PLAIN) fill = striped ? hatch(ctx, usual) : usual;
        else fill = fillOf(ctx, FAMILIES[family], striped);
        fills.set(key, fill);
      }
      return fill;
    },
    text(family, look) {
      if (look & (INFERRED | UNKNOWN_STATE)) return "";
      let colour = texts.get(family);
      if (colour === undefined) {
        const fill = this.fill(family, 0);
        if (typeof fill !== "string") colour = "";
        else colour = brightness(ctx, fill) > HALF_WAY ? "#000" : "#fff";
        texts.set(family, colour);
      }
      return colour;
    },
    fit(text, px) {
      if (px < 18) return "";
      // A letter is no narrower than 2 px: what lies beyond cannot be seen, and is not measured.
      const whole = plain(text, Math.min(120, Math.ceil(px / 2) + 1));
      if (widthOf(whole) <= px) return whole;
      let low = 0;
      let high = whole.length;
      while (low < high) {
        const middle = (low + high + 1) >>> 1;
        if (widthOf(whole.slice(0, middle) + "…") <= px) low = middle;
        else high = middle - 1;
      }
      return low > 1 ? whole.slice(0, low) + "…" : "";
    },
    ink: token("--ink"),
    soft: token("--soft"),
    card: token("--card"),
    sunk: token("--sunk"),
    line: token("--line"),
    rule: token("--rule"),
    accent: token("--accent"),
  };
}

/**
 * Returns the relative luminance (WCAG 2) of a colour, 0..1.
 * @param {CanvasRenderingContext2D} ctx
 * @param {string} colour
 */
function brightness(ctx, colour) {
  const before = ctx.fillStyle;
  ctx.fillStyle = colour; // the canvas writes an opaque colour as #rrggbb
  const hex = typeof ctx.fillStyle === "string" && /^#[0-9a-f]{6}$/.test(ctx.fillStyle) ? ctx.fillStyle : "#888888";
  ctx.fillStyle = before;
  const [r, g, b] = [1, 3, 5].map((at) => {
    const part = parseInt(hex.slice(at, at + 2), 16) / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
