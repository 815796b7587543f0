"""Which cases a run has."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.faults.host.case import Case
from tests.faults.host.decoys import DECOYS
from tests.faults.host.fault import Fault

AUTO, NONE = "auto", "none"


@dataclass(frozen=True)
class Chosen:
    """What the caller chose. ``servers``: none for all. ``decoy``: AUTO, NONE or a name. ``quick``: each fault once."""

    servers: Sequence[str] = ()
    decoy: str = AUTO
    quick: bool = False
    seed: int = 5


def cases_of(faults: Sequence[Fault], chosen: Chosen) -> list[Case]:
    """Return each fault in each server, without a decoy and with one that the seed draws."""
    out = []
    for fault in faults:
        servers = [s for s in fault.servers if not chosen.servers or s in chosen.servers]
        rng = random.Random(f"{chosen.seed}/decoy/{fault.id}")
        for server in servers[:1] if chosen.quick else servers:
            possible = sorted(set(DECOYS) - set(fault.decoys))
            drawn = rng.choice(possible) if possible else ""
            if chosen.decoy == AUTO:
                decoys = [drawn] if chosen.quick else list(dict.fromkeys(["", drawn]))
            else:
                decoys = ["" if chosen.decoy == NONE else chosen.decoy]
            out += [Case(server, fault, decoy) for decoy in decoys]
    return out
