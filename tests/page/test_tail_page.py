"""The tail in the browser: what the slow part is made of, and the way from there to the requests."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.page.conftest import OpenPage, Shoot, every_look
from tests.page.looks import ask, chart, drag, overflows, pixels, place, ready, wait_place
from tests.page.served import Served, serve
from tests.unit import viewlab

TAIL = "#/tail?since=6h"
LOST, LATENCY, BINS = "Time lost", "Latency over time", "Slow and failed"


def ranked(served: Served) -> list[tuple[str, float, int]]:
    """Return (cause, ms lost, requests), greatest first."""
    tail = ask(served, "tail", since="6h")
    rows = [(c, sum(ms), sum(tail["by_cause_requests"][c])) for c, ms in tail["by_cause"].items()]
    return sorted((r for r in rows if r[2]), key=lambda r: -r[1])


@every_look
def test_looks(
    open_page: OpenPage,
    axe: Callable[..., list[str]],
    shoot: Shoot,
    scheme: Literal["light", "dark"],
    size: tuple[int, int],
) -> None:
    page = open_page(TAIL, scheme=scheme, size=size)
    ready(page)
    assert pixels(page, chart(page, LOST), "--c-cpu") > 100
    assert pixels(page, chart(page, LATENCY), "--p99") > 100
    assert overflows(page) <= 0
    page.locator("details.numbers > summary").click()
    page.evaluate("scrollTo(0, 0)")
    shoot(page, f"tail-{scheme}-{size[0]}")
    assert axe(page) == []


def test_says_what_the_slow_part_is_made_of(open_page: OpenPage, served: Served) -> None:
    page = open_page(TAIL)
    view = ready(page)
    rows = ranked(served)
    assert rows[0][0] in view.locator(".lead").inner_text()
    shown = view.locator(".ranks tbody tr")
    assert [r.locator(".cause").inner_text() for r in shown.all()] == [cause for cause, _, _ in rows]
    assert [int(r.locator("td").last.inner_text()) for r in shown.all()] == [n for _, _, n in rows]


def test_from_a_cause_to_its_requests(open_page: OpenPage, served: Served) -> None:
    page = open_page(TAIL)
    view = ready(page)
    cause, _, requests = ranked(served)[0]
    view.locator(".ranks tbody tr").first.click()
    params = wait_place(page, "requests")
    assert params["cause"] == cause and params["since"] == "6h"
    assert page.locator(".list .head").inner_text().startswith("1–")
    assert f"of {requests} request" in page.locator(".list .head").inner_text()
    assert {c.inner_text() for c in page.locator(".requests .c-cause").all()} == {cause}
    page.locator(".requests tbody a.over").first.click()
    assert wait_place(page, "request") == {}  # one request


def test_from_the_failed_to_the_list_of_them(open_page: OpenPage, served: Served) -> None:
    page = open_page(TAIL)
    ready(page).locator(".figures").get_by_role("link", name="failed").click()
    assert wait_place(page, "requests")["which"] == "failed"
    total = ask(served, "requests", since="6h", failed="true")["total"]
    assert total > 0
    assert f"of {total} request" in page.locator(".list .head").inner_text()


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def test_brush_over_time(open_page: OpenPage, served: Served, shoot: Shoot) -> None:
    page = open_page("#/tail?since=1h")
    ready(page)
    drag(page, chart(page, LOST), 0.4, 0.6)
    picked = page.locator(".picked")
    picked.wait_for()
    shoot(page, "tail-brushed")
    said = int(picked.inner_text().split("\n")[0].split("slow")[0].split()[-1])
    picked.get_by_text("Show them").click()
    params = wait_place(page, "requests")
    assert 0.15 * 3600 < _seconds(params["until"]) - _seconds(params["since"]) < 0.25 * 3600
    total = ask(served, "requests", slow="true", since=params["since"], until=params["until"])["total"]
    assert total == said > 0
    assert f"of {total} request" in page.locator(".list .head").inner_text()
    page.go_back()
    wait_place(page, "tail")
    drag(page, chart(page, LATENCY), 0.2, 0.3)
    page.get_by_text("Zoom in").click()
    page.wait_for_url("**until*")
    zoomed = place(page)[1]
    assert _seconds(zoomed["until"]) - _seconds(zoomed["since"]) < 0.15 * 3600
    ready(page)
    page.get_by_label("Remove the filter by time").click()
    page.wait_for_url(lambda url: "until" not in url)


def test_brush_over_latency(open_page: OpenPage, served: Served) -> None:
    page = open_page(TAIL)
    ready(page)
    drag(page, chart(page, BINS), 0.55, 0.98)
    page.locator(".picked").get_by_text("Show them").click()
    params = wait_place(page, "requests")
    assert float(params["min_ms"]) > 0
    query = {**params, "slow": "true", "sort": "latency", "order": "asc"}
    shortest = ask(served, "requests", **query)
    assert shortest["rows"][0]["latency_ms"] >= float(params["min_ms"])
    assert f"of {shortest['total']} request" in page.locator(".list .head").inner_text()


def test_click_on_a_bar(open_page: OpenPage) -> None:
    page = open_page(TAIL)
    ready(page)
    tail: dict[str, Any] = page.evaluate("fetch('api/tail?since=6h').then(r => r.json())")
    steps = [i for i, _ in enumerate(tail["times_unix_ms"]) if any(v[i] for v in tail["by_cause"].values())]
    at = steps[len(steps) // 2]
    chart(page, LOST).scroll_into_view_if_needed()
    box = chart(page, LOST).locator(".u-over").bounding_box()
    assert box is not None
    page.mouse.click(
        box["x"] + (at + 0.3) / len(tail["times_unix_ms"]) * box["width"], box["y"] + box["height"] - 3
    )
    params = wait_place(page, "requests")
    assert params["cause"] in tail["by_cause"]
    assert 1000 * (_seconds(params["until"]) - _seconds(params["since"])) == pytest.approx(
        tail["step_ms"], abs=2
    )


def test_by_keyboard(open_page: OpenPage) -> None:
    page = open_page(TAIL)
    ready(page)
    plot = chart(page, LOST)
    plot.focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    said = plot.locator("xpath=..").locator("[aria-live]")
    assert ":" in said.inner_text()
    page.keyboard.press("Shift+ArrowLeft")
    page.keyboard.press("Shift+ArrowLeft")
    page.locator(".picked").wait_for()
    page.keyboard.press("Escape")
    page.locator(".picked").wait_for(state="detached")
    page.keyboard.press("Enter")
    assert {"since", "until"} <= wait_place(page, "requests").keys()
    page.keyboard.press("3")
    wait_place(page, "host")
    page.keyboard.press("1")
    wait_place(page, "tail")


def test_first_token(open_page: OpenPage) -> None:
    page = open_page(TAIL)
    ready(page)
    page.get_by_role("button", name="First token").click()
    page.wait_for_url("**of=ttft*")
    ready(page)
    assert pixels(page, chart(page, "Time to first token"), "--p99") > 100


def test_live(open_page: OpenPage, tmp_path: Path) -> None:
    made = viewlab.build(tmp_path / "s.db", 20, hours=0.2)
    with serve(made.path) as s:
        page = open_page("#/tail?since=1h", base=s.url)
        ready(page)
        before = ask(s, "tail", since="1h")["slow"]
        page.locator(".live[data-state=live]").wait_for()
        append(made.path, 3)
        page.locator(".figures li").filter(has_text=f"{before + 3}slow").wait_for()
        assert sum(int(c.inner_text()) for c in page.locator(".ranks td:last-child").all()) == before + 3


def append(store: Path, count: int) -> None:
    """Add slow requests that end now; another *count* gives other ones."""
    import random

    from whyspan import clock
    from whyspan_exporters.store import Store

    writer = Store(store, max_age_ns=10**18, max_bytes=1 << 30)
    rng = random.Random(count)
    now = clock.now_unix_ns()
    writer.emit(
        [
            viewlab.explained(viewlab.finding(700_000 + 1000 * count + i, rng), now - 2_000_000_000)
            for i in range(count)
        ]
    )
    assert writer.flush() == ""
    writer.close()


def test_nothing_stored(
    open_page: OpenPage, tmp_path: Path, axe: Callable[..., list[str]], shoot: Shoot
) -> None:
    made = viewlab.build(tmp_path / "s.db", 0, host=False, hours=0.01)
    with serve(made.path) as s:
        said = {
            "tail": "Nothing was stored",
            "requests": "No slow request",
            "host": "No collector has written",
        }
        for route, text in said.items():
            page = open_page(f"#/{route}", base=s.url)
            assert text in ready(page).inner_text()
            shoot(page, f"empty-{route}")
            assert axe(page) == []


def test_no_answer(open_page: OpenPage, tmp_path: Path, axe: Callable[..., list[str]], shoot: Shoot) -> None:
    made = viewlab.build(tmp_path / "s.db", 5, hours=0.05)
    with serve(made.path) as s:
        page = open_page("#/tail", base=s.url, errors=False)
        ready(page)
        s.process.terminate()
        s.process.wait()
        page.get_by_role("link", name="Host").click()
        page.get_by_role("alert").wait_for()
        assert "does not answer" in page.get_by_role("alert").inner_text()
        assert axe(page) == []
        shoot(page, "no-answer")
