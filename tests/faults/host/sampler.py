"""Counters that a dashboard has, read ten times a second into a file: what the bench's baselines know of the host."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

EVERY_S = 0.1
#: Fields of /proc/stat's line of a CPU, of /proc/PID/stat after the name, and of /sys/block/DISK/stat.
_CPU = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
_STAT = {"minflt": 7, "majflt": 9, "utime": 11, "stime": 12, "threads": 17, "rss": 21}
_DISK = {"reads": 0, "read_ms": 3, "writes": 4, "write_ms": 7, "busy_ms": 9}
_VMSTAT = (
    *("pgfault", "pgmajfault", "pgpgin", "pgpgout", "pswpin", "pswpout", "pgscan_direct", "pgsteal_direct"),
    *("pgscan_kswapd", "compact_stall", "oom_kill", "numa_hint_faults", "nr_dirty", "nr_writeback"),
    *("allocstall_normal", "allocstall_movable", "workingset_refault_file", "thp_fault_alloc"),
)
#: These are levels, not sums.
GAUGES = frozenset(
    {
        *("pid.threads", "pid.rss", "pid.fds", "vm.nr_dirty", "vm.nr_writeback", "stat.procs_running"),
        *("stat.procs_blocked", "memory.usage", "net.Tcp.CurrEstab"),
    }
)

Reading = Iterator[tuple[str, int]]


def _pairs(path: str, names: Iterable[str]) -> Reading:
    wanted = set(names)
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(" ")
        if key in wanted:
            yield key, int(value)


def _stat(cpu: int) -> Reading:
    for line in Path("/proc/stat").read_text().splitlines():
        words = line.split()
        if words[0] == f"cpu{cpu}":
            yield from ((f"cpu.{name}", int(v)) for name, v in zip(_CPU, words[1:], strict=False))
        elif words[0] in {"ctxt", "procs_running", "procs_blocked"}:
            yield f"stat.{words[0]}", int(words[1])


def _process(pid: int) -> Reading:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    yield from ((f"pid.{name}", int(words[i])) for name, i in _STAT.items())
    run = delay = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError, ValueError):
            a, b, _ = path.read_text().split()
            run, delay = run + int(a), delay + int(b)
    yield from (("pid.run", run), ("pid.run_delay", delay), ("pid.fds", len(os.listdir(f"/proc/{pid}/fd"))))
    for line in Path(f"/proc/{pid}/io").read_text().splitlines():
        key, _, value = line.partition(": ")
        yield f"pid.{key}", int(value)


def _net(pid: int) -> Reading:
    """Read a process's network namespace: a line of names, then one of values."""
    for file in ("snmp", "netstat"):
        lines = Path(f"/proc/{pid}/net/{file}").read_text().splitlines()
        for names, values in zip(lines[::2], lines[1::2], strict=False):
            group, _, rest = names.partition(": ")
            if group in {"Tcp", "TcpExt", "Udp"}:
                numbers = values.partition(": ")[2].split()
                yield from ((f"net.{group}.{n}", int(v)) for n, v in zip(rest.split(), numbers, strict=False))


def _groups(pid: int) -> Reading:
    """Read a process's own CPU and memory groups, of either version."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if path == "/":
            continue
        for root in (f"/sys/fs/cgroup/{controllers}", "/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
            folder = Path(root + path)
            if (folder / "cpu.stat").exists():
                pairs = _pairs(str(folder / "cpu.stat"), ("nr_throttled", "throttled_time", "throttled_usec"))
                yield from ((f"cgroup.{k.replace('usec', 'time')}", v) for k, v in pairs)
            for name, key in (("memory.failcnt", "hits"), ("memory.usage_in_bytes", "usage")):
                if (folder / name).exists():
                    yield f"memory.{key}", int((folder / name).read_text())
            if (folder / "memory.events").exists():
                yield from (("memory.hits", v) for _, v in _pairs(str(folder / "memory.events"), ("max",)))


def _pressure() -> Reading:
    for kind in ("cpu", "io", "memory"):
        some = Path(f"/proc/pressure/{kind}").read_text().splitlines()[0]
        yield f"psi.{kind}", int(some.rpartition("=")[2])


def _disks() -> Reading:
    totals = dict.fromkeys(_DISK, 0)
    for path in Path("/sys/block").glob("*/stat"):
        words = path.read_text().split()
        for name, i in _DISK.items():
            totals[name] += int(words[i])
    yield from ((f"disk.{name}", v) for name, v in totals.items())


def read(pid: int, cpu: int) -> dict[str, int]:
    """Return all counters now; those that cannot be read are left out. Of several disks or groups: the sum."""
    out: dict[str, int] = {}
    sources = (
        _stat(cpu),
        _process(pid),
        _net(pid),
        _groups(pid),
        _pressure(),
        _disks(),
        ((f"vm.{k}", v) for k, v in _pairs("/proc/vmstat", _VMSTAT)),
    )
    for source in sources:
        with suppress(OSError, ValueError):
            for name, value in source:
                out[name] = out.get(name, 0) + value
    return out


def main() -> None:
    """Write a JSON line per reading until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pid", type=int, required=True, help="the server's process")
    parser.add_argument("--cpu", type=int, required=True, help="where it works")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    with open(args.out, "w", encoding="ascii") as file:
        while True:
            now = time.monotonic_ns()
            file.write(json.dumps({"ns": now, **read(args.pid, args.cpu)}) + "\n")
            file.flush()
            time.sleep(max(0.0, EVERY_S - (time.monotonic_ns() - now) / 1e9))


if __name__ == "__main__":
    main()
