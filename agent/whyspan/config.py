"""The configuration: every key, its type, its bounds and its default, in one place.

A TOML file, overridden by the command line under the same names. Unknown keys and wrong types are a
`ConfigError` of one line that names the file and the key.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import msgspec
from msgspec import Meta

from whyspan.errors import ConfigError

CONFIG_ENV = "WHYSPAN_CONFIG"
#: JSON object of the same shape as the file; set by ``whyspan run`` for the processes it starts.
OVERRIDES_ENV = "WHYSPAN_OVERRIDES"
#: Process id of the supervisor, set by ``whyspan run`` for the processes it starts.
SUPERVISOR_ENV = "WHYSPAN_SUPERVISOR"
SYSTEM_PATH = Path("/etc/whyspan/whyspan.toml")
SYSTEM_STATE = Path("/var/lib/whyspan")
#: struct sockaddr_un.sun_path holds 108 bytes with its final NUL.
_SOCKET_PATH_BYTES = 107
#: Headers kept by default: ids, when the sender says that it began, who it is, and how often it has tried.
HEADERS = (
    "x-request-id",
    "x-tenant-id",
    "x-request-start",
    "x-queue-start",
    "user-agent",
    "x-stainless-retry-count",
    "x-envoy-attempt-count",
)
_MAX_TEMPLATES = 32  # each is a time series
OTLP_PROTOCOLS = ("grpc", "http/protobuf")
TEMPORALITIES = ("cumulative", "delta", "lowmemory")
FEED_KINDS = ("kv_events", "forward_pass", "metrics", "health")
BURST_KINDS = ("malloc", "samples", "syscalls")
FEED_ENGINES = ("vllm", "sglang", "llama.cpp")

Milliseconds = Annotated[float, Meta(ge=0)]
Ratio = Annotated[float, Meta(gt=0, le=1)]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Target(_Section, frozen=True):
    """Processes to watch: those that meet every selector given here. ``service`` names them."""

    pid: Annotated[int, Meta(ge=0)] = 0
    comm: str = ""
    unit: str = ""
    cgroup: str = ""
    service: str = ""

    def __post_init__(self) -> None:
        if not (self.pid or self.comm or self.unit or self.cgroup):
            raise ValueError("a target needs one of pid, comm, unit, cgroup")


class Targets(_Section, frozen=True):
    """``auto`` looks for known inference servers; ``match`` adds others."""

    auto: bool = True
    match: tuple[Target, ...] = ()


class Objectives(_Section, frozen=True):
    """Limits over which a request is slow, in ms; 0 means none."""

    ttft_ms: Milliseconds = 0
    e2e_ms: Milliseconds = 0
    inter_token_ms: Milliseconds = 0


class ServiceObjectives(_Section, frozen=True):
    """What one service has different; a missing key takes the value of ``[slo]``."""

    ttft_ms: Milliseconds | None = None
    e2e_ms: Milliseconds | None = None
    inter_token_ms: Milliseconds | None = None


class Slo(Objectives, frozen=True):
    """Default objectives, and overrides by service name."""

    services: dict[str, ServiceObjectives] = {}

    def objectives(self, service: str) -> Objectives:
        """Return the limits that hold for *service*."""
        own = self.services.get(service, ServiceObjectives())
        return Objectives(
            ttft_ms=self.ttft_ms if own.ttft_ms is None else own.ttft_ms,
            e2e_ms=self.e2e_ms if own.e2e_ms is None else own.e2e_ms,
            inter_token_ms=self.inter_token_ms if own.inter_token_ms is None else own.inter_token_ms,
        )


class Collector(_Section, frozen=True):
    """The process that holds the probes."""

    drain_interval_ms: Annotated[int, Meta(ge=10, le=5000)] = 500
    ring_bytes: Annotated[int, Meta(ge=64 << 10, le=16 << 20)] = 8 << 20  # all rings together
    window_s: Annotated[int, Meta(ge=5, le=3600)] = 60
    recorder_mb: Annotated[int, Meta(ge=1, le=1024)] = 32
    queue_findings: Annotated[int, Meta(ge=1, le=100_000)] = 2000
    explain_per_s: Annotated[float, Meta(gt=0)] = 5  # slow requests, per service
    explain_core_ratio: Annotated[float, Meta(gt=0)] = 0.25  # CPU for explanations, of one core, over 20 s
    # Ordinary requests, per service, once their class has its figures: the 512 kept of a class are then of 85 minutes,
    # in which figures may move by 7%.
    ordinary_per_s: Annotated[float, Meta(ge=0)] = 0.1
    budget_core_ratio: Ratio = 0.01  # of one core
    budget_target_ratio: Ratio = 0.01  # of what the targets burn
    stall_ms: Annotated[float, Meta(ge=0)] = 200  # 0: no snapshots of stalled processes
    record: str = ""
    header_allow: tuple[str, ...] = HEADERS
    template_allow: tuple[str, ...] = ()
    known_frames: tuple[str, ...] = ()
    disable_probes: tuple[str, ...] = ()
    btf: str = ""

    def __post_init__(self) -> None:
        if len(self.template_allow) > _MAX_TEMPLATES:
            raise ValueError(f"template_allow has more than {_MAX_TEMPLATES} tags")


class NamedFeed(_Section, frozen=True):
    """A feed that cannot be found: of the watched process of *service*, at an address."""

    service: str
    kind: str
    endpoint: str
    engine: str = "vllm"
    replay: str = ""
    topic: str = ""

    def __post_init__(self) -> None:
        if self.kind not in FEED_KINDS:
            raise ValueError(f"kind {self.kind!r} is not one of {', '.join(FEED_KINDS)}")
        if self.engine not in FEED_ENGINES:
            raise ValueError(f"engine {self.engine!r} is not one of {', '.join(FEED_ENGINES)}")
        if not self.service or not self.endpoint or len(self.endpoint) + len(self.replay) > 400:
            raise ValueError("a feed needs a service and an endpoint, at most 400 characters long")


class Feeds(_Section, frozen=True):
    """What engines publish of themselves; read by a process of its own."""

    enabled: bool = True
    kv_events: bool = True
    forward_pass: bool = True
    metrics: bool = True
    health: bool = True
    interval_s: Annotated[float, Meta(ge=1, le=3600)] = 5  # between two looks at /metrics and health
    timeout_s: Annotated[float, Meta(ge=0.1, le=60)] = 2
    named: tuple[NamedFeed, ...] = ()


class StoreSection(_Section, frozen=True):
    """The local store; at either bound the oldest findings go first."""

    path: str = ""
    max_age_h: Annotated[float, Meta(gt=0)] = 168
    max_mb: Annotated[int, Meta(ge=16)] = 512


class Otlp(_Section, frozen=True):
    """Sending to an OpenTelemetry collector: on when there is an endpoint, here or in ``OTEL_EXPORTER_OTLP_*``.

    A key that is set here wins over the environment; one that is empty or 0 takes the environment's value.
    """

    endpoint: str = ""
    protocol: str = ""
    headers: dict[str, str] = {}
    certificate: str = ""
    client_certificate: str = ""
    client_key: str = ""
    compression: str = ""
    timeout_s: Annotated[float, Meta(ge=0)] = 0
    spool_mb: Annotated[int, Meta(ge=16)] = 256
    export_unsampled: bool = False
    export_ordinary: bool = False
    metrics: bool = True
    metrics_interval_s: Annotated[float, Meta(ge=0)] = 0
    metrics_temporality: str = ""

    def __post_init__(self) -> None:
        if self.protocol not in ("", *OTLP_PROTOCOLS):
            raise ValueError(f"protocol {self.protocol!r} is not one of {', '.join(OTLP_PROTOCOLS)}")
        if self.compression not in ("", "gzip", "none"):
            raise ValueError(f"compression {self.compression!r} is not one of gzip, none")
        if self.metrics_temporality not in ("", *TEMPORALITIES):
            raise ValueError(
                f"metrics_temporality {self.metrics_temporality!r} is not one of {', '.join(TEMPORALITIES)}"
            )


class Prometheus(_Section, frozen=True):
    """An endpoint for Prometheus to scrape: on when there is an address, such as 127.0.0.1:9464 or [::1]:9464."""

    listen: str = ""

    def __post_init__(self) -> None:
        if self.listen and self.address is None:
            raise ValueError(f"listen {self.listen!r} is not an address and a port, such as 127.0.0.1:9464")

    @property
    def address(self) -> tuple[str, int] | None:
        """Return host and port; None when it is off."""
        return parse_address(self.listen)


class PageSection(_Section, frozen=True):
    """The page of ``whyspan serve``: where it listens, who may look, where its links go."""

    listen: str = "127.0.0.1:9466"
    socket: str = ""  # a Unix socket instead
    socket_mode: str = "0600"
    prefix: str = ""  # of all its paths, such as /whyspan
    hosts: tuple[str, ...] = ()  # further names in Host headers
    token_file: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    trace_url: str = ""  # with {trace_id}
    runbook_url: str = ""  # with {runbook}

    def __post_init__(self) -> None:
        if parse_address(self.listen) is None:
            raise ValueError(f"listen {self.listen!r} is not an address and a port, such as 127.0.0.1:9466")
        if not re.fullmatch(r"0?[0-7]{3}", self.socket_mode):
            raise ValueError(f"socket_mode {self.socket_mode!r} is not a mode such as 0600")
        if not re.fullmatch(r"(/[A-Za-z0-9._~-]{1,60}){0,8}/?", self.prefix) or "/." in self.prefix:
            raise ValueError(f"prefix {self.prefix!r} is not a path such as /whyspan")
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ValueError("tls_certificate and tls_key go together")
        for key, field in (("trace_url", "{trace_id}"), ("runbook_url", "{runbook}")):
            url = getattr(self, key)
            if url and not (url.startswith(("https://", "http://")) and field in url and url.isprintable()):
                raise ValueError(f"{key} {url!r} is not an http(s) address with {field} in it")


def parse_address(listen: str) -> tuple[str, int] | None:
    """Return host and port of *listen*, such as ``[::1]:9464``; None when it is not of this form."""
    host, _, port = listen.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        return None
    plain = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 1 << 16
    return (host, int(port)) if host and host.isprintable() and plain else None


class Burst(_Section, frozen=True):
    """Bursts (``whyspan burst``) that a slow request triggers: of its culprit, one at a time."""

    on_breach: tuple[str, ...] = ()  # BURST_KINDS
    causes: tuple[str, ...] = ("lock.malloc",)
    seconds: Annotated[float, Meta(ge=0.1, le=60)] = 2
    min_interval_s: Annotated[float, Meta(ge=1)] = 300

    def __post_init__(self) -> None:
        for kind in self.on_breach:
            if kind not in BURST_KINDS:
                raise ValueError(f"on_breach has {kind!r}, which is not one of {', '.join(BURST_KINDS)}")


class Run(_Section, frozen=True):
    """Where the daemon keeps its files."""

    state_dir: str = ""


class Config(_Section, frozen=True):
    """The whole configuration. An instance without arguments holds every default."""

    targets: Targets = Targets()
    slo: Slo = Slo()
    collector: Collector = Collector()
    feeds: Feeds = Feeds()
    store: StoreSection = StoreSection()
    otlp: Otlp = Otlp()
    prometheus: Prometheus = Prometheus()
    page: PageSection = PageSection()
    burst: Burst = Burst()
    run: Run = Run()

    @property
    def state_dir(self) -> Path:
        """Return the configured folder, else ``/var/lib/whyspan`` (for root, and for those who may read there: its
        services, and members of its group), else ``~/.local/state/whyspan``.
        """
        if self.run.state_dir:
            return Path(self.run.state_dir)
        if os.geteuid() == 0 or os.access(SYSTEM_STATE, os.R_OK | os.X_OK):
            return SYSTEM_STATE
        return Path.home() / ".local/state/whyspan"

    @property
    def collector_dir(self) -> Path:
        """Return the collector's own folder in the state folder: as services the two processes are different users."""
        return self.state_dir / "collector"

    @property
    def store_path(self) -> Path:
        """Return the SQLite file of the local store."""
        return Path(self.store.path) if self.store.path else self.state_dir / "whyspan.db"

    @property
    def spool_path(self) -> Path:
        """Where spans and metrics wait until the OpenTelemetry collector has taken them."""
        return self.state_dir / "otlp-spool.db"

    @property
    def socket_path(self) -> Path:
        """Return the Unix socket on which the exporter listens.

        Raises:
            ConfigError: The state folder's path is too long for a Unix socket; use a shorter one.
        """
        path = self.state_dir / "exporter.sock"
        if len(os.fsencode(path)) > _SOCKET_PATH_BYTES:
            raise ConfigError(f"run.state_dir: {path} is longer than {_SOCKET_PATH_BYTES} bytes")
        return path


def load_config(path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Read the configuration.

    Args:
        path: The file; default: ``$WHYSPAN_CONFIG``, else ``/etc/whyspan/whyspan.toml`` if there is one.
        overrides: Nested values that win over the file; default: the JSON object in ``$WHYSPAN_OVERRIDES``.

    Raises:
        ConfigError: The file cannot be read, or it or the overrides have an unknown key or a wrong value.
    """
    over = _overrides_from_env() if overrides is None else overrides
    _check_keys(over, Config, "command line", "")
    if path is None and (named := os.environ.get(CONFIG_ENV)):
        path = Path(named)
    if path is None and SYSTEM_PATH.exists():
        path = SYSTEM_PATH
    data: dict[str, Any] = {}
    if path is not None:
        data = _read(path)
        _check_keys(data, Config, str(path), "")
    _convert(over, "command line")
    if over:
        _convert(data, str(path))  # so that a message blames the right source
    return _convert(_merged(data, over), str(path or "command line"))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: {exc}") from exc


def _overrides_from_env() -> dict[str, Any]:
    text = os.environ.get(OVERRIDES_ENV, "")
    if not text:
        return {}
    try:
        data = json.loads(text)
    except ValueError as exc:
        raise ConfigError(f"{OVERRIDES_ENV}: not JSON: {exc}") from exc
    if not isinstance(data, dict):
        raise ConfigError(f"{OVERRIDES_ENV}: not a JSON object")
    return data


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        old = out.get(key)
        out[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return out


def _convert(data: Mapping[str, Any], source: str) -> Config:
    try:
        return msgspec.convert(data, Config)
    except msgspec.ValidationError as exc:
        message, _, where = str(exc).partition(" - at `$")
        where = where.rstrip("`").replace("[...]", ".*").lstrip(".")
        text = message.replace("`", "")
        raise ConfigError(f"{source}: {where}: {text[:1].lower()}{text[1:]}") from exc


def _check_keys(data: Any, kind: Any, source: str, prefix: str) -> None:
    # msgspec finds unknown keys too, but names neither the nearest one nor the key of a table in a dict.
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(data, Mapping):
        known = {f.name: f.type for f in msgspec.structs.fields(kind)}
        for key, value in data.items():
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
                raise ConfigError(f"{source}: unknown key {prefix}{key}; did you mean {prefix}{near[0]}?")
            _check_keys(value, known[key], source, f"{prefix}{key}.")
    elif get_origin(kind) is dict and isinstance(data, Mapping):
        for key, value in data.items():
            _check_keys(value, get_args(kind)[1], source, f"{prefix}{key}.")
    elif get_origin(kind) is tuple and isinstance(data, list):
        for index, value in enumerate(data):
            _check_keys(value, get_args(kind)[0], source, f"{prefix[:-1]}[{index}].")
