"""One request in the browser: verdict, timeline, causes; by mouse, by keyboard, as a table; in all schemes."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from urllib.request import urlopen

import pytest

from tests.page.conftest import NARROW, WIDE, OpenPage, Shoot, every_look
from tests.page.served import Served
from tests.unit.viewlab import Written

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

#: Where the middle of the longest piece of a lane is on the canvas: [x, y], and its index in the lane.
_SPOT = """async ([view, lane]) => {
  const { layoutOf } = await import("/assets/timeline/layout.js");
  const { toTrack } = await import("/assets/timeline/tracks.js");
  const canvas = document.querySelector(".tl-canvas");
  const layout = layoutOf(view.lanes.map(toTrack), canvas.clientWidth);
  const spans = view.lanes[lane].spans;
  const longest = spans.reduce((best, s, i) => s[1] - s[0] > spans[best][1] - spans[best][0] ? i : best, 0);
  const row = layout.rows[lane];
  const middle = (spans[longest][0] + spans[longest][1]) / 2;
  const x = layout.gutter + middle / view.wall_ns * (canvas.clientWidth - layout.gutter);
  return [x, row.y + row.bar + row.barHeight - 2 + (row.pinned ? 0 : layout.pinned), longest];
}"""
#: How many pixels of the canvas have a colour, given as a custom property.
_PIXELS = """property => {
  const canvas = document.querySelector(".tl-canvas");
  const copy = document.createElement("canvas");
  [copy.width, copy.height] = [canvas.width, canvas.height];
  const pen = copy.getContext("2d", { willReadFrequently: true });
  pen.drawImage(canvas, 0, 0);
  pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(property).trim();
  const [r, g, b] = [1, 3, 5].map(i => parseInt(pen.fillStyle.slice(i, i + 2), 16));
  const { data } = pen.getImageData(0, 0, canvas.width, canvas.height);
  let count = 0;
  for (let i = 0; i < data.length; i += 4) if (data[i] === r && data[i + 1] === g && data[i + 2] === b) count++;
  return count;
}"""


def _view(served: Served, name: str) -> dict[str, Any]:
    with urlopen(f"{served.url}api/requests/{quote(name, safe='')}") as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def _place(name: str) -> str:
    return f"#/request/{quote(name, safe='')}"


def _opened(open_page: OpenPage, name: str, **options: Any) -> Page:
    page = open_page(_place(name), **options)
    page.wait_for_selector(".view:not(.pending) .tl-canvas")
    return page


def _shown(page: Page) -> str:
    return page.locator(".tl-shown").inner_text()


def _said(page: Page) -> Locator:
    return page.locator(".tl-said")


@pytest.fixture(scope="module")
def throttled(lab: Written) -> str:
    """The id of a request that its CPU quota held up."""
    with sqlite3.connect(f"file:{lab.path}?mode=ro", uri=True) as db:
        row = db.execute(
            "SELECT id FROM findings WHERE cause = 'cpu.throttled' AND id != ? LIMIT 1", (lab.big,)
        )
        found: str = row.fetchone()[0]
    return found


@every_look
def test_what_is_shown(  # noqa: PLR0917
    open_page: OpenPage,
    served: Served,
    throttled: str,
    axe: Callable[..., list[str]],
    shoot: Shoot,
    scheme: str,
    size: tuple[int, int],
) -> None:
    view = _view(served, throttled)
    page = _opened(open_page, throttled, scheme=scheme, size=size)
    shoot(page, f"request-{scheme}-{size[0]}")
    assert axe(page) == []
    assert page.locator(".verdict .sentence").inner_text() == view["verdict"]["sentence"]
    text = page.locator("#main").inner_text()
    for line in (view["verdict"]["fix"], *view["verdict"]["evidence"], view["verdict"]["culprit"]["name"]):
        assert line in text
    near = [r for r in view["ruled_out"] if r["near"]]
    assert near and all(r["cause"] in text and r["check"] in text for r in near)
    bars = page.locator(".bars tbody tr")
    assert bars.count() == len(view["causes"])
    assert "cpu.throttled" in page.locator(".bars .guilty").inner_text()
    # No part is wider than the screen.
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    # Its cause is painted in its family's colour, the path in ink.
    assert page.evaluate(_PIXELS, "--c-cpu") > 200
    assert page.evaluate(_PIXELS, "--ink") > 200


def test_every_number_of_time_has_a_unit(open_page: OpenPage, throttled: str) -> None:
    page = _opened(open_page, throttled)
    cells = page.locator(".bars tbody td.num").all_inner_texts()
    assert cells
    for cell in cells:
        assert cell in ("", "–") or re.search(r"(ns|µs|ms|\ds|\u202fs)$", cell), cell


def test_buttons_and_keys_zoom_and_move(open_page: OpenPage, throttled: str) -> None:
    page = _opened(open_page, throttled)
    whole = _shown(page)
    assert whole.startswith("whole request")
    page.get_by_role("button", name="Zoom in").click()
    nearer = _shown(page)
    assert nearer != whole
    page.locator(".tl-view").focus()
    page.keyboard.press("ArrowRight")
    later = _shown(page)
    assert later != nearer and later.split("(")[1] == nearer.split("(")[1]  # moved, as wide as before
    page.keyboard.press("ArrowLeft")
    assert _shown(page) == nearer
    page.keyboard.press("-")
    assert _shown(page) == whole
    page.keyboard.press("+")
    page.keyboard.press("End")
    page.keyboard.press("Home")
    assert _shown(page).startswith("0")
    page.keyboard.press("0")
    assert _shown(page) == whole


def test_the_wheel_zooms_where_the_pointer_is_and_leaves_the_page_its_scrolling(
    open_page: OpenPage, throttled: str
) -> None:
    page = _opened(open_page, throttled)
    canvas = page.locator(".tl-canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 3, box["y"] + 60)
    whole = _shown(page)
    # What scrolled the page a moment ago goes on doing so.
    page.wait_for_function("() => new Promise(done => setTimeout(() => done(true), 300))")
    page.mouse.wheel(0, -240)
    page.wait_for_function("text => document.querySelector('.tl-shown').textContent !== text", arg=whole)
    shown = _shown(page)
    # At the right edge the end of the request stays where it is.
    end, all_ms = re.search(r"– ([\d.]+)\u202fms", shown), re.search(r"([\d.]+)\u202fms", whole)
    assert end is not None and all_ms is not None, (shown, whole)
    assert float(end[1]) == pytest.approx(float(all_ms[1]), rel=0.01)
    page.mouse.wheel(0, 2000)
    page.wait_for_function("text => document.querySelector('.tl-shown').textContent === text", arg=whole)
    # All is shown: the wheel is the page's again.
    before = page.evaluate("scrollY")
    page.mouse.wheel(0, 200)
    page.wait_for_function("y => scrollY > y", arg=before)


def test_a_drag_moves_and_a_drag_on_the_axis_chooses(open_page: OpenPage, throttled: str) -> None:
    page = _opened(open_page, throttled)
    canvas = page.locator(".tl-canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] / 2, box["y"] + 60
    page.mouse.move(x, box["y"] + 8)
    page.mouse.down()
    page.mouse.move(x + 100, box["y"] + 8, steps=4)
    page.mouse.up()
    chosen = _shown(page)
    assert not chosen.startswith("whole")
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 120, y, steps=4)
    page.mouse.up()
    moved = _shown(page)
    assert moved != chosen and moved.split("(")[1] == chosen.split("(")[1]
    # The strip above shows the whole: a click there goes there.
    page.locator(".tl-strip").click(position={"x": 2, "y": 10})
    assert _shown(page).startswith("0")


def test_two_fingers_zoom(open_page: OpenPage, throttled: str) -> None:
    page = _opened(open_page, throttled, size=NARROW, has_touch=True)
    canvas = page.locator(".tl-canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box is not None
    whole = _shown(page)
    session = page.context.new_cdp_session(page)
    x, y = box["x"] + box["width"] / 2, box["y"] + 60

    def fingers(kind: str, apart: float) -> None:
        points = [{"x": x - apart, "y": y, "id": 1}, {"x": x + apart, "y": y, "id": 2}] if apart else []
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    fingers("touchStart", 20)
    for apart in (30, 45, 60, 80):
        fingers("touchMove", apart)
    fingers("touchEnd", 0)
    page.wait_for_function("text => document.querySelector('.tl-shown').textContent !== text", arg=whole)
    assert page.evaluate("visualViewport.scale") == 1  # the page itself did not grow


def test_a_click_picks_what_is_there(open_page: OpenPage, served: Served, throttled: str) -> None:
    view = _view(served, throttled)
    page = _opened(open_page, throttled)
    page.locator(".tl-canvas").scroll_into_view_if_needed()
    for lane in (0, 1, 2):
        x, y, piece = page.evaluate(_SPOT, [view, lane])
        page.locator(".tl-canvas").click(position={"x": x, "y": y})
        _, _, state, cause, detail, _ = view["lanes"][lane]["spans"][piece]
        said = _said(page).inner_text()
        assert (state if lane == 0 else cause) in said and view["lanes"][lane]["label"] in said, said
        assert detail in said
    page.keyboard.press("Enter")
    assert not _shown(page).startswith("whole")
    page.keyboard.press("Escape")
    assert _said(page).inner_text().startswith("Click a piece")
    page.locator(".tl-canvas").hover(position={"x": x, "y": y})
    assert page.locator(".tl-tip").is_visible()


def test_keys_walk_the_critical_path(open_page: OpenPage, served: Served, throttled: str) -> None:
    view = _view(served, throttled)
    page = _opened(open_page, throttled)
    page.locator(".tl-view").focus()
    for step, (lane, piece) in enumerate(view["path"][:12], 1):
        page.keyboard.press("n")
        said = _said(page).inner_text()
        assert f"piece {step} of {len(view['path'])} on the critical path" in said
        assert view["lanes"][lane]["label"] in said
        assert view["lanes"][lane]["spans"][piece][3] in said
    page.keyboard.press("p")
    assert "piece 11 of" in _said(page).inner_text()
    page.keyboard.press("ArrowUp")
    assert "piece 11 of" not in _said(page).inner_text()


def test_the_table_holds_the_same(
    open_page: OpenPage, served: Served, throttled: str, axe: Callable[..., list[str]]
) -> None:
    view = _view(served, throttled)
    page = _opened(open_page, throttled)
    page.get_by_text("The timeline as a table").click()
    pieces = sum(len(lane["spans"]) for lane in view["lanes"])
    assert f"of {pieces} pieces" in page.locator(".tl-pages").inner_text()
    assert axe(page) == []
    rows = page.locator(".tl-table tbody tr")
    assert rows.count() == min(pieces, 100)
    for i, (lane, piece) in enumerate(view["path"][:20]):
        _, _, _, cause, detail, inferred = view["lanes"][lane]["spans"][piece]
        text = rows.nth(i).inner_text()
        assert cause in text and detail in text and ("(inferred)" in text) == inferred
    page.get_by_role("button", name="Longest first").click()
    lanes = [lane for lane in view["lanes"] if lane["spans"]]
    longest = max((s for lane in lanes for s in lane["spans"]), key=lambda s: s[1] - s[0])
    assert (longest[3] or longest[2]) in rows.nth(0).inner_text()
    page.get_by_role("button", name="Longest first").click()
    # A narrower window has fewer pieces; a row leads to its piece.
    page.get_by_role("button", name="Zoom in").click()
    page.wait_for_function(
        "all => !document.querySelector('.tl-pages').textContent.includes(all)", arg=f"of {pieces} pieces"
    )
    rows.nth(0).get_by_role("button").click()
    assert "on the critical path" in _said(page).inner_text()


def test_inferred_and_unknown_are_not_painted_like_fact(open_page: OpenPage, lab: Written) -> None:
    page = _opened(open_page, lab.big)
    looks = page.evaluate("""async () => {
      const { pensOf } = await import("/assets/timeline/pens.js");
      const { INFERRED, UNKNOWN_STATE } = await import("/assets/timeline/tracks.js");
      const { FAMILIES } = await import("/assets/colours.js");
      const ctx = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
      const pens = pensOf(ctx);
      const colours = (family, look) => {
        ctx.clearRect(0, 0, 16, 16);
        ctx.fillStyle = pens.fill(family, look);
        ctx.fillRect(0, 0, 16, 16);
        return new Set(new Uint32Array(ctx.getImageData(0, 0, 16, 16).data.buffer)).size;
      };
      return FAMILIES.map((_, i) => [FAMILIES[i], colours(i, 0), colours(i, INFERRED), colours(i, UNKNOWN_STATE)]);
    }""")
    for family, fact, inferred, unknown in looks:
        assert (fact == 1) == (family != "unknown"), family
        assert inferred > 1 and unknown > 1, family


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_is_written_on_pieces_can_be_read(open_page: OpenPage, throttled: str, scheme: str) -> None:
    page = _opened(open_page, throttled, scheme=scheme)
    pairs = page.evaluate("""async () => {
      const { pensOf } = await import("/assets/timeline/pens.js");
      const { PLAIN } = await import("/assets/timeline/tracks.js");
      const { FAMILIES } = await import("/assets/colours.js");
      const pens = pensOf(document.createElement("canvas").getContext("2d"));
      const written = [...FAMILIES.keys(), PLAIN].map(i => [pens.fill(i, 0), pens.text(i, 0)]);
      return [...written.filter(([fill]) => typeof fill === "string"), [pens.card, pens.ink], [pens.card, pens.soft]];
    }""")
    assert len(pairs) > 10
    for ground, text in pairs:
        light, dark = sorted((_luminance(ground), _luminance(text)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (ground, text)


def _luminance(colour: str) -> float:
    digits = colour.lstrip("#")
    digits = digits if len(digits) == 6 else "".join(d * 2 for d in digits)
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def test_a_request_of_50000_pieces(open_page: OpenPage, lab: Written, shoot: Shoot) -> None:
    page = _opened(open_page, lab.big)
    page.get_by_text("The timeline as a table").click()
    assert "of 50\u202f4" in page.locator(".tl-pages").inner_text()  # the path, phases and 400 steps
    assert page.locator(".tl-table tbody tr").count() == 100
    shoot(page, "request-50000", whole=False)
    page.locator(".tl-view").focus()
    for _ in range(60):
        page.keyboard.press("+")
    shoot(page, "request-50000-near", whole=False)
    assert "ns)" in _shown(page)


def test_hostile_names_do_nothing(
    open_page: OpenPage, lab: Written, axe: Callable[..., list[str]], shoot: Shoot
) -> None:
    for i, name in enumerate(lab.hostile):
        page = _opened(open_page, name, size=NARROW if i % 2 else WIDE)
        page.get_by_text("The timeline as a table").click()
        page.locator(".tl-view").focus()
        for key in ("n", "n", "ArrowDown", "Enter"):
            page.keyboard.press(key)
        assert page.evaluate("window.owned") is None
        assert (
            page.locator("#main script, #main img, #main iframe, #main [onerror], #main [onload]").count()
            == 0
        )
        hrefs = page.locator("#main a").evaluate_all("links => links.map(a => a.protocol)")
        assert {*hrefs} <= {"http:", "https:"}
        shown = page.locator("#main").inner_text()
        assert not re.search(r"[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]", shown)
        assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]  # type: ignore[index]
        shoot(page, f"request-hostile-{i}")
        if i < 2:
            assert axe(page) == []


def test_an_unknown_request_is_said_to_be_unknown(open_page: OpenPage) -> None:
    page = open_page("#/request/nobody", errors=False)
    page.get_by_role("alert").wait_for()
    assert "Not in the store" in page.get_by_role("alert").inner_text()
