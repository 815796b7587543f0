"""The host in the browser: pressure over time, the probes' state and cost, what is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from tests.page.conftest import OpenPage, Shoot, every_look
from tests.page.looks import ask, chart, drag, overflows, pixels, place, ready
from tests.page.served import Served

HOST = "#/host?since=6h"


@every_look
def test_looks(
    open_page: OpenPage,
    axe: Callable[..., list[str]],
    shoot: Shoot,
    scheme: Literal["light", "dark"],
    size: tuple[int, int],
) -> None:
    page = open_page(HOST, scheme=scheme, size=size)
    ready(page)
    assert pixels(page, chart(page, "Pressure"), "--c-python") > 50
    assert overflows(page) <= 0
    shoot(page, f"host-{scheme}-{size[0]}")
    assert axe(page) == []


def test_tables_are_what_the_server_says(open_page: OpenPage, served: Served) -> None:
    page = open_page(HOST)
    ready(page)
    host = ask(served, "host", since="6h")
    probes = page.get_by_role("region", name="Probes, their state and cost").locator("tbody tr")
    shown = {row.locator("th").inner_text(): row.locator("td").first.inner_text() for row in probes.all()}
    assert {name: text.split("\n")[0] for name, text in shown.items()} == {
        p["name"]: p["state"] for p in host["probes"]
    }
    for p in host["probes"]:
        assert p["reason"] in shown[p["name"]]
    assert {p["group"] for p in host["series"]} >= {"pressure", "cpu", "memory"}
    lost = page.get_by_role("region", name="What was lost").inner_text()
    assert all(named["name"] in lost for named in host["losses"] if named["value"])
    assert page.get_by_role("region", name="Watched services").locator("tbody tr").count() == len(
        host["services"]
    )
    assert host["gpu_state"] in page.locator("main").inner_text()


def test_zoom(open_page: OpenPage) -> None:
    page = open_page(HOST)
    ready(page)
    drag(page, chart(page, "Pressure"), 0.5, 0.8)
    page.wait_for_url("**until*")
    ready(page)
    assert {"since", "until"} <= place(page)[1].keys()
