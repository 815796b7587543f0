"""TLS handshakes: how long they took, on which side, and whether a session was resumed."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from whyspan.threads import Timelines

#: A server's first flight is shorter when a session is resumed, since no certificate is in it. Measured with OpenSSL
#: 3.0: 141 bytes (TLS 1.2) and 241 (1.3) resumed, 616 to 1,354 with one short certificate.
RESUMED_BYTES: Final = 400
_RECV, _SEND = 0, 1


class Handshake(NamedTuple):
    """One handshake of a watched process. Times in ns; ``resumed`` None: its flights were not seen."""

    start_ns: int
    end_ns: int
    tid: int
    tgid: int
    cookie: int
    as_server: bool | None
    resumed: bool | None
    remote_port: int

    @property
    def kind(self) -> str:
        """In words: a full one, or a resumed one."""
        return {True: "resumed", False: "full", None: "handshake"}[self.resumed]


def handshakes(timelines: Timelines) -> list[Handshake]:
    """Return the handshakes that ended in a window, by their end."""
    rows = timelines.select("tls_handshake")
    names = rows.dtype.names or ()
    return [_one(timelines, dict(zip(names, row, strict=True))) for row in rows.tolist()]


def _one(timelines: Timelines, row: dict[str, Any]) -> Handshake:
    as_server, flight = _first_flight(timelines, row["cookie"], row["begin_ns"], row["ts_ns"])
    return Handshake(
        row["begin_ns"],
        row["ts_ns"],
        row["tid"],
        row["tgid"],
        row["cookie"],
        as_server,
        flight <= RESUMED_BYTES if flight else None,
        row["rport"],
    )


def _first_flight(timelines: Timelines, cookie: int, start_ns: int, end_ns: int) -> tuple[bool | None, int]:
    """Return whether this side is the server, and the bytes of the server's first flight; 0 not seen.

    Whoever sends first is the client. A flight is what goes one way until something goes the other.
    """
    moved: list[tuple[int, int, int]] = []
    for name, way in (("sock_recv", _RECV), ("sock_send", _SEND)):
        rows = timelines.keyed(name, "key", cookie) if cookie else timelines.select(name)[:0]
        # With memory BIOs the flight that ends the handshake is sent just after it.
        inside = (rows["ts_ns"] >= np.uint64(start_ns)) & (rows["ts_ns"] <= np.uint64(end_ns))
        moved += [(t, way, n) for t, n in rows[inside][["ts_ns", "bytes"]].tolist()] if len(rows) else []
    moved.sort()
    if not moved:
        return None, 0
    first = moved[0][1]
    flights: list[list[int]] = []  # way and bytes
    for _, way, size in moved:
        if flights and flights[-1][0] == way:
            flights[-1][1] += size
        else:
            flights.append([way, size])
    return first == _RECV, flights[1][1] if len(flights) > 1 else 0
