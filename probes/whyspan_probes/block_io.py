"""block_io: latency of block requests."""

from __future__ import annotations

from whyspan_probes.probe import Cost, Hook, Probe

PROBE = Probe(
    name="block_io",
    title="block requests: device, latency, issuer",
    hooks=(
        Hook(
            "requests",
            (
                ("block_io_issue_tp", "block_io_complete_tp"),
                ("block_io_issue_raw", "block_io_complete_raw"),
            ),
        ),
    ),
    events={
        "block_done": {
            "aux": "1 write, 2 sync, 4 flush, 8 issued by a kernel thread",
            "sector": "first sector",
            "issue_ns": "when it was given to the device",
            "latency_ns": "time in the device",
            "dev": "major << 20 | minor",
            "bytes": "bytes",
        }
    },
    cost=Cost.IDLE_FREE,
    joins="device and time of a blocked thread on the critical path",
    needs="BTF or raw tracepoints with the 5.11 signature",
    shed=1,
    config={"slow_ns": "requests of unwatched processes at least this slow are recorded, ns"},
)
