"""tcp: retransmits, connects, and listen queues that are full."""

from __future__ import annotations

from whyspan_probes.probe import Cost, Hook, Probe

_QUEUE = {
    "cookie": "listening socket",
    "backlog": "connections that waited to be accepted",
    "limit": "how many may, less one",
    "drops": "connections and SYNs that the listening socket refused so far",
    "lport": "its port",
}

PROBE = Probe(
    name="tcp",
    title="TCP retransmits, connects, full listen queues",
    hooks=(
        Hook("again", (("tcp_again_tp",), ("tcp_again_raw",))),
        Hook("state", (("tcp_state_tp",), ("tcp_state_raw",))),
        Hook("synack", (("tcp_synack_tp",), ("tcp_synack_raw",)), required=False),
        Hook(
            "listen",
            tuple((f"tcp_ready_{how}",) for how in ("tp", "raw", "fentry", "kprobe")),
            required=False,
        ),
    ),
    events={
        "tcp_retransmit": {
            "aux": "1 after a time-out, 2 after duplicate acknowledgements, 3 a probe of the tail, 4 a SYN",
            "cookie": "connection",
            "seq": "position in the stream of the first byte, as sent",
            "rto_us": "time-out that passed, or would have, µs",
            "srtt_us": "round trip, smoothed, µs",
            "total": "segments sent again on the connection so far",
            "lport": "local port",
            "rport": "remote port",
            "state": "TCP state",
            "timeouts": "time-outs in a row",
        },
        "tcp_connect": {
            "aux": "1 the peer is on this host",
            "cookie": "connection",
            "duration_ns": "from the SYN to its answer, or to the end of the attempt",
            "error": "errno of a failed one",
            "again": "SYNs sent again",
            "lport": "local port",
            "rport": "remote port",
            "failed": "1 no connection came of it",
        },
        "tcp_synack": {
            "aux": "1 the client's acknowledgement had come, and there was no room for the connection",
            "again": "how often its SYN-ACK was sent again",
            "rport": "the client's port",
            **_QUEUE,
        },
        "accept_queue": _QUEUE,
    },
    cost=Cost.IDLE_FREE,
    joins="cookie or ports of the connections that the critical path waits for",
    needs="BTF or raw tracepoints; sk_data_ready (6.3), fentry or kprobes for listen queues",
    shed=30,
    config={"per_s": "retransmits and full queues recorded per second and CPU, at most"},
)
