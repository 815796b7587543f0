"""The Perfetto file against the public format: read with Perfetto's own protos, and checked as an importer would."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb
from whyspan import cli
from whyspan.exchange import perfetto
from whyspan.views.shapes import (
    CauseBar,
    CodeView,
    CulpritView,
    Lane,
    Piece,
    RequestFacts,
    RequestView,
    Row,
    VerdictView,
)

from tests.unit.viewlab import build

START_NS, START_UNIX_NS = 987_654_321_000, 1_767_323_045_678_000_123
MS = 1_000_000
EVIL = "\x1b]0;owned\x07<script>\u202e\ud800" + "x" * 10_000


def view(lanes: list[Lane], path: list[tuple[int, int]], wall_ns: int = 100 * MS, text: str = "chat") -> Any:
    row = Row(
        id="i-c1-1",
        trace_id="00" * 16,
        service=text,
        method="POST",
        route=text,
        model="m",
        tenant="",
        start_unix_ms=START_UNIX_NS / 1e6,
        latency_ms=wall_ns / 1e6,
        ttft_ms=40.0,
        status=200,
        outcome="ok",
        slow=True,
        failed=False,
        cause="cpu.throttled",
        excess_ms=33.0,
        share=0.9,
        confidence=0.8,
        culprit_kind="cgroup",
        culprit=text,
        phase="ttft",
    )
    verdict = VerdictView(
        sentence=text,
        cause="cpu.throttled",
        excess_ms=33.0,
        share=0.9,
        confidence=0.8,
        culprit=CulpritView(kind="cgroup", name=text, tgid=7, tid=0, detail="quota", trace_id=""),
        evidence=["2 throttled periods", text],
        fix="Raise the quota.",
        others=[],
        code="",
    )
    facts = RequestFacts(
        request_id="",
        trace_id_source="generated",
        ended_by="",
        slow_reason="objective",
        head="whole",
        chunks=7,
        request_bytes=1,
        response_bytes=700,
        client_port=1,
        server_port=2,
        agent="",
        attempt=0,
        client_wait_ns=0,
    )
    return RequestView(
        row=row,
        request=facts,
        wall_ns=wall_ns,
        accounted_ns=wall_ns,
        lost_events=0,
        first_ns=40 * MS,
        lanes=lanes,
        path=path,
        causes=[CauseBar(cause="cpu.throttled", ms=33.0, usual_ms=0.0, excess_ms=33.0)],
        baseline_count=50,
        verdict=verdict,
        ruled_out=[],
        process=None,
        engine=None,
        code=CodeView(trees=[], left_out=0, snapshots=[], sampled=None),
        links=[],
    )


def three_lanes(text: str = "main") -> Any:
    loop = [
        Piece(0, 30 * MS, "running", "work.cpu", "", False),
        Piece(60 * MS, 100 * MS, "blocked", "work.timer", text, False),
    ]
    worker = [
        Piece(30 * MS, 40 * MS, "wakeup", "cpu.runqueue", "", True),
        Piece(40 * MS, 60 * MS, "throttled", "cpu.throttled", "quota 20 ms of 100 ms", False),
    ]
    lanes = [
        Lane(
            key="phases",
            kind="phase",
            label="phases",
            spans=[Piece(0, 100 * MS, "decode", "", "", False)],
        ),
        Lane(key="tid:100", kind="thread", label=text, tgid=100, tid=100, spans=loop),
        Lane(key="tid:101", kind="thread", label="worker", tgid=100, tid=101, spans=worker),
        Lane(key="tid:0", kind="thread", label="unknown", spans=[]),
        Lane(
            key="kv",
            kind="counter",
            label="KV pool in use",
            unit="ratio",
            points=[(0, 0.5), (50 * MS, 0.75), (60 * MS, float("nan"))],
        ),
    ]
    return view(lanes, [(1, 0), (2, 0), (2, 1), (1, 1)], text=text)


def encode(request: Any) -> bytes:
    return b"".join(perfetto.chunks(request, START_NS, START_UNIX_NS))


class Imported:
    """A trace as an importer sees it. Reading it checks what the format demands."""

    def __init__(self, data: bytes) -> None:
        trace = pb.Trace.FromString(data)
        self.tracks: dict[int, Any] = {}
        self.slices: list[tuple[int, int, int, str, dict[str, Any]]] = []  # track, begin, end, name, facts
        self.counters: list[tuple[int, int, float]] = []
        self.instants: list[tuple[int, int, str]] = []
        self.leaves: dict[int, tuple[int, int]] = {}  # flow: track, time
        self.arrives: dict[int, tuple[int, int]] = {}
        self.clocks: dict[int, int] = {}
        self._names: dict[str, dict[int, str]] = {}
        self._open: dict[int, list[tuple[int, str, dict[str, Any]]]] = {}
        self._last: dict[int, int] = {}
        self._clock = 0
        cleared = False
        for packet in trace.packet:
            assert packet.trusted_packet_sequence_id == 1
            assert packet.ByteSize() < 1 << 16
            if packet.sequence_flags & pb.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED:
                assert not cleared
                cleared = True
            elif packet.sequence_flags & pb.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE:
                assert cleared
            self._read(packet)
        assert not any(self._open.values())
        for uuid, track in self.tracks.items():
            seen, parent = {uuid}, track.parent_uuid
            while parent:
                assert parent not in seen, "a cycle"
                seen.add(parent)
                parent = self.tracks[parent].parent_uuid
        assert self.leaves.keys() == self.arrives.keys()

    def _read(self, packet: Any) -> None:
        if packet.HasField("trace_packet_defaults"):
            self._clock = packet.trace_packet_defaults.timestamp_clock_id
        if packet.HasField("clock_snapshot"):
            assert packet.clock_snapshot.primary_trace_clock == pb.BUILTIN_CLOCK_MONOTONIC
            self.clocks = {c.clock_id: c.timestamp for c in packet.clock_snapshot.clocks}
        for field, entries in packet.interned_data.ListFields():
            for entry in entries:
                known = self._names.setdefault(field.name, {})
                assert entry.iid > 0
                assert entry.iid not in known
                known[entry.iid] = entry.str.decode() if hasattr(entry, "str") else entry.name
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            assert track.uuid not in self.tracks, "described twice"
            assert track.uuid > 0
            self.tracks[track.uuid] = track
        if packet.HasField("track_event"):
            assert self._clock in self.clocks, "a time of no known clock"
            self._event(packet.track_event, packet.timestamp)

    def _event(self, event: Any, at: int) -> None:
        uuid = event.track_uuid
        track = self.tracks[uuid]
        assert at >= self._last.get(uuid, 0), "backwards"
        self._last[uuid] = at
        kinds = pb.TrackEvent
        assert (event.type == kinds.TYPE_COUNTER) == track.HasField("counter")
        name = self._names["event_names"][event.name_iid] if event.name_iid else ""
        for iid in event.category_iids:
            assert self._names["event_categories"][iid]
        if event.type == kinds.TYPE_SLICE_BEGIN:
            self._open.setdefault(uuid, []).append((at, name, self._facts(event)))
            for flow in event.flow_ids:
                assert flow not in self.leaves
                self.leaves[flow] = (uuid, at)
            for flow in event.terminating_flow_ids:
                assert flow not in self.arrives
                self.arrives[flow] = (uuid, at)
        elif event.type == kinds.TYPE_SLICE_END:
            begin, name, facts = self._open[uuid].pop()
            self.slices.append((uuid, begin, at, name, facts))
        elif event.type == kinds.TYPE_COUNTER:
            self.counters.append((uuid, at, event.double_counter_value))
        else:
            assert event.type == kinds.TYPE_INSTANT
            self.instants.append((uuid, at, name))

    def _facts(self, event: Any) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for note in event.debug_annotations:
            kind = note.WhichOneof("value")
            value = getattr(note, kind)
            if kind == "string_value_iid":
                value = self._names["debug_annotation_string_values"][value]
            out[self._names["debug_annotation_names"][note.name_iid]] = value
        return out

    def named(self, name: str) -> int:
        """Return the track of a name."""
        (uuid,) = (
            u
            for u, t in self.tracks.items()
            if name in (t.name, t.thread.thread_name, t.process.process_name)
        )
        return uuid


def test_tracks_slices_and_counters() -> None:
    trace = Imported(encode(three_lanes()))
    assert trace.clocks == {
        pb.BUILTIN_CLOCK_MONOTONIC: START_NS,
        pb.BUILTIN_CLOCK_REALTIME: START_UNIX_NS,
    }
    threads = {t.thread.tid: t for t in trace.tracks.values() if t.HasField("thread")}
    assert threads.keys() == {100, 101}  # number 0 is nobody's
    assert {trace.tracks[t.parent_uuid].process.pid for t in threads.values()} == {100}
    on_worker = [s for s in trace.slices if s[0] == trace.named("worker")]
    assert [(b - START_NS, e - START_NS, n) for _, b, e, n, _ in on_worker] == [
        (30 * MS, 40 * MS, "cpu.runqueue (inferred)"),
        (40 * MS, 60 * MS, "cpu.throttled"),
    ]
    assert [s[4].get("inferred", False) for s in on_worker] == [True, False]
    assert on_worker[1][4]["detail"] == "quota 20 ms of 100 ms"
    assert [s[3] for s in trace.slices if s[0] == trace.named("phases")] == ["decode"]
    kv = trace.named("KV pool in use")
    assert trace.counters == [(kv, START_NS, 0.5), (kv, START_NS + 50 * MS, 0.75)]
    assert trace.tracks[kv].counter.unit_name == "ratio"
    (request,) = [s for s in trace.slices if s[3].startswith("cpu.throttled: 100.0 ms")]
    assert request[2] - request[1] == 100 * MS
    assert request[4]["culprit"] == "cgroup main (process 7): quota"
    assert request[4]["excess_ms"] == 33.0
    assert [(at - START_NS, name) for _, at, name in trace.instants] == [(40 * MS, "first byte")]


def test_the_critical_path_is_a_track_and_its_handovers_are_flows() -> None:
    trace = Imported(encode(three_lanes()))
    path = sorted(s[1:4] for s in trace.slices if s[0] == trace.named("critical path"))
    assert path[0][0] == START_NS
    assert path[-1][1] == START_NS + 100 * MS
    assert all(a[1] == b[0] for a, b in pairwise(path))
    loop, worker = trace.named("main"), trace.named("worker")
    ends = [(trace.leaves[n], trace.arrives[n]) for n in sorted(trace.leaves)]
    assert ends == [
        ((loop, START_NS), (worker, START_NS + 30 * MS)),
        ((worker, START_NS + 40 * MS), (loop, START_NS + 60 * MS)),
    ]


def test_hostile_names_are_short_and_valid() -> None:
    data = encode(three_lanes(EVIL))
    Imported(data)
    assert b"\x1b]" not in data
    assert "\u202e".encode() not in data
    assert b"\\x1b]0;owned" in data
    assert len(data) < 20_000


def test_numbers_out_of_bounds_make_a_valid_file() -> None:
    lane = Lane(key="x", kind="thread", label="x", tgid=1 << 40, tid=-3)
    lane.spans = [Piece(-(1 << 70), 5, "running", "work.cpu", "", False)]
    Imported(encode(view([lane], [(0, 0)], wall_ns=1 << 70)))


def test_a_request_of_nothing() -> None:
    trace = Imported(encode(view([], [], wall_ns=0)))
    assert len(trace.slices) == 1


def test_long_requests_come_in_pieces_and_intern_their_names() -> None:
    spans = [Piece(i * 1000, (i + 1) * 1000, "running", "work.cpu", "", False) for i in range(5003)]
    lanes = [
        Lane(key=f"tid:{t}", kind="thread", label=f"t{t}", tgid=9, tid=t, spans=spans[t - 1 :: 2])
        for t in (1, 2)
    ]
    path = [(i % 2, i // 2) for i in range(5003)]
    parts = list(perfetto.chunks(view(lanes, path, wall_ns=5003 * 1000), START_NS, START_UNIX_NS))
    assert len(parts) > 5
    trace = Imported(b"".join(parts))
    assert len(trace.leaves) == 5002
    counts = Counter(s[0] for s in trace.slices)
    assert counts[trace.named("critical path")] == 5003
    assert sum(map(len, parts)) < 5003 * 4 * 50


def test_the_command_writes_what_the_store_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of 3,000 segments over many threads, and names that mean harm."""
    monkeypatch.setenv("WHYSPAN_CONFIG", "")
    made = build(tmp_path / "s.db", 20, hours=0.05, big_segments=3000, evil=True)
    out = tmp_path / "out.pftrace"

    def explain(name: str) -> Imported:
        with pytest.raises(SystemExit) as caught:
            cli.main(["explain", name, "--store", str(made.path), "--perfetto", str(out)])
        assert caught.value.code == 0
        assert capsys.readouterr().out == f"wrote {out}\n"
        return Imported(out.read_bytes())

    big = explain(made.big)
    path = [s for s in big.slices if s[0] == big.named("critical path")]
    assert len(path) == 3000
    assert all(a[2] == b[1] for a, b in pairwise(path))  # it tiles the request
    threads = {t.thread.tid for t in big.tracks.values() if t.HasField("thread")}
    assert len(threads) == 40
    assert {s[3] for s in big.slices if s[0] == big.named("phases")} == {
        "frontend",
        "queue",
        "prefill",
        "decode",
    }
    counters = {big.tracks[uuid].name: big.tracks[uuid].counter for uuid, _, _ in big.counters}
    assert counters["KV pool in use"].unit_name == "ratio"
    assert counters["sequences in the step"].unit == pb.CounterDescriptor.UNIT_COUNT
    assert len(big.leaves) > 1000
    for name in made.hostile:
        explain(name)
    with pytest.raises(SystemExit):
        cli.main(["explain", made.big, "--store", str(made.path), "--perfetto", str(tmp_path / "no" / "x")])
    assert capsys.readouterr().err == f"whyspan: cannot write {tmp_path}/no/x: No such file or directory\n"


@pytest.mark.skipif(
    not (os.environ.get("WHYSPAN_TRACE_PROCESSOR") or shutil.which("trace_processor_shell")),
    reason="no trace_processor_shell (its file may be named by WHYSPAN_TRACE_PROCESSOR)",
)
def test_the_trace_processor_opens_it(tmp_path: Any) -> None:
    from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig

    shell = os.environ.get("WHYSPAN_TRACE_PROCESSOR") or shutil.which("trace_processor_shell")
    path = tmp_path / "x.pftrace"
    path.write_bytes(encode(three_lanes()))
    with TraceProcessor(trace=str(path), config=TraceProcessorConfig(bin_path=shell)) as processor:
        assert processor.query("SELECT count(*) n FROM slice").as_pandas_dataframe()["n"][0] == 10
        errors = "SELECT sum(value) n FROM stats WHERE severity = 'error'"
        assert processor.query(errors).as_pandas_dataframe()["n"][0] == 0
