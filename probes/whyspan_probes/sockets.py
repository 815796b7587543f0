"""sockets: data and HTTP/1.1 requests on the watched processes' sockets."""

from __future__ import annotations

from whyspan_probes import transfers
from whyspan_probes.probe import BOUNDED_RETURNS, Cost, Hook, Probe, UserHook

_CALLS = ("read", "readv", "recvfrom", "recvmsg", "write", "writev", "sendto", "sendmsg", "sendfile64")
#: OpenSSL and what keeps its interface (LibreSSL, BoringSSL): a library, or linked into Python or its module _ssl.
_TLS_LIBRARY = r"/(libssl[^/]*\.so[^/]*|_ssl\.[^/]*\.so|libpython3[^/]*\.so[^/]*|python3[.\d]*)$"
#: In the order of ``enum tls_function``.
_TLS_CALLS = {"SSL_read": 0, "SSL_read_ex": 1, "SSL_write": 2, "SSL_write_ex": 3}
_HANDSHAKE = {"SSL_do_handshake": 0}
_NO_HEADS = "heads of requests are unread if the kernel's stacks are not 16 KiB"
_NOT_MANY = "what recvmmsg and sendmmsg move is not seen"
_DATA = {
    "aux": "address family: 1 unix, 2 and 10 internet",
    "key": "socket cookie, or inode of a unix socket",
    "peer": "inode of a unix socket's peer",
    "offset": "position in the stream of the first byte",
    "bytes": "bytes moved",
    "lport": "local port",
    "rport": "remote port",
}


def _both(name: str) -> tuple[str, str]:
    return f"sockets_tls_{name}_multi", f"sockets_tls_{name}_perf"


PROBE = Probe(
    name="sockets",
    title="data in and out of sockets, HTTP/1.1 requests",
    hooks=(
        Hook(
            "data",
            (
                ("sockets_recv_tp", "sockets_send_tp"),
                ("sockets_recv_raw", "sockets_send_raw"),
                *transfers.exits("sockets"),
                tuple(f"sockets_exit_{call}" for call in _CALLS),
                # Last: a thread that waits in a receive, of any process, has one of the few returns.
                *transfers.kprobes("sockets"),
            ),
            lacks=dict.fromkeys(
                (
                    "sockets_recv_raw",
                    "sockets_return_inet_recvmsg",
                    *(f"sockets_exit_{call}" for call in _CALLS),
                ),
                _NO_HEADS,
            ),
            limits={
                **dict.fromkeys((f"sockets_exit_{call}" for call in _CALLS), _NOT_MANY),
                **dict.fromkeys(transfers.returns("sockets"), BOUNDED_RETURNS),
            },
        ),
        Hook(
            "arrival",
            tuple((f"sockets_arrival_{how}",) for how in ("tp", "raw", "fentry", "kprobe")),
            required=False,
        ),
        Hook("state", (("sockets_state_tp",), ("sockets_state_raw",)), required=False),
        Hook("reset", (("sockets_reset_tp",), ("sockets_reset_raw",)), required=False),
    ),
    user_hooks=(
        # The returns first: an entry whose return is not hooked would be taken for the next call's.
        UserHook("tls_end", _TLS_LIBRARY, _TLS_CALLS, _both("return"), required=False),
        UserHook("tls", _TLS_LIBRARY, _TLS_CALLS, _both("entry"), required=False),
        UserHook("tls_handshake_end", _TLS_LIBRARY, _HANDSHAKE, _both("shaken"), required=False),
        UserHook("tls_handshake", _TLS_LIBRARY, _HANDSHAKE, _both("shake"), required=False),
    ),
    events={
        "sock_recv": _DATA,
        "sock_send": _DATA,
        "http_response_head": {
            "aux": "HTTP status",
            "cookie": "connection",
            "offset": "unused",
            "seq": "number of the request on the connection",
            "bytes": "bytes of the head",
        },
        "http_response_end": {
            "aux": "HTTP status",
            "cookie": "connection",
            "first_body_ns": "when the first body byte was written",
            "chunks": "writes that carried body bytes",
            "response_bytes": "bytes of the body, framing left out",
            "seq": "number of the request on the connection",
            "flags": "1 the connection's close ended it, 2 it was cut off",
        },
        "sock_state": {
            "aux": "1 reset received",
            "cookie": "connection",
            "old_state": "TCP state before",
            "new_state": "TCP state after, 0 of a reset received",
            "lport": "local port",
            "rport": "remote port",
            "error": "errno of the socket",
        },
        "http_head_lost": {
            "aux": "1 request, 2 response, 3 request never read",
            "cookie": "connection",
            "seq": "number of the message",
            "bytes": "bytes of head seen, or left unread",
            "lport": "local port",
            "rport": "remote port",
            "first_ns": "when an unread request reached the socket",
        },
        "tls_handshake": {
            "begin_ns": "when the first call of it was made",
            "cookie": "connection, 0 not known",
            "session": "which session, opaque",
            "calls": "calls of SSL_do_handshake",
            "lport": "local port",
            "rport": "remote port",
        },
    },
    cost=Cost.PER_UNIT,
    joins="connection cookie and request number",
    needs="sock_recv_length (6.3), fexit, syscall tracepoints or kprobes; bpf_loop (5.17); for HTTPS return probes",
    config={"data": "1 = record every send and receive", "http": "1 = follow HTTP requests"},
)
