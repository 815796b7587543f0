"""Syscall tracepoints need tracefs: mounted where it is missing, and the host left as it was found."""

from __future__ import annotations

import contextlib
import fcntl
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from whyspan_probes import features

MOUNT_POINT = "/sys/kernel/tracing"
#: Shared by all that use tracefs now; its text says that one of them mounted it.
_LOCK = Path(tempfile.gettempdir()) / "whyspan-tracefs.lock"


@contextlib.contextmanager
def mounted() -> Iterator[None]:
    """Have tracefs mounted for the time of the context; needs root when it is not already.

    Test runs beside each other share it: the last of them unmounts it, if one of them mounted it.
    """
    with _LOCK.open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        while not features.tracefs():  # going from one kind of lock to the other lets others in between
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not features.tracefs():
                subprocess.run(["mount", "-t", "tracefs", "tracefs", MOUNT_POINT], check=True)
                lock.truncate(0)
                lock.write("mounted")
                lock.flush()
            fcntl.flock(lock, fcntl.LOCK_SH)
        try:
            yield
        finally:
            with contextlib.suppress(BlockingIOError):  # somebody else still uses it
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                lock.seek(0)
                if lock.read():
                    lock.truncate(0)
                    subprocess.run(["umount", MOUNT_POINT], check=False)
