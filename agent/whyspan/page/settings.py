"""Where the page listens and who may look: the configuration, checked as a whole before anything is bound."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from pathlib import Path
from typing import Final, NamedTuple

from whyspan.config import PageSection, parse_address
from whyspan.errors import ConfigError

#: Fewer characters can be guessed over the loopback interface.
MIN_TOKEN: Final = 16
_MAX_TOKEN: Final = 1024
#: struct sockaddr_un.sun_path holds 108 bytes with its final NUL.
_SOCKET_PATH_BYTES: Final = 107
_LOCAL: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class Settings(NamedTuple):
    """The page of one process. ``prefix`` is empty or ``/a/b``; ``hosts`` are lower-case names without ports."""

    store: Path
    listen: tuple[str, int] = ("127.0.0.1", 0)
    socket: Path | None = None
    socket_mode: int = 0o600
    prefix: str = ""
    hosts: frozenset[str] = _LOCAL
    token: str = ""
    certificate: Path | None = None
    key: Path | None = None
    trace_url: str = ""
    runbook_url: str = ""

    @property
    def tls(self) -> bool:
        """Whether it speaks TLS."""
        return self.certificate is not None


def resolve(section: PageSection, store: Path) -> Settings:
    """Return what *section* means.

    Raises:
        ConfigError: The token cannot be read or is too short, the socket's path is too long, or other hosts could reach
            the page without a token and TLS.
    """
    address = parse_address(section.listen)
    assert address is not None  # the section has seen to it
    token = _token(Path(section.token_file)) if section.token_file else ""
    path = Path(section.socket) if section.socket else None
    if path is not None and len(os.fsencode(path)) > _SOCKET_PATH_BYTES:
        raise ConfigError(f"page.socket: {path} is longer than {_SOCKET_PATH_BYTES} bytes")
    if path is None and not (token and section.tls_certificate) and not _loopback(address[0]):
        lacks = " and ".join(
            ["a token (token_file)"] * (not token)
            + ["TLS (tls_certificate, tls_key)"] * (not section.tls_certificate)
        )
        raise ConfigError(
            f"page.listen: other hosts can reach {address[0]}: the page needs {lacks} there;"
            " or listen on 127.0.0.1, or on a Unix socket"
        )
    return Settings(
        store=store,
        listen=address,
        socket=path,
        socket_mode=int(section.socket_mode, 8),
        prefix=section.prefix.rstrip("/"),
        hosts=_LOCAL | {h.strip("[]").lower().rstrip(".") for h in (*section.hosts, address[0])},
        token=token,
        certificate=Path(section.tls_certificate) if section.tls_certificate else None,
        key=Path(section.tls_key) if section.tls_key else None,
        trace_url=section.trace_url,
        runbook_url=section.runbook_url,
    )


def _loopback(host: str) -> bool:
    """Whether *host* is this host's own in every address that it has; a name that has none is not."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return False
    addresses = [ipaddress.ip_address(a) for a in found]
    return bool(addresses) and all((getattr(a, "ipv4_mapped", None) or a).is_loopback for a in addresses)


def _token(path: Path) -> str:
    try:
        with path.open(encoding="ascii") as f:
            mode = os.fstat(f.fileno()).st_mode
            token = f.read(_MAX_TOKEN + 1).strip()
    except OSError as exc:
        raise ConfigError(f"page.token_file: {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"page.token_file: {path}: not plain text") from exc
    if stat.S_ISREG(mode) and mode & stat.S_IROTH:
        raise ConfigError(f"page.token_file: every user can read {path}; chmod o-r it")
    if not MIN_TOKEN <= len(token) <= _MAX_TOKEN or not token.isprintable() or " " in token:
        raise ConfigError(
            f"page.token_file: {path}: a token is one word of {MIN_TOKEN} to {_MAX_TOKEN} characters, such as"
            " `openssl rand -hex 16` makes"
        )
    return token
