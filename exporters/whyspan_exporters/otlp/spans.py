"""A finding as spans: the request under its caller's span, its phases, its root causes. Pure.

::

    whyspan.request                  the whole request; parent: the server's own span, else the caller's, if known
    ├─ whyspan.phase.<name>          in order, without gaps: frontend, handover, queue, prefill, decode, delivery where
    │                                the engine told them; else ttft, until the first body byte, and stream after it
    └─ whyspan.cause.<id>            one per root cause, from its first segment to its last; below a phase when it
                                     lies within that

There is one set of phases, never both: each covers the whole request, so that sums over ``whyspan.phase.*`` would count
it twice, and a cause would have two parents that hold it. Where the first byte lies among the engine's phases is
``whyspan.ttft_ms`` of the request, and on which side of it the excess is, its ``whyspan.phase``.

A cause's time may have gaps, in which the path did other things: ``whyspan.time_ms`` is the time, the span's length
is not. One span per cause, so that ``whyspan.excess_ms`` can be summed up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from whyspan import __version__
from whyspan.model import UNFINISHED, Culprit, Finding, Segment
from whyspan.outcome import error_type
from whyspan.text import clean

from whyspan_exporters import ids
from whyspan_exporters.otlp import attributes
from whyspan_exporters.otlp.attributes import Attributes
from whyspan_exporters.records import Explained

#: The engine's, as ``engines.view.PHASES`` has them.
ENGINE_PHASES: Final = ("frontend", "handover", "queue", "prefill", "decode", "delivery")
#: Per request, so that it stays readable and span-derived metrics are not swamped.
MAX_SPANS: Final = 20
MAX_EVIDENCE: Final = 16
#: The longest segments of a cause, as events.
MAX_SEGMENT_EVENTS: Final = 8
#: Beside the verdict's, a cause gets a span only with so much more than usual.
MIN_EXCESS_MS: Final = 1.0
_SCOPE: Final = InstrumentationScope("whyspan", __version__)
_TIME_MAX: Final = (1 << 63) - 1


class _Interval(NamedTuple):
    start_ns: int
    end_ns: int

    def holds(self, other: _Interval) -> bool:
        return self.start_ns <= other.start_ns and other.end_ns <= self.end_ns


class _Builder:
    """Makes the spans of one finding: same trace, same resource, same clock offset, ids from the finding's id."""

    def __init__(self, record: Explained, resource: Resource) -> None:
        request = record.finding.request
        self._id, self._resource = record.id, resource
        # One offset for all: what nests in monotonic time nests in wall-clock time, to the nanosecond.
        self._offset_ns = record.start_unix_ns - request.start_ns
        self._trace_id, _ = ids.of_request(record.id, request.trace_id)
        self._flags = TraceFlags(TraceFlags.SAMPLED if request.sampled else TraceFlags.DEFAULT)

    def time(self, mono_ns: int) -> int:
        return max(0, min(mono_ns + self._offset_ns, _TIME_MAX))

    def context(self, role: str) -> SpanContext:
        return SpanContext(
            self._trace_id, ids.derived(self._id, role, 8), is_remote=False, trace_flags=self._flags
        )

    def above(self, *span_ids: str) -> SpanContext | None:
        """The first of some spans of other processes that is one; None when none is."""
        span_id = next((i for i in (ids.hex_id(text, 8) for text in span_ids) if i), 0)
        return SpanContext(self._trace_id, span_id, True, self._flags) if span_id else None

    def span(
        self,
        role: str,
        interval: _Interval,
        parent: SpanContext | None,
        values: Attributes,
        *,
        events: Sequence[Event] = (),
        links: Sequence[Link] = (),
        status: Status | None = None,
    ) -> ReadableSpan:
        return ReadableSpan(
            name=f"whyspan.{clean(role, attributes.NAME_CHARS)}",
            context=self.context(role),
            parent=parent,
            resource=self._resource,
            attributes=values,
            events=events,
            links=links,
            kind=SpanKind.INTERNAL,
            status=status or Status(StatusCode.UNSET),
            start_time=self.time(interval.start_ns),
            end_time=self.time(interval.end_ns),
            instrumentation_scope=_SCOPE,
        )


def to_spans(record: Explained, resource: Resource) -> list[ReadableSpan]:
    """Return the spans of a finding, the request first, then its phases, then its causes; at most `MAX_SPANS`."""
    finding, build = record.finding, _Builder(record, resource)
    r = finding.request
    whole = _Interval(r.start_ns, max(r.end_ns, r.start_ns))
    request = build.context("request")
    spans = [
        build.span(
            "request",
            whole,
            build.above(finding.engine.server_span_id if finding.engine else "", r.parent_span_id),
            attributes.of_request(finding, record.id),
            status=_status(finding),
        )
    ]
    by_byte = _by_byte(finding, whole)
    phases = _by_engine(finding, whole) or by_byte
    for name, interval in phases.items():
        spans.append(build.span(f"phase.{name}", interval, request, {"whyspan.phase": name}))
    for cause in _causes(finding, MAX_SPANS - len(spans)):
        mine = [s for s in finding.segments if s.cause == cause]
        interval = _extent(mine, whole) or by_byte.get(finding.phase, whole)
        inside = next((name for name, phase in phases.items() if phase.holds(interval)), "")
        parent = build.context(f"phase.{inside}") if inside else request
        spans.append(_cause_span(build, finding, (cause, mine), interval, parent))
    return spans


def _status(finding: Finding) -> Status:
    if not error_type(finding.request):
        return Status(StatusCode.UNSET)
    # By convention nothing is added to what the HTTP status says.
    unfinished = finding.request.outcome in UNFINISHED
    text = finding.verdict.sentence or "the response was not completed"
    return Status(StatusCode.ERROR, clean(text, attributes.TEXT_CHARS) if unfinished else None)


def _cause_span(
    build: _Builder,
    finding: Finding,
    cause_and_segments: tuple[str, list[Segment]],
    interval: _Interval,
    parent: SpanContext,
) -> ReadableSpan:
    cause, mine = cause_and_segments
    values = attributes.of_cause(finding, cause, mine)
    primary = cause == finding.verdict.cause
    values["whyspan.primary"] = primary
    events, links = _segment_events(build, mine), []
    if primary:
        values |= attributes.of_verdict(finding)
        lines = attributes.evidence(finding.verdict, MAX_EVIDENCE)
        at = build.time(interval.start_ns)
        events = [Event("whyspan.evidence", {"whyspan.evidence": line}, at) for line in lines] + events
        links = _links(finding.verdict.culprit)
    else:
        values["whyspan.excess_ms"] = _excess_ms(finding, cause)
        for other in finding.verdict.others:
            if other.cause == cause:
                values |= attributes.of_culprit(other.culprit)
                links = _links(other.culprit)
    return build.span(f"cause.{cause}", interval, parent, values, events=events, links=links)


def _by_engine(finding: Finding, whole: _Interval) -> dict[str, _Interval]:
    out: dict[str, _Interval] = {}
    for p in finding.phases:
        start_ns, end_ns = max(p.start_ns, whole.start_ns), min(p.end_ns, whole.end_ns)
        if p.name in ENGINE_PHASES and p.name not in out and start_ns <= end_ns:
            out[p.name] = _Interval(start_ns, end_ns)
    return out


def _by_byte(finding: Finding, whole: _Interval) -> dict[str, _Interval]:
    first_ns = finding.request.first_ns
    if not whole.start_ns <= first_ns <= whole.end_ns:
        return {}  # no body byte was sent
    out = {"ttft": _Interval(whole.start_ns, first_ns)}
    if first_ns < whole.end_ns:
        out["stream"] = _Interval(first_ns, whole.end_ns)
    return out


def _causes(finding: Finding, limit: int) -> list[str]:
    """The causes that get a span: the verdict's, ``unknown`` included, and a slow request's others of clear excess."""
    if not attributes.has_verdict(finding):
        return []
    others = [
        c
        for c in finding.causes
        if finding.slow
        and c != finding.verdict.cause
        and attributes.is_real_cause(c)
        and _excess_ms(finding, c) >= MIN_EXCESS_MS
    ]
    others.sort(key=lambda c: (-_excess_ms(finding, c), c))
    return [finding.verdict.cause, *others][:limit]


def _excess_ms(finding: Finding, cause: str) -> float:
    return max(finding.causes.get(cause, 0.0) - finding.baseline.get(cause, 0.0), 0.0)


def _extent(mine: list[Segment], whole: _Interval) -> _Interval | None:
    if not mine:
        return None
    start_ns = max(min(s.start_ns for s in mine), whole.start_ns)
    end_ns = min(max(s.end_ns for s in mine), whole.end_ns)
    return _Interval(start_ns, end_ns) if start_ns <= end_ns else None


def _segment_events(build: _Builder, mine: list[Segment]) -> list[Event]:
    longest = sorted(mine, key=lambda s: s.start_ns - s.end_ns)[:MAX_SEGMENT_EVENTS]
    longest.sort(key=lambda s: s.start_ns)
    return [Event("whyspan.segment", attributes.of_segment(s), build.time(s.start_ns)) for s in longest]


def _links(culprit: Culprit) -> list[Link]:
    trace_id, span_id = ids.hex_id(culprit.trace_id, 16), ids.hex_id(culprit.span_id, 8)
    if not trace_id or not span_id:
        return []
    context = SpanContext(trace_id, span_id, is_remote=True)
    return [Link(context, {"whyspan.link": "culprit"})]
