"""An inference engine on the timelines' language: front end, core and workers, their marks and their scheduling.

The front end is the server of :mod:`tests.unit.timeline`; core and workers spin: they have their CPUs all the time and
give them away at moments. Times are in ms. A request is served as vLLM does it: it arrives, is handed over, queued,
scheduled step by step; each step's output goes back over a thread of the core that wakes the front end's loop.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from whyspan import marks as m
from whyspan.baseline import Baseline
from whyspan.causes import Classified, Context, classify
from whyspan.config import Objectives
from whyspan.critical_path import Path, walk
from whyspan.engine import Engine, Settings
from whyspan.engines import EngineTable, EngineView
from whyspan.facts import Facts
from whyspan.marks import Mark, Scheduled
from whyspan.model import Batch, Finding, ProcessFact, Request, ThreadFact

from tests.unit.timeline import COOKIE, EPOLL_WAIT, FUTEX, LOOP, SERVER, ns
from tests.unit.wire import FACTS, SCHEMA, Wire

CORE, CORE_IN, CORE_OUT = 200, 202, 201
WORK, WORK_2 = 300, 301
YIELDED = 8
PORT = 50_000
#: The part of a step that is the core's own, before and after: making the batch up, sending it, taking the result in.
SCHEDULE, SEND, UPDATE = 0.5, 0.1, 0.5
#: What an ordinary request looks like: its prompt's step, and the steps of its other tokens.
PROMPT, PREFILL_MS, DECODE_MS, DECODES = 64, 20.0, 10.0, 4
#: Where a test's story begins: after what was taught.
T0 = 20_000.0


class Lab(Wire):
    """Events, heads and marks of a server whose engine speaks. ``workers`` are the threads that compute."""

    def __init__(self, *, at: float = T0, workers: Sequence[int] = (WORK,)) -> None:
        super().__init__()
        self.marks: list[Mark] = []
        self.workers = tuple(workers)
        self.steps = 0
        self.fronts: dict[int, tuple[int, int]] = {}  # job: (cookie, seq)
        self.tgids |= {CORE_IN: CORE, CORE_OUT: CORE}
        self.known(
            ProcessFact(CORE, "EngineCore", service="svc"),
            *(ProcessFact(w, f"Worker_{w}", service="svc", parent=CORE) for w in self.workers),
            ThreadFact(CORE_OUT, CORE, "output"),
            ThreadFact(CORE_IN, CORE, "input"),
        )
        self.into(at - 190, LOOP).out(at - 189, LOOP, nr=EPOLL_WAIT)
        for tid in (CORE_IN, CORE_OUT):
            self.into(at - 190, tid, cpu=3).out(at - 189, tid, nr=FUTEX, cpu=3)
        self.spin(CORE, at - 150, cpu=1)
        for i, tid in enumerate(self.workers):
            self.spin(tid, at - 150, cpu=2 + 2 * i)

    def spin(self, tid: int, at: float, cpu: int) -> Lab:
        """The thread has its CPU from now on; it yields once, so that it is known to poll."""
        self.into(at, tid, cpu=cpu).out(at + 1, tid, 0, flags=YIELDED, nr=-2, cpu=cpu)
        self.into(at + 1.01, tid, cpu=cpu)
        return self

    def mark(self, at: float, tid: int, body: m.Body) -> Lab:
        """A thread makes a mark."""
        self.marks.append(Mark(ns(at), tid, self.tgid(tid), body))
        return self

    def hello(self, at: float, **fields: Any) -> Lab:
        """The core introduces itself."""
        values = {"engine": "vllm", "version": "0.32", "role": "core", **fields}
        return self.mark(at, CORE, m.Hello(**values))

    def arrive(
        self,
        at: float,
        number: int,
        *,
        prompt: int = PROMPT,
        cookie: int | None = None,
        seq: int = 0,
        queued: float | None = None,
        size: int = 400,
        head: dict[str, Any] | None = None,
        queue: dict[str, Any] | None = None,
        **asked: Any,
    ) -> Lab:
        """A request comes over HTTP and is in the engine's queue 1.4 ms later. ``asked``: fields of ``Arrived``."""
        cookie = COOKIE + number if cookie is None else cookie
        self.fronts[number] = cookie, seq
        port = PORT + cookie % 10_000
        self.woken(at)
        self.ask(at, cookie, seq, rport=port, content_length=size, **(head or {}))
        trace = {"trace_id": f"{number:032x}", "span_id": f"{number:016x}"}
        fields = {**trace, "client_port": port, "server_port": 8000, **asked}
        self.mark(at + 0.2, LOOP, m.Arrived(request=f"r{number}", **fields))
        self.mark(at + 0.6, LOOP, m.Tokenised(f"r{number}", ns(at + 0.3), prompt))
        self.mark(at + 0.9, LOOP, m.Enqueued(f"r{number}", f"e{number}", number))
        self.wake(at + 1, CORE_IN, LOOP).into(at + 1.05, CORE_IN, cpu=3)
        self.out(at + 1.1, LOOP, nr=EPOLL_WAIT).out(at + 1.2, CORE_IN, nr=FUTEX, cpu=3)
        told = m.Queued(f"e{number}", number, prompt, trace["trace_id"], **(queue or {}))
        return self.mark(at + 1.4 if queued is None else queued, CORE, told)

    def step(
        self,
        begin: float,
        done: float,
        decodes: Iterable[int] = (),
        others: Iterable[Scheduled] = (),
        *,
        finished: Iterable[int] = (),
        sent: float | None = None,
        wait: float | None = None,
        runs: Sequence[tuple[int, float, float]] | None = None,
        deliver: bool = True,
        end: bool = True,
        drafted: int = 0,
        accepted: int = 0,
        **fields: Any,
    ) -> Lab:
        """One step of the engine. ``runs``: the workers' (tid, begin, end); ``end=False``: it never ends."""
        self.steps += 1
        number, decodes, others, finished = self.steps, list(decodes), list(others), list(finished)
        scheduled = begin + SCHEDULE
        sent = scheduled + SEND if sent is None else sent
        body = m.Step(
            number,
            ns(begin),
            ns(scheduled),
            decodes,
            others,
            running=fields.pop("running", len(decodes) + len(others)),
            **fields,
        )
        self.mark(scheduled, CORE, body)
        if not end:
            return self
        got = done - UPDATE
        if runs is None:
            runs = [(tid, sent + 0.1, got - 0.1) for tid in self.workers]
        for tid, lo, hi in runs:
            self.mark(hi, tid, m.Executed(number, ns(lo), tokens=len(decodes)))
        told = m.StepDone(
            number,
            ns(sent),
            ns(sent + 0.05 if wait is None else wait),
            ns(got),
            len(decodes),
            [(n, "length") for n in finished],
            drafted,
            accepted,
        )
        self.mark(done, CORE, told)
        if deliver:
            numbers = [*decodes, *(s.number for s in others if not s.left)]
            self.output(done + 0.1, numbers, finished)
        return self

    def output(self, at: float, numbers: Sequence[int], finished: Sequence[int] = ()) -> Lab:
        """The core hands tokens to the front end; what is finished is answered 0.8 ms later."""
        self.wake(at, CORE_OUT, CORE).into(at + 0.05, CORE_OUT, cpu=3)
        self.wake(at + 0.2, LOOP, CORE_OUT).into(at + 0.25, LOOP).out(at + 0.3, CORE_OUT, nr=FUTEX, cpu=3)
        self.mark(at + 0.5, LOOP, m.Output(ns(at + 0.3), list(numbers), list(finished)))
        for i, number in enumerate(n for n in finished if n in self.fronts):
            cookie, seq = self.fronts[number]
            last = at + 0.8 + 0.01 * i
            self.respond(last, cookie, seq)
        self.out(at + 1.1, LOOP, nr=EPOLL_WAIT)
        return self

    def respond(self, at: float, cookie: int, seq: int = 0, **end: Any) -> Lab:
        """The loop writes the last byte of a response."""
        self.send(at, LOOP, key=cookie)
        self.done(at, cookie=cookie, seq=seq, **end)
        return self

    def serve(self, at: float, number: int, **arrive: Any) -> float:
        """A whole ordinary request, alone; return when its last step is done."""
        self.arrive(at, number, **arrive)
        prompt = arrive.get("prompt", PROMPT)
        begin = at + 1.5
        self.step(begin, begin + PREFILL_MS, others=[prefill(number, prompt)])
        begin += PREFILL_MS
        for k in range(DECODES):
            last = [number] if k == DECODES - 1 else []
            self.step(begin, begin + DECODE_MS, [number], finished=last)
            begin += DECODE_MS
        return begin

    def decode(self, begin: float, numbers: Sequence[int], steps: int, took: float = DECODE_MS) -> float:
        """So many plain decode steps; return when the last is done."""
        for _ in range(steps):
            self.step(begin, begin + took, numbers)
            begin += took
        return begin

    def batches(self, *nows_ms: float, facts: bool = True) -> list[Batch]:
        out = super().batches(*nows_ms, facts=facts)
        todo = sorted(self.marks, key=lambda mark: mark.ts_ns)
        for b in out:
            b.marks = [mark for mark in todo if mark.ts_ns <= b.now_ns]
            todo = todo[len(b.marks) :]
        return out

    # -- without the whole core ---------------------------------------------------------------------------------

    def table(self, until: float | None = None, window_ms: float = 60_000) -> tuple[EngineTable, Facts]:
        """Return what the marks up to a moment make of an engine, without any HTTP request."""
        facts = Facts()
        facts.update(Batch(0, self.chunk(), facts=[*FACTS, *self.facts]), SCHEMA)
        table = EngineTable(round(window_ms * 1e6))
        todo = sorted(self.marks, key=lambda mark: mark.ts_ns)
        now = ns(until) if until is not None else todo[-1].ts_ns
        table.begun(self.requests().values())
        table.feed([mark for mark in todo if mark.ts_ns <= now], facts, now)
        return table, facts

    def requests(self) -> dict[int, Request]:
        """Return the HTTP requests by their job, each from its head to its response, or to the last event."""
        ends = {}
        last = max(t for t, _ in self.rows)
        kind = self.schema.kind("http_response_end")
        rows = self.schema.select(self.chunk(), "http_response_end")
        assert kind >= 0
        for row in rows:
            ends[int(row["cookie"]), int(row["seq"])] = int(row["ts_ns"])
        out = {}
        heads = {(h.cookie, h.seq): h for h in self.heads}
        for number, key in self.fronts.items():
            h, end = heads[key], ends.get(key, 0)
            out[number] = Request(
                trace_id=f"{number:032x}",
                trace_id_source="traceparent",
                service="svc",
                tgid=SERVER,
                start_tid=LOOP,
                end_tid=LOOP if end else 0,
                method="POST",
                route=h.route,
                status=200 if end else 0,
                outcome="ok" if end else "open",
                start_ns=h.first_ns,
                recv_ns=h.recv_ns,
                head_ns=end,
                first_ns=end,
                end_ns=end or last,
                request_bytes=h.content_length,
                cookie=key[0],
                seq=key[1],
                client_port=h.rport,
                server_port=h.lport,
            )
        return out

    def view(self, number: int, until: float | None = None) -> EngineView:
        """Return a request as its engine saw it."""
        table, facts = self.table(until)
        return EngineView(table, self.requests()[number], facts)

    def explained(self, number: int) -> tuple[Classified, Context, Path]:
        """Return a request's critical path with causes, without a baseline."""
        wanted = self.requests()[number]
        table, facts = self.table()
        view = EngineView(table, wanted, facts)
        timelines = self.timelines(0, 0)
        path = walk(timelines, wanted, engine=view)
        ctx = Context(timelines, wanted, view)
        return classify(path, ctx), ctx, path


def prefill(number: int, tokens: int = PROMPT, left: int = 0, **fields: Any) -> Scheduled:
    """A request's prompt, or a chunk of it, in a step."""
    return Scheduled(number, tokens, left=left, **{"new_blocks": 4, **fields})


def every(step_ms: float, since_ms: float, until_ms: float) -> list[float]:
    """Return the moments at which batches are drained."""
    return [since_ms + step_ms * (k + 1) for k in range(int((until_ms - since_ms) / step_ms))]


@cache
def _taught() -> tuple[dict[str, Any], EngineTable]:
    lab = Lab(at=0)
    lab.hello(0.5, model={"name": "tiny", "dtype": "float32"}, config={"max_num_seqs": "2"})
    for i in range(70):
        lab.serve(100 + 200 * i, 1_000 + i, head={"route": "/v1/completions"})
    e = _engine(Baseline(), 1000)
    for batch in lab.batches(*every(250, 0, 15_000)):
        e.feed(batch)
    return e.baseline.to_dict(), e.engines


def _engine(baseline: Baseline, e2e_ms: float) -> Engine:
    limits = Objectives(e2e_ms=e2e_ms)
    told = Settings(objectives=lambda _: limits, instance="i", ordinary_per_s=10, explain_per_s=1000)
    return Engine(SCHEMA, told, baseline)


def experienced(e2e_ms: float = 100) -> Engine:
    """Return an engine of ours that has seen seventy ordinary requests."""
    baseline, table = _taught()
    e = _engine(Baseline.from_dict(baseline), e2e_ms)
    e.engines = copy.deepcopy(table)
    return e


def findings(lab: Lab, until: float, e2e_ms: float = 100, e: Engine | None = None) -> dict[int, Finding]:
    """Return what is found of the lab's requests by somebody with experience, by job; the last of each."""
    e = e or experienced(e2e_ms)
    out = {}
    by_key = {key: number for number, key in lab.fronts.items()}
    for batch in lab.batches(*every(250, T0 - 250, until)):
        for f in e.feed(batch):
            out[by_key.get((f.request.cookie, f.request.seq), -1)] = f
    return out
