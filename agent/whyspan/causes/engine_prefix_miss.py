"""``engine.prefix_miss``: tokens were computed again that an earlier prompt had left in the cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from whyspan.causes.context import Context
from whyspan.causes.during import During, DuringRule
from whyspan.engines import EngineView, Job
from whyspan.engines.view import PREFILL
from whyspan.model import Culprit

#: Fewer missed tokens than this are rounding to whole blocks.
MIN_TOKENS: Final = 32


def missed(job: Job) -> tuple[int, str, Culprit]:
    """Return how many tokens a job computed that might have been found, why they were not, and what did it."""
    evicted = job.common_tokens - job.cached_tokens
    diverged = job.alike_blocks * job.block_size if job.diverged_block >= 0 else 0
    if evicted >= diverged:
        text = (
            f"{job.cached_tokens} of {job.prompt_tokens} prompt tokens found; {job.common_tokens} had been computed "
            f"before: their blocks were evicted"
        )
        return (
            evicted,
            text,
            Culprit(kind="cache", name="KV prefix cache", tgid=job.core, detail="evicted blocks"),
        )
    at = job.diverged_block * job.block_size
    text = (
        f"parts from an earlier prompt at block {job.diverged_block} (token {at}); {job.alike_blocks} blocks after "
        f"that are equal, but no longer a common prefix"
    )
    return (
        diverged,
        text,
        Culprit(kind="request", name=job.label, tgid=job.core, detail=f"diverges at token {at}"),
    )


class _PrefixMiss(DuringRule):
    id = "engine.prefix_miss"
    title = "computing prompt tokens that a prefix cache might have held"
    neighbours = ("engine.prefill_interference", "engine.kv_preemption")
    fix = (
        "Try moving what changes (time, ids) to the prompt's end, routing a conversation to the same replica, or a "
        "larger cache."
    )
    rank = 66
    nothing = "nothing of the prompt had been computed for an earlier one that was not found in the cache"

    def find(self, engine: EngineView, ctx: Context) -> Iterable[During]:
        """Yield the last part of the prefill, as long as the missed tokens' share of those computed."""
        prefill, job = engine.phase(PREFILL), engine.job
        if prefill is None or job is None:
            return
        tokens, detail, culprit = missed(job)
        computed = job.prompt_tokens - job.cached_tokens
        if tokens < max(MIN_TOKENS, job.block_size) or computed <= 0:
            return
        ns = int((prefill.end_ns - prefill.start_ns) * min(tokens / computed, 1.0))
        yield During(prefill.end_ns - ns, prefill.end_ns, detail, culprit)


RULE = _PrefixMiss()
