"""``python -m tests.faults.host.cut REC OUT --from NS --to NS``: a small recording out of a long one.

What replay needs from before is kept: facts, a margin of events in which threads show their states, and what is usual.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from whyspan.model import Batch, CgroupFact, Fact, FdFact, ProcessFact, ThreadFact
from whyspan.recording import Reader, Writer

#: Events kept from before the first request: threads that sleep show up when they wake.
MARGIN_NS = 500_000_000
ROOT = Path(__file__).resolve().parents[3]
PLACE = b"/srv/whyspan"


def _key(fact: Fact) -> tuple[Any, ...]:
    if isinstance(fact, ProcessFact):
        return ("process", fact.tgid)
    if isinstance(fact, ThreadFact):
        return ("thread", fact.tid)
    if isinstance(fact, CgroupFact):
        return ("cgroup", fact.path)
    if isinstance(fact, FdFact):
        return ("fd", fact.tgid, fact.fd, fact.inode)
    return (type(fact).__name__, repr(fact))


def _elsewhere(fact: Fact) -> Fact:
    """Return the fact as if the checkout were at PLACE: where it is on a developer's machine is nobody's business."""
    told = msgspec.json.encode(fact)
    here = str(ROOT).encode()
    return msgspec.json.decode(told.replace(here, PLACE), type=type(fact)) if here in told else fact


def cut(source: Path, target: Path, from_ns: int, to_ns: int, baseline: dict[str, Any] | None = None) -> int:
    """Write the part of a recording that a window needs; return the number of its events.

    Args:
        source: The long recording.
        target: The file to write.
        from_ns: Begin of the window, CLOCK_MONOTONIC.
        to_ns: End of it.
        baseline: What is usual, as the agent saved it; else what the recording began with.
    """
    reader = Reader(source)
    if baseline is not None:
        reader.header.baseline = baseline
    reader.header.settings.get("collector", {}).pop("record", None)
    writer = Writer(target, reader.header, reader.schema)
    facts: dict[tuple[Any, ...], Fact] = {}
    first, events = True, 0
    try:
        for batch in reader.batches():
            kept = batch.events[
                (batch.events["ts_ns"] >= max(from_ns - MARGIN_NS, 0)) & (batch.events["ts_ns"] <= to_ns)
            ]
            if not len(kept):
                facts.update((_key(f), _elsewhere(f)) for f in batch.facts)
                if batch.now_ns > to_ns:
                    break
                continue
            told = [_elsewhere(f) for f in batch.facts]
            if first:
                told = [*facts.values(), *told]
                first = False
            heads = [h for h in batch.heads if h.first_ns >= from_ns - MARGIN_NS and h.ts_ns <= to_ns]
            marks = [m for m in batch.marks if from_ns - MARGIN_NS <= m.ts_ns <= to_ns]
            writer.add(Batch(batch.now_ns, np.ascontiguousarray(kept), heads, told, batch.lost, marks))
            events += len(kept)
    finally:
        writer.close()
        reader.close()
    return events


def main() -> None:
    """Cut one."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.host.cut", description=__doc__)
    parser.add_argument("recording", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--from", dest="from_ns", type=int, required=True, metavar="NS")
    parser.add_argument("--to", dest="to_ns", type=int, required=True, metavar="NS")
    parser.add_argument("--baseline", type=Path, help="the agent's baseline.json")
    args = parser.parse_args()
    baseline = json.loads(args.baseline.read_text()) if args.baseline else None
    print(f"{cut(args.recording, args.out, args.from_ns, args.to_ns, baseline)} events")


if __name__ == "__main__":
    main()
