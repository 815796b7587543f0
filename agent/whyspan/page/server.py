"""Runs the page: a socket bound first, so that what is wrong with it is one clear line, then uvicorn with bounds.

uvicorn with h11: it bounds the size of a request's head, and its connections can be given a time in which to send one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from whyspan_exporters import privileges
from whyspan_exporters.reader import Reader

from whyspan.errors import ConfigError, StoreError, WhyspanError
from whyspan.page.app import build
from whyspan.page.settings import Settings

#: Connections at the same time, those that listen for news included.
CONNECTIONS: Final = 128
#: s that a client has for the head of a request.
HEAD_S: Final = 15.0
_HEAD_BYTES: Final = 32 << 10
#: s that answers under way have when it stops.
_GRACE_S: Final = 3


def run(settings: Settings, ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; *ready* is called with the address once it can be opened.

    Raises:
        ConfigError: The certificate or the key cannot be used.
        StoreError: There is a store, but it cannot be read.
        WhyspanError: The address or the socket cannot be bound, or privileges cannot be given up.
    """
    server: uvicorn.Server | None = None
    config = uvicorn.Config(
        build(settings, lambda: server is not None and server.should_exit),
        loop="asyncio",
        http=_Patient,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=CONNECTIONS,
        backlog=CONNECTIONS,
        h11_max_incomplete_event_size=_HEAD_BYTES,
        timeout_keep_alive=int(HEAD_S),
        timeout_graceful_shutdown=_GRACE_S,
        ssl_certfile=settings.certificate,
        ssl_keyfile=settings.key,
        # Without one, a key that has a passphrase would ask for it on the terminal.
        ssl_keyfile_password="none",
    )
    try:
        config.load()
        if config.ssl is not None:
            config.ssl.minimum_version = ssl.TLSVersion.TLSv1_2
    except (OSError, ssl.SSLError) as exc:
        raise ConfigError(f"page.tls_certificate, page.tls_key: {exc.strerror or exc}") from exc
    with _bound(settings) as listener:
        try:
            privileges.drop()
        except OSError as exc:
            raise WhyspanError(f"cannot give up privileges: {exc}") from exc
        _check(settings.store)
        server = _Server(config, lambda: ready(_address(settings, listener)))
        server.run(sockets=[listener])


def _check(store: Path) -> None:
    """Raise a StoreError when there is a store that cannot be read; one that is not there yet may come."""
    try:
        there = store.exists()
    except PermissionError:
        there = True
    if not there:
        return
    try:
        Reader(store).close()
    except StoreError as exc:
        hint = (
            "; the page keeps no capability, so root must own it or be of its group"
            if not os.geteuid()
            else ""
        )
        raise StoreError(f"{exc}{hint}") from exc


class _Server(uvicorn.Server):
    """Says when it can be reached."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn raises the signal again at the end; a command that was asked to stop has done as it was told.
        with super().capture_signals():
            yield
            self._captured_signals.clear()


class _Patient(H11Protocol):
    """Closes a connection that does not send the head of a request in time."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        else:
            self._wait()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self._waiting is None:
            self._waiting = self.loop.call_later(HEAD_S, self._give_up)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _give_up(self) -> None:
        self._waiting = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


def _address(settings: Settings, listener: socket.socket) -> str:
    if settings.socket is not None:
        return f"unix:{settings.socket}"
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if settings.tls else 'http'}://{shown}:{port}{settings.prefix}/"


@contextlib.contextmanager
def _bound(settings: Settings) -> Iterator[socket.socket]:
    path = settings.socket
    listener = _tcp(*settings.listen) if path is None else _unix(path, settings.socket_mode)
    inode = path.stat().st_ino if path is not None else 0
    try:
        yield listener
    finally:
        listener.close()
        with contextlib.suppress(OSError):
            if path is not None and path.stat().st_ino == inode:
                path.unlink()


def _tcp(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as exc:
        raise WhyspanError(f"cannot listen on {host}: {_why(exc)}") from exc
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, OverflowError) as exc:
        listener.close()
        raise WhyspanError(f"cannot listen on {host} port {port}: {_why(exc)}") from exc
    return listener


def _unix(path: Path, mode: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old = os.umask(0o777 & ~mode)
    try:
        _remove_stale(path)
        listener.bind(os.fspath(path))
    except OSError as exc:
        listener.close()
        raise WhyspanError(f"cannot listen on {path}: {_why(exc)}") from exc
    finally:
        os.umask(old)
    return listener


def _remove_stale(path: Path) -> None:
    """Remove the socket that a process left behind that is no more; nothing else."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(os.fspath(path))
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)


def _why(exc: Exception) -> str:
    return str(getattr(exc, "strerror", "") or exc)
