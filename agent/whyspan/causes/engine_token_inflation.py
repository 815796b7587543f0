"""``engine.token_inflation``: the body gave far more prompt tokens than its size usually does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from whyspan.causes.context import Context
from whyspan.causes.during import During, DuringRule
from whyspan.engines import EngineView
from whyspan.engines.view import PREFILL
from whyspan.model import Culprit

#: So many times the usual number of tokens per byte, and so many tokens more, are an outlier.
OUTLIER: Final = 2.0
MIN_TOKENS: Final = 128


class _TokenInflation(DuringRule):
    id = "engine.token_inflation"
    title = "computing far more prompt tokens than a body of its size usually gives"
    neighbours = ("engine.prefix_miss", "engine.prefill_interference")
    fix = "Try refusing such input at the edge (control characters, base64, random ids); cap tokens per request."
    rank = 65
    nothing = "the prompt has about as many tokens as bodies of its size on this route"

    def find(self, engine: EngineView, ctx: Context) -> Iterable[During]:
        """Yield the last part of the prefill, as long as the unusual tokens' share of those computed."""
        prefill, job = engine.phase(PREFILL), engine.job
        if prefill is None or job is None or not job.usual_tokens:
            return
        more = job.prompt_tokens - job.usual_tokens
        if job.prompt_tokens < OUTLIER * job.usual_tokens or more < MIN_TOKENS:
            return
        computed = max(job.prompt_tokens - job.cached_tokens, 1)
        ns = int((prefill.end_ns - prefill.start_ns) * min(more / computed, 1.0))
        detail = (
            f"{job.prompt_tokens} prompt tokens from {job.client.request_bytes} bytes, usually about "
            f"{job.usual_tokens}"
        )
        who = Culprit(kind="request", name=job.label, tgid=job.core, detail=detail)
        yield During(prefill.end_ns - ns, prefill.end_ns, detail, who)


RULE = _TokenInflation()
