"""What the rules of storage share: the block requests beside a wait, and who made them."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from whyspan.causes.context import MS, Context
from whyspan.causes.dirty import JOURNAL, flushes
from whyspan.critical_path import PathSegment
from whyspan.model import Culprit
from whyspan.timeline import BLOCKED, Wait

#: A wait for a disk worth a cause.
LONG_IO_NS: Final = 10_000_000
UNINTERRUPTIBLE: Final = 2

_WRITE, _SYNC, _KTHREAD = 1, 2, 8  # aux of block_done
_LOOP: Final = 7  # major number of loop devices. Source: include/uapi/linux/major.h
#: A request costs a disk as much as this many bytes, whatever its size. About what an SSD transfers meanwhile.
_REQUEST_BYTES: Final = 16_384
#: Others' requests are heard of from so many on, or so many bytes.
_HEARD_REQUESTS: Final = 4
_HEARD_BYTES: Final = 1 << 20


class Share(NamedTuple):
    """Some issuers' part of the requests on a disk."""

    requests: int = 0
    size: int = 0

    @property
    def weight(self) -> int:
        """What it costs the disk, in bytes."""
        return self.size + self.requests * _REQUEST_BYTES

    @property
    def heard(self) -> bool:
        """Whether it is more than a disk's ordinary murmur."""
        return self.requests >= _HEARD_REQUESTS or self.size >= _HEARD_BYTES


class Traffic(NamedTuple):
    """Block requests in flight on a disk during a wait. Times in ns.

    ``flushed`` is what the kernel writes back for somebody, ``relayed`` what a kernel thread passed on for whoever
    waits: throttled or queued requests, the journal of an fsync.
    """

    dev: int
    own: Share
    others: Share
    flushed: Share
    relayed: Share
    other_tid: int  # outside the service, with most; 0 none
    other_tgid: int
    other_bytes: int
    max_latency_ns: int
    median_latency_ns: int
    queue: int  # requests in the disk when the wait began

    @property
    def requests(self) -> int:
        """All of them."""
        return sum(s.requests for s in (self.own, self.others, self.flushed, self.relayed))

    @property
    def size(self) -> int:
        """Bytes of all."""
        return sum(s.size for s in (self.own, self.others, self.flushed, self.relayed))

    def busy_with_others(self, times: float = 2.0) -> bool:
        """Return whether other processes ask clearly more of the disk than the service and the kernel do."""
        rest = max(times * self.own.weight, self.relayed.weight / 2, self.flushed.weight)
        return self.others.heard and self.others.weight > rest

    def busy_with_flush(self, times: float = 2.0) -> bool:
        """Return whether write-back asks clearly more of the disk than anybody else does."""
        return self.flushed.heard and self.flushed.weight > max(times * self.own.weight, self.others.weight)

    def latency(self) -> str:
        """Return it in words."""
        median, slowest = self.median_latency_ns / MS, self.max_latency_ns / MS
        return (
            f"{self.requests} requests, median {median:.1f} ms, slowest {slowest:.1f} ms, "
            f"{self.queue} in the queue when the wait began"
        )


def uninterruptible(segment: PathSegment) -> bool:
    """Return whether the segment is a wait that no signal ends, as those for a disk are."""
    wait = segment.wait
    return segment.state == BLOCKED and wait is not None and bool(wait.prev_state & UNINTERRUPTIBLE)


def traffic(wait: Wait, ctx: Context, dev: int = 0) -> Traffic | None:
    """Return the block requests in flight during a wait, or None when there were none.

    Of one disk: the one given, that of the descriptor, or else, where requests do not go by its number, the one with
    most latency. A stack of them (a loop device on a disk) would count the same bytes twice.
    """
    if not dev and wait.fd is not None and wait.fd.kind in (1, 2):
        dev = wait.fd.dev
    return ctx.memo(("traffic", wait.start_ns, wait.end_ns, dev), lambda: _traffic(wait, ctx, dev))


def _traffic(wait: Wait, ctx: Context, dev: int) -> Traffic | None:
    rows = ctx.timelines.select("block_done")
    if not len(rows):
        return None
    start, end = np.uint64(max(wait.start_ns, 0)), np.uint64(max(wait.end_ns, 0))
    rows = rows[(rows["ts_ns"] >= start) & (rows["issue_ns"] <= end)]
    if not len(rows):
        return None
    devs = rows["dev"]
    if not (devs == dev).any():
        if _tells(dev, ctx):
            return None  # of what it did meanwhile nothing took long: another disk is no evidence
        slow: Counter[int] = Counter()
        for number, ns in zip(devs.tolist(), rows["latency_ns"].tolist(), strict=True):
            slow[number] += ns
        dev = slow.most_common(1)[0][0]
    rows = rows[devs == dev]
    aux, size = rows["aux"], rows["bytes"]
    kernel = (aux & _KTHREAD) != 0
    own = ~kernel & np.isin(rows["tgid"], list(ctx.service_tgids))
    others = ~kernel & ~own & (rows["tid"] != 0)
    writes = kernel & ((aux & _WRITE) != 0)
    # Who waits for a write says so. What a journal's commit writes of other files is theirs.
    flushed = writes & (((aux & _SYNC) == 0) | bool(_ordered(wait, ctx, dev)))
    who: Counter[tuple[int, int]] = Counter()
    for tid, tgid, n in zip(
        rows["tid"][others].tolist(), rows["tgid"][others].tolist(), size[others].tolist(), strict=True
    ):
        who[tid, tgid] += n + _REQUEST_BYTES
    (tid, tgid), _ = who.most_common(1)[0] if who else ((0, 0), 0)
    return Traffic(
        dev,
        _share(size, own),
        _share(size, others),
        _share(size, flushed),
        _share(size, kernel & ~flushed),
        tid,
        tgid,
        int(size[others & (rows["tid"] == tid)].sum()),
        int(rows["latency_ns"].max()),
        int(np.median(rows["latency_ns"])),
        int((rows["issue_ns"] <= start).sum()),
    )


def _tells(dev: int, ctx: Context) -> bool:
    """Whether requests go by this number: those of a partition by its disk's, those of some stacks by what is below."""
    return dev >> 20 == _LOOP or bool((ctx.timelines.select("block_done")["dev"] == dev).any())


def _share(size: npt.NDArray[Any], mask: npt.NDArray[Any]) -> Share:
    return Share(int(mask.sum()), int(size[mask].sum()))


def _ordered(wait: Wait, ctx: Context, dev: int) -> bool:
    return any(int(r["aux"]) & JOURNAL for r in flushes(wait, ctx, dev))


def busiest(io: Traffic, ctx: Context) -> Culprit:
    """Return the process outside the service that asks most of a disk."""
    name = ctx.process_label(io.other_tgid, io.other_tid)
    moved = f"{io.other_bytes / 1e6:.1f} of {io.size / 1e6:.1f} MB on {ctx.facts.storage.device(io.dev)}"
    detail = "; ".join(filter(None, (ctx.where(io.other_tgid), moved, io.latency())))
    return Culprit(kind="process", name=name, tgid=io.other_tgid, tid=io.other_tid, detail=detail)
