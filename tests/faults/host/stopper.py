"""A process of its own that stops another at intervals: by ptrace, as debuggers and profilers do, or by signals.

    python -m tests.faults.host.stopper trace|signal PID HOLD_MS REST_MS

Writes a line for each stop. Whatever ends it, the target goes on: the kernel detaches a tracer that dies, and a
stopped process is continued on SIGTERM; the caller sends another SIGCONT.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from tests.demo.procs import set_name

PTRACE_SEIZE, PTRACE_INTERRUPT, PTRACE_DETACH = 0x4206, 0x4207, 17
__WALL = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def traced(pid: int, hold_s: float) -> int:
    """Stop all threads of a process for a while; return how many were."""
    held: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        tid = int(task.name)
        if _libc.ptrace(PTRACE_SEIZE, tid, None, None) == 0:
            held.append(tid)
    stopped = []
    try:
        for tid in held:
            if _libc.ptrace(PTRACE_INTERRUPT, tid, None, None) == 0:
                os.waitpid(tid, __WALL)
                stopped.append(tid)
        time.sleep(hold_s)
    finally:
        for tid in stopped:
            _libc.ptrace(PTRACE_DETACH, tid, None, None)
    return len(stopped)


def signalled(pid: int, hold_s: float) -> int:
    """Stop a process by a signal for a while."""
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(hold_s)
    finally:
        os.kill(pid, signal.SIGCONT)
    return 1


def main() -> None:
    """Go on until killed or the target is gone."""
    how, pid, hold_s, rest_s = (
        sys.argv[1],
        int(sys.argv[2]),
        float(sys.argv[3]) / 1e3,
        float(sys.argv[4]) / 1e3,
    )
    set_name("lab-tracer" if how == "trace" else "lab-stopper")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while Path(f"/proc/{pid}").exists():
        time.sleep(rest_s)
        count = (traced if how == "trace" else signalled)(pid, hold_s)
        print(count, flush=True)


if __name__ == "__main__":
    main()
