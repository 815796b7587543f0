"""A workload that runs out of descriptors. See ``workloads``."""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Callable
from typing import Any

from tests.bpf.work_sched import Work

LIMIT = 67


def out_of_descriptors(count: str) -> Work:
    """Take every descriptor that LIMIT allows, then fail *count* times each to accept and to open."""
    listener = socket.create_server(("127.0.0.1", 0))
    yield {}
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    taken = []
    try:
        while True:
            taken.append(os.dup(0))
    except OSError as e:
        assert e.errno == errno.EMFILE
    tries: list[Callable[[], Any]] = [listener.accept, lambda: os.open("/", os.O_RDONLY)]
    failed = 0
    for _ in range(int(count)):
        for attempt in tries:
            try:
                attempt()
            except OSError as e:
                failed += e.errno == errno.EMFILE
    for fd in taken:
        os.close(fd)
    os.close(os.open("/", os.O_RDONLY))
    yield {"failed": failed, "taken": len(taken)}
