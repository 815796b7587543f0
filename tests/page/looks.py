"""What the tests of the views share: asking the server beside the page, waiting for a view, looking at charts."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlencode
from urllib.request import urlopen

from tests.page.served import Served

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

#: Colours on the canvas of a chart: how many pixels each has, the commonest first, transparent ones left out.
_COLOURS = """canvas => {
  const copy = document.createElement("canvas"); // reading the canvas itself often is warned of
  [copy.width, copy.height] = [canvas.width, canvas.height];
  const pen = copy.getContext("2d", { willReadFrequently: true });
  pen.drawImage(canvas, 0, 0);
  const { data } = pen.getImageData(0, 0, canvas.width, canvas.height);
  const seen = new Map();
  for (let i = 0; i < data.length; i += 4) {
    if (data[i + 3] < 255) continue;
    const colour = "#" + [0, 1, 2].map(k => data[i + k].toString(16).padStart(2, "0")).join("");
    seen.set(colour, (seen.get(colour) ?? 0) + 1);
  }
  return Object.fromEntries([...seen].sort((a, b) => b[1] - a[1]).slice(0, 40));
}"""
_PROPERTY = "name => getComputedStyle(document.documentElement).getPropertyValue(name).trim()"


def ask(served: Served, path: str, **query: Any) -> Any:
    """Return what the server answers to ``api/PATH``."""
    with urlopen(f"{served.url}api/{path}?{urlencode(query)}") as answer:
        return json.load(answer)


def ready(page: Page) -> Locator:
    """Wait until the view of the address is shown."""
    shown = json.dumps(page.evaluate("location.hash"))
    view = page.locator(f"body:not(.busy) > main > .view:not(.pending)[data-place={shown}]")
    view.wait_for()
    return view


def place(page: Page) -> tuple[str, dict[str, str]]:
    """Return the view that the address names, and its parameters."""
    route, _, query = page.evaluate("location.hash").removeprefix("#/").partition("?")
    return route, {name: values[0] for name, values in parse_qs(query).items()}


def wait_place(page: Page, route: str) -> dict[str, str]:
    """Wait until *route* is shown; return its parameters."""
    page.wait_for_url(re.compile(rf"#/{route}\b"))
    ready(page)
    return place(page)[1]


def chart(page: Page, label: str) -> Locator:
    """Return the chart whose label begins with *label*."""
    found = page.locator(f".plot[aria-label^='{label}']")
    found.locator("canvas").wait_for()
    return found


def pixels(page: Page, plot: Locator, colour: str) -> int:
    """Return how many pixels of a chart have a colour, given as a custom property."""
    found: dict[str, int] = plot.locator("canvas").evaluate(_COLOURS)
    return found.get(page.evaluate(_PROPERTY, colour), 0)


def drag(page: Page, plot: Locator, start: float, end: float) -> None:
    """Drag over a chart's plot, from one part of its width to another (0..1)."""
    plot.scroll_into_view_if_needed()
    box = plot.locator(".u-over").bounding_box()
    assert box is not None
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + start * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + end * box["width"], y, steps=6)
    page.mouse.up()


def overflows(page: Page) -> int:
    """Return by how many pixels the page is wider than its window."""
    wide: int = page.evaluate("document.scrollingElement.scrollWidth - document.scrollingElement.clientWidth")
    return wide
