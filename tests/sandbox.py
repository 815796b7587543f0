"""A unit's system call filter without its systemd: ``python tests/sandbox.py UNIT COMMAND...`` runs a command below it.

The groups are those of the machine's own ``systemd-analyze syscall-filter``, the filter is libseccomp's, as in systemd.
Executable memory is refused as ``MemoryDenyWriteExecute=`` does, and address families as the unit says.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

_ALLOW, _ERRNO_EPERM = 0x7FFF0000, 0x00050000 | 1  # seccomp.h: SCMP_ACT_ALLOW, SCMP_ACT_ERRNO(EPERM)
_EQ, _MASKED_EQ = 4, 7  # enum scmp_compare
_PR_SET_NO_NEW_PRIVS = 38
_PROT_WRITE, _PROT_EXEC, _SHM_EXEC = 2, 4, 0o100000


UNITS = Path(__file__).resolve().parents[1] / "packaging/systemd"


def lacking() -> str:
    """Why this cannot be done here; empty when it can."""
    try:
        ctypes.CDLL("libseccomp.so.2")
    except OSError:
        return "needs libseccomp"
    return "" if shutil.which("systemd-analyze") else "needs systemd-analyze"


class _Compare(ctypes.Structure):
    _fields_ = (
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("datum_a", ctypes.c_uint64),
        ("datum_b", ctypes.c_uint64),
    )


def values(unit: Path, key: str) -> list[str]:
    """Return every value that a unit gives a key."""
    lines = unit.read_text().splitlines()
    return [line.partition("=")[2] for line in lines if line.startswith(f"{key}=")]


def groups() -> dict[str, list[str]]:
    """Return the members of each group of system calls, groups among them."""
    done = subprocess.run(
        ["systemd-analyze", "syscall-filter", "--no-pager"], capture_output=True, text=True, check=True
    )
    out: dict[str, list[str]] = {}
    name = ""
    for line in done.stdout.splitlines():
        if line.startswith("@"):
            name = line.strip()
            out[name] = []
        elif name and (word := line.strip()) and not word.startswith("#"):
            out[name].append(word)
    return out


def allowed(unit: Path) -> set[str]:
    """Return the system calls that a unit's filter lets through (systemd.exec(5)): the first line says which way."""
    known = groups()

    def members(names: Iterable[str]) -> set[str]:
        out: set[str] = set()
        for name in names:
            out |= members(known[name]) if name.startswith("@") else {name}
        return out

    found = members(["@default"])
    for value in values(unit, "SystemCallFilter"):
        if value.startswith("~"):
            found -= members(value[1:].split())
        else:
            found |= members(value.split())
    return found


def enter(unit: Path) -> None:
    """Put this thread, and all it starts, below the unit's filter."""
    lib = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    lib.seccomp_init.restype = ctypes.c_void_p
    lib.seccomp_syscall_resolve_name.argtypes = (ctypes.c_char_p,)
    context = ctypes.c_void_p(lib.seccomp_init(_ERRNO_EPERM))
    families = " ".join(values(unit, "RestrictAddressFamilies")).split()
    no_exec = "yes" in values(unit, "MemoryDenyWriteExecute")
    for name in sorted(allowed(unit)):
        number = lib.seccomp_syscall_resolve_name(name.encode())
        if number < 0:
            continue
        compares: list[list[_Compare]] = [[]]
        if name == "socket" and families:
            compares = [[_Compare(0, _EQ, int(getattr(socket, f)), 0)] for f in families]
        elif no_exec and name == "mmap":
            # Not writable and executable at once; the two rules together say "not both".
            compares = [
                [_Compare(2, _MASKED_EQ, _PROT_WRITE, 0)],
                [_Compare(2, _MASKED_EQ, _PROT_EXEC, 0)],
            ]
        elif no_exec and name in ("mprotect", "pkey_mprotect"):
            compares = [[_Compare(2, _MASKED_EQ, _PROT_EXEC, 0)]]
        elif no_exec and name == "shmat":
            compares = [[_Compare(2, _MASKED_EQ, _SHM_EXEC, 0)]]
        for rule in compares:
            array = (_Compare * len(rule))(*rule)
            result = lib.seccomp_rule_add_array(context, _ALLOW, number, len(rule), array)
            if result:
                raise OSError(-result, f"seccomp rule for {name}: {os.strerror(-result)}")
    ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    result = lib.seccomp_load(context)
    if result:
        raise OSError(-result, f"seccomp: {os.strerror(-result)}")


if __name__ == "__main__":
    enter(Path(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
