"""Ingest: how many records one core takes in, and whether any is lost at a million a second."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

from whyspan.model import Batch
from whyspan.pipeline.collector import bound_memory
from whyspan.recorder import Recorder
from whyspan_probes.loader import Session
from whyspan_probes.registry import discover
from whyspan_probes.rings import RowBuffer

from tests.demo.procs import ROOT

_BATCH_S = 0.25
HERE = Path(__file__).parent
GETPPID = {"x86_64": 110, "aarch64": 173}[os.uname().machine]


def build(directory: Path) -> tuple[Path, Path]:
    """Compile the flood probe, beside a copy of its declaration, and its generator; return (folder, program)."""
    folder = directory / "probes"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("flood.bpf.c", "flood.py"):
        (folder / name).write_text((HERE / "probes" / name).read_text())
    subprocess.run(["make", "-s", str(folder / "flood.bpf.o")], cwd=ROOT, check=True)
    program = directory / "flood"
    subprocess.run(["clang", "-O2", "-o", str(program), str(HERE / "flood.c")], check=True)
    return folder, program


def run(
    directory: Path, *, rate: int = 1_000_000, seconds: float = 10.0, ring_bytes: int = 8 << 20
) -> dict[str, Any]:
    """Flood at *rate* for *seconds*; drain on the other CPU, into the recorder."""
    folder, program = build(directory)
    bound_memory()
    session = Session(discover([folder]), ring_bytes)
    try:
        session.attach({"flood": {"nr": GETPPID}})
        if session.probes[0].state.state != "attached":
            raise RuntimeError(session.probes[0].state.reason)
        recorder = Recorder(60_000_000_000, 32 << 20)
        os.sched_setaffinity(0, {0})
        # Stopped until it is watched, so that the count is exact.
        flood = subprocess.Popen(
            ["sh", "-c", f"kill -STOP $$; exec taskset -c 1 {program} {rate} {seconds}"],
            stdout=subprocess.PIPE,
        )
        os.waitid(os.P_PID, flood.pid, os.WSTOPPED)
        session.maps.watch(flood.pid, 0)
        flood.send_signal(18)
        received = 0
        busy_s = 0.0
        rows = RowBuffer()
        due_s = 0.0
        done = False
        while not done:
            done = flood.poll() is not None
            started = time.thread_time()
            for ring in session.maps.rings:
                ring.drain(rows)
            if done or time.monotonic() >= due_s:  # as the collector does: a batch every 250 ms
                due_s = time.monotonic() + _BATCH_S
                events = rows.take()
                recorder.add(Batch(time.monotonic_ns(), events))
                received += len(events)
                del events
            busy_s += time.thread_time() - started
            session.wait(max(0.0, due_s - time.monotonic()))
        assert flood.stdout is not None
        sent = int(flood.stdout.read())
        dropped = sum(session.maps.drops.read(session.probes[0].types[0].kind))
    finally:
        session.close()
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    return {
        "sent": sent,
        "received": received,
        "dropped": dropped,
        "busy_s": busy_s,
        "per_busy_s": received / busy_s,
    }
