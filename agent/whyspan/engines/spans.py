"""Spans that a server's own OpenTelemetry SDK made: which of them is a request's."""

from __future__ import annotations

from typing import Final, NamedTuple

from whyspan.lru import Lru
from whyspan.marks import Mark, SpanOn

_MAX_SPANS: Final = 10_000
_MAX_ALIKE: Final = 4  # with one parent: a caller's retries, say


class Begun(NamedTuple):
    """A span began on a thread."""

    ts_ns: int
    tid: int
    tgid: int
    span_id: str


class Spans:
    """Spans with a parent, by that parent. Bounded: those asked for or seen longest ago make room."""

    def __init__(self) -> None:
        self._by_parent: Lru[tuple[str, str], tuple[Begun, ...]] = Lru(_MAX_SPANS)

    def add(self, mark: Mark, body: SpanOn) -> None:
        """Take in that a span began or ended."""
        if body.end or not body.parent_id or not body.trace_id or not body.span_id:
            return
        key = body.trace_id, body.parent_id
        known = self._by_parent.get(key) or ()
        if len(known) < _MAX_ALIKE:
            self._by_parent.put(key, (*known, Begun(mark.ts_ns, mark.tid, mark.tgid, body.span_id)))

    def server(self, parent: tuple[str, str], tgid: int, since_ns: int, until_ns: int, tid: int = 0) -> str:
        """Return the span that a server made of a request; empty when none was seen.

        It is the first in the request's time and process, and on *tid* where that is given, whose parent is the
        caller's (trace id, span id). Marks do not tell a span's kind; no other span of the server has its parent
        outside.
        """
        for b in self._by_parent.get(parent) or ():
            if b.tgid == tgid and tid in (0, b.tid) and since_ns <= b.ts_ns < until_ns:
                return b.span_id
        return ""
