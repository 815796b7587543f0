/** Writes numbers for people: every one with its unit, few digits, the same width where it can be. */

const THIN = "\u202f"; // a narrow no-break space between number and unit

/**
 * @param {number} value
 * @param {number} digits significant digits wanted
 */
function digitsOf(value, digits) {
  const whole = Math.floor(Math.log10(Math.max(Math.abs(value), 1e-12))) + 1;
  return Math.min(Math.max(digits - Math.max(whole, 1), 0), 3);
}

/**
 * A length of time in milliseconds, written in the unit that reads best: `4 ns`, `12.3 µs`, `840 ms`, `2.41 s`, `3.33 min`, `2.1 h`.
 *
 * @param {number | null | undefined} value
 * @param {number} [digits] significant digits
 */
export function ms(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return `0${THIN}ms`;
  if (size < 0.0009995) return `${Math.round(value * 1e6)}${THIN}ns`;
  if (size < 0.9995) return `${(value * 1e3).toFixed(digitsOf(value * 1e3, digits))}${THIN}µs`;
  if (size < 999.5) return `${value.toFixed(digitsOf(value, digits))}${THIN}ms`;
  if (size < 59_995) return `${(value / 1e3).toFixed(digitsOf(value / 1e3, digits))}${THIN}s`;
  const minutes = value / 60e3;
  if (size < 59.95 * 60e3) return `${minutes.toFixed(digitsOf(minutes, digits))}${THIN}min`;
  return `${(minutes / 60).toFixed(digitsOf(minutes / 60, digits))}${THIN}h`;
}

/** How long something has been up: `42 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`. @param {number | null | undefined} seconds */
export function uptime(seconds) {
  if (!seconds || !Number.isFinite(seconds)) return "–";
  /** @type {[number, string][]} */
  const units = [[86_400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const at = units.findIndex(([size]) => seconds >= size);
  const parts = [];
  let left = Math.round(seconds);
  for (const [size, unit] of units.slice(Math.max(at, 0), Math.max(at, 0) + 2)) {
    const whole = Math.floor(left / size);
    left -= whole * size;
    if (whole || !parts.length) parts.push(`${whole}${THIN}${unit}`);
  }
  return parts.join(" ");
}

/** @param {number | null | undefined} value nanoseconds @param {number} [digits] */
export function ns(value, digits = 3) {
  return value === null || value === undefined ? "–" : ms(value / 1e6, digits);
}

/** @param {number | null | undefined} value a signed length of time in ms, always with its sign */
export function signedMs(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return (value < 0 ? "−" : "+") + ms(Math.abs(value));
}

/** @param {number | null | undefined} value */
export function bytes(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let [size, unit] = [value, 0];
  while (Math.abs(size) >= 1024 && unit < units.length - 1) [size, unit] = [size / 1024, unit + 1];
  return `${unit ? size.toFixed(digitsOf(size, 3)) : size}${THIN}${units[unit]}`;
}

/** @param {number | null | undefined} ratio 0..1 */
export function percent(ratio) {
  if (ratio === null || ratio === undefined || !Number.isFinite(ratio)) return "–";
  const value = ratio * 100;
  if (value !== 0 && Math.abs(value) < 0.1) return `<0.1${THIN}%`;
  return `${Math.abs(value) < 9.95 && value !== 0 ? value.toFixed(1) : Math.round(value)}${THIN}%`;
}

const GROUPED = new Intl.NumberFormat("en-GB");

/** @param {number | null | undefined} value a count, with its thousands apart @param {string} [unit] one of it @param {string} [units] many */
export function count(value, unit = "", units = unit ? `${unit}s` : "") {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const text = GROUPED.format(value).replaceAll(",", THIN);
  return unit ? `${text} ${value === 1 ? unit : units}` : text;
}

/** @param {number | null | undefined} value @param {string} [unit] such as `/s` */
export function quantity(value, unit = "") {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toFixed(digitsOf(value / 1e6, 3))}${THIN}M${unit}`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(digitsOf(value / 1e3, 3))}${THIN}k${unit}`;
  return `${Number.isInteger(value) ? value : value.toFixed(digitsOf(value, 3))}${unit && !unit.startsWith("/") ? THIN : ""}${unit}`;
}

/** @param {number} value */
function two(value) {
  return String(value).padStart(2, "0");
}

/** @param {number} unixMs @returns {string} the time of day on this machine's clock: `14:03:22` */
export function clock(unixMs) {
  const d = new Date(unixMs);
  return `${two(d.getHours())}:${two(d.getMinutes())}:${two(d.getSeconds())}`;
}

/** @param {number} unixMs @returns {string} `2026-11-30 14:03:22.481` with the offset from UTC */
export function stamp(unixMs) {
  const d = new Date(unixMs);
  if (Number.isNaN(d.getTime())) return "–";
  const offset = -d.getTimezoneOffset();
  const zone = offset === 0 ? "UTC" : `UTC${offset < 0 ? "−" : "+"}${two(Math.floor(Math.abs(offset) / 60))}:${two(Math.abs(offset) % 60)}`;
  return `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())} ${clock(unixMs)}.${String(d.getMilliseconds()).padStart(3, "0")} ${zone}`;
}

/**
 * The time of day; with its date where that is not today's.
 *
 * @param {number} unixMs
 * @param {number} [nowMs]
 */
export function when(unixMs, nowMs = Date.now()) {
  const [d, now] = [new Date(unixMs), new Date(nowMs)];
  if (d.toDateString() === now.toDateString()) return clock(unixMs);
  return `${two(d.getMonth() + 1)}-${two(d.getDate())} ${clock(unixMs)}`;
}

/** @param {number} value ms ago */
export function age(value) {
  const seconds = Math.max(Math.round(value / 1e3), 0);
  if (seconds < 60) return `${seconds}${THIN}s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)}${THIN}min ago`;
  if (seconds < 2 * 86_400) return `${Math.floor(seconds / 3600)}${THIN}h ago`;
  return `${Math.floor(seconds / 86_400)}${THIN}d ago`;
}
