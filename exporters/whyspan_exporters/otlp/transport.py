"""Sends one request to one destination and says what came of it, in the terms of the OTLP specification.

https://opentelemetry.io/docs/specs/otlp/: what is retryable, partial success, throttling. gRPC and the HTTP client are
imported only for a target that speaks them.
"""

from __future__ import annotations

import enum
import importlib
import importlib.metadata
import os
from typing import Any, Final, NamedTuple, Protocol

from whyspan_exporters.otlp.settings import GRPC, Target


class Kind(enum.Enum):
    """What became of a request."""

    TAKEN = "taken"  # perhaps but for `Answer.rejected` items
    REFUSED = "refused"  # must not be sent again
    LATER = "later"  # not taken; to be sent again


class Answer(NamedTuple):
    """The receiver's word, or the lack of it."""

    kind: Kind
    reason: str = ""
    rejected: int = 0  # items of a partial success that were not taken
    after_s: float = 0.0  # not to be tried again before
    smaller: bool = False  # refused for its size or contents: parts of it may be taken


class Transport(Protocol):
    """Speaks one protocol with one target."""

    def send(self, payload: bytes) -> Answer:
        """Send a serialised request and wait for the answer, for the target's timeout at most.

        What it raises is a mistake in the settings, or a bug: the request was not taken.
        """

    def close(self) -> None:
        """Cut short what is on its way, where that can be done; from any thread."""


_PROVIDERS: Final = "opentelemetry_otlp_credential_provider"


def load(target: Target) -> None:
    """Import what *target* needs; opens nothing and starts no thread."""
    _module(target)


def make(target: Target) -> Transport:
    """Return a transport for *target*; raises whatever its files or its credential provider raise."""
    transport: Transport = _module(target).make(target)
    return transport


def _module(target: Target) -> Any:
    # The core writes every failed handshake to standard error; the state says it once.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    name = "transport_grpc" if target.protocol == GRPC else "transport_http"
    return importlib.import_module(f"{__package__}.{name}")


def provided_credentials(protocol: str, signal: str) -> Any:
    """Return what the operator's own plugin makes, named in the environment as for the SDK; None without one.

    Args:
        protocol: HTTP (a ``requests.Session``) or GRPC (``grpc.ChannelCredentials``).
        signal: traces or metrics.

    Raises:
        RuntimeError: There is no plugin of that name.
    """
    prefix = f"OTEL_PYTHON_EXPORTER_OTLP_{protocol}"
    keys = (f"{prefix}_{signal.upper()}_CREDENTIAL_PROVIDER", f"{prefix}_CREDENTIAL_PROVIDER")
    name = next((os.environ[k] for k in keys if os.environ.get(k)), "")
    if not name:
        return None
    found = list(importlib.metadata.entry_points(group=_PROVIDERS, name=name))
    if not found:
        raise RuntimeError(f"no plugin {name!r} of {_PROVIDERS} is installed")
    return found[0].load()()
