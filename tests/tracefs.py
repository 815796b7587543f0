"""Syscall tracepoints need tracefs: mounted where it is missing, and the host left as it was found."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator

from whyspan_probes import features

MOUNT_POINT = "/sys/kernel/tracing"


@contextlib.contextmanager
def mounted() -> Iterator[None]:
    """Have tracefs mounted for the time of the context; needs root when it is not already."""
    if features.tracefs():
        yield
        return
    subprocess.run(["mount", "-t", "tracefs", "tracefs", MOUNT_POINT], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", MOUNT_POINT], check=False)
