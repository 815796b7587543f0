"""stalls: sends that TCP held back, holes in what was received, messages to and from resolvers."""

from __future__ import annotations

from whyspan_probes import transfers
from whyspan_probes.probe import BOUNDED_RETURNS, Cost, Hook, Probe

PROBE = Probe(
    name="stalls",
    title="sends held back by Nagle's algorithm, holes in streams, DNS messages",
    hooks=(
        Hook(
            "data",
            (
                ("stalls_recv_tp", "stalls_send_tp"),
                ("stalls_recv_raw", "stalls_send_raw"),
                *transfers.internet("stalls"),
            ),
            limits=dict.fromkeys(transfers.returns("stalls"), BOUNDED_RETURNS),
        ),
    ),
    events={
        "sock_held": {
            "cookie": "connection",
            "held_ns": "when a send left a small tail that had to wait for an acknowledgement",
            "left_ns": "when the tail was sent",
            "bytes": "bytes of the tail",
            "lport": "local port",
            "rport": "remote port",
        },
        "sock_hole": {
            "cookie": "connection",
            "packets": "segments that came out of order since the receive before",
            "total": "the same since the connection began",
            "srtt_us": "round trip, smoothed, µs",
            "lport": "local port",
            "rport": "remote port",
        },
        "dns_message": {
            "aux": "1 query, 2 answer, 4 the resolver is on this host",
            "cookie": "socket",
            "bytes": "bytes of the message",
            "lport": "local port",
            "rport": "remote port",
        },
    },
    cost=Cost.PER_UNIT,
    joins="connection cookie and receiving thread",
    needs="sock_recv_length and sock_send_length (6.3), or fexit, or kprobes",
    shed=13,
    config={"resolver_port": "remote port of datagrams that are taken for DNS"},
)
