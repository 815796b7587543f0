"""Runs a program at a fixed rate on every CPU: a software event of the perf subsystem for each."""

from __future__ import annotations

import ctypes as ct
import os
import platform
from pathlib import Path

from whyspan_probes import libbpf as lb

SECTION = "perf_event"
_ONLINE = Path("/sys/devices/system/cpu/online")
#: perf_event_open's number. Sources: arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h.
_PERF_EVENT_OPEN = {"x86_64": 298}.get(platform.machine(), 241)
_PERF_TYPE_SOFTWARE, _PERF_COUNT_SW_CPU_CLOCK = 1, 0
_FREQ, _EXCLUDE_IDLE = 1 << 10, 1 << 7  # bits of perf_event_attr's flags
_PERF_FLAG_FD_CLOEXEC = 8
_MAX_CPUS = 8192


class _Attr(ct.Structure):
    """The head of ``struct perf_event_attr``, version 0 (64 bytes): include/uapi/linux/perf_event.h."""

    _fields_ = (
        ("type", ct.c_uint32),
        ("size", ct.c_uint32),
        ("config", ct.c_uint64),
        ("sample_freq", ct.c_uint64),
        ("sample_type", ct.c_uint64),
        ("read_format", ct.c_uint64),
        ("flags", ct.c_uint64),
        ("wakeup_events", ct.c_uint32),
        ("bp_type", ct.c_uint32),
        ("config1", ct.c_uint64),
    )


_syscall = ct.CDLL(None, use_errno=True).syscall
_syscall.restype = ct.c_long


def online_cpus(path: Path = _ONLINE) -> list[int]:
    """Return the CPUs that are on; one that comes later is not sampled until the next start.

    Raises:
        OSError: /sys does not tell.
    """
    found: list[int] = []
    for part in path.read_text().strip().split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found[:_MAX_CPUS]


def _open(cpu: int, hz: int) -> int:
    attr = _Attr(
        type=_PERF_TYPE_SOFTWARE,
        size=ct.sizeof(_Attr),
        config=_PERF_COUNT_SW_CPU_CLOCK,
        sample_freq=hz,
        flags=_FREQ | _EXCLUDE_IDLE,
    )
    arguments = (ct.c_int(-1), ct.c_int(cpu), ct.c_int(-1), ct.c_ulong(_PERF_FLAG_FD_CLOEXEC))
    fd = _syscall(ct.c_long(_PERF_EVENT_OPEN), ct.byref(attr), *arguments)
    return lb.check(int(fd), f"sampler on CPU {cpu}")


def attach(program: int, hz: int) -> list[int]:
    """Run the loaded program *hz* times per second on every CPU that is on; return its links.

    Raises:
        OSError: the kernel refuses on one of them; then it runs on none.
    """
    links: list[int] = []
    try:
        for cpu in online_cpus():
            fd = _open(cpu, hz)
            # The link owns the event from here on, and closes it.
            link = lb.libbpf().bpf_program__attach_perf_event(program, fd)
            if not link:
                os.close(fd)
                lb.check_pointer(link, f"sampler on CPU {cpu}")
            links.append(link)
    except OSError:
        lb.destroy_links(links)
        raise
    return links
