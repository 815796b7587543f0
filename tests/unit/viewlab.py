"""Stores for the tests of what is shown: many findings, one of 50,000 segments, and names that mean harm.

``python -m tests.unit.viewlab STORE [--requests N] [--hours H]`` makes one to look at.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from whyspan import clock
from whyspan.model import (
    CodeFrame,
    Culprit,
    EngineFacts,
    Finding,
    PhaseTime,
    ProcessFact,
    Ranked,
    Request,
    RuledOut,
    Segment,
    StepTime,
    Verdict,
)
from whyspan_exporters.records import Counts, Explained, Status, finding_id
from whyspan_exporters.store import Store

from tests.unit import viewcode
from tests.unit.viewcases import CASES, EVIL, Case
from tests.unit.viewhost import Host

INSTANCE: Final = "viewlab"
MS: Final = 1_000_000
SERVICES: Final = (
    ("chat", "/v1/chat/completions", "llama-3.1-8b"),
    ("rag", "/v1/completions", "mistral-7b-instruct"),
    ("embed", "/v1/embeddings", ""),
)
TENANTS: Final = ("acme", "globex", "initech", "")

_FRONT, _CORE, _WORKER, _LOGGER = (
    (4100, 4100, "uvicorn"),
    (4200, 4200, "EngineCore"),
    (4300, 4311, "Worker_TP0"),
    (4100, 4123, "log-writer"),
)


class _Path:
    """Lays segments end to end."""

    def __init__(self, start_ns: int) -> None:
        self.at = start_ns
        self.segments: list[Segment] = []
        self.phases: list[PhaseTime] = []

    def add(self, ns: int, thread: tuple[int, int, str], state: str, cause: str, **more: Any) -> None:
        tgid, tid, name = thread
        self.segments.append(
            Segment(
                start_ns=self.at, end_ns=self.at + ns, tgid=tgid, tid=tid, thread=name, state=state, cause=cause, **more
            )
        )  # fmt: skip
        self.at += ns

    def phase(self, name: str) -> None:
        """End a phase here."""
        start = self.phases[-1].end_ns if self.phases else self.segments[0].start_ns
        self.phases.append(PhaseTime(name, start, self.at))


def finding(n: int, rng: random.Random, *, slow: bool = True, steps: int = 12) -> Finding:
    """Return the *n*-th finding: a request through a front end, an engine core and a worker, with one cause or none."""
    service, route, model = SERVICES[n % 7 % 3]
    case = rng.choices(CASES, [c.weight for c in CASES])[0] if slow else None
    start = (n + 1) * 10_000_000_000
    p = _Path(start)
    tenth = MS // 10

    def some(tenths: float) -> int:
        return max(1000, int(tenths * tenth * rng.lognormvariate(0, 0.25)))

    extra = int(case.ms * MS * rng.lognormvariate(0, 0.5)) if case is not None else 0

    def strike(phase: str, thread: tuple[int, int, str], pieces: int = 3) -> None:
        if case is None or case.phase != phase:
            return
        for i in range(pieces):
            inferred = case.state == "unknown" or (i == 0 and case.cause == "engine.queueing")
            p.add(extra // pieces, thread, case.state, case.cause, detail=case.detail, inferred=inferred)
            p.add(some(2), thread, "running", "work.cpu")

    p.add(some(8), _FRONT, "running", "work.cpu")
    p.add(some(1), _FRONT, "runnable", "work.sched")
    strike("frontend", _FRONT)
    p.add(some(15), _FRONT, "running", "work.cpu", detail="tokenizer")
    p.phase("frontend")
    p.add(some(2), _CORE, "wakeup", "work.sched")
    p.phase("handover")
    p.add(some(6), _CORE, "blocked", "work.blocked", detail="futex, ended by EngineCore (4200)")
    strike("queue", _CORE)
    p.phase("queue")
    first_step = p.at
    p.add(some(5), _CORE, "running", "work.cpu", detail="scheduler")
    p.add(some(420), _WORKER, "running", "work.cpu", detail="prefill")
    strike("prefill", _WORKER)
    p.phase("prefill")
    first = p.at
    times = [StepTime(first_step, p.at, 8, 512, 0.4)]
    for i in range(steps):
        begin = p.at
        p.add(some(3), _CORE, "running", "work.cpu", detail="scheduler")
        p.add(some(110), _WORKER, "running", "work.cpu", detail="decode")
        p.add(some(2), _CORE, "wakeup", "work.sched")
        if i == steps // 2:
            strike("decode", _WORKER)
        p.add(some(4), _FRONT, "running", "work.cpu", detail="detokenizer")
        times.append(StepTime(begin, p.at, 8 + i % 5, 8 + i % 5, min(0.4 + i / 40, 1.0)))
    p.phase("decode")
    strike("delivery", _LOGGER)
    p.add(some(4), _FRONT, "running", "work.cpu")
    p.phase("delivery")
    failed = slow and n % 41 == 0
    request = Request(
        trace_id=f"{rng.getrandbits(128):032x}",
        trace_id_source="traceparent" if n % 3 else "generated",
        request_id=f"req-{n:08d}",
        tenant=TENANTS[n % 11 % 4],
        service=service,
        tgid=4100,
        start_tid=4100,
        end_tid=4100,
        method="POST",
        route=route,
        status=500 if failed else 200,
        outcome="error" if failed else "ok",
        start_ns=start,
        recv_ns=start + tenth,
        head_ns=first - tenth,
        first_ns=first,
        end_ns=p.at,
        chunks=steps,
        request_bytes=2048,
        response_bytes=120 * steps,
        cookie=0xC0 + n,
        seq=n,
        client_port=40_000 + n % 20_000,
        server_port=8000,
        agent="python-httpx",
    )
    return _explained(request, p, case, extra, model, times)


def _explained(  # noqa: PLR0917
    request: Request, p: _Path, case: Case | None, extra: int, model: str, times: list[StepTime]
) -> Finding:
    wall = p.at - request.start_ns
    causes: dict[str, float] = {}
    for s in p.segments:
        causes[s.cause] = causes.get(s.cause, 0.0) + (s.end_ns - s.start_ns) / MS
    unknown = sum(s.end_ns - s.start_ns for s in p.segments if s.state == "unknown")
    excess = extra / MS
    verdict = Verdict()
    if case is not None:
        usually = (wall - extra) / MS
        who = f": {case.culprit.kind} {case.culprit.name}" if case.culprit.name else ""
        end = f"; {excess:.0f} ms more than usual {case.title}{who}." if case.title else "; most is not seen."
        verdict = Verdict(
            cause=case.cause,
            excess_ms=excess,
            share=0.93 if case.title else 0.0,
            confidence=0.88 if case.title else 0.0,
            culprit=case.culprit,
            sentence=f"Took {wall / MS:.0f} ms, usually {usually:.0f} ms{end}",
            evidence=[case.detail, "usually 0.0 ms of it: the median of 120 such requests"],
            fix=case.fix,
            others=[Ranked(cause="cpu.runqueue", excess_ms=4.2, share=0.02, culprit=Culprit(kind="cpu", name="3"))],
        )  # fmt: skip
    return Finding(
        request=request,
        slow=case is not None,
        slow_reason="objective" if case is not None else "",
        phase="" if case is None else "stream" if case.phase in ("decode", "delivery") else "ttft",
        wall_ns=wall,
        accounted_ns=wall - unknown,
        segments=p.segments,
        causes=causes,
        baseline={"work.cpu": 190.0, "work.sched": 1.4, "work.blocked": 0.6},
        baseline_count=120,
        verdict=verdict,
        ruled_out=[
            RuledOut("cpu.oversubscribed", "17 threads on 16 CPUs, run queue 0.4"),
            RuledOut("cpu.runqueue", "waited 0.3 ms for a CPU in all"),
            RuledOut("io.disk_contention", "no wait for a disk on the path"),
            RuledOut("net.loss", "0 segments sent again"),
        ]
        if case is not None
        else [],
        process=ProcessFact(
            4100, "uvicorn", "python3.11", service=request.service, cgroup="/kubepods/burstable/chat",
            cpus_allowed=16, cpu_count=16, vpid=7, container_id="3f" * 32, pod_uid="0d2c9f6e-0000-4000-8000-00000001",
        ),
        phases=p.phases,
        engine=EngineFacts(
            engine="vllm", version="0.11.0", state="ok", core_tgid=4200, request_id=f"cmpl-{request.seq}",
            prompt_tokens=512, cached_tokens=128, output_tokens=len(times) - 1, steps=len(times), batch=8,
            kv_usage=max(t.kv_usage for t in times), model=model, step_times=times,
        )
        if model
        else None,
    )  # fmt: skip


def big(segments: int = 50_000, n: int = 900_001) -> Finding:
    """Return a finding of so many segments, over 40 threads; its path leaves a thread at every other segment."""
    rng = random.Random(segments)
    base = finding(n, rng)
    p = _Path(base.request.start_ns)
    kinds = (
        ("running", "work.cpu", ""),
        ("runnable", "cpu.runqueue", "behind stress (881)"),
        ("blocked", "lock.contention", "futex held by worker-3"),
        ("throttled", "cpu.throttled", "quota 20 ms of 100 ms"),
        ("unknown", "unknown", "lost or not seen"),
        ("wakeup", "work.sched", ""),
    )
    for i in range(segments):
        thread = (4100 + i // 2 % 40 // 10 * 100, 5000 + i // 2 % 40, f"worker-{i // 2 % 40}")
        state, cause, detail = kinds[rng.choices(range(6), (10, 3, 3, 1, 1, 2))[0]]
        ns = int(rng.lognormvariate(11.5, 1.2)) + 1000
        p.add(ns, thread, state, cause, detail=detail, inferred=i % 17 == 0)
    quarter = (p.at - base.request.start_ns) // 4
    start = base.request.start_ns
    names = ("frontend", "queue", "prefill", "decode")
    phases = [PhaseTime(name, start + i * quarter, start + (i + 1) * quarter) for i, name in enumerate(names)]
    p.phases = [*phases[:3], PhaseTime("decode", start + 3 * quarter, p.at)]
    base.request.end_ns, base.request.first_ns = p.at, start + quarter
    each = (p.at - start) // 400
    steps = [
        StepTime(start + i * each, start + (i + 1) * each, i % 32, 64, i % 100 / 100, 3) for i in range(400)
    ]
    case = CASES[0]
    return _explained(base.request, p, case, quarter, "llama-3.1-8b", steps)


def hostile(n: int = 800_001) -> list[Finding]:
    """Return a finding for each text of `EVIL`, which is in every place that others can write to."""
    out = []
    for i, text in enumerate(EVIL):
        f = viewcode.add(finding(n + i, random.Random(i)))
        r = f.request
        r.route, r.service, r.tenant, r.request_id, r.agent, r.method = (
            text,
            text[:200],
            text,
            text,
            text,
            text[:20],
        )
        for s in f.segments:
            s.thread, s.detail = text[:64], text
        f.segments[0].cause = text[:64]
        v = f.verdict
        v.culprit = Culprit(kind="process", name=text, tgid=1, tid=2, detail=text, trace_id=text[:32])
        v.sentence, v.fix, v.evidence = f"Took long: {text}.", text, [text] * 3
        v.others = [Ranked(cause=text[:64], excess_ms=1.0, share=0.1, culprit=v.culprit)]
        f.ruled_out = [RuledOut(text[:64], text)]
        f.causes[text[:64]] = 1.0
        f.phases = [PhaseTime(text[:32], p.start_ns, p.end_ns) for p in f.phases]
        f.process = ProcessFact(1, text[:64], text, service=text, cgroup=text, container_id=text)
        for stack in f.stacks:
            stack.cause = stack.cause if i % 2 else text[:64]
            stack.thread, stack.work, stack.native, stack.kernel = (
                text,
                text,
                [text, *stack.native],
                [text] * 3,
            )
            stack.python = [CodeFrame(text, text, 1), *stack.python, CodeFrame(text, text, 2**62)]
        for snapshot in f.snapshots:
            snapshot.process = text
            for group in snapshot.groups:
                group.threads, group.syscall, group.native, group.python = (
                    [text],
                    text,
                    [text],
                    [CodeFrame(text, text, 1)],
                )
        v.code = CodeFrame(text, text, 1)
        f.engine = EngineFacts(engine=text, version=text, request_id=text, model=text, template=text)
        out.append(f)
    return out


def findings(count: int, seed: int = 10) -> Iterator[Finding]:
    """Yield so many; one of five is ordinary."""
    rng = random.Random(seed)
    for n in range(count):
        yield finding(n, rng, slow=n % 5 != 4)


def explained(found: Finding, start_unix_ns: int) -> Explained:
    """Return the record that carries a finding to the store."""
    return Explained(finding_id(INSTANCE, found), start_unix_ns, found)


class Written(NamedTuple):
    """A store, and the ids of what it holds that is out of the ordinary."""

    path: Path
    now_unix_ns: int
    big: str  # empty: none
    hostile: list[str]
    code: str = ""  # one whose code was sampled; empty: none


def build(
    path: Path,
    requests: int = 500,
    *,
    hours: float = 2.0,
    now_unix_ns: int = 0,
    big_segments: int = 0,
    evil: bool = False,
    host: bool = True,
    code: bool = False,
) -> Written:
    """Write a store as the agent does over *hours* that end at *now_unix_ns* (default: now).

    Args:
        path: Of a store that is not there yet.
        requests: Findings, evenly over the time; the newest is some seconds old.
        hours: How long the host was watched.
        now_unix_ns: The end.
        big_segments: Add a request of so many segments, 0 none.
        evil: Add those of `hostile`.
        code: Add a request with stacks and snapshots (`viewcode`).
        host: Add what the collector says every 10 s: latencies of all requests, pressure, its probes' cost.
    """
    now = now_unix_ns or clock.now_unix_ns()
    at = now - int(hours * 3600e9)
    clock_ns = [at]
    store = Store(path, max_age_ns=10**18, max_bytes=4 << 30, max_pending=1 << 20, now=lambda: clock_ns[0])
    store._db.execute("PRAGMA synchronous = OFF")  # nobody misses it when the power goes
    special = [big(big_segments)] if big_segments else []
    coded = [viewcode.add(finding(700_001, random.Random(8)))] if code else []
    evils = hostile() if evil else []
    each_ns = (now - at) // max(requests, 1)
    todo = iter([*findings(requests)])
    told = Host(INSTANCE)
    slot_ns = 10_000_000_000
    sent = 0
    for slot in range(max(1, (now - at) // slot_ns)):
        clock_ns[0] = at + (slot + 1) * slot_ns
        due: list[Finding] = []
        while sent < requests and at + (sent + 1) * each_ns <= clock_ns[0]:
            due.append(next(todo))
            sent += 1
        starts: Iterable[int] = (at + (sent - len(due) + i) * each_ns for i in range(len(due)))
        if host:
            status, counts = told.tell(slot, due)
            store.emit([Status(INSTANCE, status), Counts(INSTANCE, counts)])
        store.emit([explained(f, start) for f, start in zip(due, starts, strict=True)])
        _flush(store)
    clock_ns[0] = now
    extra = [*special, *coded, *todo, *evils]
    store.emit([explained(f, now - (i + 2) * 1_000_000_000) for i, f in enumerate(extra)])
    if host:
        store.emit([Status("exporter", told.exporter())])
    _flush(store)
    store.close()
    return Written(
        path,
        now,
        finding_id(INSTANCE, special[0]) if special else "",
        [finding_id(INSTANCE, f) for f in evils],
        finding_id(INSTANCE, coded[0]) if coded else "",
    )


def _flush(store: Store) -> None:
    reason = store.flush()
    assert not reason, reason


def main() -> None:
    """Make a store to look at."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--big", type=int, default=50_000, metavar="SEGMENTS")
    parser.add_argument("--no-evil", action="store_true")
    args = parser.parse_args()
    made = build(
        args.path, args.requests, hours=args.hours, big_segments=args.big, evil=not args.no_evil, code=True
    )
    print(f"{made.path}\nbig      {made.big}\ncode     {made.code}\nhostile  {' '.join(made.hostile)}")


if __name__ == "__main__":
    main()
