"""Doctor's checks: each lack that can be found, what is said of it, and nothing said where all is fine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from whyspan.doctor import (
    attach,
    files,
    host,
    install,
    kernel,
    network,
    place,
    privilege_checks,
    server_checks,
    service,
)
from whyspan.doctor.check import Check, State, Subject, worst
from whyspan_probes.libraries import State as FileState
from whyspan_probes.state import HookState, ProbeState

from tests.unit.doctor import facts as f

GOOD: dict[str, Callable[[], list[Check]]] = {
    "kernel": lambda: kernel.checks(f.KERNEL),
    "privilege": lambda: privilege_checks.checks(f.PRIVILEGES),
    "install": lambda: install.checks(f.INSTALL),
    "host": lambda: host.checks(f.HOST),
    "place": lambda: place.checks(f.PLACE),
    "service": lambda: service.checks(f.SERVICE),
    "network": lambda: network.checks(f.NETWORK),
    "server": lambda: server_checks.checks(f.SERVER, "x86_64"),
}
L, F, N, U = State.LIMITED, State.FAILED, State.NOTE, State.UNKNOWN


def _features(**change: Any) -> list[Check]:
    return kernel.checks(f.KERNEL._replace(features=f.FEATURES._replace(**change)))


def _missing(*kinds: str) -> list[Check]:
    missing = {kind: f"no {kind}" * (kind in kinds) for kind in f.KINDS}
    return kernel.checks(f.KERNEL._replace(missing=missing))


def _without(*names: str, multi: bool = True, root: bool = True) -> list[Check]:
    own = f.OWN._replace(capabilities=f.OWN.capabilities - set(names))
    return privilege_checks.checks(f.PRIVILEGES._replace(own=own, uprobe_multi=multi, root=root))


def _unit(**change: str) -> list[Check]:
    return service.checks(f.SERVICE._replace(units=dict.fromkeys(service.UNITS, f.UNIT | change)))


def _server(**change: Any) -> list[Check]:
    return server_checks.checks(f.SERVER._replace(**change), "x86_64")


def _place(**change: Any) -> list[Check]:
    return place.checks(f.PLACE._replace(**change))


def _host(**change: Any) -> list[Check]:
    return host.checks(f.HOST._replace(**change))


SECCOMP = "process 7 is seccomp-filtered: a return probe could kill it"
SHADOW = "process 7 has a shadow stack: a return probe would break it"

#: What is wrong; the check that says so, and its state; words of what is found, lost or advised.
BAD: list[tuple[Callable[[], list[Check]], str, State, str]] = [
    (lambda: _features(kernel="5.16.9"), "kernel.version", F, "5.17"),
    (lambda: _features(kernel="x"), "kernel.version", F, "5.17"),
    (lambda: kernel.checks(f.KERNEL._replace(machine="aarch64")), "kernel.machine", L, "HTTPS"),
    (lambda: kernel.checks(f.KERNEL._replace(machine="riscv64")), "kernel.machine", F, "arm64"),
    (lambda: kernel.checks(f.KERNEL._replace(btf="", own_btf=False)), "kernel.btf", F, "--btf FILE"),
    (lambda: kernel.checks(f.KERNEL._replace(btf="/a", own_btf=False)), "kernel.btf", L, "three times"),
    (lambda: _features(lockdown="confidentiality"), "kernel.lockdown", F, "integrity"),
    (lambda: _features(tracefs=""), "kernel.tracefs", L, "mount -t tracefs"),
    (lambda: _missing("syscalls"), "kernel.syscall_tracepoints", L, "CONFIG_FTRACE_SYSCALLS"),
    (lambda: _missing("fentry", "kprobe"), "kernel.functions", N, "no fentry; no kprobe"),
    (lambda: _missing("uprobe.multi"), "kernel.user_probes", N, "6.6"),
    (lambda: _missing("uprobe.multi", "uprobe"), "kernel.user_probes", L, "CONFIG_UPROBE_EVENTS"),
    (lambda: kernel.checks(f.KERNEL._replace(pressure=False)), "kernel.pressure", L, "psi=1"),
    (
        lambda: privilege_checks.checks(f.PRIVILEGES._replace(own_users=True)),
        "privilege.user_namespace",
        F,
        "rootless",
    ),
    (
        lambda: privilege_checks.checks(f.PRIVILEGES._replace(host_pids=False)),
        "privilege.pid_namespace",
        F,
        "--pid=host",
    ),
    (
        lambda: privilege_checks.checks(f.PRIVILEGES._replace(host_cgroups=False)),
        "privilege.cgroup_namespace",
        L,
        "--cgroupns=host",
    ),
    (
        lambda: privilege_checks.checks(f.PRIVILEGES._replace(clock_shift=True)),
        "privilege.time_namespace",
        F,
        "times",
    ),
    (lambda: _without("CAP_BPF", "CAP_SYS_ADMIN"), "privilege.load", F, "only CAP_PERFMON"),
    (lambda: _without("CAP_BPF", "CAP_PERFMON", "CAP_SYS_ADMIN"), "privilege.load", F, "neither"),
    (lambda: _without("CAP_SYS_PTRACE"), "privilege.sys_ptrace", L, "grant CAP_SYS_PTRACE"),
    (lambda: _without("CAP_DAC_READ_SEARCH"), "privilege.dac_read_search", N, "root's files"),
    (
        lambda: _without("CAP_DAC_READ_SEARCH", root=False),
        "privilege.dac_read_search",
        L,
        "tracefs (root's only)",
    ),
    (
        lambda: _without("CAP_SYS_ADMIN", "CAP_CHECKPOINT_RESTORE"),
        "privilege.checkpoint_restore",
        L,
        "replaced or deleted",
    ),
    (lambda: _without("CAP_SYS_ADMIN"), "privilege.sys_admin", L, "cost figures"),
    (lambda: _without("CAP_SYS_ADMIN", multi=False), "privilege.sys_admin", L, "all user probes"),
    (
        lambda: privilege_checks.checks(f.PRIVILEGES._replace(profile="docker-default (enforce)")),
        "privilege.apparmor",
        N,
        "apparmor=unconfined",
    ),
    (lambda: _without("CAP_SYSLOG"), "privilege.syslog", N, "names"),
    (
        lambda: privilege_checks.checks(
            f.PRIVILEGES._replace(kernel="5.10.1", own=f.OWN._replace(capabilities=frozenset({"CAP_BPF"})))
        ),
        "privilege.memlock",
        F,
        "CAP_SYS_RESOURCE",
    ),
    (
        lambda: privilege_checks.checks(f.PRIVILEGES._replace(own=f.OWN._replace(seccomp=2))),
        "privilege.seccomp",
        N,
        "perf_event_open",
    ),
    (
        lambda: privilege_checks.checks(
            f.PRIVILEGES._replace(collector=f.OWN._replace(pid=9, capabilities=frozenset({"CAP_BPF"})))
        ),
        "privilege.collector",
        L,
        "CAP_PERFMON, CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH, CAP_SYS_ADMIN",
    ),
    (
        lambda: install.checks(f.INSTALL._replace(libbpf="", libbpf_problem="too old")),
        "install.libbpf",
        F,
        "too old",
    ),
    (
        lambda: install.checks(f.INSTALL._replace(missing_objects=("edges",))),
        "install.objects",
        L,
        "not built: edges",
    ),
    (
        lambda: install.checks(f.INSTALL._replace(probes_problem="no PROBE")),
        "install.objects",
        F,
        "no PROBE",
    ),
    (lambda: install.checks(f.INSTALL._replace(bcc=False)), "install.bcc", N, "libbpfcc"),
    (lambda: _host(cgroup_versions=frozenset()), "host.cgroups", L, "mount -t cgroup2"),
    (lambda: _host(controllers=frozenset({"cpu"})), "host.cgroups", L, "without the controller memory"),
    (lambda: _host(cpus_allowed=1), "host.cpus", N, "1 of 8"),
    (lambda: _host(memory_mb=149), "host.memory", L, "149 MB"),
    (lambda: _host(clock_source="hpet"), "host.clock_source", L, "tsc"),
    (lambda: _host(synchronised=False), "host.time", N, "chrony"),
    (lambda: _host(synchronised=None), "host.time", U, "refused"),
    (lambda: _host(gpus=("NVIDIA", "AMD", "NVIDIA")), "host.gpus", N, "2 NVIDIA, 1 AMD"),
    (lambda: _place(socket_problem="too long"), "place.state_dir", F, "run.state_dir"),
    (lambda: _place(writable=False), "place.state_dir", U, "mode 0750, group whyspan"),
    (lambda: _place(writable=False, exists=False, makeable=False), "place.state_dir", F, "install -d"),
    (lambda: _place(store_bytes=-1), "place.store", N, "none yet"),
    (lambda: _place(store_readable=False), "place.store", N, "usermod -aG whyspan"),
    (lambda: _place(store_bytes=641 * f.MB), "place.store", L, "641.0 of at most 512 MB"),
    (lambda: _place(free_bytes=667 * f.MB), "place.disk", L, "667 MB free, at most 668 MB more"),
    (lambda: _place(has_group=False), "place.group", N, "groupadd"),
    (lambda: service.checks(service.ServiceFacts({}, "no systemd", {})), "service.whyspan", N, "no systemd"),
    (lambda: service.checks(service.ServiceFacts({}, "", {})), "service.whyspan", N, "not installed"),
    (lambda: _unit(ActiveState="failed", Result="watchdog"), "service.whyspan", F, "watchdog"),
    (lambda: _unit(ActiveState="failed", Result="exit-code"), "service.whyspan_exporter", F, "journalctl"),
    (lambda: _unit(ActiveState="inactive"), "service.whyspan", N, "systemctl enable --now whyspan"),
    (lambda: _unit(ActiveState="activating"), "service.whyspan", N, "journalctl"),
    (lambda: _unit(NRestarts="3"), "service.whyspan", N, "restarted 3 times"),
    (lambda: _unit(LoadState="masked"), "service.whyspan", N, "unmask"),
    (
        lambda: service.checks(
            f.SERVICE._replace(said={"tgid": 9, "probes": [{"name": "fds", "state": "shed"}, "junk"]})
        ),
        "service.agent",
        L,
        "shed for their cost: fds",
    ),
    (lambda: service.checks(f.SERVICE._replace(said={})), "service.agent", N, "whyspan run"),
    (lambda: network.checks(f.NETWORK._replace(problem="no URL")), "network.otlp", L, "no URL"),
    (lambda: network.checks(f.NETWORK._replace(endpoints=(), answers={})), "network.otlp", N, "off"),
    (lambda: network.checks(f.NETWORK._replace(answers={})), "network.otlp", N, "--network"),
    (
        lambda: network.checks(f.NETWORK._replace(answers={"http://c:4317": "Connection refused"})),
        "network.reach",
        L,
        "Connection refused",
    ),
    (
        lambda: network.checks(f.NETWORK._replace(prometheus_problem="unknown")),
        "network.prometheus",
        L,
        "scraped",
    ),
    (lambda: _server(looked=False), "server.access", U, "more than 64"),
    (lambda: _server(maps="not permitted"), "server.access", L, "CAP_SYS_PTRACE"),
    (
        lambda: _server(libraries=(f.library("/x", FileState.DENIED),)),
        "server.access",
        L,
        "CAP_DAC_READ_SEARCH",
    ),
    (lambda: _server(maps=str(FileState.GONE)), "server.access", U, "ended"),
    (
        lambda: _server(program=files.Program("32-bit x86", False, False)),
        "server.program",
        L,
        "system calls",
    ),
    (lambda: _server(program=files.Program("aarch64", True, False)), "server.program", L, "emulator"),
    (lambda: _server(libc="musl 1.2.4"), "server.libc", N, "lock.contention"),
    (
        lambda: _server(libc="", program=files.Program("x86_64", True, True), python=None),
        "server.libc",
        N,
        "none mapped",
    ),
    (lambda: _server(tls="", program=files.Program("x86_64", True, True)), "server.tls", N, "Go's own"),
    (lambda: _server(tls=""), "server.tls", N, "HTTP/2"),
    (lambda: _server(refused=SECCOMP), "server.return_probes", L, "seccomp=unconfined"),
    (lambda: _server(refused=SHADOW, llama=True), "server.return_probes", L, "llama.cpp"),
    (
        lambda: _server(refused=SECCOMP, tls="", python=files.Python("3.11", "symbols")),
        "server.return_probes",
        L,
        "collections",
    ),
    (lambda: _server(python=files.Python("3.12", "")), "server.python", L, "--with-dtrace"),
    (lambda: _server(marker=False), "server.marker", N, "pip install"),
    (lambda: _server(ports=()), "server.ports", N, "Unix socket"),
    (lambda: _server(tracer=3, tracer_name="gdb"), "server.traced", N, "by gdb (3)"),
    (lambda: _server(uring=True), "server.io_uring", L, "UV_USE_IO_URING=0"),
]


@pytest.mark.parametrize("group", list(GOOD))
def test_where_all_is_fine_nothing_is_advised(group: str) -> None:
    checks = GOOD[group]()
    assert {c.group for c in checks} == {group}
    assert [c for c in checks if c.state is not State.OK or c.lacks or c.remedy] == []
    assert len({c.id for c in checks}) == len(checks)


@pytest.mark.parametrize(("make", "name", "state", "words"), BAD, ids=[f"{b[1]}-{b[3]}" for b in BAD])
def test_what_is_wrong_is_said(make: Callable[[], list[Check]], name: str, state: State, words: str) -> None:
    found = {c.id: c for c in make()}[name]
    assert found.state is state
    assert words in f"{found.found} {found.lacks} {found.remedy}"


def _all() -> Iterable[Check]:
    for make, *_ in BAD:
        yield from make()


def test_every_lack_has_its_loss_and_its_remedy_in_one_line() -> None:
    for c in _all():
        if c.state in (State.LIMITED, State.FAILED):
            assert c.lacks, c.id
            assert c.remedy, c.id
        assert c.found, c.id
        assert "\n" not in c.found + c.lacks + c.remedy


def test_no_return_probe_is_missed_where_none_is_needed() -> None:
    checks = _server(refused=SECCOMP, tls="", python=files.Python("3.11", "notes"))
    assert next(c for c in checks if c.id == "server.return_probes").state is State.OK


def test_what_a_process_says_of_itself_stays_on_its_line() -> None:
    for c in _server(tracer=3, tracer_name="a\nb\x1b[31m", tls="x\n.so"):
        assert c.found.isprintable()


def test_the_worst_decides() -> None:
    it = Subject("a.b", "a")
    ok, note, unknown = it.ok("x"), it.note("x"), it.unknown("x")
    limited, failed = it.limited("x", "y", "z"), it.failed("x", "y", "z")
    assert worst([]) is worst([ok, note]) is State.OK
    assert worst([ok, unknown]) is worst([limited, note]) is State.LIMITED
    assert worst([failed, limited, unknown]) is State.FAILED


def _state(name: str, state: str, reason: str = "", **hooks: HookState) -> ProbeState:
    return ProbeState(name, f"title of {name}", "idle-free", state, reason, dict(hooks))


@pytest.mark.parametrize(
    ("probe", "state", "words"),
    [
        (_state("sched", "attached"), State.OK, "attached"),
        (_state("llama", "waiting"), State.OK, "waiting"),
        (
            _state("sched", "attached", switch=HookState(["raw_tp/x"], [], ["no registers"])),
            L,
            "no registers",
        ),
        (_state("fds", "partial", "no close"), L, "title of fds"),
        (_state("fds", "failed", "Operation not permitted"), L, "capabilities"),
        (_state("sched", "failed", "no kernel BTF: name a file by --btf"), F, "--btf FILE"),
        (_state("sockets", "failed", "sockets.bpf.o is not built"), F, "make build"),
        (_state("sockets", "failed", "verifier"), F, "newer kernel"),
        (_state("fds", "unknown", attach.NOT_TRIED), N, "--no-attach"),
        (_state("fds", "unknown", "no privilege to load programs"), U, "as root"),
    ],
)
def test_probes(probe: ProbeState, state: State, words: str) -> None:
    (check,) = attach.checks([probe])
    assert (check.id, check.state) == (f"probe.{probe.name}", state)
    assert words in f"{check.found} {check.lacks} {check.remedy}"
