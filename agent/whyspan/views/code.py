"""Which code a request's time went to: its stacks as one tree per cause, and all threads while it stalled."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Final, NamedTuple

import msgspec
from whyspan_exporters.metrics.states import number
from whyspan_exporters.recall import Sample

from whyspan import codetext, text
from whyspan.model import CodeFrame, CodeStack, Finding, Snapshot, ThreadGroup
from whyspan.views.shapes import CodeNode, CodeTree, CodeView, FrameView, Named, SnapshotView, ThreadGroupView

#: Trees of a request, and nodes of each: what does not fit is one row, so that the sum stays true.
MAX_TREES: Final = 8
MAX_NODES: Final = 400
#: Stacks that are looked at for a tree, those with most samples.
MAX_STACKS: Final = 256
#: Frames of a stack, the innermost.
MAX_FRAMES: Final = 96
MAX_SNAPSHOTS: Final = 3
MAX_GROUPS: Final = 24
#: Frames, and names of threads, of a group.
MAX_GROUP_FRAMES: Final = 64
MAX_THREADS: Final = 8
#: Characters of a name, and of a file.
MAX_NAME: Final = 200
MAX_PLACE: Final = 300
#: Lines of a function, and kinds of work, that are told apart.
_MAX_TOLD: Final = 5
#: JSON's numbers are exact up to 2 ** 53; no request has as many samples as this.
_MAX_COUNT: Final = 1 << 31
#: What the probe of the CPU samples is called.
SAMPLER: Final = "samples"
THREAD, PYTHON, NATIVE, KERNEL, OTHER = "thread", "python", "native", "kernel", "other"
OTHER_STACKS: Final = "(other stacks)"
#: What `whyspan.stacks` puts between frames of the program and of Python; it is not asked, as it needs numpy.
MISSING: Final = "(frames missing)"


class _Frame(NamedTuple):
    """What makes frames one node: a function, whatever its line."""

    kind: str
    name: str
    place: str = ""


class _Node:
    """A function below its callers, as stacks are added."""

    __slots__ = ("children", "lines", "own", "samples")

    def __init__(self) -> None:
        self.samples = self.own = 0
        self.lines = Counter[int]()
        self.children: dict[_Frame, _Node] = {}


def view(finding: Finding, samples: Iterable[Sample] = ()) -> CodeView:
    """Return the code of a request. *samples* are of the host, during it."""
    parts: defaultdict[tuple[str, bool], list[CodeStack]] = defaultdict(list)
    for stack in finding.stacks:
        if stack.samples > 0:
            parts[stack.cause, stack.blocked].append(stack)
    cause = finding.verdict.cause
    told = codetext.of_cause(finding, cause)

    def order(key: tuple[str, bool]) -> tuple[bool, bool, int]:
        blocked = told.blocked if told is not None and key[0] == cause else False
        return key[0] != cause, key[1] != blocked, -sum(s.samples for s in parts[key])

    keys = sorted(parts, key=order)
    return CodeView(
        trees=[_tree(finding, parts[key]) for key in keys[:MAX_TREES]],
        left_out=len(keys[MAX_TREES:]),
        snapshots=[_snapshot(s, finding.request.start_ns) for s in finding.snapshots[:MAX_SNAPSHOTS]],
        sampled=_sampled(samples),
    )


def _sampled(samples: Iterable[Sample]) -> bool | None:
    """Whether the sampler had anything to do; None where it is not known of any probe."""
    names: set[object] = set()
    for s in samples:
        probes = s.told.get("probes")
        names |= {p[0] for p in probes if isinstance(p, list) and p} if isinstance(probes, list) else set()
    return SAMPLER in names if names else None


def _tree(finding: Finding, stacks: list[CodeStack]) -> CodeTree:
    alone = msgspec.structs.replace(finding, stacks=stacks)
    told = codetext.of_cause(alone, stacks[0].cause)
    root, top, left, size = _Node(), None, 0, 0
    for i, stack in enumerate(sorted(stacks, key=lambda s: (s is not told, -s.samples))):
        path = list(_path(stack)) if i < MAX_STACKS else []
        seen = min(stack.samples, _MAX_COUNT)
        new = _missing(root, path)
        if size + new > MAX_NODES or not path:
            left += seen
            continue
        size += new
        node = root
        for frame, line in path:
            node = node.children.setdefault(frame, _Node())
            node.samples += seen
            node.lines[line] += seen
            if stack is told and frame.kind == PYTHON:
                top = node
        node.own += seen
    if left:
        rest = root.children[_Frame(OTHER, OTHER_STACKS)] = _Node()
        rest.samples = rest.own = left
    work = Counter[str]()
    for stack in stacks:
        work[stack.work] += stack.samples
    del work[""]
    nodes, index = _nodes(root, top)
    return CodeTree(
        cause=_name(stacks[0].cause),
        blocked=stacks[0].blocked,
        samples=sum(n.samples for n in nodes if n.parent < 0),
        nodes=nodes,
        top=index,
        sentence=text.clean(codetext.words(alone, told), 2 * MAX_PLACE) if told is not None else "",
        work=[Named(name=_name(w), value=min(n, _MAX_COUNT)) for w, n in work.most_common(_MAX_TOLD)],
    )


def _missing(root: _Node, path: list[tuple[_Frame, int]]) -> int:
    """Return how many nodes a stack would add."""
    node = root
    for i, (frame, _) in enumerate(path):
        if frame not in node.children:
            return len(path) - i
        node = node.children[frame]
    return 0


def _nodes(root: _Node, top: _Node | None) -> tuple[list[CodeNode], int]:
    """Return the nodes in the order in which they are drawn, and the index of *top*, -1 without."""
    out: list[CodeNode] = []
    found = -1

    def add(below: _Node, parent: int, depth: int, start: int) -> None:
        nonlocal found
        children = below.children.items()
        for frame, node in sorted(children, key=lambda c: (c[0].name == OTHER_STACKS, -c[1].samples, c[0])):
            found = len(out) if node is top else found
            lines = [(line, n) for line, n in node.lines.most_common(_MAX_TOLD) if line > 0]
            place = f"{frame.place}:{lines[0][0]}" if lines else frame.place
            out.append(
                CodeNode(
                    parent=parent,
                    depth=depth,
                    start=start,
                    samples=node.samples,
                    own=node.own,
                    kind=frame.kind,
                    name=frame.name,
                    place=place,
                    lines=lines if len(lines) > 1 else [],
                )
            )
            add(node, len(out) - 1, depth + 1, start)
            start += node.samples

    add(root, -1, 0, 0)
    return out, found


def _path(stack: CodeStack) -> Iterator[tuple[_Frame, int]]:
    """Yield a thread and its frames from the outermost, each with its line, 0 where it has none."""
    had = "had the interpreter lock" if stack.holder else ""
    yield _Frame(THREAD, f"{_name(stack.thread) or 'thread'} [{stack.tid}]", had), 0
    yield from reversed(_frames(stack, MAX_FRAMES))


def _frames(stack: CodeStack | ThreadGroup, limit: int) -> list[tuple[_Frame, int]]:
    """Return the innermost frames, the same as `codetext.frames` has as lines."""
    every: Iterable[tuple[_Frame, int]] = chain(
        ((_Frame(KERNEL, _name(name), "kernel"), 0) for name in stack.kernel),
        ((_native(line), 0) for line in stack.native),
        map(_python, stack.python),
    )
    out = list(islice(every, limit))
    more = stack.cut or len(stack.kernel) + len(stack.native) + len(stack.python) > limit
    return [*out, (_MORE, 0)] if more else out


_GONE: Final = _Frame(PYTHON, codetext.GONE)
_MORE: Final = _Frame(OTHER, codetext.MORE)


def _python(f: CodeFrame) -> tuple[_Frame, int]:
    return (_Frame(PYTHON, _name(f.function), _file(f.file)), f.line) if f.function else (_GONE, 0)


def _native(line: str) -> _Frame:
    if line == MISSING:
        return _Frame(OTHER, line)
    function, _, module = line.rpartition(" [")
    if function and module.endswith("]") and module != "]":
        return _Frame(NATIVE, _name(function), _file(module[:-1]))
    return _Frame(NATIVE, _name(line))


def _snapshot(snapshot: Snapshot, start_ns: int) -> SnapshotView:
    groups = sorted(snapshot.groups, key=lambda g: not g.stalled)
    return SnapshotView(
        at_ns=snapshot.at_ns - start_ns,
        tgid=snapshot.tgid,
        process=_name(snapshot.process),
        groups=[_group(g) for g in groups[:MAX_GROUPS]],
        left_out=snapshot.left_out + sum(g.count for g in groups[MAX_GROUPS:]),
    )


def _group(group: ThreadGroup) -> ThreadGroupView:
    frames = _frames(group, MAX_GROUP_FRAMES)
    return ThreadGroupView(
        state=_name(group.state),
        syscall=_name(group.syscall),
        for_ms=number(group.for_ms) or 0.0,
        count=group.count,
        threads=[_name(name) for name in group.threads[:MAX_THREADS]],
        stalled=group.stalled,
        frames=[
            FrameView(kind=f.kind, name=f.name, place=f"{f.place}:{line}" if line > 0 else f.place)
            for f, line in frames
        ],
    )


def _name(value: str) -> str:
    return text.clean(value, MAX_NAME)


def _file(value: str) -> str:
    """Return a path; of one that is too long the end, which says most."""
    return text.clean(value if len(value) <= MAX_PLACE else text.ELLIPSIS + value[1 - MAX_PLACE :], MAX_PLACE)
