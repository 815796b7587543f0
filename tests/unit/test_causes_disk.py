"""Rules on page faults, swap and write-back: what is claimed, what is their neighbours', and who is named."""

from __future__ import annotations

import pytest
from whyspan import marks
from whyspan.baseline import Baseline, Usual
from whyspan.causes import rule_out
from whyspan.model import DiskFact, FdFact, MappedFact, ProcessFact, Request, SwapFact, WriterFact
from whyspan.verdict import explain

from tests.unit.enginelab import T0, WORK, Lab, findings, prefill
from tests.unit.timeline import FSYNC, LOOP, MS, SERVER, WRITE, D, EventBuilder, ms_of, ns, request

FAULT, READ, SWAP = 1, 2, 8
WRITES, SYNC, KERNEL = 1, 2, 8
DISK, SWAPS = 7 << 20, 7 << 20 | 1
WEIGHTS = "/models/model.safetensors"
KWORKER, WRITER = 30, 600


def faults(flags: int = FAULT | READ, nr: int = -1, **fields: int) -> EventBuilder:
    """LOOP sleeps 10-60 in a page fault on a file of the disk, which is read meanwhile."""
    b = EventBuilder().into(-5, LOOP).out(10, LOOP, D, nr=nr).wake(60, LOOP, context=2, vec=4)
    wait = {"inode": 12, "dev": DISK, "pages": 32, "syscall_nr": nr, **fields}
    b.add("page_wait", 10.01, LOOP, aux=flags, **wait)
    b.known(MappedFact(SERVER, 12, DISK, WEIGHTS), DiskFact(DISK, "loop0", ("/models",)))
    b.add("block_done", 59, LOOP, issue_ns=ns(12), latency_ns=47 * MS, dev=DISK, bytes=131_072)
    return b.into(60.1, LOOP).send(70, LOOP).out(80, LOOP)


# memory.mmap_faults


def test_a_fault_on_a_mapped_file_names_the_file_its_size_and_its_disk() -> None:
    found, ctx = faults().classify(request(0, 70))
    assert ms_of(found)["memory.mmap_faults"] == 50
    culprit = found.culprits["memory.mmap_faults"]
    assert (culprit.kind, culprit.name, culprit.tgid) == ("file", WEIGHTS, SERVER)
    assert culprit.detail == "1 faults slept, 0.1 MB read from device loop0 (7:0, mounted at /models)"
    checks = {r.cause: r.check for r in rule_out(found, ctx, "memory.mmap_faults")}
    assert checks["memory.swap"].startswith("no page fault on the path that waited for swap")


def test_faults_that_are_short_add_up() -> None:
    b = EventBuilder().into(-5, LOOP)
    for t in range(10, 60, 2):
        b.out(t, LOOP, D, nr=-1).wake(t + 1, LOOP, context=2, vec=4).into(t + 1, LOOP)
        b.add("page_wait", t, LOOP, aux=FAULT | READ, inode=12, dev=DISK, pages=1, syscall_nr=-1)
    found, _ = b.out(80, LOOP).classify(request(0, 70))
    assert ms_of(found)["memory.mmap_faults"] == 25
    culprit = found.culprits["memory.mmap_faults"]
    assert (culprit.name, culprit.detail[:17]) == ("inode 12 on device 7:0", "25 faults slept, ")


def test_a_fault_in_a_call_that_copies_is_one_too() -> None:
    found, _ = faults(nr=44).classify(request(0, 70))
    assert ms_of(found)["memory.mmap_faults"] == 50
    assert any("page fault in sendto on" in s.detail for s in found.segments)


def test_a_read_by_a_call_is_no_fault() -> None:
    found, _ = faults(READ, nr=0).classify(request(0, 70))
    assert "memory.mmap_faults" not in found.causes
    assert ms_of(found)["io.disk_contention"] == 50


def test_a_disk_that_others_keep_busy_is_to_blame_for_a_slow_fault() -> None:
    b = faults().known(ProcessFact(555, "dd"))
    b.add("block_done", 50, 555, aux=WRITES, issue_ns=ns(5), latency_ns=45 * MS, dev=DISK, bytes=8 << 20)
    found, ctx = b.classify(request(0, 70))
    assert ms_of(found)["io.disk_contention"] == 50
    assert found.culprits["io.disk_contention"].name == "dd"
    assert "memory.mmap_faults" not in found.causes
    checks = {r.cause: r.check for r in rule_out(found, ctx)}
    assert checks["memory.mmap_faults"] == "1 page faults on mapped files waited 50.0 ms for storage"


def test_a_neighbour_that_asks_for_little_is_not() -> None:
    b = faults().known(ProcessFact(555, "dd"))
    b.add("block_done", 50, 555, aux=WRITES, issue_ns=ns(5), latency_ns=45 * MS, dev=DISK, bytes=65_536)
    found, _ = b.classify(request(0, 70))
    assert ms_of(found)["memory.mmap_faults"] == 50


def test_another_disks_neighbour_is_a_decoy() -> None:
    b = faults()
    b.add("block_done", 50, 555, aux=WRITES, issue_ns=ns(5), latency_ns=45 * MS, dev=9 << 20, bytes=64 << 20)
    found, _ = b.classify(request(0, 70))
    assert ms_of(found)["memory.mmap_faults"] == 50


def test_without_a_disk_the_file_system_is_named() -> None:
    b = faults(dev=52)
    b.known(MappedFact(SERVER, 12, 52, WEIGHTS), DiskFact(52, "nfs4 filer:/models", ("/models",)))
    found, _ = b.classify(request(0, 70))
    assert "nfs4 filer:/models (0:52" in found.culprits["memory.mmap_faults"].detail


def test_faults_off_the_path_are_not_claimed() -> None:
    b = EventBuilder().into(-5, LOOP).out(80, LOOP)
    b.tgids[110] = SERVER
    b.out(10, 110, D, nr=-1).wake(60, 110, context=2, vec=4).into(60, 110)
    b.add("page_wait", 10, 110, aux=FAULT | READ, inode=12, dev=DISK, pages=1, syscall_nr=-1)
    found, ctx = b.classify(request(0, 70))
    assert ms_of(found) == {"work.cpu": 70}
    checks = {r.cause: r.check for r in rule_out(found, ctx)}
    assert (
        checks["memory.mmap_faults"] == "no page fault on a mapped file that waited for storage on the path"
    )


# memory.swap


def swapped(**fields: int) -> EventBuilder:
    b = faults(SWAP, inode=0, dev=0, pages=0, swapped=4096, **fields)
    return b.known(SwapFact((SWAPS,), ("partition /dev/loop1",)))


def test_a_fault_on_swapped_memory_names_the_process_and_how_much_of_it_is_out() -> None:
    b = swapped()
    b.add("block_done", 59, LOOP, issue_ns=ns(12), latency_ns=47 * MS, dev=SWAPS, bytes=4096)
    found, _ = b.classify(request(0, 70))
    assert ms_of(found)["memory.swap"] == 50
    culprit = found.culprits["memory.swap"]
    assert (culprit.kind, culprit.name, culprit.tgid) == ("process", "server", SERVER)
    assert culprit.detail.startswith("1 faults on its memory in partition /dev/loop1, where 16 MiB of it is")
    assert not any(s.inferred for s in found.segments if s.cause == "memory.swap")


def test_without_a_read_of_the_swap_device_it_is_inferred() -> None:
    found, _ = swapped().classify(request(0, 70))
    assert [s.inferred for s in found.segments if s.cause == "memory.swap"] == [True]


@pytest.mark.parametrize("name", ["direct_reclaim", "memcg_reclaim"])
def test_a_thread_that_frees_memory_then_does_not_wait_for_swap(name: str) -> None:
    b = swapped()
    if name not in b.schema.types:
        pytest.skip(f"no {name}")
    b.add(name, 61, LOOP, begin_ns=ns(9), busy_us=52_000, calls=1, pages=32)
    found, _ = b.classify(request(0, 70))
    assert "memory.swap" not in found.causes


def test_a_fault_on_a_file_of_a_process_in_swap_is_the_files() -> None:
    found, _ = faults(swapped=4096).classify(request(0, 70))
    assert "memory.swap" not in found.causes
    assert ms_of(found)["memory.mmap_faults"] == 50


# io.writeback


def syncing(
    *, own_name: str = "/data/kv.db", flushed: int = 8 << 20, aux: int = WRITES | KERNEL
) -> EventBuilder:
    """LOOP waits 10-60 in fsync of a file while a kernel thread writes back *flushed* bytes."""
    b = EventBuilder().into(-5, LOOP).out(10, LOOP, D, nr=FSYNC, arg0=9).wake(60, LOOP, 31)
    b.add("fd_block", 10, LOOP, aux=1, fd=9, inode=4, dev=DISK, syscall_nr=FSYNC)
    b.known(FdFact(SERVER, 9, 4, "file", own_name), DiskFact(DISK, "loop0", ("/data",)))
    b.add("block_done", 59, LOOP, aux=WRITES | SYNC, issue_ns=ns(55), latency_ns=4 * MS, dev=DISK, bytes=4096)
    if flushed:
        b.add(
            "block_done", 55, KWORKER, aux=aux, issue_ns=ns(12), latency_ns=43 * MS, dev=DISK, bytes=flushed
        )
    return b.into(60.1, LOOP).send(70, LOOP).out(80, LOOP)


def elsewhere(dev: int, *, own: bool) -> EventBuilder:
    """LOOP waits 10-60 in fsync of its log on *dev*; *own*: which had a request before that. Another disk is busy."""
    b = EventBuilder().into(-5, LOOP).out(10, LOOP, D, nr=FSYNC, arg0=9).wake(60, LOOP, 31)
    b.add("fd_block", 10, LOOP, aux=1, fd=9, inode=4, dev=dev, syscall_nr=FSYNC)
    b.known(FdFact(SERVER, 9, 4, "file", "/data/serving.log"), ProcessFact(555, "dd"))
    if own:
        b.add(
            "block_done", 8, LOOP, aux=WRITES | SYNC, issue_ns=ns(5), latency_ns=3 * MS, dev=dev, bytes=4096
        )
    b.add("block_done", 50, 555, aux=WRITES, issue_ns=ns(5), latency_ns=45 * MS, dev=9 << 20, bytes=8 << 20)
    return b.into(60.1, LOOP).send(70, LOOP).out(80, LOOP)


@pytest.mark.parametrize(
    ("dev", "own", "cause"),
    [
        (DISK, False, "io.log_blocked"),  # a loop device
        (259 << 20, True, "io.log_blocked"),
        (259 << 20 | 2, False, "io.disk_contention"),  # a partition: its requests go by the disk's number
    ],
)
def test_another_disk_is_evidence_only_where_ones_own_number_tells_nothing(
    dev: int, own: bool, cause: str
) -> None:
    found, _ = elsewhere(dev, own=own).classify(request(0, 70))
    assert ms_of(found)[cause] == 50
    assert len(set(found.causes) & {"io.log_blocked", "io.disk_contention"}) == 1


def flush_of(b: EventBuilder, inode: int, aux: int = 2, pages: int = 2048) -> EventBuilder:
    return b.add("file_flush", 12, KWORKER, aux=aux, inode=inode, dev=DISK, pages=pages, file=b"snapshot.bin")


def test_an_fsync_behind_anothers_dirty_data_names_who_has_the_file_open() -> None:
    b = flush_of(syncing(), 77).known(WriterFact(DISK, 77, WRITER, "trainer", "/data/snapshot.bin"))
    found, _ = b.classify(request(0, 70))
    assert ms_of(found)["io.writeback"] == 50
    culprit = found.culprits["io.writeback"]
    assert (culprit.kind, culprit.name, culprit.tgid) == ("process", "trainer", WRITER)
    assert culprit.detail.startswith(
        "has /data/snapshot.bin open, and 2048 pages of it written back to device loop0"
    )
    assert any("fsync on /data/kv.db, 8.4 of 8.4 MB written back" in s.detail for s in found.segments)


def test_a_writer_that_is_gone_leaves_the_files_name() -> None:
    found, _ = flush_of(syncing(), 77).classify(request(0, 70))
    culprit = found.culprits["io.writeback"]
    assert (culprit.kind, culprit.name) == ("file", "snapshot.bin")


def test_what_the_journal_writes_of_others_is_theirs_although_it_is_waited_for() -> None:
    b = flush_of(syncing(aux=WRITES | SYNC | KERNEL), 77, aux=3, pages=0)
    found, _ = b.classify(request(0, 70))
    assert ms_of(found)["io.writeback"] == 50


def test_ones_own_dirty_data_is_no_neighbours() -> None:
    found, _ = flush_of(syncing(), 4).classify(request(0, 70))
    assert "io.writeback" not in found.causes
    assert ms_of(found)["io.disk_contention"] == 50


def test_a_neighbour_that_writes_itself_is_contention() -> None:
    b = flush_of(syncing(flushed=1 << 20), 77).known(ProcessFact(555, "dd"))
    b.add(
        "block_done", 50, 555, aux=WRITES | SYNC, issue_ns=ns(5), latency_ns=45 * MS, dev=DISK, bytes=32 << 20
    )
    found, _ = b.classify(request(0, 70))
    assert ms_of(found)["io.disk_contention"] == 50
    assert found.culprits["io.disk_contention"].name == "dd"


def test_a_pause_for_dirtying_too_much_names_who_dirtied_most() -> None:
    b = EventBuilder().into(-5, LOOP).out(10, LOOP, D, nr=WRITE, arg0=9).wake(60, LOOP, context=1)
    b.add("dirty_pause", 9.99, LOOP, dev=DISK, pages=8)
    b.add("dirty_pause", 5, WRITER, dev=DISK, pages=4096, comm=b"trainer").known(
        ProcessFact(WRITER, "trainer")
    )
    found, _ = b.into(60, LOOP).out(80, LOOP).classify(request(0, 70))
    assert ms_of(found)["io.writeback"] == 50
    assert found.culprits["io.writeback"].tgid == WRITER


# io.log_blocked beside them


def test_a_logs_fsync_with_the_disk_to_itself_is_the_logs() -> None:
    found, _ = syncing(own_name="/data/app.log", flushed=0).classify(request(0, 70))
    assert ms_of(found)["io.log_blocked"] == 50
    assert any("0.0 MB of it by others" in s.detail for s in found.segments)


def test_a_logs_own_throttled_requests_are_passed_on_by_a_kernel_thread() -> None:
    b = syncing(own_name="/data/app.log", flushed=65_536, aux=WRITES | SYNC | KERNEL)
    found, _ = b.classify(request(0, 70))
    assert ms_of(found)["io.log_blocked"] == 50


def test_a_logs_fsync_on_a_disk_that_others_fill_is_theirs() -> None:
    b = syncing(own_name="/data/app.log", flushed=0).known(ProcessFact(555, "dd"))
    b.add(
        "block_done", 50, 555, aux=WRITES | SYNC, issue_ns=ns(5), latency_ns=45 * MS, dev=DISK, bytes=8 << 20
    )
    found, ctx = b.classify(request(0, 70))
    assert ms_of(found)["io.disk_contention"] == 50
    assert "io.log_blocked" not in found.causes
    checks = {r.cause: r.check for r in rule_out(found, ctx)}
    assert checks["io.log_blocked"].startswith("blocked writing 50.0 ms")


def test_a_logs_fsync_behind_anothers_dirty_data_is_theirs() -> None:
    found, _ = flush_of(syncing(own_name="/data/app.log"), 77).classify(request(0, 70))
    assert ms_of(found)["io.writeback"] == 50


# engine.reload beside memory.mmap_faults


@pytest.mark.parametrize(("loads", "cause"), [(True, "engine.reload"), (False, "memory.mmap_faults")])
def test_weights_that_are_read_by_faults_while_they_are_loaded_are_a_reload(loads: bool, cause: str) -> None:
    lab = Lab()
    lab.arrive(T0, 1)
    lab.out(T0 + 10, WORK, D, nr=-1, cpu=2).wake(T0 + 200, WORK, context=2, vec=4).into(T0 + 200, WORK, cpu=2)
    lab.add("page_wait", T0 + 10, WORK, aux=FAULT | READ, inode=12, dev=DISK, pages=32, syscall_nr=-1)
    if loads:
        lab.mark(T0 + 201, WORK, marks.Stage("weights", ns(T0 + 5), "model"))
    lab.step(T0 + 2, T0 + 222, others=[prefill(1)], finished=[1])
    found = findings(lab, T0 + 822)[1]
    assert found.verdict.cause == cause
    assert {"engine.reload", "memory.mmap_faults"} & set(found.causes) == {cause}


# against the usual


class Known(Baseline):
    """Requests of this class usually take 20 ms, and *faults_ms* of faults besides."""

    def __init__(self, faults_ms: float) -> None:
        super().__init__()
        self._ms = faults_ms

    def usual(self, request: Request) -> Usual:
        causes = {"memory.mmap_faults": (self._ms, 1.0), "work.cpu": (20.0, 1.0)}
        wall = 20 + self._ms
        return Usual(60, wall, wall, wall, wall, causes, causes)


@pytest.mark.parametrize(("usual_ms", "cause"), [(0.0, "memory.mmap_faults"), (49.5, "unknown")])
def test_faults_that_a_service_always_has_are_no_cause(usual_ms: float, cause: str) -> None:
    # Nothing here asks how much memory is available: a cold file is cold whatever /proc/meminfo says.
    wanted = request(0, 70)
    found, ctx = faults().classify(wanted)
    finding = explain(wanted, found, Known(usual_ms), "slower than usual", 0, ctx)
    assert finding.verdict.cause == cause
