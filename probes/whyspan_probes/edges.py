"""edges: which thread wrote what another read, through eventfds and pipes."""

from __future__ import annotations

from whyspan_probes.probe import BOUNDED_RETURNS, NO_REGISTERS, Cost, Hook, Probe

_EDGE = {
    "aux": "1 eventfd, 2 pipe",
    "key": "opaque key of the eventfd or pipe",
    "duration_ns": "time in the call (writes to pipes)",
    "bytes": "return value; 8 for a write to an eventfd, which is reported at its entry",
    "fd": "descriptor",
    "syscall_nr": "system call",
}


def _ways(*writes: str, reads: tuple[str, ...] = ()) -> tuple[tuple[str, ...], ...]:
    """Each way to hook these calls, by cost: 6 and 12 ns at a function's entry and exit, 12 each and 12 more for all
    other calls at tracepoints, 19 and 42 by kprobes (the kernel's own bench, trig-*); only the last may lose returns.
    """
    both = (*writes, *reads)
    return (
        (*(f"edges_fentry_{c}" for c in writes), *(f"edges_fexit_{c}" for c in both)),
        (*(f"edges_enter_{c}" for c in writes), *(f"edges_exit_{c}" for c in both)),
        # The returns first: an entry whose return is not hooked yet would be taken for a lost one.
        (*(f"edges_kretsyscall_{c}" for c in both), *(f"edges_ksyscall_{c}" for c in both)),
    )


def _hook(name: str, *writes: str, reads: tuple[str, ...] = (), required: bool = True) -> Hook:
    return Hook(
        name,
        _ways(*writes, reads=reads),
        required,
        lacks={f"edges_exit_{c}": NO_REGISTERS for c in reads},
        limits={f"edges_kretsyscall_{c}": BOUNDED_RETURNS for c in (*writes, *reads)},
    )


PROBE = Probe(
    name="edges",
    title="eventfd and pipe writes and reads",
    hooks=(
        _hook("write", "write"),
        _hook("read", reads=("read",)),
        _hook("vectors", "writev", reads=("readv",), required=False),
    ),
    events={"edge_write": _EDGE, "edge_read": _EDGE},
    cost=Cost.PER_UNIT,
    joins="writer and reader threads on the critical path",
    needs="fentry, or syscall tracepoints (tracefs), or kprobes",
    shed=3,
    config={"pipes": "1 = pipes too, not only eventfds"},
)
