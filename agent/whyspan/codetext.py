"""The code that a request's time went to, in words: of its stacks, the one that stands for most of a cause. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from whyspan.model import CodeFrame, CodeStack, Finding, ThreadGroup

#: Causes that are about what Python executes: what may be done depends on what kind of work it is.
_OF_WORK: Final = (
    "python.loop_blocked",
    "python.frontend_saturated",
    "python.gil",
    "engine.cpu_bound_step",
    "engine.ipc_copy",
)
#: A package, or a module of one file, that is installed or Python's own; a frozen module.
_LIBRARY: Final = re.compile(
    r"/lib(?:64)?/python3(?:\.\d+)?t?/(?:(?:site|dist)-packages/)?([^/]+)|^<frozen ([\w.]+)>"
)
#: That Python was in code of the interpreter goes without saying.
_INTERPRETER: Final = re.compile(r"(?:lib)?python3")
#: Frames of which no more is known.
GONE: Final = "(a code object that is gone)"
MORE: Final = "(more frames)"
#: Share of a cause's samples that one kind of work has to have to be told.
_MOST: Final = 0.5


def of_cause(finding: Finding, cause: str) -> CodeStack | None:
    """Return the stack of Python that stands for most of a cause's time; None when there is none.

    That is the one seen most often of the function that was: its lines are many stacks.
    """
    mine = [s for s in finding.stacks if s.cause == cause and s.python and s.python[0].function]
    if not mine:
        return None
    often = _often(mine)
    return max(mine, key=lambda s: (often[_innermost(s)], s.samples))


def _often(found: Iterable[CodeStack]) -> Counter[tuple[object, ...]]:
    counts: Counter[tuple[object, ...]] = Counter()
    for s in found:
        counts[_innermost(s)] += s.samples
    return counts


def _innermost(stack: CodeStack) -> tuple[object, ...]:
    return (stack.blocked, stack.holder, stack.tid, stack.python[0].file, stack.python[0].function)


def sentence(stack: CodeStack, seen: int, samples: int, native: str = "") -> str:
    """Return in words where a cause's time went.

    Args:
        stack: One of the function's.
        seen: How often the function was seen innermost.
        samples: All of its kind that the cause has.
        native: The code of C that the function was in mostly, if there is such.
    """
    top, *callers = stack.python
    called = _called(top, callers)
    who = f"thread {stack.thread or stack.tid}{', which had the interpreter lock,' if stack.holder else ''}"
    where = f"{native}, called by {_at(top)}" if native else _at(top)
    if stack.blocked:
        return f"{who} was blocked in {where}{called}: {seen} of {samples} long waits"
    return f"{who} was in {where}{called}: {seen} of {samples} samples"


def _called(top: CodeFrame, callers: Sequence[CodeFrame]) -> str:
    """Say who called: of a library's function, who called the library, and what of it."""
    package = _package(top.file)
    entry = top
    for by in callers:
        if package and _package(by.file) == package:
            entry = by
            continue
        if not by.function:
            break
        through = f", for {entry.function}" if entry is not top else ""
        return f"{through}{'' if through else ','} called by {_at(by)}"
    return f", called by {_at(callers[0])}" if callers and callers[0].function else ""


def _native(alike: Iterable[CodeStack], stack: CodeStack) -> str:
    """Return the function of C that the stack's innermost function was in at least half the time, else its module."""
    functions, modules = Counter[str](), Counter[str]()
    total = 0
    for s in alike:
        if not s.python or _innermost(s) != _innermost(stack):
            continue
        total += s.samples
        function, _, module = s.native[0].partition(" [") if s.native else ("", "", "")
        name = (module.rstrip("]") or function.partition("+0x")[0]).split(".", 1)[0]
        if module:
            functions[f"{function} ({name})"] += s.samples
        if name and not _INTERPRETER.match(name):
            modules[name] += s.samples
    found = [*functions.most_common(1), *modules.most_common(1)]
    return next((name for name, n in found if 2 * n >= total), "")


def _package(file: str) -> str:
    """Return the library that a file belongs to; empty for a program's own."""
    found = _LIBRARY.search(file)
    return (found[1] or found[2]) if found else ""


def _at(frame: CodeFrame) -> str:
    name = frame.file.rpartition("/")[2]
    return f"{frame.function} ({name}:{frame.line})" if frame.line else f"{frame.function} ({name})"


def frames(stack: CodeStack | ThreadGroup) -> list[str]:
    """Return a stack as lines, the innermost frame first: the kernel, the program's own code, then Python."""
    out = [*(f"{name} [kernel]" for name in stack.kernel), *stack.native]
    out += python(stack)
    return [*out, MORE] if stack.cut else out


def short(stack: CodeStack | ThreadGroup) -> list[str]:
    """Return the lines of a stack, but of what Python has called the innermost alone: the kernel has many frames."""
    if not stack.python:
        return frames(stack)
    called = [*(f"{name} [kernel]" for name in stack.kernel), *stack.native]
    return [*called[:1], *python(stack), *(["(more frames)"] if stack.cut else [])]


def python(stack: CodeStack | ThreadGroup) -> list[str]:
    """Return the frames of Python of a stack as lines, the innermost first."""
    return [line(f) for f in stack.python]


def line(frame: CodeFrame) -> str:
    """Return a frame of Python as a line."""
    return f"{frame.function} ({frame.file}:{frame.line})" if frame.function else GONE


def counted(finding: Finding, stack: CodeStack) -> tuple[list[CodeStack], int]:
    """Return the stacks of the same cause and kind, and how often the stack's innermost function was seen in them."""
    alike = [s for s in finding.stacks if s.cause == stack.cause and s.blocked == stack.blocked]
    if not stack.python:
        return alike, stack.samples
    return alike, _often(s for s in alike if s.python)[_innermost(stack)]


def words(finding: Finding, stack: CodeStack) -> str:
    """Return `sentence` of a stack of Python that the finding has."""
    alike, seen = counted(finding, stack)
    return sentence(stack, seen, sum(s.samples for s in alike), _native(alike, stack))


def tell(finding: Finding) -> None:
    """Name the code in the verdict: as its first evidence, and as ``code``."""
    cause = finding.verdict.cause
    stack = of_cause(finding, cause)
    if stack is None:
        return
    finding.verdict.code = stack.python[0]
    alike, _ = counted(finding, stack)
    samples = sum(s.samples for s in alike)
    evidence = [words(finding, stack)]
    work = Counter[tuple[str, str]]()
    for s in alike:
        work[s.work, s.hint] += s.samples
    (kind, hint), most = work.most_common(1)[0]
    if kind and most >= _MOST * samples and not stack.blocked:
        evidence.append(f"kind of work: {kind}, in {most} of {samples} samples")
        if hint and cause in _OF_WORK:
            finding.verdict.fix = f"{hint} {finding.verdict.fix}"
    finding.verdict.evidence[:0] = evidence
