"""snapshots: all threads of a process at one moment, when one of them ought to serve requests and does not."""

from __future__ import annotations

from whyspan_probes.probe import Cost, Hook, Probe

PROBE = Probe(
    name="snapshots",
    title="stacks of all threads of a process while a serving thread stalls",
    hooks=(
        Hook("look", (("snapshots_look",),), walks=True),
        Hook("take", (("snapshots_take",),), walks=True),
    ),
    events={
        "thread_state": {
            "aux": "as of cpu_sample",
            "stack": "number of the stack, by its content; 0 lost",
            "snapshot": "the same for all threads of one snapshot",
            "since_ns": "when it was first looked at since it gave up the CPU of its own accord last; 0 not known",
            "syscall_nr": "what it is blocked in: number; -1 page fault; -2 none",
            "last_cpu": "which it runs on, or did last",
            "state": "0 running, 1 runnable, 2 blocked",
        },
    },
    cost=Cost.PER_UNIT,
    joins="process on the critical path",
    needs="iterators over the threads of one process (6.1), bpf_copy_from_user_task (5.18)",
    shed=10,
    config={"min_ns": "what has stalled for less is not told to the daemon, ns"},
)
