"""Where to send, and how: ``[otlp]`` and the environment of the OpenTelemetry SDK, resolved into one answer.

What ``[otlp]`` sets wins; what it leaves empty comes from ``OTEL_EXPORTER_OTLP_TRACES_*`` or ``_METRICS_*``, then from
``OTEL_EXPORTER_OTLP_*``. ``OTEL_SDK_DISABLED=true`` wins over everything.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from whyspan.config import OTLP_PROTOCOLS, Otlp
from whyspan.errors import ConfigError
from whyspan.text import clean

GRPC: Final = "grpc"
HTTP: Final = "http/protobuf"
_HTTP_PORT = 4318  # registered for OTLP over HTTP, as 4317 is for gRPC
_INTERVAL_S = 60.0  # OTEL_METRIC_EXPORT_INTERVAL's default
_MIN_INTERVAL_S = 0.1
COMPRESSIONS: Final = ("gzip", "deflate", "none")
_TIMEOUT_S = 10.0  # the specification's default of OTEL_EXPORTER_OTLP_TIMEOUT
_MAX_TIMEOUT_S = 300.0
_SECRET_CHARS = 4  # shorter header values would blank out half of a message


class Target(NamedTuple):
    """One signal's destination, resolved to the last detail."""

    signal: str  # traces, metrics
    endpoint: str
    protocol: str
    headers: Mapping[str, str]
    certificate: str  # PEM file of the authorities to trust; empty: the client's usual ones
    client_certificate: str  # PEM files with which to show who we are, both or none
    client_key: str
    compression: str  # of COMPRESSIONS
    timeout_s: float  # of one request
    insecure: bool  # no TLS
    secrets: tuple[str, ...]  # must not show up in a message

    @property
    def authority(self) -> str:
        """Host and port, as gRPC wants them."""
        url = _split(self.endpoint)
        return url.netloc.rpartition("@")[2] if url is not None else self.endpoint

    @property
    def shown(self) -> str:
        """The endpoint without what may be secret: user, password, query."""
        return _shown(self.endpoint)

    def redact(self, text: str) -> str:
        """Return *text* without this target's secrets."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text


class Settings(NamedTuple):
    """What is switched on; ``problem`` says what in the environment keeps a signal off."""

    traces: Target | None
    metrics: Target | None
    interval_s: float
    problem: str = ""


def resolve(section: Otlp, env: Mapping[str, str]) -> Settings:
    """Return what *section* and *env* switch on.

    A mistake in the environment, which may be meant for another program, is a ``problem`` and the signal is off.

    Raises:
        ConfigError: The section's endpoint is no URL, or one of its certificates cannot be read; the user edits it.
    """
    if env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return Settings(None, None, _INTERVAL_S)
    if section.endpoint and (reason := _url_problem(section.endpoint, HTTP)):
        raise ConfigError(f"otlp.endpoint: {reason}")
    if "?" in section.endpoint:
        raise ConfigError("otlp.endpoint: give the address without a query; a key goes into otlp.headers")
    _check_files(section)
    problems: list[str] = []
    traces = _target("traces", section, env, problems)
    metrics = _target("metrics", section, env, problems) if section.metrics else None
    interval_s = section.metrics_interval_s or _interval(env, problems)
    return Settings(traces, metrics, max(interval_s, _MIN_INTERVAL_S), "; ".join(dict.fromkeys(problems)))


def _target(signal: str, section: Otlp, env: Mapping[str, str], problems: list[str]) -> Target | None:
    if env.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip().lower() == "none":
        return None

    def read(key: str) -> str:
        return (
            env.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_{key}", "")
            or env.get(f"OTEL_EXPORTER_OTLP_{key}", "")
        ).strip()

    own = env.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "").strip()
    base = section.endpoint or ("" if own else read("ENDPOINT"))
    endpoint = base or own
    if not endpoint:
        return None
    protocol = section.protocol or read("PROTOCOL").lower() or _usual_protocol(endpoint)
    if protocol not in OTLP_PROTOCOLS:
        problems.append(
            f"OTEL_EXPORTER_OTLP_PROTOCOL {clean(protocol, 40)!r} is not one of {', '.join(OTLP_PROTOCOLS)}"
        )
        return None
    if reason := _url_problem(endpoint, protocol):
        problems.append(f"OTEL_EXPORTER_OTLP_ENDPOINT: {reason}")
        return None
    if base and protocol == HTTP:  # an endpoint of one signal is complete
        endpoint = f"{base.rstrip('/')}/v1/{signal}"
    headers = {k.lower(): v for k, v in section.headers.items()}
    own_headers = dict(headers)
    if not headers and (text := read("HEADERS")):
        headers = _env_headers(text, problems)
    compression = section.compression or read("COMPRESSION").lower() or "none"
    if compression not in COMPRESSIONS:
        problems.append(
            f"OTEL_EXPORTER_OTLP_COMPRESSION {clean(compression, 40)!r} is not one of {', '.join(COMPRESSIONS)}"
        )
        return None
    own_pair = bool(section.client_certificate)
    return Target(
        signal=signal,
        endpoint=endpoint,
        protocol=protocol,
        headers=headers,
        certificate=section.certificate or read("CERTIFICATE"),
        client_certificate=section.client_certificate if own_pair else read("CLIENT_CERTIFICATE"),
        client_key=section.client_key if own_pair else read("CLIENT_KEY"),
        compression=compression,
        timeout_s=min(section.timeout_s or _timeout(read("TIMEOUT"), problems), _MAX_TIMEOUT_S),
        insecure=_is_insecure(endpoint, read("INSECURE")),
        secrets=_secrets(endpoint, [*own_headers.values(), *_env_header_values(read("HEADERS"))]),
    )


def _check_files(section: Otlp) -> None:
    if bool(section.client_certificate) != bool(section.client_key):
        raise ConfigError("otlp.client_certificate and otlp.client_key: give both, or none")
    for key in ("certificate", "client_certificate", "client_key"):
        path = getattr(section, key)
        try:
            if path:
                Path(path).read_bytes()
        except OSError as exc:
            raise ConfigError(f"otlp.{key}: cannot read {path}: {exc.strerror}") from exc


def _timeout(text: str, problems: list[str]) -> float:
    # In seconds, as in every OpenTelemetry SDK for Python; the specification says milliseconds.
    return _positive_s("OTEL_EXPORTER_OTLP_TIMEOUT", text, "s", _TIMEOUT_S, problems)


def _positive_s(name: str, text: str, unit: str, usual_s: float, problems: list[str]) -> float:
    """Return a variable of the environment, in s or ms, as seconds; *usual_s* where it is empty or wrong."""
    try:
        found_s = float(text) / (1000 if unit == "ms" else 1) if text else usual_s
    except ValueError:
        found_s = 0.0
    if 0 < found_s < float("inf"):
        return found_s
    problems.append(f"{name} {clean(text, 40)!r} is not a number of {unit}; {usual_s:.0f} s used")
    return usual_s


def _is_insecure(endpoint: str, text: str) -> bool:
    url = _split(endpoint)
    if url is not None and url.scheme:
        return url.scheme == "http"
    return text.lower() == "true"


def _usual_protocol(endpoint: str) -> str:
    url = _split(endpoint)
    return HTTP if url is not None and url.port == _HTTP_PORT else GRPC


def _split(endpoint: str) -> SplitResult | None:
    try:
        url = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}")
        _ = url.port
    except ValueError:
        return None
    return url


def _url_problem(endpoint: str, protocol: str) -> str:
    """Why *endpoint* cannot be used; empty when it can. gRPC takes ``host:port`` without a scheme too."""
    url = _split(endpoint)
    shown = clean(_shown(endpoint), 100)
    if url is None or not url.hostname or url.fragment or not endpoint.isprintable() or " " in endpoint:
        return f"{shown!r} is not a URL such as http://127.0.0.1:4317"
    if url.scheme not in ("http", "https") and not (protocol == GRPC and not url.scheme):
        return f"{shown!r} must begin with http:// or https://"
    return ""


def _shown(endpoint: str) -> str:
    head, separator, rest = endpoint.rpartition("://")
    rest = rest.partition("?")[0].partition("#")[0]
    authority, slash, path = rest.partition("/")
    return clean(f"{head}{separator}{authority.rpartition('@')[2]}{slash}{path}", 200)


def _env_headers(text: str, problems: list[str]) -> dict[str, str]:
    from opentelemetry.util.re import parse_env_headers

    # It would log what it does not understand, which may be half of a secret.
    logging.getLogger("opentelemetry.util.re").disabled = True
    headers = dict(parse_env_headers(text, liberal=True))
    wrong = sum(1 for item in text.split(",") if item.strip()) - len(headers)
    if wrong:
        problems.append(
            f"OTEL_EXPORTER_OTLP_HEADERS: {wrong} of its entries are not name=value, or come twice"
        )
    return headers


def _env_header_values(text: str) -> list[str]:
    # name=value,name=value with percent-encoded values: a message may hold either form.
    values = [item.partition("=")[2].strip() for item in text.split(",")]
    return [form for value in values for form in (value, unquote(value))]


def _secrets(endpoint: str, values: list[str]) -> tuple[str, ...]:
    url = _split(endpoint)
    if url is not None:
        values = [*values, url.query, url.password or "", url.username or ""]
    values = [form for v in values for form in (v, repr(v)[1:-1])]  # messages quote
    return tuple(sorted({v for v in values if len(v) >= _SECRET_CHARS}, key=len, reverse=True))


def _interval(env: Mapping[str, str], problems: list[str]) -> float:
    name = "OTEL_METRIC_EXPORT_INTERVAL"
    return _positive_s(name, env.get(name, "").strip(), "ms", _INTERVAL_S, problems)
