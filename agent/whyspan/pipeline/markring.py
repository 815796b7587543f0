"""The ring of marks, decoded: what watched processes say of themselves."""

from __future__ import annotations

import struct
from typing import Final

from whyspan_probes.rings import BlobRing
from whyspan_probes.schema import EVENT_BYTES

from whyspan.marks import BadMarkError, Mark, decode

#: ``struct mark`` of marker.bpf.c up to its padding: the head of every event, and the length of the body after it.
HEAD: Final = struct.Struct("<QIIHHII")
#: Between two batches; a process that says more than this loses the rest, counted.
MAX_PENDING: Final = 8 << 20


class MarkRing:
    """``drain`` as often as the ring asks for it; ``take`` once for each batch."""

    def __init__(self, ring: BlobRing, kind: int) -> None:
        """*kind*: the number of the event ``mark`` on this run."""
        self._ring, self._kind = ring, kind
        self._pending: list[bytes] = []
        self._bytes = 0
        self.bad = 0  # unknown kinds, and bodies that did not pass
        self.crowded_out = 0

    def drain(self) -> None:
        """Take what has arrived out of the ring."""
        for record in self._ring.drain():
            if self._bytes + len(record) > MAX_PENDING:
                self.crowded_out += 1
                continue
            self._pending.append(record)
            self._bytes += len(record)

    def take(self) -> list[Mark]:
        """Return the marks drained since the last call, by time; those of one time in the order of the ring."""
        marks = []
        for record in self._pending:
            mark = self._decode(record)
            if mark is None:
                self.bad += 1
            else:
                marks.append(mark)
        self._pending, self._bytes = [], 0
        marks.sort(key=lambda m: m.ts_ns)
        return marks

    def _decode(self, record: bytes) -> Mark | None:
        if len(record) < EVENT_BYTES:
            return None
        ts_ns, tid, tgid, kind, _, mark_kind, length = HEAD.unpack_from(record)
        body = record[EVENT_BYTES : EVENT_BYTES + length]
        if kind != self._kind or len(body) != length:
            return None
        try:
            return decode(mark_kind, body, ts_ns=ts_ns, tid=tid, tgid=tgid)
        except BadMarkError:
            return None
