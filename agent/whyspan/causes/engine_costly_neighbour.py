"""``engine.costly_neighbour``: the decode steps were long because of what another request asked for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from whyspan.causes.context import Context
from whyspan.causes.during import During, DuringRule, last_part, long_by_ns, request_culprit
from whyspan.causes.engine_prefill_interference import MIN_TOKENS, interference_ns
from whyspan.engines import EngineView, Job
from whyspan.engines.records import StepRun
from whyspan.engines.view import DELIVERY, FRONTEND

#: Beside a prompt that makes up this share of a step's excess the options are not to blame.
_PREFILL_SHARE: Final = 0.5


def _weight(job: Job) -> int:
    return job.logprobs + job.prompt_logprobs + (20 if job.grammar else 0) + 4 * (job.n - 1)


def _options(job: Job) -> str:
    said = []
    if job.logprobs or job.prompt_logprobs:
        said.append(f"{max(job.logprobs, job.prompt_logprobs)} logprobs per token")
    if job.n > 1:
        said.append(f"n={job.n}")
    if job.grammar:
        said.append(f"structured output ({job.grammar})")
    return ", ".join(said)


def costly_others(step: StepRun, engine: EngineView) -> list[Job]:
    """Return the other requests in a step that asked for something costly, the costliest first."""
    jobs = [engine.table.job(step.core, n) for n in step.costly if n not in engine.numbers]
    return sorted((j for j in jobs if j is not None), key=lambda j: -_weight(j))


class _CostlyNeighbour(DuringRule):
    id = "engine.costly_neighbour"
    title = "in steps that another request's options made long"
    neighbours = ("engine.prefill_interference", "engine.cpu_bound_step")
    fix = (
        "Try limiting what one request may ask for (max_logprobs, n, grammars), or serving such requests on an "
        "instance of their own; the culprit's trace is linked."
    )
    rank = 63
    nothing = "no step beside the request was made long by the options (logprobs, n, grammar) of another"

    def find(self, engine: EngineView, ctx: Context) -> Iterable[During]:
        """Yield what each step with a costly request in it took over a plain one without it."""
        r = engine.request
        frontend, delivery = engine.phase(FRONTEND), engine.phase(DELIVERY)
        since = frontend.end_ns if frontend is not None else r.start_ns
        until = delivery.start_ns if delivery is not None else r.end_ns
        usual = engine.table.usual(engine.core)
        if usual is None:
            return
        for step in engine.steps:
            costly = costly_others(step, engine)
            if not costly:
                continue
            plain = usual.of(max(step.batch - len(costly), 1))
            tokens = step.prefill_tokens
            prompts = usual.prefill(tokens)
            if not plain or (tokens >= MIN_TOKENS and not prompts):
                continue
            excess = long_by_ns(step, r.end_ns, plain + prompts)
            by_prefill = interference_ns(step, engine)
            if not excess or by_prefill > _PREFILL_SHARE * (excess + by_prefill):
                continue
            # The last part of the step is the prompts'.
            lo, hi = last_part(step, excess + by_prefill, r.end_ns)
            hi -= by_prefill
            if hi <= since or lo >= until:
                continue
            who = request_culprit(costly[0], _options(costly[0]))
            yield During(max(lo, since), min(hi, until), f"step with a request of {_options(costly[0])}", who)


RULE = _CostlyNeighbour()
