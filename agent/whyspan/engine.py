"""The pure core in one object: batches in, findings out. The same live, on a recording and in a test."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
from whyspan_probes.schema import EVENT, Events, Schema

from whyspan import codetext, critical_path, slices, stacks, stalled, verdict
from whyspan.baseline import Baseline, Objectives
from whyspan.beside import Beside
from whyspan.causes import Classified, Context, classify
from whyspan.causes.engine_frozen import frozen_since
from whyspan.engines import EngineTable, EngineView, anonymous
from whyspan.engines.calls import OnPath
from whyspan.engines.gaps import token_gaps_s
from whyspan.facts import Facts
from whyspan.index import joined
from whyspan.marks import Mark
from whyspan.model import FAILED, Batch, CodeStack, Finding, Request, Segment, Snapshot
from whyspan.recorder import Recorder
from whyspan.requests import RequestTable
from whyspan.tally import Tally
from whyspan.threads import Timelines

_SECOND_NS = 1_000_000_000
#: Ordinary requests are looked at this much faster while their class has no baseline.
_LEARNING_RATE = 5.0
#: Open requests reported for passing their objective, and slices of long ones, per second.
_OPEN_PER_S = 5.0
_SLICES_PER_S = 10.0
#: How far before a window a thread's last switch is looked for: it may have slept all that time.
_MARGIN_NS = 60 * _SECOND_NS
#: Requests of one batch share their timelines when they lie this close together.
_SHARED_NS = 3 * _SECOND_NS
#: What a batch had no time to explain waits for the next ones, but no longer than this after its end, and no more
#: than so many: later than that nobody waits for a verdict.
_LATE_NS = 20 * _SECOND_NS
_MAX_WAITING = 1000
#: So many failures of one kind in a batch are explained as soon as slow requests are, the others after them.
_FIRST_ALIKE = 3
#: An open request is reported once it is this old, however low its objective: a younger one may be about to end.
_OPEN_AGE_NS = 2 * _SECOND_NS
#: From when a snapshot of a frozen engine is asked for until it is here: two drains.
_LOOK_NS = _SECOND_NS // 2
#: What of a thread's history goes from one slice to the next: enough to tell since when, and in what, it waits.
_CARRIED = ("sched_switch_out", "sched_switch_in", "sched_wake", "fd_block")
_CARRIED_ROWS = 8


_Timed = TypeVar("_Timed", Mark, anonymous.Seen)


class _Chosen(NamedTuple):
    """A request to explain, why it counts as slow, whether it is a sample of the ordinary ones, and whether it comes
    before those that are not urgent: a storm of one kind of failure does not keep anybody else waiting.
    """

    request: Request
    reason: str | None
    ordinary: bool
    urgent: bool


@dataclass(frozen=True)
class Settings:
    """What the engine is told. ``objectives`` maps a service to its limits; rates are per service and second."""

    objectives: Callable[[str], Objectives]
    instance: str
    explain_per_s: float = 5.0
    ordinary_per_s: float = 0.1
    window_ns: int = 60 * _SECOND_NS
    recorder_bytes: int = 32 << 20
    template_allow: frozenset[str] = frozenset()  # tags of prompt templates that are told apart


class _Tokens:
    """A token bucket on the batches' clock."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._burst = max(per_s, 1.0)
        self._tokens = self._burst
        self._at_ns = 0

    def take(self, now_ns: int) -> bool:
        if self._at_ns:
            gained = self._per_s * (now_ns - self._at_ns) / _SECOND_NS
            self._tokens = min(self._burst, self._tokens + gained)
        self._at_ns = now_ns
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


@dataclass
class _Long:
    """What is already explained of a request that is still open."""

    until_ns: int
    parts: list[Classified] = field(default_factory=list)
    reported: bool = False
    carried: Events = field(default_factory=lambda: np.empty(0, EVENT))
    own: frozenset[int] = frozenset()  # the threads set to work for it, seen in the first slice
    path: tuple[OnPath, ...] = ()  # its critical path, as far as steps that name no requests lie on it
    stacks: list[CodeStack] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    asked_ns: int = 0  # when a look at its frozen engine was asked for


class Engine:
    """Feeds batches through recorder, requests, critical path, causes and verdict.

    ``counts`` are totals since the start: requests by (service, outcome), and ``not_explained``, whose label is
    ``failed`` for failed requests. ``tally`` has more of the kind.
    """

    def __init__(
        self,
        schema: Schema,
        settings: Settings,
        baseline: Baseline | None = None,
        between: Callable[[], None] = lambda: None,
        allows: Callable[[], bool] = lambda: True,
    ) -> None:
        """*allows* is asked before each explanation of a finished request: those that it refuses wait for the next
        batch. *between* is called after each: a batch of many takes long, and neither rings nor the host's CPUs wait.
        """
        self._between, self._allows = between, allows
        self.baseline = baseline or Baseline()
        self.facts = Facts()
        self.counts: Counter[tuple[str, str, str]] = Counter()  # name, service, label
        self.tally = Tally()
        self._schema, self._settings = schema, settings
        self._recorder = Recorder(settings.window_ns, settings.recorder_bytes)
        self._requests = RequestTable(schema, settings.instance)
        self._beside = Beside()
        self.engines = EngineTable(settings.window_ns, settings.template_allow)
        self._later_marks: list[Mark] = []
        self._later_steps: list[anonymous.Seen] = []
        self._waiting: list[_Chosen] = []  # chosen, and not explained yet
        self._long: dict[tuple[int, int], _Long] = {}
        self._buckets: dict[tuple[str, str], _Tokens] = {}
        self._open_checked_ns = 0
        self._newly_frozen: set[int] = set()
        self._shared: Timelines | None = None  # during one batch

    def reconfigure(self, settings: Settings) -> None:
        """Go by other settings, from the next batch on; *instance* stays what it was."""
        self._settings = settings
        self._buckets.clear()
        self._recorder.resize(settings.window_ns, settings.recorder_bytes)
        self.engines.reconfigure(settings.window_ns, settings.template_allow)

    def unwatched(self, tgids: Collection[int]) -> None:
        """Nothing more will be seen of these processes, though they live on."""
        self._requests.drop(tgids)

    def feed(self, batch: Batch) -> list[Finding]:
        """Take in a batch and return what can now be explained, in order of the requests' ends."""
        self.facts.update(batch, self._schema)
        self._recorder.add(batch)
        ended = self._requests.feed(batch, self.facts)
        self._beside.begun(self._requests.began)
        self._feed_engines(batch, ended)
        findings = self._finished(ended, batch.now_ns)
        if batch.now_ns - self._open_checked_ns >= _SECOND_NS:
            self._open_checked_ns = batch.now_ns
            findings += self._still_open(batch.now_ns)
        findings.sort(key=lambda f: (f.request.end_ns, f.request.trace_id))
        return findings

    def _feed_engines(self, batch: Batch, ended: list[Request]) -> None:
        # Like everything else, marks newer than the drain wait for the next batch: their request may be in it.
        marks, self._later_marks = _due([*self._later_marks, *batch.marks], batch.now_ns)
        seen = anonymous.of_events(batch.events, self._schema)
        steps, self._later_steps = _due([*self._later_steps, *seen], batch.now_ns)
        self.engines.begun(self._requests.began)
        self.engines.seen(steps)
        self.engines.feed(marks, self.facts, batch.now_ns)
        self.engines.ended(ended)
        exits = self._schema.select(batch.events, "sched_exit")
        for tgid, ts_ns in exits[exits["aux"] == 1][["tgid", "ts_ns"]].tolist() if len(exits) else ():
            self.engines.gone(tgid, ts_ns)

    def flush(self, now_ns: int) -> list[Finding]:
        """Explain what ended and was still waiting for a later batch, as at the end of a recording."""
        ended = self._requests.flush(self.facts)
        self._beside.begun(self._requests.began)
        findings = self._finished(ended, now_ns)
        self._give_up(self._waiting)
        self._waiting = []
        return findings

    def waiting_count(self) -> int:
        """Return the number of requests that wait to be explained."""
        return len(self._waiting)

    def open_count(self) -> int:
        """Return the number of requests in progress."""
        return len(self._requests.open_requests())

    def serving(self) -> set[int]:
        """Return the threads that serve the requests in progress, as far as they are known."""
        return {tid for r in self._requests.open_requests() for tid in (r.start_tid, r.end_tid) if tid}

    def frozen(self) -> set[int]:
        """Return the processes that have frozen since the last call: what their threads do is worth a look."""
        frozen, self._newly_frozen = self._newly_frozen, set()
        return frozen

    def _bucket(self, service: str, name: str, per_s: float) -> _Tokens:
        key = (service, name)
        if key not in self._buckets:
            if len(self._buckets) > 1000:
                self._buckets.clear()
            self._buckets[key] = _Tokens(per_s)
        return self._buckets[key]

    def _finished(self, ended: list[Request], now_ns: int) -> list[Finding]:
        """Explain those that ended, the worthy ones among them, and then what waits from batches before."""
        chosen: list[_Chosen] = []
        for service, its in groupby(sorted(ended, key=lambda r: r.service), key=lambda r: r.service):
            chosen += self._choose(service, list(its), now_ns)
        late = [item for item in self._waiting if now_ns - item.request.end_ns > _LATE_NS]
        waiting = [item for item in self._waiting if now_ns - item.request.end_ns <= _LATE_NS]
        groups = []
        for urgent in (True, False):
            # The newest first: while more comes than can be explained, what is explained is at least not late.
            groups += _close([item for item in chosen if item.urgent == urgent])
            groups += reversed(_close([item for item in waiting if item.urgent == urgent]))
        findings, self._waiting = [], []
        for group in groups:
            self._shared, shared = None, False
            for item in group:
                if self._allows():
                    if not shared:
                        self._share([item.request for item in group])
                        shared = True
                    findings.append(self._explain_chosen(item, now_ns))
                    self._between()
                elif item.ordinary:
                    self._long.pop((item.request.cookie, item.request.seq), None)
                else:
                    self._waiting.append(item)
        self._shared = None
        self._give_up([*late, *self._waiting[_MAX_WAITING:]])
        del self._waiting[_MAX_WAITING:]
        return findings

    def _give_up(self, items: list[_Chosen]) -> None:
        for r, *_ in items:
            self.counts["not_explained", r.service, "failed" if r.outcome in FAILED else ""] += 1
            self._long.pop((r.cookie, r.seq), None)

    def _explain_chosen(self, item: _Chosen, now_ns: int) -> Finding:
        r = item.request
        finding, whole = self._explain(r, item.reason, self._long.pop((r.cookie, r.seq), None))
        if item.ordinary:
            view = EngineView(self.engines, r, self.facts)
            self.baseline.observe_model(r.service, view.model, now_ns)
            self.baseline.observe(r, finding.causes, whole.ttft_causes)
        return finding

    def _choose(self, service: str, ended: list[Request], now_ns: int) -> list[_Chosen]:
        """Count what ended, and choose what is to be explained of it, as far as the rates allow."""
        objectives = self._settings.objectives(service)
        slow: list[tuple[Request, str | None]] = []
        failed: list[tuple[Request, str | None]] = []
        ordinary: list[Request] = []
        for r in ended:
            if r.outcome == "ok" and any(job.reason == "killed" for job in self.engines.jobs_of(r)):
                # The front end lived to end its response in good order; half of the answer is missing all the same.
                r.outcome, r.ended_by = "killed", "engine_exit"
            self.counts["requests", service, r.outcome] += 1
            view = EngineView(self.engines, r, self.facts)
            gaps = token_gaps_s(self.engines, view.jobs)
            self.tally.add(r, objectives, view.model.get("name", ""), gaps)
            reason = self.baseline.is_slow(r, objectives)
            if r.outcome == "lost":
                self._long.pop((r.cookie, r.seq), None)
            elif r.outcome in FAILED:
                failed.append((r, reason))
            elif reason:
                slow.append((r, reason))
            else:
                ordinary.append(r)
        chosen: list[_Chosen] = []
        # A fair reservoir without chance: whom a hash prefers does not depend on order or size.
        slow.sort(key=lambda item: _lot(item[0]))
        # A storm of one kind of failure leaves room for the others: the rarest first.
        often = Counter(_kind(r) for r, _ in failed)
        failed.sort(key=lambda item: (often[_kind(item[0])], _kind(item[0]), _lot(item[0])))
        alike: Counter[str] = Counter()
        for label, wanted in (("", slow), ("failed", failed)):
            bucket = self._bucket(service, label or "slow", self._settings.explain_per_s)
            for r, reason in wanted:
                if bucket.take(now_ns):
                    alike[_kind(r)] += bool(label)
                    chosen.append(_Chosen(r, reason, False, alike[_kind(r)] <= _FIRST_ALIKE))
                else:
                    self.counts["not_explained", service, label] += 1
                    self._long.pop((r.cookie, r.seq), None)
        for r in sorted(ordinary, key=_lot):
            learning = self.baseline.usual(r) is None
            rate = max(self._settings.ordinary_per_s, _LEARNING_RATE if learning else 0.0)
            if self._settings.ordinary_per_s and self._bucket(
                service, "learning" if learning else "ordinary", rate
            ).take(now_ns):
                # What is usual is wanted before the slow and failed ones that are held against it.
                chosen.append(_Chosen(r, None, True, learning))
            else:
                self._long.pop((r.cookie, r.seq), None)
        return chosen

    def _share(self, requests: list[Request]) -> None:
        """Make one set of timelines for requests that overlap or follow closely: half of the work is in them."""
        close = [r for r in requests if (r.cookie, r.seq) not in self._long]
        if len(close) < 2:
            return
        end_ns = max(r.end_ns for r in close)
        start_ns = min(r.start_ns for r in close)
        if end_ns - start_ns <= _SHARED_NS:
            chunks = self._chunks(start_ns, end_ns, None)
            self._shared = Timelines(self._schema, chunks, start_ns, end_ns, self.facts)

    def _chunks(self, start_ns: int, end_ns: int, long: _Long | None) -> list[Events]:
        chunks = self._recorder.span(start_ns - _MARGIN_NS, end_ns)
        if long is not None and len(long.carried):
            # A thread may have slept through the slices before: what they left of it, up to where events are at hand.
            first_ns = int(chunks[0]["ts_ns"][0]) if chunks else end_ns
            chunks.insert(0, long.carried[long.carried["ts_ns"] < np.uint64(first_ns)])
        return chunks

    def _classify(
        self, request: Request, start_ns: int, end_ns: int, long: _Long | None
    ) -> tuple[Classified, Context]:
        part = msgspec.structs.replace(
            request, start_ns=start_ns, end_ns=end_ns, end_tid=request.end_tid or request.start_tid
        )
        shared = self._shared
        if shared is not None and long is None and shared.start_ns <= start_ns and end_ns <= shared.end_ns:
            timelines = shared
        else:
            timelines = Timelines(
                self._schema, self._chunks(start_ns, end_ns, long), start_ns, end_ns, self.facts
            )
        before = long.path if long is not None else ()
        view = EngineView(self.engines, part, self.facts, self.baseline.model(part.service), before)
        path = critical_path.walk(timelines, part, long.own if long is not None else frozenset(), view)
        walked = view.walked((s.start_ns, s.end_ns, s.tid) for s in path.segments)
        ctx = Context(timelines, part, walked, self._beside)
        return classify(path, ctx), ctx

    def _carry(self, long: _Long, ctx: Context, segments: list[Segment]) -> None:
        kinds = [self._schema.kind(name) for name in _CARRIED]
        tids = {s.tid for s in segments} | {ctx.request.start_tid, ctx.request.end_tid}
        rows = [ctx.timelines.rows(tid) for tid in sorted(tids)]
        long.carried = joined([r[np.isin(r["kind"], kinds)][-_CARRIED_ROWS:] for r in rows])

    def _explain(
        self, request: Request, reason: str | None, long: _Long | None
    ) -> tuple[Finding, Classified]:
        start_ns = min(max(long.until_ns, request.start_ns), request.end_ns) if long else request.start_ns
        last, ctx = self._classify(request, start_ns, request.end_ns, long)
        whole = slices.join([*long.parts, last]) if long else last
        lost = self._recorder.lost(request.start_ns, request.end_ns)
        finding = verdict.explain(request, whole, self.baseline, reason, lost, ctx)
        if finding.slow or request.outcome in FAILED:
            before = long.stacks if long is not None else []
            mine, taken = self._seen(request, last, ctx)
            finding.stacks = stacks.merged([*before, *mine])
            finding.snapshots = [*(long.snapshots if long is not None else ()), *taken][
                : stalled.MAX_SNAPSHOTS
            ]
            codetext.tell(finding)
        finding.segments = slices.compact(finding.segments)
        _assert_tiles(finding)
        return finding, whole

    def _seen(
        self, request: Request, part: Classified, ctx: Context
    ) -> tuple[list[CodeStack], list[Snapshot]]:
        """Return what was sampled on a part of the path, and the snapshots taken meanwhile."""
        tgids = self.facts.tgids(request.service) | {request.tgid, *(s.tgid for s in part.segments)}
        serving = {request.start_tid, request.end_tid, *(s.tid for s in part.segments)}
        return (
            stacks.gather(part.segments, ctx.timelines, self.facts),
            stalled.snapshots(ctx.timelines, part.path, tgids, serving),
        )

    def _still_open(self, now_ns: int) -> list[Finding]:
        findings = []
        retained = now_ns - (self._recorder.oldest_ns() or now_ns)
        frozen: dict[int, int] = {}  # engine cores, and since when they make no progress
        for r in self._requests.open_requests():
            key = (r.cookie, r.seq)
            age_ms = (now_ns - r.start_ns) / 1e6
            limit = self._settings.objectives(r.service).e2e_ms
            long = self._long.get(key)
            reason = ""
            if not (long and long.reported):
                if limit and age_ms > max(limit, _OPEN_AGE_NS / 1e6):
                    reason = f"latency {age_ms:.0f} ms and still open, over the objective of {limit:g} ms"
                elif (stuck := self._stuck(r, now_ns, frozen)) and self._looked_at(r, now_ns, frozen):
                    reason = (
                        f"latency {age_ms:.0f} ms and still open; no progress of its engine for {stuck:.0f} s"
                    )
            if reason and self._bucket(r.service, "open", _OPEN_PER_S).take(now_ns) and self._allows():
                findings.append(self._report_open(r, now_ns, reason))
                self._long.setdefault(key, _Long(r.start_ns)).reported = True
                self._between()
            covered = long.until_ns if long else r.start_ns
            # Explained in slices while the events are still there; half of what is kept is left as margin.
            due = min(self._settings.window_ns, max(retained, 4 * _SECOND_NS)) / 2
            if (
                now_ns - covered > due
                and self._bucket("", "slice", _SLICES_PER_S).take(now_ns)
                and self._allows()
            ):
                part, ctx = self._classify(r, covered, now_ns, long)
                kept = self._long.setdefault(key, _Long(r.start_ns))
                if not kept.parts:
                    kept.own = critical_path.own_threads(ctx.timelines, ctx.request)
                self._carry(kept, ctx, part.segments)
                mine, taken = self._seen(r, part, ctx)
                kept.stacks = stacks.merged([*kept.stacks, *mine])
                kept.snapshots = [*kept.snapshots, *taken][: stalled.MAX_SNAPSHOTS]
                kept.path = ctx.engine.path if ctx.engine is not None else ()
                part.segments[:] = slices.compact(part.segments)
                kept.parts.append(part._replace(path=part.path._replace(segments=[])))
                kept.until_ns = now_ns
                if len(kept.parts) > 1:
                    joined = slices.join(kept.parts)
                    kept.parts = [joined._replace(segments=slices.compact(joined.segments))]
                self._between()
        if len(self._long) > 4 * len(self._requests.open_requests()) + 100:
            here = [*self._requests.open_requests(), *(item.request for item in self._waiting)]
            alive = {(r.cookie, r.seq) for r in here}
            self._long = {k: v for k, v in self._long.items() if k in alive}
        return findings

    def _stuck(self, request: Request, now_ns: int, frozen: dict[int, int]) -> float:
        """Return for how many seconds the engine of a request has been frozen; 0 when it is not.

        *frozen* keeps what is found of each core.
        """
        if now_ns - request.start_ns < _OPEN_AGE_NS:
            return 0.0
        jobs = self.engines.jobs_of(request)
        # One whose jobs have ended waits for its front end; one without any has not got to the engine.
        cores = (
            {job.core for job in jobs if not job.finished_ns}
            if jobs
            else self.engines.cores(request.service, self.facts)
        )
        for core in cores:
            if core not in frozen:
                frozen[core] = frozen_since(self.engines, core, now_ns)
        since = max((frozen[core] for core in cores), default=0)
        return (now_ns - since) / 1e9 if since else 0.0

    def _looked_at(self, request: Request, now_ns: int, frozen: dict[int, int]) -> bool:
        """Return whether there was time to look at the threads of what has frozen, which this asks for."""
        long = self._long.setdefault((request.cookie, request.seq), _Long(request.start_ns))
        if not long.asked_ns:
            long.asked_ns = now_ns
            self._newly_frozen |= {core for core, since_ns in frozen.items() if since_ns}
        return now_ns - long.asked_ns >= _LOOK_NS

    def _report_open(self, request: Request, now_ns: int, reason: str) -> Finding:
        seen = msgspec.structs.replace(
            request, end_ns=now_ns, end_tid=request.end_tid or request.start_tid, outcome="open"
        )
        return self._explain(seen, reason, self._long.get((request.cookie, request.seq)))[0]


def _due(items: list[_Timed], now_ns: int) -> tuple[list[_Timed], list[_Timed]]:
    """Part what is due from what is newer, each by time."""
    items.sort(key=lambda item: item.ts_ns)
    due = bisect_right(items, now_ns, key=lambda item: item.ts_ns)
    return items[:due], items[due:]


def _close(chosen: list[_Chosen]) -> list[list[_Chosen]]:
    """Part requests into groups, each short enough to share timelines; a late batch holds many seconds of them."""
    groups: list[list[_Chosen]] = []
    since_ns = 0
    for item in sorted(chosen, key=lambda c: (c.request.start_ns, c.request.cookie, c.request.seq)):
        if not groups or item.request.end_ns - since_ns > _SHARED_NS:
            groups.append([])
            since_ns = item.request.start_ns
        groups[-1].append(item)
    return groups


class NotTiledError(Exception):
    """A finding's segments do not tile its request: a defect of this program, never of its input."""


def _assert_tiles(finding: Finding) -> None:
    at = finding.request.start_ns
    for s in finding.segments:
        if s.start_ns != at or s.end_ns <= s.start_ns:
            raise NotTiledError(f"request {finding.request.trace_id}: segment at {s.start_ns}, {at} was due")
        at = s.end_ns
    if at != max(finding.request.end_ns, finding.request.start_ns):
        raise NotTiledError(f"request {finding.request.trace_id}: segments end at {at}")


def _kind(request: Request) -> str:
    """Return how a failed request failed: its status, or who ended it."""
    return str(request.status) if request.outcome == "error" else request.ended_by


def _lot(request: Request) -> bytes:
    return hashlib.blake2b(f"{request.cookie}:{request.seq}".encode(), digest_size=8).digest()
