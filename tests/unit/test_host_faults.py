"""The host fault bench: its scores, its baselines, its draws, and what every fault file must keep to."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from whyspan.causes import rules
from whyspan.model import Culprit, Finding, Ranked, Request, Verdict

from tests.demo.procs import ROOT
from tests.demo.truth import TAIL_NS, Sent
from tests.faults.host import baselines, registry, report, score
from tests.faults.host.case import Case
from tests.faults.host.decoys import DECOYS
from tests.faults.host.draw import Chosen, cases_of
from tests.faults.host.fault import HTTP, THREADED, VLLM, Fault, Inside
from tests.faults.host.inferred import COUNTERS, EVENT_KINDS, EVENT_WORDS, cause_of_event
from tests.faults.host.kinds import KINDS, PARENTS
from tests.faults.host.score import CaseScore, Judged, Window

MS = 1_000_000
S = 1_000 * MS


def sent(trace: str, start_ns: int, latency_ms: float, status: int = 200, error: str = "") -> Sent:
    return Sent(trace, start_ns, start_ns + MS, start_ns + int(latency_ms * MS), status, error)


def finding(cause: str, *others: str, culprit: Culprit = Culprit(), unknown_ms: float = 0.0) -> Finding:  # noqa: B008
    request = Request(
        trace_id="t",
        trace_id_source="traceparent",
        service="s",
        tgid=1,
        start_tid=1,
        method="POST",
        route="/",
        start_ns=0,
    )
    verdict = Verdict(
        cause=cause,
        culprit=culprit,
        sentence=f"because of {cause}",
        others=[Ranked(cause=c, excess_ms=1.0, share=0.1) for c in others],
    )
    return Finding(
        request=request,
        slow=True,
        wall_ns=200 * MS,
        accounted_ns=200 * MS,
        segments=[],
        causes={"unknown": unknown_ms},
        baseline={},
        verdict=verdict,
    )


def is_hog(culprit: Mapping[str, Any]) -> bool:
    return bool(culprit["tgid"] == 7)


def judged(cause: str = "cpu.runqueue", *, tgid: int = 7, others: tuple[str, ...] = ()) -> Judged:
    said = finding(cause, *others, culprit=Culprit(kind="process", name="hog", tgid=tgid))
    return score.judge(sent("t", 0, 200), said, 400 * MS, ("cpu.runqueue",), is_hog)


# --- what is slowed, what is healthy


@pytest.mark.parametrize(
    ("latency_ms", "status", "error", "slowed"),
    [
        (141, 200, "", True),
        (139, 200, "", False),  # less than twice the usual
        (500, 500, "", False),  # failed
        (500, 200, "TimeoutError", False),
    ],
)
def test_slowed_means_twice_the_usual(latency_ms: float, status: int, error: str, slowed: bool) -> None:
    request = sent("t", 0, latency_ms, status, error)
    assert score.is_slowed(request, 70 * MS, 90 * MS) is slowed


def test_slowed_means_over_the_objective_too() -> None:
    assert not score.is_slowed(sent("t", 0, 150), 70 * MS, 160 * MS)


def test_a_refused_connection_is_nobodys_failed_request() -> None:
    assert score.is_failed(sent("t", 0, 5, 503))
    assert score.is_failed(sent("t", 0, 5, 0, "ConnectionResetError"))
    assert not score.is_failed(sent("t", 0, 5, 0, "ConnectionRefusedError"))
    assert not score.is_failed(sent("t", 0, 5))


def test_healthy_are_those_that_no_fault_and_no_tail_touches() -> None:
    window = Window(10 * S, 11 * S, 15 * S, 16 * S)
    tail = 18 * S  # the last request of the fault ends here
    requests = [
        sent("before", 9 * S, 70),
        sent("into", 10 * S - 10 * MS, 70),
        sent("in", 12 * S, 6000),
        sent("removing", 15 * S + 1, 70),
        sent("tail", tail + TAIL_NS - 1, 70),
        sent("after", tail + TAIL_NS, 70),
        sent("failed", 30 * S, 70, 500),
    ]
    assert [s.trace_id for s in score.healthy(requests, [window], 0)] == ["before", "after"]
    assert [s.trace_id for s in score.healthy(requests, [window], 10 * S)] == ["after"]


# --- judging one request


def test_cause_and_culprit_must_both_be_right() -> None:
    assert judged().right
    assert not judged(tgid=8).right and judged(tgid=8).cause_right
    assert not judged("cpu.throttled").right


def test_the_time_to_the_verdict_runs_from_the_requests_end() -> None:
    assert judged().verdict_s == pytest.approx(0.2)


def test_a_request_without_a_finding_is_wrong() -> None:
    nothing = score.judge(sent("t", 0, 200), None, None, ("cpu.runqueue",), is_hog)
    assert not nothing.right and not nothing.among(("cpu.runqueue",)) and nothing.verdict_s is None


def test_a_culprits_test_that_fails_is_a_wrong_culprit() -> None:
    def broken(culprit: Mapping[str, Any]) -> bool:
        raise KeyError("pid")

    one = score.judge(sent("t", 0, 200), finding("cpu.runqueue"), 0, ("cpu.runqueue",), broken)
    assert one.cause_right and not one.culprit_right and "KeyError" in one.culprit


def test_unknown_time_is_at_most_the_requests() -> None:
    one = score.judge(sent("t", 0, 200), finding("x", unknown_ms=500), 0, ("x",), is_hog)
    assert one.unknown_ms == pytest.approx(200)


def test_the_first_three_are_the_verdict_and_two_others() -> None:
    assert judged("a", others=("b", "cpu.runqueue")).among(("cpu.runqueue",))
    assert not judged("a", others=("b", "c", "cpu.runqueue")).among(("cpu.runqueue",))


def test_parents_are_right() -> None:
    assert score.allowed(("net.loss",), PARENTS) == ("net.loss", "net.transport")
    assert score.allowed(("net.loss", "net.transport"), PARENTS) == ("net.loss", "net.transport")
    assert score.allowed(("cpu.throttled",), PARENTS) == ("cpu.throttled",)


# --- a case


def case_score(right: int, wrong: int, **more: Any) -> CaseScore:
    out = CaseScore(HTTP, "cpu_hog", "", ("cpu.runqueue",), **more)
    out.judged = [judged()] * right + [judged("cpu.throttled", others=("cpu.runqueue",))] * wrong
    return out


@pytest.mark.parametrize(
    ("right", "wrong", "passes"), [(9, 1, True), (10, 0, True), (8, 2, False), (0, 0, False)]
)
def test_a_case_needs_nine_tenths(right: int, wrong: int, passes: bool) -> None:
    assert case_score(right, wrong).right is passes


def test_the_right_cause_behind_the_first_counts_for_the_first_three() -> None:
    one = case_score(5, 5)
    assert not one.right and one.top3


def test_a_fault_that_did_not_bite_is_no_success() -> None:
    assert not case_score(10, 0, error="it does not bite").right


def test_misses_say_what_was_said_instead() -> None:
    one = case_score(3, 2)
    one.judged.append(judged(tgid=9))
    assert one.misses() == {
        ("cpu.throttled", "because of cpu.throttled"): 2,
        ("cpu.runqueue, culprit process hog 9", "because of cpu.runqueue"): 1,
    }


def test_confusion_counts_requests_by_expected_and_named_cause() -> None:
    assert score.confusion([case_score(3, 2), case_score(1, 0)]) == {
        "cpu.runqueue": {"cpu.runqueue": 4, "cpu.throttled": 2}
    }


def test_a_baseline_is_judged_as_the_agent_is() -> None:
    one = case_score(0, 0)
    right: tuple[str, ...] = ("cpu.runqueue", "x")
    wrong: tuple[str, ...] = ("x", "cpu.runqueue")
    one.baselines["b"] = [right] * 9 + [wrong]
    assert one.baseline_right("b", 1) and one.baseline_right("b", 3)
    one.baselines["b"] = [right] * 8 + [wrong] * 2
    assert not one.baseline_right("b", 1) and one.baseline_right("b", 3)
    assert not one.baseline_right("absent", 1)


def test_the_summary_counts_a_case_once() -> None:
    result = report.Result(5)
    result.cases = [case_score(10, 0), case_score(5, 5), case_score(0, 0, error="it does not bite")]
    result.healthy, result.alarms = 200, 1
    figures = result.summary()
    assert (figures["cases"], figures["invalid"], figures["requests"]) == (3, 1, 20)
    assert figures["top1"] == pytest.approx(0.5)
    assert figures["top3"] == pytest.approx(1.0)
    assert figures["false_alarm_rate"] == pytest.approx(0.005)
    assert figures["by_kind"] == {"cpu.runqueue": pytest.approx(0.5)}


# --- baselines


def samples(count: int, odd: Mapping[int, Mapping[str, float]]) -> list[dict[str, Any]]:
    """Ten a second: a CPU counter that grows with noise, one that never moves, a gauge; *odd* adds to later ones."""
    rng = random.Random(3)
    now = {"cpu.user": 0.0, "net.Tcp.RetransSegs": 0.0, "pid.rss": 1000.0}
    out = []
    for i in range(count):
        now["cpu.user"] += rng.uniform(0.8, 1.2)
        for name, more in odd.get(i, {}).items():
            now[name] += more
        out.append({"ns": i * S // 10, **now})
    return out


def healthy_requests() -> list[Sent]:
    return [sent(f"h{i}", i * S // 5, 150) for i in range(1, 90)]


def test_the_oddest_counter_is_guessed_first() -> None:
    series = baselines.Series(samples(300, {251: {"net.Tcp.RetransSegs": 5.0, "cpu.user": 0.5}}))
    victim = sent("v", 25 * S, 200)
    guesses = baselines.by_counters(series, healthy_requests(), [victim])
    assert guesses[0][0] == "net.loss"


def test_a_gauge_is_compared_as_it_is() -> None:
    series = baselines.Series(samples(300, {250: {"pid.rss": 5000.0}}))
    guesses = baselines.by_counters(series, healthy_requests(), [sent("v", 26 * S, 200)])
    assert guesses[0][0] == "memory.allocator_growth"


def test_without_samples_nothing_is_guessed() -> None:
    assert baselines.by_counters(baselines.Series([]), healthy_requests(), [sent("v", 0, 100)]) == [()]


def test_the_event_with_the_largest_relative_increase_is_guessed_first() -> None:
    times = {
        "sched_switch_in": np.arange(0, 40 * S, 10 * MS),  # as many as always
        "tcp_retransmit": np.arange(25 * S, 30 * S, 500 * MS),  # ten, where there were none
    }
    guesses = baselines.by_events(times, 20 * S, 0, [sent("v", 29 * S, 1000)])
    assert guesses == [("net.loss", "cpu.runqueue")]


def test_chance_draws_three_causes_without_repetition() -> None:
    causes = ["a", "b", "c", "d", "a"]
    guesses = baselines.by_chance(causes, random.Random(1), 400)
    assert all(len(set(g)) == 3 for g in guesses)
    assert {g[0] for g in guesses} == {"a", "b", "c", "d"}
    assert guesses == baselines.by_chance(causes, random.Random(1), 400)


def known_causes() -> set[str]:
    """Ids of the rules, and of the bench's and the rules' relatives; a copy of the specification's list."""
    return {r.id for r in rules()} | set(PARENTS) | set(KINDS)


def test_what_counters_and_events_infer_are_causes() -> None:
    inferred = {*COUNTERS.values(), *EVENT_KINDS.values(), *(c for _, c in EVENT_WORDS)}
    assert inferred <= known_causes()


def test_an_event_that_says_nothing_infers_nothing() -> None:
    assert cause_of_event("mark") == ""
    assert cause_of_event("memcg_reclaim") == "memory.cgroup_limit"


# --- draws and faults


def args(**more: Any) -> Chosen:
    return Chosen(**more)


def a_fault(**more: Any) -> Fault:
    return Fault("f", ("cpu.runqueue",), None, **more)  # type: ignore[arg-type]


def test_each_server_has_a_case_without_a_decoy_and_one_with() -> None:
    cases = cases_of([a_fault(servers=(HTTP, VLLM))], args())
    assert [(c.server, bool(c.decoy)) for c in cases] == [
        (HTTP, False),
        (HTTP, True),
        (VLLM, False),
        (VLLM, True),
    ]


def test_a_quick_run_has_each_fault_once_with_a_decoy() -> None:
    cases = cases_of([a_fault(servers=(HTTP, VLLM))], args(quick=True))
    assert [(c.server, bool(c.decoy)) for c in cases] == [(HTTP, True)]


def test_decoys_of_the_same_kind_are_never_drawn() -> None:
    allowed = sorted(DECOYS)[0]
    fault = a_fault(decoys=tuple(d for d in DECOYS if d != allowed))
    for seed in range(20):
        assert {c.decoy for c in cases_of([fault], args(seed=seed))} == {"", allowed}
    assert {c.decoy for c in cases_of([a_fault(decoys=tuple(DECOYS))], args())} == {""}


def test_a_seed_draws_the_same_again_and_another_something_else() -> None:
    case = Case(HTTP, a_fault())
    assert case.rng(5).random() == case.rng(5).random()
    assert len({case.rng(seed).random() for seed in range(20)}) == 20
    drawn = {tuple(c.decoy for c in cases_of([a_fault()], args(seed=seed))) for seed in range(40)}
    assert len(drawn) > 3


@pytest.mark.parametrize("name", registry.names())
def test_a_fault_file_keeps_to_the_interface(name: str) -> None:
    fault = registry.load(name)
    assert fault.id == name
    assert fault.causes and set(fault.causes) <= known_causes()
    assert fault.servers and set(fault.servers) <= {HTTP, THREADED, VLLM}
    assert set(fault.decoys) <= set(DECOYS)
    assert fault.seconds > 0 and fault.per_s >= 0
    assert (Path(registry.FOLDER) / f"{name}.py").read_text().startswith('"""')
    inside = getattr(__import__(f"tests.faults.host.{name}", fromlist=["INSIDE"]), "INSIDE", None)
    assert inside is None or isinstance(inside, Inside) or issubclass(inside, Inside)


def test_the_list_of_kinds_is_the_specifications() -> None:
    specification = ROOT.parent / "shared" / "CAUSES.md"
    if not specification.exists():
        pytest.skip("the specification is not beside this checkout")
    text = specification.read_text()
    rows = re.findall(r"^\| `([a-z]+\.[a-z_]+)` \| (?:K\d+|`([a-z]+\.[a-z_]+)`) \|", text, re.MULTILINE)
    assert {i for i, parent in rows if not parent} == set(KINDS)
    assert {i: parent for i, parent in rows if parent} == PARENTS
