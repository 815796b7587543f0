"""The rules of memory: where they hold, where only a neighbour does, who is named."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
from whyspan import verdict
from whyspan.baseline import Baseline
from whyspan.causes import Classified, Context, rule_out
from whyspan.model import (
    Finding,
    HostMemoryFact,
    MemoryCgroupFact,
    MemoryFact,
    MemoryUser,
    ProcessFact,
    Request,
)

from tests.unit.timeline import EPOLL_WAIT, HOG, LOOP, SERVER, WORKER, D, EventBuilder, ms_of, ns, request

PAGE = mmap.PAGESIZE
MIB = 1 << 20
GROUP_ID, OTHER_ID = 4711, 4712
GROUP = "/pods/web"
KSWAPD, ENGINE, SIDECAR = 40, 200, 300


def running(until_ms: float = 200) -> EventBuilder:
    """LOOP runs all the time."""
    return EventBuilder().into(-5, LOOP).out(until_ms, LOOP)


def full(**fields: Any) -> MemoryCgroupFact:
    """The server's memory cgroup, full of page cache."""
    known = {
        "path": GROUP,
        "cgroup_id": GROUP_ID,
        "ts_ns": 0,
        "limit_bytes": 256 * MIB,
        "usage_bytes": 255 * MIB,
        "anon_bytes": 55 * MIB,
        "file_bytes": 200 * MIB,
        "hits": 41,
        "users": [MemoryUser(SIDECAR, "shipper", 30 * MIB)],
    }
    return MemoryCgroupFact(**{**known, **fields})


def at_limit(
    b: EventBuilder, start_ms: float, end_ms: float, tid: int = LOOP, **payload: Any
) -> EventBuilder:
    """The thread frees memory of the server's cgroup."""
    return b.reclaim("memcg_reclaim", start_ms, end_ms, tid, cgroup_id=GROUP_ID, limit_pages=65536, **payload)


def checks(found: Classified, ctx: Context, claimed: str = "") -> dict[str, str]:
    return {r.cause: r.check for r in rule_out(found, ctx, claimed)}


# memory.cgroup_limit


def test_reclaim_at_a_limit_names_the_cgroup_its_limit_and_who_fills_it() -> None:
    b = at_limit(running().known(full()), 20, 60, pages=512)
    found, ctx = b.classify(request(0, 100))
    assert ms_of(found) == {"memory.cgroup_limit": 40, "work.cpu": 60}
    culprit = found.culprits["memory.cgroup_limit"]
    assert (culprit.kind, culprit.name, culprit.tgid) == ("cgroup", GROUP, SERVER)
    assert culprit.detail == (
        "limit 256 MiB, 41 times at it; 255 MiB used: 55 MiB anonymous, 200 MiB page cache; "
        "most of it in process shipper (300), 30 MiB of its own"
    )
    assert "512 pages freed" in found.evidence["memory.cgroup_limit"][1]
    assert checks(found, ctx)["memory.reclaim"].startswith("no direct reclaim")


def test_sleep_and_run_within_reclaim_are_its_own_and_waits_for_a_cpu_are_not() -> None:
    b = EventBuilder().into(-5, LOOP).out(30, LOOP, D, nr=-1).wake(40, LOOP, context=2).into(41, LOOP)
    b.out(50, LOOP, 0, next_tid=HOG).into(60, LOOP, HOG).out(200, LOOP)
    found, _ = at_limit(b, 20, 80, throttled_ms=10).classify(request(0, 100))
    assert ms_of(found) == {
        "cpu.runqueue": 10,
        "memory.cgroup_limit": 49,
        "work.cpu": 40,
        "work.sched": 1,
    }
    assert "10 ms of it asleep" in found.evidence["memory.cgroup_limit"][1]


def test_only_the_time_within_the_calls_of_a_record_is_claimed() -> None:
    found, _ = at_limit(running(), 20, 60, busy_ms=15, calls=200).classify(request(0, 100))
    assert ms_of(found) == {"memory.cgroup_limit": 15, "work.cpu": 85}


def test_reclaim_that_began_before_the_request_is_cut_at_its_start() -> None:
    found, _ = at_limit(running(), -4, 30).classify(request(0, 100))
    assert ms_of(found) == {"memory.cgroup_limit": 30, "work.cpu": 70}


@pytest.mark.parametrize("lost", [{"begin_ns": 0}, {"busy_us": 0}, {"begin_ns": ns(500)}])
def test_a_record_that_cannot_be_is_survived(lost: dict[str, int]) -> None:
    found, _ = at_limit(running(), 20, 60, **lost).classify(request(0, 100))
    assert sum(ms_of(found).values()) == 100


def test_without_facts_the_limit_is_what_the_kernel_said() -> None:
    found, _ = at_limit(running(), 20, 60).classify(request(0, 100))
    culprit = found.culprits["memory.cgroup_limit"]
    assert (culprit.name, culprit.detail) == ("memory cgroup not known", f"limit {65536 * PAGE >> 20} MiB")


def test_memory_high_is_told_from_the_hard_limit() -> None:
    b = at_limit(running().known(full(high_bytes=128 * MIB, high_hits=7)), 20, 60, aux=0x100)
    found, _ = b.classify(request(0, 100))
    assert found.culprits["memory.cgroup_limit"].detail.startswith("memory.high 128 MiB, 7 times at it")


def test_a_worker_in_reclaim_that_the_loop_waits_for_is_on_the_path() -> None:
    b = EventBuilder().into(-5, LOOP).into(-5, WORKER, cpu=1).out(10, LOOP)
    b.wake(90, LOOP, WORKER).into(90, LOOP).out(200, LOOP).out(200, WORKER, cpu=1)
    found, _ = at_limit(b, 30, 80, WORKER).classify(request(0, 100))
    assert found.causes["memory.cgroup_limit"] == 50


def behind(*stretches: tuple[float, float], siblings: int = 3) -> EventBuilder:
    """LOOP waits 10 to 60 for the only CPU allowed behind WORKER, which frees memory meanwhile; others wait, too."""
    b = EventBuilder().known(full(), ProcessFact(SERVER, "svc", service="svc", cpus_allowed=1, cpu_count=2))
    b.into(-5, LOOP).out(10, LOOP, 0, next_tid=WORKER).into(10, WORKER, LOOP)
    b.out(60, WORKER, next_tid=LOOP).into(60, LOOP, WORKER).out(200, LOOP)
    for tid in range(110, 110 + siblings):
        b.tgids[tid] = SERVER
        b.into(-9, tid, cpu=1).out(-6, tid, 0, next_tid=HOG, cpu=1).into(300, tid, HOG, cpu=1)
    for start, end in stretches:
        at_limit(b, start, end, WORKER)
    return b


def test_a_wait_for_a_cpu_behind_siblings_in_reclaim_is_the_limits_doing() -> None:
    found, _ = behind((12, 30), (31, 58)).classify(request(0, 100))
    assert ms_of(found) == {"memory.cgroup_limit": 50, "work.cpu": 50}
    assert found.culprits["memory.cgroup_limit"].name == GROUP
    assert "90% of a wait for a CPU behind siblings" in found.evidence["memory.cgroup_limit"][1]


def test_siblings_that_free_little_memory_are_oversubscription() -> None:
    found, _ = behind((12, 30)).classify(request(0, 100))
    assert ms_of(found) == {"cpu.oversubscribed": 50, "work.cpu": 50}


def test_reclaim_of_a_sibling_that_was_ready_itself_had_no_cpu_to_take() -> None:
    b = at_limit(behind(), 12, 58, 110)
    assert ms_of(b.classify(request(0, 100))[0]) == {"cpu.oversubscribed": 50, "work.cpu": 50}


def test_a_wait_behind_a_stranger_in_reclaim_is_the_strangers() -> None:
    b = EventBuilder().into(-5, LOOP).out(10, LOOP, 0, next_tid=HOG).into(60, LOOP, HOG).out(200, LOOP)
    assert ms_of(at_limit(b, 12, 58, HOG).classify(request(0, 100))[0]) == {
        "cpu.runqueue": 50,
        "work.cpu": 50,
    }


def test_reclaim_of_a_thread_that_nobody_waits_for_is_not_the_cause() -> None:
    b = running().into(-5, WORKER, cpu=1).out(200, WORKER, cpu=1)
    found, ctx = at_limit(b, 20, 80, WORKER).classify(request(0, 100))
    assert "memory.cgroup_limit" not in found.causes
    assert "no reclaim at a memory limit" in checks(found, ctx)["memory.cgroup_limit"]


def test_a_leak_in_another_cgroup_at_the_same_time_is_not_the_cause() -> None:
    other = full(path="/pods/leaky", cgroup_id=OTHER_ID, hits=100_000, oom_kills=3)
    b = EventBuilder().into(-5, LOOP).out(20, LOOP, 0, next_tid=HOG).into(80, LOOP, HOG).out(200, LOOP)
    b.known(other, ProcessFact(SIDECAR, "leaky", service="batch"))
    b.oom(50, SIDECAR, "leaky", cgroup_id=OTHER_ID, anon_pages=60000)
    finding = explained(b, request(0, 100))
    assert finding.verdict.cause == "cpu.runqueue"
    assert not any(c.startswith("memory.") for c in finding.causes)
    ruled = {r.cause: r.check for r in finding.ruled_out}
    assert ruled["memory.oom"] == ("the out-of-memory killer chose process 300 (leaky), of service batch")
    assert "leaky" not in ruled["memory.cgroup_limit"]


def test_usual_reclaim_is_no_cause() -> None:
    b = Baseline()
    for i in range(60):
        b.observe(request(i * 1000, i * 1000 + 100), {"memory.cgroup_limit": 40, "work.cpu": 60})
    found = explained(at_limit(running(), 20, 60), request(0, 100), b)
    assert found.verdict.cause == "unknown"


# memory.reclaim


def host(**fields: Any) -> HostMemoryFact:
    known = {"ts_ns": 0, "total_bytes": 24 << 30, "free_bytes": 90 * MIB, "available_bytes": 20 << 30}
    return HostMemoryFact(**{**known, "cached_bytes": 19 << 30, "stalls": 5412, **fields})


def test_direct_reclaim_is_the_cause_however_much_is_available() -> None:
    # N5: 81 GB of stale page cache, MemAvailable as ever.
    b = running().known(host()).reclaim("direct_reclaim", 10, 90, LOOP, pages=32)
    found, _ = b.classify(request(0, 100))
    assert ms_of(found) == {"memory.reclaim": 80, "work.cpu": 20}
    culprit = found.culprits["memory.reclaim"]
    assert (culprit.kind, culprit.name) == ("cache", "page cache")
    assert "20.0 GiB said to be available" in culprit.detail


def test_it_is_ruled_out_by_reclaim_counters_not_by_what_is_available() -> None:
    found, ctx = running().known(host()).classify(request(0, 100))
    check = checks(found, ctx)["memory.reclaim"]
    assert (
        check == "no direct reclaim by a thread of the service; direct reclaims on the host since boot: 5412"
    )
    assert "available" not in check


def test_whoever_holds_more_than_the_page_cache_is_named() -> None:
    b = running().known(host(cached_bytes=MIB, users=[MemoryUser(HOG, "hog", 20 << 30)]))
    found, _ = b.reclaim("direct_reclaim", 10, 90, LOOP).classify(request(0, 100))
    culprit = found.culprits["memory.reclaim"]
    assert (culprit.kind, culprit.name, culprit.tgid) == ("process", "hog", HOG)


def test_kswapd_at_work_is_not_direct_reclaim() -> None:
    b = EventBuilder().into(-5, LOOP).out(20, LOOP, 0, next_tid=KSWAPD).into(80, LOOP, KSWAPD).out(200, LOOP)
    b.add("sched_name", 20, KSWAPD, comm=b"kswapd0", flags=0x00200000)
    found, ctx = b.known(host()).classify(request(0, 100))
    assert "memory.reclaim" not in found.causes
    assert checks(found, ctx)["memory.reclaim"].startswith("no direct reclaim by a thread of the service")


# memory.compaction


def test_compaction_is_told_from_reclaim() -> None:
    b = running().reclaim("compaction", 10, 60, LOOP).reclaim("direct_reclaim", 60, 80, LOOP)
    found, _ = b.classify(request(0, 100))
    assert ms_of(found) == {"memory.compaction": 50, "memory.reclaim": 20, "work.cpu": 30}
    assert found.culprits["memory.compaction"].tgid == SERVER
    assert "freed" not in found.evidence["memory.compaction"][1]


def test_both_are_reported_ranked() -> None:
    b = running().reclaim("compaction", 10, 60, LOOP).reclaim("direct_reclaim", 60, 80, LOOP)
    v = explained(b, request(0, 100)).verdict
    assert v.cause == "memory.compaction"
    assert [o.cause for o in v.others] == ["memory.reclaim"]


# memory.allocator_growth


def grown(heaps: int, *mib: float, tgid: int = SERVER) -> list[MemoryFact]:
    """A process's memory, a minute apart; its heaps hold 70% of it."""
    return [
        MemoryFact(
            tgid=tgid,
            ts_ns=(i + 1) * 60 * 10**9,
            cgroup=GROUP,
            anon_bytes=round(m * MIB),
            heaps=heaps,
            heap_bytes=round(0.7 * m * MIB),
            heaps_ns=1,
        )
        for i, m in enumerate(mib)
    ]


def explained(b: EventBuilder, wanted: Request, baseline: Baseline | None = None) -> Finding:
    found, ctx = b.classify(wanted)
    return verdict.explain(wanted, found, baseline or Baseline(), "latency", 0, ctx)


def test_growth_of_arenas_is_reported_beside_the_reclaim_that_it_leads_to() -> None:
    b = at_limit(running().known(full(), *grown(28, 40, 120, 230)), 20, 60)
    v = explained(b, request(0, 100)).verdict
    assert v.cause == "memory.cgroup_limit"
    assert [o.cause for o in v.others] == ["memory.allocator_growth"]
    assert (v.others[0].culprit.tgid, v.others[0].excess_ms) == (SERVER, v.excess_ms)
    assert (
        "behind it memory.allocator_growth: server (100): anonymous memory 40 MiB to 230 MiB in 2 min, "
        "28 heaps of malloc arenas hold 161 MiB"
    ) in v.evidence


@pytest.mark.parametrize(
    "samples",
    [
        grown(28, 200, 210, 205),  # many arenas, but no growth
        grown(2, 40, 120, 230),  # growth, but of two arenas: a leak or a cache
        grown(28, 230),  # not known for long enough
        grown(28, 40, 120, 230, tgid=HOG),  # of somebody else
    ],
)
def test_growth_is_not_reported_without_arenas_or_of_others(samples: list[MemoryFact]) -> None:
    b = at_limit(running().known(full(), *samples), 20, 60)
    v = explained(b, request(0, 100)).verdict
    assert (v.cause, v.others) == ("memory.cgroup_limit", [])


def test_growth_alone_slows_nothing() -> None:
    b = EventBuilder().into(-5, LOOP).out(20, LOOP, 0, next_tid=HOG).into(80, LOOP, HOG).out(200, LOOP)
    finding = explained(b.known(*grown(28, 40, 120, 230)), request(0, 100))
    assert (finding.verdict.cause, finding.verdict.others) == ("cpu.runqueue", [])
    check = {r.cause: r.check for r in finding.ruled_out}["memory.allocator_growth"]
    assert check.startswith("anonymous memory 40 MiB to 230 MiB in 2 min, 28 heaps")


# memory.oom


def killed(**fields: Any) -> Request:
    """A request of 80 ms that ended with its process."""
    known: dict[str, Any] = {"outcome": "killed", "ended_by": "process_exit", "exit_code": 9, "status": 0}
    return request(0, 80.1, **{**known, "head_ns": 0, "first_ns": 0, "head": "whole", **fields})


def failed(b: EventBuilder, wanted: Request, reason: str = "") -> Finding:
    found, ctx = b.classify(wanted)
    return verdict.explain(wanted, found, Baseline(), reason, 0, ctx)


def test_a_request_killed_with_its_process_names_who_filled_the_memory() -> None:
    users = [MemoryUser(SERVER, "server", 240 * MIB), MemoryUser(SIDECAR, "shipper", 9 * MIB)]
    b = running(80).known(full(users=users))
    b.oom(80, SERVER, "server", cgroup_id=GROUP_ID, limit_pages=65536, anon_pages=245 * MIB // PAGE)
    v = failed(b, killed()).verdict
    assert (v.cause, v.share, v.confidence) == ("memory.oom", 1, 1)
    assert (v.culprit.kind, v.culprit.name, v.culprit.tgid) == ("process", "server", SERVER)
    assert v.culprit.detail == "245 MiB resident of a limit of 256 MiB in memory cgroup /pods/web"
    assert v.sentence.startswith(
        "Process 100 (server) was killed by signal 9 (SIGKILL) after 80 ms, before any answer: the out-of-memory "
        "killer chose it, with 245 MiB resident; memory cgroup /pods/web was full: limit 256 MiB"
    )
    assert v.fix.startswith("Try ")


def test_the_victim_need_not_be_who_filled_it() -> None:
    b = running(80).known(full(users=[MemoryUser(SIDECAR, "shipper", 200 * MIB)]))
    b.oom(80, SERVER, "server", cgroup_id=GROUP_ID, limit_pages=65536, anon_pages=50 * MIB // PAGE)
    culprit = failed(b, killed()).verdict.culprit
    assert (culprit.name, culprit.tgid) == ("shipper", SIDECAR)


@pytest.mark.parametrize(
    "wanted",
    [
        killed(outcome="error", status=500, ended_by="server"),
        killed(outcome="reset", ended_by="engine_exit"),
        killed(outcome="reset", ended_by="server_close", status=200),
    ],
)
def test_a_request_fails_when_another_process_of_the_service_is_killed(wanted: Request) -> None:
    b = running().known(full(), ProcessFact(ENGINE, "EngineCore", service="svc", parent=SERVER))
    b.add("sched_fork", -500, SERVER, child_tid=ENGINE, child_tgid=ENGINE, comm=b"EngineCore")
    b.oom(40, ENGINE, "EngineCore", cgroup_id=GROUP_ID, limit_pages=65536, anon_pages=200 * MIB // PAGE)
    finding = failed(b, wanted, "latency")
    v = finding.verdict
    assert (v.cause, v.culprit.tgid, v.confidence) == ("memory.oom", ENGINE, 1)
    assert "the out-of-memory killer chose process 200 (EngineCore), with 200 MiB resident" in v.sentence
    assert "memory.oom" not in {r.cause for r in finding.ruled_out}


def test_a_request_after_the_kill_is_its_victim_until_somebody_was_born_again() -> None:
    wanted = killed(outcome="error", status=503, ended_by="server")
    for reborn, cause in ((False, "memory.oom"), (True, "unknown")):
        b = running().known(ProcessFact(ENGINE, "EngineCore", service="svc"))
        if reborn:  # half a second after the clock's start, half before the request
            b.known(ProcessFact(201, "EngineCore", service="svc", start_ticks=50))
        b.oom(-700, ENGINE, "EngineCore", anon_pages=1000)
        v = failed(b, wanted).verdict
        assert v.cause == cause, reborn
        if not reborn:
            assert v.confidence == 0.5
            assert "700 ms before the request" in v.sentence
            assert "the host's memory was full" in v.sentence


def killed_by_hand(b: EventBuilder) -> EventBuilder:
    return b.add("sched_exit", 80, SERVER, aux=1, exit_code=9)


def test_a_kill_that_no_memory_asked_for_is_not_oom() -> None:
    b = killed_by_hand(running(80).known(full(oom_kills=3)))
    finding = failed(b, killed())
    assert finding.verdict.cause == "unknown"
    assert "(SIGKILL)" in finding.verdict.sentence
    assert {r.cause: r.check for r in finding.ruled_out}[
        "memory.oom"
    ] == "the out-of-memory killer chose nobody"


def test_the_kill_of_a_stranger_is_not_why_the_request_failed() -> None:
    b = killed_by_hand(running(80).known(ProcessFact(SIDECAR, "leaky", service="batch")))
    b.oom(70, SIDECAR, "leaky", cgroup_id=OTHER_ID, anon_pages=60000)
    assert failed(b, killed()).verdict.cause == "unknown"


def test_too_many_requests_are_not_the_killers_fault() -> None:
    b = running().known(ProcessFact(ENGINE, "EngineCore", service="svc")).oom(40, ENGINE)
    assert failed(b, killed(outcome="error", status=429, ended_by="server")).verdict.cause == "unknown"


def test_who_left_by_itself_is_only_likely_to_have_left_over_it() -> None:
    known = ProcessFact(ENGINE, "EngineCore", service="svc")
    during = running().known(known).oom(40, ENGINE)
    left = killed(outcome="reset", ended_by="client_close", left_ns=ns(80))
    v = failed(during, left).verdict
    assert (v.cause, v.confidence) == ("memory.oom", 0.5)
    before = running().known(known).oom(-500, ENGINE)
    assert failed(before, left).verdict.cause == "unknown"


def test_a_victim_known_only_by_its_thread_is_found() -> None:
    b = running(80)
    b.tgids[SERVER] = 0
    b.add("oom_victim", 80, SERVER)
    b.tgids[SERVER] = SERVER
    b.add("sched_exit", 80.05, SERVER, aux=1, exit_code=9)
    assert failed(b, killed()).verdict.cause == "memory.oom"


def test_a_slow_request_that_the_killer_ended_tells_both() -> None:
    b = at_limit(running(80).known(full()), 20, 79)
    b.oom(80, SERVER, "server", cgroup_id=GROUP_ID, limit_pages=65536, anon_pages=60000)
    v = failed(b, killed(), "latency").verdict
    assert v.cause == "memory.oom"
    assert v.others[0].cause == "memory.cgroup_limit"
    assert any("freeing memory of its cgroup" in line for line in v.evidence)


def test_a_wait_for_the_network_beside_full_memory_is_not_memory() -> None:
    b = EventBuilder().into(-5, LOOP).out(10, LOOP, nr=EPOLL_WAIT).wake(90, LOOP, context=2, vec=3)
    b.into(90, LOOP).recv(91, LOOP).out(200, LOOP).known(full(), host())
    found, _ = b.classify(request(0, 100))
    assert not any(c.startswith("memory.") for c in found.causes)
