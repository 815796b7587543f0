"""Page faults, swap and a log's fsync on real, slow disks: what the agent says of a server that waits for them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bpf.daemon import Daemon
from tests.demo.procs import ROOT, DemoError
from tests.faults.host import loopdisk
from tests.faults.host.groups import MemoryGroup

pytestmark = pytest.mark.bpf

REQUESTS = 7


@pytest.fixture
def undo() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def served(
    undo: contextlib.ExitStack, folder: Path, kind: str, path: Path, before: Callable[[], None] | None = None
) -> tuple[subprocess.Popen[bytes], int, Daemon]:
    """Start the server and an agent that watches it."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.bpf.storage_server", kind, str(path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        preexec_fn=before,  # noqa: PLW1509
    )
    undo.callback(server.wait)
    undo.callback(server.kill)
    assert server.stdout is not None
    port = int(server.stdout.readline())
    daemon = Daemon(folder, server.pid)
    undo.callback(daemon.kill)
    daemon.wait_ready()
    return server, port, daemon


def mounted(undo: contextlib.ExitStack, folder: Path) -> tuple[str, Path]:
    try:
        return undo.enter_context(loopdisk.mounted(folder, 64))
    except (RuntimeError, FileNotFoundError) as e:
        pytest.skip(f"no loop device: {e}")


def slow(undo: contextlib.ExitStack, node: str, **limits: int) -> None:
    try:
        undo.enter_context(loopdisk.slowed(node, **limits))
    except RuntimeError as e:
        pytest.skip(str(e))


def most(verdicts: list[dict[str, Any]], cause: str) -> list[dict[str, Any]]:
    """Return those of a cause; nearly all must be: a first request may find a disk that is idle."""
    named = [v for v in verdicts if v["cause"] == cause]
    assert len(named) >= REQUESTS - 2, [(v["cause"], v["sentence"]) for v in verdicts]
    return named


def test_a_mapped_file_on_a_slow_disk_is_named(undo: contextlib.ExitStack, tmp_path: Path) -> None:
    node, folder = mounted(undo, tmp_path)
    weights = folder / "weights.bin"
    with weights.open("wb") as f:
        f.write(os.urandom(24 << 20))
        os.fsync(f.fileno())
    slow(undo, node, read_iops=20)
    server, port, daemon = served(undo, tmp_path, "map", weights)
    before = loopdisk.major_faults(server.pid)
    verdicts = daemon.verdicts(port, "/v1/touch", REQUESTS)
    assert loopdisk.major_faults(server.pid) - before >= 3 * REQUESTS
    named = most(verdicts, "memory.mmap_faults")
    assert {v["culprit"]["name"] for v in named} == {str(weights)}
    assert all(Path(node).name in v["culprit"]["detail"] for v in named)


def test_swapped_memory_names_the_process(undo: contextlib.ExitStack, tmp_path: Path) -> None:
    try:
        group = MemoryGroup("test-swapped", 0)
    except DemoError as e:
        pytest.skip(str(e))
    undo.callback(group.remove)
    if group.version != 1:
        pytest.skip("empties a memory cgroup of version 1")
    try:
        node = undo.enter_context(loopdisk.swap(tmp_path, 32))
    except (RuntimeError, FileNotFoundError) as e:
        pytest.skip(f"no swap here: {e}")
    server, port, daemon = served(undo, tmp_path, "memory", tmp_path, group.join)
    (group.folder / "memory.force_empty").write_text("0")
    slow(undo, node, read_iops=20)
    before = loopdisk.major_faults(server.pid)
    verdicts = daemon.verdicts(port, "/v1/touch", REQUESTS)
    assert loopdisk.major_faults(server.pid) - before >= 3 * REQUESTS
    named = most(verdicts, "memory.swap")
    assert {v["culprit"]["tgid"] for v in named} == {server.pid}
    assert all(node in v["culprit"]["detail"] for v in named)


def test_a_logs_fsync_on_a_disk_of_its_own_is_the_logs(undo: contextlib.ExitStack, tmp_path: Path) -> None:
    node, folder = mounted(undo, tmp_path)
    log = folder / "serving.log"
    _, port, daemon = served(undo, tmp_path, "log", log)
    slow(undo, node, write_bps=600 << 10)
    verdicts = daemon.verdicts(port, "/v1/save", REQUESTS)
    named = most(verdicts, "io.log_blocked")
    assert {v["culprit"]["name"] for v in named} == {str(log)}
