"""The ring of marks: decoded, ordered, bounded; whatever it holds, nothing is raised."""

from __future__ import annotations

from typing import cast

from hypothesis import given
from hypothesis import strategies as st
from whyspan.marks import MAX_BODY, Aborted, Hello
from whyspan.pipeline import markring
from whyspan.pipeline.markring import HEAD, MarkRing
from whyspan_probes.rings import BlobRing
from whyspan_probes.schema import EVENT_BYTES

KIND = 33


class Ring:
    """What a ring would hold."""

    def __init__(self, *records: bytes) -> None:
        self.records = list(records)

    def drain(self) -> list[bytes]:
        out, self.records = self.records, []
        return out


def record(body: bytes, *, ts_ns: int = 7, kind: int = KIND, mark: int = 1, length: int = -1) -> bytes:
    head = HEAD.pack(ts_ns, 5, 4, kind, 0, mark, len(body) if length < 0 else length)
    return head + bytes(EVENT_BYTES - len(head)) + body + bytes(13)  # the ring's sizes are coarse


def marks_of(*records: bytes) -> MarkRing:
    ring = MarkRing(cast(BlobRing, Ring(*records)), KIND)
    ring.drain()
    return ring


def test_marks_come_by_time() -> None:
    ring = marks_of(
        record(b'{"side":"core","numbers":[2]}', ts_ns=9, mark=10),
        record(b'{"engine":"e"}', ts_ns=8),
        record(b'{"side":"core","numbers":[3]}', ts_ns=9, mark=10),
    )
    marks = ring.take()
    assert [(m.ts_ns, m.tid, m.tgid) for m in marks] == [(8, 5, 4), (9, 5, 4), (9, 5, 4)]
    assert [m.body for m in marks] == [
        Hello(engine="e"),
        Aborted(side="core", numbers=[2]),
        Aborted(side="core", numbers=[3]),
    ]
    assert (ring.take(), ring.bad, ring.crowded_out) == ([], 0, 0)


def test_what_does_not_pass_is_counted() -> None:
    ring = marks_of(
        b"",
        bytes(EVENT_BYTES - 1),
        record(b"{}", kind=KIND + 1),
        record(b"{}", length=MAX_BODY),
        record(b"{}", mark=0),
        record(b"{"),
        record(b'{"engine":"e"}'),
    )
    assert len(ring.take()) == 1
    assert ring.bad == 6


def test_what_is_kept_between_batches_is_bounded() -> None:
    body = b'{"engine":"e"' + b" " * 8000 + b"}"
    many = markring.MAX_PENDING // len(record(body)) + 11
    ring = marks_of(*[record(body)] * many)
    assert len(ring.take()) == many - 11
    assert ring.crowded_out == 11
    ring = marks_of(record(body))
    assert len(ring.take()) == 1


@given(st.lists(st.binary(max_size=200), max_size=9))
def test_any_bytes(records: list[bytes]) -> None:
    ring = marks_of(*records, *(record(r, mark=1 + len(r) % 16) for r in records))
    assert len(ring.take()) + ring.bad == 2 * len(records)
