"""The host: pressure, quotas, what the agent's probes cost and what was lost."""

from __future__ import annotations

from itertools import islice
from typing import Any, Final

from whyspan_exporters.metrics.states import number
from whyspan_exporters.reader import SILENT_S, Reader
from whyspan_exporters.records import EXPORTER

from whyspan.text import clean
from whyspan.views import hostseries
from whyspan.views.shapes import AgentUse, HostView, Named, ProbeCost, SinkState, WatchedService
from whyspan.views.steps import steps

_MAX_LISTED: Final = 200
_MAX_NAME: Final = 100
_MAX_TEXT: Final = 500
NO_GPUS: Final = "GPUs are not looked at yet: nothing of them is in the store"


def view(
    reader: Reader, since_unix_ns: int = 0, until_unix_ns: int = 0, step_ns: int = 0, now_unix_ns: int = 0
) -> HostView:
    """Return what is known of the host; for the arguments see `tail.view`.

    Raises:
        StoreError: The store cannot be read.
    """
    span = steps(since_unix_ns, until_unix_ns, now_unix_ns, step_ns)
    samples = reader.history.samples(span.since_unix_ns, span.until_unix_ns, span.step_ns)
    told_ns, told = reader.history.said()
    _, exporter = reader.history.said(EXPORTER)
    series = hostseries.series(samples, span)
    return HostView(
        running=bool(told_ns) and now_unix_ns - told_ns <= SILENT_S * 1e9,
        collector_unix_ms=told_ns / 1e6 if told_ns else None,
        step_ms=span.step_ns / 1e6,
        times_unix_ms=span.times_unix_ms,
        series=series,
        probes=_probes(told),
        agent=[
            _use("collector", told, hostseries.last(series, "agent:collector")),
            _use("exporter", exporter, hostseries.last(series, "agent:exporter")),
        ],
        losses=_losses(reader),
        sinks=_sinks(exporter),
        services=_services(told),
        gpus=[],
        gpu_state=NO_GPUS,
    )


def _probes(told: dict[str, Any]) -> list[ProbeCost]:
    return [
        ProbeCost(
            name=_text(p.get("name"), _MAX_NAME),
            title=_text(p.get("title"), _MAX_NAME),
            state=_text(p.get("state"), _MAX_NAME),
            reason=_text(p.get("reason")),
            hits_per_s=_number(p.get("hits_per_s")),
            ns_per_hit=_number(p.get("ns_per_hit")),
            core_ratio=_number(p.get("core_ratio")),
            events=int(_number(p.get("events"))),
            lost=int(_number(p.get("drops")) + _number(p.get("missed"))),
        )
        for p in _list(told.get("probes"))
        if isinstance(p, dict)
    ]


def _use(name: str, told: dict[str, Any], core_ratio: float | None) -> AgentUse:
    return AgentUse(
        name=name,
        tgid=int(_number(told.get("tgid"))),
        core_ratio=core_ratio,
        rss_bytes=int(_number(told.get("rss_bytes"))),
        uptime_s=_number(told.get("uptime_s")),
    )


def _losses(reader: Reader) -> list[Named]:
    out = [
        Named(name=f"events of {clean(label, _MAX_NAME)}", value=n)
        for (_, label), n in sorted(reader.counters("lost_events").items())
    ]
    dropped = sum(int(_number(state.get("findings_dropped"))) for state in reader.states())
    out.append(Named(name="findings on the way to the exporter", value=dropped))
    stored = sum(reader.counters("store_dropped").values())
    return [*out, Named(name="findings that the store had no room for", value=stored)][:_MAX_LISTED]


def _sinks(exporter: dict[str, Any]) -> list[SinkState]:
    sinks = exporter.get("sinks")
    out = []
    for name, told in islice(sinks.items(), _MAX_LISTED) if isinstance(sinks, dict) else ():
        details = told if isinstance(told, dict) else {}
        shown = {
            _text(key, _MAX_NAME): _text(value) if isinstance(value, str) else value
            for key, value in islice(details.items(), _MAX_LISTED)
            if key != "state" and isinstance(value, (str, int, float))
        }
        out.append(SinkState(name=_text(name, _MAX_NAME), state=_text(details.get("state")), details=shown))
    return out


def _services(told: dict[str, Any]) -> list[WatchedService]:
    watched, limits = told.get("watched_by_service"), told.get("cpu_limits")
    limits = limits if isinstance(limits, dict) else {}
    return [
        WatchedService(
            service=_text(name, _MAX_NAME),
            processes=int(_number(n)),
            cpu_limit=_number(limits[name]) if name in limits else None,
        )
        for name, n in (islice(watched.items(), _MAX_LISTED) if isinstance(watched, dict) else ())
    ]


def _list(value: Any) -> list[Any]:
    return value[:_MAX_LISTED] if isinstance(value, list) else []


def _text(value: Any, limit: int = _MAX_TEXT) -> str:
    return clean(value, limit) if isinstance(value, str) else ""


def _number(value: Any) -> float:
    return number(value) or 0.0
