"""The samples burst: what a process executes for a moment, as a table, as JSON and for speedscope."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from whyspan.burst.report import Report

from tests.bpf.daemon import WHYSPAN

pytestmark = pytest.mark.bpf

WORK = """
import json, threading, zlib
def render():
    return json.dumps({"a": [{"b": i} for i in range(20000)]})
def pack():
    return zlib.compress(b"x" * 3_000_000)
def packing():
    while True:
        pack()
threading.Thread(target=packing, daemon=True).start()
print("ready", flush=True)
while True:
    render()
"""


@pytest.fixture
def busy() -> Iterator[int]:
    """A process with two busy threads."""
    with subprocess.Popen(
        [sys.executable, "-c", WORK], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process.pid
        process.kill()


def burst(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [WHYSPAN, "burst", "samples", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_it_names_the_functions_and_the_kinds_of_work(busy: int, tmp_path: Path) -> None:
    path = tmp_path / "flame.json"
    done = burst("--pid", str(busy), "--seconds", "1.5", "--json", "--speedscope", str(path))
    assert not done.returncode, done.stderr
    report = msgspec.convert(json.loads(done.stdout), Report)
    # Of one or two CPUs, as far as the machine gave them.
    assert 100 < report.calls <= 2 * 999 * report.seconds * 1.1
    assert not report.missed.get("lost")
    seen: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for s in report.samples:
        seen.update({f.function: s.samples for f in s.python})
        kinds[s.work] += s.samples
    assert seen["render"] and seen["pack"]
    assert seen["<module>"] + seen["packing"] > 0.9 * report.calls
    assert kinds["JSON"] and kinds["compression"]
    # Only one at a time has the lock, and zlib does without it.
    assert 0 < sum(s.samples for s in report.samples if s.holder) < report.calls
    document = json.loads(path.read_text())
    assert sum(document["profiles"][0]["weights"]) == sum(s.samples for s in report.samples)


def test_the_table_is_for_people(busy: int) -> None:
    done = burst("--pid", str(busy), "--seconds", "0.5")
    assert not done.returncode, done.stderr
    assert "999 per second and CPU" in done.stderr
    assert "render (" in done.stdout and "compression" in done.stdout


def test_a_process_that_is_not_there() -> None:
    done = burst("--pid", str(2**22 - 1), "--seconds", "0.5")
    assert done.returncode
    assert done.stderr == "whyspan: there is no process 4194303\n"
