"""Recordings: what goes in comes out, replay agrees with live, and damage costs only what follows it."""

from __future__ import annotations

import os
import resource
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from whyspan.baseline import Baseline
from whyspan.config import Collector, Config, Slo
from whyspan.engine import Engine
from whyspan.errors import RecordingError
from whyspan.model import Batch, CgroupFact, FdFact, Finding, ProcessFact, ThreadFact
from whyspan.pipeline.collector import header_of
from whyspan.pipeline.replay import replay
from whyspan.pipeline.settings import engine_settings
from whyspan.recording import MAGIC, VERSION, Header, Reader, Writer
from whyspan_probes.schema import EVENT, Schema

from tests.unit.timeline import SERVER, ns
from tests.unit.wire import SCHEMA, Wire, head

CONFIG = Config(slo=Slo(e2e_ms=100), collector=Collector(ordinary_per_s=10))
_BLOCK = struct.Struct("<BII")

Damage = Callable[[bytes], bytes]


def write(path: Path, batches: list[Batch], baseline: Baseline | None = None) -> Path:
    writer = Writer(path, header_of(CONFIG, "i", baseline or Baseline()), SCHEMA)
    for batch in batches:
        writer.add(batch)
    writer.close()
    assert writer.bytes == path.stat().st_size
    return path


def small() -> list[Batch]:
    """Three batches with a slow request that ends in the second."""
    batches = Wire().hindered(10, 200).batches(150, 250, 500)
    batches[1].lost = {"sched_wake": 2}
    return batches


def blocks(data: bytes) -> list[int]:
    """Return where each block begins, and the end."""
    at = [len(MAGIC) + 2]
    while at[-1] < len(data):
        at.append(at[-1] + _BLOCK.size + _BLOCK.unpack_from(data, at[-1])[1])
    return at


def same(a: Batch, b: Batch) -> bool:
    return (
        (a.now_ns, a.heads, a.facts, a.lost) == (b.now_ns, b.heads, b.facts, b.lost)
        and a.events.dtype == b.events.dtype
        and a.events.tobytes() == b.events.tobytes()
    )


def live(batches: list[Batch], baseline: Baseline | None = None) -> list[Finding]:
    engine = Engine(SCHEMA, engine_settings(CONFIG.slo, CONFIG.collector, "i"), baseline)
    found = [f for b in batches for f in engine.feed(b)]
    return found + engine.flush(batches[-1].now_ns)


def test_batches_come_back_as_they_were(tmp_path: Path) -> None:
    batches = small()
    batches[0].heads.append(head(1, headers={"x-request-id": "é\\x1b"}, malformed=True, cookie=2**64 - 1))
    batches[0].facts += [
        ProcessFact(SERVER, "a", "b", "c", "/d", 1, 2, 3),
        ThreadFact(1, 2, "t"),
        CgroupFact("/x", 20000, 100000),
        FdFact(1, 2, 2**63, "file", "/tmp/x", 3, "peer"),
    ]
    reader = Reader(write(tmp_path / "r", batches))
    back = list(reader.batches())
    reader.close()
    assert (len(back), reader.torn) == (3, "")
    assert all(same(a, b) for a, b in zip(batches, back, strict=True))


def test_the_header_says_what_replay_needs(tmp_path: Path) -> None:
    reader = Reader(write(tmp_path / "r", []))
    assert reader.header.instance == "i"
    assert reader.header.unix_offset_ns > 0
    assert reader.header.settings["slo"]["e2e_ms"] == 100
    assert reader.schema.types == SCHEMA.types
    assert list(reader.batches()) == []
    reader.close()


def test_events_of_a_strided_view_are_written_right(tmp_path: Path) -> None:
    # The rings deliver views with eight bytes between the records.
    wide = np.zeros(5, np.dtype([("header", "<u8"), ("event", EVENT)]))
    wide["event"]["ts_ns"] = range(5)
    reader = Reader(write(tmp_path / "r", [Batch(9, wide["event"])]))
    (back,) = reader.batches()
    reader.close()
    assert back.events["ts_ns"].tolist() == [0, 1, 2, 3, 4]


def test_replay_comes_to_the_same_verdicts_as_live(tmp_path: Path) -> None:
    w = Wire()
    for i in range(60):
        w.served(100 + 200 * i, 20, seq=i)
    w.hindered(12_500, 300, seq=60).hindered(13_000, 240, seq=61)
    batches = w.batches(*range(250, 13_300, 250))
    expected = live(batches)
    got = replay(write(tmp_path / "r", batches))
    assert msgspec.json.encode(got.findings) == msgspec.json.encode(expected)
    assert got.findings[-1].verdict.cause == "cpu.runqueue"
    assert (got.batches, got.events, got.torn) == (53, sum(len(b.events) for b in batches), "")


def test_replay_begins_with_the_recorded_baseline(tmp_path: Path) -> None:
    w = Wire()
    for i in range(60):
        w.served(100 + 200 * i, 20, seq=i)
    engine = Engine(SCHEMA, engine_settings(CONFIG.slo, CONFIG.collector, "i"))
    for b in w.batches(*range(250, 12_500, 250)):
        engine.feed(b)
    path = write(tmp_path / "r", small(), engine.baseline)
    (f,) = replay(path).findings
    assert f.baseline_count == 60
    assert msgspec.json.encode([f]) == msgspec.json.encode(live(small(), engine.baseline))


def test_torn_anywhere_what_came_before_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "r", small())
    whole = path.read_bytes()
    starts = blocks(whole)
    assert starts[-1] == len(whole)
    batches = small()
    for size in range(len(whole) - 1, -1, -1):
        os.truncate(path, size)
        if size < starts[1]:
            with pytest.raises(RecordingError, match=r"not a whyspan recording|header is torn"):
                Reader(path)
            continue
        reader = Reader(path)
        back = list(reader.batches())
        reader.close()
        complete = sum(at <= size for at in starts[2:])
        assert len(back) == complete
        assert all(same(a, b) for a, b in zip(batches, back, strict=False))
        # Between two blocks there is nothing that could tell a torn file from one that ends there.
        expected = "" if size in starts else f"cut off at byte {starts[complete + 1]}"
        assert reader.torn == expected


def test_replay_of_a_torn_recording(tmp_path: Path) -> None:
    path = write(tmp_path / "r", small())
    at = blocks(path.read_bytes())
    os.truncate(path, at[-1] - 1)
    got = replay(path)
    assert (got.batches, got.torn) == (2, f"cut off at byte {at[-2]}")
    assert msgspec.json.encode(got.findings) == msgspec.json.encode(live(small()[:2]))
    assert [f.request.outcome for f in got.findings] == ["ok"]


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_flipped_bit_costs_what_follows_and_no_more(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("flip")
    path = write(folder / "r", small())
    whole = path.read_bytes()
    starts = blocks(whole)
    at = data.draw(st.integers(starts[1], len(whole) - 1))
    path.write_bytes(flipped(whole, at))
    reader = Reader(path)
    back = list(reader.batches())
    reader.close()
    hit = sum(s <= at for s in starts[1:]) - 1
    offset = at - starts[1 + hit]
    if offset:  # the first byte is the block's type, which a later version may add to: it is skipped
        assert len(back) == hit
        assert f"at byte {starts[1 + hit]}" in reader.torn
    else:
        assert (len(back), reader.torn) == (2, "")


def test_a_checksum_mismatch_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "r", small())
    whole = path.read_bytes()
    path.write_bytes(flipped(whole, len(whole) - 1))
    got = replay(path)
    assert (got.batches, got.torn) == (2, f"checksum mismatch at byte {blocks(whole)[-2]}")


def test_garbage_for_a_length(tmp_path: Path) -> None:
    path = write(tmp_path / "r", small())
    size = path.stat().st_size
    with path.open("ab") as f:
        f.write(_BLOCK.pack(2, 0xFFFFFFFF, 0) + b"x" * 100)
    got = replay(path)
    assert (got.batches, got.torn) == (3, f"garbage at byte {size}")


def test_a_block_of_an_unknown_type_is_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "r", small())
    whole = path.read_bytes()
    at = blocks(whole)[2]
    path.write_bytes(whole[:at] + _BLOCK.pack(9, 3, zlib.crc32(b"new")) + b"new" + whole[at:])
    assert replay(path).batches == 3


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgspec.msgpack.encode([1, b"x" * 55, [], [], {}])])
def test_a_batch_with_a_checksum_that_cannot_be_read(tmp_path: Path, payload: bytes) -> None:
    path = write(tmp_path / "r", small())
    with path.open("ab") as f:
        f.write(_BLOCK.pack(2, len(payload), zlib.crc32(payload)) + payload)
    got = replay(path)
    assert got.batches == 3
    assert got.torn.startswith("unreadable batch")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a whyspan recording"),
        (MAGIC, "not a whyspan recording"),
        (b"\x7fELF" + b"\0" * 100, "not a whyspan recording"),
        (
            MAGIC + struct.pack("<H", VERSION + 1),
            f"recording version {VERSION + 1}, this whyspan reads version",
        ),
        (MAGIC + struct.pack("<H", VERSION), "the header is torn"),
        (MAGIC + struct.pack("<H", VERSION) + b"\0" * 9, "the header is torn"),
        (
            MAGIC + struct.pack("<H", VERSION) + _BLOCK.pack(1, 2, zlib.crc32(b"hi")) + b"hi",
            "the header cannot be read",
        ),
    ],
)
def test_not_a_recording(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "r"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match=message) as caught:
        replay(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="No such file"):
        Reader(tmp_path / "none")
    with pytest.raises(RecordingError, match="Is a directory"):
        Reader(tmp_path)


def test_a_reader_that_refuses_leaves_no_descriptor_open(tmp_path: Path) -> None:
    path = tmp_path / "r"
    path.write_bytes(b"x" * 100)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(RecordingError):
            Reader(path)
    assert len(os.listdir("/proc/self/fd")) == before


def hostile(path: Path, fields: list[Any]) -> Path:
    header = {"whyspan": "x", "kernel": "x", "unix_offset_ns": 1, "instance": "i"}
    payload = msgspec.msgpack.encode({**header, "types": [["sched_wake", 3, fields]]})
    block = _BLOCK.pack(1, len(payload), zlib.crc32(payload)) + payload
    path.write_bytes(MAGIC + struct.pack("<H", VERSION) + block)
    return path


HEAD_FIELDS = [["ts_ns", "<u8", 0], ["tid", "<u4", 8], ["tgid", "<u4", 12], ["kind", "<u2", 16]]
HEAD_FIELDS += [["cpu", "<u2", 18], ["aux", "<u4", 20]]


def test_a_plain_type_is_accepted(tmp_path: Path) -> None:
    Reader(hostile(tmp_path / "r", [*HEAD_FIELDS, ["x", "|S16", 24]])).close()


@pytest.mark.parametrize(
    "field",
    [
        ["x", "O", 24],
        ["x", "|O", 24],
        ["x", "|O8", 24],
        ["x", "<u8,O", 24],
        ["x", "<M8[s]", 24],
        ["x", "<f8", 24],
        ["x", "<u3", 24],
        ["x", "<u8", 56],
        ["x", "<u8", 52],
        ["x", "<u8", -8],
        ["x", "<u8", 2**40],
        ["x", "<u8", 2**63],
        ["ts_ns", "<u8", 24],
        ["x", "(7,)<u8", 24],
        ["x", "<u8\n", 24],
    ],
)
def test_a_hostile_type_is_refused(tmp_path: Path, field: list[Any]) -> None:
    with pytest.raises(RecordingError, match="the header cannot be read"):
        Reader(hostile(tmp_path / "r", [*HEAD_FIELDS, field]))


@pytest.mark.parametrize("missing", range(6))
def test_a_type_without_the_common_head_is_refused(tmp_path: Path, missing: int) -> None:
    fields = [f for i, f in enumerate(HEAD_FIELDS) if i != missing]
    with pytest.raises(RecordingError, match="the header cannot be read"):
        Reader(hostile(tmp_path / "r", fields))


def test_settings_of_another_whyspan(tmp_path: Path) -> None:
    header = Header(whyspan="9", kernel="9", unix_offset_ns=1, instance="i", settings={"slo": {"ttft": 1}})
    Writer(tmp_path / "r", header, SCHEMA).close()
    with pytest.raises(RecordingError, match="settings of another whyspan"):
        replay(tmp_path / "r")


def test_a_full_disk_is_an_error_and_what_was_written_is_readable(tmp_path: Path) -> None:
    path = tmp_path / "r"
    batches = small()
    writer = Writer(path, header_of(CONFIG, "i", Baseline()), SCHEMA)
    writer.add(batches[0])
    size = path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, hard))  # room for a piece of the next block
    try:
        with pytest.raises(OSError, match="File too large"):
            writer.add(batches[1])
        assert writer.bytes == size
        writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.stat().st_size == size + 100
    got = replay(path)
    assert (got.batches, got.torn) == (1, f"cut off at byte {size}")


def test_a_disk_full_from_the_start() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space left"):
        Writer(Path("/dev/full"), header_of(CONFIG, "i", Baseline()), SCHEMA)
    assert len(os.listdir("/proc/self/fd")) == before


def test_closing_after_a_failed_write_raises_nothing(tmp_path: Path) -> None:
    # The collector closes a recording that failed and goes on without it.
    writer = Writer(tmp_path / "r", header_of(CONFIG, "i", Baseline()), SCHEMA)
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        os.dup2(full, writer._file.fileno())
    finally:
        os.close(full)
    with pytest.raises(OSError, match="No space left"):
        writer.add(small()[0])
    writer.close()


@settings(max_examples=100)
@given(st.binary(max_size=400))
def test_garbage_after_the_start_never_raises_anything_else(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes
) -> None:
    path = tmp_path_factory.mktemp("noise") / "r"
    path.write_bytes(MAGIC + struct.pack("<H", VERSION) + noise)
    with pytest.raises(RecordingError):
        Reader(path)


def test_kinds_of_another_run_are_read_by_name(tmp_path: Path) -> None:
    # Kind numbers differ between runs: the recording's own hold.
    shifted = Schema(t._replace(kind=t.kind + 500) for t in SCHEMA.types.values())
    batches = small()
    for b in batches:
        b.events = b.events.copy()
        b.events["kind"] += 500
    path = tmp_path / "r"
    writer = Writer(path, header_of(CONFIG, "i", Baseline()), shifted)
    for b in batches:
        writer.add(b)
    writer.close()
    (f,) = replay(path).findings
    assert (f.verdict.cause, f.request.end_ns) == ("cpu.runqueue", ns(210))
