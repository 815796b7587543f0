"""A process for the tests of doctor to look into; says a line when it is as asked, and waits for its end.

Runs under any Python: ``child.py [filtered] [traced] [tls] [ring] [listening]``.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys

libc = ctypes.CDLL(None, use_errno=True)
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
BPF_RET, SECCOMP_RET_ALLOW = 0x06, 0x7FFF0000
PTRACE_TRACEME = 0
IO_URING_SETUP = 425  # the same on x86-64 and arm64


def filtered() -> None:
    """Have this process filtered by seccomp, by a filter that allows everything."""

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    code = ctypes.create_string_buffer(struct.pack("=HBBI", BPF_RET, 0, 0, SECCOMP_RET_ALLOW))
    program = Program(1, ctypes.cast(code, ctypes.c_void_p))
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


def traced() -> None:
    """Have the parent trace this process."""
    if libc.ptrace(PTRACE_TRACEME, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "ptrace")


def main() -> None:
    """Do what the arguments say."""
    kept: list[object] = []
    for word in sys.argv[1:]:
        if word == "filtered":
            filtered()
        elif word == "traced":
            traced()
        elif word == "tls":
            import ssl

            kept.append(ssl.create_default_context())
        elif word == "ring":
            made = libc.syscall(IO_URING_SETUP, 4, ctypes.create_string_buffer(120))
            if made < 0:
                print(f"no ring: {os.strerror(ctypes.get_errno())}", flush=True)
                return
        elif word == "listening":
            kept.append(socket.create_server(("127.0.0.1", 0)))
            print(kept[-1].getsockname()[1], end=" ")  # type: ignore[attr-defined]
    print("ready", flush=True)
    sys.stdin.read()


main()
