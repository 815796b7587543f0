"""The functions that sockets send and receive by, where the tracepoints of sends and receives (6.3) are missing."""

from __future__ import annotations

_INTERNET = ("inet_recvmsg", "inet6_recvmsg", "inet_sendmsg", "inet6_sendmsg")
_UNIX = tuple(f"unix_{kind}_{way}msg" for kind in ("stream", "dgram") for way in ("recv", "send"))
#: Of kernels before "splice, net: Remove the sendpage protocol op" (6.5): sendfile goes there.
_PAGES = ("inet_sendpage", "unix_stream_sendpage")


def exits(probe: str) -> tuple[tuple[str, ...], ...]:
    """Alternatives of a probe that sees all these sockets, by fexit: with the functions of sendfile, then without."""
    functions = (*_INTERNET, *_UNIX)
    return tuple(tuple(f"{probe}_fexit_{f}" for f in (*functions, *more)) for more in (_PAGES, ()))


def kprobes(probe: str) -> tuple[tuple[str, ...], ...]:
    """The same by kprobes and kretprobes; the returns come first, or an entry would wait for one that never comes."""
    functions = (*_INTERNET, *_UNIX)
    return tuple(_both(probe, (*functions, *more)) for more in (_PAGES, ()))


def internet(probe: str) -> tuple[tuple[str, ...], ...]:
    """Alternatives of a probe that sees messages of the internet's sockets only: by fexit, by kprobes."""
    return (tuple(f"{probe}_fexit_{f}" for f in _INTERNET), _both(probe, _INTERNET))


def returns(probe: str) -> tuple[str, ...]:
    """The programs of such alternatives that may lose returns."""
    return tuple(f"{probe}_return_{f}" for f in (*_INTERNET, *_UNIX, *_PAGES))


def _both(probe: str, functions: tuple[str, ...]) -> tuple[str, ...]:
    return (*(f"{probe}_return_{f}" for f in functions), *(f"{probe}_enter_{f}" for f in functions))
