"""``whyspan record`` and ``whyspan replay``."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from whyspan import cli
from whyspan.baseline import Baseline
from whyspan.config import Collector, Config, Slo
from whyspan.discovery import Discovery, Found
from whyspan.model import Batch
from whyspan.pipeline.collector import header_of
from whyspan.recording import MAGIC, Reader, Writer
from whyspan_probes.errors import PrivilegeError

from tests.unit.timeline import HOG
from tests.unit.wire import SCHEMA, Wire

Run = Callable[..., "tuple[int, str, str]"]
CONFIG = Config(slo=Slo(e2e_ms=100), collector=Collector(ordinary_per_s=10))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run the command line as its entry point does; returns exit status, standard output and error."""
    monkeypatch.setenv("WHYSPAN_CONFIG", "")
    monkeypatch.setenv("COLUMNS", "160")
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def call(*args: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main([str(a) for a in args])
        out, err = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, out, err

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)


def batches() -> list[Batch]:
    w = Wire()
    for i in range(60):
        w.served(100 + 200 * i, 20, seq=i)
    w.hindered(12_500, 300, seq=60)
    return w.batches(*range(250, 13_500, 250))


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """A recording of sixty ordinary requests and one that a hog held up."""
    path = tmp_path / "recording"
    writer = Writer(path, header_of(CONFIG, "i", Baseline()), SCHEMA)
    for b in batches():
        writer.add(b)
    writer.close()
    return path


def test_replay_in_words(run: Run, recording: Path) -> None:
    status, out, err = run("replay", recording)
    assert (status, err) == (0, "")
    _, slow, _, total = out.splitlines()
    assert slow.split()[1:] == ["svc", "300", "ms", "200", "cpu.runqueue", "298", "ms", "hog"]
    assert total == f"{sum(len(b.events) for b in batches()):,} events in 53 batches, 1 findings"


def test_replay_json(run: Run, recording: Path) -> None:
    status, out, err = run("replay", recording, "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert all(f["slow"] for f in found)
    f = found[-1]
    assert (f["request"]["service"], f["wall_ns"], f["accounted_ns"]) == ("svc", 300_000_000, 300_000_000)
    assert f["verdict"]["cause"] == "cpu.runqueue"
    assert (f["verdict"]["culprit"]["name"], f["verdict"]["culprit"]["tgid"]) == ("hog", HOG)
    assert {"segments", "causes", "baseline", "ruled_out", "lost_events"} <= set(f)
    everything = json.loads(run("replay", recording, "--json", "--all")[1])
    assert len([f for f in everything if not f["slow"]]) == 60
    assert [f for f in everything if f["slow"]] == found


def test_replay_does_not_depend_on_the_process(recording: Path) -> None:
    program = "import sys; from whyspan.cli import main; main(['replay', sys.argv[1], '--all', '--json'])"
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program, str(recording)],
            env=os.environ | {"PYTHONHASHSEED": seed, "WHYSPAN_CONFIG": ""},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert len(json.loads(outputs[0])) >= 61


def test_replay_of_a_torn_recording(run: Run, recording: Path) -> None:
    os.truncate(recording, recording.stat().st_size - 1)
    status, out, err = run("replay", recording, "--json", "--all")
    assert status == 0
    assert err.count("\n") == 1
    assert "cut off at byte" in err
    assert "replayed what came before" in err
    assert len(json.loads(out)) >= 60


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"hello", "not a whyspan recording"),
        (MAGIC + b"\x63\x00", "recording version 99, this whyspan reads version 1"),
        (MAGIC + b"\x01\x00", "the header is torn"),
        (None, "No such file or directory"),
    ],
)
def test_replay_of_what_is_no_recording(
    run: Run, tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "x\x1b[31m"
    if content is not None:
        path.write_bytes(content)
    status, out, err = run("replay", path)
    assert (status, out) == (1, "")
    assert err.startswith("whyspan: ")
    assert err.count("\n") == 1
    assert message in err
    assert "\x1b" not in err


def test_replay_without_a_file_is_a_usage_error(run: Run, tmp_path: Path) -> None:
    assert run("replay")[0] == 2
    assert run("replay", tmp_path)[0] == 2


class FakeSource:
    """What record takes its batches from, without probes."""

    made: list[FakeSource]
    error: Exception | None
    on_drain: Callable[[int], None]
    batches: list[Batch]

    def __init__(self, probes: Any, discovery: Discovery, **options: Any) -> None:
        if self.error is not None:
            raise self.error
        self.schema, self.discovery, self.options = SCHEMA, discovery, options
        self.drains, self.closed = 0, False
        targets = discovery._targets
        if targets.match:
            discovery.found[1] = Found(1, 1.0, "svc", "configuration")
        self.asked = [t.pid for t in targets.match]
        self.made.append(self)

    def drain(self) -> Batch:
        batch = self.batches[self.drains]
        self.drains += 1
        self.on_drain(self.drains)
        return batch

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> type[FakeSource]:
    """Replace the live source; its batches are those of the recording above."""

    class Source(FakeSource):
        made: list[FakeSource] = []  # noqa: RUF012
        error = None
        on_drain = staticmethod(lambda n: None)
        batches = batches()

    monkeypatch.setattr("whyspan.pipeline.source.LiveSource", Source)
    return Source


def interrupt_after(n: int) -> Callable[[int], None]:
    def on_drain(drains: int) -> None:
        if drains == n:
            signal.raise_signal(signal.SIGINT)

    return on_drain


def test_record_until_interrupted(run: Run, source: type[FakeSource], tmp_path: Path) -> None:
    path = tmp_path / "r"
    source.on_drain = staticmethod(interrupt_after(2))
    status, out, err = run("record", "-o", path, "--pid", "1", "--pid", "7", "--json")
    assert (status, err) == (0, "")
    (made,) = source.made
    assert made.closed
    assert made.asked == [1, 7]
    # What arrived between the last drain and the signal is taken too.
    reader = Reader(path)
    back = list(reader.batches())
    reader.close()
    assert (len(back), made.drains, reader.torn) == (3, 3, "")
    taken = batches()[:3]
    assert json.loads(out) == {
        "file": str(path),
        "events": sum(len(b.events) for b in taken),
        "requests": sum(len(b.heads) for b in taken),
        "lost": 0,
        "bytes": path.stat().st_size,
    }
    assert run("replay", path)[0] == 0


def test_record_until_the_time_is_up(run: Run, source: type[FakeSource], tmp_path: Path) -> None:
    source.batches[0].lost = {"sched_wake": 4, "sock_recv": 1}
    status, out, _ = run("record", "-o", tmp_path / "r", "--pid", "1", "--seconds", "0.1")
    assert status == 0
    assert source.made[0].drains >= 1
    assert "5 lost" in out
    assert source.made[0].closed


def test_record_until_the_size_is_reached(run: Run, source: type[FakeSource], tmp_path: Path) -> None:
    big = batches()[0]
    big.lost = {"x" * 600_000: 1}
    source.batches = [big] * 10
    status, _, _ = run("record", "-o", tmp_path / "r", "--pid", "1", "--max-mb", "1", "--seconds", "60")
    assert status == 0
    assert source.made[0].drains == 2
    assert 1 << 20 <= (tmp_path / "r").stat().st_size < 2 << 20


def test_record_with_nothing_to_watch(run: Run, source: type[FakeSource], tmp_path: Path) -> None:
    status, out, err = run("record", "-o", tmp_path / "r")
    assert (status, out) == (2, "")
    assert "nothing to record" in err
    assert source.made[0].closed
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("error", [PrivilegeError("no CAP_BPF"), PermissionError(1, "no CAP_BPF")])
def test_record_without_privilege(
    run: Run, source: type[FakeSource], tmp_path: Path, error: Exception
) -> None:
    source.error = error
    status, out, err = run("record", "-o", tmp_path / "r", "--pid", "1")
    assert (status, out) == (1, "")
    assert err.startswith("whyspan: cannot attach: ")
    assert "no CAP_BPF" in err
    assert err.count("\n") == 1


def test_record_to_where_nothing_can_be_written(run: Run, source: type[FakeSource], tmp_path: Path) -> None:
    status, out, err = run("record", "-o", tmp_path / "no" / "r", "--pid", "1")
    assert (status, out) == (1, "")
    assert err == f"whyspan: cannot write {tmp_path / 'no' / 'r'}: No such file or directory\n"
    assert source.made[0].closed


def test_record_on_a_disk_that_fills_up(run: Run, source: type[FakeSource], tmp_path: Path) -> None:
    path = tmp_path / "r"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(drains: int) -> None:
        if drains == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))

    source.on_drain = staticmethod(fill)
    try:
        status, out, err = run("record", "-o", path, "--pid", "1", "--json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (status, out) == (1, "")
    assert err == f"whyspan: {path}: File too large; what was written stays readable\n"
    assert source.made[0].closed
    reader = Reader(path)
    assert len(list(reader.batches())) == 1
    reader.close()
    assert "cut off" in reader.torn


@pytest.mark.parametrize("arguments", [("--seconds", "0"), ("--pid", "0"), ("--max-mb", "0"), ()])
def test_record_with_a_wrong_command_line(run: Run, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    output = ("-o", tmp_path / "r") if arguments else ()
    assert run("record", *output, *arguments)[0] == 2
    assert not (tmp_path / "r").exists()
