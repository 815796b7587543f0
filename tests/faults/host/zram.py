"""Swap in compressed memory, small and of its own: what is swapped out costs time, but no disk. Undone on exit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from tests.demo.procs import DemoError
from tests.faults.host.loopdisk import run

_CONTROL = Path("/sys/class/zram-control")


@contextlib.contextmanager
def swap(megabytes: int) -> Iterator[str]:
    """Swap on a new zram device, of lower priority than any other; yields the device.

    Raises:
        DemoError: the kernel has no zram.
    """
    if not _CONTROL.exists():
        with contextlib.suppress(RuntimeError):
            run("modprobe", "zram")
    if not _CONTROL.exists():
        raise DemoError("the kernel has no zram")
    number = (_CONTROL / "hot_add").read_text().strip()
    node = f"/dev/zram{number}"
    with contextlib.ExitStack() as undo:
        undo.callback(_remove, number)
        Path(f"/sys/block/zram{number}/disksize").write_text(f"{megabytes}M")
        run("mkswap", node)
        run("swapon", "-p", "0", node)
        undo.callback(run, "swapoff", node)
        yield node


def _remove(number: str) -> None:
    for _ in range(20):
        try:
            (_CONTROL / "hot_remove").write_text(number)
            return
        except OSError:  # udev still looks at it
            time.sleep(0.1)
