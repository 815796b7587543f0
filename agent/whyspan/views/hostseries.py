"""Samples of the host as lines of a chart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from whyspan_exporters.metrics.states import number, table
from whyspan_exporters.recall import Sample
from whyspan_exporters.records import EXPORTER

from whyspan.pressure import RESOURCES
from whyspan.text import clean
from whyspan.views.shapes import Series
from whyspan.views.steps import Steps

_MAX_SERIES: Final = 60
_MAX_NAME: Final = 60


class _Line(NamedTuple):
    """Which series a value belongs to. ``per``: it is a total, and what is shown is its rise per s, so many of them."""

    key: str
    group: str
    label: str
    unit: str
    per: float = 0.0


def series(samples: Iterable[Sample], span: Steps) -> list[Series]:
    """Return the series of the samples, in the order in which they are first known; at most 60."""
    lines: dict[str, Series] = {}
    before: dict[tuple[str, str], tuple[int, float]] = {}  # of totals: when, and how much
    sampled: dict[str, int] = {}
    for s in samples:
        # What an agent told nothing of in the sample before was nothing then: the first of a total is its rise.
        unsaid = (sampled[s.instance], 0.0) if s.instance in sampled else None
        sampled[s.instance] = s.start_unix_ns
        step = (s.start_unix_ns - span.since_unix_ns) // span.step_ns
        if not 0 <= step < span.number:
            continue
        for line, told in _values(s):
            value = told
            if line.per:
                earlier = before.get((line.key, s.instance), unsaid)
                before[line.key, s.instance] = s.start_unix_ns, told
                if earlier is None or s.start_unix_ns <= earlier[0] or told < earlier[1]:
                    continue
                value = (told - earlier[1]) * line.per * 1e9 / (s.start_unix_ns - earlier[0])
            found = lines.get(line.key)
            if found is None:
                if len(lines) >= _MAX_SERIES:
                    continue
                found = lines[line.key] = Series(
                    key=line.key,
                    group=line.group,
                    label=line.label,
                    unit=line.unit,
                    values=[None] * span.number,
                )
            found.values[step] = value
    return list(lines.values())


def last(found: Sequence[Series], key: str) -> float | None:
    """Return the newest value of a series; None when it is not known."""
    values = next((s.values for s in found if s.key == key), [])
    return next((v for v in reversed(values) if v is not None), None)


def _values(s: Sample) -> Iterator[tuple[_Line, float]]:
    told = s.told
    if s.instance == EXPORTER:
        yield from _of(told, "cpu_s", _Line("agent:exporter", "cpu", "exporter", "cores", 1.0))
        return
    pressure = table(told, "pressure")
    for resource in RESOURCES:
        for kind in ("some", "full"):
            key = f"pressure:{resource}:{kind}"
            yield from _of(
                table(pressure, resource), kind, _Line(key, "pressure", f"{resource}, {kind}", "ratio")
            )
    totals = table(told, "totals")
    throttled = table(totals, "throttled_us")
    for service in throttled:
        name = clean(service, _MAX_NAME)
        yield from _of(throttled, service, _Line(f"throttled:{name}", "throttled", name, "ms/s", 1e-3))
    memory = table(told, "memory")
    yield from _of(memory, "available_bytes", _Line("memory:available", "memory", "available", "bytes"))
    yield from _of(told, "runnable", _Line("load:runnable", "load", "runnable threads", "count"))
    yield from _of(told, "cpus", _Line("load:cpus", "load", "CPUs", "count"))
    yield from _of(told, "open_requests", _Line("load:requests", "load", "open requests", "count"))
    yield from _of(told, "target_cores", _Line("cpu:watched", "cpu", "watched processes", "cores"))
    yield from _of(told, "cpu_s", _Line("agent:collector", "cpu", "collector", "cores", 1.0))
    yield from _of(told, "bpf_core_ratio", _Line("cpu:probes", "cpu", "probes", "cores"))
    probes = told.get("probes")
    for row in probes if isinstance(probes, list) else ():
        if isinstance(row, list) and len(row) == 3:
            name = clean(str(row[0]), _MAX_NAME)
            yield from _of({"v": row[2]}, "v", _Line(f"probe:{name}", "probes", name, "cores"))
    lost = table(totals, "lost_events")
    yield from _of(lost, "", _Line("losses:events", "losses", "events lost", "1/s", 1.0))
    yield from _of(
        told, "findings_dropped", _Line("losses:findings", "losses", "findings dropped", "1/s", 1.0)
    )


def _of(told: Mapping[str, Any], name: str, line: _Line) -> Iterator[tuple[_Line, float]]:
    value = number(told.get(name))
    if value is not None:
        yield line, value
