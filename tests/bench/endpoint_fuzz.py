"""Fuzz of the Prometheus endpoint: ``python -m tests.bench.endpoint_fuzz [--requests N] [--over-sockets N]``.

Mutated requests go to what answers them, without a socket, and some of them over real connections; prints rates and
how much memory was added. Ends with status 1 when an answer is none, or when the endpoint does not answer any more.
"""

from __future__ import annotations

import argparse
import gc
import re
import socket
import sys
import time
from collections import Counter

from whyspan.selfuse import rss_bytes
from whyspan_exporters.metrics import http
from whyspan_exporters.metrics.endpoint import Endpoint, bind

from tests.unit.metrics.fuzzing import requests

_ANSWER = re.compile(rb"HTTP/1\.1 (200|400|404|405|408|413|431) ")
_PAGE = b"whyspan_a 1\n" * 1000


def _page(accept: str) -> tuple[bytes, str]:
    return _PAGE, "application/openmetrics-text" if "openmetrics" in accept else "text/plain"


def _packed(accept: str, packed: bool) -> tuple[bytes, str]:
    text, content_type = _page(accept)
    return (http.pack(text) if packed else text), content_type


def _answers(seed: int, count: int) -> Counter[str]:
    found: Counter[str] = Counter()
    for data in requests(seed, count):
        match = _ANSWER.match(http.answer(data, _packed))
        found[match[1].decode() if match else "none"] += 1
    return found


def _connections(seed: int, count: int) -> Counter[str]:
    found: Counter[str] = Counter()
    listener = bind("127.0.0.1", 0)
    address = listener.getsockname()
    endpoint = Endpoint(listener, _page)
    for data in requests(seed, count):
        try:
            with socket.create_connection(address, 20) as s:
                s.sendall(data)
                s.shutdown(socket.SHUT_WR)
                got = b""
                while part := s.recv(1 << 16):
                    got = got or part[:64]
        except ConnectionError:  # it was cut off before all was sent
            found["reset"] += 1
            continue
        match = _ANSWER.match(got)
        found[match[1].decode() if match else "none" if data else "closed"] += 1
    with socket.create_connection(address, 20) as s:
        s.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        found["alive" if s.recv(64).startswith(b"HTTP/1.1 200 ") else "dead"] += 1
    endpoint.close()
    return found


def main() -> int:
    """Run both and print what came of it."""
    parser = argparse.ArgumentParser(prog="tests.bench.endpoint_fuzz", description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--over-sockets", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    _answers(args.seed, 1000)
    gc.collect()
    status = 0
    for what, run, count in (
        ("without sockets", _answers, args.requests),
        ("over sockets", _connections, args.over_sockets),
    ):
        before, at = rss_bytes(), time.monotonic()
        found = run(args.seed, count)
        gc.collect()
        added = (rss_bytes() - before) / (1 << 20)
        rate = count / (time.monotonic() - at)
        print(f"{what}: {count:,} requests, {rate:,.0f}/s, {added:+.1f} MiB; {dict(sorted(found.items()))}")
        status |= bool(found["none"] or found["dead"])
    return status


if __name__ == "__main__":
    sys.exit(main())
