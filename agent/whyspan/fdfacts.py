"""What the descriptors are that threads were seen to block on, looked up once, files again and again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import numpy as np
from whyspan_probes.schema import Events

from whyspan import hostfacts
from whyspan.model import Fact, FdFact

#: Descriptors looked at per batch: each costs some system calls.
MAX_PER_BATCH: Final = 32
_MAX_KNOWN: Final = 8192
_FILE: Final = 1  # aux of fd_block

Key = tuple[int, int, int]  # tgid, fd, inode


class FdFacts:
    """Remembers what it has looked at: pipes and sockets, whose inodes are never another's, only once.

    A file system gives the inode of a file that is gone to the next one, and a name changes: of a file the answer is
    asked for in each batch in which somebody blocked on it. That is rare: most writes to files do not block.
    """

    def __init__(self, look: Callable[[int, int, int], FdFact | None] = hostfacts.fd_fact) -> None:
        """*look*: returns what a (tgid, fd) is on if it still has the inode, None when not."""
        self._look = look
        self._known: OrderedDict[Key, None] = OrderedDict()

    def of(self, blocks: Events) -> list[Fact]:
        """Return the facts of the descriptors in ``fd_block`` events, of at most MAX_PER_BATCH; new ones go first."""
        if not len(blocks):
            return []
        keys = [(k[:3], k[3]) for k in np.unique(blocks[["tgid", "fd", "inode", "aux"]]).tolist()]
        new = [key for key, _ in keys if key not in self._known]
        again = [key for key, kind in keys if key in self._known and kind == _FILE]
        out: list[Fact] = []
        for key in [*new, *again][:MAX_PER_BATCH]:
            self._known[key] = None
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
            fact = self._look(*key)
            if fact is not None:
                out.append(fact)
        return out
