"""What the agent says of a server in a box: requests, then the box's death with one request open."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import NamedTuple

import msgspec
from whyspan.model import FdFact, Finding, ProcessFact, ThreadFact
from whyspan.recording import Reader

from tests.bpf.box import Box
from tests.bpf.daemon import Daemon
from tests.bpf.waiting import until

REQUESTS, CONNECTIONS = 29, 3


class Observed(NamedTuple):
    """``answered`` and ``killed`` are findings by trace id; ``process`` is what was known of the server."""

    answered: dict[str, Finding]
    killed: dict[str, Finding]
    process: ProcessFact
    threads: dict[int, str]
    files: list[FdFact]
    explained: str
    doctor: str


def trace_id(number: int) -> str:
    """The trace id that the client sends with its request of this number."""
    return f"b0c5{number:028x}"


def traceparent(number: int) -> dict[str, str]:
    """The header that says so."""
    return {"traceparent": f"00-{trace_id(number)}-00000000000000ab-01"}


def observe(folder: Path, box: Box) -> Observed:
    """Watch the box with the whole agent while it serves and dies."""
    recording = folder / "recording"
    daemon = Daemon(folder, box.tgid, collector=f'record = "{recording}"')
    try:
        daemon.wait_ready()
        clients = [box.connect() for _ in range(CONNECTIONS)]
        for n in range(REQUESTS):
            box.get(f"/spin/0.00{n % 7}", traceparent(n), clients[n % CONNECTIONS])
        until(lambda: len(daemon.findings()) >= REQUESTS, "all requests are stored", every_s=0.3)
        explained = daemon.output("explain", trace_id(0))
        doctor = daemon.output("doctor", "--no-attach", "--json")
        clients[0].request("GET", "/sleep/60", headers=traceparent(REQUESTS))
        # The server reads the request, logs it and sleeps; only then may it die.
        log = Path(f"/proc/{box.tgid}/root{box.log}")
        until(lambda: "/sleep/60" in log.read_text(), "the last request is in the server")
        box.kill()
        until(lambda: len(daemon.findings()) > REQUESTS, "the open request is stored", every_s=0.3)
        assert daemon.stop() == 0
    finally:
        daemon.kill()
    with sqlite3.connect(folder / "state" / "whyspan.db") as db:
        rows = db.execute("SELECT finding FROM findings").fetchall()
    findings = [msgspec.msgpack.decode(r[0], type=Finding) for r in rows]
    reader = Reader(recording)
    facts = [fact for batch in reader.batches() for fact in batch.facts]
    reader.close()
    return Observed(
        {f.request.trace_id: f for f in findings if f.request.outcome == "ok"},
        {f.request.trace_id: f for f in findings if f.request.outcome == "killed"},
        [f for f in facts if isinstance(f, ProcessFact) and f.tgid == box.tgid][-1],
        {f.tid: f.name for f in facts if isinstance(f, ThreadFact) and f.tgid == box.tgid},
        [f for f in facts if isinstance(f, FdFact) and f.tgid == box.tgid],
        explained,
        doctor,
    )
