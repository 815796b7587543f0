"""Metrics of the host: pressure as the kernel tells it, and what control groups keep the watched servers from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from whyspan_exporters.metrics.figures import Figures, label, number, table
from whyspan_exporters.metrics.instrument import (
    SERVICE,
    Instrument,
    Point,
    Read,
    counter,
    gauge,
    totals,
    updown,
)

_RESOURCE: Final = "whyspan.resource"
_PRESSURE: Final = "whyspan.pressure"
_RESOURCES: Final = ("cpu", "memory", "io")
_KINDS: Final = ("some", "full")
#: Why a metric of GPUs has no values yet.
ON_GPUS: Final = "designed for GPU hosts, not filled yet"


def _pressure(figures: Figures) -> Iterator[Point]:
    found = table(figures.collector(), "pressure")
    for resource in _RESOURCES:
        for kind in _KINDS:
            if (value := number(table(found, resource).get(kind))) is not None:
                yield Point(value, {_RESOURCE: resource, _PRESSURE: kind})


def _limits(figures: Figures) -> Iterator[Point]:
    for service, value in table(figures.collector(), "cpu_limits").items():
        if (cpus := number(value)) is not None:
            yield Point(cpus, {SERVICE: label(str(service))})


def _nothing(_: Figures) -> Iterator[Point]:
    yield from ()


def _gpu(make: str, name: str, unit: str, description: str, *attributes: str) -> Instrument:
    read: Read = _nothing
    if make == "updown":
        return updown(name, unit, description, read, "hw.id", *attributes, only=ON_GPUS)
    return gauge(name, unit, description, read, "hw.id", *attributes, whole=False, only=ON_GPUS)


INSTRUMENTS: Final[tuple[Instrument, ...]] = (
    gauge(
        "whyspan.host.pressure",
        "1",
        "Share of the last 10 s in which tasks waited for a resource (PSI). Absent where the kernel does not tell.",
        _pressure,
        _RESOURCE,
        _PRESSURE,
        whole=False,
    ),
    counter(
        "whyspan.host.throttled.time",
        "s",
        "Time for which CPU quotas kept the control groups of watched processes from running, summed over CPUs.",
        totals("throttled_us", SERVICE, "", 1e-6),
        SERVICE,
        whole=False,
    ),
    gauge(
        "whyspan.host.cpu.limit",
        "{cpu}",
        "CPUs that the quotas of its control groups leave a service; absent where there is none.",
        _limits,
        SERVICE,
        whole=False,
    ),
    _gpu("gauge", "hw.gpu.utilization", "1", "Share of time in which the GPU was busy.", "hw.gpu.task"),
    _gpu("gauge", "hw.gpu.memory.utilization", "1", "Share of the GPU's memory in use."),
    _gpu("updown", "hw.gpu.memory.usage", "By", "Memory of the GPU in use."),
    _gpu("updown", "hw.gpu.memory.limit", "By", "Memory of the GPU."),
    _gpu("gauge", "whyspan.gpu.fragmentation", "1", "Share of the reserved memory that no allocation uses."),
)
