"""What a glance at a host shows: services, the tail by cause, the newest slow requests."""

from __future__ import annotations

from typing import Final, NamedTuple

from whyspan_exporters.filters import Filter
from whyspan_exporters.listed import Listed
from whyspan_exporters.reader import Reader

from whyspan import objectives

_SERVICES: Final = 20
_CAUSES: Final = 12
_S: Final = 1_000_000_000


class ServiceLine(NamedTuple):
    """A service in the window. Times in ms, of all requests; None where none was counted."""

    service: str
    requests: int
    per_s: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    latency_p99_ms: float | None
    slow: int
    failed: int
    cause: str  # with most excess; empty: none


class CauseLine(NamedTuple):
    """A cause in the window: the slow and failed requests that it had, and their excess in ms."""

    cause: str
    requests: int
    excess_ms: float


class Glance(NamedTuple):
    """All of it. ``running``: a collector has told of itself within the last 30 s."""

    now_unix_ns: int
    running: bool
    services: list[ServiceLine]  # most requests first
    causes: list[CauseLine]  # most excess first
    rows: list[Listed]  # newest first


def glance(reader: Reader, now_unix_ns: int, window_s: int, service: str = "", limit: int = 100) -> Glance:
    """Return what is to be seen of the *window_s* before *now_unix_ns*.

    Args:
        reader: Of the store.
        now_unix_ns: The end of the window.
        window_s: How long it is.
        service: Causes and requests only of this one; empty: of all.
        limit: Requests at most, of any time.

    Raises:
        StoreError: The store cannot be read.
    """
    since = now_unix_ns - window_s * _S
    until = now_unix_ns + _S
    names = reader.history.services(since, until)
    names += [s for s in reader.requests.services(since) if s not in names]
    return Glance(
        now_unix_ns=now_unix_ns,
        running=bool(reader.status()),
        services=[_service(reader, name, since, until, window_s) for name in names[:_SERVICES]],
        causes=_causes(
            reader, Filter(service=service, since_unix_ns=since, until_unix_ns=until), until - since
        ),
        rows=reader.requests.page(Filter(service=service), limit=limit, count=False).rows,
    )


def _service(reader: Reader, name: str, since: int, until: int, window_s: int) -> ServiceLine:
    wanted = Filter(service=name, since_unix_ns=since, until_unix_ns=until)
    slow, failed = reader.requests.totals(wanted)
    causes = _causes(reader, wanted, until - since)
    counted = next(iter(reader.history.requests(since, until, until - since, name).values()), None)
    if counted is None:
        return ServiceLine(name, 0, 0.0, None, None, None, slow, failed, causes[0].cause if causes else "")
    return ServiceLine(
        name,
        counted.requests,
        counted.requests / window_s,
        objectives.quantile_ms(counted.ttft, 0.5),
        objectives.quantile_ms(counted.ttft, 0.99),
        objectives.quantile_ms(counted.latency, 0.99),
        slow,
        counted.failed,
        causes[0].cause if causes else "",
    )


def _causes(reader: Reader, wanted: Filter, step_ns: int) -> list[CauseLine]:
    found = [CauseLine(cause, n, ms) for _, cause, n, ms in reader.requests.by_step(wanted, step_ns)]
    return sorted(found, key=lambda c: (-c.excess_ms, -c.requests, c.cause))[:_CAUSES]
