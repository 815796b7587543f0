"""Gives up everything a process may do beyond its user's own files.

The exporter parses data and will talk to the network, so it keeps no capability. It stays the same user: as
root without CAP_DAC_OVERRIDE it still owns, and so reads and writes, the store that root created, and nothing
that root reaches only by capability. The group ``whyspan`` stays a supplementary group, so that SQLite can
give new log files to it without CAP_CHOWN.
"""

from __future__ import annotations

import contextlib
import ctypes
import grp
import os
from pathlib import Path

from whyspan_exporters.sharing import GROUP

# linux/prctl.h, linux/capability.h
PR_SET_NO_NEW_PRIVS = 38
PR_CAPBSET_DROP = 24
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
CAPABILITY_VERSION_3 = 0x20080522


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Data(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


def drop() -> None:
    """Set no_new_privs and clear every capability set; when root, also the supplementary groups.

    Raises:
        OSError: The kernel refused; the process must not go on.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def prctl(*args: int) -> None:
        # As unsigned long: prctl reads all five arguments.
        _check(libc.prctl(*(ctypes.c_ulong(a) for a in (*args, 0, 0, 0, 0)[:5])), "prctl")

    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if os.geteuid() == 0:
        groups = []
        with contextlib.suppress(KeyError):
            groups.append(grp.getgrnam(GROUP).gr_gid)
        with contextlib.suppress(PermissionError):  # root without CAP_SETGID has none to lose
            os.setgroups(groups)
        last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
        for capability in range(last + 1):
            with contextlib.suppress(PermissionError):  # root without CAP_SETPCAP; the sets below still go
                prctl(PR_CAPBSET_DROP, capability)
    # Another user has capabilities too, where systemd gave it some (AmbientCapabilities).
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header = _Header(CAPABILITY_VERSION_3, 0)
    data = (_Data * 2)()
    _check(libc.capset(ctypes.byref(header), ctypes.byref(data)), "capset")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
