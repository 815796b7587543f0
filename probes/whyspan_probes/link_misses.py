"""Runs of a kprobe's program that the kernel left out, as it counts them by link."""

from __future__ import annotations

import ctypes as ct

from whyspan_probes.libbpf import libbpf

_PERF_EVENT = 7  # enum bpf_link_type
_KPROBES = (3, 4)  # enum bpf_perf_event_type: kprobe, kretprobe


class _LinkInfo(ct.Structure):
    # struct bpf_link_info, include/uapi/linux/bpf.h; its union as perf_event.kprobe
    _fields_ = (
        ("type", ct.c_uint32),
        ("id", ct.c_uint32),
        ("prog_id", ct.c_uint32),
        ("_pad", ct.c_uint32),
        ("event", ct.c_uint32),
        ("_pad2", ct.c_uint32),
        ("name", ct.c_uint64),
        ("name_len", ct.c_uint32),
        ("offset", ct.c_uint32),
        ("address", ct.c_uint64),
        ("missed", ct.c_uint64),
        ("_rest", ct.c_uint64 * 8),
    )


def read(link: int) -> int:
    """Return how many runs a link has missed: hit within another kprobe, or a return that was not followed.

    0 of other kinds of links, and before "bpf: Add missed value to kprobe perf link info" (6.7).
    """
    info = _LinkInfo()
    size = ct.c_uint32(ct.sizeof(info))
    if libbpf().bpf_obj_get_info_by_fd(libbpf().bpf_link__fd(link), ct.byref(info), ct.byref(size)) < 0:
        return 0
    return int(info.missed) if info.type == _PERF_EVENT and info.event in _KPROBES else 0
