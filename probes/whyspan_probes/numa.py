"""numa: what automatic NUMA balancing does to watched threads.

A host with one node never fires it: it is tested on made-up events.
"""

from __future__ import annotations

from whyspan_probes.probe import Cost, Hook, Probe

PROBE = Probe(
    name="numa",
    title="pages and threads moved by NUMA balancing",
    hooks=(
        Hook(
            "pages",
            (("numa_begin_tp", "numa_end_tp"), ("numa_begin_raw", "numa_end_raw")),
        ),
        Hook(
            "threads",
            (("numa_move_tp", "numa_swap_tp"), ("numa_move_raw", "numa_swap_raw")),
            required=False,
        ),
    ),
    events={
        "numa_migrated": {
            "begin_ns": "when the migration began",
            "pages": "pages moved",
            "failed": "pages not moved",
        },
        "numa_moved": {
            "aux": "1 swapped with another thread",
            "from_cpu": "where it was",
            "to_cpu": "where it goes",
        },
    },
    cost=Cost.IDLE_FREE,
    joins="thread on the critical path",
    needs="BTF tracepoints (5.5), or raw tracepoints and a BTF file; page migration traced in pairs (5.14)",
    shed=21,
    config={"threads": "1 = report the threads that are moved, too"},
)
