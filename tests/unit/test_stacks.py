"""Which code the path was in: samples and looks at waits, on built timelines."""

from __future__ import annotations

import pytest
from whyspan import codetext, stacks
from whyspan.model import CodeFrame, CodeStack, Finding, Segment, StackFact, Verdict

from tests.unit.timeline import LOOP, SERVER, WORKER, EventBuilder, ns, request

DUMPS = [CodeFrame("dumps", "/lib/json/encoder.py", 203), CodeFrame("render", "/srv/serve.py", 212)]
LOOPING = [CodeFrame("run_once", "/lib/asyncio/base_events.py", 5)]
GIL = 1
C = "encoder_listencode_obj [_json.cpython-311-x86_64-linux-gnu.so]"
CALL = "_PyObject_Call [python3.11]"
EVAL = "_PyEval_EvalFrameDefault [python3.11]"


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
    b = EventBuilder().known(fact(1, DUMPS, native=[C]), fact(2, DUMPS, native=[C, EVAL]))
    sampled(sampled(b, LOOP, 10, stack=1), LOOP, 20, stack=2)
    assert [(s.samples, s.native) for s in gathered(b, segment(0, 60, "a"))] == [
        (1, [C, stacks.MISSING]),
        (1, [C]),
    ]
    b = EventBuilder().known(fact(1, DUMPS, native=[C, EVAL, "a"]), fact(2, DUMPS, native=[C, EVAL, "b"]))
    sampled(sampled(b, LOOP, 10, stack=1), LOOP, 20, stack=2)
    (one,) = gathered(b, segment(0, 60, "a"))
    assert (one.samples, one.native) == (2, [C])


@pytest.mark.parametrize(
    ("native", "shown"),
    [
        ([], []),
        ([EVAL, "main [python3.11]"], []),
        ([C, CALL, EVAL, "x [libx.so]"], [C, CALL]),
        ([C, "python3.11+0x5", "libpython3.12.so.1.0+0x7", EVAL], [C]),
        (["python3.11+0x5", CALL, EVAL], ["python3.11+0x5", CALL]),
        ([C, "_PyEval_Vector [libpython3.11.so.1.0]"], [C]),
        ([C, "_TAIL_CALL_CALL [python3.14]"], [C]),
        ([C, "_PyEval_EvalFrameDefault.cold [python3]"], [C]),
        ([C], [C, stacks.MISSING]),
        ([CALL], [CALL, stacks.MISSING]),
        # Nothing is known of what executes frames in an interpreter without names, nor of what lies below.
        (["python3.11+0x5", C], []),
        ([C, CALL, "python3.11+0x5", C], [C, CALL, stacks.MISSING]),
        (["my_PyEval_EvalFrameDefault [x.so]"], ["my_PyEval_EvalFrameDefault [x.so]", stacks.MISSING]),
        ([f"f{i} [x.so]" for i in range(70)] + [EVAL], [f"f{i} [x.so]" for i in range(64)]),
    ],
)
def test_c_code_that_the_innermost_frame_of_python_called(native: list[str], shown: list[str]) -> None:
    assert stacks.places(fact(1, DUMPS, native=native)) == shown


def test_a_thread_without_python_has_all_its_frames_and_says_where_they_break_off() -> None:
    whole, broken = fact(1, [], native=[C, "main [x]"]), StackFact(2, SERVER, 64, [], [C])
    assert stacks.places(whole) == [C, "main [x]"]
    assert [stacks.is_cut(f, 0) for f in (whole, broken)] == [False, True]
    assert stacks.is_cut(whole, 16) and not stacks.is_cut(whole, 2)
    # Below frames of Python there is nothing that is missing.
    assert not stacks.is_cut(fact(1, DUMPS, native=[C]), 16 | 64)
    assert stacks.is_cut(fact(1, DUMPS), 2)


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
        verdict=Verdict(cause=cause, evidence=["first"], fix="Try less."),
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


@pytest.mark.parametrize(
    ("frames", "told"),
    [
        (
            [
                ("_iterencode", "/usr/lib/python3.11/json/encoder.py"),
                ("dumps", "/usr/lib/python3.11/json/__init__.py"),
                ("render", "/srv/app/serve.py"),
            ],
            "_iterencode (encoder.py:1), for dumps called by render (serve.py:1)",
        ),
        (
            [("get", "/usr/lib/python3.11/queue.py"), ("work", "/srv/app/serve.py")],
            "get (queue.py:1), called by work (serve.py:1)",
        ),
        (
            [
                ("decode", "/v/lib/python3.12/site-packages/vllm/tokens.py"),
                ("step", "/v/lib/python3.12/site-packages/vllm/engine.py"),
                ("run", "/v/lib/python3.12/site-packages/uvicorn/server.py"),
            ],
            "decode (tokens.py:1), for step called by run (server.py:1)",
        ),
        (
            [("inner", "/srv/app/a.py"), ("outer", "/srv/app/a.py"), ("main", "/srv/app/b.py")],
            "inner (a.py:1), called by outer (a.py:1)",
        ),
        ([("dumps", "/usr/lib/python3.11/json/__init__.py"), ("", "")], "dumps (__init__.py:1)"),
        ([("alone", "/srv/a.py")], "alone (a.py:1)"),
    ],
)
def test_who_called_is_whoever_called_the_library(frames: list[tuple[str, str]], told: str) -> None:
    one = stack([CodeFrame(function, file, 1) for function, file in frames], 2)
    assert codetext.sentence(one, 2, 3) == f"thread loop was in {told}: 2 of 3 samples"


def test_the_lines_of_a_function_count_together() -> None:
    other = [CodeFrame("dumps", "/lib/json/encoder.py", 204), DUMPS[1]]
    f = finding(stack(LOOPING, 5), stack(DUMPS, 4), stack(other, 3))
    codetext.tell(f)
    assert f.verdict.code == DUMPS[0]
    assert f.verdict.evidence[0].endswith("7 of 12 samples")


@pytest.mark.parametrize(
    ("cause", "work", "fix"),
    [
        ("python.loop_blocked", ["JSON", "JSON", ""], "Try orjson. Try less."),
        ("python.loop_blocked", ["JSON", "", ""], "Try less."),
        ("cpu.throttled", ["JSON", "JSON", "JSON"], "Try less."),
    ],
)
def test_the_kind_of_work_says_what_to_do(cause: str, work: list[str], fix: str) -> None:
    hints = {"JSON": "Try orjson.", "": ""}
    f = finding(*(stack(DUMPS, 3, cause, work=w, hint=hints[w]) for w in work), cause=cause)
    codetext.tell(f)
    assert f.verdict.fix == fix
    told = [e for e in f.verdict.evidence if e.startswith("kind of work: JSON")]
    assert bool(told) == (work.count("JSON") > 1)


def test_waits_and_holders_are_worded_as_such() -> None:
    assert codetext.sentence(stack(LOOPING, 1, blocked=True), 1, 1) == (
        "thread loop was blocked in run_once (base_events.py:5): 1 of 1 long waits"
    )
    assert "loop, which had the interpreter lock, was in" in codetext.sentence(
        stack(DUMPS, 1, holder=True), 1, 1
    )


def test_the_verdict_names_the_c_code_that_python_was_in_mostly() -> None:
    others = [stack(DUMPS, 1, native=[f"{name} [python3.11]"]) for name in ("PyList_Append", "PyDict_Next")]
    f = finding(stack(DUMPS, 2, native=[C, stacks.MISSING]), *others)
    codetext.tell(f)
    assert f.verdict.evidence[0].startswith(
        "thread loop was in encoder_listencode_obj (_json), called by dumps (encoder.py:203)"
    )
    assert f.verdict.evidence[0].endswith(": 4 of 4 samples")
    # Stripped code is named by its module; the interpreter's own, and what is in the minority, not at all.
    for native, said in (
        (["libz.so.1.2.13+0x4970"], "was in libz, called by dumps"),
        (["python3.11+0x4970"], "was in dumps"),
        (["PyList_Append [python3.11]"], "was in PyList_Append (python3), called by dumps"),
    ):
        f = finding(stack(DUMPS, 2, native=native), *others[:1])
        codetext.tell(f)
        assert said in f.verdict.evidence[0]
    f = finding(stack(DUMPS, 2, native=[C]), stack(DUMPS, 3), stack(LOOPING, 4, native=[C]))
    codetext.tell(f)
    assert "was in dumps" in f.verdict.evidence[0]


def test_without_samples_of_the_cause_nothing_is_named() -> None:
    f = finding(stack(DUMPS, 7, "work.cpu"), stack([], 3), stack([CodeFrame("", "", 0)], 2))
    codetext.tell(f)
    assert f.verdict.code is None
    assert f.verdict.evidence == ["first"]


def test_lines_of_a_stack() -> None:
    full = stack([*DUMPS, CodeFrame("", "", 0)], 1, kernel=["futex_wait"], native=["libc.so.6+0x5"], cut=True)
    assert codetext.frames(full) == [
        "futex_wait [kernel]",
        "libc.so.6+0x5",
        "dumps (/lib/json/encoder.py:203)",
        "render (/srv/serve.py:212)",
        "(a code object that is gone)",
        "(more frames)",
    ]
    assert codetext.frames(stack([], 1, native=["libc.so.6+0x5"])) == ["libc.so.6+0x5"]
    deep = stack(DUMPS, 1, kernel=[f"k{n}" for n in range(20)], native=["n"], cut=True)
    assert codetext.short(deep) == [
        "k0 [kernel]",
        "dumps (/lib/json/encoder.py:203)",
        "render (/srv/serve.py:212)",
        "(more frames)",
    ]
    assert codetext.short(stack([], 1, kernel=["k0", "k1"])) == ["k0 [kernel]", "k1 [kernel]"]
