"""What the timeline computes before it paints, run in the browser on made-up lanes."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from tests.page.conftest import OpenPage

if TYPE_CHECKING:
    from playwright.sync_api import Page

#: Lanes with *pieces* in all, from a seed; the path goes through each of them once.
_MAKE = """
  const make = (seed, pieces, lanes) => {
    let state = seed;
    const random = () => (state = (state * 1103515245 + 12345) % 2147483648) / 2147483648;
    const causes = ["work.cpu", "cpu.throttled", "io.log_blocked", "unknown", "python.gil"];
    const states = ["running", "throttled", "blocked", "unknown", "wakeup"];
    const spans = Array.from({ length: lanes }, () => []);
    const path = [];
    let at = 0, lane = 0;
    for (let i = 0; i < pieces; i++) {
      const length = 1 + Math.floor(1000 * random() ** 6 * (random() < 0.02 ? 500 : 1));
      if (random() < 0.4) lane = Math.floor(random() * lanes);
      const kind = Math.floor(random() * causes.length);
      path.push([lane, spans[lane].length]);
      spans[lane].push([at, at + length, states[kind], causes[kind], "", random() < 0.1]);
      at += length;
    }
    const whole = (spans, i) => ({ key: `tid:${i}`, kind: "thread", label: `t${i}`, tgid: 1, tid: i, spans });
    return { wall: at, path, lanes: spans.map(whole) };
  };
  const { Ints, RUN, levelsOf, pathOf, runsOf } = await import("/assets/timeline/columns.js");
  const tracks = await import("/assets/timeline/tracks.js");
  const entry = (ints, i) => [...ints.data.subarray(i * RUN, i * RUN + RUN)];
  const entries = ints => Array.from({ length: ints.length / RUN }, (_, i) => entry(ints, i));
"""
_WINDOWS = [(0.0, 1.0), (0.0, 0.5), (0.31, 0.63), (0.9, 1.0), (0.5, 0.5001)]


@pytest.fixture
def page(open_page: OpenPage) -> Page:
    return open_page("#/host")


def _run(page: Page, body: str, *args: Any) -> Any:
    return page.evaluate("async args => {" + _MAKE + body + "}", list(args))


@pytest.mark.parametrize(("pieces", "lanes"), [(23, 3), (2_003, 7), (50_021, 12)])
def test_runs_are_bounded_by_the_pixels_and_tell_where_the_time_is(
    page: Page, pieces: int, lanes: int
) -> None:
    for low, high in _WINDOWS:
        found = _run(
            page,
            """
            const [pieces, lanes, low, high] = args;
            const made = make(pieces, pieces, lanes);
            const [from, to, width] = [made.wall * low, made.wall * high, 997];
            const out = [];
            for (const lane of made.lanes) {
              const track = tracks.toTrack(lane);
              const runs = new Ints();
              runsOf(track, from, to, width, runs);
              // The same by brute force: time by family in each pixel.
              const spent = Array.from({ length: width }, () => new Map());
              for (let i = 0; i < track.count; i++) {
                const [a, b] = [track.start[i], track.end[i]].map(t => (t - from) / (to - from) * width);
                for (let x = Math.max(Math.floor(a), 0); x < Math.min(b, width); x++) {
                  const shared = Math.min(b, x + 1) - Math.max(a, x);
                  if (shared > 0) spent[x].set(track.family[i], (spent[x].get(track.family[i]) ?? 0) + shared);
                }
              }
              out.push([entries(runs), spent.map(s => [...s])]);
            }
            return out;
            """,
            pieces,
            lanes,
            low,
            high,
        )
        for runs, spent in found:
            assert len(runs) <= 2 * 997
            painted: dict[int, int] = {}
            for x, width, family, _, _ in runs:
                assert width > 0 and x >= 0 and x + width <= 997
                painted |= dict.fromkeys(range(x, x + width), family)
            for x, families in enumerate(spent):
                share = dict(families)
                if not share:
                    continue
                if max(share.values()) > 0.75:  # one has most of the pixel: it has the pixel
                    assert painted[x] == max(share, key=lambda f: share[f]), (x, share)
                if x in painted:  # no colour that is not there, or beside it
                    near = share.keys() | {f for y in (x - 1, x + 1) if 0 <= y < 997 for f, _ in spent[y]}
                    assert painted[x] in near


@pytest.mark.parametrize(("pieces", "lanes"), [(23, 3), (2_003, 7), (50_021, 12)])
def test_the_path_is_one_line(page: Page, pieces: int, lanes: int) -> None:
    for low, high in _WINDOWS:
        levels, handed, changes = _run(
            page,
            """
            const [pieces, lanes, low, high] = args;
            const made = make(pieces, pieces, lanes);
            const all = made.lanes.map(tracks.toTrack);
            const walk = tracks.toWalk(made.path, all);
            const [level, handed] = [new Ints(), new Ints()];
            pathOf(walk, made.wall * low, made.wall * high, 997, all.map((_, i) => 10 + 20 * i), level, handed);
            const changes = made.path.filter(([lane], i) => i > 0 && made.path[i - 1][0] !== lane).length;
            return [entries(level), entries(handed), changes];
            """,
            pieces,
            lanes,
            low,
            high,
        )
        assert levels[0][0] == 0 and levels[-1][0] + levels[-1][1] == 997
        assert len(levels) <= 997 and len(handed) <= 997
        joins = {x: (top, bottom) for x, top, bottom, _, _ in handed}
        assert len(joins) == len(handed)
        for (x, width, y, *_), (after, _, other, *_) in itertools.pairwise(levels):
            assert x + width == after  # no hole
            if y != other:
                top, bottom = joins[after]
                assert top <= min(y, other) and max(y, other) <= bottom
        if (low, high) == (0.0, 1.0):
            assert sum(moves for *_, moves in handed) == changes  # no hand-over is missing


def test_a_path_that_names_no_piece_is_left_out(page: Page) -> None:
    count = _run(
        page,
        """
        const made = make(1, 5, 2);
        const all = made.lanes.map(tracks.toTrack);
        return tracks.toWalk([...made.path, [9, 0], [0, 99], [-1, 0], [0, -1]], all).count;
        """,
    )
    assert count == 5


def test_the_window_stays_inside_the_request(page: Page) -> None:
    spans = page.evaluate("""async () => {
      const { Span, LEAST } = await import("/assets/timeline/window.js");
      const out = [];
      const s = new Span(1e9);
      const note = () => out.push([s.from, s.to, s.whole]);
      s.zoom(0.5, 0.25); note();
      s.pan(-1e12); note();
      s.pan(Infinity); note();
      s.zoom(1e-12); note();
      s.zoom(1e12); note();
      s.set(3e8, 2e8); note();
      s.reveal(9e8, 9.5e8); note();
      new Span(0).zoom(2);
      return [out, LEAST];
    }""")
    out, least = spans
    assert out[0][:2] == [125_000_000, 625_000_000]
    assert out[1][:2] == [0, 500_000_000]
    assert out[2][:2] == [500_000_000, 1_000_000_000]
    assert out[3][1] - out[3][0] == pytest.approx(least)
    assert out[4] == [0, 1_000_000_000, True]
    for low, high, _ in out:
        assert low >= 0 and high <= 1e9 and high - low >= least * 0.999
    assert out[6][0] <= 9e8 and out[6][1] >= 9.5e8


def test_ticks_are_round_and_their_texts_differ(page: Page) -> None:
    found = page.evaluate("""async () => {
      const { ticksOf, tickText } = await import("/assets/timeline/layout.js");
      const out = [];
      for (const [from, to] of [[0, 1.2e9], [1e9, 1.0000004e9], [123456, 987654], [0, 200], [5e12, 5.4e12]]) {
        const { step, times } = ticksOf(from, to, 900);
        out.push([step, times, times.map(t => tickText(t, step, to))]);
      }
      return out;
    }""")
    for step, times, texts in found:
        assert str(step).strip("0") in ("1", "2", "5")
        assert 2 <= len(times) <= 11
        assert len({*texts}) == len(times), texts
        assert len({t.split("\u202f")[1] for t in texts}) == 1


def test_a_counter_keeps_its_peaks(page: Page) -> None:
    peaks = _run(
        page,
        """
        const points = Array.from({ length: 20011 }, (_, i) => [i * 1000, i === 7777 ? 99 : i % 3]);
        const track = tracks.toTrack({ key: "kv", kind: "counter", label: "", spans: [], points, unit: "count" });
        const seen = [];
        levelsOf(track, 0, 20011000, 500, (x, least, most, last) => seen.push([x, least, most, last]));
        return [seen.length, Math.max(...seen.map(s => s[2])), Math.min(...seen.map(s => s[1])), track.most];
        """,
    )
    assert peaks[0] <= 502 and peaks[1:] == [99, 0, 99]
