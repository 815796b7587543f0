"""What a client or proxy says of a request in its head: when it began, who sends it, and how often it was tried.

All of it is a claim. A time is believed within ten minutes of the arrival, and only against what the same sender has
claimed before: the least delay of its latest requests is taken to be the difference between two clocks.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from typing import Final

from whyspan.lru import Lru

#: Who takes a request in, or queues it, writes the time there. Source: Heroku's router, nginx ``t=${msec}``, New Relic.
START_HEADERS: Final = ("x-request-start", "x-queue-start")
#: Retries so far, counted from 0 and from 1. Source: OpenAI's and Anthropic's clients; Envoy.
_RETRIES: Final = (("x-stainless-retry-count", 0), ("x-envoy-attempt-count", 1))
#: No further from the arrival than this, whatever the head says.
MAX_AWAY_NS: Final = 600_000_000_000
#: Delays of a sender that must be known before one is believed, and how many are kept.
MIN_CLAIMS: Final = 8
_MAX_CLAIMS: Final = 256
_MAX_SENDERS: Final = 1024
_MAX_AGENT: Final = 64
_MAX_ATTEMPT: Final = 1000

#: Products that may be told by name: clients' libraries, and whoever scrapes or probes. Any other's is a number: a
#: User-Agent is free text, and may be a person's name or a key.
PRODUCTS: Final = frozenset(
    {
        *(
            "aiohttp",
            "anthropic",
            "asyncanthropic",
            "asyncopenai",
            "axios",
            "curl",
            "go-http-client",
            "grpc-python",
        ),
        *(
            "httpx",
            "java",
            "java-http-client",
            "langchain",
            "libcurl",
            "litellm",
            "node",
            "node-fetch",
            "okhttp",
        ),
        *(
            "openai",
            "postmanruntime",
            "python",
            "python-httpx",
            "python-requests",
            "python-urllib",
            "reqwest",
        ),
        *(
            "undici",
            "wget",
            "envoy",
            "haproxy",
            "nginx",
            "traefik",
            "elb-healthchecker",
            "googlehc",
            "kube-probe",
        ),
        *("alloy", "datadog", "grafana-agent", "grafanaagent", "metricbeat", "openmetrics", "opentelemetry"),
        *("otelcol", "otelcol-contrib", "prometheus", "telegraf", "victoriametrics", "vm_promscrape"),
    }
)

_NUMBER = re.compile(r"(?:t=)?(\d{9,20})(?:\.(\d{1,9}))?")
_PRODUCT = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?:/[A-Za-z0-9.+_-]+)?")
# Seconds, milliseconds, microseconds or nanoseconds since 1970, told apart by their size.
_UNITS: Final = ((10**17, 1), (10**14, 10**3), (10**11, 10**6), (0, 10**9))


def unix_start_ns(headers: Mapping[str, str]) -> int:
    """Return when the sender says that the request began, ns since the Unix epoch; 0 when it does not say."""
    for name in START_HEADERS:
        found = _NUMBER.fullmatch(headers.get(name, "").strip())
        if found is not None:
            whole = int(found[1])
            scale = next(scale for least, scale in _UNITS if whole >= least)
            part = int((found[2] or "0").ljust(9, "0")) * scale // 10**9
            return whole * scale + part
    return 0


def product_of(agent: str) -> str:
    """Return the first product of a ``User-Agent`` if it is one of those that may be told, else an empty text."""
    found = _PRODUCT.match(agent)
    known = found is not None and found[0].partition("/")[0].lower() in PRODUCTS
    return found[0][:_MAX_AGENT] if found is not None and known else ""


def agent_of(headers: Mapping[str, str]) -> str:
    """Return the first product of ``User-Agent``, such as ``Prometheus/2.53.0``; empty when there is none."""
    found = _PRODUCT.match(headers.get("user-agent", ""))
    return found[0][:_MAX_AGENT] if found is not None else ""


def attempt_of(headers: Mapping[str, str]) -> int:
    """Return how many attempts the sender says came before this one."""
    for name, first in _RETRIES:
        text = headers.get(name, "").strip()
        if text.isdigit() and len(text) <= 4:
            return min(max(int(text) - first, 0), _MAX_ATTEMPT)
    return 0


class SenderClocks:
    """Turns the delays that senders claim into time that a request waited before it was sent."""

    def __init__(self) -> None:
        self._claims: Lru[tuple[str, ...], deque[int]] = Lru(_MAX_SENDERS)

    def waited_ns(self, sender: tuple[str, ...], start_ns: int, arrived_ns: int) -> int:
        """Return how long a request waited with its sender; 0 when that is not known.

        Args:
            sender: Whoever's clock it is, as far as that can be told.
            start_ns: When the sender says that it began, CLOCK_MONOTONIC by this host's wall clock; 0 not said.
            arrived_ns: When its first byte arrived.
        """
        delay = arrived_ns - start_ns
        if not start_ns or abs(delay) > MAX_AWAY_NS:
            return 0
        claims = self._claims.get(sender)
        if claims is None:
            claims = deque(maxlen=_MAX_CLAIMS)
            self._claims.put(sender, claims)
        claims.append(delay)
        # What every request of a sender has in common is its clock, or too usual to be a fault.
        return delay - min(claims) if len(claims) >= MIN_CLAIMS else 0
