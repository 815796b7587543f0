"""What one explained request adds to the metrics: the time that each cause and each culprit cost it, and exemplars."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from whyspan.latency import latency_ms, ttft_ms
from whyspan.model import FAILED, UNKNOWN, Culprit, Finding
from whyspan.outcome import error_type
from whyspan.tally import Series, per_chunk_s

from whyspan_exporters import ids
from whyspan_exporters.metrics.exemplars import Exemplars
from whyspan_exporters.metrics.found import Found
from whyspan_exporters.metrics.instrument import SERVICE, Exemplar
from whyspan_exporters.metrics.states import label
from whyspan_exporters.records import Explained

FINDINGS: Final = "whyspan.finding.count"
TOKENS: Final = "whyspan.finding.token.count"
EXCESS: Final = "whyspan.cause.excess.time"
CULPRIT: Final = "whyspan.cause.culprit.time"
#: The phase of what no engine told the phases of.
WHOLE: Final = "whole"
#: Culprits named per service.
MAX_CULPRITS: Final = 50
_MAX_SERVICES: Final = 50


def add(record: Explained, found: Found, exemplars: Exemplars, culprits: Culprits) -> None:
    """Count a finding, unless it comes again when the request has ended."""
    finding = record.finding
    r = finding.request
    service, model = label(r.service), label(finding.engine.model if finding.engine is not None else "")
    # A failure may have a cause although it came at once.
    ended = r.outcome in FAILED and finding.verdict.cause != UNKNOWN
    cause = finding.verdict.cause if finding.slow or ended else "none"
    found.add(FINDINGS, {SERVICE: service, "whyspan.cause": label(cause)}, 1.0)
    if r.outcome == "open":
        return
    if finding.engine is not None:
        tag = label(finding.engine.template) or "none"
        for kind, tokens in (
            ("input", finding.engine.prompt_tokens),
            ("output", finding.engine.output_tokens),
        ):
            found.add(TOKENS, {SERVICE: service, "whyspan.template": tag, "gen_ai.token.type": kind}, tokens)
    trace = _trace(record)
    for what, ms, who in _excesses(finding):
        exemplar = Exemplar(ms / 1e3, *trace) if trace else None
        labels = {SERVICE: service, "whyspan.cause": label(what)} | (
            {"gen_ai.request.model": model} if model else {}
        )
        for phase, share in _phases(finding, what).items():
            found.add(EXCESS, labels | {"whyspan.phase": label(phase)}, ms / 1e3 * share, exemplar)
        if who.kind:
            culprits.add(found, service, (label(what), who), ms / 1e3, exemplar)
    if trace:
        _sample(finding, Series(service, model, error_type(r)), trace, exemplars)


class Culprits:
    """Bounds the names of culprits: so many per service, the first that come."""

    def __init__(self) -> None:
        """Know none."""
        self._names: dict[str, set[tuple[str, str]]] = {}

    def add(
        self, found: Found, service: str, what: tuple[str, Culprit], seconds: float, exemplar: Exemplar | None
    ) -> None:
        """Count the time that a culprit cost by a cause."""
        cause, who = what
        # Ids of requests never come again: their traces are linked from the spans instead.
        name = label(who.kind if who.kind == "request" else who.name or who.kind)
        kind = label(who.kind)
        names = self._names.get(service)
        if names is None and len(self._names) < _MAX_SERVICES:
            names = self._names.setdefault(service, set())
        known = names is not None and ((kind, name) in names or len(names) < MAX_CULPRITS)
        if known and names is not None:
            names.add((kind, name))
            labels = {
                SERVICE: service,
                "whyspan.cause": cause,
                "whyspan.culprit.kind": kind,
                "whyspan.culprit.name": name,
            }
            found.add(CULPRIT, labels, seconds, exemplar)
        else:
            found.overflow(CULPRIT, seconds, exemplar)


def _excesses(finding: Finding) -> Iterator[tuple[str, float, Culprit]]:
    """Yield cause, excess in ms and culprit, the verdict's first."""
    verdict = finding.verdict
    if not (finding.slow or finding.request.outcome in FAILED):
        return
    if verdict.excess_ms > 0:
        yield verdict.cause, verdict.excess_ms, verdict.culprit
    for other in verdict.others:
        if other.excess_ms > 0:
            yield other.cause, other.excess_ms, other.culprit


def _phases(finding: Finding, cause: str) -> dict[str, float]:
    """Return in which phases a cause lay, as shares of 1: by its segments, else by the time the phases took."""
    spans = [(s.start_ns, s.end_ns) for s in finding.segments if s.cause == cause]
    spans = spans or [(finding.request.start_ns, finding.request.end_ns)]
    times: dict[str, int] = {}
    for phase in finding.phases:
        overlap = sum(max(min(end, phase.end_ns) - max(start, phase.start_ns), 0) for start, end in spans)
        if overlap:
            times[phase.name] = times.get(phase.name, 0) + overlap
    total = sum(times.values())
    return {name: ns / total for name, ns in times.items()} if total else {WHOLE: 1.0}


def _trace(record: Explained) -> tuple[int, str, str] | None:
    """Return end, trace and span of a request whose trace can be looked up; None of one that is not kept."""
    finding = record.finding
    r = finding.request
    theirs = r.trace_id_source == "traceparent"
    if not r.sampled or not (finding.slow or r.outcome in FAILED or theirs):
        return None
    trace_id, span_id = ids.of_request(record.id, r.trace_id)
    return record.start_unix_ns + max(r.end_ns - r.start_ns, 0), f"{trace_id:032x}", f"{span_id:016x}"


def _sample(finding: Finding, series: Series, trace: tuple[int, str, str], exemplars: Exemplars) -> None:
    r = finding.request
    ttft, chunk = ttft_ms(r) / 1e3, per_chunk_s(r)
    exemplars.put("duration", series, Exemplar(latency_ms(r) / 1e3, *trace))
    if r.first_ns and ttft >= 0:
        exemplars.put("ttft", series, Exemplar(ttft, *trace))
    if chunk >= 0:
        exemplars.put("per_token", series, Exemplar(chunk, *trace))
