"""``python.gc``: the interpreter collected garbage on a thread of the path, and nothing else of the process ran."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from whyspan.causes.context import MS, Context
from whyspan.causes.during import During
from whyspan.causes.goes import ACTIVITY
from whyspan.causes.on_thread import OnThreadRule
from whyspan.model import Culprit

#: Collections shorter than this are ordinary; the probe does not report them either.
MIN_NS: Final = 1_000_000
_INFERRED: Final = 256  # flag of gc_pause
_UNKNOWN: Final = 255


class _Gc(OnThreadRule):
    id = "python.gc"
    title = "in Python's garbage collector"
    neighbours = ("python.loop_blocked", "python.gil", "engine.cpu_bound_step")
    fix = (
        "Try gc.freeze() once everything is loaded, a higher gc.set_threshold, and finding the type of object that "
        "accumulates: a collection visits every tracked object."
    )
    rank = 12
    events = ("gc_pause", "gc_start")
    nothing = "no garbage collection of 1 ms or more on the path's threads"

    def find(self, tid: int, tgid: int, ctx: Context) -> Iterable[During]:
        """Yield the collections that a thread made; the others of its interpreter wait for it meanwhile."""
        found = list(_collections(tid, ctx))
        if not found:
            return
        generation = max((g for _, _, g, _, _ in found if g != _UNKNOWN), default=_UNKNOWN)
        who = Culprit(
            kind="thread",
            name=ctx.thread_label(tid, tgid),
            tgid=tgid,
            tid=tid,
            detail=f"{_named(generation)}, {_often(tgid, ctx)}",
        )
        for begin, end, g, collected, inferred in found:
            freed = f", {collected} objects freed" if collected >= 0 else ""
            text = f"collected {_named(g)} for {(end - begin) / MS:.0f} ms{freed}"
            yield During(begin, end, text, who, inferred)


def _collections(tid: int, ctx: Context) -> Iterable[tuple[int, int, int, int, bool]]:
    """Yield (begin, end, generation, objects freed, whether the end is inferred) of a thread's long collections."""
    rows = ctx.timelines.rows_of(tid, "gc_pause")
    seen: set[int] = set()
    if len(rows):
        fields = (rows[n].tolist() for n in ("ts_ns", "begin_ns", "aux", "collected"))
        for end, begin, aux, collected in zip(*fields, strict=True):
            inferred = bool(aux & _INFERRED)
            last = min(end, _next_act(tid, begin, ctx)) if inferred else end
            seen.add(begin)
            if last - begin >= MIN_NS:
                yield begin, last, aux & _UNKNOWN, collected, inferred
    starts = ctx.timelines.rows_of(tid, "gc_start")
    if len(starts):
        for begin, generation in zip(starts["ts_ns"].tolist(), starts["aux"].tolist(), strict=True):
            last = min(_next_act(tid, begin, ctx), ctx.request.end_ns)
            if begin not in seen and last - begin >= MIN_NS:
                yield begin, last, generation, -1, True


def _next_act(tid: int, after_ns: int, ctx: Context) -> int:
    """When the thread next did something that a collector does not do: by then the collection was over."""
    found = [ctx.timelines.thread(tid).next_block(after_ns)]
    for name in ACTIVITY:
        rows = ctx.timelines.rows_of(tid, name)
        if len(rows):
            ts: list[int] = rows["ts_ns"].tolist()
            found.append(next((t for t in ts if t > after_ns), None))
    return min((t for t in found if t is not None), default=1 << 62)


def _named(generation: int) -> str:
    return (
        "all generations"
        if generation == 2
        else "garbage"
        if generation == _UNKNOWN
        else f"generation {generation}"
    )


def _often(tgid: int, ctx: Context) -> str:
    """How often the process collects for so long, as far as the window tells."""

    def count() -> str:
        rows = ctx.timelines.select("gc_pause")
        begins = sorted(set(rows["begin_ns"][rows["tgid"] == tgid].tolist())) if len(rows) else []
        if len(begins) < 2:
            return "once in the time looked at"
        every = (begins[-1] - begins[0]) / (len(begins) - 1) / MS
        return f"{len(begins)} long ones in the time looked at, one every {every:.0f} ms"

    return ctx.memo(("gc often", tgid), count)


RULE = _Gc()
