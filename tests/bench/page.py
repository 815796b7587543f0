"""The page in headless Chromium: a list of 10,000 requests, and a request of 50,000 pieces drawn, panned and zoomed.

``python -m tests.bench.page``. Frames are counted as intervals of requestAnimationFrame while a hand drags; the
browser's own counters say what a frame costs its main thread.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.page import tools
from tests.page.served import serve
from tests.unit import viewlab

if TYPE_CHECKING:
    from playwright.sync_api import Page

REQUESTS: Final = 10_000
PIECES: Final = 50_000
_REPEATS: Final = 7
#: Moves of the mouse in a drag, at least as many as the frames that are looked at.
_MOVES: Final = 240
_SIZE: Final = {"width": 1280, "height": 800}

#: Resolves when the timeline has been painted: the frame after the one that drew it has begun. Returns ms since
#: *since* until it was drawn, and until it was seen.
_PAINTED = """since => new Promise(done => {
  const look = () => {
    const mark = performance.getEntriesByName("whyspan:drawn").find(m => m.startTime >= since);
    if (!mark || !document.querySelector(".view:not(.pending) .tl-canvas")) return requestAnimationFrame(look);
    requestAnimationFrame(() => requestAnimationFrame(() => done([mark.startTime - since, performance.now() - since])));
  };
  look();
})"""
#: Goes to *hash* and resolves when *selector* is shown and painted. Returns ms.
_GO = """([hash, selector]) => new Promise(done => {
  const since = performance.now();
  location.hash = hash;
  const look = () => document.querySelector(selector)
    ? requestAnimationFrame(() => setTimeout(() => done(performance.now() - since)))
    : requestAnimationFrame(look);
  look();
})"""
#: The view before has tables, too, and stays until the next one is ready.
_ROWS: Final = ".view:not(.pending)[data-place^='#/requests'] tbody tr"
_HOST: Final = ".view:not(.pending)[data-place^='#/host']"
_RECORD = """() => {
  const times = window.benchFrames = [];
  window.benchOn = true;
  const tick = now => { times.push(now); if (window.benchOn) requestAnimationFrame(tick); };
  requestAnimationFrame(tick);
}"""
_STOP = "() => { window.benchOn = false; return window.benchFrames; }"


def run(directory: Path) -> dict[str, Any]:
    """Return the figures; ms unless the name says otherwise."""
    from playwright.sync_api import sync_playwright

    lacking = tools.lacking()
    if lacking:
        raise SystemExit(f"the page's bench {lacking}")
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as made:
        store = viewlab.build(Path(made) / "s.db", REQUESTS, big_segments=PIECES)
        with serve(store.path) as served, sync_playwright() as p:
            options = ["--no-sandbox"] if os.geteuid() == 0 else []
            browser = p.chromium.launch(executable_path=tools.browser(), args=[*options, "--disable-gpu"])
            page = browser.new_page(viewport=_SIZE)  # type: ignore[arg-type]
            out = {**_listed(page, served.url), **_drawn(page, served.url, store.big)}
            browser.close()
    return out


def _listed(page: Page, url: str) -> dict[str, Any]:
    page.goto(f"{url}#/host")
    page.wait_for_selector(".view:not(.pending)")
    times = []
    for _ in range(_REPEATS):
        times.append(page.evaluate(_GO, ["#/requests?since=2d&which=all", _ROWS]))
        page.evaluate(_GO, ["#/host", _HOST])
    return {"list_10k_ms": max(times), "list_10k_median_ms": statistics.median(times)}


def _drawn(page: Page, url: str, big: str) -> dict[str, Any]:
    from urllib.parse import quote

    place = f"#/request/{quote(big, safe='')}"
    page.goto("about:blank")
    cold = []
    for _ in range(_REPEATS):
        page.goto("about:blank")
        page.goto(f"{url}{place}")
        cold.append(page.evaluate(_PAINTED, 0)[1])
    warm = []
    for _ in range(_REPEATS):
        page.evaluate(_GO, ["#/host", _HOST])
        since = page.evaluate("hash => { location.hash = hash; return performance.now(); }", place)
        warm.append(page.evaluate(_PAINTED, since)[1])
    answered = page.evaluate(
        "() => performance.getEntriesByType('resource').filter(e => e.name.includes('/api/requests/')).pop().duration"
    )
    out = {
        "timeline_cold_ms": max(cold),
        "timeline_cold_median_ms": statistics.median(cold),
        "timeline_first_draw_ms": max(warm),
        "timeline_first_draw_median_ms": statistics.median(warm),
        "timeline_answer_ms": answered,
    }
    for name, zooms in (("half", 2), ("tenth", 5)):
        out |= {f"pan_{name}_{key}": value for key, value in _panned(page, zooms).items()}
    return out


def _panned(page: Page, zooms: int) -> dict[str, Any]:
    """Zoom in so often and drag to and fro."""
    page.keyboard.press("Escape")
    canvas = page.locator(".tl-canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box is not None
    page.locator(".tl-view").focus()
    page.keyboard.press("0")
    for _ in range(zooms):
        page.keyboard.press("+")
    middle, y = box["x"] + box["width"] * 0.6, box["y"] + 120
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    before = _metrics(session)
    page.mouse.move(middle, y)
    page.mouse.down()
    page.evaluate(_RECORD)
    for i in range(_MOVES):
        swing = i % 120
        page.mouse.move(middle + (swing if swing < 60 else 120 - swing) * 5 - 150, y)
    frames = page.evaluate(_STOP)
    page.mouse.up()
    after = _metrics(session)
    gaps = sorted(b - a for a, b in itertools.pairwise(frames))
    busy = (after["TaskDuration"] - before["TaskDuration"]) * 1e3
    return {
        "frames_per_s": 1e3 / statistics.fmean(gaps),
        "slowest_5pct_frames_per_s": 1e3 / gaps[int(len(gaps) * 0.95)],
        "longest_frame_ms": gaps[-1],
        "busy_ms_per_frame": busy / len(frames),
        "script_ms_per_frame": (after["ScriptDuration"] - before["ScriptDuration"]) * 1e3 / len(frames),
        "frames": len(frames),
    }


def _metrics(session: Any) -> dict[str, float]:
    return {m["name"]: m["value"] for m in session.send("Performance.getMetrics")["metrics"]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path("build/bench"))
    print(json.dumps(run(parser.parse_args().directory), indent=2))


if __name__ == "__main__":
    main()
