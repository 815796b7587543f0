"""One request as one file, for a ticket: the page's modules and styles inside it, and nothing from outside, ever.

Its policy names the one script and the one style that may run, by their hash: text of the request that looks like
either stays text.
"""

from __future__ import annotations

import base64
import hashlib
import html
from pathlib import Path
from typing import Final

import msgspec

from whyspan import __version__
from whyspan.page.assets import FOLDER
from whyspan.page.bundle import bundle
from whyspan.text import clean
from whyspan.views.shapes import RequestView

_STYLES: Final = ("style.css", "request.css")
#: What could end the element that the data is in; the same text in JSON.
_UNSAFE: Final = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def render(view: RequestView) -> str:
    """Return the file's text."""
    script = bundle(FOLDER / "alone.js")
    style = "\n".join(_read(name) for name in _STYLES)
    for text in (script, style):
        assert "</s" not in text.lower(), "it would end its element"
    data = msgspec.json.encode(view).decode()
    for unsafe, safe in _UNSAFE.items():
        data = data.replace(unsafe, safe)
    icon = base64.b64encode((FOLDER / "icon.svg").read_bytes()).decode()
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )
    row = view.row
    title = html.escape(clean(f"{row.method} {row.route}: {row.cause or row.outcome}", 120))
    sentence = html.escape(clean(view.verdict.sentence or "Not slow: sampled for the baseline.", 600))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<meta name="generator" content="whyspan {html.escape(__version__)}">
<title>{title}</title>
<link rel="icon" type="image/svg+xml" href="data:image/svg+xml;base64,{icon}">
<style>{style}</style>
</head>
<body>
<main id="main"><noscript><p class="notice">{sentence}</p></noscript></main>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def _read(name: str) -> str:
    return Path(FOLDER / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
