"""Selectors of requests: ``service=chat,since=2h,until=1h,version=0.11.*``."""

from __future__ import annotations

import csv
import difflib
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from math import isfinite
from pathlib import Path
from typing import Final

import msgspec
from whyspan_exporters.listed import BROKEN

from whyspan import times
from whyspan.errors import ConfigError
from whyspan.model import ProcessFact, Request
from whyspan.text import clean

_MAX_TEXT: Final = 4096


class MeasuredEngine(msgspec.Struct, kw_only=True, frozen=True):
    """The engine's part of `Measured`."""

    engine: str = ""
    version: str = ""
    model: str = ""
    template: str = ""


class Measured(msgspec.Struct, kw_only=True, frozen=True):
    """What is compared of a stored finding; its segments are skipped when it is decoded."""

    request: Request
    slow: bool
    wall_ns: int
    causes: dict[str, float]  # ms
    process: ProcessFact | None = None
    engine: MeasuredEngine | None = None


def decode(finding: bytes) -> Measured | None:
    """Return what is compared of a finding as stored; None if it is broken, or a time in it is none."""
    try:
        found = _DECODER.decode(finding)
    except BROKEN:
        return None
    return found if all(map(isfinite, found.causes.values())) else None


_DECODER: Final = msgspec.msgpack.Decoder(Measured)


def _engine(get: Callable[[MeasuredEngine], str]) -> Callable[[Measured], str]:
    return lambda m: get(m.engine) if m.engine is not None else ""


def _process(get: Callable[[ProcessFact], str]) -> Callable[[Measured], str]:
    return lambda m: get(m.process) if m.process is not None else ""


#: What a request can be chosen by, beside times and the store.
ATTRIBUTES: Final[Mapping[str, Callable[[Measured], str]]] = {
    "service": lambda m: m.request.service,
    "model": _engine(lambda e: e.model),
    "engine": _engine(lambda e: e.engine),
    "version": _engine(lambda e: e.version),
    "template": _engine(lambda e: e.template),
    "tenant": lambda m: m.request.tenant,
    "method": lambda m: m.request.method,
    "route": lambda m: m.request.route,
    "status": lambda m: str(m.request.status),
    "outcome": lambda m: m.request.outcome,
    "agent": lambda m: m.request.agent,
    "port": lambda m: str(m.request.server_port),
    "process": _process(lambda p: p.comm),
    "pid": lambda m: str(m.request.tgid),
    "container": _process(lambda p: p.container_id),
    "pod": _process(lambda p: p.pod_uid),
    "cgroup": _process(lambda p: p.cgroup),
}
_OTHERS: Final = ("since", "until", "store")


class Selector(msgspec.Struct, kw_only=True, frozen=True):
    """Which requests. Patterns are shell patterns; times are ns since the epoch, ``until`` excluded."""

    text: str
    patterns: dict[str, str] = {}
    since_unix_ns: int = 0
    until_unix_ns: int = (1 << 63) - 1
    store: Path | None = None

    def takes(self, m: Measured) -> bool:
        """Return whether a request of the right time is one of them."""
        return all(fnmatchcase(ATTRIBUTES[key](m), pattern) for key, pattern in self.patterns.items())


def parse(text: str, now_unix_ns: int) -> Selector:
    """Return the selector that *text* means: ``key=pattern`` separated by commas; one with a comma in double quotes.

    Raises:
        ConfigError: A key is not known or given twice, or a time is none.
    """
    if len(text) > _MAX_TEXT:
        raise ConfigError(f"a selector of more than {_MAX_TEXT} characters")
    patterns: dict[str, str] = {}
    rest: dict[str, str] = {}
    for item in next(csv.reader([text], skipinitialspace=True), []):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not value:
            raise ConfigError(f"{clean(item, 60)!r} is not of the form key=value (in {clean(text, 120)!r})")
        if key == "host":
            raise ConfigError("a store has the requests of one host: name another host's by store=FILE")
        if key not in ATTRIBUTES and key not in _OTHERS:
            close = difflib.get_close_matches(key, [*ATTRIBUTES, *_OTHERS], 1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join([*ATTRIBUTES, *_OTHERS])}"
            raise ConfigError(f"unknown key {clean(key, 40)}; {hint}")
        target = rest if key in _OTHERS else patterns
        if key in target:
            raise ConfigError(f"{key} is given twice (in {clean(text, 120)!r})")
        target[key] = value
    since = times.moment_unix_ns(rest["since"], now_unix_ns) if "since" in rest else 0
    until = times.moment_unix_ns(rest["until"], now_unix_ns) if "until" in rest else (1 << 63) - 1
    if since >= until:
        raise ConfigError(f"since is not before until (in {clean(text, 120)!r})")
    store = Path(rest["store"]) if "store" in rest else None
    return Selector(
        text=clean(text, 200), patterns=patterns, since_unix_ns=since, until_unix_ns=until, store=store
    )
