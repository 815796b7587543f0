"""Marks: what a process claims of itself is checked before it is believed."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from whyspan import marks as m
from whyspan.marks import KINDS, MAX_BODY, MAX_SPAN_NS, BadMarkError, Mark, Scheduled, decode

NOW = 10_000_000_000_000
KIND = {body.__name__: kind for kind, body in KINDS.items()}


WHERE: dict[str, int] = {"ts_ns": NOW, "tid": 7, "tgid": 6}


def of(name: str, **fields: Any) -> Mark:
    return decode(KIND[name], json.dumps(fields).encode(), **WHERE)


def test_kinds_are_numbered_once_and_for_all() -> None:
    assert {kind: body.__name__ for kind, body in KINDS.items()} == {
        1: "Hello",
        2: "Arrived",
        3: "Tokenised",
        4: "Enqueued",
        5: "Queued",
        6: "Step",
        7: "StepDone",
        8: "Executed",
        9: "Output",
        10: "Aborted",
        11: "Stage",
        12: "SpanOn",
        13: "Generated",
        14: "CacheChanged",
        15: "Layers",
    }


def test_a_step_as_the_plugin_sends_it() -> None:
    body = {"step": 5, "begin_ns": NOW - 900, "end_ns": NOW - 100, "decodes": [1, 2], "kv_free": 9}
    body |= {"others": [[3, 64, 0, 0, 4, 0, False, 0]], "preempted": [[4, 99]], "deferred": [[5, "budget"]]}
    found = of("Step", **body)
    assert (found.ts_ns, found.tid, found.tgid) == (NOW, 7, 6)
    step = found.body
    assert isinstance(step, m.Step)
    assert step.others == [Scheduled(3, 64, new_blocks=4)]
    assert (step.preempted, step.deferred, step.decodes) == ([(4, 99)], [(5, "budget")], [1, 2])
    assert (step.kv_free, step.kv_used, step.more) == (9, 0, False)


def test_unknown_fields_are_ignored_and_no_field_says_of_which_kind_it_is() -> None:
    assert of("Enqueued", request="r", engine_id="e", number=1, from_the_future=[1]).body == m.Enqueued(
        "r", "e", 1
    )


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Enqueued", {"request": "r", "engine_id": "e"}),  # a field is missing
        ("Enqueued", {"request": "r", "engine_id": "e", "number": -1}),
        ("Enqueued", {"request": "r", "engine_id": "e", "number": "1"}),
        ("Enqueued", {"request": "r", "engine_id": "e", "number": 1 << 41}),
        ("Enqueued", {"request": "r" * 129, "engine_id": "e", "number": 1}),
        ("Enqueued", {"request": None, "engine_id": "e", "number": 1}),
        ("Arrived", {"request": "r", "trace_id": "xyz"}),
        ("Arrived", {"request": "r", "trace_id": "AB" * 16}),
        ("Arrived", {"request": "r", "trace_id": "0" * 32 + "\n"}),
        ("Arrived", {"request": "r", "span_id": "0" * 15}),
        ("Queued", {"engine_id": "e", "number": 1, "chain": "not hex"}),
        ("Queued", {"engine_id": "e", "number": 1, "chain": "0" * 2049}),
        ("Step", {"step": 1, "begin_ns": 1, "end_ns": 2, "preempted": [[1, 1]] * 257}),
        ("Step", {"step": 1, "begin_ns": 1, "end_ns": 2, "others": [[1]]}),
        ("Step", {"step": 1, "begin_ns": -1, "end_ns": 2}),
        ("Step", {"step": 1, "begin_ns": 1 << 63, "end_ns": 2}),
        ("Step", {"step": 1.5, "begin_ns": 1, "end_ns": 2}),
        ("Hello", {"engine": "v", "config": {str(i): "" for i in range(65)}}),
        ("Hello", {"engine": "v", "model": {"dtype": 16}}),
    ],
)
def test_what_does_not_pass_is_refused_without_being_quoted(name: str, fields: dict[str, Any]) -> None:
    with pytest.raises(BadMarkError) as e:
        of(name, **fields)
    assert str(e.value) == f"{name}: does not pass"


@pytest.mark.parametrize(
    "payload", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"engine":"\xff"}', b"[" * 5000]
)
def test_what_is_no_object_is_refused(payload: bytes) -> None:
    with pytest.raises(BadMarkError, match=r"^Hello: does not pass\Z"):
        decode(1, payload, ts_ns=NOW, tid=1, tgid=1)


@pytest.mark.parametrize("kind", [0, 16, 99, -1, 1 << 31])
def test_unknown_kinds_are_refused(kind: int) -> None:
    with pytest.raises(BadMarkError, match="unknown kind"):
        decode(kind, b"{}", ts_ns=NOW, tid=1, tgid=1)


def test_longer_than_the_marker_sends_is_refused() -> None:
    body = b'{"engine":"v"}'
    assert decode(1, body + b" " * (MAX_BODY - len(body)), ts_ns=1, tid=1, tgid=1).body == m.Hello("v")
    with pytest.raises(BadMarkError, match=f"Hello: {MAX_BODY + 1} bytes"):
        decode(1, body + b" " * (MAX_BODY + 1 - len(body)), ts_ns=1, tid=1, tgid=1)


def test_times_lie_before_the_mark_in_order_and_not_long_before_it() -> None:
    step = of("Step", step=1, begin_ns=NOW + 5, end_ns=NOW - 5).body
    assert isinstance(step, m.Step)
    assert (step.begin_ns, step.end_ns) == (NOW, NOW)
    step = of("Step", step=1, begin_ns=5, end_ns=NOW - 5).body
    assert isinstance(step, m.Step)
    assert (step.begin_ns, step.end_ns) == (NOW - MAX_SPAN_NS, NOW - 5)
    done = of("StepDone", step=1, sent_ns=NOW - 10, wait_ns=NOW - 20, got_ns=NOW - 5).body
    assert isinstance(done, m.StepDone)
    assert (done.sent_ns, done.wait_ns, done.got_ns) == (NOW - 10, NOW - 10, NOW - 5)
    done = of("StepDone", step=1, sent_ns=0, wait_ns=NOW - 20, got_ns=NOW - 5).body
    assert isinstance(done, m.StepDone)
    assert (done.sent_ns, done.wait_ns) == (0, NOW - 20)  # 0: not known


def test_nothing_reaches_a_terminal_that_it_would_obey() -> None:
    evil = "a\x1b[31m\u202eb\n"
    hello = of("Hello", engine=evil, missing=[evil], config={evil: evil}, model={"name": evil}).body
    step = of("Step", step=1, begin_ns=NOW, end_ns=NOW, deferred=[[1, evil]]).body
    stage = decode(
        KIND["Stage"], json.dumps({"name": evil, "begin_ns": 5, "what": evil}).encode(), **WHERE
    ).body
    for body in (hello, step, stage):
        text = str(msgspec.to_builtins(body))
        assert "\x1b" not in text and "\u202e" not in text and "\n" not in text
    assert isinstance(hello, m.Hello)
    assert hello.engine.startswith("a\\x1b")
    assert len(hello.engine) <= len(evil)  # what passed once passes again


@given(st.integers(-2, 20), st.binary(max_size=300))
@example(6, b'{"step":1,"begin_ns":1,"end_ns":2,"others":[[1,2,3,4,5,6,true,8,9,10]]}')
@example(1, b'{"engine":"\\ud800"}')
def test_any_bytes_give_a_mark_or_a_bad_mark(kind: int, payload: bytes) -> None:
    try:
        found = decode(kind, payload, ts_ns=5, tid=1, tgid=1)
    except BadMarkError:
        return
    assert isinstance(found.body, KINDS[kind])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Mark) == found


_SCALAR = st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=20)
_JSON = st.recursive(_SCALAR, lambda v: st.lists(v, max_size=5) | st.dictionaries(st.text(), v, max_size=3))


@given(st.data(), st.sampled_from(sorted(KINDS)))
def test_any_values_in_the_fields_give_a_mark_or_a_bad_mark(data: st.DataObject, kind: int) -> None:
    names = KINDS[kind].__struct_fields__
    fields = {n: data.draw(_JSON | st.just("r") | st.just(3)) for n in names if data.draw(st.booleans())}
    try:
        found = decode(kind, json.dumps(fields).encode(), ts_ns=NOW, tid=1, tgid=1)
    except BadMarkError:
        return
    assert isinstance(found.body, KINDS[kind])
    for name in ("begin_ns", "end_ns", "sent_ns", "wait_ns", "got_ns"):
        assert 0 <= getattr(found.body, name, 0) <= NOW
