"""Dirty data: what was written back beside a wait, who dirtied it, and whom the kernel made to wait for it."""

from __future__ import annotations

from collections import Counter
from typing import Final

import numpy as np

from whyspan.causes.context import Context
from whyspan.critical_path import PathSegment
from whyspan.model import Culprit
from whyspan.text import clean
from whyspan.timeline import Wait

JOURNAL: Final = 1  # aux of file_flush
#: What others had written back may have been given to the disk this long before a wait for it.
_FLUSH_NS: Final = 2_000_000_000
#: From the kernel's decision to make a thread pause to its sleep.
_PAUSE_NS: Final = 1_000_000


def flushes(wait: Wait, ctx: Context, dev: int) -> list[dict[str, int | bytes]]:
    """Return what was written back on a disk at or shortly before the end of a wait, its own file aside."""
    rows = ctx.timelines.select("file_flush")
    if not len(rows):
        return []
    lo, hi = np.uint64(max(wait.start_ns - _FLUSH_NS, 0)), np.uint64(max(wait.end_ns, 0))
    rows = rows[(rows["ts_ns"] >= lo) & (rows["ts_ns"] <= hi) & (rows["dev"] == dev)]
    own = wait.fd.inode if wait.fd is not None else 0
    names = rows.dtype.names or ()
    return [dict(zip(names, r, strict=True)) for r in rows[rows["inode"] != own].tolist()]


def dirtier(wait: Wait, ctx: Context, dev: int) -> Culprit | None:
    """Return who dirtied most of what is written back on a disk beside a wait; None when nobody is known."""
    pages: Counter[int] = Counter()
    rows = ctx.timelines.select("dirty_pause")
    if len(rows):
        lo, hi = np.uint64(max(wait.start_ns - _FLUSH_NS, 0)), np.uint64(max(wait.end_ns, 0))
        rows = rows[(rows["ts_ns"] >= lo) & (rows["ts_ns"] <= hi) & (rows["dev"] == dev)]
        for tgid, n in zip(rows["tgid"].tolist(), rows["pages"].tolist(), strict=True):
            if tgid not in ctx.service_tgids:
                pages[tgid] += n
    where = ctx.facts.storage.device(dev)
    if pages:
        tgid, n = pages.most_common(1)[0]
        detail = f"made to wait for dirtying {n} pages faster than they are written to {where}"
        return Culprit(
            kind="process", name=ctx.process_label(tgid), tgid=tgid, detail=_where(detail, tgid, ctx)
        )
    written: Counter[tuple[int, bytes]] = Counter()
    for r in flushes(wait, ctx, dev):
        written[int(r["inode"]), bytes(r["file"])] += max(int(r["pages"]), 1)
    if not written:
        return None
    (inode, raw), n = written.most_common(1)[0]
    writer = ctx.facts.storage.writer(dev, inode)
    much = f"{n} pages of it" if n > 1 else "it"
    if writer is not None and writer.tgid not in ctx.service_tgids:
        detail = f"has {writer.path} open, and {much} written back to {where}"
        return Culprit(
            kind="process", name=writer.comm, tgid=writer.tgid, detail=_where(detail, writer.tgid, ctx)
        )
    name = writer.path if writer is not None else _text(raw) or f"inode {inode}"
    return Culprit(kind="file", name=name, detail=f"{much} written back to {where}, by whom is not known")


def _where(detail: str, tgid: int, ctx: Context) -> str:
    return "; ".join(filter(None, (ctx.where(tgid), detail)))


def _text(raw: bytes) -> str:
    return clean(raw.split(b"\0", 1)[0].decode("utf-8", "replace"))


def pauses(segment: PathSegment, ctx: Context) -> int:
    """Return on which disk's account a thread that writes was made to wait by the kernel; 0 when it was not."""
    wait = segment.wait
    rows = ctx.memo(("dirty_pause", segment.tid), lambda: ctx.timelines.rows_of(segment.tid, "dirty_pause"))
    if wait is None or not len(rows):
        return 0
    i = int(rows["ts_ns"].searchsorted(np.uint64(max(wait.start_ns, 0)), "right")) - 1
    return int(rows["dev"][i]) if i >= 0 and wait.start_ns - int(rows["ts_ns"][i]) <= _PAUSE_NS else 0
