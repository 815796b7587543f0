"""Facts: accumulated, bounded, and printable."""

from __future__ import annotations

from whyspan.facts import Facts
from whyspan.lru import Lru
from whyspan.model import Batch, CgroupFact, FdFact, ProcessFact, ThreadFact

from tests.unit.timeline import HOG, LOOP, SCHEMA, SERVER, WORKER, EventBuilder, ns


def facts_of(b: EventBuilder, *given: ProcessFact | ThreadFact | CgroupFact | FdFact) -> Facts:
    """Return the facts after one batch."""
    facts = Facts()
    facts.update(Batch(0, b.chunk(), facts=list(given)), SCHEMA)
    return facts


def test_names_come_from_events_and_from_facts() -> None:
    b = EventBuilder().add("sched_name", 0, HOG, comm=b"stress").add("sched_name", 0, WORKER, comm=b"pool-1")
    facts = facts_of(b, ProcessFact(SERVER, "python", service="svc"))
    assert (facts.comm(HOG), facts.comm(SERVER), facts.comm(0), facts.comm(5)) == (
        "stress",
        "python",
        "idle",
        "process 5",
    )
    assert facts.thread_name(WORKER) == "pool-1"
    assert facts.thread_name(5, SERVER) == "python"


def test_an_exec_renames_a_process_but_not_a_service() -> None:
    b = EventBuilder().add("sched_name", 0, HOG, comm=b"sh").add("sched_exec", 1, HOG, comm=b"dd")
    assert facts_of(b).comm(HOG) == "dd"
    facts = facts_of(b, ProcessFact(SERVER, "python", service="svc", start_ticks=7))
    facts.update(Batch(0, EventBuilder().add("sched_exec", 1, LOOP, comm=b"x").chunk()), SCHEMA)
    assert facts.comm(SERVER) == "python"


def test_a_child_of_a_service_that_lives_too_short_to_be_looked_at_keeps_service_and_name() -> None:
    facts = facts_of(EventBuilder(), ProcessFact(SERVER, "python", service="svc", start_ticks=7))
    b = EventBuilder().add("sched_fork", 0, LOOP, child_tid=200, child_tgid=200, comm=b"python")
    b.add("sched_exec", 1, 200, comm=b"cc1plus")
    # All that can be said once it has ended comes from its cgroup.
    facts.update(Batch(0, b.chunk(), facts=[ProcessFact(200, "cc1plus", cgroup="/a")]), SCHEMA)
    assert (facts.comm(200), facts.service(200)) == ("cc1plus", "svc")


def test_a_child_belongs_to_its_parents_service_until_told_otherwise() -> None:
    facts = facts_of(EventBuilder(), ProcessFact(SERVER, "python", service="svc", cgroup="/a"))
    fork = EventBuilder().add("sched_fork", 0, LOOP, child_tid=200, child_tgid=200, comm=b"engine")
    facts.update(Batch(0, fork.chunk()), SCHEMA)
    assert facts.tgids("svc") == {SERVER, 200}
    assert (facts.comm(200), facts.cgroup(200)) == ("engine", "/a")
    facts.update(Batch(0, EventBuilder().chunk(), facts=[ProcessFact(200, "gcc", start_ticks=9)]), SCHEMA)
    assert facts.tgids("svc") == {SERVER}


def test_a_new_thread_is_no_new_process() -> None:
    facts = facts_of(EventBuilder(), ProcessFact(SERVER, "python", service="svc"))
    fork = EventBuilder().add("sched_fork", 0, LOOP, child_tid=150, child_tgid=SERVER, comm=b"t")
    facts.update(Batch(0, fork.chunk()), SCHEMA)
    assert facts.thread_name(150) == "t"
    assert facts.process(150) is None


def test_no_service_has_no_processes() -> None:
    assert facts_of(EventBuilder(), ProcessFact(SERVER, "python")).tgids("") == frozenset()


def test_the_nearest_quota_upwards_counts() -> None:
    facts = facts_of(
        EventBuilder(),
        ProcessFact(1, "a", cgroup="/k/pod/c"),
        ProcessFact(2, "b", cgroup="/other"),
        CgroupFact("/k", 100, 1000),
        CgroupFact("/k/pod", 200, 1000),
        CgroupFact("/k/pod/c", 0, 1000),
    )
    quota = facts.quota(1)
    assert quota is not None
    assert quota.path == "/k/pod"
    assert facts.quota(2) is None
    assert facts.quota(3) is None
    facts.update(Batch(0, EventBuilder().chunk(), facts=[CgroupFact("/", 5, 10)]), SCHEMA)
    root = facts.quota(2)
    assert root is not None
    assert root.path == "/"


def test_a_name_cannot_reach_a_terminal_unescaped() -> None:
    b = EventBuilder().add("sched_name", 0, HOG, comm=b"\x1b[31mx\xff\0junk")
    assert facts_of(b).comm(HOG).isprintable()
    assert facts_of(b).comm(HOG).startswith("\\x1b[31mx")


def test_bounded_by_forgetting_what_was_used_longest_ago() -> None:
    lru: Lru[int, str] = Lru(2)
    lru.put(1, "a")
    lru.put(2, "b")
    assert lru.get(1) == "a"
    lru.put(3, "c")
    assert (lru.get(2), lru.get(1), lru.evicted, len(lru)) == (None, "a", 1, 2)
    facts = Facts(processes=3)
    facts.update(Batch(0, EventBuilder().chunk(), facts=[ProcessFact(i, "p") for i in range(9)]), SCHEMA)
    assert facts.process(5) is None
    assert facts.process(8) is not None


def test_descriptors_and_cpus() -> None:
    facts = facts_of(
        EventBuilder(), FdFact(1, 2, 3, "pipe"), ProcessFact(1, "a", cpus_allowed=2, cpu_count=8)
    )
    fact = facts.fd(1, 2)
    assert fact is not None
    assert fact.kind == "pipe"
    assert facts.fd(1, 3) is None
    assert (facts.cpus_allowed(1), facts.cpus_allowed(9)) == (2, 0)


def test_processes_pinned_apart_have_their_cpus_together() -> None:
    pinned = [ProcessFact(t, "a", cpus_allowed=2, cpu_mask=m) for t, m in ((1, "3"), (2, "6"), (3, "3"))]
    facts = facts_of(EventBuilder(), *pinned)
    assert facts.cpus_of([1, 3]) == 2
    assert facts.cpus_of([1, 2, 3]) == 3
    assert facts.cpus_of([1, 9]) == 2
    assert facts.cpus_of([]) == 0


def test_a_thread_seen_yielding_is_a_spinner_until_it_ends() -> None:
    facts = Facts()
    b = EventBuilder().out(1, WORKER, 0, flags=8).out(1, LOOP, 0, flags=1)
    facts.update(Batch(0, b.chunk()), SCHEMA)
    assert facts.spins(WORKER)
    assert not facts.spins(LOOP)
    facts.update(Batch(0, EventBuilder().out(2, LOOP).chunk()), SCHEMA)
    assert facts.spins(WORKER)  # once is enough


def test_a_child_that_lived_and_died_in_the_first_batch_is_of_the_service() -> None:
    b = EventBuilder().add("sched_fork", 1, SERVER, child_tid=500, child_tgid=500, comm=b"helper")
    b.add("sched_exit", 5, 500, aux=1, exit_code=9)
    (death,) = facts_of(b, ProcessFact(SERVER, "server", service="svc")).deaths("svc", 0, ns(10))
    assert (death.tgid, death.exit_code, death.born_ns) == (500, 9, ns(1))
