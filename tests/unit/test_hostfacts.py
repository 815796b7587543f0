"""Facts of the host: cleaned, bounded, and None for what is gone."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from whyspan import hostfacts
from whyspan.cgroups import Mount
from whyspan.hostfacts import cgroup_facts, fd_fact, moved, pipe_peer, process_fact, thread_facts
from whyspan.model import CgroupFact, FdFact, ProcessFact, ThreadFact

GONE = 2**22 + 17  # above the greatest possible pid
STAT = f"{GONE} (a (b) c) S 1 " + " ".join(str(n) for n in range(5, 53))


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A fake /proc with one process."""
    folder = tmp_path / "proc" / str(GONE)
    (folder / "task").mkdir(parents=True)
    (folder / "comm").write_text("a (b) c\n")
    (folder / "stat").write_text(STAT)
    (folder / "cgroup").write_text("0::/system.slice/a.service\n")
    (folder / "exe").symlink_to("/opt/my app/server (deleted)")
    return tmp_path / "proc"


def test_a_process(proc: Path) -> None:
    assert process_fact(GONE, "svc", proc) == ProcessFact(
        tgid=GONE,
        comm="a (b) c",
        exe="server (deleted)",
        service="svc",
        cgroup="/system.slice/a.service",
        cpus_allowed=0,  # the kernel knows no such process
        cpu_count=os.cpu_count() or 0,
        start_ticks=22,
        parent=1,
    )


def test_a_process_that_moved_is_seen_without_reading_everything(tmp_path: Path) -> None:
    folder = tmp_path / str(os.getpid())
    folder.mkdir()
    for name in ("comm", "stat"):
        (folder / name).write_text("x")
    (folder / "cgroup").write_text("0::/system.slice/a.service\n")
    known = process_fact(os.getpid(), "svc", tmp_path)
    assert known is not None
    assert not moved(known, tmp_path)
    assert moved(msgspec.structs.replace(known, cpu_mask="0"), tmp_path)
    (folder / "cgroup").write_text("0::/system.slice/b.service\n")
    assert moved(known, tmp_path)
    assert moved(msgspec.structs.replace(known, tgid=GONE), tmp_path)


def test_a_process_that_is_gone_or_half_gone(proc: Path) -> None:
    assert process_fact(GONE + 1, "svc", proc) is None
    for name in ("stat", "cgroup", "exe"):
        (proc / str(GONE) / name).unlink()
    fact = process_fact(GONE, "svc", proc)
    assert fact is not None
    assert (fact.exe, fact.cgroup, fact.start_ticks) == ("", "", 0)


def test_names_are_cleaned_and_bounded(proc: Path) -> None:
    folder = proc / str(GONE)
    (folder / "comm").write_bytes(b"\x1b[31mred\xff" + b"x" * 100)
    (folder / "cgroup").write_text("0::/" + "c" * 5000 + "\n")
    (folder / "exe").unlink()
    (folder / "exe").symlink_to("/opt/" + "e" * 200 + "\x07")
    fact = process_fact(GONE, "svc", proc)
    assert fact is not None
    assert fact.comm.startswith("\\x1b[31mred�xxx")
    assert all(text.isprintable() for text in (fact.comm, fact.exe, fact.cgroup))
    assert (len(fact.comm), len(fact.exe), len(fact.cgroup)) == (64, 64, 512)


def test_this_process() -> None:
    fact = process_fact(os.getpid(), "me")
    assert fact is not None
    assert fact.cpus_allowed == len(os.sched_getaffinity(0))
    assert {c for c in range(4096) if int(fact.cpu_mask, 16) >> c & 1} == os.sched_getaffinity(0)
    assert fact.comm
    assert fact.exe == Path(os.readlink("/proc/self/exe")).name
    own = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    assert fact.start_ticks == int(own[19]) > 0


def test_threads_are_named_once(proc: Path) -> None:
    for tid in range(10, 16):
        task = proc / str(GONE) / "task" / str(tid)
        task.mkdir()
        (task / "comm").write_text(f"t{tid}\n")
    (proc / str(GONE) / "task" / "15" / "comm").unlink()  # gone between the list and the look
    known: set[int] = {10}
    first = thread_facts(GONE, known, limit=3, proc=proc)
    assert len(first) == 3
    second = thread_facts(GONE, known, limit=3, proc=proc)
    expected = [ThreadFact(t, GONE, f"t{t}") for t in range(11, 15)]
    assert sorted(first + second, key=lambda f: f.tid if isinstance(f, ThreadFact) else 0) == expected
    assert known == set(range(10, 16))
    assert thread_facts(GONE, known, proc=proc) == []
    known.add(999_999)  # of a thread that has ended since
    thread_facts(GONE, known, proc=proc)
    assert 999_999 not in known
    assert thread_facts(GONE + 1, set(), proc=proc) == []


def test_real_threads() -> None:
    stop = threading.Event()
    named = threading.Event()
    tids: list[int] = []

    def work() -> None:
        tids.append(threading.get_native_id())
        (Path("/proc/self/task") / str(tids[0]) / "comm").write_text("my-worker")
        named.set()
        stop.wait(20)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert named.wait(20)
        facts = thread_facts(os.getpid(), {os.getpid()})
        assert ThreadFact(tids[0], os.getpid(), "my-worker") in facts
        assert os.getpid() not in [f.tid for f in facts if isinstance(f, ThreadFact)]
    finally:
        stop.set()
        thread.join()


@pytest.fixture
def v1(tmp_path: Path) -> Mount:
    return Mount(tmp_path, "/", 1, frozenset({"cpu", "cpuacct"}))


@pytest.fixture
def v2(tmp_path: Path) -> Mount:
    return Mount(tmp_path, "/", 2, frozenset())


def set_v1(folder: Path, quota: str, period: str = "100000") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.cfs_quota_us").write_text(quota + "\n")
    (folder / "cpu.cfs_period_us").write_text(period + "\n")


def set_v2(folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.max").write_text(text + "\n")


def test_quotas_of_v1(v1: Mount) -> None:
    set_v1(v1.point, "-1")
    set_v1(v1.point / "a", "20000")
    set_v1(v1.point / "a/b", "-1")
    assert cgroup_facts("/a/b", [v1]) == [
        CgroupFact("/a/b", 0, 0),
        CgroupFact("/a", 20000, 100000),
        CgroupFact("/", 0, 0),
    ]
    set_v1(v1.point / "a/b", "5000", "50000")  # somebody has just set one
    assert cgroup_facts("/a/b", [v1])[0] == CgroupFact("/a/b", 5000, 50000)


def test_quotas_of_v2(v2: Mount) -> None:
    set_v2(v2.point / "a", "20000 100000")
    set_v2(v2.point / "a/b", "max 100000")
    assert cgroup_facts("/a/b", [v2]) == [
        CgroupFact("/a/b", 0, 0),
        CgroupFact("/a", 20000, 100000),
        CgroupFact("/", 0, 0),  # the root has no such file
    ]


@pytest.mark.parametrize("text", ["", "max", "1 2 3", "x y", "-5 100000", "1.5 2"])
def test_a_quota_that_is_none(v2: Mount, text: str) -> None:
    set_v2(v2.point / "a", text)
    assert cgroup_facts("/a", [v2])[0] == CgroupFact("/a", 0, 0)


@pytest.mark.parametrize("path", ["/", "", "a", "a/b", "//", "/gone/for/good", "/../../x"])
def test_odd_cgroup_paths_end(v2: Mount, path: str) -> None:
    facts = cgroup_facts(path, [v2])
    assert len(facts) <= 5
    assert all(isinstance(f, CgroupFact) and f.quota_us == 0 for f in facts)


def test_nothing_outside_of_the_mounted_tree_is_read(tmp_path: Path) -> None:
    inner = Mount(tmp_path / "cgroup", "/", 2, frozenset())
    set_v2(tmp_path / "secret", "20000 100000")
    assert cgroup_facts("/../secret", [inner])[0] == CgroupFact("/../secret", 0, 0)
    outer = Mount(tmp_path, "/..", 2, frozenset())  # as a container sees the host's tree mounted into it
    assert cgroup_facts("/../secret", [inner, outer])[0] == CgroupFact("/../secret", 20000, 100000)


def test_a_process_in_a_container(proc: Path) -> None:
    cid, uid = "5d" * 32, "2c48913c-b29f-11e7-9350-020968147796"
    folder = proc / str(GONE)
    (folder / "cgroup").write_text(f"0::/kubepods/burstable/pod{uid}/{cid}\n")
    (folder / "status").write_text(f"Name:\tx\nNStgid:\t{GONE}\t17\t1\nNSpid:\t{GONE}\t17\t1\n")
    fact = process_fact(GONE, "svc", proc)
    assert fact is not None
    assert (fact.container_id, fact.pod_uid, fact.vpid) == (cid, uid, 1)
    assert fact.cgroup == f"/kubepods/burstable/pod{uid}/{cid}"
    # Version 1: the CPU controller may know nothing of it.
    (folder / "cgroup").write_text(f"3:memory:/docker/{cid}\n2:cpu:/\n0::/\n")
    for nspid in (f"NSpid:\t{GONE}\n", "NSpid:\t1\tx\n", "NSpid:\n", ""):
        (folder / "status").write_text(nspid)
        fact = process_fact(GONE, "svc", proc)
        assert fact is not None
        assert (fact.container_id, fact.pod_uid, fact.vpid, fact.cgroup) == (cid, "", 0, "/")


def test_the_kernels_inode_number_beats_what_stat_says(proc: Path, tmp_path: Path) -> None:
    # On an overlay the two differ, and the probes have the kernel's.
    log = tmp_path / "server.log"
    log.touch()
    for name in ("fd", "fdinfo"):
        (proc / str(GONE) / name).mkdir()
    (proc / str(GONE) / "fd" / "3").symlink_to(log)
    (proc / str(GONE) / "fdinfo" / "3").write_text("pos:\t0\nflags:\t0100001\nmnt_id:\t9\nino:\t4711\n")
    assert fd_fact(GONE, 3, 4711, proc) == FdFact(GONE, 3, 4711, "file", str(log))
    assert fd_fact(GONE, 3, log.stat().st_ino, proc) is None
    (proc / str(GONE) / "fdinfo" / "3").write_text("pos:\t0\n")  # before Linux 5.14
    assert fd_fact(GONE, 3, log.stat().st_ino, proc) is not None


def inode(fd: int) -> int:
    return os.fstat(fd).st_ino


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "log\x1b[2J"
    with path.open("w") as f:
        me, fd = os.getpid(), f.fileno()
        assert fd_fact(me, fd, inode(fd)) == FdFact(
            me, fd, inode(fd), "file", f"{tmp_path}/log\\x1b[2J", 0, ""
        )
        assert fd_fact(me, fd, inode(fd) + 1) is None  # another file by now
    assert fd_fact(me, fd, 1) is None


def test_kinds_of_descriptors() -> None:
    import socket

    left, right = socket.socketpair()
    event, null = os.eventfd(0), os.open("/dev/null", os.O_RDONLY)
    master, slave = os.openpty()
    fds = {left.fileno(): "socket", event: "eventfd", null: "file", slave: "tty", master: "tty"}
    try:
        epoll = __import__("select").epoll()
        fds[epoll.fileno()] = "other"
        facts = {fd: fd_fact(os.getpid(), fd, os.stat(f"/proc/self/fd/{fd}").st_ino) for fd in fds}
        kinds = {fd: fact.kind for fd, fact in facts.items() if fact is not None}
        kinds[master] = "tty" if kinds[master] in ("tty", "file") else kinds[master]
        assert kinds == fds
        assert facts[left.fileno()] is not None
        assert getattr(facts[left.fileno()], "path", None) == ""
    finally:
        epoll.close()
        for fd in (event, null, master, slave):
            os.close(fd)
        left.close()
        right.close()


@pytest.fixture
def reader() -> Iterator[subprocess.Popen[bytes]]:
    """A child that reads a pipe of ours."""
    child = subprocess.Popen(["/bin/sleep", "300"], stdin=subprocess.PIPE)
    yield child
    child.kill()
    assert child.stdin is not None
    child.stdin.close()
    child.wait()


def test_the_reader_of_a_pipe_is_named(reader: subprocess.Popen[bytes]) -> None:
    assert reader.stdin is not None
    fd = reader.stdin.fileno()
    fact = fd_fact(os.getpid(), fd, inode(fd))
    assert fact == FdFact(os.getpid(), fd, inode(fd), "pipe", "", reader.pid, "sleep")
    reader.kill()
    reader.wait()
    assert pipe_peer(os.getpid(), inode(fd)) == (0, "")


def test_another_writer_is_not_the_reader() -> None:
    read, write = os.pipe()
    # The child holds the writing end only: it is nobody's reader.
    child = subprocess.Popen(["/bin/sleep", "300"], stdout=write, stdin=subprocess.DEVNULL)
    try:
        assert pipe_peer(os.getpid(), inode(write)) == (0, "")
        assert pipe_peer(child.pid, inode(write)) == (os.getpid(), hostfacts._read(Path("/proc/self/comm")))
    finally:
        child.kill()
        child.wait()
        os.close(read)
        os.close(write)


def fake_pipe_reader(proc: Path, pid: int, fds: int, target: str) -> None:
    folder = proc / str(pid) / "fd"
    folder.mkdir(parents=True)
    (proc / str(pid) / "comm").write_text(f"p{pid}\n")
    for n in range(fds):
        (folder / str(n)).symlink_to(target)


def test_the_look_for_a_peer_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostfacts, "_MAX_SCANNED_FDS", 50)
    fake_pipe_reader(tmp_path, 7, 60, "socket:[1]")
    looked = 0
    real = os.readlink

    def counted(path: Path) -> str:
        nonlocal looked
        looked += 1
        return real(path)

    monkeypatch.setattr(os, "readlink", counted)
    assert pipe_peer(1, 99, tmp_path) == (0, "")
    assert looked == 50


def test_what_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "5").mkdir()  # no fd folder
    (tmp_path / "self").mkdir()
    (tmp_path / "6" / "fd").mkdir(parents=True)
    (tmp_path / "6" / "fd" / "0").write_text("no link")
    assert pipe_peer(1, 99, tmp_path) == (0, "")
