"""Another BTF than the kernel's own, and a kernel without: the same probes, or a reason; and the same events."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from whyspan.recording import Reader
from whyspan_probes.kernel_btf import OWN, KernelBtf, check_file
from whyspan_probes.registry import Found, discover
from whyspan_probes.schema import HEAD_FIELDS

from tests.bpf.alternatives import is_the_kernels
from tests.bpf.conftest import Spawn
from tests.bpf.daemon import Daemon
from tests.bpf.http import Http, reading, writing
from tests.bpf.watcher import Watcher
from tests.btf_blob import moved

pytestmark = pytest.mark.bpf

#: As on a kernel without BTF: no tp_btf, and no helper that needs it. Layouts still come from this kernel's.
WITHOUT = KernelBtf(own=False)
#: Probes that see as much without BTF: they read no registers.
COMPLETE = {"block_io", "descriptors", "numa", "power", "reclaim", "samples", "stalls", "tcp"}
#: Iterators know the kernel's types by its own BTF or not at all.
ITERATORS = {"waits", "snapshots"}
#: Fields that are made anew for each session, or count only what that session saw.
PRIVATE = {"cpu", "key", "ts_ns", "duration_ns", "issue_ns", "latency_ns", "cookie", "first_body_ns"}


def bpftool(*arguments: str) -> str:
    env = {**os.environ, "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"}
    return subprocess.run(["bpftool", *arguments], capture_output=True, text=True, check=True, env=env).stdout


def least(path: Path, *found: Found) -> KernelBtf:
    """Write only what these probes' objects need of the kernel's BTF."""
    bpftool("gen", "min_core_btf", str(OWN), str(path), *(str(f.object_path) for f in found))
    check_file(path)
    return KernelBtf(own=True, file=path)


def test_a_copy_of_the_kernels_gives_the_same_probes(probes: dict[str, Found], tmp_path: Path) -> None:
    copy = tmp_path / "copy.btf"
    copy.write_bytes(OWN.read_bytes())
    states = []
    for kernel in (KernelBtf.find(), KernelBtf.find(copy), least(tmp_path / "least.btf", *probes.values())):
        w = Watcher(probes.values(), kernel=kernel)
        w.close()
        states.append({name: asdict(state) for name, state in w.states.items()})
    assert states[0] == states[1] == states[2]


def test_what_the_file_lacks_fails_what_needs_it_and_says_so(
    probes: dict[str, Found], tmp_path: Path
) -> None:
    kernel = least(tmp_path / "sched.btf", probes["sched"])
    w = Watcher([probes["sched"], probes["block_io"]], kernel=kernel, may_fail=True)
    w.close()
    assert w.states["sched"].state == "attached"
    state = w.states["block_io"]
    assert state.state == "failed"
    assert state.hooks["requests"].refused == [
        f"block_io_issue_{how}: refused at load: no struct request.__data_len in the kernel's BTF"
        for how in ("tp", "raw")
    ]


@pytest.mark.parametrize("own", [True, False])
def test_a_field_is_read_where_the_file_says(
    own: bool, probes: dict[str, Found], spawn: Spawn, disk_dir: Path, tmp_path: Path
) -> None:
    path = tmp_path / "moved.btf"
    path.write_bytes(moved(OWN.read_bytes(), "request", "__data_len", "__sector"))
    w = Watcher([probes["block_io"]], kernel=KernelBtf(own, path))
    try:
        child = spawn("direct_writes", disk_dir / "direct", 13)
        w.watch(child.tgid)
        child.run()
        rows = w.rows("block_done", tid=child.tgid)
        assert len(rows) >= 13
        assert (rows["bytes"] == rows["sector"] & 0xFFFFFFFF).all()
        assert not (rows["bytes"] == 4096).all()
    finally:
        w.close()


class Both(NamedTuple):
    """The same probes twice, side by side on the same events: typed, and as on a kernel without BTF."""

    typed: Watcher
    raw: Watcher

    def watch(self, tgid: int) -> None:
        for w in self:
            w.watch(tgid)

    def same(self, name: str, *, at_least: int, private: tuple[str, ...] = (), **equal: int) -> Any:
        """Assert that both have seen the same events, each thread's in the same order; return the typed ones."""
        typed, raw = (w.rows(name, **equal) for w in self)
        # Two CPUs' events may be a microsecond apart, which is what the programs are from each other.
        typed, raw = (rows[np.argsort(rows["tid"], kind="stable")] for rows in (typed, raw))
        assert len(typed) >= at_least, f"{len(typed)} {name}"
        assert len(typed) == len(raw)
        compared = [
            n
            for n in typed.dtype.names or ()
            if n not in PRIVATE and n not in private and not n.startswith("_pad") and n != "kind"
        ]
        assert set(compared) - set(HEAD_FIELDS)
        for field in compared:
            differing = typed[field] != raw[field]
            assert not differing.any(), f"{name}.{field}: {typed[differing][:3]} {raw[differing][:3]}"
        return typed


@pytest.fixture(scope="module")
def both(probes: dict[str, Found]) -> Iterator[Both]:
    found = list(probes.values())
    pair: list[Watcher] = []
    try:
        for kernel in (KernelBtf.find(), WITHOUT):
            pair.append(Watcher(found, kernel=kernel, may_fail=kernel is WITHOUT))
        yield Both(*pair)
    finally:
        for w in pair:
            w.close()


def test_without_btf_every_probe_attaches_by_another_hook(both: Both) -> None:
    used = {s for state in both.raw.states.values() for h in state.hooks.values() for s in h.used}
    assert {s.partition("/")[0] for s in used} == {"raw_tp", "tracepoint", "perf_event"}
    for name, state in both.raw.states.items():
        assert (state.state == "failed") == (name in ITERATORS), state
        if name in ITERATORS:
            assert "the kernel has no BTF of its own" in state.reason
            continue
        if state.state == "waiting":
            continue  # for files that no process maps here
        lacks = [lack for h in state.hooks.values() for lack in h.lacks]
        assert bool(lacks) == (name not in COMPLETE), state
        assert all("stacks are not 16 KiB" in lack for lack in lacks)
    typed = [h for s in both.typed.states.values() for h in s.hooks.values()]
    assert not [h for h in typed if h.lacks]
    assert not [why for h in typed for why in h.refused if not is_the_kernels(why)]


def test_without_btf_no_helper_is_left_that_needs_it(both: Both) -> None:
    def helpers(w: Watcher) -> set[str]:
        called = set()
        for p in w.session.probes:
            for fd in p.program_fds().values():
                number = re.search(r"prog_id:\s*(\d+)", Path(f"/proc/self/fdinfo/{fd}").read_text())
                assert number
                called |= set(
                    re.findall(r"call (bpf_\w+)#", bpftool("prog", "dump", "xlated", "id", number[1]))
                )
        return called

    need_btf = {"bpf_get_current_task_btf", "bpf_task_pt_regs", "bpf_skc_to_tcp_sock", "bpf_skc_to_unix_sock"}
    assert helpers(both.typed) >= need_btf
    called = helpers(both.raw)
    assert "bpf_ringbuf_reserve" in called
    assert called & (need_btf | {"bpf_get_socket_ptr_cookie"}) == set()


def test_the_same_switches_and_wakes(both: Both, spawn: Spawn) -> None:
    sleeper, child = spawn("sleeps", 23), spawn("futex", 17)
    both.watch(sleeper.tgid)
    both.watch(child.tgid)
    sleeper.run()
    child.run()
    outs = both.same("sched_switch_out", tgid=sleeper.tgid, at_least=23)
    assert (outs["syscall_nr"] == 230).sum() == 23  # clock_nanosleep: the registers were found
    outs = both.same("sched_switch_out", tgid=child.tgid, at_least=17)
    assert (outs["arg0"] == child.facts["address"]).sum() == 17
    for tgid in (sleeper.tgid, child.tgid):
        both.same("sched_switch_in", tgid=tgid, at_least=17)
        both.same("sched_wake", tgid=tgid, at_least=17)


def test_the_same_faults_are_no_system_call(both: Both, spawn: Spawn) -> None:
    child = spawn("faults", 7)
    if "error" in child.facts:
        pytest.skip(f"userfaultfd: {child.facts['error']}")
    both.watch(child.tgid)
    child.run()
    outs = both.same("sched_switch_out", tid=child.tgid, at_least=7)
    assert (outs["syscall_nr"] == -1).sum() >= 7


def test_the_same_lives(both: Both, spawn: Spawn) -> None:
    child = spawn("programs", 5, 7)
    both.watch(child.tgid)
    pids = child.run()["pids"]
    assert both.same("sched_fork", tgid=child.tgid, at_least=5)["child_tgid"].tolist() == pids
    for pid in pids:
        both.same("sched_exec", tgid=pid, at_least=1)
        assert both.same("sched_exit", tgid=pid, at_least=1)["exit_code"].tolist() == [7 << 8]


def test_the_same_descriptors_and_edges(both: Both, spawn: Spawn) -> None:
    piped, sockets, edges = spawn("blocked_pipe"), spawn("blocked_socket"), spawn("edges", "pipe", 29)
    for child in (piped, sockets, edges):
        both.watch(child.tgid)
        child.run()
    blocks = both.same("fd_block", tid=piped.tgid, at_least=2)
    assert {piped.facts["written_inode"], piped.facts["read_inode"]} <= set(blocks["inode"].tolist())
    blocks = both.same("fd_block", tid=sockets.tgid, at_least=3)
    assert {1, 7, 45} & set(blocks["syscall_nr"].tolist()) == {7, 45}
    for name in ("edge_write", "edge_read"):
        assert (both.same(name, tid=edges.tgid, at_least=29)["bytes"] == 8).sum() == 29


def test_the_same_block_requests(both: Both, spawn: Spawn, disk_dir: Path) -> None:
    child = spawn("direct_writes", disk_dir / "direct", 13)
    both.watch(child.tgid)
    child.run()
    rows = both.same("block_done", tid=child.tgid, at_least=13)
    assert (rows["bytes"] == 4096).sum() >= 13


def test_the_same_streams_and_requests(both: Both, spawn: Spawn) -> None:
    stream, server = spawn("unix_stream", 5, 3), spawn("scripted_server")
    both.watch(stream.tgid)
    stream.run()
    for name in ("sock_send", "sock_recv"):
        both.same(name, tgid=stream.tgid, at_least=15)
    request = (
        b"POST /v1/completions?q=1 HTTP/1.1\r\nHost: h\r\nX-Request-Id: %d\r\nContent-Length: 3\r\n\r\nabc"
    )
    reply = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
    both.raw.watch(server.tgid)
    http = Http(both.typed, server)
    for i in range(7):
        text = request % i
        http.talk(text, [reading(len(text)), writing(reply)])
    both.same("sock_recv", tgid=server.tgid, at_least=7)
    both.same("http_response_head", tgid=server.tgid, at_least=7)
    both.same("http_response_end", tgid=server.tgid, at_least=7)
    heads = [[(h.seq, h.route, h.headers, h.rport) for h in w.heads if h.tgid == server.tgid] for w in both]
    assert len(heads[0]) == 7
    assert heads[0] == heads[1]
    states = [np.sort(w.rows("sock_state", tgid=server.tgid)["new_state"]).tolist() for w in both]
    assert states[0] == states[1]


def test_the_same_connects_and_stalls(both: Both, spawn: Spawn) -> None:
    connects, held, dns, crowd = (
        spawn("connects", "4", 5),
        spawn("nagle", 3, 0),
        spawn("dns", 5),
        spawn("crowd", 5, 2),
    )
    for child in (connects, held, dns, crowd):
        both.watch(child.tgid)
        child.run()
    both.same("tcp_connect", tgid=connects.tgid, at_least=6)
    both.same("sock_held", tgid=held.tgid, at_least=3, private=("held_ns", "left_ns"))
    both.same("dns_message", tgid=dns.tgid, at_least=9)
    both.same("accept_queue", lport=crowd.facts["port"], at_least=2)


WHYSPAN = str(Path(sys.executable).with_name("whyspan"))
#: Hides the kernel's own BTF, as far as a process can see; the kernel still has it.
HIDE = f'mount -t tmpfs none {OWN.parent} && exec "$@"'


def hidden(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of whyspan where no BTF of the kernel is to be found."""
    argv = ["unshare", "--mount", "sh", "-c", HIDE, "sh", WHYSPAN, *arguments]
    env = {**os.environ, "WHYSPAN_CONFIG": "", "WHYSPAN_OVERRIDES": ""}
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False, env=env)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    path = tmp_path / "copy.btf"
    path.write_bytes(OWN.read_bytes())
    return path


def test_doctor_where_the_kernel_has_none(copy: Path) -> None:
    done = hidden("doctor", "--json")
    assert done.returncode == 4
    report = json.loads(done.stdout)
    btf = next(c for c in report["checks"] if c["id"] == "kernel.btf")
    assert (btf["state"], btf["found"]) == ("failed", "none")
    assert "--btf FILE" in btf["remedy"]
    assert {p["state"] for p in report["probes"]} == {"failed"}
    assert all("name a file by --btf" in p["reason"] for p in report["probes"])

    done = hidden("doctor", "--json", "--btf", str(copy))
    report = json.loads(done.stdout)
    assert {p["name"]: p["state"] for p in report["probes"]} == {
        f.probe.name: "failed" if f.probe.name in ITERATORS else "attached" if f.probe.hooks else "waiting"
        for f in discover()
    }
    used = {s.partition("/")[0] for p in report["probes"] for h in p["hooks"].values() for s in h["used"]}
    assert used == {"raw_tp", "tracepoint", "perf_event"}
    btf = next(c for c in report["checks"] if c["id"] == "kernel.btf")
    assert btf["found"] == f"{copy} (the kernel has none of its own)"
    assert (
        "system calls are unknown if the kernel's stacks are not 16 KiB"
        in hidden("doctor", "--btf", str(copy)).stdout
    )


def test_record_where_the_kernel_has_none(copy: Path, spawn: Spawn, tmp_path: Path) -> None:
    child, out = spawn("sleeps", 100_000, 10), tmp_path / "recording"
    child.say()
    options = ("--pid", str(child.tgid), "--seconds", "2", "-o", str(out), "--json")
    done = hidden("record", *options)
    assert done.returncode == 1, done.stderr
    *told, last = done.stderr.splitlines()
    assert len(told) == len(discover())
    assert last.startswith("whyspan: cannot attach: no probe can be attached: block_io: hook requests: ")
    assert last.endswith("name a file by --btf")
    assert not out.exists()
    done = hidden("record", *options, "--btf", str(copy))
    assert done.returncode == 0, done.stderr
    reader = Reader(out)
    rows = np.concatenate([reader.schema.select(b.events, "sched_switch_out") for b in reader.batches()])
    reader.close()
    rows = rows[rows["tid"] == child.tgid]
    assert len(rows) > 20
    assert (rows["syscall_nr"] == 230).sum() > 20


def test_run_with_a_file_that_is_none_ends_with_one_line(tmp_path: Path) -> None:
    path = tmp_path / "text.btf"
    path.write_text("not BTF")
    done = subprocess.run(
        [WHYSPAN, "run", "--state-dir", str(tmp_path / "state"), "--btf", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    errors = [line for line in done.stderr.splitlines() if " ERROR whyspan.collector: " in line]
    assert (done.returncode, len(errors)) == (2, 1), done.stderr
    assert errors[0].endswith(f"collector.btf: {path}: not BTF, nor an ELF file with a .BTF section")
    assert "Traceback" not in done.stderr


def test_run_with_a_copy_is_ready(copy: Path, spawn: Spawn, tmp_path: Path) -> None:
    child = spawn("sleeps", 1000, 10)
    daemon = Daemon(tmp_path, child.tgid, collector=f'btf = "{copy}"')
    try:
        daemon.wait_ready()
        assert len(re.findall(r"probe \w+: (?:attached|waiting)", daemon.log)) == len(discover())
        assert daemon.stop() == 0
    finally:
        daemon.kill()
