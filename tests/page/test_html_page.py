"""The file of ``whyspan explain --html`` in a browser: it draws, asks nobody for anything, and obeys no name in it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.page.conftest import NARROW, WIDE, OpenPage, Shoot
from tests.unit.viewlab import Written

if TYPE_CHECKING:
    from playwright.sync_api import Page

_COMMAND = (sys.executable, "-c", "from whyspan.cli import main; main()", "explain")


def export(lab: Written, name: str, folder: Path) -> str:
    """Return the address of the file."""
    path = folder / "request.html"
    done = subprocess.run(
        [*_COMMAND, name, "--store", lab.path, "--html", path], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"wrote {path}\n", "")
    return path.as_uri()


@pytest.mark.parametrize(("size", "scheme"), [(WIDE, "light"), (NARROW, "dark")], ids=["wide", "narrow"])
def test_it_draws_alone(  # noqa: PLR0917
    lab: Written,
    tmp_path: Path,
    open_page: OpenPage,
    axe: Callable[[Page], list[str]],
    shoot: Shoot,
    size: tuple[int, int],
    scheme: str,
) -> None:
    page = open_page("blank", base="about:", size=size, scheme=scheme)  # type: ignore[arg-type]
    asked: list[str] = []
    page.on("request", lambda r: asked.append(r.url))
    url = export(lab, lab.big, tmp_path)
    page.goto(url)
    page.wait_for_selector("h1")
    assert "throttled by its CPU quota" in page.inner_text("main")
    assert axe(page) == []
    shoot(page, f"html-{scheme}-{size[0]}")
    drawn = "c => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size"
    assert page.locator("canvas").last.evaluate(drawn) > 10
    assert [a for a in asked if not a.startswith("data:")] == [url]


def test_hostile_names_do_nothing(lab: Written, tmp_path: Path, open_page: OpenPage) -> None:
    page = open_page("blank", base="about:")
    for name in lab.hostile:
        page.goto(export(lab, name, tmp_path))
        page.wait_for_selector("h1")
        page.locator("details").evaluate_all("all => all.forEach(d => { d.open = true; })")
        assert page.evaluate("window.owned") is None
        # Nothing in it became an element, and nothing turns the text around.
        assert page.locator("main script, main img, main iframe, main object").count() == 0
        assert not {"\u202e", "\u2066", "\u200b"} & set(page.inner_text("main"))


def test_the_policy_lets_nothing_else_run(lab: Written, tmp_path: Path, open_page: OpenPage) -> None:
    page = open_page("blank", base="about:", errors=False)
    page.goto(export(lab, lab.big, tmp_path))
    page.evaluate(
        """() => {
          const script = document.createElement("script");
          script.textContent = "window.owned = 1";
          document.body.append(script);
          const image = document.createElement("img");
          image.setAttribute("onerror", "window.owned = 2");
          image.src = "data:,";
          document.body.append(image);
          return new Promise(done => image.addEventListener("error", () => setTimeout(done)));
        }"""
    )
    assert page.evaluate("window.owned") is None
    assert page.evaluate("fetch('data:,x').then(() => 'asked', () => 'refused')") == "refused"
