"""What this process itself uses: CPU time and memory."""

from __future__ import annotations

import os
import time
from pathlib import Path


def cpu_s() -> float:
    """Return the CPU seconds of all threads of this process so far."""
    return time.process_time()


def rss_bytes(proc: Path = Path("/proc")) -> int:
    """Return the resident memory of this process in bytes; 0 when the kernel does not say."""
    try:
        # proc_pid_statm(5): size, resident, ... in pages
        return int((proc / "self" / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
