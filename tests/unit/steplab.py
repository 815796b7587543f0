"""A server whose engine names no requests: an event loop, threads that compute, their steps. Times are in ms.

The loop reads a request, hands it to a thread, and answers when that wakes it; one thread serves one request at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from whyspan import marks as m
from whyspan.baseline import Baseline
from whyspan.causes import Classified, Context, classify
from whyspan.config import Objectives
from whyspan.critical_path import Path, walk
from whyspan.engine import Engine, Settings
from whyspan.engines import EngineTable, EngineView, anonymous
from whyspan.facts import Facts
from whyspan.marks import Mark
from whyspan.model import Batch, Finding, Request
from whyspan_probes.schema import EventType, Schema

from tests.unit.timeline import _HEAD, EPOLL_WAIT, FUTEX, LOOP, SERVER, WORKER, ns
from tests.unit.wire import FACTS, Wire
from tests.unit.wire import SCHEMA as WIRE

_BATCH = [
    ("context", "<u8"),
    ("tokens", "<u4"),
    ("sequences", "<u2"),
    ("call", "<u2"),
    ("position", "<i4"),
    ("outputs", "<u2"),
    ("looked_at", "<u2"),
]
SCHEMA = Schema(
    [
        *WIRE.types.values(),
        EventType("llama_step", 200, np.dtype([*_HEAD, ("begin_ns", "<u8"), *_BATCH])),
        EventType("llama_step_start", 201, np.dtype([*_HEAD, ("_pad", "<u8"), *_BATCH])),
    ]
)
WORKER_2 = 102
INFERRED = 0x80000000


class Steps(Wire):
    """Events, heads and marks. Requests are numbered; each has a connection of its own."""

    schema = SCHEMA

    def __init__(self) -> None:
        super().__init__()
        self.tgids[WORKER_2] = SERVER
        self.marks: list[Mark] = []
        self.ends: dict[int, float] = {}
        self.arrived: dict[int, float] = {}
        self.into(0, LOOP).out(0.1, LOOP, nr=EPOLL_WAIT)
        for cpu, tid in ((1, WORKER), (2, WORKER_2)):
            self.into(0, tid, cpu=cpu).out(0.2, tid, nr=FUTEX, cpu=cpu)

    def arrive(self, at: float, number: int, thread: int | None = None, **head: Any) -> Steps:
        """A request comes; its loop hands it to *thread* within a millisecond, or keeps it."""
        self.arrived[number] = at
        self.woken(at)
        trace = f"00-{number:032x}-{number:016x}-01"
        self.ask(at, cookie=number, rport=50_000 + number, traceparent=trace, **head)
        if thread is not None:
            self.hand(at + 0.5, thread)
        self.out(at + 1, LOOP, nr=EPOLL_WAIT)
        return self

    def hand(self, at: float, thread: int) -> Steps:
        """The loop wakes a thread."""
        cpu = thread - LOOP
        self.wake(at, thread, LOOP).into(at + 0.01, thread, cpu=cpu)
        return self

    def answer(
        self, at: float, number: int, thread: int, then: int | None = None, rests: bool = True
    ) -> Steps:
        """A thread has a result and wakes the loop, which answers 0.5 ms later, and may hand on to another thread."""
        self.wake(at, LOOP, thread).into(at + 0.05, LOOP)
        if rests:
            self.out(at + 0.1, thread, nr=FUTEX, cpu=thread - LOOP)
        self.send(at + 0.5, LOOP, key=number)
        self.done(at + 0.5, cookie=number)
        self.ends[number] = at + 0.5
        if then is not None:
            self.hand(at + 0.7, then)
        self.out(at + 1, LOOP, nr=EPOLL_WAIT)
        return self

    def llama(
        self, begin: float, end: float | None, tokens: int, position: int, tid: int = WORKER, **fields: Any
    ) -> Steps:
        """A step of llama.cpp; *end* None: it does not end; ``aux`` of its end."""
        aux = fields.pop("aux", 0)
        said = {"context": 9, "tokens": tokens, "sequences": 1, "position": position, **fields}
        self.add("llama_step_start", begin, tid, **said)
        if end is not None:
            self.add("llama_step", end, tid, aux=aux, begin_ns=ns(begin), **said)
        return self

    def completion(
        self, at: float, prompts: list[tuple[int, float]], decodes: int, tid: int = WORKER, took: float = 10
    ) -> float:
        """Steps of a prompt (tokens, ms), then so many of one token; return when the last has ended."""
        position = 4
        for tokens, ms in prompts:
            self.llama(at, at + ms, tokens, position, tid)
            at, position = at + ms + 0.2, position + tokens
        for _ in range(decodes):
            self.llama(at, at + took, 1, position, tid)
            at, position = at + took + 0.2, position + 1
        return at - 0.2

    def mark(self, at: float, tid: int, body: m.Body) -> Steps:
        """A thread makes a mark; 0: a feed."""
        self.marks.append(Mark(ns(at), tid, SERVER, body))
        return self

    def generate(self, at: float, prompt: int, decodes: int, tid: int = WORKER, took: float = 10) -> float:
        """A call of ``generate``: its passes, then the whole; return when it has returned."""
        begin = at
        self.mark(at + 2 * took, tid, m.Generated(ns(at), prompt, prefill=True))
        at += 2 * took
        for k in range(decodes):
            self.mark(at + took, tid, m.Generated(ns(at + 0.1), 1, cached=prompt + k))
            at += took
        self.mark(at + 0.2, tid, m.Generated(ns(begin), prompt + decodes, whole=True))
        return at + 0.2

    def requests(self) -> dict[int, Request]:
        """Return the requests, each from its head to its response, or to the last event."""
        last = max([t for t, _ in self.rows] + [mark.ts_ns for mark in self.marks])
        heads = {h.cookie: h for h in self.heads}
        out = {}
        for number, at in self.arrived.items():
            end = ns(self.ends[number]) if number in self.ends else 0
            out[number] = Request(
                trace_id=f"{number:032x}",
                trace_id_source="traceparent",
                parent_span_id=f"{number:016x}",
                service="svc",
                tgid=SERVER,
                start_tid=LOOP,
                end_tid=LOOP,
                method=heads[number].method,
                route="/v1/completions",
                status=200 if end else 0,
                outcome="ok" if end else "open",
                start_ns=ns(at),
                recv_ns=ns(at),
                head_ns=end,
                first_ns=end,
                end_ns=end or last,
                cookie=number,
            )
        return out

    def table(self) -> tuple[EngineTable, Facts]:
        """Return what the engine told, and the requests."""
        facts = Facts()
        events = self.chunk()
        facts.update(Batch(0, events, facts=[*FACTS, *self.facts]), SCHEMA)
        table = EngineTable()
        found = self.requests()
        table.begun(sorted(found.values(), key=lambda r: r.start_ns))
        table.seen(anonymous.of_events(events, SCHEMA))
        todo = sorted(self.marks, key=lambda mark: mark.ts_ns)
        table.feed(todo, facts, max(r.end_ns for r in found.values()))
        table.ended(r for n, r in found.items() if n in self.ends)
        return table, facts

    def explained(self, number: int, **fields: Any) -> tuple[Classified, Context, Path]:
        """Return a request's critical path with causes; ``fields`` of the request are changed."""
        wanted = self.requests()[number]
        for name, value in fields.items():
            setattr(wanted, name, value)
        table, facts = self.table()
        view = EngineView(table, wanted, facts)
        timelines = self.timelines(0, 0)
        path = walk(timelines, wanted, engine=view)
        ctx = Context(timelines, wanted, view.walked((s.start_ns, s.end_ns, s.tid) for s in path.segments))
        return classify(path, ctx), ctx, path

    def view(self, number: int) -> EngineView:
        """Return a request as its engine's steps show it, its critical path known."""
        engine = self.explained(number)[1].engine
        assert engine is not None
        return engine

    def batches(self, *nows_ms: float, facts: bool = True) -> list[Batch]:
        out = super().batches(*nows_ms, facts=facts)
        todo = sorted(self.marks, key=lambda mark: mark.ts_ns)
        for b in out:
            b.marks = [mark for mark in todo if mark.ts_ns <= b.now_ns]
            todo = todo[len(b.marks) :]
        return out

    def findings(self, until: float, every: float = 250, e2e_ms: float = 1) -> dict[int, Finding]:
        """Return what the whole core finds of each request."""
        limits = Objectives(e2e_ms=e2e_ms)
        told = Settings(objectives=lambda _: limits, instance="i", ordinary_per_s=10, explain_per_s=1000)
        e = Engine(SCHEMA, told, Baseline())
        out = {}
        for batch in self.batches(*(every * (k + 1) for k in range(int(until / every)))):
            for f in e.feed(batch):
                out[f.request.cookie] = f
        return out


def phases(view: EngineView) -> list[tuple[str, float, float]]:
    """Return a request's phases in ms, after checking that they tile it."""
    at = view.request.start_ns
    for p in view.phases:
        assert p.start_ns == at < p.end_ns
        at = p.end_ns
    assert not view.phases or at == view.request.end_ns
    return [(p.name, (p.start_ns - ns(0)) / 1e6, (p.end_ns - ns(0)) / 1e6) for p in view.phases]
