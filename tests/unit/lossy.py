"""Random events with no regard for what is possible: what is left when a ring overflows, and worse."""

from __future__ import annotations

from hypothesis import strategies as st
from whyspan.model import LockFact

from tests.unit.timeline import COOKIE, HOG, LOOP, SERVER, WORKER, EventBuilder

GIL_START = 0x9000
_TIDS = (LOOP, WORKER, HOG, 0)
_MOMENT = st.integers(0, 600).map(lambda tenth: tenth / 10)
_TID = st.sampled_from(_TIDS)
_CALL = st.sampled_from((-2, -1, 0, 1, 44, 74, 202, 230, 232))


@st.composite
def lossy_events(draw: st.DrawFn, most: int = 60) -> EventBuilder:
    """Return up to *most* events of a few threads within 60 ms, any of which may contradict the others."""
    b = EventBuilder()
    b.known(LockFact(SERVER, GIL_START, GIL_START + 208))
    kinds = (
        "out",
        "into",
        "wake",
        "send",
        "recv",
        "edge_write",
        "edge_read",
        "fork",
        "fd",
        "block",
        "lock",
        "mmap",
    )
    for _ in range(draw(st.integers(0, most))):
        kind, ms, tid, other = draw(st.sampled_from(kinds)), draw(_MOMENT), draw(_TID), draw(_TID)
        small = draw(st.integers(0, 3))
        if kind == "out":
            flags = draw(st.integers(0, 15))
            throttled = draw(st.integers(0, 40))
            b.out(
                ms,
                tid,
                small,
                nr=draw(_CALL),
                next_tid=other,
                cpu=small & 1,
                flags=flags,
                throttled_ms=throttled,
            )
        elif kind == "into":
            b.into(ms, tid, other, cpu=small & 1, throttled_ms=draw(st.integers(0, 40)))
        elif kind == "wake":
            b.wake(ms, tid, other, context=small, nr=draw(_CALL), vec=draw(st.integers(0, 5)))
        elif kind in ("send", "recv"):
            family, ports = draw(st.sampled_from((1, 2))), draw(st.permutations((8000, 9000)))
            size, offset = draw(st.integers(0, 30)), draw(st.integers(0, 90))
            key = draw(st.sampled_from((COOKIE, 8, 9)))
            fields = {"key": key, "peer": 17 - key if key < 10 else 0, "offset": offset, "bytes": size}
            getattr(b, kind)(ms, tid, aux=family, lport=ports[0], rport=ports[1], **fields)
        elif kind.startswith("edge"):
            b.edge(kind, ms, tid, draw(st.integers(5, 6)), bytes=draw(st.sampled_from((8, -11))))
        elif kind == "fork":
            b.add("sched_fork", ms, tid, child_tid=other, child_tgid=b.tgid(other))
        elif kind == "lock":
            address = draw(st.sampled_from((0x1000, 0x1000, 0x2000, GIL_START + 8, GIL_START + 64)))
            op = draw(st.sampled_from((0, 0, 9)))
            b.locked(ms, tid, address, op=op, val=2 if op == 0 else 0, owner=other, cpu=small & 1)
        elif kind == "mmap":
            b.add("mmap_lock_wait", ms, tid, aux=1, owner_tid=other, owner_tgid=b.tgid(other), key=7)
            b.out(ms, tid, 2, nr=-1, cpu=small & 1)
        elif kind == "fd":
            b.add("fd_block", ms, tid, aux=draw(st.integers(1, 8)), fd=small)
        else:
            b.add("block_done", ms, tid, issue_ns=0, latency_ns=1, bytes=4096)
    return b
