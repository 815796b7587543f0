"""faults: page faults that sleep for a file's pages or for swapped memory."""

from __future__ import annotations

from whyspan_probes.probe import NO_REGISTERS, Cost, Hook, Probe

PROBE = Probe(
    name="faults",
    title="page faults that wait for storage: file or swap",
    hooks=(
        Hook(
            "switch",
            (
                ("faults_switch_tp",),
                ("faults_switch_tp3",),
                ("faults_switch_raw",),
                ("faults_switch_raw3",),
            ),
            lacks={"faults_switch_raw": NO_REGISTERS, "faults_switch_raw3": NO_REGISTERS},
        ),
        Hook("reads", (("faults_add_tp",), ("faults_add_raw",))),
        # "filemap: add trace events for get_pages, map_pages, and fault" (6.12)
        Hook(
            "mapped",
            tuple((f"faults_fault_{how}",) for how in ("tp", "raw", "fentry", "kprobe")),
            required=False,
        ),
    ),
    events={
        "page_wait": {
            "aux": "1 fault on a mapped file, 2 read by this thread, 4 the same again, 8 probably swap",
            "inode": "inode number of the file, 0 swap",
            "index": "page of the file",
            "pages": "pages read by the thread before it slept",
            "dev": "device number of the file system",
            "syscall_nr": "system call it sleeps in; -1 none",
            "swapped": "pages of the process in swap, about",
        }
    },
    cost=Cost.PER_UNIT,
    joins="blocked thread on the critical path",
    needs="BTF tracepoints (5.5), or raw tracepoints and a BTF file",
    shed=17,
    config={
        "fresh_ns": "time from a page's read to the sleep that it explains, ns",
        "again_ns": "CPU time between two sleeps of the same fault, ns",
    },
)
