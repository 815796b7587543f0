"""The code that a request's time went to, in words: of its stacks, the one that stands for most of a cause. Pure."""

from __future__ import annotations

from whyspan.model import CodeFrame, CodeStack, Finding


def of_cause(finding: Finding, cause: str) -> CodeStack | None:
    """Return the stack of Python that stands for most of a cause's time; None when there is none."""
    return next((s for s in finding.stacks if s.cause == cause and s.python and s.python[0].function), None)


def sentence(stack: CodeStack, samples: int) -> str:
    """Return in words where a cause's time went: *samples* are all of its kind that the cause has."""
    top, *callers = stack.python
    by = next((f for f in callers if f.function and f.file != top.file), callers[0] if callers else None)
    called = f", called by {_at(by)}" if by is not None and by.function else ""
    who = f"thread {stack.thread or stack.tid}{', which had the interpreter lock,' if stack.holder else ''}"
    if stack.blocked:
        return f"{who} was blocked in {_at(top)}{called}: {stack.samples} of {samples} long waits"
    return f"{who} was in {_at(top)}{called}: {stack.samples} of {samples} samples"


def _at(frame: CodeFrame) -> str:
    name = frame.file.rpartition("/")[2]
    return f"{frame.function} ({name}:{frame.line})" if frame.line else f"{frame.function} ({name})"


def frames(stack: CodeStack) -> list[str]:
    """Return a stack as lines, the innermost frame first: the kernel, the program's own code, then Python.

    The program's frames stand above Python's as far as they are known; where Python called them from is not.
    """
    out = [f"{name} [kernel]" for name in stack.kernel]
    if not stack.python:
        out += stack.native
    for f in stack.python:
        out.append(f"{f.function} ({f.file}:{f.line})" if f.function else "(a code object that is gone)")
    return [*out, "(more frames)"] if stack.cut else out


def tell(finding: Finding) -> None:
    """Name the code in the verdict: as its first evidence, and as ``code``."""
    cause = finding.verdict.cause
    stack = of_cause(finding, cause)
    if stack is None:
        return
    finding.verdict.code = stack.python[0]
    samples = sum(s.samples for s in finding.stacks if s.cause == cause and s.blocked == stack.blocked)
    finding.verdict.evidence.insert(0, sentence(stack, samples))
