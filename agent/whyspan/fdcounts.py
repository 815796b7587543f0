"""How many descriptors a process has open, of which kinds, looked up when it has run out of them."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Final

from whyspan_probes.schema import Events

from whyspan.model import DescriptorsFact, Fact

_EVERY_S: Final = 1.0
_MAX_LOOKED_AT: Final = 4096
_MAX_KNOWN: Final = 1024
_EPOLL_LIKE: Final = ("eventfd", "eventpoll", "timerfd", "signalfd", "inotify", "pidfd", "io_uring")


class DescriptorCounts:
    """Looks at each process that was refused a descriptor, once a second at most."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._looked: dict[int, float] = {}

    def facts(self, refused: Events, now_s: float) -> list[Fact]:
        """Return what the processes of these refusals have open."""
        out: list[Fact] = []
        for row in refused:
            tgid = int(row["tgid"])
            if now_s - self._looked.get(tgid, -_EVERY_S) < _EVERY_S:
                continue
            if len(self._looked) >= _MAX_KNOWN:
                self._looked.clear()
            self._looked[tgid] = now_s
            fact = descriptors_fact(tgid, int(row["limit"]), self._proc)
            if fact is not None:
                out.append(fact)
        return out


def descriptors_fact(tgid: int, limit: int, proc: Path = Path("/proc")) -> DescriptorsFact | None:
    """Return what a process has open, the kinds of no more than 4096 looked at; None when it is gone."""
    folder = proc / str(tgid) / "fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    kinds: Counter[str] = Counter()
    for name in names[:_MAX_LOOKED_AT]:
        try:
            kinds[_kind(os.readlink(folder / name))] += 1
        except OSError:
            continue
    return DescriptorsFact(tgid, limit, len(names), dict(sorted(kinds.items())))


def _kind(target: str) -> str:
    kind, colon, rest = target.partition(":")
    if colon and rest.startswith("["):
        if kind in ("socket", "pipe"):
            return kind
        return "event" if rest.strip("[]") in _EPOLL_LIKE else "other"
    return "file" if target.startswith("/") else "other"
