"""The server resolves a name before each request, by a resolver that takes its time."""

from __future__ import annotations

import ctypes
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.demo.procs import stop
from tests.faults.host import netpeer
from tests.faults.host.fault import HTTP, THREADED, Culprit, Fault, Hands, Injected, Launch
from tests.faults.host.netcalls import Calls, took

NAME = "models.whyspan.test"
_RES_INIT, _RES_NORELOAD = 1, 0x02000000  # resolv.h


class _State(ctypes.Structure):
    """The beginning of ``struct __res_state`` of resolv.h."""

    _fields_ = (
        ("retrans", ctypes.c_int),
        ("retry", ctypes.c_int),
        ("options", ctypes.c_ulong),
        ("nscount", ctypes.c_int),
        ("nsaddr", ctypes.c_ubyte * 16),
    )


def use_resolver() -> None:
    """Make this thread's glibc ask 127.0.0.1 instead of what resolv.conf says."""
    libc = ctypes.CDLL(None)
    libc["__res_init"]()
    state_of = libc["__res_state"]
    state_of.restype = ctypes.POINTER(_State)
    state = state_of().contents
    state.nscount = 1
    address = socket.AF_INET.to_bytes(2, "little") + (53).to_bytes(2, "big") + socket.inet_aton("127.0.0.1")
    state.nsaddr[:] = address.ljust(16, b"\0")
    state.options |= _RES_INIT | _RES_NORELOAD


class Names(Calls):
    """A real getaddrinfo."""

    def call(self) -> None:
        use_resolver()
        found = socket.getaddrinfo(NAME, 443, type=socket.SOCK_STREAM)
        assert found[0][4][0] == "127.0.0.1", found


INSIDE = Names()


@asynccontextmanager
async def inject(hands: Hands) -> AsyncIterator[Injected]:
    """Start the resolver in the server's network namespace."""
    slow_ms, out, pid = hands.rng.uniform(70, 150), hands.folder / "dns_slow", hands.pids["server"][0]
    resolver, port = netpeer.start(pid, hands.rest_cpu, "--resolver", slow_ms)
    try:
        await hands.switch("dns_slow", {"loop": hands.server == HTTP, "out": str(out)})
        try:

            def names(culprit: Culprit) -> bool:
                return culprit["kind"] == "peer" and f"resolver at port {port}" in str(culprit["name"])

            yield Injected(names, lambda: took(out, slow_ms))
        finally:
            await hands.switch("dns_slow", None)
    finally:
        stop(resolver)


FAULT = Fault(
    "dns_slow", ("net.dns", "net.connection_setup"), inject, (HTTP, THREADED), launch=Launch(netns=True)
)
