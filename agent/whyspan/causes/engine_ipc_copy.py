"""``engine.ipc_copy``: messages between the engine's processes were large: packing and copying them took the time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt
from whyspan_probes.schema import Events

from whyspan.causes.context import Context
from whyspan.causes.during import During, DuringRule
from whyspan.critical_path import PathSegment
from whyspan.edges import UNIX
from whyspan.engines import EngineView
from whyspan.engines.view import HANDOVER
from whyspan.model import Culprit
from whyspan.timeline import UNKNOWN_STATE

#: Fewer bytes than this are packed and copied in less than a millisecond.
MIN_BYTES: Final = 1 << 20


class _IpcCopy(DuringRule):
    id = "engine.ipc_copy"
    title = "packing and copying large messages between the engine's processes"
    neighbours = ("engine.cpu_bound_step", "python.loop_blocked")
    fix = "Try sending less (token ids, not tensors or text; fewer logprobs), or shared memory for what is large."
    rank = 64
    nothing = "less than 1 MiB passed between the engine's processes while the request was between them"

    def find(self, engine: EngineView, ctx: Context) -> Iterable[During]:
        """Yield the hand-over, and the way back of each token, where large messages passed."""
        job = engine.job
        if job is None:
            return
        spans = []
        handover = engine.phase(HANDOVER)
        if handover is not None:
            spans.append((handover.start_ns, handover.end_ns))
        done = [s.done_ns for s in engine.mine if s.done_ns]
        for begin, end in job.outputs:
            k = bisect_right(done, begin)
            if k:
                spans.append((done[k - 1], end))
        sent_at, sum_of = self._sent(engine, ctx)
        for lo, hi in spans:
            size = sum_of[bisect_left(sent_at, hi)] - sum_of[bisect_left(sent_at, lo)]
            if size >= MIN_BYTES:
                text = f"{size / (1 << 20):.1f} MiB between the engine's processes"
                who = Culprit(
                    kind="process", name=ctx.process_label(job.core) or "engine", tgid=job.core, detail=text
                )
                yield During(lo, hi, text, who)

    def takes(self, segment: PathSegment, ctx: Context) -> bool:
        """Take the front end's share, too: it unpacks."""
        return segment.state != UNKNOWN_STATE

    @staticmethod
    def _sent(engine: EngineView, ctx: Context) -> tuple[list[int], list[int]]:
        """Return when the service's processes sent to each other, and the sums of bytes before each moment."""
        rows = ctx.timelines.select("sock_send")
        if not len(rows):
            return [], [0]
        own = np.isin(rows["tgid"], list(ctx.service_tgids)) & ~_served(rows, ctx)
        rows = rows[own]
        sums: list[int] = np.cumsum(rows["bytes"], dtype=np.int64).tolist()
        return rows["ts_ns"].tolist(), [0, *sums]


def _served(rows: Events, ctx: Context) -> npt.NDArray[np.bool_]:
    """Which of the rows are responses: on connections that the server answers on, not between the processes."""
    r = ctx.request
    inet = (rows["aux"] & 0xFF) != UNIX
    mine = rows["key"] == r.cookie
    return np.asarray(mine | (inet & (rows["lport"] == r.server_port) if r.server_port else mine))


RULE = _IpcCopy()
