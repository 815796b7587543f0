"""edges: which thread wrote what another read, through eventfds and pipes."""

from __future__ import annotations

from whyspan_probes.probe import NO_REGISTERS, Cost, Hook, Probe

_EDGE = {
    "aux": "1 eventfd, 2 pipe",
    "key": "opaque key of the eventfd or pipe",
    "duration_ns": "time in the call (writes to pipes)",
    "bytes": "return value; 8 for a write to an eventfd, which is reported at its entry",
    "fd": "descriptor",
    "syscall_nr": "system call",
}

PROBE = Probe(
    name="edges",
    title="eventfd and pipe writes and reads",
    hooks=(
        Hook("write", (("edges_enter_write", "edges_exit_write"),)),
        Hook("read", (("edges_exit_read",),), lacks={"edges_exit_read": NO_REGISTERS}),
        Hook("vectors", (("edges_enter_writev", "edges_exit_writev", "edges_exit_readv"),), required=False),
    ),
    events={"edge_write": _EDGE, "edge_read": _EDGE},
    cost=Cost.PER_UNIT,
    joins="writer and reader threads on the critical path",
    needs="syscall tracepoints, tracefs",
    shed=3,
    config={"pipes": "1 = pipes too, not only eventfds"},
)
