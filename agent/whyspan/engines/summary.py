"""What a finding says of the engine's side of a request."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import median
from typing import Final

from whyspan.engines.records import StepRun
from whyspan.engines.view import EngineView
from whyspan.model import EngineFacts, PhaseTime, Request, StepTime

#: Steps kept of a request; of more, neighbours are joined evenly. A finding travels as one message.
MAX_STEP_TIMES: Final = 400


def phases(view: EngineView) -> list[PhaseTime]:
    """Return the request's phases; none when the engine does not know it."""
    return [PhaseTime(p.name, p.start_ns, p.end_ns) for p in view.phases]


def facts(view: EngineView) -> EngineFacts | None:
    """Return what the engine said of the request; None when it said nothing."""
    if not view.known:
        return _of_anonymous(view)
    hello = view.instance.hello if view.instance is not None else None
    used = [s.kv_used / (s.kv_used + s.kv_free) for s in view.mine if s.kv_used + s.kv_free]
    first = view.jobs[0]
    return EngineFacts(
        engine=hello.engine if hello is not None else "",
        version=hello.version if hello is not None else "",
        state=view.instance.state if view.instance is not None else "heard",
        core_tgid=view.core,
        request_id=first.label,
        prompt_tokens=first.prompt_tokens,
        cached_tokens=first.cached_tokens,
        output_tokens=sum(j.output_tokens for j in view.jobs),
        preemptions=sum(len(j.preemptions) for j in view.jobs),
        recomputed_tokens=sum(j.recomputed_tokens for j in view.jobs),
        steps=len(view.mine),
        batch=int(median(s.batch for s in view.mine)) if view.mine else 0,
        kv_usage=max(used, default=-1.0),
        n=first.n,
        template=first.template,
        model=view.model.get("name", ""),
        # Only of the same trace: a server that was sent no traceparent makes a trace of its own.
        server_span_id=first.own_span_id if first.trace_id == view.request.trace_id else "",
        # Those of others too: while it waits, they are what it waits for.
        step_times=step_times(view.steps, view.request, {s.step for s in view.mine}),
    )


def _of_anonymous(view: EngineView) -> EngineFacts | None:
    """Return what the steps of an engine that names no requests tell, and the server's own span."""
    r, own = view.request, view.own_calls
    span = ""
    if r.trace_id_source == "traceparent":
        since_ns = r.recv_ns or r.start_ns
        span = view.table.spans.server(
            (r.trace_id, r.parent_span_id), r.tgid, since_ns, r.end_ns, tid=r.start_tid
        )
    if not own:
        return EngineFacts(server_span_id=span) if span else None
    hello = view.instance.hello if view.instance is not None else None
    steps = view.mine
    used = [s.kv_used / (s.kv_used + s.kv_free) for s in steps if s.kv_used + s.kv_free]
    cached = [max(c.steps[0].counts.position, 0) for c in own if c.steps[0].counts is not None]
    prompt = sum(s.tokens for c in own for s in c.prompt)
    # A prompt gives the first token, each step after it one more for every sequence.
    made = sum(s.batch for c in own for s in [c.steps[0], *c.steps[len(c.prompt) :]])
    whole = any(s.counts is not None and s.counts.whole for s in steps)
    return EngineFacts(
        engine=view.table.engine_of(view.core),
        version=hello.version if hello is not None else "",
        state=view.instance.state if view.instance is not None else "heard",
        core_tgid=view.core,
        prompt_tokens=0 if whole else prompt + sum(cached),
        cached_tokens=0 if whole else sum(cached),
        output_tokens=0 if whole else made,
        steps=len(steps),
        batch=int(median(s.batch for s in steps)),
        kv_usage=max(used, default=-1.0),
        model=view.model.get("name", ""),
        server_span_id=span,
        step_times=step_times(steps, r, {s.step for s in steps}),
    )


def step_times(steps: Sequence[StepRun], request: Request, mine: Collection[int]) -> list[StepTime]:
    """Return the steps that overlap a request, cut to it and so joined that they are at most `MAX_STEP_TIMES`.

    Args:
        steps: In order.
        request: Which one.
        mine: The numbers of those that it took part in.
    """
    start, end = request.start_ns, request.end_ns
    beside = [s for s in steps if s.begin_ns < end and (s.done_ns or end) > start and not s.empty]
    each = -(-len(beside) // MAX_STEP_TIMES) or 1
    return [_joined(beside[i : i + each], start, end, mine) for i in range(0, len(beside), each)]


def _joined(steps: Sequence[StepRun], start_ns: int, end_ns: int, mine: Collection[int]) -> StepTime:
    last = steps[-1]
    total = last.kv_used + last.kv_free
    return StepTime(
        start_ns=max(min(s.from_ns or s.begin_ns for s in steps), start_ns),
        end_ns=min(max(s.done_ns or end_ns for s in steps), end_ns),
        batch=max(s.batch for s in steps),
        tokens=sum(s.tokens for s in steps),
        kv_usage=round(last.kv_used / total, 4) if total else -1.0,
        count=len(steps),
        mine=any(s.step in mine for s in steps),
    )
