"""What all threads of a process were doing while one that serves a request stalled. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any, Final

import numpy as np

from whyspan import syscalls
from whyspan.critical_path import Path
from whyspan.facts import Facts
from whyspan.model import Snapshot, ThreadGroup
from whyspan.stacks import MAX_FRAMES, is_cut, places
from whyspan.syscalls import POLL
from whyspan.threads import Timelines

#: Kept with a finding: the first of them.
MAX_SNAPSHOTS: Final = 3
MAX_GROUPS: Final = 24
_MAX_NAMES: Final = 8
_STATES: Final = ("running", "runnable", "blocked")
_BLOCKED: Final = "blocked"


def snapshots(
    timelines: Timelines, path: Path, tgids: Collection[int], serving: Collection[int]
) -> list[Snapshot]:
    """Return those that were taken of these processes during the path. *serving*: the request's threads."""
    rows = timelines.select("thread_state")
    if not len(rows):
        return []
    rows = rows[np.isin(rows["tgid"], sorted(tgids))]
    rows = rows[(rows["ts_ns"] >= path.start_ns) & (rows["ts_ns"] < path.end_ns)]
    found: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for row in rows:
        found[int(row["tgid"]), int(row["snapshot"])].append(row)
    return [_snapshot(part, timelines.facts, serving) for part in list(found.values())[:MAX_SNAPSHOTS]]


def _snapshot(rows: list[Any], facts: Facts, serving: Collection[int]) -> Snapshot:
    groups: dict[tuple[object, ...], ThreadGroup] = {}
    for row in rows:
        group = _thread(row, facts, serving)
        same = (
            *(group.state, group.syscall, group.stalled),
            *(*group.kernel, *group.native, *group.python),
        )
        known = groups.setdefault(same, group)
        if known is not group:
            known.count += 1
            known.for_ms = max(known.for_ms, group.for_ms)
            if len(known.threads) < _MAX_NAMES:
                known.threads += group.threads
    ordered = sorted(groups.values(), key=_order)
    first = rows[0]
    return Snapshot(
        at_ns=int(first["ts_ns"]),
        tgid=int(first["tgid"]),
        process=facts.comm(int(first["tgid"])),
        groups=ordered[:MAX_GROUPS],
        left_out=sum(g.count for g in ordered[MAX_GROUPS:]),
    )


def _order(group: ThreadGroup) -> tuple[bool, int, float]:
    return not group.stalled, _STATES.index(group.state), -group.for_ms


def _thread(row: Any, facts: Facts, serving: Collection[int]) -> ThreadGroup:
    tid, tgid = int(row["tid"]), int(row["tgid"])
    state = _STATES[min(int(row["state"]), len(_STATES) - 1)]
    nr = int(row["syscall_nr"])
    fact = facts.stack(int(row["stack"]))
    since = int(row["since_ns"])
    return ThreadGroup(
        state=state,
        threads=[facts.thread_name(tid, tgid) or f"thread {tid}"],
        syscall=syscalls.name(nr) if state == _BLOCKED else "",
        for_ms=(int(row["ts_ns"]) - since) / 1e6 if since else 0.0,
        stalled=tid in serving and not (state == _BLOCKED and nr in POLL),
        python=fact.python[:MAX_FRAMES] if fact is not None else [],
        native=places(fact) if fact is not None else [],
        kernel=fact.kernel[:MAX_FRAMES] if fact is not None else [],
        cut=is_cut(fact, int(row["aux"])) if fact is not None else False,
    )
