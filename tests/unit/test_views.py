"""What is shown of requests: lanes and path that tile them, the verdict, the tail by cause; what is in the store."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from whyspan.model import Culprit, EngineFacts, Finding, Ranked, RuledOut, StepTime
from whyspan.views import host, hostseries, lanes, request, requests, shapes, tail
from whyspan.views import links as further
from whyspan.views.steps import Steps, steps
from whyspan_exporters.filters import Filter
from whyspan_exporters.reader import Reader, Stored
from whyspan_exporters.recall import Sample
from whyspan_exporters.records import Explained, Status
from whyspan_exporters.store import Store

from tests.unit import viewlab
from tests.unit.test_history import Clock, Collector
from tests.unit.test_listing import downgrade
from tests.unit.viewcases import EVIL

MakeFinding = Callable[..., Finding]
S = 1_000_000_000
NOW = 1_800_000_000 * S
HOUR = 3600 * S


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> viewlab.Written:
    path = tmp_path_factory.mktemp("views") / "s.db"
    return viewlab.build(path, 60, hours=0.5, now_unix_ns=NOW, big_segments=2000, evil=True)


@pytest.fixture(scope="module")
def reader(lab: viewlab.Written) -> Iterator[Reader]:
    opened = Reader(lab.path)
    yield opened
    opened.close()


def stored(finding: Finding) -> Stored:
    return Stored("i-1", NOW, finding)


def texts(value: Any) -> Iterator[str]:
    """Yield all texts of what is JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts(item)


def shown(view: msgspec.Struct) -> Any:
    """Return *view* as a browser has it, and that it is of the shape it says."""
    sent = msgspec.json.encode(view)
    assert msgspec.json.decode(sent, type=type(view)) == view
    return msgspec.json.decode(sent)


def test_the_path_tiles_the_request_over_lanes_in_order(reader: Reader, lab: viewlab.Written) -> None:
    found = reader.requests.page(Filter(ordinary=True), limit=1000).rows
    assert {lab.big, *lab.hostile} < {r.id for r in found}
    assert len(found) == 60 + 1 + len(EVIL)
    for row in found:
        view = request.find(reader, row.id)
        assert view is not None
        sent = shown(view)
        at = 0
        visited: list[int] = []
        for lane, piece in view.path:
            p = view.lanes[lane].spans[piece]
            assert (p.start_ns, view.lanes[lane].kind) == (at, "thread")
            assert p.end_ns > p.start_ns
            at = p.end_ns
            visited += [lane] * (lane not in visited)
        assert at == view.wall_ns
        kinds = [lane.kind for lane in view.lanes]
        assert kinds == sorted(kinds, key=["phase", "thread", "steps", "gpu", "counter"].index)
        assert visited == [i for i, kind in enumerate(kinds) if kind == "thread"]
        assert len(view.path) == sum(len(lane.spans) for lane in view.lanes if lane.kind == "thread")
        assert len({lane.key for lane in view.lanes}) == len(view.lanes)
        for lane_view in view.lanes:
            ends = [0] + [p.end_ns for p in lane_view.spans]
            assert all(p.start_ns >= end for p, end in zip(lane_view.spans, ends, strict=False))
            assert ends[-1] <= view.wall_ns
            times = [at for at, _ in lane_view.points]
            assert times == sorted(set(times))
            assert all(0 <= at < view.wall_ns for at in times)
        # Nothing that a terminal or a text's direction would obey; a row has what was sent, to filter by.
        del sent["row"]
        assert all(text.isprintable() for text in texts(sent))
        assert all(len(text) <= 2000 for text in texts(sent))


def test_a_request_is_shown_as_it_was_found(make_finding: MakeFinding) -> None:
    f = make_finding(1, request_id="req-1", tenant="acme")
    f.ruled_out = [RuledOut("io.log_blocked", "far"), RuledOut("cpu.runqueue", "near")]
    f.verdict.others = [Ranked(cause="python.gc", excess_ms=2.0, share=0.1, culprit=Culprit(name="x"))]
    view = request.view(
        stored(f), trace_url="https://tempo/trace/{trace_id}?x=1", runbook_url="/books/{runbook}"
    )
    assert [lane.key for lane in view.lanes] == ["phases", "tid:100", "tid:101", "tid:102"]
    parts = [(p.start_ns, p.end_ns, p.state) for p in view.lanes[0].spans]  # the engine told of none
    assert parts == [(0, 40_000_000, "ttft"), (40_000_000, 100_000_000, "stream")]
    assert view.lanes[2].label == "worker-1"
    assert view.lanes[2].spans == [
        shapes.Piece(33_333_333, 66_666_666, "throttled", "cpu.throttled", "quota 20 ms of 100 ms", False)
    ]
    assert msgspec.json.encode(view.lanes[2].spans[0]).startswith(b"[33333333,66666666,")
    assert (view.wall_ns, view.accounted_ns, view.first_ns) == (100_000_000, 100_000_000, 40_000_000)
    assert [(c.cause, c.ms, c.usual_ms, round(c.excess_ms, 3)) for c in view.causes] == [
        ("cpu.throttled", 33.4, 0.0, 33.4),
        ("work.cpu", 33.3, 30.0, 3.3),
        ("work.timer", 33.3, 33.0, 0.3),
    ]
    assert view.baseline_count == 50
    assert (view.verdict.sentence, view.verdict.share) == (f.verdict.sentence, 0.91)
    assert (view.verdict.culprit.kind, view.verdict.culprit.tid) == ("cgroup", 8)
    assert view.verdict.others[0].culprit.name == "x"
    assert [(r.cause, r.near) for r in view.ruled_out] == [("cpu.runqueue", True), ("io.log_blocked", False)]
    assert (view.request.request_id, view.row.tenant, view.row.cause) == ("req-1", "acme", "cpu.throttled")
    assert [(link.kind, link.href) for link in view.links] == [
        ("trace", f"https://tempo/trace/{1:032x}?x=1"),
        ("runbook", "/books/throttled"),
    ]
    assert (view.process, view.engine) == (None, None)


def test_an_ordinary_request_has_no_verdict_and_without_a_baseline_nothing_is_usual(
    make_finding: MakeFinding,
) -> None:
    f = make_finding(1, slow=False, first_ns=0)
    f.baseline = {}
    view = request.view(stored(f))
    assert (view.verdict.cause, view.verdict.sentence, view.row.cause) == ("", "", "")
    assert [(c.usual_ms, c.excess_ms) for c in view.causes] == [(None, 0.0)] * 3
    assert (view.baseline_count, view.first_ns, view.row.ttft_ms, view.links) == (0, None, None, [])
    failed = make_finding(2, slow=False, outcome="reset")
    failed.verdict.sentence = "Cut off after 100 ms."
    assert request.view(stored(failed)).verdict.sentence == "Cut off after 100 ms."


def test_links_lead_to_traces_and_neighbours_that_are_there(
    tmp_path: Path, make_finding: MakeFinding
) -> None:
    neighbour = make_finding(2, trace_id="c" * 32)
    guilty = make_finding(1, trace_id="javascript:alert(1)//0000000000000")
    guilty.verdict.culprit = Culprit(kind="request", name="req-2", trace_id="c" * 32)
    guilty.verdict.others = [
        Ranked(cause="engine.queueing", excess_ms=1, share=0, culprit=Culprit(kind="request", trace_id=trace))
        for trace in ("d" * 32, "c" * 32, "' OR 1=1", "")
    ]
    path = tmp_path / "s.db"
    store = Store(path, max_age_ns=10**18, max_bytes=64 << 20, now=lambda: NOW)
    store.emit([Explained("i-1", NOW, guilty), Explained("i-2", NOW, neighbour)])
    store.close()
    reader = Reader(path)
    view = request.find(reader, "i-1", trace_url="https://t/{trace_id}")
    assert view is not None
    links = [(link.kind, link.href) for link in view.links]
    assert links == [("runbook", further.RUNBOOKS.replace("{runbook}", "throttled")), ("request", "i-2")]
    assert request.find(reader, "../../etc/passwd") is None
    reader.close()


def test_every_cause_has_a_runbook_that_is_there() -> None:
    from whyspan.causes import rules

    books = {p.stem for p in (Path(__file__).parents[2] / "docs/runbooks").glob("*.md")}
    for rule in rules():
        f = viewlab.finding(1, Random(1))
        f.verdict.cause = rule.id
        (link,) = request.view(stored(f), runbook_url="{runbook}").links
        assert link.href in books


def test_steps_that_overlap_are_shown_one_after_the_other(make_finding: MakeFinding) -> None:
    f = make_finding(1)
    start = f.request.start_ns
    ms = 1_000_000
    times = [
        StepTime(start - 5 * ms, start + 10 * ms, 3, 40, 0.5, mine=False),
        StepTime(start + 5 * ms, start + 20 * ms, 4, 600, 0.5, 7),
        StepTime(start + 6 * ms, start + 18 * ms, 4, 4, 0.75),
        StepTime(start + 90 * ms, start + 200 * ms, 4, 4),
    ]
    f.engine = EngineFacts(core_tgid=7, step_times=times, model="\u202em")
    view = request.view(stored(f))
    by_key = {lane.key: lane for lane in view.lanes}
    assert [(p.start_ns // ms, p.end_ns // ms, p.state, p.detail) for p in by_key["steps"].spans] == [
        (0, 10, "others' step", "batch 3, 40 tokens"),
        (10, 20, "step", "7 steps, batch 4, 600 tokens"),
        (90, 100, "step", "batch 4, 4 tokens"),
    ]
    assert by_key["kv"].points == [(0, 0.5), (6 * ms, 0.75)]
    assert by_key["batch"].points == [(0, 3.0), (5 * ms, 4.0)]
    assert view.engine is not None
    assert (view.engine["core_tgid"], view.engine["model"], "step_times" in view.engine) == (
        7,
        "\\u202em",
        False,
    )


def test_pressure_of_the_host_is_of_the_time_of_the_request() -> None:
    def sample(at_s: int, told: Any) -> Sample:
        return Sample(NOW + at_s * S, "i", {"pressure": told})

    found = lanes.pressure(
        [
            sample(-20, {"cpu": {"some": 0.9}}),
            sample(-8, {"cpu": {"some": 0.25, "full": 1.0}, "io": {"some": "much"}}),
            sample(2, {"cpu": {"some": 0.25}}),
            sample(12, {"cpu": {"some": 0.5}, "memory": 3}),
            sample(22, "none"),
            sample(40, {"cpu": {"some": 0.75}}),
        ],
        NOW,
        30 * S,
    )
    assert [(lane.key, lane.points) for lane in found] == [("pressure:cpu", [(0, 0.25), (12 * S, 0.5)])]


@settings(deadline=None)
@given(
    since=st.one_of(st.just(0), st.integers(NOW - 400 * 86_400 * S, NOW + HOUR), st.integers(1, NOW)),
    until=st.one_of(st.just(0), st.integers(NOW - 400 * 86_400 * S, NOW + HOUR)),
    step=st.one_of(st.just(0), st.integers(1, 86_400 * S)),
)
def test_steps_cover_any_span(since: int, until: int, step: int) -> None:
    found = steps(since, until, NOW, step)
    end = min(until or NOW, NOW)
    assert 1 <= found.number <= shapes.MAX_POINTS
    assert found.step_ns % (10 * S) == found.since_unix_ns % found.step_ns == 0
    assert found.step_ns >= step
    assert found.since_unix_ns <= (since or end - HOUR)
    assert end <= found.until_unix_ns
    if since and since < end:
        assert found.since_unix_ns + found.step_ns > since
        assert found.until_unix_ns < end + found.step_ns
    assert len(found.times_unix_ms) == found.number
    if found.since_unix_ns < NOW - 86_400 * S:
        assert found.step_ns >= 300 * S


def test_the_tail_adds_up(tmp_path: Path, make_finding: MakeFinding) -> None:
    path, clock = tmp_path / "s.db", Clock()
    store, collector = Store(path, max_age_ns=10**18, max_bytes=64 << 20, now=clock), Collector(make_finding)
    start = NOW // (60 * S) * 60 * S
    clock.now = start - 10 * S
    collector.tell(store)
    assert store.flush() == ""
    clock.now = start + 5 * S
    collector.serve(99, 40.0)
    collector.serve(1, 4000.0)
    collector.serve(10, 200.0, "embed", status=500)
    collector.tell(store)
    causes = [f"cpu.c{n}" for n in range(11)] + ["unknown"]
    for n, cause in enumerate(causes):
        f = make_finding(n, cause=cause)
        f.wall_ns, f.verdict.excess_ms = 40_000_000, 100.0 - n
        store.emit([Explained(f"i-{n}", start + n * S, f)])
    failed = make_finding(50, slow=False, outcome="error", service="embed")
    store.emit(
        [Explained("i-f", start + 70 * S, failed), Explained("i-o", start, make_finding(51, slow=False))]
    )
    assert store.flush() == ""
    store.close()
    reader = Reader(path)
    view = tail.view(
        reader, since_unix_ns=start, until_unix_ns=start + 120 * S, step_ns=60 * S, now_unix_ns=start + HOUR
    )
    shown(view)
    assert view.times_unix_ms == [start / 1e6, (start + 60 * S) / 1e6]
    assert view.counts == [110, 0]
    assert view.quantiles["p50"][0] == pytest.approx(40, abs=10)
    assert view.quantiles["p90"][0] == pytest.approx(50, abs=1)
    assert view.quantiles["p99"][0] == pytest.approx(200, abs=50)
    assert view.quantiles["p99"][1] is None
    assert [*view.by_cause] == [*causes[:8], "other", "unknown"]
    assert view.by_cause["cpu.c0"] == [100.0, 0.0]
    assert view.by_cause["other"] == [92.0 + 91.0 + 90.0, 0.0]
    assert view.by_cause["unknown"] == [89.0, 0.0]
    assert view.by_cause_requests["other"] == [3, 0]
    assert view.by_cause_requests["unknown"] == [1, 1]
    by_bin = {b.upper_ms: b for b in view.histogram}
    assert by_bin[50.0].requests == 99
    assert by_bin[50.0].slow_by_cause == {**dict.fromkeys(causes[:8], 1), "other": 3, "unknown": 1}
    assert (by_bin[100.0].requests, by_bin[100.0].slow_by_cause) == (1, {"unknown": 1})
    assert by_bin[5000.0].requests == 1
    assert view.histogram[-1].upper_ms is None
    assert (view.requests, view.slow, view.failed, view.partial) == (110, 12, 10, False)
    assert view.services == ["chat", "embed"]
    one = tail.view(reader, "embed", start, start + 120 * S, 60 * S, start + HOUR)
    assert (one.requests, one.slow, one.failed, one.counts) == (10, 0, 10, [10, 0])
    assert [*one.by_cause] == ["unknown"]
    assert tail.view(reader, since_unix_ns=start - HOUR, now_unix_ns=start + HOUR).partial
    nobody = tail.view(reader, "'; DROP TABLE intervals", start, start + 120 * S, 0, start + HOUR)
    assert (nobody.requests, nobody.by_cause) == (0, {})
    reader.close()


def test_the_host_over_time(tmp_path: Path) -> None:
    path, clock = tmp_path / "s.db", Clock()
    store = Store(path, max_age_ns=10**18, max_bytes=64 << 20, now=clock)
    start = NOW // (60 * S) * 60 * S
    from whyspan_exporters.link import Count
    from whyspan_exporters.records import EXPORTER, Counts

    for n, total in enumerate((5, 25, 3, 13)):  # the third is of a collector that began anew
        clock.now = start + n * 10 * S
        instance = "a" if n < 2 else "b"
        counts = [Count("throttled_us", "chat", "", total * 1000), Count("lost_events", "", "futex", total)]
        probe = {
            "name": "futex",
            "title": "locks",
            "state": "attached",
            "hits_per_s": 10.0,
            "ns_per_hit": 5.0,
        }
        told = {
            "runnable": n,
            "cpus": 4,
            "memory": {"available_bytes": 7},
            "pressure": {"io": {"full": 0.5}},
            "cpu_s": total / 10,
            "tgid": 9,
            "rss_bytes": 11,
            "uptime_s": 3.0,
            "findings_dropped": 2,
            "watched_by_service": {"chat": 2, "\x1b[2J": 1},
            "cpu_limits": {"chat": 1.5},
            "probes": [{**probe, "core_ratio": 0.25, "events": 4, "drops": 1, "missed": 2}, 7],
        }
        store.emit([Counts(instance, counts), Status(instance, told)])
        store.emit(
            [Status(EXPORTER, {"sinks": {"otlp": {"state": "refused", "bytes": 5, "odd": []}}, "cpu_s": n})]
        )
        assert store.flush() == ""
    store.close()
    reader = Reader(path)
    view = host.view(reader, start, 0, 0, now_unix_ns=clock.now + 9 * S)
    shown(view)
    assert (view.running, view.collector_unix_ms, view.step_ms) == (True, clock.now / 1e6, 10_000.0)
    lines = {s.key: s for s in view.series}
    assert lines["load:runnable"].values == [0, 1, 2, 3]
    assert lines["pressure:io:full"].values == [0.5] * 4
    assert lines["memory:available"].values == [7] * 4
    assert lines["throttled:chat"].values == [None, 2.0, None, 1.0]
    assert lines["losses:events"].values == [None, 2.0, None, 1.0]
    assert lines["agent:collector"].values == pytest.approx([None, 0.2, None, 0.1])
    assert lines["agent:exporter"].values == pytest.approx([None, 0.1, 0.1, 0.1])
    assert lines["probe:futex"].values == [0.25] * 4
    (cost,) = view.probes
    assert (cost.name, cost.hits_per_s, cost.core_ratio, cost.lost) == ("futex", 10.0, 0.25, 3)
    assert [(u.name, u.tgid, u.rss_bytes) for u in view.agent] == [("collector", 9, 11), ("exporter", 0, 0)]
    assert [u.core_ratio for u in view.agent] == pytest.approx([0.1, 0.1])
    assert {n.name: n.value for n in view.losses} == {
        "events of futex": 25 + 13,
        "findings on the way to the exporter": 4,
        "findings that the store had no room for": 0,
    }
    assert [(s.name, s.state, s.details) for s in view.sinks] == [("otlp", "refused", {"bytes": 5})]
    assert [(s.service, s.processes, s.cpu_limit) for s in view.services] == [
        ("chat", 2, 1.5),
        ("\\x1b[2J", 1, None),
    ]
    assert (view.gpus, view.gpu_state) == ([], host.NO_GPUS)
    assert not host.view(reader, start, 0, 0, now_unix_ns=clock.now + 31 * S).running
    reader.close()


def test_a_total_that_begins_has_risen_from_nothing() -> None:
    told = [
        {},
        {"totals": {"throttled_us": {"chat": 20_000}}},
        {"totals": {"throttled_us": {"chat": 50_000}}},
    ]
    for first, values in (
        (0, [None, 2.0, 3.0]),
        (1, [None, None, 3.0]),
    ):  # how much had been before is not known
        samples = [Sample(n * 10 * S, "a", told[n]) for n in range(first, 3)]
        (line,) = hostseries.series(samples, Steps(0, 10 * S, 3))
        assert (line.key, line.values) == ("throttled:chat", values)


def test_an_empty_store_and_one_of_before_show_that_nothing_is_known(
    tmp_path: Path, make_finding: MakeFinding
) -> None:
    path = tmp_path / "s.db"
    store = Store(path, max_age_ns=10**18, max_bytes=64 << 20, now=lambda: NOW)

    def look() -> tuple[shapes.TailView, shapes.HostView]:
        reader = Reader(path)
        found = tail.view(reader, now_unix_ns=NOW), host.view(reader, now_unix_ns=NOW)
        assert requests.page(reader, Filter(cause="gpu")) == shapes.Page(rows=[], total=0, next="")
        assert requests.facets(reader, Filter(cause="gpu")).routes == []
        reader.close()
        for view in found:
            shown(view)
        return found

    empty, nothing = look()
    assert (empty.requests, empty.by_cause, empty.partial, empty.services) == (0, {}, True, [])
    assert (nothing.running, nothing.series, nothing.probes) == (False, [], [])
    store.emit([Explained("i-1", NOW - S, make_finding(1))])
    store.close()
    downgrade(path)
    old, _ = look()
    assert (old.requests, old.slow, old.by_cause["cpu.throttled"][-1]) == (1, 1, 33.4)
    assert old.services == ["chat"]


def test_rows_are_what_the_list_filters_by(reader: Reader) -> None:
    page = requests.page(reader, Filter(ordinary=True), limit=1000)
    shown(page)
    facets = requests.facets(reader, Filter(ordinary=True))
    shown(facets)
    assert {row.service for row in page.rows} == set(facets.services)
    for name in facets.services:
        found = requests.page(reader, Filter(ordinary=True, service=name))
        assert found.rows == [row for row in page.rows if row.service == name][:100]
    slow = next(row for row in page.rows if row.slow)
    view = request.find(reader, slow.id)
    assert view is not None
    assert view.row == slow


def test_reading_goes_on_beside_a_writer(tmp_path: Path, make_finding: MakeFinding) -> None:
    path = tmp_path / "s.db"
    store = Store(path, max_age_ns=10**18, max_bytes=64 << 20, now=lambda: NOW)
    reader = Reader(path)
    for n in range(5):
        store.emit([Explained(f"i-{n}", NOW - S, make_finding(n))])
        assert store.flush() == ""
        writing = sqlite3.connect(path, isolation_level=None)
        writing.execute("BEGIN IMMEDIATE")  # in the middle of the next batch
        assert requests.page(reader, Filter()).total == n + 1
        assert tail.view(reader, now_unix_ns=NOW).slow == n + 1
        writing.execute("ROLLBACK")
        writing.close()
    reader.close()
    store.close()
