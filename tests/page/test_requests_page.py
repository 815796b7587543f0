"""The list of requests in the browser: filters, order, pages, news, and names that mean harm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from tests.page.conftest import OpenPage, Shoot, every_look
from tests.page.looks import ask, overflows, place, ready, wait_place
from tests.page.served import Served, serve
from tests.page.test_tail_page import append
from tests.unit import viewlab
from tests.unit.viewcases import EVIL

if TYPE_CHECKING:
    from playwright.sync_api import Page

LIST = "#/requests?since=6h"


def ids(page: Page) -> list[str]:
    """Return the ids of the rows shown."""
    found: list[str] = page.eval_on_selector_all(".requests tbody tr", "rows => rows.map(r => r.dataset.id)")
    return found


def column(page: Page, name: str) -> list[str]:
    """Return the texts of a column."""
    return [text.strip() for text in page.locator(f".requests .c-{name}").all_inner_texts()]


def total(page: Page) -> str:
    """Return what is said of how many there are."""
    return page.locator(".list .head").inner_text().split("\n")[0]


@every_look
def test_looks(
    open_page: OpenPage,
    axe: Callable[..., list[str]],
    shoot: Shoot,
    scheme: Literal["light", "dark"],
    size: tuple[int, int],
) -> None:
    page = open_page(LIST + "&which=all", scheme=scheme, size=size)
    ready(page)
    assert overflows(page) <= 0
    shoot(page, f"requests-{scheme}-{size[0]}", whole=False)
    assert axe(page) == []


def test_is_what_the_server_says(open_page: OpenPage, served: Served) -> None:
    page = open_page(LIST)
    ready(page)
    found = ask(served, "requests", since="6h", slow="true")
    assert ids(page) == [r["id"] for r in found["rows"]]
    assert total(page) == f"1–100 of {found['total']} requests"
    assert all(r["slow"] or r["failed"] for r in found["rows"])


def test_filters(open_page: OpenPage, served: Served) -> None:
    page = open_page(LIST)
    ready(page)
    page.get_by_label("Cause").focus()
    page.get_by_label("Cause").select_option("cpu.throttled")
    assert wait_place(page, "requests")["cause"] == "cpu.throttled"
    page.wait_for_url("**cause=*")
    ready(page)
    assert set(column(page, "cause")) == {"cpu.throttled"}
    assert (
        page.evaluate("document.activeElement.dataset.filter") == "cause"
    )  # who works by keyboard stays there
    page.get_by_label("Tenant").select_option("acme")
    page.wait_for_url("**tenant=acme*")
    ready(page)
    both = ask(served, "requests", since="6h", slow="true", cause="cpu.throttled", tenant="acme")
    assert ids(page) == [r["id"] for r in both["rows"]] != []
    page.get_by_role("button", name="Clear the filters").click()
    page.wait_for_url(lambda url: "tenant" not in url and "cause" not in url)
    ready(page)
    page.get_by_role("button", name="Failed", exact=True).click()
    page.wait_for_url("**which=failed*")
    ready(page)
    failed = ask(served, "requests", since="6h", failed="true")
    assert ids(page) == [r["id"] for r in failed["rows"]] != []
    assert all("500" in text for text in column(page, "request"))
    page.get_by_role("button", name="15 min").click()
    page.wait_for_url("**since=15m*")
    ready(page)
    assert len(ids(page)) < len(failed["rows"])


def test_filter_by_family(open_page: OpenPage, served: Served) -> None:
    page = open_page(LIST)
    ready(page)
    page.get_by_label("Cause").select_option("engine")
    page.wait_for_url("**cause=engine*")
    ready(page)
    shown = set(column(page, "cause"))
    assert len(shown) > 1 and all(c.startswith("engine.") for c in shown)


def test_nothing_fits(open_page: OpenPage, axe: Callable[..., list[str]], shoot: Shoot) -> None:
    page = open_page(LIST + "&cause=gpu.link")
    view = ready(page)
    assert "fits the filters" in view.inner_text()
    assert axe(page) == []
    shoot(page, "requests-none")


@pytest.mark.parametrize(
    ("head", "key"), [("Latency", "latency"), ("First token", "ttft"), ("Lost", "excess")]
)
def test_order(open_page: OpenPage, served: Served, head: str, key: str) -> None:
    page = open_page(LIST)
    ready(page)
    for order, said in (("desc", "descending"), ("asc", "ascending")):
        page.get_by_role("columnheader", name=head).get_by_role("link").click()
        page.wait_for_url(f"**order={order}*")
        ready(page)
        found = ask(served, "requests", since="6h", slow="true", sort=key, order=order)
        assert ids(page) == [r["id"] for r in found["rows"]]
        assert page.get_by_role("columnheader", name=head).get_attribute("aria-sort") == said


def test_pages(open_page: OpenPage, served: Served) -> None:
    page = open_page(LIST + "&which=all&sort=latency")
    ready(page)
    seen = ids(page)
    while page.get_by_role("link", name="Next page").count():
        page.get_by_role("link", name="Next page").click()
        page.wait_for_url(f"**from={len(seen)}*")
        ready(page)
        seen += ids(page)
    found = ask(served, "requests", since="6h", sort="latency", limit=1000)
    assert seen == [r["id"] for r in found["rows"]]
    assert total(page).endswith(f"–{len(seen)} of {len(seen)} requests")
    page.go_back()
    wait_place(page, "requests")
    assert len(ids(page)) == 100
    page.get_by_role("link", name="First page").click()
    page.wait_for_url(lambda url: "cursor" not in url)
    ready(page)
    assert ids(page) == seen[:100]


def test_by_keyboard(open_page: OpenPage) -> None:
    page = open_page(LIST)
    ready(page)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.locator(".requests tbody a.over").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("j")
    page.keyboard.press("ArrowUp")
    second = ids(page)[1]
    assert page.evaluate("document.activeElement.closest('tr').dataset.id") == second
    page.keyboard.press("Enter")
    wait_place(page, "request")
    assert place(page)[0] == f"request/{second}"


def test_news(open_page: OpenPage, tmp_path: Path) -> None:
    made = viewlab.build(tmp_path / "s.db", 20, hours=0.2)
    with serve(made.path) as s:
        page = open_page("#/requests", base=s.url)
        ready(page)
        before = len(ids(page))
        page.locator(".live[data-state=live]").wait_for()
        append(made.path, 2)
        page.locator(".requests tr.fresh").nth(1).wait_for()
        assert len(ids(page)) == before + 2
        # Rows stay where they are while somebody is at one of them.
        page.locator(".requests tbody a.over").nth(3).focus()
        append(made.path, 4)
        page.get_by_role("button", name="4 new").wait_for()
        assert len(ids(page)) == before + 2
        page.get_by_role("button", name="4 new").click()
        assert len(ids(page)) == before + 6
        # Paused, nothing is asked.
        page.locator(".live").click()
        page.locator(".live[data-state=off]").wait_for()


def test_news_where_there_was_nothing(open_page: OpenPage, tmp_path: Path) -> None:
    made = viewlab.build(tmp_path / "s.db", 0, host=False, hours=0.01)
    with serve(made.path) as s:
        page = open_page("#/requests", base=s.url)
        assert "No slow request" in ready(page).inner_text()
        page.locator(".live[data-state=live]").wait_for()
        append(made.path, 2)
        page.locator(".requests tbody tr").nth(1).wait_for()
        assert len(ids(page)) == 2


def test_a_token_that_has_run_out(open_page: OpenPage) -> None:
    page = open_page(LIST, errors=False)
    ready(page)
    page.route("**/api/**", lambda r: r.fulfill(status=401, json={"error": "a token is needed"}))
    page.get_by_role("link", name="Host").click()
    page.get_by_role("button", name="Log in").wait_for()


def test_an_error_is_said(open_page: OpenPage) -> None:
    page = open_page("#/requests?since=nonsense", errors=False)
    page.get_by_role("alert").wait_for()
    assert "since" in page.get_by_role("alert").inner_text()
    page = open_page("#/request/not-there", errors=False)
    page.get_by_role("alert").wait_for()
    assert "Not in the store" in page.get_by_role("alert").inner_text()


def test_hostile_names(open_page: OpenPage, served: Served, shoot: Shoot) -> None:
    page = open_page(LIST + "&which=all")
    ready(page)
    shoot(page, "requests-hostile", whole=False)
    text = page.locator("main").inner_text()
    assert "<script>window.owned=1" in text  # as text
    assert "\\u202e" in text
    assert not {"\u202e", "\u2066", "\ufeff", "\x1b", "\x00"} & {*text}
    assert page.evaluate("window.owned") is None
    # A name is asked for as it is, whatever it looks like.
    for evil in EVIL:
        asked = open_page()
        ready(asked)
        asked.evaluate(
            "route => location.hash = '#/requests?' + new URLSearchParams({since: '6h', which: 'all', route})",
            evil[:500],
        )
        wait_place(asked, "requests")
        assert asked.evaluate("window.owned") is None
        asked.context.close()
    page.get_by_label("Culprit").select_option(label="<script>window.owned=1</script>")
    page.wait_for_url("**culprit=*")
    ready(page)
    assert len(ids(page)) == 1
    assert page.evaluate("window.owned") is None
