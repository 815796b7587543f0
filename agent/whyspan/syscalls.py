"""The few system calls the explanations speak of, by number (x86-64: the only ABI the probes report)."""

from __future__ import annotations

from typing import Final

#: Waiting for any of many descriptors: an event loop at rest.
POLL: Final = frozenset({7, 23, 232, 270, 271, 281, 441})
#: Of these, the calls for which the descriptors were named before: what event loops rest in.
EPOLL: Final = frozenset({232, 281, 441})
#: Writing a file, pipe or terminal.
WRITE: Final = frozenset({1, 18, 20, 296, 328})
#: Waiting for written data to reach the disk.
FSYNC: Final = frozenset({74, 75, 162, 277, 306})
#: Sending on a socket (write and writev too, since they send on sockets).
SEND: Final = frozenset({1, 20, 40, 44, 46, 307})

PAGE_FAULT: Final = -1
NOT_APPLICABLE: Final = -2

#: Number to name. Source: arch/x86/entry/syscalls/syscall_64.tbl.
NAMES: Final = {
    PAGE_FAULT: "page fault",
    0: "read",
    1: "write",
    7: "poll",
    17: "pread64",
    18: "pwrite64",
    19: "readv",
    20: "writev",
    23: "select",
    34: "pause",
    35: "nanosleep",
    40: "sendfile",
    42: "connect",
    43: "accept",
    44: "sendto",
    45: "recvfrom",
    46: "sendmsg",
    47: "recvmsg",
    61: "wait4",
    72: "fcntl",
    73: "flock",
    74: "fsync",
    75: "fdatasync",
    128: "rt_sigtimedwait",
    162: "sync",
    202: "futex",
    230: "clock_nanosleep",
    232: "epoll_wait",
    247: "waitid",
    257: "openat",
    262: "newfstatat",
    270: "pselect6",
    271: "ppoll",
    277: "sync_file_range",
    281: "epoll_pwait",
    288: "accept4",
    296: "pwritev",
    306: "syncfs",
    307: "sendmmsg",
    328: "pwritev2",
    426: "io_uring_enter",
    441: "epoll_pwait2",
    449: "futex_waitv",
}


def name(nr: int) -> str:
    """Return the name of a call, ``syscall N`` when it is not listed, empty when there is none."""
    if nr <= NOT_APPLICABLE:
        return ""
    return NAMES.get(nr, f"syscall {nr}")
