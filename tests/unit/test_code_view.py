"""The code of a request as it is shown: trees that add up, in the terminal's words, and bounded whatever is in them."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from whyspan import codetext, stacks
from whyspan.model import CodeFrame, CodeStack, Finding, Snapshot, ThreadGroup
from whyspan.views import code, request
from whyspan.views.shapes import CodeNode, CodeTree, CodeView, FrameView
from whyspan_exporters.reader import Stored
from whyspan_exporters.recall import Sample
from whyspan_probes.samples import PROBE

from tests.unit import viewcode, viewlab
from tests.unit.viewcases import EVIL

#: What a process may call its functions, beside `EVIL`.
HUGE = "\x1b[31m\u202e" + "n" * 100_000


def finding(*found: CodeStack, cause: str = viewcode.CAUSE) -> Finding:
    f = viewlab.finding(1, Random(1))
    f.verdict.cause, f.stacks = cause, list(found)
    return f


def stack(samples: int = 1, cause: str = viewcode.CAUSE, **fields: Any) -> CodeStack:
    return CodeStack(cause=cause, tgid=1, tid=fields.pop("tid", 1), samples=samples, **fields)


def frames(*names: str) -> list[CodeFrame]:
    return [CodeFrame(name, f"/srv/{name}.py", 1) for name in names]


def words(f: FrameView | CodeNode) -> str:
    """Return a frame as the page writes it."""
    if not f.place:
        return f.name
    return f"{f.name} ({f.place})" if f.kind == code.PYTHON else f"{f.name} [{f.place}]"


def paths(tree: CodeTree) -> Iterator[tuple[list[CodeNode], int]]:
    """Yield the stacks of a tree, the outermost frame first, each with its samples."""
    for node in tree.nodes:
        if node.own:
            path = [node]
            while path[0].parent >= 0:
                path.insert(0, tree.nodes[path[0].parent])
            yield path, node.own


def check(tree: CodeTree) -> None:
    """Everything adds up, and lies where its caller does."""
    left: dict[int, int] = {}
    for i, n in enumerate(tree.nodes):
        assert n.parent < i
        parent = tree.nodes[n.parent] if n.parent >= 0 else None
        assert n.depth == (parent.depth + 1 if parent is not None else 0)
        assert n.start == left.setdefault(n.parent, parent.start if parent is not None else 0)
        left[n.parent] += n.samples
        assert n.samples == n.own + sum(c.samples for c in tree.nodes if c.parent == i)
        assert n.samples > 0 and n.own >= 0
    assert tree.samples == left[-1] == sum(own for _, own in paths(tree))
    assert len(tree.nodes) <= code.MAX_NODES + 1
    assert max(n.depth for n in tree.nodes) <= code.MAX_FRAMES + 1


def test_a_tree_per_cause_and_kind_the_verdicts_first() -> None:
    f = viewcode.add(viewlab.finding(1, Random(1)))
    view = code.view(f)
    assert [(t.cause, t.blocked, t.samples) for t in view.trees] == [
        ("python.loop_blocked", False, 40),
        ("python.loop_blocked", True, 2),
        ("work.cpu", False, 6),
        ("python.gil", False, 5),
    ]
    for tree in view.trees:
        check(tree)
    first = view.trees[0]
    top = first.nodes[first.top]
    assert (top.name, top.place, top.samples, top.own) == (
        "JSONEncoder.iterencode",
        "/usr/lib/python3.11/json/encoder.py:258",
        30,
        0,
    )
    assert top.lines == [(258, 21), (260, 9)]
    assert first.sentence == f.verdict.evidence[0] and first.sentence.endswith("30 of 40 samples")
    assert [(w.name, w.value) for w in first.work] == [("JSON", 30), ("chat template", 6)]
    waits = view.trees[1]
    assert waits.sentence.endswith(": 2 of 2 long waits") and "was blocked in" in waits.sentence
    holder = view.trees[3].nodes[0]
    assert (holder.kind, holder.name, holder.place) == (
        "thread",
        "log-writer [4123]",
        "had the interpreter lock",
    )
    assert (view.left_out, view.sampled) == (0, None)


def test_the_kind_that_the_verdict_is_of_comes_first() -> None:
    view = code.view(finding(stack(2, python=frames("a")), stack(5, python=frames("b"), blocked=True)))
    assert [(t.blocked, t.sentence.partition(":")[0]) for t in view.trees] == [
        (True, "thread 1 was blocked in b (b.py"),
        (False, "thread 1 was in a (a.py"),
    ]


def test_the_frames_are_those_of_the_terminal() -> None:
    every: list[CodeStack | ThreadGroup] = [*viewcode.stacks(), *viewcode.groups()]
    for one in every:
        lines = codetext.frames(one)
        if isinstance(one, ThreadGroup):
            (group,) = code.view(_stalled(one)).snapshots[0].groups
            assert [words(f) for f in group.frames] == lines
            continue
        (tree,) = code.view(finding(one)).trees
        ((path, samples),) = paths(tree)
        assert samples == one.samples
        assert [words(n) for n in path[:0:-1]] == lines
        assert path[0].name == f"{one.thread} [{one.tid}]"


def _stalled(*groups: ThreadGroup, left_out: int = 0) -> Finding:
    f = finding()
    f.snapshots = [
        Snapshot(at_ns=f.request.start_ns + 7, tgid=3, process="p", groups=list(groups), left_out=left_out)
    ]
    return f


def test_a_native_name_in_brackets_and_frames_that_are_not_known() -> None:
    native = ["(anonymous namespace)::f(int [4]) [lib a.so]", "operator new []", "x.so+0x1f", code.MISSING]
    (tree,) = code.view(finding(stack(native=native, python=[CodeFrame("", "", 0)], cut=True))).trees
    ((path, _),) = paths(tree)
    assert [(n.kind, n.name, n.place) for n in path[1:]] == [
        ("other", "(more frames)", ""),
        ("python", "(a code object that is gone)", ""),
        ("other", "(frames missing)", ""),
        ("native", "x.so+0x1f", ""),
        ("native", "operator new []", ""),
        ("native", "(anonymous namespace)::f(int [4])", "lib a.so"),
    ]
    assert (tree.top, tree.sentence) == (-1, "")


def test_what_it_does_not_ask_others_for_is_what_they_say() -> None:
    assert stacks.MISSING == code.MISSING
    assert PROBE.name == code.SAMPLER


def test_stacks_that_do_not_fit_are_one_row() -> None:
    found = [stack(1000 - i, python=frames(*(f"f{i}_{j}" for j in range(20)))) for i in range(100)]
    (tree,) = code.view(finding(*found)).trees
    check(tree)
    assert tree.samples == sum(s.samples for s in found)
    rest = tree.nodes[-1]
    shown = (code.MAX_NODES - 1) // 20
    assert (rest.name, rest.depth, rest.own) == (code.OTHER_STACKS, 0, sum(s.samples for s in found[shown:]))


def test_the_innermost_frames_of_a_deep_stack_are_kept() -> None:
    deep = frames(*(f"f{i}" for i in range(10_000)))
    (tree,) = code.view(finding(stack(python=deep, kernel=["k"]))).trees
    check(tree)
    names = [n.name for n in tree.nodes]
    assert names[1] == "(more frames)" and names[-2:] == ["f0", "k"]
    assert tree.nodes[tree.top].name == "f0"
    exact = frames(*(f"f{i}" for i in range(code.MAX_FRAMES)))
    (tree,) = code.view(finding(stack(python=exact))).trees
    assert "(more frames)" not in {n.name for n in tree.nodes}


def test_recursion_is_as_deep_as_it_was() -> None:
    (tree,) = code.view(finding(stack(3, python=frames("a", "a", "a", "b")))).trees
    check(tree)
    assert [(n.name, n.samples, n.own) for n in tree.nodes[1:]] == [
        ("b", 3, 0),
        ("a", 3, 0),
        ("a", 3, 0),
        ("a", 3, 3),
    ]


@pytest.mark.parametrize("text", [*EVIL, HUGE])
def test_nothing_harmful_or_huge_comes_through(text: str) -> None:
    hostile = [CodeFrame(text, text, 2**62), *frames("a") * 10_000]
    found = [
        stack(2**62, f"{text}{i % 20}", tid=i, thread=text, native=[text] * 10_000, kernel=[f"{text} [{text}]"] * i,
              python=[CodeFrame(f"{text}{i}", text, i), *hostile], work=f"{text}{i % 7}", hint=text, blocked=i % 3 == 0)
        for i in range(60)
    ]  # fmt: skip
    found += [stack(0, python=hostile), stack(-5, python=hostile)]
    f = finding(*found, cause=found[1].cause)
    group = ThreadGroup(
        state=text,
        syscall=text,
        threads=[text] * 1000,
        for_ms=float("nan"),
        python=hostile,
        native=[text] * 99,
    )
    f.snapshots = [Snapshot(at_ns=0, tgid=1, process=text, groups=[group] * 100)] * 50
    view = code.view(f)
    assert (len(view.trees), len(view.snapshots)) == (code.MAX_TREES, code.MAX_SNAPSHOTS)
    assert view.left_out == 40 - code.MAX_TREES
    for tree in view.trees:
        check(tree)
    for snapshot in view.snapshots:
        assert (len(snapshot.groups), snapshot.left_out) == (code.MAX_GROUPS, 100 - code.MAX_GROUPS)
        assert all(len(g.frames) == code.MAX_GROUP_FRAMES + 1 and g.for_ms == 0 for g in snapshot.groups)
        assert all(len(g.threads) == code.MAX_THREADS for g in snapshot.groups)
    sent = msgspec.json.encode(view)
    assert msgspec.json.decode(sent, type=CodeView) == view
    assert len(sent) < 4_000_000
    for shown in _texts(msgspec.json.decode(sent)):
        assert shown.isprintable() and len(shown) <= 2 * code.MAX_PLACE, shown


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def test_of_a_long_path_the_end_is_kept() -> None:
    (tree,) = code.view(finding(stack(python=[CodeFrame("f", "/a" * 5000 + "/serve.py", 12)]))).trees
    assert tree.nodes[1].place.startswith("…") and tree.nodes[1].place.endswith("/serve.py:12")


_NAMES = st.lists(st.sampled_from("abc"), max_size=5)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 2), _NAMES, _NAMES, st.booleans()),
        min_size=1,
        max_size=12,
    )
)
def test_whatever_is_merged_adds_up(found: list[tuple[int, int, list[str], list[str], bool]]) -> None:
    given_ = [stack(n, tid=tid, python=frames(*p), kernel=k, cut=cut) for n, tid, p, k, cut in found]
    (tree,) = code.view(finding(*given_)).trees
    check(tree)
    assert tree.samples == sum(s.samples for s in given_)
    best = codetext.of_cause(finding(*given_), viewcode.CAUSE)
    assert (tree.top >= 0) == (best is not None)
    if best is not None:
        assert tree.nodes[tree.top].name == best.python[0].function


def test_threads_that_stalled_come_first() -> None:
    idle, stalled = ThreadGroup(state="blocked", count=7), ThreadGroup(state="running", stalled=True)
    (snapshot,) = code.view(_stalled(idle, stalled, left_out=3)).snapshots
    assert [(g.stalled, g.count) for g in snapshot.groups] == [(True, 1), (False, 7)]
    assert (snapshot.at_ns, snapshot.tgid, snapshot.process, snapshot.left_out) == (7, 3, "p", 3)


@pytest.mark.parametrize(
    ("probes", "sampled"),
    [
        ([], None),
        ([[]], None),
        ([[["sched", 9.0, 0.1]]], False),
        ([[["sched", 9.0, 0.1]], [["sched", 9.0, 0.1], ["samples", 49.0, 0.1]]], True),
        (["nonsense", [[], 3]], None),
    ],
)
def test_whether_the_sampler_ran_is_what_the_host_said(probes: list[Any], sampled: bool | None) -> None:
    samples = [Sample(i, "c", {"probes": p}) for i, p in enumerate(probes)]
    assert code.view(finding(), samples).sampled is sampled


def test_it_is_part_of_the_request(make_finding: Any) -> None:
    f = viewcode.add(viewlab.finding(1, Random(1)))
    view = request.view(Stored("i-1", 0, f))
    assert view.code.trees[0].cause == view.verdict.cause
    assert view.verdict.code == "JSONEncoder.iterencode (/usr/lib/python3.11/json/encoder.py:258)"
    ordinary = request.view(Stored("i-1", 0, make_finding(1, slow=False)))
    assert (ordinary.verdict.code, ordinary.code.trees, ordinary.code.snapshots) == ("", [], [])
