"""samples: what the watched threads execute, 49 times per second and CPU."""

from __future__ import annotations

from whyspan_probes.probe import Cost, Hook, Probe

PROBE = Probe(
    name="samples",
    title="CPU samples with stacks of Python, program and kernel",
    hooks=(Hook("tick", (("samples_tick",),), hz=49),),
    events={
        "cpu_sample": {
            "aux": "1 has the GIL, 2 more of Python than told, 4 a frame was unreadable, 8 no Python, "
            "16 more of the program than told, 32 in the kernel",
            "stack": "number of the stack, by its content; 0 lost",
            "ip": "where in the program",
        },
    },
    cost=Cost.PER_UNIT,
    joins="thread on the critical path",
    needs="perf events (CONFIG_PERF_EVENTS), bpf_loop (5.17)",
    shed=6,
    config={"python": "1 = walk the frames of Python", "user": "1 = walk the frames of the program"},
)
