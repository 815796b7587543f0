"""A file that a server writes and fsyncs for every request."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from tests.faults.host.fault import Inside


class Saves(Inside):
    """Writes ``bytes`` to ``path`` and waits until they are on the disk; on the event loop if ``loop`` is set."""

    def __init__(self) -> None:
        self._fd, self._bytes, self._append, self._loop = -1, 0, False, False

    def start(self, settings: Mapping[str, Any]) -> None:
        self._bytes, self._loop = int(settings["bytes"]), bool(settings["loop"])
        self._append = bool(settings.get("append", False))
        flags = os.O_CREAT | os.O_WRONLY | (os.O_APPEND if self._append else 0)
        self._fd = os.open(str(settings["path"]), flags, 0o600)

    def stop(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    async def on_loop(self) -> None:
        if self._loop:
            self._save()

    def on_worker(self) -> None:
        if not self._loop:
            self._save()

    def _save(self) -> None:
        if self._fd < 0:
            return
        data = b"x" * self._bytes
        if self._append:
            os.write(self._fd, data)
        else:
            os.pwrite(self._fd, data, 0)
        os.fsync(self._fd)
