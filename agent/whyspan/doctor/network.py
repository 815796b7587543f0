"""Where spans and metrics go, and with ``--network`` whether somebody answers there."""

from __future__ import annotations

import os
import socket
import ssl
from typing import Final, NamedTuple

from whyspan_exporters.otlp.settings import Target, resolve

from whyspan.config import Config
from whyspan.doctor.check import Check, Subject
from whyspan.errors import ConfigError

_TIMEOUT_S: Final = 5.0


class NetworkFacts(NamedTuple):
    """``answers`` has for each endpoint why it cannot be reached, empty where it can; nothing when not tried."""

    problem: str
    endpoints: tuple[tuple[str, str], ...]  # signal, address without secrets
    answers: dict[str, str]
    prometheus: str
    prometheus_problem: str


def gather(config: Config, *, connect: bool) -> NetworkFacts:
    """Resolve the settings; with *connect*, also connect to each endpoint by TCP, and TLS where it is https.

    Nothing is sent beyond the handshake.
    """
    problem, targets = "", []
    try:
        settings = resolve(config.otlp, os.environ)
        problem = settings.problem
        targets = [t for t in (settings.traces, settings.metrics) if t is not None]
    except ConfigError as e:
        problem = str(e)
    answers = {}
    if connect:
        for target in targets:
            if target.shown not in answers:
                answers[target.shown] = target.redact(reach(target))
    listen = config.prometheus.listen
    return NetworkFacts(
        problem,
        tuple((t.signal, t.shown) for t in targets),
        answers,
        listen,
        _free_port(config.prometheus.address) if listen else "",
    )


def reach(target: Target) -> str:
    """Return why the endpoint cannot be reached, or an empty string."""
    host, port = _host_port(target)
    try:
        with socket.create_connection((host, port), _TIMEOUT_S) as raw:
            if target.insecure:
                return ""
            context = ssl.create_default_context(cafile=target.certificate or None)
            if target.client_certificate:
                context.load_cert_chain(target.client_certificate, target.client_key or None)
            with context.wrap_socket(raw, server_hostname=host):
                return ""
    except ssl.SSLCertVerificationError as e:
        return f"its certificate is refused: {e.verify_message}"
    except ssl.SSLError as e:
        return f"TLS: {e.reason or 'failed'}"
    except OSError as e:
        return e.strerror or str(e)


def _host_port(target: Target) -> tuple[str, int]:
    host, _, port = target.authority.rpartition(":")
    if not port.isdigit():  # no port was given
        host, port = target.authority, ("80" if target.insecure else "443")
    return host.strip("[]"), int(port)


def _free_port(address: tuple[str, int] | None) -> str:
    """Return who could be in the way of listening there; a running agent has the port itself."""
    if address is None:
        return ""
    try:
        socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as e:
        return e.strerror or str(e)
    return ""


def checks(f: NetworkFacts) -> list[Check]:
    """Judge them."""
    out = [_otlp(f)]
    out += [_reached(shown, why) for shown, why in f.answers.items()]
    if f.prometheus:
        out.append(_prometheus(f))
    return out


def _otlp(f: NetworkFacts) -> Check:
    it = Subject("network.otlp", "OTLP")
    if f.problem:
        return it.limited(
            f.problem,
            "spans and metrics are not sent; the local store has them",
            "mend otlp.endpoint and its neighbours",
        )
    if not f.endpoints:
        return it.note("off: findings stay in the local store", "set otlp.endpoint to send spans and metrics")
    found = ", ".join(f"{signal} to {shown}" for signal, shown in f.endpoints)
    return it.ok(found) if f.answers else it.note(found, "whyspan doctor --network tries to connect")


def _reached(shown: str, why: str) -> Check:
    it = Subject("network.reach", "OTLP endpoint")
    if not why:
        return it.ok(f"{shown} answers")
    return it.limited(
        f"{shown}: {why}",
        "spans and metrics wait in the spool, up to otlp.spool_mb",
        "start the collector there, or mend otlp.endpoint, the firewall or the certificates",
    )


def _prometheus(f: NetworkFacts) -> Check:
    it = Subject("network.prometheus", "Prometheus endpoint")
    if f.prometheus_problem:
        return it.limited(
            f"{f.prometheus}: {f.prometheus_problem}", "metrics cannot be scraped", "mend prometheus.listen"
        )
    return it.ok(f.prometheus)
