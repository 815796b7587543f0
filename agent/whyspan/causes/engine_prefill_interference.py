"""``engine.prefill_interference``: the steps were long because another request's prompt was computed in them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from whyspan.causes.context import Context
from whyspan.causes.during import (
    LONG_NS,
    During,
    DuringRule,
    last_part,
    long_by_ns,
    request_culprit,
    turn_culprit,
)
from whyspan.engines import EngineView
from whyspan.engines.records import StepRun
from whyspan.engines.view import DELIVERY, FRONTEND
from whyspan.marks import Scheduled

#: Fewer prompt tokens of others than this do not make a step long.
MIN_TOKENS: Final = 16
#: A long prompt costs more per token than the median one: attention grows with its length.
MAX_COST: Final = 3


def others_prefill(step: StepRun, engine: EngineView) -> list[Scheduled]:
    """Return the prompt parts of other requests in a step, largest first."""
    found = [s for s in step.prompts if s.number not in engine.numbers]
    return sorted(found, key=lambda s: -s.tokens)


def interference_ns(step: StepRun, engine: EngineView) -> int:
    """Return how much of a step is due to others' prompts: their share, by tokens, of what it took over a plain one."""
    others = others_prefill(step, engine)
    theirs = sum(s.tokens for s in others)
    if theirs < MIN_TOKENS:
        return 0
    usual = engine.table.usual(step.core)
    plain = step.usual_ns or (usual.of(step.batch) if usual is not None else 0)
    excess = long_by_ns(step, engine.request.end_ns, plain)
    share = int(excess * theirs / max(step.prefill_tokens, 1))
    # A step may be long for another reason than the prompts in it.
    cost = usual.prefill(theirs) if usual is not None else 0
    return min(share, MAX_COST * cost) if cost else share


class _PrefillInterference(DuringRule):
    id = "engine.prefill_interference"
    title = "in steps that another request's prefill made long"
    neighbours = ("engine.kv_preemption", "engine.cpu_bound_step", "engine.queueing")
    fix = (
        "Try a smaller chunked-prefill budget (max_num_batched_tokens, long_prefill_token_threshold), a limit on "
        "prompt length, or separate prefill workers; the culprit's trace is linked."
    )
    rank = 62
    nothing = "no step beside the request was made long by the prefill of another"
    anonymous = True

    def find(self, engine: EngineView, ctx: Context) -> Iterable[During]:
        """Yield the share of each long step that others' prompts took, from the hand-over to the last token."""
        r = engine.request
        if engine.anonymous:
            yield from self._waited_for(engine)
            yield from self._in_batch(engine)
            return
        frontend, delivery = engine.phase(FRONTEND), engine.phase(DELIVERY)
        since = frontend.end_ns if frontend is not None else r.start_ns
        until = delivery.start_ns if delivery is not None else r.end_ns
        for step in engine.steps:
            ns = interference_ns(step, engine)
            if not ns:
                continue
            lo, hi = last_part(step, ns, r.end_ns)
            if hi <= since or lo >= until:
                continue
            worst = others_prefill(step, engine)[0]
            job = engine.table.job(step.core, worst.number)
            who = None
            if job is not None:
                who = request_culprit(job, f"a prompt of {job.prompt_tokens or worst.tokens} tokens")
            yield During(
                max(lo, since),
                min(hi, until),
                f"step with {worst.tokens} prompt tokens of another request",
                who,
            )

    @staticmethod
    def _waited_for(engine: EngineView) -> Iterable[During]:
        """Yield the long prompts that it waited for, where one request is served at a time."""
        for w in engine.behind:
            tokens = sum(s.tokens for s in w.call.prompt)
            who = turn_culprit(w.call.owner, engine, f"a prompt of {tokens} tokens")
            for step in w.call.prompt:
                lo, hi = max(step.begin_ns, w.start_ns), min(step.done_ns or w.end_ns, w.end_ns)
                if step.tokens >= MIN_TOKENS and lo < hi and (step.wall_ns or hi - lo) >= LONG_NS:
                    text = f"step with {step.tokens} prompt tokens of another request"
                    yield During(lo, hi, text, who, w.inferred)

    @staticmethod
    def _in_batch(engine: EngineView) -> Iterable[During]:
        """Yield what prompts cost the batch after the request's first byte: its own prompt was over by then.

        Whose they were is not known.
        """
        r, usual = engine.request, engine.table.usual(engine.core)
        for step in engine.steps if 0 < r.first_ns < r.end_ns else ():
            counts = step.counts
            if counts is None or not counts.shared or step.begin_ns < r.first_ns or usual is None:
                continue
            plain = step.usual_ns or usual.of(step.batch)
            excess = long_by_ns(step, r.end_ns, plain) if plain else 0
            if step.prefill_tokens >= MIN_TOKENS and excess:
                lo, hi = last_part(step, excess, r.end_ns)
                who = turn_culprit(None, engine, "another request, not known which")
                text = f"step with {step.prefill_tokens} prompt tokens"
                yield During(max(lo, r.first_ns), min(hi, r.end_ns), text, who, inferred=True)


RULE = _PrefillInterference()
