"""``python.gil``: a sibling thread had the interpreter lock."""

from __future__ import annotations

from typing import Final

from whyspan.causes.context import MS, Context
from whyspan.causes.held import HeldRule
from whyspan.critical_path import PathSegment, Via
from whyspan.locks import GIL
from whyspan.timeline import RUNNING

#: Who waits asks for the lock after the switch interval, 5 ms by default; waits much shorter than that are hand-overs
#: between threads that let it go by themselves. Source: CPython, Python/ceval_gil.h.
LONG_NS: Final = 4_000_000
#: On a CPU for so long in one go, the holder did not hear the request: it is in native code.
NATIVE_NS: Final = 15_000_000


class _PythonGil(HeldRule):
    id = "python.gil"
    title = "waiting for the interpreter lock that a sibling thread had"
    neighbours = ("python.loop_blocked", "python.gc", "lock.contention")
    fix = (
        "Try moving that thread's work to another process, releasing the interpreter lock around its native code, "
        "or making it shorter."
    )
    rank = 22
    nothing = f"no wait for an interpreter lock of {LONG_NS // MS} ms or more"

    def takes(self, via: Via, ctx: Context) -> bool:
        """Take the waits that are longer than a hand-over."""
        return via.kind == GIL and via.ns >= LONG_NS

    def holds(self, segment: PathSegment, ctx: Context) -> str:
        """Return in words what the holder did: native code does not hear that somebody waits."""
        if segment.state != RUNNING:
            return f"was {segment.state} itself"
        since = ctx.timelines.thread(segment.tid).before(segment.end_ns).start_ns
        ran = segment.end_ns - max(since, 0)
        if ran >= NATIVE_NS:
            return f"was on a CPU for {ran / MS:.0f} ms without letting go: in native code"
        return "computed in Python"


RULE = _PythonGil()
