"""A network namespace that the bench's clients reach over a veth pair."""

from __future__ import annotations

import ctypes
import os
import subprocess
from contextlib import suppress
from pathlib import Path

from tests.demo.procs import DemoError

CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def _ip(*words: object) -> None:
    done = subprocess.run(["ip", *map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise DemoError(f"ip {' '.join(map(str, words))}: {done.stderr.strip()}")


class Namespace:
    """``name`` for ``ip netns``; ``host`` is the server's address, ``inner`` and ``outer`` the ends of the pair."""

    def __init__(self, number: int) -> None:
        """Make it. *number*: 0 to 255, one per namespace that is there at the same time."""
        self.name = f"whyspan-bench-{number}"
        self.outer, self.inner = f"wb{number}o", f"wb{number}i"
        self.host, gateway = f"10.213.{number}.2", f"10.213.{number}.1"
        self.remove()  # of a run that was killed
        _ip("netns", "add", self.name)
        try:
            _ip("link", "add", self.outer, "type", "veth", "peer", "name", self.inner, "netns", self.name)
            _ip("addr", "add", f"{gateway}/30", "dev", self.outer)
            _ip("link", "set", self.outer, "up")
            _ip("-n", self.name, "addr", "add", f"{self.host}/30", "dev", self.inner)
            _ip("-n", self.name, "link", "set", self.inner, "up")
            _ip("-n", self.name, "link", "set", "lo", "up")
            _ip("-n", self.name, "route", "add", "default", "via", gateway)
        except DemoError:
            self.remove()
            raise

    def join(self) -> None:
        """Put the calling process into the namespace (for use between fork and exec)."""
        fd = os.open(Path("/run/netns") / self.name, os.O_RDONLY)
        if _libc.setns(fd, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(fd)

    def remove(self) -> None:
        """Take it away with its pair; harmless when there is none."""
        for words in (("link", "del", self.outer), ("netns", "del", self.name)):
            with suppress(DemoError):
                _ip(*words)
