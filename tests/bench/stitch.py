"""Stitching: every request keeps its own id, over keep-alive and pipelined connections on two servers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from whyspan.config import Target, Targets
from whyspan.discovery import Discovery
from whyspan.facts import Facts
from whyspan.model import HttpHead, Request
from whyspan.pipeline.source import LiveSource
from whyspan.requests import RequestTable
from whyspan_probes.registry import discover

from tests.bench import servers
from tests.bench.ports import free_port
from tests.demo.procs import python, spawn, stop

#: How long a send may take to return after its bytes can be read: preempted at worst. Not an error of identity.
SEND_RETURNS_NS = 20_000_000


def _place(t: dict[str, Any]) -> tuple[int, int, int]:
    """A client port may be in use towards both servers at once."""
    return t["lport"], t["rport"], t["seq"]


def judge(truth: list[dict[str, Any]], heads: list[HttpHead], ended: list[Request]) -> dict[str, Any]:
    """Hold the requests seen against the client's truth.

    Right: found once, by connection and position, with its own trace id (or a generated one where it sent none or
    a malformed one), route, method and status, and an end within the client's window. Wrong: another request's id.
    """
    sent_ids = {t["trace_id"]: _place(t) for t in truth if t["trace_id"]}
    heads_at = {(h.cookie, h.seq): h for h in heads}
    found: dict[tuple[int, int, int], Request] = {}
    twice = 0
    for r in ended:
        head = heads_at.get((r.cookie, r.seq))
        if head is None:
            continue
        key = (head.rport, head.lport, r.seq)
        twice += key in found
        found[key] = r
    right = wrong = missing = 0
    for t in truth:
        got = found.get(_place(t))
        if got is None:
            missing += 1
            continue
        owner = sent_ids.get(got.trace_id)
        if (owner and owner != _place(t)) or got.request_id != t["request_id"]:
            wrong += 1
            continue
        own = got.trace_id == t["trace_id"] if t["valid"] else got.trace_id_source == "generated"
        same = (got.route, got.method, got.status) == (t["route"], t["method"], t["status"])
        # The client stamps before its write and after its read: the server's window lies inside, but for the end
        # of the server's last send, which may return after the client has read what it sent.
        inside = t["sent_ns"] <= got.start_ns and got.end_ns <= t["end_ns"] + SEND_RETURNS_NS
        right += own and same and inside
    return {
        "stitched": len(truth),
        "stitched_right": right,
        "stitched_wrong": wrong,
        "stitched_missing": missing,
        "stitched_twice": twice,
    }


def run(
    directory: Path, *, concurrency: int = 1000, per_connection: int = 4, seed: int = 1
) -> dict[str, Any]:
    """Run the workload under an asyncio and a uvloop server and return the counts."""
    ports = [free_port(), free_port()]
    processes: list[subprocess.Popen[bytes]] = []
    out = directory / "stitch.jsonl"
    heads: list[HttpHead] = []
    ended: list[Request] = []
    try:
        for kind, port in zip(("asyncio", "uvloop"), ports, strict=True):
            processes.append(servers.start(kind, port, 1))
        targets = Targets(auto=False, match=tuple(Target(pid=p.pid, service="stitch") for p in processes))
        source = LiveSource(
            discover(), Discovery(targets), ring_bytes=8 << 20, header_allow=["x-request-id", "x-tenant-id"]
        )
        try:
            table, facts = RequestTable(source.schema, "bench"), Facts()
            load = spawn(
                python(
                    "tests.bench.stitch_load",
                    *[a for port in ports for a in ("--port", port)],
                    "--concurrency", concurrency,
                    "--per-connection", per_connection,
                    "--seed", seed,
                    "--out", out,
                ),
                0,
            )  # fmt: skip
            lost = 0
            while True:
                done = load.poll() is not None
                batch = source.drain()
                facts.update(batch, source.schema)
                heads += batch.heads
                ended += table.feed(batch, facts)
                lost += sum(batch.lost.values())
                if done:
                    break
                try:
                    load.wait(0.1)
                except subprocess.TimeoutExpired:
                    continue
            if load.returncode:
                raise RuntimeError(f"the load ended with {load.returncode}")
        finally:
            source.close()
    finally:
        for process in processes:
            stop(process)
    truth = [json.loads(line) for line in out.read_text().splitlines()]
    return judge(truth, heads, ended) | {"stitch_lost_events": lost, "stitch_concurrency": concurrency}
