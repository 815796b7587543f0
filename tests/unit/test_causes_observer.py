"""Rules on observers, and the rest of the CPU's: claims, refusals and culprits."""

from __future__ import annotations

import pytest
from whyspan.beside import Beside
from whyspan.causes import Classified, Context, classify, own_cost, rule_out
from whyspan.critical_path import walk
from whyspan.model import HostCpuFact, OwnFact, ProbeCostFact, ProcessFact, Request, TracerFact
from whyspan.timeline import RUNNING

from tests.unit.timeline import (
    EPOLL_WAIT,
    HOG,
    LOOP,
    MS,
    SENDTO,
    SERVER,
    WORKER,
    EventBuilder,
    ms_of,
    ns,
    request,
)

TOOL, OTHER = 700, 701
STOPPED, TRACED = 4, 8
SCRAPE = 78  # the connection of a scrape


def checks(found: Classified, ctx: Context) -> dict[str, str]:
    return {r.cause: r.check for r in rule_out(found, ctx)}


# observer.tracer


def waiting_for(rival: int, until: float = 60) -> EventBuilder:
    return (
        EventBuilder().into(-5, LOOP).out(10, LOOP, 0, next_tid=rival).into(until, LOOP, rival).out(110, LOOP)
    )


@pytest.mark.parametrize("comm", ["falco", "perf", "strace", "bpftrace", "py-spy", "auditd", "tetragon"])
def test_a_known_tool_that_had_the_cpu_is_an_observer(comm: str) -> None:
    found, ctx = waiting_for(TOOL).known(ProcessFact(TOOL, comm)).classify(request(0, 100))
    assert ms_of(found) == {"observer.tracer": 50, "work.cpu": 50}
    culprit = found.culprits["observer.tracer"]
    assert (culprit.kind, culprit.name, culprit.tgid) == ("process", comm, TOOL)
    assert checks(found, ctx)["cpu.runqueue"].startswith("long waits for a CPU 50.0 ms")


def test_our_own_processes_are_observers_whatever_they_are_called() -> None:
    b = waiting_for(TOOL).known(ProcessFact(TOOL, "python3"), OwnFact(TOOL, "whyspan"))
    found, _ = b.classify(request(0, 100))
    assert found.culprits["observer.tracer"].name == "whyspan"


@pytest.mark.parametrize("comm", ["python3", "performance", "stracer", ""])
def test_any_other_process_is_a_neighbour(comm: str) -> None:
    found, ctx = waiting_for(HOG).known(ProcessFact(HOG, comm)).classify(request(0, 100))
    assert ms_of(found) == {"cpu.runqueue": 50, "work.cpu": 50}
    assert checks(found, ctx)["observer.tracer"].endswith("behind known tools 0.0 ms")


def test_a_tool_and_a_neighbour_are_told_apart() -> None:
    b = EventBuilder().into(-5, LOOP).known(ProcessFact(TOOL, "falco"))
    b.out(10, LOOP, 0, next_tid=TOOL).into(40, LOOP, TOOL).out(50, LOOP, 0, next_tid=HOG).into(90, LOOP, HOG)
    found, _ = b.out(120, LOOP).classify(request(0, 100))
    assert ms_of(found) == {"observer.tracer": 30, "cpu.runqueue": 40, "work.cpu": 30}


def test_many_short_waits_for_a_tool_count() -> None:
    b = EventBuilder().into(-5, LOOP).known(ProcessFact(TOOL, "strace"))
    for k in range(50):
        b.out(2 * k, LOOP, 0, next_tid=TOOL).into(2 * k + 0.5, LOOP, TOOL)
    found, _ = b.out(120, LOOP).classify(request(0, 100))
    assert ms_of(found)["observer.tracer"] == 25


def stopped(state: int, by: int = OTHER) -> EventBuilder:
    """LOOP is stopped 10-60."""
    b = EventBuilder().into(-5, LOOP).out(10, LOOP, state, nr=-2, flags=0).wake(60, LOOP, by)
    return b.into(60.1, LOOP).out(110, LOOP).known(ProcessFact(OTHER, "dbg"))


@pytest.mark.parametrize("state", [STOPPED, TRACED])
def test_a_stopped_thread_names_who_let_it_go_on(state: int) -> None:
    found, _ = stopped(state).classify(request(0, 100))
    assert ms_of(found)["observer.tracer"] == 50
    culprit = found.culprits["observer.tracer"]
    assert (culprit.kind, culprit.name, culprit.tgid) == ("process", "dbg", OTHER)
    assert culprit.detail.startswith("stopped by a tracer" if state == TRACED else "stopped by a signal")


def test_whoever_was_seen_tracing_beats_whoever_woke() -> None:
    b = stopped(TRACED).known(TracerFact(LOOP, TOOL, "gdb"))
    found, _ = b.classify(request(0, 100))
    assert (found.culprits["observer.tracer"].name, found.culprits["observer.tracer"].tgid) == ("gdb", TOOL)


def test_a_tracer_is_not_blamed_for_a_signal_of_another() -> None:
    found, _ = stopped(STOPPED).known(TracerFact(LOOP, TOOL, "gdb")).classify(request(0, 100))
    assert found.culprits["observer.tracer"].name == "dbg"


def test_a_stop_whose_end_was_not_seen_names_nobody() -> None:
    b = EventBuilder().into(-5, LOOP).out(10, LOOP, TRACED, nr=-2, flags=0).into(60, LOOP).out(110, LOOP)
    found, _ = b.classify(request(0, 100))
    assert ms_of(found)["observer.tracer"] == 50
    assert found.culprits["observer.tracer"].tgid == 0
    assert all(s.inferred for s in found.segments if s.cause == "observer.tracer")


def test_a_stop_outside_the_request_is_nothing() -> None:
    found, ctx = stopped(TRACED).classify(request(65, 100))
    assert "observer.tracer" not in found.causes
    assert checks(found, ctx)["observer.tracer"].startswith(
        "threads of the path stopped by a tracer or signal 0.0"
    )


def test_a_thread_that_polls_for_one_that_is_held_waits_for_the_tracer() -> None:
    b = EventBuilder().into(-5, LOOP).into(-5, WORKER).known(TracerFact(WORKER, TOOL, "gdb"))
    b.out(20, WORKER, TRACED, nr=-2, flags=0).wake(70, WORKER, TOOL).into(70, WORKER)
    for k in range(9):  # looks every 10 ms whether there is anything
        b.out(10 * k, LOOP).wake(10 * k + 9, LOOP, context=1).into(10 * k + 9, LOOP)
    found, _ = b.out(110, LOOP).classify(request(0, 100))
    assert ms_of(found)["observer.tracer"] == 45
    culprit = found.culprits["observer.tracer"]
    assert (culprit.name, culprit.tgid) == ("gdb", TOOL)
    assert all(s.inferred for s in found.segments if s.cause == "observer.tracer")
    assert "python.loop_blocked" not in found.causes


@pytest.mark.parametrize("fact", [[], [TracerFact(WORKER, 0)]])
def test_a_sleep_beside_a_stop_that_nobody_is_known_for_stays_a_sleep(fact: list[TracerFact]) -> None:
    b = EventBuilder().into(-5, LOOP).into(-5, WORKER).known(*fact)
    b.out(20, WORKER, TRACED, nr=-2, flags=0).wake(70, WORKER, TOOL).into(70, WORKER)
    b.out(10, LOOP).wake(90, LOOP, context=1).into(90, LOOP)
    found, _ = b.out(110, LOOP).classify(request(0, 100))
    assert "observer.tracer" not in found.causes


def test_an_ordinary_sleep_is_no_stop() -> None:
    b = EventBuilder().into(-5, LOOP).out(10, LOOP).wake(60, LOOP, TOOL).into(60, LOOP).out(110, LOOP)
    found, _ = b.known(ProcessFact(TOOL, "gdb")).classify(request(0, 100))
    assert "observer.tracer" not in found.causes


# our own cost


def busy(edges: int) -> EventBuilder:
    b = EventBuilder().into(-5, LOOP)
    for k in range(edges):
        b.edge("edge_write", 1 + k * 0.01, LOOP)
    b.edge("edge_write", 50, WORKER)  # another thread's, off the path
    return b.out(110, LOOP)


def test_what_our_own_probes_cost_is_told_from_one_hundredth_on() -> None:
    b = busy(1009).known(ProbeCostFact("edges", 2000.0, ("edge_write", "edge_read")))
    path, timelines = b.walk(request(0, 100))
    ctx = Context(timelines, request(0, 100))
    assert own_cost.own_ns(path, ctx) == {"edges": 1009 * 2000.0}
    (line,) = own_cost.evidence(path, ctx)
    assert line == "whyspan's own probes took about 2.0 ms of it (2.0%), most of it edges (2.0 ms)"


def test_less_is_not_worth_a_line_and_what_is_not_measured_none() -> None:
    for b in (busy(101).known(ProbeCostFact("edges", 2000.0, ("edge_write",))), busy(1009)):
        path, timelines = b.walk(request(0, 100))
        assert own_cost.evidence(path, Context(timelines, request(0, 100))) == []


# observer.scrape


def scraping(ms: float, *others: Request, asked: Request | None = None) -> tuple[Classified, Context]:
    """LOOP reads a scrape at 10, works for it, and answers it; the request is read then, and answered at 10 ms more."""
    end = 10 + ms
    b = EventBuilder().into(-5, LOOP).recv(10, LOOP, key=SCRAPE).send(end, LOOP, key=SCRAPE)
    b.recv(end + 1, LOOP).send(end + 9, LOOP).out(end + 10, LOOP, nr=EPOLL_WAIT)
    beside = Beside()
    first = asked or scrape(10, end)
    wanted = request(12, end + 9, recv_ns=ns(end + 1))
    beside.begun([*others, first, wanted])
    path, timelines = b.walk(wanted)
    path = walk(timelines, wanted)
    ctx = Context(timelines, wanted, beside=beside)
    return classify(path, ctx), ctx


def scrape(start: float, end: float, **fields: object) -> Request:
    values = {
        "method": "GET",
        "route": "/metrics",
        "cookie": SCRAPE,
        "trace_id": "f" * 32,
        "recv_ns": ns(start),
    }
    return request(start, end, **{**values, "agent": "Prometheus/2.53.0", **fields})


def test_a_scrape_on_the_loop_is_named_with_its_length_and_interval() -> None:
    found, _ = scraping(100, *(scrape(10 - 1000 * k, 60 - 1000 * k, cookie=900 + k) for k in (3, 2, 1)))
    assert ms_of(found)["observer.scrape"] == 98
    assert "python.loop_blocked" not in found.causes
    culprit = found.culprits["observer.scrape"]
    assert (culprit.kind, culprit.name, culprit.trace_id) == ("request", "GET /metrics", "f" * 32)
    assert culprit.detail == "100 ms of exposition, every 1.0 s, for Prometheus/2.53.0"


def test_a_scraper_is_known_by_its_name_and_metrics_by_their_path() -> None:
    for asked in (scrape(10, 110, route="/stats"), scrape(10, 110, agent="curl/8.0")):
        found, _ = scraping(100, asked=asked)
        assert ms_of(found)["observer.scrape"] == 98


def test_other_work_on_the_loop_is_not_a_scrape() -> None:
    found, ctx = scraping(100, asked=scrape(10, 110, route="/v1/models", agent="curl/8.0"))
    assert ms_of(found)["python.loop_blocked"] == 98
    assert checks(found, ctx)["observer.scrape"] == "no scrape of metrics was served beside the request"


def test_a_scrape_that_is_short_is_nothing() -> None:
    found, ctx = scraping(3)
    assert "observer.scrape" not in found.causes
    assert checks(found, ctx)["observer.scrape"] == "no scrape of metrics was served beside the request"


def test_a_scrape_beside_another_handler_takes_only_its_own() -> None:
    b = (
        EventBuilder()
        .into(-5, LOOP)
        .recv(10, LOOP, key=SCRAPE)
        .send(30, LOOP, key=SCRAPE)
        .recv(31, LOOP, key=79)
    )
    b.send(101, LOOP, key=79).recv(102, LOOP).send(110, LOOP).out(111, LOOP, nr=EPOLL_WAIT)
    wanted = request(12, 110, recv_ns=ns(102))
    beside = Beside()
    beside.begun([scrape(10, 30), wanted])
    path, timelines = b.walk(wanted)
    ctx = Context(timelines, wanted, beside=beside)
    found = classify(path, ctx)
    assert ms_of(found)["observer.scrape"] == 18
    assert ms_of(found)["python.loop_blocked"] == 70


def test_the_scrape_itself_is_not_slow_because_of_itself() -> None:
    b = EventBuilder().into(-5, LOOP).recv(10, LOOP, key=SCRAPE).send(110, LOOP, key=SCRAPE).out(111, LOOP)
    wanted = scrape(10, 110)
    beside = Beside()
    beside.begun([wanted])
    path, timelines = b.walk(wanted)
    found = classify(path, Context(timelines, wanted, beside=beside))
    assert "observer.scrape" not in found.causes


# cpu.runqueue: interrupts, threads of the kernel


def stolen(nr: int = -1, vec: int = 3) -> EventBuilder:
    b = EventBuilder().into(-5, LOOP)
    for k in range(5):
        b.add("sched_stolen", 20 + 8 * k, LOOP, aux=vec, stolen_ns=4 * MS, syscall_nr=nr)
    return b.out(110, LOOP)


def test_what_interrupts_take_from_a_running_thread_is_theirs() -> None:
    found, _ = stolen().classify(request(0, 100))
    assert ms_of(found) == {"cpu.runqueue": 20, "work.cpu": 80}
    culprit = found.culprits["cpu.runqueue"]
    assert (culprit.kind, culprit.name) == ("process", "soft interrupt NET_RX")
    assert all(s.state == RUNNING and s.inferred for s in found.segments if s.cause == "cpu.runqueue")


def test_what_its_own_sending_set_off_is_its_own_work() -> None:
    found, _ = stolen(nr=SENDTO).classify(request(0, 100))
    assert ms_of(found) == {"work.cpu": 100}


@pytest.mark.parametrize(
    ("comm", "says"), [("ksoftirqd/1", "soft interrupts"), ("kworker/1:2-eve", "work queue")]
)
def test_threads_of_the_kernel_are_named_for_what_they_do(comm: str, says: str) -> None:
    found, _ = waiting_for(HOG).known(ProcessFact(HOG, comm)).classify(request(0, 100))
    culprit = found.culprits["cpu.runqueue"]
    assert culprit.name == comm
    assert culprit.detail.startswith(says)


# cpu.power


HOST = HostCpuFact(nodes=1, idle_states=(("POLL", 0), ("C1", 2), ("C6", 133)), base_khz=2_000_000)


def woken(late_ms: float, state: int | None = 2, prev: int = 0) -> EventBuilder:
    """LOOP sleeps 10-30 and is running late_ms after its wake-up, on CPU 0, which was idle."""
    b = EventBuilder().into(-5, LOOP).out(10, LOOP).wake(30, LOOP, context=1).into(30 + late_ms, LOOP, prev)
    if state is not None:
        b.add("power_woken", 30 + late_ms, LOOP, aux=state, idle_ns=20 * MS, left_ns=1000)
    return b.out(110, LOOP).known(HOST)


def test_an_idle_cpu_that_had_to_leave_a_deep_state_first() -> None:
    found, _ = woken(0.2).classify(request(0, 100))
    assert ms_of(found)["cpu.power"] == 0.2
    culprit = found.culprits["cpu.power"]
    assert (culprit.kind, culprit.name, culprit.detail) == (
        "cpu",
        "0",
        "idle in C6, which takes 133 us to leave",
    )


def test_a_prompt_wake_up_or_one_from_a_light_state_is_not() -> None:
    for b in (woken(0.02), woken(0.2, None)):
        found, ctx = b.classify(request(0, 100))
        assert "cpu.power" not in found.causes
        assert checks(found, ctx)["cpu.power"]


def test_a_cpu_that_somebody_had_is_the_neighbour_s() -> None:
    found, _ = woken(20, None, HOG).classify(request(0, 100))
    assert ms_of(found)["cpu.runqueue"] == 20
    assert "cpu.power" not in found.causes


def test_a_cpu_below_its_base_frequency_takes_its_share() -> None:
    b = EventBuilder().into(-5, LOOP).out(110, LOOP).known(HOST)
    b.add("power_frequency", -10, 0, aux=0, khz=1_500_000, before_khz=2_500_000)
    b.add("power_frequency", -10, 0, aux=1, khz=800_000, before_khz=2_500_000)  # another CPU
    found, _ = b.classify(request(0, 110))
    assert ms_of(found)["cpu.power"] == pytest.approx(28.75)
    assert "1500 MHz, 75% of its base frequency" in found.evidence["cpu.power"]


def test_a_cpu_at_its_base_frequency_is_not() -> None:
    b = EventBuilder().into(-5, LOOP).out(110, LOOP).known(HOST)
    b.add("power_frequency", -10, 0, aux=0, khz=2_000_000, before_khz=1_500_000)
    found, _ = b.classify(request(0, 110))
    assert "cpu.power" not in found.causes


# cpu.numa


def test_pages_that_balancing_moved_in_a_fault() -> None:
    b = EventBuilder().into(-5, LOOP).out(110, LOOP)
    for k in range(3):
        b.add("numa_migrated", 20 + 10 * k, LOOP, begin_ns=ns(15 + 10 * k), pages=512, failed=0)
    b.add("numa_moved", 50, LOOP, from_cpu=0, to_cpu=40)
    found, _ = b.classify(request(0, 100))
    assert ms_of(found) == {"cpu.numa": 15, "work.cpu": 85}
    culprit = found.culprits["cpu.numa"]
    assert (culprit.kind, culprit.tgid) == ("process", SERVER)
    assert "NUMA balancing moved 512 pages; the thread was moved 1 times" in found.evidence["cpu.numa"]


def test_another_thread_s_pages_are_not_on_the_path() -> None:
    b = EventBuilder().into(-5, LOOP).out(110, LOOP)
    b.add("numa_migrated", 40, WORKER, begin_ns=ns(20), pages=512)
    found, _ = b.classify(request(0, 100))
    assert ms_of(found) == {"work.cpu": 100}


def test_a_host_with_one_node_rules_it_out() -> None:
    found, ctx = EventBuilder().into(-5, LOOP).out(110, LOOP).known(HOST).classify(request(0, 100))
    assert checks(found, ctx)["cpu.numa"] == "the host has one NUMA node"
