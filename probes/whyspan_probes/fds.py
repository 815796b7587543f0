"""fds: what a blocked read, write, fsync or poll was on."""

from __future__ import annotations

from whyspan_probes.probe import NO_REGISTERS, Cost, Hook, Probe

PROBE = Probe(
    name="fds",
    title="what a blocked call's descriptor is on",
    hooks=(
        Hook(
            "switch",
            (("fds_switch_tp",), ("fds_switch_tp3",), ("fds_switch_raw",), ("fds_switch_raw3",)),
            lacks={"fds_switch_raw": NO_REGISTERS, "fds_switch_raw3": NO_REGISTERS},
        ),
    ),
    events={
        "fd_block": {
            "aux": "1 file, 2 directory, 3 pipe, 4 socket, 5 eventfd, 6 epoll, 7 character device, 8 other",
            "inode": "inode number",
            "key": "opaque key of pipe, socket or eventfd",
            "fd": "descriptor",
            "syscall_nr": "system call",
            "dev": "device number of the file system",
            "lport": "local port",
            "rport": "remote port",
        }
    },
    cost=Cost.IDLE_FREE,
    joins="blocked thread on the critical path",
    needs="BTF tracepoints (5.5), or raw tracepoints and a BTF file",
    shed=2,
    config={"poll": "1 = report the first descriptor of a blocked poll too"},
)
