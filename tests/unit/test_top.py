"""``whyspan top``: what it shows of a store, in a terminal of 80 columns and 24 lines."""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from textual.pilot import Pilot
from whyspan import cli
from whyspan.cli.top import report
from whyspan.model import Finding
from whyspan.top import lines
from whyspan.top.app import RequestScreen, Rows, Top
from whyspan.top.source import Source
from whyspan.views.glance import CauseLine, glance
from whyspan_exporters.reader import Reader
from whyspan_exporters.records import Explained, finding_id
from whyspan_exporters.store import Store

from tests.unit.conftest import build_finding
from tests.unit.viewlab import build

NOW = 1_800_000_000_000_000_000
SECOND = 1_000_000_000
View = Callable[[Pilot[None]], Coroutine[Any, Any, None]]


class Lab:
    """A store with a writer, and a view of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = NOW
        self.store = Store(path, max_age_ns=10**18, max_bytes=64 << 20, now=lambda: self.now)

    def write(self, *findings: tuple[Finding, int]) -> str:
        """Store findings, each with how many seconds ago it began; returns the last one's id."""
        records = [Explained(finding_id("i", f), self.now - ago_s * SECOND, f) for f, ago_s in findings]
        self.store.emit(records)
        assert self.store.flush() == ""
        return records[-1].id

    def look(self, view: View, size: tuple[int, int] = (80, 24)) -> None:
        """Run *view* on the application."""

        async def run() -> None:
            app = Top(Source(lambda: Reader(self.path), lambda: self.now), report, period_s=0)
            async with app.run_test(size=size) as pilot:
                await pilot.pause()
                await view(pilot)

        asyncio.run(run())


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    lab = Lab(tmp_path / "s.db")
    lab.write(
        *((build_finding(n, service="chat" if n % 3 else "rag"), 40 - n) for n in range(1, 31)),
        (build_finding(40, cause="python.gc", service="rag"), 1),
    )
    return lab


def screen(pilot: Pilot[None]) -> list[str]:
    """Return what is on the screen, line by line."""
    width, height = pilot.app.size
    console = Console(
        width=width, height=height, file=io.StringIO(), record=True, force_terminal=True, color_system=None
    )
    console.print(pilot.app.screen._compositor.render_update(full=True))
    return console.export_text(styles=False).split("\n")[:height]


def app_of(pilot: Pilot[None]) -> Top:
    assert isinstance(pilot.app, Top)
    return pilot.app


def test_all_is_on_one_small_screen(lab: Lab) -> None:
    async def view(pilot: Pilot[None]) -> None:
        seen = screen(pilot)
        assert len(seen) == 24
        assert seen[0].startswith(
            "whyspan top  last 10 min  all services  08:00:00 UTC  no collector is running"
        )
        assert seen[1].split() == [
            "service",
            "req/s",
            "TTFT",
            "P50",
            "TTFT",
            "P99",
            "total",
            "P99",
            "slow",
            "failed",
        ]
        assert [line.split() for line in seen[2:4]] == [
            ["chat", "-", "-", "-", "-", "20", "0"],
            ["rag", "-", "-", "-", "-", "11", "0"],
        ]
        assert seen[4].split() == ["tail", "by", "cause", "time", "beyond", "the", "usual", "requests"]
        assert seen[5].split() == ["cpu.throttled", "█" * 28, "1.00", "s", "30"]
        assert seen[6].split() == ["python.gc", "▉", "33.4", "ms", "1"] or seen[6].split()[0] == "python.gc"
        assert seen[7].split() == ["UTC", "service", "total", "TTFT", "cause", "culprit"]
        assert seen[8].split() == ["07:59:59", "rag", "100", "ms", "40", "ms", "python.gc", "/demo/limit…"]
        assert seen[9].split()[:2] == ["07:59:50", "rag"]
        assert "Open" in seen[23]
        assert "q Quit" in seen[23]

    lab.look(view)


def test_enter_opens_a_request_and_escape_goes_back(lab: Lab) -> None:
    async def view(pilot: Pilot[None]) -> None:
        await pilot.press("enter")
        await pilot.pause()
        assert isinstance(pilot.app.screen, RequestScreen)
        seen = screen(pilot)
        assert seen[0].startswith("POST /v1/completions  200  service rag")
        assert any("Throttled for 33 ms by the quota of /demo/limited." in line for line in seen)
        assert any("cause python.gc, excess 33.4 ms" in line for line in seen)
        await pilot.press("down")
        await pilot.pause()
        assert screen(pilot)[0].startswith("trace ")
        await pilot.press("escape")
        await pilot.pause()
        assert screen(pilot)[0].startswith("whyspan top")

    lab.look(view)


def test_new_requests_come_in_and_the_cursor_stays(lab: Lab) -> None:
    async def view(pilot: Pilot[None]) -> None:
        app, rows = app_of(pilot), pilot.app.query_one("#rows", Rows)
        new = lab.write((build_finding(50, cause="io.log_blocked"), 0))
        await app.look()
        assert rows.row_count == 32
        assert (app._chosen(rows), rows.cursor_row) == (new, 0)  # at the top: the newest
        await pilot.press("down", "down")
        chosen = app._chosen(rows)
        lab.write((build_finding(51, service="later"), 0))
        await app.look()
        assert (app._chosen(rows), rows.cursor_row) == (chosen, 3)
        await pilot.pause()
        assert any("later" in line for line in screen(pilot)[2:6])
        await pilot.press("p")
        assert "paused" in screen(pilot)[0]
        lab.write((build_finding(52), 0))
        await app.look_again()
        assert rows.row_count == 33

    lab.look(view)


def test_services_and_windows_are_chosen(lab: Lab) -> None:
    async def view(pilot: Pilot[None]) -> None:
        rows = pilot.app.query_one("#rows", Rows)
        counts = []
        for name in ("chat", "rag", "all services"):
            await pilot.press("s")
            await pilot.pause()
            assert f"  {name}  " in screen(pilot)[0]
            counts.append(rows.row_count)
        assert counts == [20, 11, 31]
        lab.now += 1800 * SECOND
        await pilot.press("r")
        await pilot.pause()
        assert "no slow requests" in "\n".join(screen(pilot))
        await pilot.press("w")
        await pilot.pause()
        seen = screen(pilot)
        assert "last 1 h" in seen[0]
        assert any(line.startswith("cpu.throttled") for line in seen)

    lab.look(view)


def test_a_store_that_breaks_is_said_until_it_is_back(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    async def view(pilot: Pilot[None]) -> None:
        app = app_of(pilot)
        lab.path.rename(lab.path.with_suffix(".away"))
        app._source._pool.submit(app._source._close).result()
        await app.look()
        await pilot.pause()
        assert "there is no store at " in screen(pilot)[0]
        assert any("python.gc" in line for line in screen(pilot))  # what was seen last stays
        await pilot.press("enter")
        await pilot.pause()
        assert not isinstance(app.screen, RequestScreen)
        lab.path.with_suffix(".away").rename(lab.path)
        await app.look()
        await pilot.pause()
        assert "there is no store" not in screen(pilot)[0]

    lab.look(view)


def test_a_request_that_is_gone(lab: Lab) -> None:
    async def view(pilot: Pilot[None]) -> None:
        lab.store._db.execute("DELETE FROM findings")
        await pilot.press("enter")
        await pilot.pause()
        assert not isinstance(pilot.app.screen, RequestScreen)
        assert "does not have it any more" in "\n".join(screen(pilot))

    lab.look(view)


def test_wide_and_tiny_terminals(lab: Lab) -> None:
    async def wide(pilot: Pilot[None]) -> None:
        assert any(line.rstrip().endswith("/demo/limited") for line in screen(pilot)), screen(pilot)

    async def tiny(pilot: Pilot[None]) -> None:
        await pilot.press("enter")
        await pilot.pause()
        assert isinstance(pilot.app.screen, RequestScreen)
        assert screen(pilot)[0].startswith("POST /v1/completions")

    lab.look(wide, (160, 50))
    lab.look(tiny, (30, 8))


def test_hostile_names_are_shown_as_text(tmp_path: Path) -> None:
    made = build(tmp_path / "evil.db", 60, hours=0.1, now_unix_ns=NOW, evil=True)
    lab = Lab(made.path)

    async def view(pilot: Pilot[None]) -> None:
        seen = screen(pilot)
        assert all(len(line) <= 80 for line in seen)
        await pilot.press(*["down"] * 4, "enter")  # the fifth has codes for a terminal, and markup
        await pilot.pause()
        assert isinstance(pilot.app.screen, RequestScreen)
        shown = "".join(screen(pilot))
        assert "".join([*seen, shown]).isprintable()
        assert "\\x1b]0;owned\\x07\\x1b[2J[red]x[/red]" in shown

    lab.look(view)


def test_figures_are_of_all_requests(tmp_path: Path) -> None:
    """The latencies come from what the collector counted, not from the few requests that were kept."""
    made = build(tmp_path / "s.db", 200, hours=0.2, now_unix_ns=NOW)
    reader = Reader(made.path)
    seen = glance(reader, NOW, 600)
    reader.close()
    assert seen.running
    assert [line.service for line in seen.services] == ["chat", "embed", "rag"]
    for line in seen.services:
        assert line.requests > line.slow + line.failed > 0
        assert line.per_s == pytest.approx(line.requests / 600)
        assert line.ttft_p50_ms is not None
        assert line.ttft_p99_ms is not None
        assert line.latency_p99_ms is not None
        assert 0 < line.ttft_p50_ms < line.ttft_p99_ms <= line.latency_p99_ms
    assert seen.causes == sorted(seen.causes, key=lambda c: -c.excess_ms)
    assert sum(c.requests for c in seen.causes) > 100


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.04, "0.0 ms"),
        (9.96, "10.0 ms"),
        (123.4, "123 ms"),
        (1234.0, "1.23 s"),
        (150_000.0, "2.5 min"),
    ],
)
def test_times_have_a_unit(value: float | None, text: str) -> None:
    assert lines.ms(value) == text


def test_bars() -> None:
    assert lines.bar(10, 10, 4) == "████"
    assert lines.bar(5, 10, 4) == "██"
    assert lines.bar(0.001, 10, 4) == "▏"
    assert lines.bar(0, 10, 4) == lines.bar(0, 0, 4) == ""
    assert len(lines.causes([CauseLine("x" * 200, 1, 1.0)], 5).plain) < 80
    assert lines.causes([], 5).plain == "no slow requests"


def test_long_lines_are_broken_and_set_in() -> None:
    text = "short\n\n  evidence  " + "word " * 30
    out = lines.wrapped(text, 60).split("\n")
    assert out[:2] == ["short", ""]
    assert out[2].startswith("  evidence  word")
    assert out[3].startswith(" " * 12 + "word")
    assert max(map(len, out)) <= 60
    assert lines.wrapped("x" * 100, 0)


def test_without_a_terminal_or_a_store(
    lab: Lab, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHYSPAN_CONFIG", "")
    for path, status, says in (
        (lab.path, 2, "whyspan: top needs a terminal"),
        (lab.path.with_name("none.db"), 1, "whyspan: there is no store at"),
    ):
        with pytest.raises(SystemExit) as caught:
            cli.main(["top", "--store", str(path)])
        assert caught.value.code == status
        assert capsys.readouterr().err.startswith(says)


def test_in_a_real_terminal(lab: Lab) -> None:
    """As over ssh: a pseudo terminal of 80 columns and 24 lines."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [Path(sys.executable).with_name("whyspan"), "top", "--store", str(lab.path), "--since", "7d"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=os.environ | {"TERM": "xterm", "WHYSPAN_CONFIG": "", "COLORTERM": ""},
        start_new_session=True,
    )
    os.close(slave)
    out = b""
    try:
        _read_until(master, b"python.gc")
        os.write(master, b"\r")
        out = _read_until(master, b"excess 33.4 ms")
        os.write(master, b"q")
        _read_until(master, b"tail by cause")
        os.write(master, b"q")
        _drain(master)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)
    assert b"Traceback" not in out


def _read_until(master: int, wanted: bytes) -> bytes:
    out = b""
    deadline = time.monotonic() + 60
    while wanted not in out:
        assert select.select([master], [], [], max(deadline - time.monotonic(), 0))[0], out[-2000:]
        out += os.read(master, 65536)
    return out


def _drain(master: int) -> None:
    while True:
        try:
            if not os.read(master, 65536):
                return
        except OSError:  # EIO: its last reader and writer is gone
            return
