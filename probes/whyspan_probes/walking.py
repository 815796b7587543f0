"""Runs a program over the threads of one process, when it is asked to: a BPF iterator over tasks."""

from __future__ import annotations

import ctypes as ct
import os
from collections import OrderedDict

from whyspan_probes import libbpf as lb

SECTION = "iter.s/task"
_MAX_LINKS = 256
_CHUNK, _MAX_BYTES = 4096, 1 << 20


class _TaskInfo(ct.Structure):
    """The part for tasks of ``union bpf_iter_link_info``, include/uapi/linux/bpf.h (6.1)."""

    _fields_ = (("tid", ct.c_uint32), ("pid", ct.c_uint32), ("pid_fd", ct.c_uint32), ("_rest", ct.c_uint32))


class _Options(ct.Structure):
    """struct bpf_iter_attach_opts, libbpf 1.3 ``src/libbpf.h``."""

    _fields_ = (
        ("sz", ct.c_size_t),
        ("link_info", ct.POINTER(_TaskInfo)),
        ("link_info_len", ct.c_uint32),
    )


class Walk:
    """One loaded program; a link for each process that it was run over lately."""

    def __init__(self, hook: str, program: int) -> None:
        """*hook*: its name; *program*: libbpf's, loaded.

        Raises:
            OSError: the kernel cannot run it over one process (before 6.1).
        """
        self.hook, self._program = hook, program
        self._links: OrderedDict[int, int] = OrderedDict()
        self._open(os.getpid())

    def run(self, tgid: int) -> bytes:
        """Run it over all threads of the process; return what it prints: nothing when the process is gone."""
        try:
            link = self._links.get(tgid) or self._open(tgid)
            fd = lb.check(lb.libbpf().bpf_iter_create(lb.libbpf().bpf_link__fd(link)), "iterator")
        except OSError:
            self.forget(tgid)
            return b""
        out = bytearray()
        try:
            while (part := os.read(fd, _CHUNK)) and len(out) < _MAX_BYTES:
                out += part
        except OSError:
            pass
        finally:
            os.close(fd)
        return bytes(out)

    def _open(self, tgid: int) -> int:
        info = _TaskInfo(pid=tgid)
        options = _Options(ct.sizeof(_Options), ct.pointer(info), ct.sizeof(info))
        link = lb.libbpf().bpf_program__attach_iter(self._program, ct.byref(options))
        self._links[tgid] = lb.check_pointer(link, f"iterator over process {tgid}")
        if len(self._links) > _MAX_LINKS:
            self.forget(next(iter(self._links)))
        return self._links[tgid]

    def forget(self, tgid: int) -> None:
        """Drop what is kept for a process."""
        if tgid in self._links:
            lb.libbpf().bpf_link__destroy(self._links.pop(tgid))

    def close(self) -> None:
        """Drop everything."""
        for tgid in list(self._links):
            self.forget(tgid)
