"""The code of a request in the browser: the chart by pointer and by keyboard, its list, the threads of a stall."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from tests.page.conftest import OpenPage, Shoot
from tests.page.looks import ask, overflows
from tests.page.served import Served
from tests.page.test_html_page import export
from tests.unit import viewcode
from tests.unit.viewlab import Written

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

#: A phone that is small, and a screen that is wide.
SIZES = pytest.mark.parametrize("size", [(360, 800), (1600, 1000)], ids=["360", "1600"])
SCHEMES = pytest.mark.parametrize("scheme", ["light", "dark"])


def _view(served: Served, lab: Written) -> Any:
    return ask(served, f"requests/{quote(lab.code, safe='')}")


def _opened(open_page: OpenPage, name: str, **options: Any) -> Page:
    page = open_page(f"#/request/{quote(name, safe='')}", **options)
    page.wait_for_selector(".view:not(.pending) .tl-canvas")
    return page


def _box(page: Page, text: str) -> Locator:
    return page.locator(".ice-box").filter(has_text=text).first


def _said(page: Page) -> str:
    return page.locator(".code .ice-said").inner_text()


def _open_all(page: Page) -> None:
    page.locator("details").evaluate_all("all => all.forEach(d => { d.open = true; })")
    page.locator(".code-list tbody tr").first.wait_for()


@SIZES
@SCHEMES
def test_it_fits_and_can_be_read(  # noqa: PLR0917
    open_page: OpenPage,
    lab: Written,
    axe: Callable[..., list[str]],
    shoot: Shoot,
    scheme: str,
    size: tuple[int, int],
) -> None:
    page = _opened(open_page, lab.code, scheme=scheme, size=size)
    shoot(page, f"code-{scheme}-{size[0]}")
    assert axe(page) == []
    assert overflows(page) <= 0
    page.get_by_role("button", name="All frames").click()
    _open_all(page)
    shoot(page, f"code-all-{scheme}-{size[0]}")
    assert axe(page) == []
    assert overflows(page) <= 0


def test_the_chart_shows_the_numbers_of_the_request(
    open_page: OpenPage, served: Served, lab: Written
) -> None:
    view = _view(served, lab)
    trees = view["code"]["trees"]
    page = _opened(open_page, lab.code)
    assert (
        page.locator(".code-sentence").inner_text() == trees[0]["sentence"] == view["verdict"]["evidence"][0]
    )
    assert view["verdict"]["code"] in page.locator(".verdict").inner_text()
    assert "kind of work: JSON in 30, chat template in 6 of 40 samples" in page.locator(".code").inner_text()
    options = page.locator(".code select option").all_inner_texts()
    assert options[:2] == ["python.loop_blocked: 40 samples", "python.loop_blocked: 2 long waits"]
    page.get_by_role("button", name="All frames").click()
    boxes = page.locator(".ice-box")
    assert boxes.count() == len(trees[0]["nodes"])
    plot = page.locator(".ice-plot").bounding_box()
    assert plot is not None
    for i, node in enumerate(trees[0]["nodes"]):
        box = boxes.nth(i).bounding_box()
        assert box is not None
        assert node["name"] in (boxes.nth(i).text_content() or "")
        assert box["width"] == pytest.approx(plot["width"] * node["samples"] / 40, abs=1)
        assert box["x"] - plot["x"] == pytest.approx(plot["width"] * node["start"] / 40, abs=1)
        assert box["y"] - plot["y"] == pytest.approx(22 * node["depth"], abs=1)
    assert page.locator(".ice-box.top").text_content() == "JSONEncoder.iterencodeencoder.py:258"


def test_another_cause_is_chosen(open_page: OpenPage, served: Served, lab: Written) -> None:
    trees = _view(served, lab)["code"]["trees"]
    page = _opened(open_page, lab.code)
    page.locator(".code select").select_option(index=1)
    assert page.locator(".code-sentence").inner_text() == trees[1]["sentence"]
    assert page.locator(".ice-box.top").inner_text().startswith("StreamHandler.flush")
    page.locator(".code select").select_option(label="python.gil: 5 samples")
    assert "had the interpreter lock" in page.locator(".ice-box").first.inner_text()


def test_a_pointer_is_told_of_a_frame_and_zooms_into_it(open_page: OpenPage, lab: Written) -> None:
    page = _opened(open_page, lab.code)
    whole = page.locator(".ice-box").count()
    _box(page, "JSONEncoder.iterencode").hover()
    tip = page.locator(".code .tl-tip")
    assert tip.locator("span").all_inner_texts() == [
        "JSONEncoder.iterencode (/usr/lib/python3.11/json/encoder.py:258)",
        "30 of 40 samples, 75\u202f%",
        "line 258 in 21, 260 in 9",
    ]
    _box(page, "apply_chat_template").click()
    plot, box = page.locator(".ice-plot").bounding_box(), _box(page, "apply_chat_template").bounding_box()
    assert plot is not None and box is not None and box["width"] == pytest.approx(plot["width"], abs=1)
    assert "6 of 40 samples, 15\u202f%" in _said(page)
    assert page.locator(".ice-box", has_text="dumps").count() == 0
    page.get_by_role("button", name="Whole chart").click()
    assert page.locator(".ice-box").count() == whole
    assert page.get_by_role("button", name="Whole chart").count() == 0
    assert page.evaluate("document.activeElement.className") == "ice-view"  # its button is gone
    # A run of frames that only lead to the next is one box until it is opened.
    _box(page, "15 frames").click()
    assert page.locator(".ice-box").count() == whole + 14


def test_keys_walk_the_frames(open_page: OpenPage, lab: Written, axe: Callable[..., list[str]]) -> None:
    page = _opened(open_page, lab.code)
    page.get_by_role("button", name="All frames").focus()
    page.keyboard.press("Tab")
    assert _said(page).startswith("JSONEncoder.iterencode (")  # where most of it was
    for key, says in (
        ("ArrowRight", "root (<template>:41) · 6 of 40 samples"),
        ("ArrowUp", "Template.render ("),
        ("ArrowLeft", "JSONEncoder.encode ("),
        ("ArrowDown", "JSONEncoder.iterencode ("),
        ("ArrowDown", "PyObject_Vectorcall [python3.11]"),
        ("ArrowDown", "encoder_listencode_dict [_json"),
        ("ArrowDown", "encoder_listencode_dict [_json"),  # there is nothing below
        ("Home", "MainThread [4100] · 40 of 40 samples, 100\u202f%"),
        ("ArrowDown", "15 frames: <module> … "),
        ("Enter", "<module> (/srv/venv/bin/uvicorn:8)"),
    ):
        page.keyboard.press(key)
        assert _said(page).startswith(says), (key, _said(page))
        assert page.locator(".ice-box.at").count() == 1
    assert "innermost in all" in _walked(page, "End")
    for _ in range(3):
        page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    assert page.get_by_role("button", name="Whole chart").is_visible()
    assert axe(page) == []
    page.keyboard.press("Escape")
    assert page.get_by_role("button", name="Whole chart").count() == 0


def _walked(page: Page, key: str) -> str:
    page.keyboard.press(key)
    return _said(page)


def test_the_list_holds_the_same(open_page: OpenPage, served: Served, lab: Written) -> None:
    nodes = _view(served, lab)["code"]["trees"][0]["nodes"]
    page = _opened(open_page, lab.code)
    page.get_by_text("The code as a list").click()
    rows = page.locator(".code-list tbody tr")
    assert rows.count() == len(nodes)
    for i, node in enumerate(nodes):
        cells = rows.nth(i).locator("td").all_inner_texts()
        assert cells[0] == str(node["samples"]) and cells[2] == (str(node["own"]) if node["own"] else "–")
        assert cells[3] == str(node["depth"] + 1)
        assert cells[4].startswith(node["name"]) and node["place"] in cells[4]
    assert "JSONEncoder.iterencode" in page.locator(".code-list .guilty").inner_text()


def test_the_threads_of_a_stall(open_page: OpenPage, lab: Written) -> None:
    page = _opened(open_page, lab.code)
    shown = page.locator(".threads")
    assert shown.locator("h3").all_inner_texts() == [
        "uvicorn [4100] at 260\u202fms: 34 threads",
        "EngineCore [4200] at 300\u202fms: 36 threads",
    ]
    first = shown.locator(".groups").first.locator("> li")
    assert first.nth(0).inner_text().startswith("stalled")
    assert "running" in first.nth(0).inner_text() and "for 214\u202fms" in first.nth(0).inner_text()
    frames = first.nth(0).locator(".frames li")
    assert frames.count() == 2 + len(viewcode.DUMPS)
    assert [frames.nth(i).is_visible() for i in (5, 6)] == [True, False]
    first.nth(0).get_by_text("frames more").click()
    assert frames.nth(6).is_visible()
    text = first.nth(2).inner_text()
    assert "31 threads:" in text and "pool_0, pool_1, pool_2" in text and "blocked in futex" in text
    assert text.endswith("(more frames)")
    assert "4 more threads, not shown" in shown.inner_text()


def test_without_a_sampler_one_line_says_so_and_without_anything_nothing(
    open_page: OpenPage, served: Served
) -> None:
    found = {}
    for slow in (True, False):  # what was kept of the host during them names no sampler
        rows = ask(served, "requests", slow=str(slow).lower(), limit=100)["rows"]
        found[slow] = next(r["id"] for r in rows if r["slow"] is slow and not r["failed"])
    page = _opened(open_page, found[True])
    line = "No code is named: no CPU sampler ran during this request. whyspan probes says why."
    assert page.locator(".no-code").inner_text() == line
    assert page.locator(".code, .threads").count() == 0
    page = _opened(open_page, found[False])
    assert page.locator(".no-code, .code, .threads").count() == 0


def test_hostile_names_stay_text_whatever_is_chosen(open_page: OpenPage, lab: Written) -> None:
    for name in lab.hostile[:4]:
        page = _opened(open_page, name, size=(360, 800))
        for i in range(page.locator(".code select option").count()):
            page.locator(".code select").select_option(index=i)
            _open_all(page)
            page.locator(".ice-box").first.hover()
            page.locator(".ice-view").focus()
            page.keyboard.press("ArrowDown")
            page.keyboard.press("Enter")
            assert overflows(page) <= 0
        assert (
            page.locator("#main script, #main img, #main svg, #main [onerror], #main [onload]").count() == 0
        )
        assert page.evaluate("window.owned") is None


def test_a_file_that_stands_alone_has_it(
    lab: Written, tmp_path: Path, open_page: OpenPage, axe: Callable[..., list[str]], shoot: Shoot
) -> None:
    page = open_page("blank", base="about:", scheme="dark")
    page.goto(export(lab, lab.code, tmp_path))
    page.wait_for_selector(".ice-box")
    assert page.locator(".ice-box.top").inner_text().startswith("JSONEncoder.iterencode")
    assert page.locator(".threads .groups li.stalled").count() == 1
    assert axe(page) == []
    shoot(page, "code-alone")
    # On paper the ground is light, whatever the screen's is, and nothing is cut off.
    page.get_by_role("button", name="All frames").click()
    page.emulate_media(media="print", color_scheme="dark")
    assert page.locator(".ice-view").evaluate("e => getComputedStyle(e).maxHeight") == "none"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(246, 247, 249)"
    shoot(page, "code-printed")
