"""The demo's report page: complete, self-contained, and safe with whatever the server called itself."""

from __future__ import annotations

from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from tests.demo import page
from tests.demo.report import Score
from tests.demo.truth import Truth

EVIL = "<script>alert(1)</script>\x1b[2J"


class Agent:
    def __init__(self, sentence: str, why_not: str = "") -> None:
        self.sentence, self.why_not = sentence, why_not

    def query(self, *args: str) -> Any:
        assert args[0] == "explain"
        return {"verdict": {"sentence": self.sentence, "fix": "Raise the quota."}}

    def save_html(self, trace_id: str, path: Path) -> str:
        if not self.why_not:
            path.write_text(trace_id)
        return self.why_not


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] += 1
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]


def scores(title: str = "a CPU quota") -> list[Score]:
    right = Score("throttled", title, "cpu.throttled", 34, 40, 33, 41.0, "ab" * 16, Counter())
    missed = Score("runqueue", "a hog", "cpu.runqueue", 34, 40, 10, 12.0, "", Counter({"unknown": 24}))
    return [right, missed]


def truth() -> Truth:
    return Truth(healthy=[], slowed={}, members={}, usual_ns=30_000_000, limit_ns=40_000_000)


def test_each_fault_has_a_row_and_its_request_a_page(tmp_path: Path) -> None:
    path = page.write(
        tmp_path, scores(), truth(), engine="demo", alarms=0, agent=Agent("Throttled for 41 ms.")
    )
    text = path.read_text()
    tags = Tags(text)
    assert tags.seen["tr"] == 3
    assert tags.links == ["throttled.html"]
    assert (tmp_path / "throttled.html").read_text() == "ab" * 16
    for shown in (
        "97.1% (ok)",
        "29.4% (too few)",
        "34 of 40",
        "Throttled for 41 ms.",
        "Fix: Raise the quota.",
    ):
        assert shown in text
    assert "median 30.0 ms, P99 40.0 ms" in text


def test_nothing_of_it_runs(tmp_path: Path) -> None:
    agent = Agent(EVIL, why_not=EVIL)
    text = page.write(tmp_path, scores(EVIL), truth(), engine=EVIL, alarms=0, agent=agent).read_text()
    tags = Tags(text)
    assert not {"script", "img", "link", "iframe"} & tags.seen.keys()
    assert tags.links == []
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "no page of it: " in text
    assert "default-src 'none'" in text
