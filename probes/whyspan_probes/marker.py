"""marker: what an inference process says of its requests, steps and cache."""

from __future__ import annotations

from whyspan_probes.probe import Cost, Probe, UserHook

PROBE = Probe(
    name="marker",
    title="marks of instrumented processes",
    hooks=(),
    user_hooks=(
        UserHook(
            "mark",
            library=r"whyspan_inproc/_marker[^/]*\.so$",
            symbols={"whyspan_mark_v1": 0},
            programs=("marker_mark_multi", "marker_mark_perf"),
            semaphore="whyspan_mark_v1_semaphore",
        ),
    ),
    events={
        "mark": {"aux": "kind of mark", "length": "bytes of its body, which follows in the ring of marks"}
    },
    cost=Cost.PER_UNIT,
    joins="request ids, thread",
    needs="uprobe.multi (6.6) or perf uprobes (CAP_SYS_ADMIN); bpf cookies (5.15)",
    shed=5,
    config={"min_kind": "lower kinds are left out", "max_kind": "higher kinds are left out"},
)
