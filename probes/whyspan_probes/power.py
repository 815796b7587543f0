"""power: deep idle states that a watched thread's CPU had to leave, and CPUs below their base frequency.

Virtual machines have neither: there it says nothing, and it is tested on made-up events.
"""

from __future__ import annotations

from whyspan_probes.probe import Cost, Hook, Probe

PROBE = Probe(
    name="power",
    title="deep idle states left for a thread, CPUs below their base frequency",
    hooks=(
        Hook(
            "idle",
            (("power_idle_tp", "power_switch_tp"), ("power_idle_raw", "power_switch_raw")),
        ),
        Hook("frequency", (("power_frequency_tp",), ("power_frequency_raw",)), required=False),
    ),
    events={
        "power_woken": {
            "aux": "idle state that the CPU left",
            "idle_ns": "how long it was in it",
            "left_ns": "from leaving it to running the thread",
        },
        "power_frequency": {
            "aux": "CPU",
            "khz": "its frequency now",
            "before_khz": "its frequency before, 0 not known",
        },
    },
    cost=Cost.IDLE_FREE,
    joins="thread on the critical path that was woken on an idle CPU; the CPU it ran on",
    needs="BTF tracepoints (5.5), or raw tracepoints and a BTF file",
    shed=20,
    config={
        "deep_state": "the first idle state that counts",
        "base_khz": "frequency below which a CPU is reported, 0 = none",
    },
)
