"""``memory.reclaim``: the host had no free memory at hand, and the thread had to free some itself."""

from __future__ import annotations

from whyspan.causes.context import Context
from whyspan.causes.reclaiming import ReclaimRule, Stretch, most, size
from whyspan.critical_path import Path
from whyspan.model import Culprit, HostMemoryFact


class _Reclaim(ReclaimRule):
    id = "memory.reclaim"
    title = "freeing memory of the host before it got any (direct reclaim)"
    neighbours = ("memory.mmap_faults", "memory.allocator_growth", "io.disk_contention")
    fix = (
        "Try leaving the host more head-room (vm.min_free_kbytes, vm.watermark_scale_factor), dropping file caches "
        "that nobody reads again (fadvise DONTNEED), less memory for the process named, no swap for the engine."
    )
    rank = 16
    events = ("direct_reclaim",)
    what = "direct reclaim"
    nothing = "no direct reclaim by a thread of the service"

    def culprit(self, stretch: Stretch, tgid: int, ctx: Context) -> Culprit:
        """Name the process with most memory on the host, or the page cache where that holds more."""
        return ctx.memo((self.id, "culprit"), lambda: _culprit(ctx.facts.memory.host))

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return the reclaim seen, by the kernel's counters too: how much is available says nothing of it."""
        host = ctx.facts.memory.host
        counted = f"; direct reclaims on the host since boot: {host.stalls}" if host is not None else ""
        return super().rule_out(path, ctx) + counted


def _culprit(host: HostMemoryFact | None) -> Culprit:
    if host is None:
        return Culprit(kind="process", name="not known", detail="the host's memory was not looked at")
    state = (
        f"{size(host.free_bytes)} of {size(host.total_bytes)} free, page cache {size(host.cached_bytes)}, "
        f"{size(host.available_bytes)} said to be available"
    )
    if host.users and host.users[0].rss_bytes > host.cached_bytes:
        u = host.users[0]
        return Culprit(
            kind="process", name=u.comm, tgid=u.tgid, detail=f"{size(u.rss_bytes)} of its own; {state}"
        )
    return Culprit(kind="cache", name="page cache", detail="; ".join(filter(None, (state, most(host.users)))))


RULE = _Reclaim()
