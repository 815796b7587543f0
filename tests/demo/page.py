"""The demo's report page: the table of faults, and a page of ``whyspan explain`` for one request of each."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, Protocol

from whyspan.text import clean

from tests.demo.report import MIN_RIGHT_RATIO, Score
from tests.demo.truth import Truth

STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin: 1.6rem 0 .2rem; } p { margin: .2rem 0 .6rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; }
th, td { padding: .3rem 1rem .3rem 0; border-bottom: 1px solid #8886; text-align: left; white-space: nowrap; }
.n { text-align: right; font-variant-numeric: tabular-nums; }
""".strip()


class Explains(Protocol):
    """The agent, as far as it is asked here."""

    def query(self, *args: str) -> Any:
        """Run a command with ``--json`` and decode it; None when it fails."""

    def save_html(self, trace_id: str, path: Path) -> str:
        """Write the request's page. Returns why not, empty when it is written."""


def write(
    directory: Path, scores: Sequence[Score], judged: Truth, *, engine: str, alarms: int, agent: Explains
) -> Path:
    """Write ``report.html`` and the pages that it links into *directory*; returns its path."""
    sections, rows = [], []
    for s in scores:
        rows.append(_row(s))
        if s.sample:
            sections.append(_section(s, directory, agent))
    usual = f"median {judged.usual_ns / 1e6:.1f} ms, P99 {judged.limit_ns / 1e6:.1f} ms"
    policy = "default-src 'none'; style-src 'sha256-" + _digest(STYLE) + "'"
    heads = ("fault", "cause", "slowed", "median excess", "named, right culprit", "ratio")
    head = "".join(f'<th scope="col"{_number(i)}>{text}</th>' for i, text in enumerate(heads))
    path = directory / "report.html"
    path.write_text(
        f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>whyspan demo</title>
<style>{STYLE}</style>
</head>
<body>
<h1>whyspan demo: the client's clock against the agent's verdicts ({escape(engine)})</h1>
<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>
{"".join(rows)}</tbody></table></div>
<p>Healthy requests: {len(judged.healthy)}, {usual}; false alarms: {alarms}.</p>
{"".join(sections)}</body>
</html>
""",
        encoding="utf-8",
    )
    return path


def _row(s: Score) -> str:
    good = "ok" if s.ratio >= MIN_RIGHT_RATIO else "too few"
    cells = (
        s.title,
        s.cause,
        f"{s.slowed} of {s.members}",
        f"{s.excess_ms:.0f} ms",
        str(s.right),
        f"{s.ratio:.1%} ({good})",
    )
    return (
        "<tr>" + "".join(f"<td{_number(i)}>{escape(text)}</td>" for i, text in enumerate(cells)) + "</tr>\n"
    )


def _section(s: Score, directory: Path, agent: Explains) -> str:
    name = f"{s.id}.html"
    found = agent.query("explain", s.sample) or {}
    verdict = found.get("verdict") or {}
    sentence = clean(str(verdict.get("sentence") or "The store has no verdict of it."), 600)
    fix = clean(str(verdict.get("fix") or ""), 300)
    why_not = agent.save_html(s.sample, directory / name)
    link = (
        f"<p>no page of it: {escape(clean(why_not))}</p>"
        if why_not
        else (f'<p><a href="{escape(name)}">The timeline of request {escape(clean(s.sample, 32))}</a></p>')
    )
    return (
        f"<section><h2>{escape(s.title)}</h2><p>{escape(sentence)}</p>"
        + (f"<p>Fix: {escape(fix)}</p>" if fix else "")
        + f"{link}</section>\n"
    )


def _number(column: int) -> str:
    return ' class="n"' if column >= 2 else ""


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
