"""A store that somebody else wrote: whatever is in it is shown, or said to be broken in one line; nothing fails."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from whyspan.cli.explain import report
from whyspan.errors import StoreError
from whyspan.exchange import perfetto
from whyspan.model import Culprit, EngineFacts, Finding, PhaseTime, Ranked, RuledOut, StepTime
from whyspan.views import glance, request, select, shapes
from whyspan_exporters.reader import Reader

from tests.unit import viewlab
from tests.unit.page.conftest import Client

NAN, INF = float("nan"), float("inf")
FAR = (1 << 63) - 1
QUESTIONS = (
    "requests?sort=excess",
    "requests?since=7d&service=chat",
    "facets",
    "tail?since=1h",
    "tail?since=1h&service=chat",
    "host?since=1h",
    "health",
)


@pytest.fixture
def lab(tmp_path: Path) -> viewlab.Written:
    return viewlab.build(tmp_path / "s.db", 20, hours=0.05)


def change(path: Path, *statements: str) -> None:
    with sqlite3.connect(path) as db:
        for statement in statements:
            db.execute(statement)
    db.close()


def backwards(f: Finding) -> None:
    f.segments.reverse()
    f.phases.reverse()


def on_top_of_each_other(f: Finding) -> None:
    f.segments += f.segments
    f.phases += [PhaseTime("all", -FAR, FAR)]


def outside(f: Finding) -> None:
    for s, by in zip(f.segments, (-FAR, FAR, -1), strict=False):
        s.start_ns, s.end_ns = by, -by


def no_time(f: Finding) -> None:
    f.wall_ns = f.accounted_ns = -5
    f.request.first_ns = -FAR


def no_numbers(f: Finding) -> None:
    f.causes = {"cpu.throttled": NAN, "io": INF, "net": -INF}
    f.baseline = {"cpu.throttled": INF, "io": NAN}
    f.verdict.excess_ms, f.verdict.share, f.verdict.confidence = NAN, INF, -INF
    f.verdict.others = [Ranked(cause="io", excess_ms=NAN, share=INF)]
    f.engine = EngineFacts(
        kv_usage=NAN, step_times=[StepTime(0, 1, 1, 1, INF), StepTime(FAR, -FAR, -1, FAR, NAN)]
    )


def very_many(f: Finding) -> None:
    f.phases = [PhaseTime("p", f.request.start_ns, f.request.end_ns)] * 20_000
    f.ruled_out = [RuledOut("cpu.runqueue", "x")] * 20_000 + [RuledOut("zzz", "y")] * 20_000
    f.verdict.others = [Ranked(cause="io", excess_ms=1, share=0, culprit=Culprit(trace_id="a" * 32))] * 20_000


@pytest.mark.parametrize(
    "spoil",
    [backwards, on_top_of_each_other, outside, no_time, no_numbers, very_many],
    ids=lambda f: f.__name__,
)
def test_findings_that_make_no_sense_are_shown(
    client: Client, lab: viewlab.Written, spoil: Callable[[Finding], None]
) -> None:
    f = viewlab.finding(3, random.Random(3))
    spoil(f)
    with sqlite3.connect(lab.path) as db:
        (name,) = db.execute("SELECT id FROM findings LIMIT 1").fetchone()
        db.execute("UPDATE findings SET finding = ? WHERE id = ?", (msgspec.msgpack.encode(f), name))
    db.close()
    answer = client(store=lab.path).get(f"/api/requests/{name}")
    assert answer.status_code == 200, answer.text
    view = msgspec.json.decode(answer.content, type=shapes.RequestView)  # no null where a number belongs
    for lane in view.lanes:
        at = 0
        for piece in lane.spans:
            assert at <= piece.start_ns < piece.end_ns <= view.wall_ns
            at = piece.end_ns
        assert [at for at, _ in lane.points] == sorted(at for at, _ in lane.points)
    visited = [view.lanes[lane].spans[piece].start_ns for lane, piece in view.path]
    assert visited == sorted(visited)
    reader = Reader(lab.path)
    stored = reader.get(name)
    reader.close()
    assert stored is not None
    assert "\n".join(report(stored))
    assert b"".join(perfetto.chunks(request.view(stored), f.request.start_ns, stored.start_unix_ns))


def nested(depth: int = 200_000) -> bytes:
    """Return a finding with a field of the future in it, that is a list in a list in a list."""
    whole = msgspec.msgpack.encode(msgspec.to_builtins(viewlab.finding(1, random.Random(1))))
    assert whole[0] == 0xDE  # a map of 16 to 65,535 entries
    number = int.from_bytes(whole[1:3], "big") + 1
    return whole[:1] + number.to_bytes(2, "big") + whole[3:] + b"\xa3new" + b"\x91" * depth + b"\xc0"


@pytest.mark.parametrize(
    "blob", [b"", b"\xc1", b"\x80", nested(), bytes(40 << 20)], ids=["empty", "junk", "bare", "deep", "long"]
)
def test_blobs_that_are_none_are_said_in_one_line(client: Client, lab: viewlab.Written, blob: bytes) -> None:
    assert select.decode(blob) is None
    with sqlite3.connect(lab.path) as db:
        (name,) = db.execute("SELECT id FROM findings LIMIT 1").fetchone()
        db.execute("UPDATE findings SET finding = ? WHERE id = ?", (blob, name))
    db.close()
    c = client(store=lab.path)
    answer = c.get(f"/api/requests/{name}")
    assert (answer.status_code, answer.json()["error"][:21]) == (503, "cannot read the store")
    assert c.get("/api/requests").status_code == 200


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE requests SET start_unix_ns = start_unix_ns + 0.5",
        "UPDATE requests SET latency_ns = 'long', cause = x'ff'",
        "UPDATE requests SET excess_ms = 9e999, share = -9e999",
        "UPDATE requests SET service = CAST(x'ff' AS TEXT)",
        "UPDATE requests SET cause = id, start_unix_ns = start_unix_ns - id",
        "UPDATE intervals SET requests = 'many', start_unix_ns = start_unix_ns + 0.5",
        "UPDATE intervals SET latency = replace(latency, '0', '-7')",
        f"UPDATE intervals SET latency = replace(latency, '0', '{'9' * 400}')",
        f"UPDATE intervals SET latency = '{'[' * 100_000}'",
        "UPDATE intervals SET latency = x'00', ttft = 5",
        f"UPDATE host_samples SET sample = '{'[' * 100_000}'",
        f"""UPDATE host_samples SET sample = '{{"cpus": {"9" * 400}, "probes": 7, "cpu_s": 1e308, "totals": [1]}}'""",
        """UPDATE host_samples SET sample = '{"probes": [["x", 1, {}], [], 1], "memory": 3, "pressure": {"cpu": 1}}'""",
        f"UPDATE status SET status = '{'[' * 100_000}'",
        f"""UPDATE status SET status = '{{"probes": [{{"events": {"9" * 400}}}], "tgid": NaN, "sinks": 3}}'""",
        "UPDATE status SET status = x'ff', updated_unix_ns = 'now'",
        "UPDATE counters SET value = 'much', label = label || x'ff'",
        "DROP TABLE intervals",
        "ALTER TABLE requests RENAME COLUMN cause TO because",
    ],
)
def test_columns_that_hold_anything(client: Client, lab: viewlab.Written, statement: str) -> None:
    change(lab.path, statement)
    c = client(store=lab.path)
    for path in QUESTIONS:
        answer = c.get(f"/api/{path}")
        assert answer.status_code in (200, 503), (path, answer.text)
        if answer.status_code == 503:
            assert answer.json()["error"].startswith("cannot read the store"), path
    reader = Reader(lab.path)
    try:
        glance.glance(reader, lab.now_unix_ns, 600)
    except StoreError as exc:
        assert "cannot read the store" in str(exc)
    reader.close()
