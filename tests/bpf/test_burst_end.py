"""A burst ends, whatever becomes of who asked for it; and one that a slow request triggers leaves its report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from whyspan import cli, config
from whyspan.burst import files
from whyspan.burst.obj import BurstObject
from whyspan.pipeline.bursts import Bursts

from tests.bpf import burst_child, kernel
from tests.bpf.burst_child import Work
from tests.bpf.waiting import until
from tests.unit.conftest import build_finding

pytestmark = pytest.mark.bpf

CLI = (sys.executable, "-c", "from whyspan.cli import main; main()")


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Work]:
    w = Work(burst_child.build(tmp_path, "burst_work.c", "work"))
    yield w
    w.close()


def burst(kind: str, work: Work, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*CLI, "burst", kind, "--pid", str(work.tgid), "--json", *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def links(process: subprocess.Popen[str]) -> set[int]:
    return {n for kind, n in kernel.held_by(process.pid) if kind == "link"}


def uprobe_events() -> str:
    try:
        return Path("/sys/kernel/tracing/uprobe_events").read_text()
    except OSError:
        return ""


@pytest.mark.parametrize(("kind", "least"), [("malloc", 3), ("syscalls", 3)])
def test_a_killed_burst_leaves_nothing(work: Work, kind: str, least: int) -> None:
    before = uprobe_events()
    process = burst(kind, work, "--seconds", "60")
    mine = until(lambda: found if len(found := links(process)) >= least else set(), "attached")
    programs = {n for k, n in kernel.held_by(process.pid) if k == "prog"}
    process.kill()
    process.wait()
    until(lambda: not mine & kernel.objects("link").keys(), "its links are gone")
    until(lambda: not programs & kernel.objects("prog").keys(), "its programs are gone")
    assert uprobe_events() == before
    work.do("1-1 malloc 1009 100")  # it is unharmed
    work.do("1-1 getppid 101 0")


def test_ctrl_c_ends_it_early_and_still_prints(work: Work) -> None:
    process = burst("malloc", work, "--seconds", "60")
    until(lambda: len(links(process)) >= 3, "attached")
    work.do("1-1 malloc 1009 100")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    report = json.loads(out)
    assert report["ended"] == "asked"
    # Between the last link and the first tick nothing is lost: they are on from the moment they are held.
    rows = [r for r in report["malloc"] if (r["thread"], r["function"]) == ("a1", "malloc")]
    assert [(r["calls"], r["size_class"]) for r in rows] == [(1009, 128)]
    assert "each call will cost about" in err


def test_after_its_deadline_a_program_does_nothing(work: Work) -> None:
    for past, calls in ((False, 101), (True, 0)):
        deadline = time.monotonic_ns() + (-1 if past else 60 * 10**9)
        o = BurstObject(
            "syscalls_burst",
            {
                "enter": [["syscalls_enter_raw"]],
                "exit": [["syscalls_exit_raw"]],
                "switch": [["burst_switch_tp"], ["burst_switch_tp3"]],
            },
            tgid=work.tgid,
            deadline_ns=deadline,
        )
        try:
            for hook in ("switch", "exit", "enter"):
                o.attach(hook)
            work.do("1-1 getppid 101 0")
            o.detach()
            row = np.dtype([("sum", o.btf.struct_dtype("syscall_sum")), ("buckets", "<u8", (40,))])
            keys, rows = o.rows("syscall_rows", o.btf.struct_dtype("syscall_key"), row)
            assert rows["sum"]["calls"][keys["nr"] == 110].sum() == calls  # getppid
        finally:
            o.close()


def test_a_slow_request_triggers_one(work: Work, tmp_path: Path) -> None:
    settings = config.Burst(on_breach=("malloc",), seconds=1)
    folder = tmp_path / "collector"
    folder.mkdir()
    bursts = Bursts(settings, folder)
    finding = build_finding(cause="lock.malloc", tgid=work.tgid)
    bursts.consider(finding, {work.tgid}, time.monotonic())
    bursts.tend(time.monotonic())
    worker = bursts.tgid
    assert worker
    until(lambda: len({n for k, n in kernel.held_by(worker) if k == "link"}) >= 3, "attached")
    work.do("1-2 malloc 211 100")

    def ended() -> bool:
        bursts.tend(time.monotonic())
        return not bursts.tgid

    until(ended, "the burst has ended", 60)
    state = bursts.state(time.monotonic())
    assert bursts.new_counts() == {("malloc", "done"): 1}, state
    rows = {(r["thread"], r["size_class"]): r for r in state["malloc"]}
    assert rows["aN", "128"]["calls"] == 2 * 211  # threads of a pool are one row
    assert rows["aN", "128"]["service"] == "chat"
    assert [p.name for p in files.folder(folder).iterdir()] == [Path(state["last"]["file"]).name]
    shown = CliRunner().invoke(
        cli.group,
        ["burst", "last"],
        env={"WHYSPAN_OVERRIDES": json.dumps({"run": {"state_dir": str(tmp_path)}})},
    )
    assert shown.exit_code == 0, shown.output
    assert f"malloc burst of process {work.tgid}" in shown.output
    assert "≤ 128 B" in shown.output
    assert not os.path.exists(f"/proc/{worker}")
