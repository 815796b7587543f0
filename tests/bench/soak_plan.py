"""What happens to the agent during a soak, and when: drawn from a seed. Pure."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

#: Small enough that the bound is reached; an outage fits into the spool.
STORE_MB, SPOOL_MB = 24, 64
#: Of the whole time: early, so that most of it shows processes that nobody has touched.
EXPORTER_KILLED, COLLECTOR_KILLED = 0.1, 0.14
RELOAD_EVERY_S = 180.0
RELOADS = ("live", "broken", "rebuild", "reopen")
OUTAGE_EVERY_S = 720.0
OUTAGE_S = (60.0, 180.0)
FAULT_S, REST_S = (8.0, 18.0), (10.0, 30.0)

#: Faults of `tests.faults.host` for the asyncio server as it is. Left out: those that need a server of their own
#: (`Launch`), and those that take the host's disk or swap from others on it.
FAULTS = (
    *(
        "client_queue",
        "compiler",
        "cpu_hog",
        "fd_exhausted",
        "fsync_log",
        "gc_pause",
        "gil_convoy",
        "gil_hog",
    ),
    *("log_pipe", "loop_burst", "mmap_lock", "oversubscribed", "pool_connections", "quota", "retry_storm"),
    *("scrape", "slow_upload", "stopped", "tracer", "user_lock"),
)


class Happening(NamedTuple):
    """Something done at *at_s* after the begin: ``outage``, ``kill``, ``reload``."""

    at_s: float
    what: str
    details: dict[str, Any]


def happenings(seconds: float, seed: int) -> list[Happening]:
    """Return all of them in order. Reloads are of each kind in turn; ``broken``: of a file that is wrong.

    All probes are attached anew only once, early: with that the core begins anew, and a leak of it would not be seen.
    """
    rng = random.Random(f"{seed}/happenings")
    out = [
        Happening(seconds * EXPORTER_KILLED, "kill", {"role": "exporter"}),
        Happening(seconds * COLLECTOR_KILLED, "kill", {"role": "collector"}),
    ]
    outages = max(1, round(seconds / OUTAGE_EVERY_S))
    slot = seconds * 0.8 / outages
    for n in range(outages):
        lasts = min(rng.uniform(*OUTAGE_S), slot * 0.5)
        at = seconds * 0.1 + n * slot + rng.uniform(0.0, slot - lasts)
        out.append(Happening(at, "outage", {"seconds": lasts, "how": ("down", "refuse")[n % 2]}))
    reloads = max(len(RELOADS), int(seconds / RELOAD_EVERY_S))
    others = [kind for kind in RELOADS if kind != "rebuild"]
    kinds = [*RELOADS, *(others[n % len(others)] for n in range(reloads))]
    for n in range(reloads):
        at = seconds * (n + 0.5) / reloads
        out.append(Happening(at, "reload", {"kind": kinds[n]}))
    return sorted(out)


def faults(seed: int) -> list[tuple[str, float, float]]:
    """Return faults with how long each is on and how long nothing is after it, in s: each of them once."""
    rng = random.Random(f"{seed}/faults")
    drawn = rng.sample(FAULTS, len(FAULTS))
    return [(name, rng.uniform(*FAULT_S), rng.uniform(*REST_S)) for name in drawn]
