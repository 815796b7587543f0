"""``cpu.numa``: NUMA balancing moved the thread's pages while it waited, or moved the thread.

Needs two nodes: tested on made-up events only.
"""

from __future__ import annotations

from collections.abc import Iterable

from whyspan.causes.context import Context
from whyspan.causes.during import During
from whyspan.causes.on_thread import OnThreadRule
from whyspan.critical_path import Path
from whyspan.model import Culprit


class _Numa(OnThreadRule):
    id = "cpu.numa"
    title = "moving memory between NUMA nodes"
    neighbours = ("cpu.runqueue", "memory.mmap_faults", "memory.compaction")
    fix = (
        "Try numactl --cpunodebind and --membind for the whole process tree, on the GPU's node, and "
        "kernel.numa_balancing=0."
    )
    rank = 18
    events = ("numa_migrated",)
    nothing = "no page of the path's threads was moved between NUMA nodes"

    def find(self, tid: int, tgid: int, ctx: Context) -> Iterable[During]:
        """Yield the migrations that the thread made in its faults."""
        rows = ctx.timelines.rows_of(tid, "numa_migrated")
        moved = len(ctx.timelines.rows_of(tid, "numa_moved"))
        also = f"; the thread was moved {moved} times" if moved else ""
        name = ctx.process_label(tgid, tid)
        for ts, begin, pages in zip(*(rows[n].tolist() for n in ("ts_ns", "begin_ns", "pages")), strict=True):
            detail = f"NUMA balancing moved {pages} pages{also}"
            who = Culprit(
                kind="process", name=name, tgid=tgid, tid=tid, detail="memory on another node than its CPU"
            )
            yield During(begin, ts, detail, who)

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return what was looked for; with one node there is nothing to look for."""
        host = ctx.facts.observers.host
        if host.nodes == 1:
            return "the host has one NUMA node"
        told = super().rule_out(path, ctx)
        return told if not host.nodes or host.balancing else f"{told}; kernel.numa_balancing is off"


RULE = _Numa()
