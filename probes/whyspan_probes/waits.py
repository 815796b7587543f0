"""waits: where threads are that have been blocked for long, taken while they are."""

from __future__ import annotations

from whyspan_probes.probe import Cost, Hook, Probe

PROBE = Probe(
    name="waits",
    title="stacks of threads that have been blocked for 100 ms and more",
    hooks=(Hook("look", (("waits_look",),), walks=True),),
    events={
        "wait_stack": {
            "aux": "as of cpu_sample",
            "stack": "number of the stack, by its content; 0 lost",
            "since_ns": "when the thread was first looked at in this block",
            "ip": "where in the program",
        },
    },
    cost=Cost.PER_UNIT,
    joins="thread on the critical path",
    needs="iterators over the threads of one process (6.1), bpf_copy_from_user_task (5.18)",
    shed=7,
    config={"min_ns": "how long a thread must have been seen in one block, ns"},
)
