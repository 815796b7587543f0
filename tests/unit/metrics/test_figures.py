"""What findings and the collector's state become: time by cause, phase and culprit, histograms, exemplars, bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from whyspan.config import Objectives
from whyspan.model import Culprit, EngineFacts, Finding, PhaseTime, Ranked, Segment
from whyspan.tally import BOUNDS_S, Series, Tally
from whyspan_exporters import ids
from whyspan_exporters.link import Count
from whyspan_exporters.metrics import losses
from whyspan_exporters.metrics.figures import Figures
from whyspan_exporters.metrics.instrument import OVERFLOW, Exemplar
from whyspan_exporters.metrics.snapshot import MAX_POINTS, take
from whyspan_exporters.otlp.resource import Resources
from whyspan_exporters.otlp.spans import to_spans
from whyspan_exporters.records import Counts, Explained, Status, finding_id

MakeFinding = Callable[..., Finding]
START = 1_700_000_000_000_000_000


def explained(finding: Finding) -> Explained:
    return Explained(finding_id("i", finding), START, finding)


def found(figures: Figures, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """Values of a metric by some of its labels; ("overflow",) for what found no room."""
    out: dict[tuple[str, ...], float] = {}
    for p in figures.found(name):
        assert isinstance(p.value, (int, float))
        key = ("overflow",) if OVERFLOW in p.labels else tuple(str(p.labels.get(k, "")) for k in labels)
        assert key not in out
        out[key] = round(p.value, 9)
    return out


def segment(start: int, end: int, cause: str) -> Segment:
    return Segment(start_ns=start, end_ns=end, tgid=1, tid=1, thread="t", state="blocked", cause=cause)


def test_time_lost_is_by_cause_and_phase(make_finding: MakeFinding) -> None:
    f = make_finding(1)
    r = f.request
    r.start_ns, r.end_ns = 0, 1000
    f.phases = [PhaseTime("queue", 0, 300), PhaseTime("decode", 300, 1000)]
    f.segments = [
        segment(0, 100, "a"),
        segment(100, 200, "b"),
        segment(200, 600, "a"),
        segment(600, 1000, "c"),
    ]
    f.engine = EngineFacts(model="opt")
    f.verdict.cause, f.verdict.excess_ms = "a", 500.0  # 200 of 500 in the queue
    f.verdict.others = [
        Ranked(cause="b", excess_ms=30.0, share=0.1),
        Ranked(cause="nowhere", excess_ms=10.0, share=0.1),  # no segment of its own: as the phases took
        Ranked(cause="c", excess_ms=0.0, share=0.0),
    ]
    figures = Figures()
    figures.add(explained(f))
    names = ("whyspan.service", "whyspan.cause", "gen_ai.request.model", "whyspan.phase")
    assert found(figures, losses.EXCESS, *names) == {
        ("chat", "a", "opt", "queue"): 0.2,
        ("chat", "a", "opt", "decode"): 0.3,
        ("chat", "b", "opt", "queue"): 0.03,
        ("chat", "nowhere", "opt", "queue"): 0.003,
        ("chat", "nowhere", "opt", "decode"): 0.007,
    }


def test_without_an_engines_word_the_phase_is_the_whole(make_finding: MakeFinding) -> None:
    figures = Figures()
    f = make_finding(1)
    figures.add(explained(f))
    names = ("whyspan.cause", "whyspan.phase", "gen_ai.request.model")
    assert found(figures, losses.EXCESS, *names) == {
        (f.verdict.cause, "whole", ""): pytest.approx(f.verdict.excess_ms / 1e3)
    }


def test_the_time_of_a_request_that_is_open_is_counted_when_it_has_ended(make_finding: MakeFinding) -> None:
    figures = Figures()
    figures.add(explained(make_finding(1, outcome="open")))
    assert figures.found(losses.EXCESS) == []
    figures.add(explained(make_finding(1)))
    assert len(figures.found(losses.EXCESS)) == 1


def test_what_is_neither_slow_nor_failed_lost_nothing(make_finding: MakeFinding) -> None:
    figures = Figures()
    figures.add(explained(make_finding(1, slow=False)))
    assert figures.found(losses.EXCESS) == figures.found(losses.CULPRIT) == []


def blamed(f: Finding, kind: str, name: str, ms: float = 1000.0) -> Finding:
    f.verdict.culprit, f.verdict.excess_ms = Culprit(kind=kind, name=name), ms
    return f


def test_culprits_are_named_and_bounded_by_service(make_finding: MakeFinding) -> None:
    figures = Figures()
    for n in range(60):
        for service in ("chat", "embed"):
            figures.add(explained(blamed(make_finding(n, service=service), "process", f"p{n}")))
            figures.add(explained(blamed(make_finding(n, service=service), "process", "p3")))
    by_name = found(
        figures, losses.CULPRIT, "whyspan.service", "whyspan.culprit.name", "whyspan.culprit.kind"
    )
    assert len(by_name) == 2 * losses.MAX_CULPRITS + 1
    assert by_name["chat", "p3", "process"] == 61
    assert by_name["overflow",] == 2 * 10
    assert sum(by_name.values()) == 240


def test_another_request_has_no_name_that_comes_once(make_finding: MakeFinding) -> None:
    figures = Figures()
    for n in range(3):
        figures.add(explained(blamed(make_finding(n), "request", f"cmpl-{n}")))
    figures.add(explained(blamed(make_finding(4), "", "")))
    names = found(figures, losses.CULPRIT, "whyspan.culprit.kind", "whyspan.culprit.name")
    assert names == {("request", "request"): 3}


def tallied(*finding: Finding, model: str = "") -> dict[str, Any]:
    tally = Tally()
    for f in finding:
        tally.add(f.request, Objectives(), model)
    return tally.state(0)


def test_histograms_of_all_with_exemplars_of_the_explained(make_finding: MakeFinding) -> None:
    figures = Figures()
    slow, ordinary, other = make_finding(1), make_finding(2, slow=False), make_finding(3, service="embed")
    state = tallied(slow, slow, ordinary, other)
    figures.add(Status("i", state))
    for f in (slow, other):
        figures.add(explained(f))
    by_service = {s.service: (b, e) for s, b, e in figures.histograms("duration")}
    buckets, exemplars = by_service["chat"]
    seconds = (slow.request.end_ns - slow.request.start_ns) / 1e9
    assert sum(buckets.counts) == 3
    assert buckets.total == pytest.approx(
        2 * seconds + (ordinary.request.end_ns - ordinary.request.start_ns) / 1e9
    )
    (span, *_) = to_spans(explained(slow), Resources().of(slow))
    context = span.context
    assert context is not None
    assert span.end_time is not None
    assert exemplars == (
        Exemplar(seconds, span.end_time, f"{context.trace_id:032x}", f"{context.span_id:016x}"),
    )


@pytest.mark.parametrize(
    ("changes", "slow", "kept"),
    [
        ({}, True, True),
        ({"sampled": False}, True, False),
        ({"trace_id_source": "generated"}, False, False),
        ({"trace_id_source": "traceparent"}, False, True),
        ({"trace_id_source": "generated", "outcome": "error", "status": 500}, False, True),
        ({"outcome": "open"}, True, False),
    ],
)
def test_exemplars_lead_to_traces_that_are_kept(
    make_finding: MakeFinding, changes: dict[str, Any], slow: bool, kept: bool
) -> None:
    f = make_finding(1, slow=slow, **changes)
    figures = Figures()
    figures.add(Status("i", tallied(f)))
    figures.add(explained(f))
    ((_, _, exemplars),) = figures.histograms("duration")
    assert bool(exemplars) == kept


def test_a_finding_that_does_not_know_its_model_is_an_exemplar_of_the_service(
    make_finding: MakeFinding,
) -> None:
    f = make_finding(1)
    figures = Figures()
    figures.add(Status("i", tallied(f, model="opt")))
    figures.add(explained(f))
    ((series, _, exemplars),) = figures.histograms("duration")
    assert (series, len(exemplars)) == (Series("chat", "opt"), 1)


def test_histograms_go_on_when_the_collector_restarts(make_finding: MakeFinding) -> None:
    figures = Figures()
    for n in range(1, 20):
        figures.add(Status(f"run{n}", tallied(make_finding(1))))
        figures.add(Status(f"run{n}", tallied(make_finding(1), make_finding(2))))
        ((_, buckets, _),) = figures.histograms("ttft")
        assert sum(buckets.counts) == 2 * n


LONG = [0] * len(BOUNDS_S)


@pytest.mark.parametrize(
    "said",
    [
        3,
        {},
        [3],
        [["chat", "m", "", False, [[1]], [1.0]]],
        [["chat", "m", "", False, [[*LONG, -1]], [1.0]]],
        [["chat", "m", "", False, [[*LONG, "1"]], [1.0]]],
        [["chat", "m", "", False, [[*LONG, 1 << 70]], [1.0]]],
        [["chat", "m", "", False, [[*LONG, 1]], [float("nan")]]],
        [["chat", "m", "", False, [[*LONG, 1]], []]],
        [["chat", 5, "", False, [[*LONG, 1]], [1.0]]],
        [["chat", "m", "", False, [[*LONG, 0]], [1.0]]],
    ],
)
def test_histograms_that_are_none_are_absent(said: Any) -> None:
    figures = Figures()
    figures.add(Status("i", {"latencies": said, "inter_token": said, "pressure": said, "cpu_limits": said}))
    assert figures.histograms("duration") == []
    take(figures, START)


def test_everything_is_bounded_and_sums_stay_right(make_finding: MakeFinding) -> None:
    figures = Figures()
    for n in range(1100):
        figures.add(explained(blamed(make_finding(n, service=f"s{n}"), "process", f"p{n}", 1000.0)))
    for n in range(20):
        rows = [[f"s{n}-{k}", "m", "", False, [[1, *LONG]] * 3, [0.001] * 3] for k in range(64)]
        figures.add(Status(f"i{n // 2}", {"latencies": rows}))
    figures.add(Counts("i", [Count("request_codes", f"s{n}", f"ok/{n}", 1) for n in range(5000)]))
    families = {f.instrument.name: f for f in take(figures, START).families}
    assert max(len(f.points) for f in families.values()) <= MAX_POINTS
    for name, expected in (
        ("whyspan.finding.count", 1100),
        ("whyspan.cause.excess.time", 1100),
        ("whyspan.cause.culprit.time", 1100),
        ("whyspan.request.count", 5000),
    ):
        points = families[name].points
        assert sum(p.value for p in points if isinstance(p.value, (int, float))) == pytest.approx(expected)
        assert [p.labels for p in points if OVERFLOW in p.labels] == [{OVERFLOW: True}]
    total = sum(sum(b.counts) for _, b, _ in figures.histograms("duration"))
    assert total == 64 * 10  # of each run the newest


def test_the_ids_of_exemplars_are_those_of_the_spans_even_without_a_trace(make_finding: MakeFinding) -> None:
    f = make_finding(1, trace_id="nonsense")
    (span, *_) = to_spans(explained(f), Resources().of(f))
    assert span.context is not None
    assert ids.of_request(explained(f).id, "nonsense") == (span.context.trace_id, span.context.span_id)
