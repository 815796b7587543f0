"""Workloads with known counts, run as children: ``python -m tests.bpf.workloads NAME ARGUMENTS``.

Each is a generator: it sets up and yields facts, waits there for a line on standard input, works, and yields
its result. It ends when its input does.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable

from tests.bpf import (
    work_calls,
    work_descriptors,
    work_io,
    work_locks,
    work_marks,
    work_memory,
    work_net,
    work_sched,
    work_storage,
)
from tests.bpf.scripted import scripted_server
from tests.bpf.work_sched import Work

WORKLOADS: dict[str, Callable[..., Work]] = {
    f.__name__: f
    for f in (
        work_sched.sleeps,
        work_sched.futex,
        work_sched.burn,
        work_sched.faults,
        work_sched.threads_then_exit,
        work_sched.programs,
        work_sched.forks,
        work_sched.datagrams,
        work_io.edges,
        work_io.numbered_writes,
        work_io.odd_and_even_writes,
        work_io.blocked_pipe,
        work_io.blocked_socket,
        work_io.fsyncs,
        work_io.direct_writes,
        work_io.unix_stream,
        work_io.tcp_stream,
        work_marks.marker,
        work_locks.gil_waits,
        work_locks.mutex_waits,
        work_locks.malloc_waits,
        work_descriptors.out_of_descriptors,
        work_calls.socket_calls,
        work_calls.refusals,
        work_calls.waiting_reads,
        work_memory.fills_cache,
        work_memory.touches,
        work_net.connects,
        work_net.transfer,
        work_net.one_syn,
        work_net.nagle,
        work_net.crowd,
        work_net.dns,
        work_storage.file_faults,
        work_storage.send_faults,
        work_storage.plain_reads,
        work_storage.swap_faults,
        work_storage.many_mappings,
        work_storage.dirties,
        scripted_server,
    )
}


def main() -> None:
    """Say each thing that the workload yields; wait for a line before each further step."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    work = WORKLOADS[sys.argv[1]](*sys.argv[2:])
    said = next(work)
    while True:
        os.write(1, json.dumps(said).encode() + b"\n")
        line = b""
        while not line.endswith(b"\n"):
            data = os.read(0, 1 << 16)
            if not data:
                os._exit(0)  # not waiting for threads: they are part of what is tested
            line += data
        try:
            said = work.send(json.loads(line))
        except StopIteration:
            return


if __name__ == "__main__":
    main()
