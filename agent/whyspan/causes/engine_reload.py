"""``engine.reload``: a model, its weights or an adapter was loaded while the request waited for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from whyspan.causes.context import Context
from whyspan.causes.during import During, DuringRule
from whyspan.engines import EngineView
from whyspan.model import Culprit

STAGES: Final = frozenset(
    {"adapter", "reload", "load_model", "weights", "wake", "import", "device", "kv_cache"}
)


class _Reload(DuringRule):
    id = "engine.reload"
    title = "while a model or an adapter was loaded"
    neighbours = ("memory.mmap_faults", "engine.jit_compile")
    fix = "Try keeping the model loaded (keep_alive), equal options for all requests, or loading adapters beforehand."
    rank = 55
    nothing = "no model, weights or adapter was loaded beside the request"

    def find(self, engine: EngineView, ctx: Context) -> Iterable[During]:
        """Yield the loads that the engine's processes told of; the innermost where they nest."""
        r = engine.request
        for instance in engine.table.instances():
            if engine.facts.service(instance.tgid) != r.service:
                continue
            for s in instance.stages:
                if s.name in STAGES and s.begin_ns < r.end_ns and s.end_ns > r.start_ns:
                    what = f"{s.name} {s.what}".strip()
                    who = Culprit(
                        kind="process", name=ctx.process_label(s.tgid, s.tid), tgid=s.tgid, detail=what
                    )
                    yield During(s.begin_ns, s.end_ns, what, who)


RULE = _Reload()
