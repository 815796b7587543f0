"""descriptors: calls that failed for lack of a descriptor."""

from __future__ import annotations

from whyspan_probes.probe import BOUNDED_RETURNS, Cost, Hook, Probe

#: Each a hook of its own, so that a kernel without one of them loses only that.
_CALLS = ("accept4", "accept", "socket", "openat", "pipe2", "eventfd2", "epoll_create1")

PROBE = Probe(
    name="descriptors",
    title="calls that failed for lack of a descriptor",
    hooks=tuple(
        Hook(
            call,
            # By cost: 12 ns, 12 and as much for all other calls of the host, 42 and returns may be lost.
            (
                (f"descriptors_fexit_{call}",),
                (f"descriptors_exit_{call}",),
                (f"descriptors_kretsyscall_{call}",),
            ),
            required=call == "accept4",
            limits={f"descriptors_kretsyscall_{call}": BOUNDED_RETURNS},
        )
        for call in _CALLS
    ),
    events={
        "descriptor_refused": {
            "aux": "errno: 24 the process has none left, 23 the host",
            "limit": "the process's own limit, RLIMIT_NOFILE",
            "syscall_nr": "the call",
            "times": "refusals of the process by this call since the last record",
        },
    },
    cost=Cost.PER_UNIT,
    joins="process that serves the request; thread on the critical path",
    needs="fexit, or syscall tracepoints (tracefs), or kretprobes",
    shed=9,
    config={"quiet_us": "refusals of a process by the same call are told so far apart, us"},
)
