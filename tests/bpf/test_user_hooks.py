"""Hooks in the libraries of watched processes: attached when they are mapped, once for each file, and taken away."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from whyspan_probes import features, user_hooks
from whyspan_probes.mapped_files import MappedFile
from whyspan_probes.registry import Found
from whyspan_probes.rings import BlobRing
from whyspan_probes.schema import EVENT_BYTES
from whyspan_probes.state import FileState, ProbeState

from tests.bpf.child import Child
from tests.bpf.conftest import Spawn
from tests.bpf.stubs import stub
from tests.bpf.watcher import Watcher

pytestmark = pytest.mark.bpf


class Marked:
    """The probe ``marker`` and the processes that it is told to follow."""

    def __init__(self, found: Found) -> None:
        self.w = Watcher([found])
        self.session = self.w.session
        self._now_s = 0.0

    def follow(self, *children: Child, watch: bool = True) -> None:
        """Watch these and no others; a look is due at each call."""
        self._now_s += 100.0
        if watch:
            self.w.watch(*(c.tgid for c in children))
        self.session.follow([c.tgid for c in children], self._now_s)

    @property
    def state(self) -> ProbeState:
        return self.w.states["marker"]

    @property
    def files(self) -> list[FileState]:
        return self.state.files

    def taken(self) -> list[tuple[int, int, bytes]]:
        """Take what was marked: (tgid, kind, payload)."""
        ring: BlobRing = self.session.maps.marks
        out = []
        for record in ring.drain():
            tgid, kind, length = (int.from_bytes(record[at : at + 4], "little") for at in (12, 20, 24))
            out.append((tgid, kind, record[EVENT_BYTES : EVENT_BYTES + length]))
        return out


@pytest.fixture
def marked(probes: dict[str, Found]) -> Iterator[Marked]:
    m = Marked(probes["marker"])
    yield m
    m.w.close()


def mark(child: Child, *texts: str, kind: int = 5) -> Any:
    return child.run(["mark", kind, list(texts)])


def test_it_waits_for_a_file_and_goes_with_the_last_process(
    marked: Marked, spawn: Spawn, tmp_path: Path
) -> None:
    child, other = spawn("marker"), spawn("marker")
    path = str(stub(tmp_path))
    marked.follow(child, other)
    assert (marked.state.state, marked.files) == ("waiting", [])
    assert not marked.session.probes[0].attached
    for c in (child, other):
        c.run(["load", path])  # a library may come any time
        marked.follow(child, other)
        assert mark(c, "x")["watchers"] == 1
        assert marked.taken() == [(c.tgid, 5, b"x")]  # one link, whoever comes
    (file,) = marked.files
    assert (file.hook, file.path, file.state, file.by, file.reason) == (
        "mark",
        path,
        "attached",
        "uprobe.multi",
        "",
    )
    assert file.processes == sorted([child.tgid, other.tgid])
    assert file.symbols == ["whyspan_mark_v1"]
    assert marked.state.hooks["mark"].used == ["uprobe.multi"]
    assert (marked.state.state, marked.state.reason) == ("attached", "")
    child.run(["unload"])
    marked.follow(child, other)
    assert marked.files[0].processes == [other.tgid]
    assert mark(other, "y")["watchers"] == 1
    marked.follow(child)
    assert (marked.state.state, marked.files) == ("waiting", [])
    assert mark(other, "z")["watchers"] == 0
    assert marked.taken() == [(other.tgid, 5, b"y")]


def test_a_process_that_nobody_watches_is_turned_away(marked: Marked, spawn: Spawn, tmp_path: Path) -> None:
    child, stranger = spawn("marker"), spawn("marker")
    path = str(stub(tmp_path))
    for c in (child, stranger):
        c.run(["load", path])
    marked.follow(child)
    assert mark(stranger, "secret")["watchers"] == 1  # the price: it is told that somebody listens
    mark(child, "x")
    assert marked.taken() == [(child.tgid, 5, b"x")]
    assert marked.w.dropped() == 0


def test_a_child_is_heard_before_anybody_has_looked_at_it(
    probes: dict[str, Found], spawn: Spawn, tmp_path: Path
) -> None:
    w = Watcher([probes["marker"], probes["sched"]])  # sched watches the children of who is watched
    try:
        child = spawn("marker")
        child.run(["load", str(stub(tmp_path))])
        w.watch(child.tgid)
        w.session.follow([child.tgid], 1.0)
        pid = child.run(["fork", 7, "born"])["pid"]
        (record,) = w.session.maps.marks.drain()
        assert int.from_bytes(record[12:16], "little") == pid
    finally:
        w.close()


def test_an_exec_is_another_program(marked: Marked, spawn: Spawn, tmp_path: Path) -> None:
    child = spawn("marker")
    child.run(["load", str(stub(tmp_path))])
    marked.follow(child)
    assert marked.state.state == "attached"
    child.say(["exec", "sleep", "1000"])
    deadline = time.monotonic() + 20
    while Path(f"/proc/{child.tgid}/comm").read_text() != "sleep\n":
        assert time.monotonic() < deadline
        os.sched_yield()
    marked.session.look_again(child.tgid)
    marked.follow(child)
    assert (marked.state.state, marked.files) == ("waiting", [])


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("-DNO_FUNCTION", ("absent", "it has no function whyspan_mark_v1")),
        ("-DNO_SEMAPHORE", ("refused", "it has no 16-bit variable whyspan_mark_v1_semaphore")),
        ("-DSEMAPHORE_TYPE=int", ("refused", "it has no 16-bit variable whyspan_mark_v1_semaphore")),
    ],
)
def test_a_file_that_lacks_something_is_a_state(
    marked: Marked, spawn: Spawn, tmp_path: Path, flag: str, expected: tuple[str, str]
) -> None:
    child = spawn("marker")
    path = stub(tmp_path, flag)
    child.run(["load", str(path)])
    marked.follow(child)
    (file,) = marked.files
    assert (file.state, file.reason, file.by) == (*expected, "")
    assert (marked.state.state, marked.state.reason) == ("failed", f"{path}: {expected[1]}")
    # A good one beside it is attached all the same.
    other = spawn("marker")
    other.run(["load", str(stub(tmp_path / "good"))])
    marked.follow(child, other)
    assert marked.state.state == "partial"
    mark(other, "x")
    assert marked.taken() == [(other.tgid, 5, b"x")]


def test_a_deleted_file_and_its_successor_are_two(marked: Marked, spawn: Spawn, tmp_path: Path) -> None:
    old, new = spawn("marker"), spawn("marker")
    path = stub(tmp_path)
    old.run(["load", str(path)])
    path.unlink()
    new.run(["load", str(stub(tmp_path, "-O1"))])
    marked.follow(old, new)
    assert [f.state for f in marked.files] == ["attached", "attached"]
    for child in (old, new):
        assert mark(child, "x")["watchers"] == 1
    assert marked.taken() == [(old.tgid, 5, b"x"), (new.tgid, 5, b"x")]


def test_containers_that_share_a_layer_are_not_heard_twice(
    marked: Marked, spawn: Spawn, tmp_path: Path
) -> None:
    (lower := tmp_path / "lower").mkdir()
    stub(lower)
    children, mounts = [], []
    try:
        for name in ("a", "b"):
            folder = tmp_path / name
            for part in ("upper", "work", "merged"):
                (folder / part).mkdir(parents=True)
            options = f"lowerdir={lower},upperdir={folder}/upper,workdir={folder}/work"
            merged = folder / "merged"
            done = subprocess.run(
                ["mount", "-t", "overlay", "overlay", "-o", options, str(merged)],
                capture_output=True,
                check=False,
            )
            if done.returncode:
                pytest.skip(f"no overlay here: {done.stderr.decode()}")
            mounts.append(merged)
            child = spawn("marker")
            child.run(["load", str(merged / "whyspan_inproc/_marker_stub.so")])
            children.append(child)
        assert len({(mount / "whyspan_inproc/_marker_stub.so").stat().st_dev for mount in mounts}) == 2
        marked.follow(*children)
        (file,) = marked.files
        assert file.processes == sorted(c.tgid for c in children)
        for child in children:
            assert mark(child, "x")["watchers"] == 1
        assert sorted(marked.taken()) == sorted((c.tgid, 5, b"x") for c in children)
    finally:
        for child in children:
            child.kill()
        marked.follow()
        for mount in mounts:
            subprocess.run(["umount", str(mount)], check=True)


def test_a_process_that_dies_in_mid_attach_is_a_state(marked: Marked, spawn: Spawn, tmp_path: Path) -> None:
    child = spawn("marker")
    path = stub(tmp_path)
    child.run(["load", str(path)])
    gone = MappedFile(str(path), processes={child.tgid: f"/proc/{child.tgid}/exe"})
    child.kill()
    (probe,) = marked.session.probes
    probe.follow({("k",): gone})
    (file,) = marked.files
    assert (file.state, file.reason) == ("refused", f"process {child.tgid} has ended")
    # It is tried again when others map the file.
    other = spawn("marker")
    other.run(["load", str(path)])
    gone.processes[other.tgid] = str(path)
    probe.follow({("k",): gone})
    assert marked.files[0].state == "attached"


def test_processes_killed_at_any_moment_do_no_harm(marked: Marked, spawn: Spawn, tmp_path: Path) -> None:
    path = str(stub(tmp_path))
    children = [spawn("marker") for _ in range(7)]
    for child in children:
        child.run(["load", path])
    for i in range(len(children) + 1):
        marked.follow(*children, watch=False)  # the dead among them are still in the list
        if i < len(children):
            children[i].signal(signal.SIGKILL)
            if i % 2:
                children[i].kill()  # also waits for its end
    for child in children:
        child.kill()
    marked.follow(*children, watch=False)
    assert (marked.state.state, marked.files) == ("waiting", [])


def no_multi_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a kernel before 6.6."""
    missing = features.HookTable.missing
    monkeypatch.setattr(
        features.HookTable, "missing", lambda self, s: "too old" if s.endswith(".multi") else missing(self, s)
    )


def test_without_multi_links_it_attaches_by_perf(
    probes: dict[str, Found], spawn: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_multi_links(monkeypatch)
    m = Marked(probes["marker"])
    try:
        child, other = spawn("marker"), spawn("marker")
        path = str(stub(tmp_path))
        for c in (child, other):
            c.run(["load", path])
        m.follow(child, other)
        assert (m.state.state, m.files[0].by) == ("attached", "uprobe")
        assert m.state.hooks["mark"].refused == ["uprobe.multi: too old"]
        for c in (child, other):
            assert mark(c, "x")["watchers"] == 1
        assert m.taken() == [(child.tgid, 5, b"x"), (other.tgid, 5, b"x")]
        m.follow()
        assert mark(child, "y")["watchers"] == 0
    finally:
        m.w.close()


def test_what_safety_refuses_is_not_attached(
    marked: Marked, spawn: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_hooks, "refuse_user_probe", lambda *_, **__: "not proven safe")
    child = spawn("marker")
    child.run(["load", str(stub(tmp_path))])
    marked.follow(child)
    assert marked.files[0].reason == "uprobe.multi: not proven safe; uprobe: not proven safe"
    assert mark(child, "x")["watchers"] == 0


def test_a_probe_that_was_shed_stays_away(marked: Marked, spawn: Spawn, tmp_path: Path) -> None:
    child = spawn("marker")
    path = str(stub(tmp_path))
    child.run(["load", path])
    marked.follow(child)
    (probe,) = marked.session.probes
    assert set(probe.program_fds()) == {"marker_mark_multi", "marker_mark_perf"}
    probe.shed("over budget")
    other = spawn("marker")
    other.run(["load", path])
    marked.follow(child, other)
    assert (marked.state.state, marked.files, probe.attached) == ("shed", [], False)
    assert mark(child, "x")["watchers"] == 0


def test_a_file_that_is_replaced_while_it_is_looked_at(marked: Marked, spawn: Spawn, tmp_path: Path) -> None:
    child = spawn("marker")
    path = stub(tmp_path)
    child.run(["load", str(path)])
    shutil.copy("/bin/true", tmp_path / "true")
    (tmp_path / "true").replace(path)  # what is mapped is found by its mapping, not by its path
    marked.follow(child)
    assert marked.files[0].state == "attached"
    mark(child, "x")
    assert marked.taken() == [(child.tgid, 5, b"x")]


def test_what_catches_exceptions_gets_no_return_probe(probes: dict[str, Found], tmp_path: Path) -> None:
    """A return probe between a throw and its handler ends the process: found out here, not by the target."""
    source = Path(__file__).with_name("llama_stub.cpp")
    library, program = tmp_path / "libllama.so", tmp_path / "program"
    g = ["g++", "-O1", str(source)]
    subprocess.run([*g, "-DLIBRARY", "-fPIC", "-shared", "-o", str(library)], check=True)
    subprocess.run([*g, "-o", str(program), str(library), f"-Wl,-rpath,{tmp_path}"], check=True)
    w = Watcher([probes["llama"]])
    process = subprocess.Popen([str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid
        w.watch(process.pid)
        w.session.follow([process.pid], 1.0)
        state = {f.hook: (f.state, f.reason) for f in w.states["llama"].files}
        why = f"a C++ exception could not reach {program}"
        assert state["step_end"] == ("refused", f"uretprobe.multi: {why}; uretprobe: {why}")
        assert state["step"] == ("attached", "")
        out, _ = process.communicate("\n", timeout=20)
        assert (process.returncode, out) == (0, "3\n")
        assert w.count("llama_step_start", call=1) == 7
        assert w.count("llama_step") == 6  # each but the last ends when the next begins
    finally:
        process.kill()
        process.communicate()
        w.close()


@pytest.mark.parametrize("way", ["uretprobe.multi", "uretprobe"])
def test_a_return_probe_is_on_one_process_and_not_under_seccomp(
    way: str, probes: dict[str, Found], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not way.endswith(".multi"):
        no_multi_links(monkeypatch)
    library = tmp_path / "libllama.so"
    source = Path(__file__).with_name("llama_stub.cpp")
    subprocess.run(["g++", str(source), "-DLIBRARY", "-fPIC", "-shared", "-o", str(library)], check=True)
    w = Watcher([probes["llama"]])
    processes = []
    try:
        for lines in ("", SECCOMP):
            code = (
                f"import ctypes\nlib = ctypes.CDLL({str(library)!r})\n{lines}\nprint(flush=True)\ninput()\n"
            )
            code += CALLS
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
            out = processes[-1].stdout
            assert out is not None
            out.readline()
        free, confined = processes
        w.watch(free.pid, confined.pid)
        w.session.follow([free.pid, confined.pid], 1.0)
        ends = {f.processes[0]: (f.state, f.by) for f in w.states["llama"].files if f.hook == "step_end"}
        assert ends == {free.pid: ("attached", way), confined.pid: ("refused", "")}
        for process in processes:
            assert process.communicate("\n", timeout=20)[0] == "[0, 2, 4]\n"
            assert process.returncode == 0
        told = w.rows("llama_step")
        assert (told["aux"][told["tgid"] == free.pid] < 5).all()
        assert (told["tgid"] == free.pid).sum() == 3
        assert told["aux"][told["tgid"] == confined.pid].tolist() == [0x80000000] * 2
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        w.close()


#: Called on a thread that is not the first.
CALLS = """
import threading
done = []
thread = threading.Thread(target=lambda: done.extend(lib.llama_encode(None, n) for n in (0, 2, 4)))
thread.start()
thread.join()
print(done)
"""
#: A filter that allows everything, which is a filter all the same.
SECCOMP = """
import struct
program = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7FFF0000))
filter = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 1, ctypes.addressof(program)))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, filter) == 0
"""
