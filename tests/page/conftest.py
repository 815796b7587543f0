"""The tier ``page``: the real server on a store, and Debian's Chromium without a window.

`open_page` opens a path and fails the test at its end if the console had an error or anything failed to load.
Screenshots go to ``build/page/``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

import pytest

from tests.page import tools
from tests.page.served import Served, serve
from tests.unit import viewlab

TYPE_CHECKING = False
if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SHOTS = Path(__file__).parents[2] / "build" / "page"
#: Desktop and phone.
WIDE, NARROW = (1280, 800), (390, 844)
#: Wait for what a page shows; slow machines are slow.
_PATIENCE_MS = 20_000
_MARK = pytest.mark.page


def every_look(test: Callable[..., None]) -> Callable[..., None]:
    """Run *test* in either colour scheme, ``scheme``, on a desktop and a phone, ``size``."""
    schemes = pytest.mark.parametrize("scheme", ["light", "dark"])
    sizes = pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
    looked: Callable[..., None] = schemes(sizes(test))
    return looked


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(_MARK)


class OpenPage(Protocol):
    """Opens a page of the server: ``open_page("#/requests")``."""

    def __call__(
        self,
        path: str = "",
        *,
        base: str = "",
        size: tuple[int, int] = WIDE,
        scheme: Literal["light", "dark"] = "light",
        errors: bool = True,
        **context: Any,
    ) -> Page:
        """Open *path* below *base* (default: the shared server) in a new profile.

        Args:
            path: What follows the prefix.
            base: The address of another server, or of a file.
            size: Width and height, CSS pixels.
            scheme: The colour scheme that the system prefers.
            errors: Whether an error on the console, or a file that fails to load, fails the test.
            context: Further options of a browser's context.
        """


class Shoot(Protocol):
    """Takes a screenshot of the whole page for people to look at."""

    def __call__(self, page: Page, name: str, *, whole: bool = True) -> Path:
        """Write ``build/page/NAME.png``."""


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> viewlab.Written:
    """A store of 400 requests over two hours, one of 50,000 segments, hostile names, and the host's history."""
    path = tmp_path_factory.mktemp("lab") / "s.db"
    return viewlab.build(path, 400, big_segments=50_000, evil=True, code=True)


@pytest.fixture(scope="session")
def served(lab: viewlab.Written) -> Iterator[Served]:
    """``whyspan serve`` on `lab`, for tests that only look."""
    with serve(lab.path) as found:
        yield found


# Gone with this folder's last test: playwright keeps an event loop on the thread, and others want one of their own.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Chromium."""
    from playwright.sync_api import sync_playwright

    # Its own sandbox needs what a container or root has not; the pages are ours.
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=tools.browser(), args=[*options, "--disable-gpu"])
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[OpenPage]:
    """Open pages; see `OpenPage`."""
    contexts = []
    problems: list[str] = []

    def open_one(
        path: str = "",
        *,
        base: str = "",
        size: tuple[int, int] = WIDE,
        scheme: Literal["light", "dark"] = "light",
        errors: bool = True,
        **context: Any,
    ) -> Page:
        if not base:
            base = request.getfixturevalue("served").url
        made = browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme=scheme,
            reduced_motion="reduce",
            **context,
        )
        made.set_default_timeout(_PATIENCE_MS)
        contexts.append(made)
        page = made.new_page()
        if errors:
            page.on(
                "console",
                lambda m: problems.append(f"{m.type}: {m.text}") if m.type in ("error", "warning") else None,
            )
            page.on("pageerror", lambda e: problems.append(f"exception: {e}"))
            page.on("requestfailed", lambda r: _note_failed(problems, r))
        page.goto(base + path)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert not problems, problems


def _note_failed(problems: list[str], request: Any) -> None:
    # The page gives up questions whose answer it no longer needs.
    if request.failure != "net::ERR_ABORTED":
        problems.append(f"{request.failure}: {request.url}")


@pytest.fixture
def axe() -> Callable[[Page], list[str]]:
    """Return what axe-core finds wrong with a page: contrast, labels, names, order."""
    script = tools.axe().read_text(encoding="utf-8")

    def check(page: Page) -> list[str]:
        # Evaluated by the debugger: the page's own policy lets no such script in.
        page.evaluate(script)
        found = page.evaluate("axe.run(document, {resultTypes: ['violations', 'incomplete']})")
        return [
            f"{v['id']}: {v['help']}: {node['target']} {node['html'][:200]}"
            for v in found["violations"]
            for node in v["nodes"]
        ]

    return check


@pytest.fixture
def shoot() -> Shoot:
    """Take screenshots; see `Shoot`."""

    def take(page: Page, name: str, *, whole: bool = True) -> Path:
        SHOTS.mkdir(parents=True, exist_ok=True)
        path = SHOTS / (re.sub(r"[^A-Za-z0-9._-]+", "-", name) + ".png")
        page.screenshot(path=path, full_page=whole)
        return path

    return take
