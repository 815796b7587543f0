"""Which code the path was in: samples and looks at waits, on built timelines."""

from __future__ import annotations

from whyspan import codetext, stacks
from whyspan.model import CodeFrame, CodeStack, Finding, Segment, StackFact, Verdict

from tests.unit.timeline import LOOP, SERVER, WORKER, EventBuilder, ns, request

DUMPS = [CodeFrame("dumps", "/lib/json/encoder.py", 203), CodeFrame("render", "/srv/serve.py", 212)]
LOOPING = [CodeFrame("run_once", "/lib/asyncio/base_events.py", 5)]
GIL = 1


def fact(number: int, python: list[CodeFrame], **fields: object) -> StackFact:
    return StackFact(number, SERVER, 0, python, **fields)  # type: ignore[arg-type]


def sampled(b: EventBuilder, tid: int, *at_ms: float, stack: int, aux: int = 0) -> EventBuilder:
    for ms in at_ms:
        b.add("cpu_sample", ms, tid, aux=aux, stack=stack)
    return b


def segment(start: float, end: float, cause: str, state: str = "running", tid: int = LOOP) -> Segment:
    return Segment(
        start_ns=ns(start), end_ns=ns(end), tgid=SERVER, tid=tid, thread="loop", state=state, cause=cause
    )


def gathered(b: EventBuilder, *segments: Segment) -> list[CodeStack]:
    t = b.timelines(0, 1000)
    return stacks.gather(segments, t, t.facts)


def test_samples_count_for_the_segment_that_they_fall_into() -> None:
    b = EventBuilder().known(fact(1, DUMPS), fact(2, LOOPING))
    sampled(b, LOOP, 10, 30, 50, stack=1)
    sampled(b, LOOP, 90, 150, stack=2)
    found = gathered(b, segment(0, 60, "python.loop_blocked"), segment(60, 100, "work.cpu"))
    assert [(s.cause, s.samples, s.python) for s in found] == [
        ("python.loop_blocked", 3, DUMPS),
        ("work.cpu", 1, LOOPING),
    ]


def test_a_sample_at_a_boundary_counts_once() -> None:
    b = sampled(EventBuilder().known(fact(1, DUMPS)), LOOP, 60, stack=1)
    found = gathered(b, segment(0, 60, "a"), segment(60, 100, "b"))
    assert [(s.cause, s.samples) for s in found] == [("b", 1)]


def test_stacks_that_read_alike_are_one() -> None:
    b = EventBuilder().known(fact(1, DUMPS, user=[0x10]), fact(2, DUMPS, user=[0x10]))
    sampled(sampled(b, LOOP, 10, stack=1), LOOP, 20, stack=2)
    (one,) = gathered(b, segment(0, 60, "a"))
    assert (one.samples, one.native) == (2, ["0x10"])


def test_other_threads_and_stacks_that_nobody_knows_count_nothing() -> None:
    b = EventBuilder().known(fact(1, DUMPS))
    sampled(sampled(sampled(b, WORKER, 10, stack=1), LOOP, 20, stack=7), LOOP, 30, stack=0)
    assert gathered(b, segment(0, 60, "a")) == []


def test_a_wait_for_the_interpreter_lock_shows_what_its_holder_did() -> None:
    b = EventBuilder().known(fact(1, DUMPS), fact(2, LOOPING))
    sampled(sampled(b, WORKER, 10, 30, stack=1, aux=GIL), WORKER, 20, stack=2)
    (one,) = gathered(b, segment(0, 60, "python.gil", "blocked"))
    assert (one.tid, one.holder, one.samples, one.python) == (WORKER, True, 2, DUMPS)


def test_a_long_wait_shows_where_the_thread_was() -> None:
    b = EventBuilder().known(fact(3, DUMPS, kernel=["futex_wait"]))
    b.add("wait_stack", 250, LOOP, stack=3)
    (one,) = gathered(b, segment(0, 400, "lock.contention", "blocked"))
    assert (one.blocked, one.samples, one.kernel) == (True, 1, ["futex_wait"])
    assert (
        gathered(b, segment(200, 260, "lock.contention", "blocked")) == []
    )  # too short to have been looked at


def finding(*found: CodeStack, cause: str = "python.loop_blocked") -> Finding:
    return Finding(
        request=request(0, 100),
        slow=True,
        wall_ns=1,
        accounted_ns=1,
        segments=[],
        causes={},
        baseline={},
        verdict=Verdict(cause=cause, evidence=["first"]),
        stacks=list(found),
    )


def stack(
    python: list[CodeFrame], samples: int, cause: str = "python.loop_blocked", **f: object
) -> CodeStack:
    return CodeStack(cause=cause, tgid=1, tid=2, thread="loop", samples=samples, python=python, **f)  # type: ignore[arg-type]


def test_the_verdict_names_the_code_seen_most_often() -> None:
    f = finding(stack(DUMPS, 7), stack(LOOPING, 2), stack(LOOPING, 9, "work.cpu"))
    codetext.tell(f)
    assert f.verdict.code == DUMPS[0]
    assert f.verdict.evidence == [
        "thread loop was in dumps (encoder.py:203), called by render (serve.py:212): 7 of 9 samples",
        "first",
    ]


def test_waits_and_holders_are_worded_as_such() -> None:
    assert codetext.sentence(stack(LOOPING, 1, blocked=True), 1) == (
        "thread loop was blocked in run_once (base_events.py:5): 1 of 1 long waits"
    )
    assert "loop, which had the interpreter lock, was in" in codetext.sentence(
        stack(DUMPS, 1, holder=True), 1
    )


def test_without_samples_of_the_cause_nothing_is_named() -> None:
    f = finding(stack(DUMPS, 7, "work.cpu"), stack([], 3), stack([CodeFrame("", "", 0)], 2))
    codetext.tell(f)
    assert f.verdict.code is None
    assert f.verdict.evidence == ["first"]


def test_lines_of_a_stack() -> None:
    full = stack([*DUMPS, CodeFrame("", "", 0)], 1, kernel=["futex_wait"], native=["libc.so.6+0x5"], cut=True)
    assert codetext.frames(full) == [
        "futex_wait [kernel]",
        "dumps (/lib/json/encoder.py:203)",
        "render (/srv/serve.py:212)",
        "(a code object that is gone)",
        "(more frames)",
    ]
    assert codetext.frames(stack([], 1, native=["libc.so.6+0x5"])) == ["libc.so.6+0x5"]
