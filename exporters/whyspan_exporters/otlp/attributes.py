"""What the spans say of a finding: attribute names and values, bounded and cleaned.

Names are those of OpenTelemetry's semantic conventions wherever there is one, else ``whyspan.*``. Every string passes
`clean`: what comes from a process is one line and of bounded length.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import Final

from whyspan import codetext
from whyspan.model import (
    FAILED,
    UNKNOWN,
    Culprit,
    EngineFacts,
    Finding,
    Request,
    Segment,
    Verdict,
)
from whyspan.outcome import error_type
from whyspan.text import clean

from whyspan_exporters.listed import int64

Value = str | bool | int | float | list[str]
Attributes = dict[str, Value]

TEXT_CHARS: Final = 300
NAME_CHARS: Final = 128
#: Entries of ``whyspan.ruled_out``, and of a request's times per cause.
MAX_RULED_OUT: Final = 16
MAX_CAUSES: Final = 16
#: Of ``code.stacktrace``, the innermost first.
MAX_FRAMES: Final = 40
_MIN_CAUSE_MS: Final = 0.05
# Semantic conventions, http.request.method: any other is "_OTHER", so that the values stay few.
_METHODS: Final = frozenset(
    ("CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "QUERY", "TRACE")
)
#: Semantic conventions, gen_ai.operation.name, by the end of the path in OpenAI's API and those that follow it.
_OPERATIONS: Final = {
    "/chat/completions": "chat",
    "/completions": "text_completion",
    "/embeddings": "embeddings",
}


def is_real_cause(cause: str) -> bool:
    """Whether *cause* is one of CAUSES.md, not a kind of usual work and not ``unknown``."""
    return cause != UNKNOWN and not cause.startswith("work.")


def has_verdict(finding: Finding) -> bool:
    """Whether a cause, or ``unknown``, is claimed; nothing is for a request that was ordinary or only failed."""
    return finding.slow or bool(finding.verdict.sentence)


def of_request(finding: Finding, finding_id: str) -> Attributes:
    """Return the attributes of ``whyspan.request``."""
    r = finding.request
    known = r.method in _METHODS
    out: Attributes = {
        "http.request.method": r.method if known else "_OTHER",
        "url.path": clean(r.route, TEXT_CHARS),
        "thread.id": int64(r.start_tid),
        "whyspan.finding_id": clean(finding_id, NAME_CHARS),
        "whyspan.trace_id_source": clean(r.trace_id_source, NAME_CHARS),
        "whyspan.outcome": clean(r.outcome, NAME_CHARS),
        "whyspan.slow": finding.slow,
        "whyspan.accounted_ratio": finding.accounted_ns / finding.wall_ns if finding.wall_ns > 0 else 1.0,
        "whyspan.baseline_requests": int64(finding.baseline_count),
        "whyspan.lost_events": int64(finding.lost_events),
        "whyspan.chunks": int64(r.chunks),
    }
    put(out, "http.request.method_original", "" if known else clean(r.method, NAME_CHARS))
    put(out, "thread.name", _thread_name(finding.segments, r.start_tid))
    put(out, "error.type", error_type(r))
    put(out, "http.response.status_code", int64(r.status))
    put(out, "http.request.body.size", int64(r.request_bytes))
    put(out, "http.response.body.size", int64(r.response_bytes))
    put(out, "http.request.header.x-request-id", [clean(r.request_id, NAME_CHARS)] if r.request_id else [])
    put(out, "http.request.header.x-tenant-id", [clean(r.tenant, NAME_CHARS)] if r.tenant else [])
    put(out, "whyspan.ended_by", clean(r.ended_by, NAME_CHARS) if r.outcome in FAILED else "")
    put(out, "whyspan.head", "" if r.head == "whole" else clean(r.head, NAME_CHARS))
    put(out, "whyspan.slow_reason", clean(finding.slow_reason, TEXT_CHARS))
    put(out, "whyspan.phase", clean(finding.phase, NAME_CHARS))
    if has_verdict(finding):
        put(out, "whyspan.verdict", clean(finding.verdict.cause, NAME_CHARS))
    put(out, "whyspan.sentence", clean(finding.verdict.sentence, TEXT_CHARS))
    if r.first_ns:
        out["whyspan.ttft_ms"] = (r.first_ns - r.start_ns) / 1e6
    if r.recv_ns > r.start_ns:
        out["whyspan.socket_wait_ms"] = (r.recv_ns - r.start_ns) / 1e6
    if not r.sampled:
        out["whyspan.parent_sampled"] = False
    if finding.engine is not None:
        out |= _of_engine(finding.engine, r)
    longest = sorted(finding.causes.items(), key=lambda item: (-item[1], item[0]))
    for cause, ms in longest[:MAX_CAUSES]:
        if ms >= _MIN_CAUSE_MS:
            out[f"whyspan.cause_ms.{clean(cause, NAME_CHARS)}"] = float(ms)
    return out


def _of_engine(e: EngineFacts, request: Request) -> Attributes:
    """Return what the engine said: standard names where there are, else ``whyspan.engine.*``.

    The model is ``gen_ai.response.model``, the one that answered. What the request asked for (``gen_ai.request.model``)
    stands in its body, which is never read.
    """
    out: Attributes = {}
    put(
        out,
        "gen_ai.operation.name",
        next((o for end, o in _OPERATIONS.items() if request.route.endswith(end)), ""),
    )
    put(out, "gen_ai.response.model", clean(e.model, NAME_CHARS))
    put(out, "gen_ai.request.choice.count", int64(e.n) if e.n > 1 else 0)  # by convention only if it is not 1
    put(out, "gen_ai.usage.input_tokens", int64(e.prompt_tokens))
    put(out, "gen_ai.usage.output_tokens", int64(e.output_tokens))
    if e.prompt_tokens:  # else not known; with it, 0 is a figure
        out["gen_ai.usage.cache_read.input_tokens"] = int64(e.cached_tokens)
        out["whyspan.engine.preemptions"] = int64(e.preemptions)
        out["whyspan.engine.recomputed_tokens"] = int64(e.recomputed_tokens)
    put(out, "whyspan.engine.name", clean(e.engine, NAME_CHARS))
    put(out, "whyspan.engine.version", clean(e.version, NAME_CHARS))
    put(out, "whyspan.engine.state", clean(e.state, NAME_CHARS))
    put(out, "whyspan.engine.request_id", clean(e.request_id, NAME_CHARS))
    put(out, "whyspan.engine.pid", int64(e.core_tgid))
    put(out, "whyspan.engine.steps", int64(e.steps))
    put(out, "whyspan.engine.batch_size", int64(e.batch))
    put(out, "whyspan.engine.template", clean(e.template, NAME_CHARS))
    if e.kv_usage >= 0 and isfinite(e.kv_usage):
        out["whyspan.engine.kv_utilization"] = float(e.kv_usage)
    return out


def of_cause(finding: Finding, cause: str, mine: list[Segment]) -> Attributes:
    """Return what a root-cause span of either rank says; *mine* are the cause's segments, maybe none."""
    total_ns = sum(s.end_ns - s.start_ns for s in mine)
    out: Attributes = {
        "whyspan.cause": clean(cause, NAME_CHARS),
        "whyspan.time_ms": float(finding.causes.get(cause, total_ns / 1e6)),
        "whyspan.usual_ms": float(finding.baseline.get(cause, 0.0)),
        "whyspan.segments": len(mine),
        "whyspan.lost_events": int64(finding.lost_events),
    }
    if inferred_ns := sum(s.end_ns - s.start_ns for s in mine if s.inferred):
        out["whyspan.inferred_ratio"] = inferred_ns / total_ns
    if mine:
        longest = max(mine, key=lambda s: s.end_ns - s.start_ns)
        out["process.pid"] = int64(longest.tgid)
        out["thread.id"] = int64(longest.tid)
        put(out, "thread.name", clean(longest.thread, NAME_CHARS))
    return out | _of_code(finding, cause)


def _of_code(finding: Finding, cause: str) -> Attributes:
    """Return where most of a cause's time went, as far as it was sampled."""
    out: Attributes = {}
    stack = codetext.of_cause(finding, cause)
    if stack is None:
        return out
    top = stack.python[0]
    put(out, "code.function.name", clean(top.function, TEXT_CHARS))
    put(out, "code.file.path", clean(top.file, TEXT_CHARS))
    put(out, "code.line.number", int64(top.line))
    put(out, "whyspan.code.work", clean(stack.work, NAME_CHARS))
    put(
        out,
        "code.stacktrace",
        "\n".join(clean(line, TEXT_CHARS) for line in codetext.frames(stack)[:MAX_FRAMES]),
    )
    return out


def of_verdict(finding: Finding) -> Attributes:
    """Return what only the span of the verdict's cause says."""
    v = finding.verdict
    out: Attributes = {
        "whyspan.excess_ms": float(v.excess_ms),
        "whyspan.share": float(v.share),
        "whyspan.confidence": float(v.confidence),
    }
    put(out, "whyspan.sentence", clean(v.sentence, TEXT_CHARS))
    put(out, "whyspan.fix", clean(v.fix, TEXT_CHARS))
    ruled_out = [f"{r.cause}: {r.check}" for r in finding.ruled_out[:MAX_RULED_OUT]]
    put(out, "whyspan.ruled_out", [clean(text, TEXT_CHARS) for text in ruled_out])
    return out | of_culprit(v.culprit)


def of_culprit(culprit: Culprit) -> Attributes:
    """Return who did it; nothing where nobody is named."""
    out: Attributes = {}
    if not culprit.kind:
        return out
    for name in ("kind", "name", "detail", "trace_id", "span_id"):
        put(out, f"whyspan.culprit.{name}", clean(getattr(culprit, name), TEXT_CHARS))
    put(out, "whyspan.culprit.pid", int64(culprit.tgid))
    put(out, "whyspan.culprit.tid", int64(culprit.tid))
    return out


def of_segment(segment: Segment) -> Attributes:
    """Return the attributes of a ``whyspan.segment`` event."""
    out: Attributes = {
        "whyspan.duration_ms": (segment.end_ns - segment.start_ns) / 1e6,
        "whyspan.state": clean(segment.state, NAME_CHARS),
        "process.pid": int64(segment.tgid),
        "thread.id": int64(segment.tid),
    }
    put(out, "thread.name", clean(segment.thread, NAME_CHARS))
    put(out, "whyspan.detail", clean(segment.detail, TEXT_CHARS))
    return out


def evidence(verdict: Verdict, limit: int) -> list[str]:
    """Return at most *limit* lines of evidence."""
    return [clean(line, TEXT_CHARS) for line in verdict.evidence[:limit]]


def put(out: Attributes, name: str, value: Value) -> None:
    """Set an attribute unless its value is empty or 0, which means not known."""
    if value:
        out[name] = value


def _thread_name(segments: Iterable[Segment], tid: int) -> str:
    return next((clean(s.thread, NAME_CHARS) for s in segments if s.tid == tid and s.thread), "")
