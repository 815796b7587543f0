"""Run time and run count of loaded programs, as the kernel measures them when asked."""

from __future__ import annotations

import ctypes as ct
import os
from typing import NamedTuple

from whyspan_probes.libbpf import BPF_STATS_RUN_TIME, check, libbpf


class RunStats(NamedTuple):
    """Totals since load, counted only while statistics are enabled. ``missed`` counts recursion misses always."""

    run_ns: int
    runs: int
    missed: int


class _ProgInfo(ct.Structure):
    # struct bpf_prog_info, include/uapi/linux/bpf.h (5.12+ for recursion_misses); read as raw bytes up to it
    _fields_ = (
        ("raw", ct.c_uint8 * 192),
        ("run_time_ns", ct.c_uint64),
        ("run_cnt", ct.c_uint64),
        ("misses", ct.c_uint64),
    )


def read(program_fd: int) -> RunStats:
    """Read one program's totals."""
    info = _ProgInfo()
    size = ct.c_uint32(ct.sizeof(info))
    check(libbpf().bpf_obj_get_info_by_fd(program_fd, ct.byref(info), ct.byref(size)), "program statistics")
    return RunStats(info.run_time_ns, info.run_cnt, info.misses)


class StatsWindow:
    """Statistics are enabled while this is open. They cost every program some 20 ns a run, so keep it short."""

    def __init__(self) -> None:
        self._fd = check(libbpf().bpf_enable_stats(BPF_STATS_RUN_TIME), "run-time statistics")

    def close(self) -> None:
        """Disable them again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
