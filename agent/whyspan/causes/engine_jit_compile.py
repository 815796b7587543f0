"""``engine.jit_compile``: code was compiled, or a graph captured, while the request waited for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from whyspan.causes.context import Context
from whyspan.causes.during import During, DuringRule
from whyspan.causes.rule import Claim
from whyspan.critical_path import Path, PathSegment
from whyspan.engines import EngineView
from whyspan.engines.records import StageRun
from whyspan.model import Culprit

STAGES: Final = frozenset({"compile", "capture", "warmup"})
#: Programs that run only to compile. Names as the kernel cuts them, at 15 characters.
COMPILERS: Final = frozenset(
    {
        "cc1plus",
        "cc1",
        "g++",
        "gcc",
        "c++",
        "cc",
        "clang",
        "clang++",
        "ptxas",
        "nvcc",
        "cicc",
        "cudafe++",
        "as",
        "ld",
    }
    | {
        "ld.lld",
        "collect2",
        "fatbinary",
        "nvlink",
        "hipcc",
        "ninja",
        "lto1",
        "lto-wrapper",
        "ptxas-blackwell",
    }
    | {"x86_64-linux-gn", "aarch64-linux-g"}  # gcc and its like by their whole names, cut
)


def compiles(engine: EngineView) -> list[StageRun]:
    """Return the compilations of the service's engine processes that overlap the request."""
    r, facts = engine.request, engine.facts
    out = []
    for instance in engine.table.instances():
        if facts.service(instance.tgid) != r.service:
            continue
        out += [
            s for s in instance.stages if s.name in STAGES and s.begin_ns < r.end_ns and s.end_ns > r.start_ns
        ]
    return out


class _JitCompile(DuringRule):
    id = "engine.jit_compile"
    title = "while code was compiled"
    neighbours = ("engine.reload", "engine.cpu_bound_step")
    fix = "Try warming up with the shapes and options that requests bring, and a persistent compile cache."
    rank = 54
    nothing = "nothing was compiled or captured beside the request, and no compiler is on the path"
    again = False

    def find(self, engine: EngineView, ctx: Context) -> Iterable[During]:
        """Yield the compilations that the engine's processes told of."""
        for s in compiles(engine):
            if s.again is self.again:
                what = f"{s.name} {s.what}".strip()
                who = Culprit(
                    kind="thread", name=ctx.thread_label(s.tid, s.tgid), tgid=s.tgid, tid=s.tid, detail=what
                )
                yield During(s.begin_ns, s.end_ns, what, who)

    def applies(self, ctx: Context) -> bool:
        """Return whether anything was compiled, or a compiler is among the service's processes."""
        if super().applies(ctx):
            return True
        return not self.again and any(ctx.facts.comm(tgid) in COMPILERS for tgid in ctx.service_tgids)

    def match(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Claim what lies in a compilation, and whatever a compiler of the service does on the path."""
        claim = super().match(segment, ctx)
        if claim is not None or self.again or segment.tgid == ctx.request.tgid:
            return claim
        tgid, tid = segment.tgid, segment.tid
        name = ctx.facts.comm(tgid, tid)
        if name not in COMPILERS or tgid not in ctx.service_tgids:
            return None
        # Never what it was called with: arguments may hold what nobody should read.
        parent = ctx.facts.parent(tgid)
        by = f"{ctx.process_label(parent)} ({parent})" if parent else "the service"
        who = Culprit(kind="process", name=name, tgid=tgid, detail=f"a compiler that {by} started")
        return Claim(self.id, f"compiler {name}", who)

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return that no compiler is on the path."""
        return super().rule_out(path, ctx) if self.during(ctx) else self.nothing


RULE = _JitCompile()
