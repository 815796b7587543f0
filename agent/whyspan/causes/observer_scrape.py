"""``observer.scrape``: a scrape of the server's own metrics was served on the thread that serves requests."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import pairwise
from statistics import median
from typing import Final

import numpy as np

from whyspan.causes.context import MS, Context
from whyspan.causes.during import During
from whyspan.causes.goes import ACTIVITY
from whyspan.causes.on_thread import OnThreadRule
from whyspan.model import Culprit, Request
from whyspan.syscalls import POLL

#: Paths on which metrics are served by custom. Source: Prometheus, vLLM, SGLang, llama.cpp, TGI, Triton, Spring.
ROUTES: Final = frozenset(
    {"/metrics", "/federate", "/actuator/prometheus", "/prometheus/metrics", "/-/metrics"}
)
#: Products that scrape, as their User-Agent begins.
SCRAPERS: Final = (
    "Prometheus",
    "OpenMetrics",
    "vm_promscrape",
    "VictoriaMetrics",
    "GrafanaAgent",
    "Grafana-Agent",
    "Alloy",
    "otelcol",
    "OpenTelemetry",
    "Datadog",
    "Telegraf",
    "Metricbeat",
)
#: Shorter ones are nothing to speak of. Source: CAUSES.md has a loop's go of 50 ms; an exposition is one of its goes.
MIN_SCRAPE_NS: Final = 5_000_000
_MAX_SCRAPES: Final = 64
_MAX_SENDS: Final = 64
_INTERVAL_NS: Final = 120_000_000_000


def is_scrape(request: Request) -> bool:
    """Return whether a request asks for metrics, by its path or by who asks."""
    return request.method in ("GET", "") and (
        request.route.rstrip("/") in ROUTES or request.agent.startswith(SCRAPERS)
    )


class _Scrape(OnThreadRule):
    id = "observer.scrape"
    title = "behind a scrape of the server's metrics on the thread that serves requests"
    neighbours = ("python.loop_blocked", "lock.contention", "python.gil")
    fix = (
        "Try a longer scrape interval, fewer label combinations, or the exposition in a thread or process of its own "
        "(multiprocess mode, a separate port)."
    )
    rank = 48
    events = ()
    nothing = "no scrape of metrics was served beside the request"

    def applies(self, ctx: Context) -> bool:
        """Return whether metrics were scraped beside the request."""
        return bool(_scrapes(ctx))

    def find(self, tid: int, tgid: int, ctx: Context) -> Iterable[During]:
        """Yield what the thread did, without looking at any other socket, before it wrote to a scrape's connection."""
        thread = ctx.timelines.thread(tid)
        marks: list[int] | None = None
        for scrape in _scrapes(ctx):
            if scrape.tgid != tgid:
                continue
            rows = ctx.timelines.keyed("sock_send", "key", scrape.cookie)
            begun, until = scrape.recv_ns or scrape.start_ns, scrape.end_ns or ctx.request.end_ns
            ts = rows["ts_ns"]
            mine = (rows["tid"] == tid) & (ts > np.uint64(begun)) & (ts <= np.uint64(until))
            for sent in ts[mine][:_MAX_SENDS].tolist():
                if marks is None:
                    marks = _marks(tid, ctx)
                i = bisect_left(marks, sent)
                start = max(marks[i - 1] if i else begun, begun)
                # A rest that ended since: it begins where it got a CPU.
                resumed = thread.next_in(start) if start in _rests(tid, ctx) else None
                start = max(start, resumed) if resumed is not None and resumed < sent else start
                if sent - start >= MIN_SCRAPE_NS:
                    yield During(start, sent, *self._who(scrape, sent - start, ctx))

    @staticmethod
    def _who(scrape: Request, ns: int, ctx: Context) -> tuple[str, Culprit]:
        every = _interval_ns(scrape, ctx)
        detail = f"{ns / MS:.0f} ms of exposition" + (f", every {every / 1e9:.1f} s" if every else "")
        detail += f", for {scrape.agent}" if scrape.agent else ""
        name = f"{scrape.method or 'GET'} {scrape.route}"
        return f"{name}: {detail}", Culprit(
            kind="request", name=name, tgid=scrape.tgid, detail=detail, trace_id=scrape.trace_id
        )


def _scrapes(ctx: Context) -> list[Request]:
    def look() -> list[Request]:
        r = ctx.request
        around = ctx.beside.around(r.service, r.start_ns, r.end_ns)
        mine = r.cookie, r.seq
        return [s for s in around if is_scrape(s) and (s.cookie, s.seq) != mine][:_MAX_SCRAPES]

    return ctx.memo("scrapes", look)


def _interval_ns(scrape: Request, ctx: Context) -> int:
    """How often the same metrics are asked for; 0 when it is the only time."""
    before = ctx.beside.arrived(scrape.service, scrape.start_ns - _INTERVAL_NS, scrape.start_ns)
    same = [s.start_ns for s in before if s.route == scrape.route and s.agent == scrape.agent]
    return int(median(b - a for a, b in pairwise(same))) if len(same) > 1 else 0


def _rests(tid: int, ctx: Context) -> frozenset[int]:
    return ctx.memo(("rests", tid), lambda: frozenset(ctx.timelines.thread(tid).poll_edges(POLL)[0]))


def _marks(tid: int, ctx: Context) -> list[int]:
    """Return when the thread rested in a polling call, or touched a socket or pipe, ascending."""
    rows = ctx.timelines.rows(tid)
    kinds = np.array([ctx.timelines.schema.kind(n) for n in ACTIVITY])
    found: list[int] = rows["ts_ns"][np.isin(rows["kind"], kinds)].tolist()
    return sorted({*found, *_rests(tid, ctx)})


RULE = _Scrape()
