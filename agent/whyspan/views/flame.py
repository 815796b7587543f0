"""What threads were executing while causes took their time, of one request or of many: weighted stacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

import msgspec

from whyspan.model import CodeStack, Finding

RUNNING: Final = "running"
BLOCKED: Final = "blocked"
#: Distinct stacks kept, those seen most often; the others are one row, so that the sum stays true.
MAX_STACKS: Final = 5000


class Flame(msgspec.Struct, frozen=True):
    """``stacks``: (frames from the outermost to the innermost, how often seen). Requests: with and without samples.

    The first two frames are the service and the cause. Weights of running code are samples, those of waits are waits:
    they are not of one kind, hence ``kind``.
    """

    kind: str
    requests: int
    without: int
    stacks: list[tuple[tuple[str, ...], int]]


def flame(findings: Iterable[Finding], *, cause: str = "", kind: str = RUNNING) -> Flame:
    """Add up the stacks of findings; *cause* limits them to one, or to all below it (cpu, io, ...)."""
    counts: Counter[tuple[str, ...]] = Counter()
    requests = without = 0
    for finding in findings:
        requests += 1
        mine = [s for s in finding.stacks if s.blocked == (kind == BLOCKED) and _below(s.cause, cause)]
        without += not mine
        for stack in mine:
            counts[finding.request.service, stack.cause, *_frames(stack)] += stack.samples
    kept = counts.most_common(MAX_STACKS)
    rest = counts.total() - sum(n for _, n in kept)
    if rest:
        kept.append((("(other stacks)",), rest))
    return Flame(kind, requests, without, kept)


def of_stacks(stacks: Iterable[CodeStack]) -> Flame:
    """Return stacks that belong to no request, by thread."""
    counts: Counter[tuple[str, ...]] = Counter()
    for stack in stacks:
        counts[f"{stack.thread or 'thread'} [{stack.tid}]", *_frames(stack)] += stack.samples
    return Flame(RUNNING, 0, 0, counts.most_common(MAX_STACKS))


def _below(cause: str, wanted: str) -> bool:
    return not wanted or cause == wanted or cause.startswith(f"{wanted}.")


def _frames(stack: CodeStack) -> list[str]:
    out = ["(more frames)"] if stack.cut else []
    for f in reversed(stack.python):
        name = f.file.rpartition("/")[2]
        out.append(f"{f.function} ({name}:{f.line})" if f.function else "(a code object that is gone)")
    return [*out, *reversed(stack.native), *(f"{name} [kernel]" for name in reversed(stack.kernel))]


def folded(view: Flame) -> list[str]:
    """Return one line per stack, ``frame;frame;frame count``: what flame graph tools read."""
    return [f"{';'.join(f.replace(';', ':') for f in frames)} {n}" for frames, n in view.stacks]
