"""Mutated HTTP requests, the same from a seed: the short test's, and the million of `tests.bench.endpoint_fuzz`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final

SEEDS: Final = (
    b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:9464\r\nAccept: application/openmetrics-text;version=1.0.0\r\n"
    b"Accept-Encoding: gzip\r\nX-Prometheus-Scrape-Timeout-Seconds: 10\r\n\r\n",
    b"HEAD /metrics HTTP/1.0\r\n\r\n",
    b"GET /metrics?name[]=a HTTP/1.1\r\nHost: a\r\nAccept: text/plain;version=0.0.4;q=0.5,*/*;q=0.1\r\n\r\n",
    b"POST /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello",
    b"GET http://a/metrics HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: a\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET / HTTP/1.1\r\nAccept-Encoding: gzip;q=0\r\nContent-Length: 0\r\n\r\n",
)
_PIECES: Final = (
    *(
        b"\r\n",
        b"\r\n\r\n",
        b"\n",
        b"\r",
        b"\0",
        b" ",
        b":",
        b";",
        b",",
        b"%",
        b"\xff",
        b"\x80",
        b"%00",
        b"%2e%2e/",
    ),
    *(
        b"Content-Length: 99999999999999999999\r\n",
        b"Content-Length: -1\r\n",
        b"Transfer-Encoding: chunked\r\n",
    ),
    *(b"Accept: application/openmetrics-text;version=9999999999999\r\n", b"Accept-Encoding: gzip,gzip\r\n"),
    *(
        b"HTTP/9.9",
        b"HTTP/1.1",
        b"GET",
        b"A" * 300,
        b"x: " + b"y" * 1000 + b"\r\n",
        b"/../" * 30,
        b"//",
        b"?",
        b"#",
    ),
)


def requests(seed: int, count: int) -> Iterator[bytes]:
    """Yield *count* requests, each a seed with up to a dozen changes."""
    rng = random.Random(seed)
    for _ in range(count):
        data = bytearray(rng.choice(SEEDS))
        for _ in range(rng.randrange(1 + rng.randrange(13))):
            at = rng.randrange(len(data) + 1)
            kind = rng.randrange(6)
            if kind == 0:
                data[at:at] = rng.choice(_PIECES)
            elif kind == 1 and at < len(data):
                data[at] = rng.randrange(256)
            elif kind == 2:
                del data[at : at + rng.randrange(1, 20)]
            elif kind == 3:
                data[at:at] = data[at : at + rng.randrange(1, 60)]
            elif kind == 4 and at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            else:
                other = rng.choice(SEEDS)
                data[at:] = other[rng.randrange(len(other)) :]
        yield bytes(data)
