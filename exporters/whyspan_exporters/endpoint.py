"""The exporter's listening socket: one exporter per state folder, reachable by its own user and the group."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path
from types import TracebackType

from whyspan.errors import WhyspanError

from whyspan_exporters.sharing import SOCKET_MODE, make_dir, share_with_group


class Endpoint:
    """A context manager that binds *path* (mode 0660, group ``whyspan``; else 0600), and removes it at the end."""

    def __init__(self, path: Path) -> None:
        """Name the socket; nothing happens before the context is entered."""
        self._path = path
        self._lock_fd = -1
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def __enter__(self) -> Endpoint:
        """Bind and listen.

        Raises:
            WhyspanError: Another exporter holds the folder, or the socket cannot be made there.
        """
        try:
            make_dir(self._path.parent)
            # The lock goes with the process, even a killed one; the socket's file stays and proves nothing.
            self._lock_fd = os.open(
                self._path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600
            )
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._path.unlink(missing_ok=True)
            old = os.umask(0o177)
            try:
                self.listener.bind(os.fspath(self._path))
            finally:
                os.umask(old)
            share_with_group(self._path, SOCKET_MODE)
            self.listener.listen(4)
        except BlockingIOError as exc:
            raise WhyspanError(f"another exporter uses {self._path}") from exc
        except OSError as exc:
            raise WhyspanError(f"cannot listen on {self._path}: {exc.strerror}") from exc
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close and remove the socket, then give the folder free."""
        self.listener.close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            os.close(self._lock_fd)
