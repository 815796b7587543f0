"""block_io: latency of block requests, and what is written back."""

from __future__ import annotations

from whyspan_probes.probe import Cost, Hook, Probe

PROBE = Probe(
    name="block_io",
    title="block requests: device, latency, issuer; write-back",
    hooks=(
        Hook(
            "requests",
            (
                ("block_io_issue_tp", "block_io_complete_tp"),
                ("block_io_issue_raw", "block_io_complete_raw"),
            ),
        ),
        Hook("flush", (("block_io_written_tp",), ("block_io_written_raw",)), required=False),
        Hook("journal", (("block_io_ordered_tp",), ("block_io_ordered_raw",)), required=False),
        Hook("dirty", (("block_io_pause_tp",), ("block_io_pause_raw",)), required=False),
    ),
    events={
        "block_done": {
            "aux": "1 write, 2 sync, 4 flush, 8 issued by a kernel thread",
            "sector": "first sector",
            "issue_ns": "when it was given to the device",
            "latency_ns": "time in the device",
            "dev": "major << 20 | minor",
            "bytes": "bytes",
        },
        "file_flush": {
            "aux": "1 by the journal's commit, 2 by a kernel thread",
            "inode": "inode number of the file written back",
            "pages": "pages written this time; 0 not known",
            "dev": "device number of the file system",
            "file": "its name, at most 15 bytes of it",
        },
        "dirty_pause": {
            "dev": "device number of the disk",
            "pages": "pages dirtied since its last pause",
            "comm": "name of the thread",
        },
    },
    cost=Cost.IDLE_FREE,
    joins="device and time of a blocked thread on the critical path",
    needs="BTF or raw tracepoints with the 5.11 signature",
    shed=1,
    config={
        "slow_ns": "requests of unwatched processes at least this slow are recorded, ns",
        "flush_pages": "write-back of a file is recorded from this many pages on",
    },
)
