"""What is made of marks: jobs, steps and processes, joined within a service and forgotten in time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from whyspan import marks as m
from whyspan.engines import EngineTable, EngineView
from whyspan.engines import table as table_module
from whyspan.facts import Facts
from whyspan.marks import Mark, Scheduled
from whyspan.model import Batch, ProcessFact, Request
from whyspan.recording import Header, Reader, Writer

from tests.unit.enginelab import CORE, PREFILL_MS, T0, WORK, Lab, prefill
from tests.unit.timeline import HOG, LOOP, SERVER, ns
from tests.unit.wire import FACTS, SCHEMA

OTHER_CORE = 210


def facts(*more: ProcessFact) -> Facts:
    known = Facts()
    procs = [
        ProcessFact(CORE, "core", service="svc"),
        ProcessFact(WORK, "worker", service="svc", parent=CORE),
    ]
    known.update(Batch(0, Lab().chunk()[:0], facts=[*FACTS, *procs, *more]), SCHEMA)
    return known


def mark(ms: float, tgid: int, body: m.Body) -> Mark:
    return Mark(ns(ms), tgid, tgid, body)


def step(ms: float, number: int, decodes: list[int], core: int = CORE, **fields: Any) -> Mark:
    return mark(ms, core, m.Step(number, ns(ms - 0.5), ns(ms), decodes, **fields))


def done(ms: float, number: int, core: int = CORE, **fields: Any) -> Mark:
    return mark(ms, core, m.StepDone(number, ns(ms - 4), ns(ms - 3), ns(ms - 1), **fields))


def fed(*marks: Mark, now: float = 1000, known: Facts | None = None, **kwargs: Any) -> EngineTable:
    found = EngineTable(**kwargs)
    found.feed(marks, known or facts(), ns(now))
    return found


def queued(ms: float, number: int, core: int = CORE, **fields: Any) -> Mark:
    return mark(ms, core, m.Queued(f"e{number}", number, **fields))


# joins


def test_a_request_from_arrival_to_delivery() -> None:
    lab = Lab()
    lab.serve(T0, 1, logprobs=2, adapter="lora", priority=3)
    found, _ = lab.table()
    (job,) = found.jobs_of(lab.requests()[1])
    assert (job.request, job.engine_id, job.trace, job.span) == ("r1", "e1", f"{1:032x}", f"{1:016x}")
    assert (job.frontend, job.core, job.logprobs, job.adapter, job.costly) == (SERVER, CORE, 2, "lora", True)
    times = job.arrived_ns, job.enqueued_ns, job.queued_ns, job.admitted_ns, job.first_token_ns
    assert times == tuple(ns(T0 + t) for t in (0.2, 0.9, 1.4, 1.5, 21.5))
    assert (job.last_token_ns, job.finished_ns, job.delivered_ns) == (
        ns(T0 + 61.5),
        ns(T0 + 61.5),
        ns(T0 + 62.1),
    )
    assert (job.output_tokens, job.reason, job.prompt_tokens) == (5, "length", 64)
    assert job.client.cookie == lab.fronts[1][0]
    assert list(job.steps) == [1, 2, 3, 4, 5]
    assert found.alive(CORE) == 0


@pytest.mark.parametrize("service", ["svc", "another", ""])
def test_only_processes_of_one_service_may_speak_of_the_same_request(service: str) -> None:
    known = facts(ProcessFact(HOG, "hog", service=service))
    found = fed(
        mark(1, HOG, m.Arrived(request="r1", trace_id="ab" * 16)),
        mark(2, HOG, m.Enqueued("r1", "e1", 1)),
        queued(3, 1),
        known=known,
    )
    (job,) = found.jobs(CORE)
    assert job.frontend == (HOG if service == "svc" else 0)
    assert job.trace == ("ab" * 16 if service == "svc" else "")


def test_queued_before_the_front_end_says_so() -> None:
    found = fed(
        mark(1, LOOP, m.Arrived(request="r1", logprobs=5)),
        queued(2, 1),
        mark(2.5, LOOP, m.Enqueued("r1", "e1", 77)),
        step(4, 1, [1]),
        mark(5, LOOP, m.Output(ns(4.5), [77], [])),
    )
    (job,) = found.jobs(CORE)
    assert (job.enqueued_ns, job.queued_ns, job.request) == (ns(2), ns(2), "r1")
    assert list(job.outputs) == [(ns(4.5), ns(5))]
    last = found.last_step(CORE)
    assert last is not None and last.costly == (1,)


def test_requests_of_one_connection_in_one_batch_find_their_own() -> None:
    lab = Lab()
    for i in range(5):
        lab.serve(T0 + 70 * i, 1 + i, cookie=99, seq=i)
    table, _ = lab.table()
    for number, request in lab.requests().items():
        assert [j.number for j in table.jobs_of(request)] == [number]


def test_several_completions_of_one_request() -> None:
    lab = Lab()
    lab.arrive(T0, 1, n=2)
    lab.mark(T0 + 0.95, LOOP, m.Enqueued("r1", "e2", 2))
    lab.mark(T0 + 1.45, CORE, m.Queued("e2", 2, 64))
    lab.step(T0 + 2, T0 + 22, others=[prefill(1), prefill(2)])
    lab.step(T0 + 22, T0 + 32, [1, 2], finished=[1])
    lab.step(T0 + 32, T0 + 42, [2], finished=[2])
    lab.fronts[1] = lab.fronts[1]
    table, known = lab.table()
    view = EngineView(table, lab.requests()[1], known)
    assert [j.number for j in view.jobs] == [1, 2]
    assert view.job is not None and view.job.number == 2
    assert len(view.mine) == 3


def test_a_number_means_another_request_after_the_core_began_anew() -> None:
    known = facts(ProcessFact(OTHER_CORE, "core", service="svc"))
    found = fed(queued(1, 1), step(2, 1, [1]), known=known)
    found.gone(CORE, ns(3))
    found.feed(
        [
            mark(4, OTHER_CORE, m.Queued("f1", 1, 99)),
            step(5, 1, [1], OTHER_CORE),
            done(9, 1, OTHER_CORE, tokens=1),
        ],
        known,
        ns(10),
    )
    old, new = found.job(CORE, 1), found.job(OTHER_CORE, 1)
    assert old is not None and new is not None
    assert (old.engine_id, old.reason, old.output_tokens) == ("e1", "killed", 0)
    assert (new.engine_id, new.output_tokens, new.finished_ns) == ("f1", 1, 0)
    assert found.cores("svc", known) == [OTHER_CORE]


def test_another_process_by_the_number_of_one_that_ended() -> None:
    found = fed(queued(1, 1), step(2, 1, [1]))
    found.gone(CORE, ns(3))
    found.feed([queued(4, 1), step(5, 1, [1])], facts(), ns(6))
    assert (found.ended_ns(CORE), found.alive(CORE)) == (0, 1)
    assert [s.begin_ns for s in found.steps(CORE, 0, ns(10))] == [ns(4.5)]


def test_a_core_that_is_killed_leaves_neither_steps_nor_jobs_behind() -> None:
    lab = Lab()
    lab.arrive(T0, 1)
    lab.step(T0 + 2, 0, others=[prefill(1)], end=False)
    lab.step(T0 + 3, 0, [1], end=False)
    table, known = lab.table()
    assert (table.alive(CORE), table.in_progress(CORE) is not None) == (1, True)
    table.gone(CORE, ns(T0 + 10))
    assert (table.alive(CORE), table.in_progress(CORE), table.working_since(CORE)) == (0, None, 0)
    assert all(s.done_ns == ns(T0 + 10) for s in table.steps(CORE, 0, ns(T0 + 20)))
    (job,) = table.jobs(CORE)
    assert (job.finished_ns, job.reason) == (ns(T0 + 10), "killed")
    assert table.cores("svc", known) == []
    table.feed([], known, ns(T0 + 100_000))
    assert table.jobs(CORE) == []
    assert table.last_step(CORE) is None


# steps


def test_a_long_step_goes_on_in_further_marks() -> None:
    found = fed(
        *(queued(1, n) for n in (1, 2, 3)),
        step(2, 1, [1], others=[Scheduled(2, 64, new_blocks=4)]),
        step(2.1, 1, [3], more=True, preempted=[(9, 5)]),
        done(10, 1, tokens=3),
    )
    (only,) = found.steps(CORE, 0, ns(99))
    assert (only.decodes, [s.number for s in only.others], only.preempted) == ((1, 3), [2], ((9, 5),))
    assert [j.output_tokens for j in found.jobs(CORE)] == [1, 1, 1]
    assert (found.counts["steps"], found.counts["preemptions"], found.counts["sequences"]) == (1, 1, 3)


def test_what_is_finished_may_come_in_several_marks_and_counts_once() -> None:
    found = fed(
        queued(1, 1),
        queued(1, 2),
        step(2, 1, [1, 2]),
        done(10, 1, tokens=2, finished=[(1, "stop")]),
        done(10.1, 1, finished=[(2, "stop")]),
    )
    assert [(j.output_tokens, j.reason) for j in found.jobs(CORE)] == [(1, "stop"), (1, "stop")]
    assert (found.alive(CORE), found.counts["output_tokens"]) == (0, 2)
    assert found.counts["step_ns"] == ns(10) - ns(1.5)


def test_overlapping_steps_share_no_wall_time() -> None:
    found = fed(
        queued(1, 1),
        step(2, 1, [1]),
        step(3, 2, [1]),
        done(12, 1, tokens=1),
        step(13, 3, [1]),
        done(22, 2, tokens=1),
        done(33, 3, tokens=1),
    )
    spans = [(s.from_ns, s.done_ns) for s in found.steps(CORE, 0, ns(99))]
    assert spans == [(ns(1.5), ns(12)), (ns(12), ns(22)), (ns(22), ns(33))]


def test_a_token_of_a_batch_made_up_before_the_end_was_known_is_nobodys() -> None:
    found = fed(
        queued(1, 1), step(2, 1, [1]), step(3, 2, [1]), done(12, 1, finished=[(1, "stop")]), done(22, 2)
    )
    (job,) = found.jobs(CORE)
    assert (job.output_tokens, job.last_token_ns, job.finished_ns) == (1, ns(12), ns(12))


def test_a_step_whose_end_was_lost_ends_where_its_workers_did() -> None:
    found = fed(
        queued(1, 1),
        step(2, 1, [1]),
        mark(9, WORK, m.Executed(1, ns(3))),
        step(20, 2, [1]),
        done(30, 2, tokens=1),
    )
    first, second = found.steps(CORE, 0, ns(99))
    assert (first.done_ns, second.from_ns, second.done_ns) == (ns(9), ns(19.5), ns(30))
    assert found.in_progress(CORE) is None


def test_a_step_whose_beginning_was_lost_still_finishes_its_jobs() -> None:
    found = fed(queued(1, 1), done(12, 7, tokens=1, finished=[(1, "stop")]))
    assert found.alive(CORE) == 0
    assert found.steps(CORE, 0, ns(99)) == []


def test_a_job_whose_end_was_lost_is_over_when_the_front_end_has_all_of_it() -> None:
    found = fed(
        mark(0.5, LOOP, m.Enqueued("r1", "e1", 4)),
        queued(1, 1),
        step(2, 1, [1]),
        done(10, 1, tokens=1),
        mark(11, LOOP, m.Output(ns(10.5), [4], [4])),
    )
    (job,) = found.jobs(CORE)
    assert (found.alive(CORE), job.finished_ns, job.delivered_ns) == (0, ns(10), ns(11))


def test_executions_may_come_before_their_step() -> None:
    found = fed(
        queued(0.5, 9),
        mark(1, WORK, m.Executed(1, ns(0.9))),
        step(2, 1, [9]),
        mark(3, WORK, m.Executed(1, ns(2))),
    )
    (only,) = found.steps(CORE, 0, ns(99))
    assert [(e.begin_ns, e.end_ns) for e in only.executions] == [(ns(0.9), ns(1)), (ns(2), ns(3))]


def test_a_worker_belongs_to_the_core_that_started_it() -> None:
    known = facts(
        ProcessFact(OTHER_CORE, "core", service="svc"),
        ProcessFact(310, "worker", service="svc", parent=OTHER_CORE),
        ProcessFact(320, "worker", service="svc"),
    )
    found = fed(
        step(1, 1, [1]),
        step(1, 1, [1], OTHER_CORE),
        mark(3, WORK, m.Executed(1, ns(2))),
        mark(3, 310, m.Executed(1, ns(2))),
        mark(3, 320, m.Executed(1, ns(2))),  # nobody knows whose
        known=known,
    )
    for core, worker in ((CORE, WORK), (OTHER_CORE, 310)):
        (only,) = found.steps(core, 0, ns(99))
        assert [e.tgid for e in only.executions] == [worker]


def test_chunks_of_a_prompt_give_a_token_only_with_the_last() -> None:
    found = fed(
        queued(1, 1, prompt_tokens=128),
        step(2, 1, [], others=[Scheduled(1, 64, left=64, cached=16, computed=16)]),
        done(10, 1),
        step(12, 2, [], others=[Scheduled(1, 64, 64)]),
        done(20, 2, tokens=1),
    )
    (job,) = found.jobs(CORE)
    assert (job.first_token_ns, job.output_tokens, job.cached_tokens) == (ns(20), 1, 16)


def test_a_preempted_job_gets_its_next_token_when_it_has_everything_again() -> None:
    # 64 tokens of prompt and 36 of output were lost; they are computed again in chunks of 64.
    found = fed(
        queued(1, 1, prompt_tokens=64),
        step(2, 1, [], others=[Scheduled(1, 64)]),
        done(10, 1, tokens=1),
        step(12, 2, [], preempted=[(1, 99)], others=[Scheduled(2, 8, new_blocks=3)]),
        done(20, 2),
        step(22, 3, [], others=[Scheduled(1, 64, recomputed=64, resumed=True)]),
        done(30, 3),
        step(32, 4, [], others=[Scheduled(1, 36, 64, recomputed=35)]),
        done(40, 4, tokens=1),
    )
    (job,) = found.jobs(CORE)
    assert (job.output_tokens, job.recomputed_tokens, job.last_token_ns) == (2, 99, ns(40))
    (lost,) = job.preemptions
    assert (lost.lost, lost.taker, lost.ts_ns) == (99, 2, ns(11.5))
    assert (found.counts["preemptions"], found.counts["recomputed"]) == (1, 99)


def test_what_counts_as_a_prompt() -> None:
    found = fed(
        queued(1, 1, prompt_tokens=64),
        step(
            2,
            1,
            [],
            others=[
                Scheduled(1, 5, 64),  # drafted tokens
                Scheduled(1, 20, 44),  # the prompt's end
                Scheduled(1, 1, 80, recomputed=1),
                Scheduled(7, 5, 64),  # of one nobody knows
                Scheduled(7, 5, 64, left=3),
            ],
        ),
    )
    (only,) = found.steps(CORE, 0, ns(99))
    assert [(s.number, s.tokens) for s in only.prompts] == [(1, 20), (1, 1), (7, 5)]
    assert only.prompts[-1].left == 3


def test_deferrals_are_kept_as_changes() -> None:
    told = ["budget", "budget", "capacity", "capacity", "budget"]
    marks = [queued(1, 1)]
    for k, reason in enumerate(told):
        marks += [step(2 + 10 * k, k, [5], deferred=[(1, reason)]), done(9 + 10 * k, k)]
    (job, *_) = fed(*marks).jobs(CORE)
    assert job.deferred == [(ns(1.5), "budget"), (ns(21.5), "capacity"), (ns(41.5), "budget")]


# clients


def request(cookie: int = 5, seq: int = 0, start: float = 0, **fields: Any) -> Request:
    values: dict[str, Any] = {
        "trace_id": "0" * 32,
        "trace_id_source": "generated",
        "service": "svc",
        "tgid": SERVER,
        "start_tid": LOOP,
        "method": "POST",
        "route": "/",
        "start_ns": ns(start),
        "cookie": cookie,
        "seq": seq,
        "client_port": 4000 + cookie,
        "server_port": 80,
    }
    return Request(**{**values, **fields})


@pytest.mark.parametrize("order", ["left while it ran", "left before it was queued"])
def test_a_job_goes_on_for_a_client_that_left(order: str) -> None:
    table = EngineTable()
    table.begun([request()])
    front = [
        mark(1, LOOP, m.Arrived(request="r1", client_port=4005, server_port=80)),
        mark(2, LOOP, m.Enqueued("r1", "e1", 1)),
    ]
    gone = request(outcome="reset", end_ns=ns(5), left_ns=ns(4))
    if order == "left while it ran":
        table.feed([*front, queued(3, 1)], facts(), ns(3))
        table.ended([gone])
    else:
        table.feed(front, facts(), ns(3))
        table.ended([gone])
        table.feed([queued(6, 1)], facts(), ns(6))
    (job,) = table.jobs(CORE)
    assert job.client_left_ns == ns(4)
    assert table.alive(CORE) == 1
    table.feed([mark(9, CORE, m.Aborted("core", [1, 99]))], facts(), ns(9))
    assert (job.finished_ns, job.reason, table.alive(CORE)) == (ns(9), "abort", 0)


def test_a_client_that_got_its_answer_has_not_left() -> None:
    table = EngineTable()
    table.begun([request()])
    table.feed(
        [
            mark(1, LOOP, m.Arrived(request="r1", client_port=4005, server_port=80)),
            mark(2, LOOP, m.Enqueued("r1", "e1", 1)),
            queued(3, 1),
        ],
        facts(),
        ns(3),
    )
    table.ended([request(outcome="ok", end_ns=ns(5), left_ns=ns(4))])
    assert table.jobs(CORE)[0].client_left_ns == 0


def test_a_later_request_of_the_connection_is_not_taken_for_an_earlier_one() -> None:
    table = EngineTable()
    table.begun([request(start=50)])
    table.feed(
        [
            mark(1, LOOP, m.Arrived(request="r1", client_port=4005, server_port=80)),
            mark(2, LOOP, m.Enqueued("r1", "e1", 1)),
            queued(3, 1),
        ],
        facts(),
        ns(60),
    )
    assert table.jobs_of(request(start=50)) == []


# since when a core is at work


def test_since_when_it_works_is_since_it_has_something_to_do() -> None:
    table = fed(queued(1, 1), step(2, 1, [1]), done(10, 1, finished=[(1, "stop")]))
    assert table.working_since(CORE) == 0
    table.feed([queued(5000, 2)], facts(), ns(5000))
    assert table.working_since(CORE) == ns(5000)
    table.feed([step(5001, 2, [2])], facts(), ns(5001))
    assert table.working_since(CORE) == ns(5000)
    table.feed([done(5010, 2)], facts(), ns(5010))
    assert table.working_since(CORE) == ns(5010)


# bounds


def sizes(table: EngineTable) -> dict[str, int]:
    out = {k: len(v) for k, v in vars(table).items() if hasattr(v, "__len__") and k.startswith("_")}
    for core in table._cores.values():
        for name in ("steps", "by_step", "jobs", "alive", "costly", "open", "finished"):
            out[name] = len(getattr(core, name))
    return out


def test_what_is_over_goes_with_the_window() -> None:
    lab = Lab()
    for i in range(50):
        lab.serve(T0 + 100 * i, 1 + i, logprobs=i % 2)
    table, known = lab.table(window_ms=1000)
    kept = sizes(table)
    assert 8 <= kept["jobs"] <= 12
    assert kept["steps"] == kept["by_step"] <= 60
    table.feed([], known, ns(T0 + 60_000))
    left = sizes(table)
    for name in ("steps", "by_step", "jobs", "alive", "costly", "open", "finished"):
        assert left[name] == 0, name
    for name in ("_by_engine_id", "_by_front_number", "_by_connection", "_enqueued", "_pending_numbers"):
        assert left[name] == 0, name


def test_a_flood_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "MAX_JOBS", 50)
    monkeypatch.setattr(table_module, "MAX_STEPS", 40)
    monkeypatch.setattr(table_module, "MAX_INSTANCES", 5)
    table = EngineTable()
    known = facts()
    for i in range(300):
        marks = [
            mark(i, LOOP, m.Arrived(request=f"r{i}", client_port=i % 1000, server_port=80, logprobs=1)),
            mark(i, LOOP, m.Tokenised(f"r{i}", ns(i), 5)),
            mark(i, LOOP, m.Enqueued(f"r{i}", f"e{i}", i)),
            queued(i + 0.2, i, chain=f"{i:08x}" * 8, blocks=f"{i:08x}" * 8, block_size=16),
            step(i + 0.5, i, list(range(300)), preempted=[(i, 1)], deferred=[(i, str(i))]),
            mark(i + 0.6, WORK, m.Executed(i + 100_000, ns(i))),
            mark(i + 0.7, 1000 + i, m.Stage("adapter", ns(i), str(i))),
            mark(i + 0.7, WORK, m.Stage("adapter", ns(i), str(i))),
            mark(i + 0.8, 5000 + i, m.Queued("x", 1)),
        ]
        table.feed(marks, known, ns(i + 1))
        table.begun([request(cookie=i)])
    got = sizes(table)
    assert got["jobs"] <= 50 and got["alive"] <= 50 and got["costly"] <= 50
    assert got["steps"] <= 40 and got["by_step"] <= 40 and got["open"] <= 40
    assert len(table._cores) <= 5
    assert all(n <= 50 for name, n in got.items() if name not in ("_cores",)), got
    instance = table.instance(WORK)
    assert instance is None or len(instance.stages) <= 256


def test_lists_of_one_job_are_bounded() -> None:
    marks = [queued(0.1, 1), mark(0.2, LOOP, m.Enqueued("r", "e1", 1))]
    for k in range(1, 6000):
        marks += [
            step(k, k, [1], preempted=[(1, 5)], deferred=[(1, str(k % 2))]),
            done(k + 0.5, k),
            mark(k + 0.6, LOOP, m.Output(ns(k), [1])),
        ]
    (job,) = fed(*marks, now=6000).jobs(CORE)
    assert max(len(job.steps), len(job.outputs), len(job.deferred), len(job.preemptions)) <= 4096
    assert job.steps[-1] == 5999


_NUMBER = st.integers(0, 4)
_MS = st.integers(0, 100)
_ROW = st.builds(
    Scheduled, _NUMBER, st.integers(0, 99), st.integers(0, 99), st.integers(0, 9), st.integers(0, 9),
    st.integers(0, 9), st.booleans(), st.integers(0, 9),
)  # fmt: skip
_BODY = st.one_of(
    st.builds(m.Arrived, request=st.sampled_from("ab"), client_port=st.integers(0, 1), n=st.integers(0, 3)),
    st.builds(m.Tokenised, st.sampled_from("ab"), _MS.map(ns)),
    st.builds(m.Enqueued, st.sampled_from("ab"), st.sampled_from("xyz"), _NUMBER),
    st.builds(m.Queued, st.sampled_from("xyz"), _NUMBER, st.integers(0, 99)),
    st.builds(
        m.Step,
        st.integers(0, 5),
        _MS.map(ns),
        _MS.map(ns),
        st.lists(_NUMBER, max_size=3),
        st.lists(_ROW, max_size=3),
        st.lists(st.tuples(_NUMBER, st.integers(0, 99)), max_size=2),
        st.lists(st.tuples(_NUMBER, st.sampled_from(["budget", "capacity", "remote_kv", "?"])), max_size=2),
        kv_used=st.integers(0, 9),
        kv_free=st.integers(0, 9),
        more=st.booleans(),
    ),
    st.builds(
        m.StepDone,
        st.integers(0, 5),
        _MS.map(ns),
        _MS.map(ns),
        _MS.map(ns),
        finished=st.lists(st.tuples(_NUMBER, st.just("stop")), max_size=2),
        drafted=st.integers(0, 40),
        accepted=st.integers(0, 40),
    ),
    st.builds(m.Executed, st.integers(0, 5), _MS.map(ns)),
    st.builds(m.Output, _MS.map(ns), st.lists(_NUMBER, max_size=3), st.lists(_NUMBER, max_size=2)),
    st.builds(m.Aborted, st.sampled_from(["core", "frontend", "?"]), st.lists(_NUMBER, max_size=3)),
    st.builds(m.Stage, st.sampled_from(["compile", "adapter"]), _MS.map(ns)),
    st.builds(m.Hello, st.just("vllm"), model=st.just({"name": "a"})),
)
#: Marks as a process may send them that lies, or whose marks were lost; in order of time, as they are fed.
MARKS = st.lists(st.tuples(_MS, st.sampled_from([CORE, LOOP, WORK]), _BODY), max_size=40).map(
    lambda found: [mark(ms, tgid, body) for ms, tgid, body in sorted(found, key=lambda f: f[0])]
)


@settings(max_examples=150, deadline=None)
@given(MARKS, st.none() | st.integers(0, 120))
def test_nothing_that_is_said_breaks_it(marks: list[Mark], gone: int | None) -> None:
    table = EngineTable(50_000_000)
    half = len(marks) // 2
    table.begun([request(cookie=1, client_port=1)])
    table.feed(marks[:half], facts(), ns(60))
    if gone is not None:
        table.gone(CORE, ns(gone))
    table.feed(marks[half:], facts(), ns(100))
    for core in (CORE, LOOP, WORK):
        steps = table.steps(core, 0, ns(200))
        assert all(not s.done_ns or s.from_ns <= s.done_ns for s in steps)
        # Of what is in progress the table has the oldest.
        progress = table.in_progress(core)
        assert progress is None or not progress.done_ns
        alive = table.live_jobs(core)
        assert all(not j.finished_ns for j in alive)
    table.feed([], facts(), ns(10_000))
    for core in table.known_cores():
        assert all(not j.finished_ns for j in table.jobs(core))


def test_the_marks_of_a_recording_are_those_of_the_run(tmp_path: Path) -> None:
    lab = Lab()
    lab.serve(T0, 1)
    lab.hello(T0, model={"name": "tiny"})
    batches = lab.batches(T0 + 20, T0 + 100)
    path = tmp_path / "r.whyspan"
    writer = Writer(path, Header(whyspan="1", kernel="k", unix_offset_ns=0, instance="i"), SCHEMA)
    for b in batches:
        writer.add(b)
    writer.close()
    reader = Reader(path)
    again = list(reader.batches())
    reader.close()
    assert [b.marks for b in again] == [b.marks for b in batches]
    assert sum(len(b.marks) for b in again) == len(lab.marks)

    def counts(found: list[Batch]) -> dict[str, int]:
        table = EngineTable()
        for b in found:
            table.feed(b.marks, facts(), b.now_ns)
        return dict(table.counts)

    assert counts(again) == counts(batches)
    assert msgspec.msgpack.encode(again[0].marks) == msgspec.msgpack.encode(batches[0].marks)


def test_usual_steps_are_learnt_from_plain_ones_only() -> None:
    lab = Lab()
    at = T0
    for i in range(12):
        at = lab.serve(at, 10 + i) + 5
    lab.arrive(at, 1, logprobs=5)
    lab.step(at + 2, at + 2 + PREFILL_MS, others=[prefill(1)])
    lab.decode(at + 2 + PREFILL_MS, [1], 40, 90)
    table, _ = lab.table()
    usual = table.usual(CORE)
    assert usual is not None
    assert usual.of(1) == 10_000_000
    assert usual.prefill(64) == pytest.approx(10_000_000, rel=0.01)


def test_of_a_batch_never_seen_the_nearest_size_tells() -> None:
    marks = [queued(0, n) for n in range(1, 17)]
    at = 1.0
    for k in range(60):
        numbers = list(range(1, 2 if k % 2 else 17))  # alone, or sixteen
        marks += [step(at + 0.5, k, numbers), done(at + (10 if k % 2 else 40), k)]
        at += 50
    usual = fed(*marks, now=at).usual(CORE)
    assert usual is not None
    assert [usual.of(n) / 1e6 for n in (1, 2, 3, 15, 16, 500)] == [10, 10, 10, 40, 40, 40]
    assert usual.prefill(100) == 0  # no prompt seen
