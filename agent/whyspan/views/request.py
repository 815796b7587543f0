"""One request: its timeline, why it was slow, and where to look further."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, Final

import msgspec
from whyspan_exporters import listed, schema
from whyspan_exporters.metrics.states import number
from whyspan_exporters.reader import Reader, Stored
from whyspan_exporters.recall import Sample
from whyspan_exporters.records import EXPORTER

from whyspan import codetext, text
from whyspan.causes import rules
from whyspan.model import FAILED, Culprit, Finding, RuledOut
from whyspan.views import code, lanes, links, requests
from whyspan.views.shapes import (
    CauseBar,
    CulpritView,
    OtherCause,
    ProcessView,
    RequestFacts,
    RequestView,
    RuledOutView,
    VerdictView,
)

#: Characters of a text.
_MAX_TEXT: Final = 1000
#: ms of a cause from which on it is worth saying why it is not the one.
_NEAR_MS: Final = 1.0


def find(reader: Reader, name: str, *, trace_url: str = "", runbook_url: str = "") -> RequestView | None:
    """Return the request with the store's id *name*; None when there is none.

    Args:
        reader: The store.
        name: As in `Row.id`.
        trace_url: Where a trace is looked at, with ``{trace_id}``; empty: no link.
        runbook_url: Where runbooks are, with ``{runbook}``; empty: where this whyspan's are.

    Raises:
        StoreError: The store cannot be read.
    """
    stored = reader.get(name)
    if stored is None:
        return None
    out = view(stored, host(reader, stored), trace_url=trace_url, runbook_url=runbook_url)
    out.links += links.neighbours(reader, stored)
    return out


def host(reader: Reader, stored: Stored) -> list[Sample]:
    """Return what was known of the host during a request.

    Raises:
        StoreError: The store cannot be read.
    """
    since = stored.start_unix_ns - schema.SLOT_NS
    until = stored.start_unix_ns + stored.finding.wall_ns
    found = reader.history.samples(since, until, schema.SLOT_NS)
    return [s for s in found if s.instance != EXPORTER]


def view(
    stored: Stored, samples: Iterable[Sample] = (), *, trace_url: str = "", runbook_url: str = ""
) -> RequestView:
    """Return a request as it is shown. *samples* are of the host, during it."""
    f = stored.finding
    r = f.request
    known = list(samples)
    clean = cache(_clean)  # a few texts are those of 50,000 pieces
    on_threads, path = lanes.threads(f, clean)
    before = lanes.phases(f, clean)
    counters = [*lanes.steps(f), *lanes.pressure(known, stored.start_unix_ns, f.wall_ns)]
    judged = f.slow or r.outcome in FAILED
    return RequestView(
        row=requests.row(listed.of(stored.id, stored.start_unix_ns, f)),
        request=_facts(f),
        wall_ns=f.wall_ns,
        accounted_ns=f.accounted_ns,
        lost_events=f.lost_events,
        first_ns=r.first_ns - r.start_ns if r.first_ns else None,
        lanes=[*before, *on_threads, *counters],
        path=[(lane + len(before), piece) for lane, piece in path],
        causes=_bars(f),
        baseline_count=f.baseline_count if f.baseline else 0,
        verdict=_verdict(f, judged),
        ruled_out=_ruled_out(f),
        process=_process(f),
        engine=_engine(f),
        code=code.view(f, known),
        links=links.elsewhere(f, judged, trace_url, runbook_url),
    )


def nearest(finding: Finding) -> tuple[list[RuledOut], list[RuledOut]]:
    """Part what was ruled out: what is easily mixed up with the cause found, or took time; and all else."""
    close = next((r.neighbours for r in rules() if r.id == finding.verdict.cause), ())
    near, far = list[RuledOut](), list[RuledOut]()
    for r in finding.ruled_out:
        is_near = r.cause in close or finding.causes.get(r.cause, 0.0) >= _NEAR_MS
        (near if is_near else far).append(r)
    return near, far


def _clean(value: str) -> str:
    return text.clean(value, _MAX_TEXT)


def _number(value: float) -> float:
    return number(value) or 0.0  # JSON has neither NaN nor infinity


def _facts(f: Finding) -> RequestFacts:
    r = f.request
    return RequestFacts(
        request_id=_clean(r.request_id),
        trace_id_source=_clean(r.trace_id_source),
        ended_by=_clean(r.ended_by),
        slow_reason=_clean(f.slow_reason),
        head=_clean(r.head),
        chunks=r.chunks,
        request_bytes=r.request_bytes,
        response_bytes=r.response_bytes,
        client_port=r.client_port,
        server_port=r.server_port,
        agent=_clean(r.agent),
        attempt=r.attempt,
        client_wait_ns=r.client_wait_ns,
    )


def _bars(f: Finding) -> list[CauseBar]:
    out = []
    causes = {cause: _number(ms) for cause, ms in f.causes.items()}
    for cause in sorted(causes, key=lambda c: (-causes[c], c)):
        ms = causes[cause]
        usual = _number(f.baseline.get(cause, 0.0)) if f.baseline else None
        excess = max(ms - usual, 0.0) if usual is not None else 0.0
        out.append(CauseBar(cause=_clean(cause), ms=ms, usual_ms=usual, excess_ms=excess))
    return out


def _verdict(f: Finding, judged: bool) -> VerdictView:
    v = f.verdict
    sentence = _clean(v.sentence) or f"The cause is {_clean(v.cause)}."
    return VerdictView(
        sentence=sentence if judged else "",
        cause=_clean(v.cause) if judged else "",
        excess_ms=_number(v.excess_ms),
        share=_number(v.share),
        confidence=_number(v.confidence),
        culprit=_culprit(v.culprit),
        evidence=[_clean(line) for line in v.evidence],
        fix=_clean(v.fix),
        others=[
            OtherCause(
                cause=_clean(o.cause),
                excess_ms=_number(o.excess_ms),
                share=_number(o.share),
                culprit=_culprit(o.culprit),
            )
            for o in v.others
        ],
        code=_clean(codetext.line(v.code)) if judged and v.code is not None else "",
    )


def _culprit(c: Culprit) -> CulpritView:
    return CulpritView(
        kind=_clean(c.kind),
        name=_clean(c.name),
        tgid=c.tgid,
        tid=c.tid,
        detail=_clean(c.detail),
        trace_id=_clean(c.trace_id),
    )


def _ruled_out(f: Finding) -> list[RuledOutView]:
    near, far = nearest(f)
    return [
        RuledOutView(cause=_clean(r.cause), check=_clean(r.check), near=close)
        for rows, close in ((near, True), (far, False))
        for r in rows
    ]


def _process(f: Finding) -> ProcessView | None:
    p = f.process
    if p is None:
        return None
    return ProcessView(
        tgid=p.tgid,
        comm=_clean(p.comm),
        exe=_clean(p.exe),
        service=_clean(p.service),
        cgroup=_clean(p.cgroup),
        cpus_allowed=p.cpus_allowed,
        cpu_count=p.cpu_count,
        vpid=p.vpid,
        container_id=_clean(p.container_id),
        pod_uid=_clean(p.pod_uid),
    )


def _engine(f: Finding) -> dict[str, Any] | None:
    e = f.engine
    if e is None or (e.server_span_id and not e.core_tgid):  # no more than a span is known
        return None
    found = msgspec.to_builtins(msgspec.structs.replace(e, step_times=[]))
    del found["step_times"]
    shown = {name: _clean(value) if isinstance(value, str) else value for name, value in found.items()}
    return {name: _number(value) if isinstance(value, float) else value for name, value in shown.items()}
