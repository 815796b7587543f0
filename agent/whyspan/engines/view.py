"""One HTTP request as its engine saw it: jobs, phases, the steps it was part of and those it waited behind."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Final, NamedTuple

from whyspan.engines.calls import OnPath
from whyspan.engines.handoffs import Handoffs
from whyspan.engines.layers import outlier
from whyspan.engines.records import Instance, Job, StepRun
from whyspan.engines.table import EngineTable
from whyspan.engines.unnamed import MAX_STEPS, Unnamed
from whyspan.facts import Facts
from whyspan.model import UNFINISHED, Request

FRONTEND: Final = "frontend"
HANDOVER: Final = "handover"  # from the front end to the engine core
QUEUE: Final = "queue"
PREFILL: Final = "prefill"
DECODE: Final = "decode"
DELIVERY: Final = "delivery"
PHASES: Final = (FRONTEND, HANDOVER, QUEUE, PREFILL, DECODE, DELIVERY)
#: A critical path that comes back to a thread after so short a time has not left it.
_PAUSE_NS: Final = 2_000_000


class PhaseSpan(NamedTuple):
    """A phase of a request."""

    name: str
    start_ns: int
    end_ns: int


class EngineView(Unnamed):
    """A request and the engine that serves it. Every answer is memoised; nothing here changes.

    Of a request for several completions the job that finished last, or is still at work, tells the phases.
    """

    def __init__(
        self,
        table: EngineTable,
        request: Request,
        facts: Facts,
        known_model: Mapping[str, str] | None = None,
        path: tuple[OnPath, ...] = (),
    ) -> None:
        """*known_model*: the identity of the model that the service's baseline was learnt on. *path*: see `walked`."""
        self.table, self.request, self.facts = table, request, facts
        self.path = path
        self._known_model = known_model or {}
        self.jobs = table.jobs_of(request)
        self.core = self.jobs[0].core if self.jobs else self._core_of_service()

    def _core_of_service(self) -> int:
        cores = self.table.cores(self.request.service, self.facts)
        if self.request.tgid in cores:
            return self.request.tgid
        named = [c for c in cores if not self.table.anonymous(c)] or cores
        return named[0] if len(named) == 1 else 0

    def walked(self, path: Iterable[tuple[int, int, int]]) -> EngineView:
        """Return the same with the request's critical path known, as (start, end, tid), in order.

        Which steps served a request that they do not name only its path can tell.
        """
        if self.jobs or not self.anonymous:
            return self
        known = list(self.path)  # of earlier slices
        for start_ns, end_ns, tid in path:
            if tid not in self.step_tids:
                continue
            last = known[-1] if known else None
            if last is not None and last.tid == tid and start_ns - last.end_ns < _PAUSE_NS:
                known[-1] = last._replace(end_ns=end_ns)
            else:
                known.append(OnPath(start_ns, end_ns, tid))
        return EngineView(self.table, self.request, self.facts, self._known_model, tuple(known[-MAX_STEPS:]))

    @property
    def known(self) -> bool:
        """Whether the engine's marks tell which of its jobs serve the request."""
        return bool(self.jobs)

    @cached_property
    def job(self) -> Job | None:
        """The job that tells the phases."""
        if not self.jobs:
            return None
        return max(self.jobs, key=lambda j: (j.finished_ns or 1 << 62, j.last_token_ns, j.queued_ns))

    @cached_property
    def instance(self) -> Instance | None:
        """What the engine core said of itself."""
        return self.table.instance(self.core) if self.core else None

    @cached_property
    def model(self) -> dict[str, str]:
        """What the engine core said of its model: name, revision, dtype ..."""
        return self.instance.model_at(self.request.start_ns) if self.instance is not None else {}

    @cached_property
    def model_change(self) -> str:
        """In what the model differs from the one the baseline was learnt on; empty when it does not."""
        changed = [
            f"{key} {old} → {self.model[key]}"
            for key, old in sorted(self._known_model.items())
            if key in self.model and self.model[key] != old
        ]
        return ", ".join(changed)

    @cached_property
    def numbers(self) -> frozenset[int]:
        """The core's numbers of the request's jobs."""
        return frozenset(j.number for j in self.jobs)

    @cached_property
    def mine(self) -> list[StepRun]:
        """The steps that served the request, in order; of those that name nobody, as far as it can be known."""
        if self.anonymous:
            return [s for c in self.own_calls for s in c.steps][-MAX_STEPS:]
        r, last = self.request, self.steps[-1].step if self.steps else -1
        found = {s.step: s for j in self.jobs for s in self.table.steps_of(j, r.start_ns, r.end_ns)}
        return [s for n, s in sorted(found.items()) if n <= last][-MAX_STEPS:]

    @cached_property
    def handoffs(self) -> Handoffs:
        """Who waited for whom between core and workers. Where the thread that computes is the server's own, wake-ups
        tell.
        """
        r = self.request
        if self.anonymous:
            return Handoffs(())
        return Handoffs(self.steps, pending=r.outcome == "open" or r.outcome in UNFINISHED)

    @cached_property
    def phases(self) -> list[PhaseSpan]:
        """The request's phases, in order; they tile its interval. Empty when the engine does not know it.

        A job preempted and recomputed stays in the phase it was in. Where steps name no requests, the hand-over comes
        after the queue: what the server does with a request once it is its turn, until its first step.
        """
        if self.anonymous:
            return self._phases_of_calls()
        job = self.job
        if job is None or not job.queued_ns:
            return []
        marks = (
            (FRONTEND, job.enqueued_ns or job.queued_ns),
            (HANDOVER, job.queued_ns),
            (QUEUE, job.admitted_ns or job.finished_ns),
            (PREFILL, job.first_token_ns or job.finished_ns),
            (DECODE, job.finished_ns),
            (DELIVERY, 0),
        )
        return self._tiled(marks)

    def _tiled(self, marks: Iterable[tuple[str, int]]) -> list[PhaseSpan]:
        """*marks*: phases in order and when each ended; 0: it goes on."""
        out: list[PhaseSpan] = []
        r = self.request
        at = r.start_ns
        for name, end_ns in marks:
            until = min(max(end_ns, at), r.end_ns) if end_ns else r.end_ns
            if until > at:
                out.append(PhaseSpan(name, at, until))
            at = until
        return out

    def _phases_of_calls(self) -> list[PhaseSpan]:
        own = self.own_calls
        steps = [s for c in own for s in c.steps]
        if not steps or any(s.counts is None or s.counts.whole for s in steps):
            return []
        first = steps[0].begin_ns
        waited = self.behind
        marks = []
        if waited:
            marks = [(FRONTEND, min(w.start_ns for w in waited)), (QUEUE, max(w.end_ns for w in waited))]
        marks.append((HANDOVER if waited else FRONTEND, first))
        prompt = own[0].prompt
        if prompt:
            marks.append((PREFILL, prompt[-1].done_ns))
        marks.append((DECODE, steps[-1].done_ns if own[-1].end_ns else 0))
        return self._tiled([*marks, (DELIVERY, 0)])

    def phase(self, name: str) -> PhaseSpan | None:
        """Return a phase by its name."""
        return next((p for p in self.phases if p.name == name), None)

    def phase_at(self, t: int) -> str:
        """Return the phase that holds the moment just after *t*; empty when not known."""
        return next((p.name for p in self.phases if p.start_ns <= t < p.end_ns), "")

    def cuts(self) -> list[tuple[int, int, int]]:
        """Return (time, tid, tgid) at which the request passed from one thread to the next, as the marks tell."""
        job, r = self.job, self.request
        if job is None or not job.queued_ns:
            return []
        out = []
        if job.enqueued_ns and job.frontend == r.tgid:
            out.append((job.enqueued_ns, job.frontend_tid, job.frontend))
        out.append((job.queued_ns, job.core_tid, job.core))
        return [c for c in out if r.start_ns < c[0] < r.end_ns]

    def holder(self, t: int) -> tuple[int, int] | None:
        """Return (tid, tgid) of the engine core that has the request at a moment; None when it has not."""
        job = self.job
        if job is None or not 0 < job.queued_ns < t or 0 < job.finished_ns <= t:
            return None
        return job.core_tid, job.core

    def of(self, request: Request) -> EngineView:
        """Return the same for a longer or shorter part of the request."""
        return EngineView(self.table, request, self.facts, self._known_model, self.path)

    def step_at(self, t: int) -> StepRun | None:
        """Return the newest step that had been scheduled at a moment, t included; of those beside the request."""
        i = bisect_right(self._begins, t)
        return self.steps[i - 1] if i else None

    @cached_property
    def _begins(self) -> list[int]:
        return [s.begin_ns for s in self.steps]

    @cached_property
    def layer(self) -> str:
        """An unusual layer in a forward pass sampled during the request, in words; empty when there is none."""
        r = self.request
        for tgid in sorted({e.tgid for s in self.mine for e in s.executions} | {self.core}):
            found = self.table.layers.get(tgid)
            if found is not None and r.start_ns <= found[0] <= r.end_ns and (text := outlier(found[1])):
                return text
        return ""

    def waits(self, job: Job, start_ns: int, end_ns: int) -> list[tuple[int, int, str]]:
        """Return a wait in the queue as (start, end, reason), in order.

        The reason is that of the latest scheduling decision: the job's own, or, since a scheduler looks no further
        than the first it cannot place, that of whoever is before it. Until the first decision it is ``step``: the
        engine is at the step before.
        """
        out: list[tuple[int, int, str]] = []
        at, reason = start_ns, "step"
        own = False
        for step in self.steps:
            if step.begin_ns >= end_ns:
                break
            mine = next((why for number, why in step.deferred if number == job.number), "")
            own = own or bool(mine)
            new = mine or (reason if own else step.blocked) or "step"
            if step.begin_ns <= start_ns or new == reason:
                reason = new
                continue
            if step.begin_ns > at:
                out.append((at, step.begin_ns, reason))
            at, reason = max(step.begin_ns, start_ns), new
        if end_ns > at:
            out.append((at, end_ns, reason))
        return out

    def kv_usage(self, t: int) -> float:
        """Return the share of KV blocks in use after the last scheduling before a moment, 0..1; -1 when not known."""
        step = self.step_at(t - 1)
        total = step.kv_used + step.kv_free if step is not None else 0
        return step.kv_used / total if step is not None and total else -1.0

    def kv_peak(self, start_ns: int, end_ns: int) -> float:
        """Return the greatest share of KV blocks in use in an interval, 0..1; -1 when not known."""
        used = [
            s.kv_used / (s.kv_used + s.kv_free)
            for s in self.steps
            if start_ns <= s.begin_ns < end_ns and s.kv_used + s.kv_free
        ]
        return max(used, default=self.kv_usage(end_ns))
