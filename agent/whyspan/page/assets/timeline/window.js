// The span of time that is shown, and how it moves. Never outside the request, never narrower than a few ns.

export const LEAST = 200; // ns shown at least

const NEARLY = 1 - 1e-6; // of the whole is all of it: zooming out undoes zooming in

export class Span {
  /** @param {number} wall ns, the whole */
  constructor(wall) {
    this.wall = Math.max(wall, LEAST);
    this.from = 0;
    this.to = this.wall;
  }

  get width() {
    return this.to - this.from;
  }

  get whole() {
    return this.from <= 0 && this.to >= this.wall;
  }

  /**
   * Shows [from, to], moved and cut to what there is.
   * @param {number} from
   * @param {number} to
   */
  set(from, to) {
    let width = Math.min(Math.max(to - from, LEAST), this.wall);
    if (width > this.wall * NEARLY) width = this.wall;
    this.from = Math.min(Math.max(from, 0), this.wall - width);
    this.to = this.from + width;
  }

  /**
   * Shows *factor* times as much; the time at *share* (0..1) of the window stays where it is.
   * @param {number} factor
   * @param {number} [share]
   */
  zoom(factor, share = 0.5) {
    const at = this.from + this.width * share;
    const width = Math.min(Math.max(this.width * factor, LEAST), this.wall);
    this.set(at - width * share, at + width * (1 - share));
  }

  /** @param {number} by ns, later when positive; infinite: to the end */
  pan(by) {
    const move = Math.min(Math.max(by, -this.from), this.wall - this.to);
    this.set(this.from + move, this.to + move);
  }

  /**
   * Brings [from, to] into view, with room around where it is longer than the window or outside.
   * @param {number} from
   * @param {number} to
   */
  reveal(from, to) {
    if (from >= this.from && to <= this.to) return;
    const middle = (from + to) / 2;
    const width = Math.max(this.width, (to - from) * 1.2);
    this.set(middle - width / 2, middle + width / 2);
  }
}
