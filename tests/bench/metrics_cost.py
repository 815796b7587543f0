"""What metrics cost: ``python -m tests.bench.metrics_cost``. CPU time of one thread, the best of five rounds.

The collector's part is per request, with the look-up of its engine's model; the exporter's part is a snapshot, its
encoding for OTLP and its page for Prometheus, for one service and at every bound.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

from opentelemetry.sdk.resources import Resource
from whyspan import pressure
from whyspan.config import Objectives
from whyspan.engines import EngineTable, EngineView
from whyspan.facts import Facts
from whyspan.selfuse import rss_bytes
from whyspan.tally import BOUNDS_S, Tally
from whyspan_exporters.link import Count
from whyspan_exporters.metrics import http, openmetrics, otlp
from whyspan_exporters.metrics.figures import Figures
from whyspan_exporters.metrics.snapshot import take
from whyspan_exporters.records import Counts, Explained, Status, finding_id

from tests.unit.conftest import build_finding
from tests.unit.metrics.full import full_figures

_LONG = "x" * 64
_REQUESTS = 20_000


def _best_us(work: Callable[[], object], times: int) -> float:
    rounds = []
    for _ in range(5):
        at = time.thread_time_ns()
        for _ in range(times):
            work()
        rounds.append((time.thread_time_ns() - at) / times / 1e3)
    return min(rounds)


def _at_bounds() -> Figures:
    figures = Figures()
    zeros = [0] * len(BOUNDS_S)
    rows = [[f"{n}{_LONG}", _LONG, _LONG, False, [[1, *zeros]] * 3, [0.001] * 3] for n in range(64)]
    figures.add(Status("i", {"latencies": rows}))
    figures.add(Counts("i", [Count("request_codes", f"{n}{_LONG}", f"ok/{_LONG}", 1) for n in range(5000)]))
    for n in range(1100):
        f = build_finding(n, service=f"s{n % 20}", cause=f"c{n}.{_LONG}")
        figures.add(Explained(finding_id("i", f), 1, f))
    return figures


def _collector() -> None:
    tally, objectives, request = Tally(), Objectives(e2e_ms=100, ttft_ms=20), build_finding(1).request
    counting = _best_us(lambda: tally.add(request, objectives, "opt"), _REQUESTS)
    table, facts = EngineTable(60_000_000_000, frozenset()), Facts()
    model = _best_us(lambda: EngineView(table, request, facts).model.get("name", ""), _REQUESTS)
    print(f"a request: counted in {counting:.1f} us, its model looked up in {model:.1f} us")
    for n in range(100):
        tally.add(build_finding(1, service=f"s{n}").request, objectives, "opt")
    state = tally.state(0)
    size = len(json.dumps(state))
    print(
        f"the state with every series there can be: {_best_us(lambda: tally.state(0), 20):.0f} us, {size:,} bytes"
    )
    throttling = pressure.Throttling()
    look = _best_us(lambda: throttling.look([("a", "/x/y")]), 200)
    print(
        f"the host: pressure {_best_us(pressure.pressure, 200):.0f} us, one control group {look:.0f} us, every 2 s"
    )


def _exporter(name: str, figures: Figures) -> None:
    resource = Resource({"service.name": "whyspan"})
    taken = take(figures, 1)
    points = sum(len(f.points) for f in taken.families)
    payload, _ = otlp.encode(taken, resource)
    text, _ = openmetrics.render(taken, resource.attributes, "application/openmetrics-text")
    taking = _best_us(lambda: take(figures, 1), 3) / 1e3
    encoding = _best_us(lambda: otlp.encode(taken, resource), 3) / 1e3
    rendering = _best_us(lambda: openmetrics.render(taken, {}, "application/openmetrics-text"), 3) / 1e3
    packing = _best_us(lambda: http.pack(text), 3) / 1e3
    print(
        f"{name}, {points:,} series: snapshot {taking:.1f} ms, OTLP {encoding:.1f} ms and {len(payload):,} bytes, "
        f"OpenMetrics {rendering:.1f} ms and {len(text):,} bytes, packed in {packing:.1f} ms"
    )


def main() -> int:
    """Measure and print."""
    _collector()
    _exporter("one service", full_figures(build_finding))
    before = rss_bytes()
    figures = _at_bounds()
    print(f"figures at every bound: {(rss_bytes() - before) / (1 << 20):+.1f} MiB")
    _exporter("at every bound", figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
