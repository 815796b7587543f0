"""flood: one record per system call of a given number; for the bench only."""

from __future__ import annotations

from whyspan_probes.probe import Cost, Hook, Probe

PROBE = Probe(
    name="flood",
    title="one record per system call",
    hooks=(Hook("enter", (("flood_enter",),)),),
    events={"flood_call": {"nr": "system call", "count": "always 1"}},
    cost=Cost.BURST,
    joins="nothing",
    needs="BTF tracepoints (5.5)",
    config={"nr": "number of the system call to record"},
)
