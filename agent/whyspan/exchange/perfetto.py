"""A request as a Perfetto trace: its lanes as tracks, hand-overs of the critical path as flows, counters.

Times are CLOCK_MONOTONIC, as in the kernel's own traces: a trace that Perfetto recorded on the same host meanwhile lies
beside it. Source of the format: Perfetto's ``protos/perfetto/trace/track_event/*.proto``, as its package has them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, Final

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from whyspan.exchange import _packets
from whyspan.text import clean
from whyspan.views.shapes import CulpritView, Lane, Piece, RequestView

_REQUEST: Final = 1  # uuids of tracks; lanes are counted from _LANES on, processes from _PROCESSES on
_PATH: Final = 2
_LANES: Final = 16
_PROCESSES: Final = 1 << 32
_MAX_PID: Final = (1 << 31) - 1
_UNITS: Final = {"count": pb.CounterDescriptor.UNIT_COUNT, "bytes": pb.CounterDescriptor.UNIT_SIZE_BYTES}
_NAME: Final = 80


def chunks(view: RequestView, start_ns: int, start_unix_ns: int) -> Iterator[bytes]:
    """Yield the trace in pieces: written one after another they are the file.

    Args:
        view: The request.
        start_ns: When it began, CLOCK_MONOTONIC.
        start_unix_ns: The same moment, ns since the epoch.
    """
    out = _packets.Packets(start_ns, start_unix_ns)
    yield from out.take(_tracks(out, view))
    yield from out.take(_request(out, view))
    leaves, arrives = _handovers(view)
    for lane_index, lane in enumerate(view.lanes):
        if lane.points:
            yield from out.take(_counter(out, lane, _LANES + lane_index))
        for index, piece in enumerate(lane.spans):
            key = lane_index, index
            flows = leaves.get(key, ()), arrives.get(key, ())
            yield from out.take(_piece(out, lane, piece, _LANES + lane_index, flows=flows))
    for lane_index, index in view.path:
        lane = view.lanes[lane_index]
        yield from out.take(_piece(out, lane, lane.spans[index], _PATH, thread=lane.label))
    yield out.rest()


def _tracks(out: _packets.Packets, view: RequestView) -> Iterator[Any]:
    row = view.row
    name = f"{clean(row.method, 10)} {clean(row.route, _NAME)} {clean(row.trace_id, 32)}".strip()
    yield out.track(_REQUEST, name, child_ordering=pb.TrackDescriptor.EXPLICIT)
    yield out.track(_PATH, "critical path", parent_uuid=_REQUEST, sibling_order_rank=0)
    processes: dict[int, int] = {}
    for rank, lane in enumerate(view.lanes, 1):
        uuid = _LANES + rank - 1
        label = clean(lane.label or lane.key, _NAME)
        if lane.kind == "thread" and 0 < lane.tid <= _MAX_PID and 0 < lane.tgid <= _MAX_PID:
            if lane.tgid not in processes:
                processes[lane.tgid] = _PROCESSES + lane.tgid
                known = view.process is not None and view.process.tgid == lane.tgid
                comm = clean(view.process.comm, _NAME) if known and view.process is not None else ""
                packet = out.track(processes[lane.tgid], "")
                packet.track_descriptor.process.pid = lane.tgid
                packet.track_descriptor.process.process_name = comm
                yield packet
            packet = out.track(uuid, "", parent_uuid=processes[lane.tgid])
            thread = packet.track_descriptor.thread
            thread.pid, thread.tid, thread.thread_name = lane.tgid, lane.tid, label
            yield packet
            continue
        packet = out.track(uuid, label, parent_uuid=_REQUEST, sibling_order_rank=rank)
        if lane.kind == "counter":
            counter = packet.track_descriptor.counter
            if lane.unit in _UNITS:
                counter.unit = _UNITS[lane.unit]
            else:
                counter.unit_name = clean(lane.unit, 20)
        yield packet


def _request(out: _packets.Packets, view: RequestView) -> Iterator[Any]:
    """The request as a slice with the verdict, and the moment of its first byte."""
    row, verdict = view.row, view.verdict
    facts: dict[str, str | int | float | bool] = {
        "trace_id": row.trace_id,
        "service": row.service,
        "model": row.model,
        "status": row.status,
        "outcome": row.outcome,
        "latency_ms": row.latency_ms,
        "slow": row.slow,
        "lost_events": view.lost_events,
    }
    if verdict.cause:
        facts |= {
            "sentence": verdict.sentence,
            "cause": verdict.cause,
            "excess_ms": verdict.excess_ms,
            "share": verdict.share,
            "confidence": verdict.confidence,
            "culprit": _culprit(verdict.culprit),
            "fix": verdict.fix,
        }
        facts |= {f"evidence {i}": text for i, text in enumerate(verdict.evidence, 1)}
    name = verdict.cause or "request"
    yield out.begin(_REQUEST, 0, "request", f"{name}: {row.latency_ms:.1f} ms", facts)
    if view.first_ns is not None and 0 <= view.first_ns <= view.wall_ns:
        yield out.instant(_REQUEST, view.first_ns, "request", "first byte")
    yield out.end(_REQUEST, view.wall_ns)


def _culprit(culprit: CulpritView) -> str:
    name = f"{culprit.kind} {culprit.name}".strip()
    ids = [f"process {culprit.tgid}"] * bool(culprit.tgid) + [f"thread {culprit.tid}"] * bool(culprit.tid)
    ids += [f"trace {culprit.trace_id}"] * bool(culprit.trace_id)
    text = name + (f" ({', '.join(ids)})" if ids else "")
    return text + (f": {culprit.detail}" if culprit.detail else "")


def _handovers(
    view: RequestView,
) -> tuple[dict[tuple[int, int], list[int]], dict[tuple[int, int], list[int]]]:
    """Return the numbers of the flows that leave a piece, and of those that arrive at one."""
    leaves: dict[tuple[int, int], list[int]] = {}
    arrives: dict[tuple[int, int], list[int]] = {}
    for number, (before, after) in enumerate(zip(view.path, view.path[1:], strict=False), 1):
        if before[0] != after[0]:
            leaves.setdefault(before, []).append(number)
            arrives.setdefault(after, []).append(number)
    return leaves, arrives


def _piece(
    out: _packets.Packets,
    lane: Lane,
    piece: Piece,
    track: int,
    *,
    thread: str = "",
    flows: tuple[Iterable[int], Iterable[int]] = ((), ()),
) -> Iterator[Any]:
    # What a thread did is told by its cause; a phase or a step by its own name.
    name = (piece.cause or piece.state) if lane.kind == "thread" else (piece.state or piece.cause)
    family = piece.cause.partition(".")[0] or lane.kind
    facts: dict[str, str | int | float | bool] = {"state": piece.state, "cause": piece.cause}
    facts |= {"detail": piece.detail, "thread": thread}
    if piece.inferred:
        facts["inferred"] = True
        name += " (inferred)"
    leaving, arriving = flows
    yield out.begin(
        track, piece.start_ns, family, name, facts, flow_ids=leaving, terminating_flow_ids=arriving
    )
    yield out.end(track, max(piece.end_ns, piece.start_ns))


def _counter(out: _packets.Packets, lane: Lane, track: int) -> Iterator[Any]:
    for at_ns, value in lane.points:
        if math.isfinite(value):
            yield out.counter(track, at_ns, value)
