"""The maps that every probe shares, created once: rings, watched processes, drop counters."""

from __future__ import annotations

import ctypes as ct
import mmap
import os
import select

from whyspan_probes.libbpf import BPF_MAP_TYPE_ARRAY_OF_MAPS, MapCreateOpts, check, libbpf
from whyspan_probes.rings import RECORD_BYTES, BlobRing, DropCounters, EventRing, create_ring

MAX_SHARDS = 64  # whyspan.bpf.h
MAX_KINDS = 1024
MAX_WATCHED = 2048
_BPF_MAP_TYPE_HASH, _BPF_MAP_TYPE_PERCPU_ARRAY = 1, 6
_BPF_F_NO_PREALLOC = 1
PYTHON_BYTES = 56  # struct whyspan_python, python.bpf.h
MAX_RING_BYTES = 16 << 20  # all rings together; each counts twice in RSS


def shard_plan(cpus: int, total_bytes: int) -> tuple[int, int]:
    """Return (number of rings, bytes of each), both powers of two.

    One ring per group of four CPUs: a BPF ring takes about 11 M records/s from one producer but 2 M/s from sixteen.
    A ring is at least one page.
    """
    shards = 1
    while shards < MAX_SHARDS and shards * 4 < cpus:
        shards *= 2
    shards = max(shards, 2 if cpus > 1 else 1)
    each = mmap.PAGESIZE
    while each * 2 * shards <= min(total_bytes, MAX_RING_BYTES):
        each *= 2
    return shards, each


class SharedMaps:
    """Owns the shared maps' descriptors. ``by_name`` is what objects reuse."""

    def __init__(
        self,
        ring_bytes: int,
        blob_bytes: int = 1 << 20,
        mark_bytes: int = 1 << 20,
        stack_bytes: int = 1 << 20,
    ) -> None:
        lib = libbpf()
        cpus = check(lib.libbpf_num_possible_cpus(), "possible CPUs")
        self.shards, each = shard_plan(cpus, ring_bytes)
        fds = [create_ring(f"whyspan_ring{i}", each) for i in range(self.shards)]
        opts = MapCreateOpts(sz=ct.sizeof(MapCreateOpts), inner_map_fd=fds[0])
        outer = check(
            lib.bpf_map_create(
                BPF_MAP_TYPE_ARRAY_OF_MAPS, b"whyspan_rings", 4, 4, MAX_SHARDS, ct.byref(opts)
            ),
            "cannot create the table of rings",
        )
        for i, fd in enumerate(fds):
            key, value = ct.c_uint32(i), ct.c_uint32(fd)
            check(lib.bpf_map_update_elem(outer, ct.byref(key), ct.byref(value), 0), "table of rings")
        drops = check(
            lib.bpf_map_create(_BPF_MAP_TYPE_PERCPU_ARRAY, b"whyspan_drops", 4, 8, MAX_KINDS, None),
            "cannot create the drop counters",
        )
        hash_opts = MapCreateOpts(sz=ct.sizeof(MapCreateOpts), map_flags=_BPF_F_NO_PREALLOC)
        watched = check(
            lib.bpf_map_create(
                _BPF_MAP_TYPE_HASH, b"whyspan_watched", 4, 4, MAX_WATCHED, ct.byref(hash_opts)
            ),
            "cannot create the set of watched processes",
        )
        blobs = create_ring("whyspan_blobs", blob_bytes)
        marks = create_ring("whyspan_marks", mark_bytes)
        stacks = create_ring("whyspan_stacks", stack_bytes)
        pythons = check(
            lib.bpf_map_create(
                _BPF_MAP_TYPE_HASH,
                b"whyspan_pythons",
                4,
                PYTHON_BYTES,
                MAX_WATCHED,
                ct.byref(hash_opts),
            ),
            "cannot create the table of interpreters",
        )
        self.by_name = {
            "whyspan_stacks": stacks,
            "whyspan_pythons": pythons,
            "whyspan_rings": outer,
            "whyspan_drops": drops,
            "whyspan_watched": watched,
            "whyspan_blobs": blobs,
            "whyspan_marks": marks,
        }
        self.rings = [EventRing(fd, each) for fd in fds]
        # An eighth: several CPUs and several objects, each with its own count, share a ring.
        self.wake_every = max(1, each // RECORD_BYTES // 8)
        # Edge-triggered: a ring with something in it is always "ready", only a forced wake-up is news.
        self.waiter = select.epoll()
        for fd in (*fds, marks):
            self.waiter.register(fd, select.EPOLLIN | select.EPOLLET)
        self.blobs = BlobRing(blobs, blob_bytes)
        self.marks = BlobRing(marks, mark_bytes)
        self.stacks = BlobRing(stacks, stack_bytes)
        self.drops = DropCounters(drops)

    def watch(self, tgid: int, service: int) -> None:
        """Add a process. Raises OSError when the set is full."""
        key, value = ct.c_uint32(tgid), ct.c_uint32(service)
        check(
            libbpf().bpf_map_update_elem(self.by_name["whyspan_watched"], ct.byref(key), ct.byref(value), 0),
            f"cannot watch process {tgid}",
        )

    def unwatch(self, tgid: int) -> None:
        """Remove a process; harmless when it is not there."""
        key = ct.c_uint32(tgid)
        libbpf().bpf_map_delete_elem(self.by_name["whyspan_watched"], ct.byref(key))
        libbpf().bpf_map_delete_elem(self.by_name["whyspan_pythons"], ct.byref(key))

    def set_python(self, tgid: int, layout: bytes) -> None:
        """Say where things lie in a process's interpreter: ``struct whyspan_python``. Raises OSError."""
        assert len(layout) == PYTHON_BYTES
        key = ct.c_uint32(tgid)
        check(
            libbpf().bpf_map_update_elem(self.by_name["whyspan_pythons"], ct.byref(key), layout, 0),
            f"interpreter of process {tgid}",
        )

    def watched(self) -> set[int]:
        """Return the processes watched now, forked children included."""
        fd, lib = self.by_name["whyspan_watched"], libbpf()
        out: set[int] = set()
        key, following = ct.c_uint32(0), ct.c_uint32(0)
        previous = None
        while len(out) <= MAX_WATCHED and not lib.bpf_map_get_next_key(fd, previous, ct.byref(following)):
            out.add(following.value)
            key.value = following.value
            previous = ct.byref(key)
        return out

    def close(self) -> None:
        """Close everything; the rings' descriptors belong to their readers."""
        self.waiter.close()
        for ring in self.rings:
            ring.close()
        self.blobs.close()
        self.marks.close()
        self.stacks.close()
        for name, fd in self.by_name.items():
            if name not in ("whyspan_blobs", "whyspan_marks", "whyspan_stacks"):
                os.close(fd)
