"""What is known of storage: files that are mapped, disks, swap, and who writes the files that are written back."""

from __future__ import annotations

from typing import Final

from whyspan.lru import Lru
from whyspan.model import DiskFact, MappedFact, SwapFact, WriterFact

_MINOR: Final = 0xFFFFF


class Storage:
    """Storage as of the last batch fed; bounded. Part of ``Facts``."""

    def __init__(self, files: int = 4096, disks: int = 256, writers: int = 512) -> None:
        self._mapped: Lru[tuple[int, int, int], MappedFact] = Lru(files)
        self._disks: Lru[int, DiskFact] = Lru(disks)
        self._writers: Lru[tuple[int, int], WriterFact] = Lru(writers)
        self.swap = SwapFact()

    def put(self, fact: MappedFact | DiskFact | SwapFact | WriterFact) -> None:
        """Take in a fact; later ones replace earlier ones."""
        if isinstance(fact, MappedFact):
            self._mapped.put((fact.tgid, fact.inode, fact.dev), fact)
        elif isinstance(fact, DiskFact):
            self._disks.put(fact.dev, fact)
        elif isinstance(fact, SwapFact):
            self.swap = fact
        else:
            self._writers.put((fact.dev, fact.inode), fact)

    def mapped(self, tgid: int, inode: int, dev: int) -> str:
        """Return the path of a mapped file as the process sees it; empty when it was not found."""
        fact = self._mapped.get((tgid, inode, dev))
        return fact.path if fact is not None else ""

    def writer(self, dev: int, inode: int) -> WriterFact | None:
        """Return who had a file open for writing, or None."""
        return self._writers.get((dev, inode))

    def device(self, dev: int) -> str:
        """Return a device in words: its name where it is known, its number, and where it is mounted."""
        fact, number = self._disks.get(dev), f"{dev >> 20}:{dev & _MINOR}"
        if fact is None:
            return f"device {number}"
        mounts = f", mounted at {', '.join(fact.mounts)}" if fact.mounts else ""
        return f"device {fact.name} ({number}{mounts})" if dev >> 20 else f"{fact.name} ({number}{mounts})"

    def swap_names(self) -> str:
        """Return where the host swaps to, in words."""
        return ", ".join(self.swap.names) or "swap"
