"""The file of ``explain --html``: whole, alone, and text of a request stays text in it."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re

from whyspan.page.html import render
from whyspan.views import request
from whyspan_exporters.reader import Reader

from tests.unit.viewlab import Written


class Parsed(html.parser.HTMLParser):
    """What a browser makes elements of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._in = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in = f"{tag}:{dict(attrs).get('id') or ''}"

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        self.texts[self._in] = self.texts.get(self._in, "") + data


def rendered(small: Written) -> list[tuple[str, str]]:
    reader = Reader(small.path)
    views = [request.find(reader, name) for name in small.hostile]
    reader.close()
    return [(v.row.route, render(v)) for v in views if v is not None]


def test_text_of_a_request_stays_text(small: Written) -> None:
    files = rendered(small)
    assert len(files) == len(small.hostile) > 5
    plain = [tag for tag, _ in Parsed(files[0][1]).tags]
    for route, text in files:
        parsed = Parsed(text)
        assert [tag for tag, _ in parsed.tags] == plain, route
        assert json.loads(parsed.texts["script:data"])["row"]["route"] == route


def test_nothing_comes_from_outside(small: Written) -> None:
    for _, text in rendered(small):
        parsed = Parsed(text)
        for tag, attributes in parsed.tags:
            for name in ("src", "href", "action", "data", "srcset"):
                value = attributes.get(name) or ""
                assert not value or value.startswith("data:"), (tag, name, value)
            assert not [name for name in attributes if name.startswith("on") or name == "style"]
        style = parsed.texts["style:"]
        assert not re.search(r"@import|url\((?!['\"]?(data:|#))", style)


def test_the_policy_names_what_runs(small: Written) -> None:
    _, text = rendered(small)[0]
    parsed = Parsed(text)
    policy = next(a["content"] for tag, a in parsed.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy and "'self'" not in policy
    for kind in ("script:", "style:"):
        digest = base64.b64encode(hashlib.sha256(parsed.texts[kind].encode()).digest()).decode()
        assert f"{kind[:-1]}-src 'sha256-{digest}'" in policy
    # The policy holds for what comes behind it.
    assert text.index("Content-Security-Policy") < min(
        text.index("<style"), text.index("<script"), text.index("<link")
    )
