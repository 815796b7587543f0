"""One watched scripted server, and what the probes saw of each connection to it."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from whyspan.model import HttpHead
from whyspan_probes.registry import Found
from whyspan_probes.schema import Events

from tests.bpf.child import Child
from tests.bpf.waiting import DEADLINE_S
from tests.bpf.watcher import Watcher

Script = list[list[Any]]


def preferring(found: Found, hook: str, alternative: int) -> Found:
    """Return the probe with one of its hook's alternatives put first: the others are fall-backs."""

    def reordered(alternatives: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
        first = alternatives[alternative]
        return (first, *(a for a in alternatives if a != first))

    hooks = tuple(
        dataclasses.replace(h, alternatives=reordered(h.alternatives)) if h.name == hook else h
        for h in found.probe.hooks
    )
    return Found(dataclasses.replace(found.probe, hooks=hooks), found.object_path)


def reading(n: int, how: str = "recv", step: int = 65536) -> list[Any]:
    """The step that reads exactly n bytes."""
    return ["read", how, n, step]


def writing(*parts: bytes, how: str = "send") -> list[Any]:
    """The step that writes these parts in one call."""
    return ["write", how, [p.decode("latin-1") for p in parts]]


class End(NamedTuple):
    """One ``http_response_end``."""

    seq: int
    status: int
    chunks: int
    body_bytes: int
    flags: int


@dataclasses.dataclass
class Seen:
    """What came of one connection; ``error`` and ``read`` are the server's own view."""

    heads: list[HttpHead]
    response_heads: list[tuple[int, int]]  # seq, status
    ends: list[End]
    lost: Events
    states: Events
    received: Events
    sent: Events
    read: int
    error: str
    reply: bytes
    blobs: list[bytes]

    @property
    def requests(self) -> list[tuple[int, str, str]]:
        """Number, method and route of each request."""
        return [(h.seq, h.method, h.route) for h in self.heads]


class Http:
    """Talks to the server from an unwatched client: the test itself."""

    def __init__(self, watcher: Watcher, server: Child) -> None:
        self.watcher, self._server = watcher, server
        watcher.watch(server.tgid)

    def talk(
        self,
        sent: bytes,
        script: Script,
        *,
        replies: int = -1,
        reset: bool = False,
        pieces: Callable[[bytes], list[bytes]] = lambda data: [data],
    ) -> Seen:
        """Send bytes on a new connection which the server treats by the script, and return what was seen.

        Args:
            sent: What the client sends, at once unless *pieces* cuts it.
            script: What the server does, see ``scripted_server``.
            replies: Bytes of reply after which the client closes; -1: it reads until the server closes.
            reset: Close by a reset.
            pieces: Cuts what is sent.
        """
        w = self.watcher
        w.drain()
        since_ns, blobs = time.monotonic_ns(), len(w.blobs)
        with socket.create_connection(
            ("127.0.0.1", self._server.facts["port"]), timeout=DEADLINE_S
        ) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            port = client.getsockname()[1]
            self._server.say(script)
            for piece in pieces(sent):
                with contextlib.suppress(ConnectionError):
                    client.sendall(piece)
            reply = b""
            with contextlib.suppress(ConnectionError):
                while replies < 0 or len(reply) < replies:
                    data = client.recv(65536 if replies < 0 else replies - len(reply))
                    if not data:
                        break
                    reply += data
            if reset:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        said = self._server.answer()

        def of(name: str, **equal: int) -> Events:
            rows = w.rows(name, **equal)
            return rows[rows["ts_ns"] >= since_ns]

        received, out = of("sock_recv", rport=port), of("sock_send", rport=port)
        keys = {*received["key"].tolist(), *out["key"].tolist()}
        assert len(keys) <= 1, f"one connection, several names: {keys}"
        key = keys.pop() if keys else 0
        return Seen(
            heads=[h for h in w.heads if h.rport == port and h.first_ns >= since_ns],
            response_heads=[(int(r["seq"]), int(r["aux"])) for r in of("http_response_head", cookie=key)],
            ends=[
                End(*(int(r[n]) for n in ("seq", "aux", "chunks", "response_bytes", "flags")))
                for r in of("http_response_end", cookie=key)
            ],
            lost=of("http_head_lost", cookie=key),
            states=of("sock_state", cookie=key),
            received=received,
            sent=out,
            read=said["read"],
            error=said["error"],
            reply=reply,
            blobs=w.blobs[blobs:],
        )
