"""What a reload (SIGHUP, ``systemctl reload whyspan``) does with each key of the configuration."""

from __future__ import annotations

from enum import Enum
from typing import Any, Final, NamedTuple

import msgspec

from whyspan.config import Config


class Effect(Enum):
    """What happens when a key has changed; the value says it to a reader of the documentation."""

    LIVE = "taken over at once; nothing is detached, no request is lost"
    REBUILD = (
        "the collector detaches its probes and attaches them anew: requests in progress are not explained"
    )
    REOPEN = "the exporter closes this output and opens it anew; nothing is lost"
    RESTART = "taken over at the next start; until then the log says so"
    SERVE = "read by `whyspan serve` when it starts"


_OF_SECTION: Final = {
    "targets": Effect.LIVE,
    "slo": Effect.LIVE,
    "collector": Effect.LIVE,
    "feeds": Effect.LIVE,
    "burst": Effect.LIVE,
    "store": Effect.REOPEN,
    "otlp": Effect.REOPEN,
    "prometheus": Effect.REOPEN,
    "page": Effect.SERVE,
    "run": Effect.RESTART,
}
#: Keys that are another matter than their section: rings, objects and recordings are made once.
_OF_KEY: Final = dict.fromkeys(
    (
        "collector.ring_bytes",
        "collector.record",
        "collector.disable_probes",
        "collector.btf",
        "collector.known_frames",
    ),
    Effect.REBUILD,
)


class Changes(NamedTuple):
    """The keys that differ, by what is to be done about them."""

    live: list[str]
    rebuild: list[str]
    reopen: list[str]
    restart: list[str]

    def __str__(self) -> str:
        keys = [*self.live, *self.rebuild, *self.reopen, *self.restart]
        return ", ".join(keys) if keys else "nothing"


def effect(key: str) -> Effect:
    """Return what a reload does with a key such as ``slo.ttft_ms``."""
    return _OF_KEY.get(key) or _OF_SECTION[key.partition(".")[0]]


def changes(old: Config, new: Config) -> Changes:
    """Compare two configurations; values are compared whole, one by one below a section."""
    before, after = msgspec.to_builtins(old), msgspec.to_builtins(new)
    found: dict[Effect, list[str]] = {e: [] for e in Effect}
    for section, keys in after.items():
        values: dict[str, Any] = keys
        for key, value in values.items():
            if before[section][key] != value:
                name = f"{section}.{key}"
                found[effect(name)].append(name)
    return Changes(found[Effect.LIVE], found[Effect.REBUILD], found[Effect.REOPEN], found[Effect.RESTART])
