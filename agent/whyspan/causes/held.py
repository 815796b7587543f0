"""Causes that are waits for a lock: the holder's time on the path, reached through the wait."""

from __future__ import annotations

from functools import cache
from typing import ClassVar, Final

from whyspan.causes.context import MS, Context
from whyspan.causes.lock_owners import package
from whyspan.causes.rule import LOCK, Claim, Conditional, OfStates, Rule, rules
from whyspan.critical_path import Path, PathSegment, Via
from whyspan.locks import GIL, MALLOC, MMAP_LOCK, Locks
from whyspan.model import Culprit
from whyspan.timeline import BLOCKED, RUNNABLE, RUNNING, THROTTLED, WAKEUP

#: Kinds of the host, by rank, that explain what held a holder up; from here on they are the engine's.
_HOST_RANKS: Final = 51
#: Of the threads that share a lock: a wait counts when it is this long, or one of so many at the lock.
LONG_NS: Final = 1_000_000
MANY: Final = 8
_WORDS: Final = {
    GIL: "the interpreter lock",
    MALLOC: "the allocator's lock",
    MMAP_LOCK: "the mmap_lock of its memory",
}


class HeldRule:
    """Base of the rules about locks. A subclass has ``id``, ``title``, ``neighbours``, ``fix``, ``rank``, ``nothing``,
    and says in ``takes`` which waits are its own.
    """

    id: ClassVar[str]
    title: ClassVar[str]
    neighbours: ClassVar[tuple[str, ...]]
    fix: ClassVar[str]
    rank: ClassVar[int]
    nothing: ClassVar[str]
    states: ClassVar[frozenset[str]] = frozenset({RUNNING, BLOCKED, RUNNABLE, WAKEUP, THROTTLED})
    needs: ClassVar[frozenset[str]] = frozenset({LOCK})

    def takes(self, via: Via, ctx: Context) -> bool:
        """Return whether a wait is of this cause, and long enough for one."""
        raise NotImplementedError

    def holds(self, segment: PathSegment, ctx: Context) -> str:
        """Return in words what the holder did."""
        return "was on a CPU" if segment.state == RUNNING else f"was {segment.state} itself"

    def applies(self, ctx: Context) -> bool:
        """Return whether any lock was waited for on the path."""
        path = ctx.path
        return path is None or ctx.memo(
            "locks on path", lambda: any(s.via is not None for s in path.segments)
        )

    def match(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Claim what a holder did while it held the request up, unless something held the holder up."""
        via = segment.via
        if via is None or not self._mine(via, ctx):
            return None
        seen = via.tid != segment.tid
        if seen and _held_up(segment, ctx):
            return None
        waiter = ctx.thread_label(via.tid, via.tgid)
        detail = f"{waiter} ({via.tid}) waited {via.ns / MS:.1f} ms for {self.lock(via, ctx)}"
        if not seen:
            return Claim(self.id, f"{detail}, whose holder was not seen", None, inferred=True)
        holder = ctx.thread_label(segment.tid, segment.tgid)
        culprit = Culprit(
            kind="thread",
            name=holder,
            tgid=segment.tgid,
            tid=segment.tid,
            detail=f"holds {self.lock(via, ctx)}",
        )
        return Claim(
            self.id, f"{detail}, held by {holder} ({segment.tid}), which {self.holds(segment, ctx)}", culprit
        )

    def _mine(self, via: Via, ctx: Context) -> bool:
        return ctx.memo((self.id, via), lambda: self.takes(via, ctx))

    def lock(self, via: Via, ctx: Context) -> str:
        """Return which lock it is, in words."""
        return lock_name(via)

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return the waits of its kind on the path."""
        waits = {s.via for s in path.segments if s.via is not None}
        mine = [s for s in path.segments if s.via is not None and self._mine(s.via, ctx)]
        if mine:
            return f"{sum(s.ns for s in mine) / MS:.1f} ms of it on the path, mostly another cause's"
        if not waits:
            return f"{self.nothing}; waits for locks on the path 0.0 ms"
        total = sum(s.ns for s in path.segments if s.via is not None) / MS
        return f"{self.nothing}; all waits for locks on the path {total:.1f} ms"


def lock_name(via: Via) -> str:
    """Return which lock a wait was for, in words."""
    words = _WORDS.get(via.kind)
    if words is not None:
        return words
    of = package(via.library) or via.library.rpartition("/")[2]
    where = f" of {of}" if of else ""
    return f"a mutex{where} at {via.address:#x}"


def worth(via: Via, ctx: Context) -> bool:
    """Return whether a wait at a lock is long, or one of many of the lock's."""
    return via.ns >= LONG_NS or contention(via, ctx)[1] >= MANY


def contention(via: Via, ctx: Context) -> tuple[int, int]:
    """Return (distinct threads, sleeps) of the window at a wait's lock."""
    locks = ctx.timelines.shared(Locks)
    return ctx.memo(("contention", via.address), lambda: locks.contended(via.address))


def linked(claim: Claim, segment: PathSegment, ctx: Context) -> Claim:
    """Return the claim of another cause on a holder's time with the wait as the link between it and the request."""
    via = segment.via
    if via is None or via.tid == segment.tid or claim.cause in _ids():
        return claim
    waiter = ctx.thread_label(via.tid, via.tgid)
    link = f"while {waiter} ({via.tid}) waited for {lock_name(via)}, held by this thread"
    return claim._replace(detail="; ".join(filter(None, (claim.detail, link))))


def _held_up(segment: PathSegment, ctx: Context) -> bool:
    """Return whether a cause of the host explains what the holder of a lock did: then the wait is only the link."""

    def ask() -> bool:
        able = ctx.memo(("host rules", segment.state), lambda: _host_rules(segment.state, ctx))
        return any(r.match(segment, ctx) is not None for r in able)

    return ctx.memo(("held up", segment.tid, segment.start_ns, segment.end_ns), ask)


def _host_rules(state: str, ctx: Context) -> list[Rule]:
    able = ctx.memo("host rules", lambda: {r.id for r, c in _host() if c is None or c.applies(ctx)})
    return [r for r, _ in _host() if r.id in able and _of_state(r, state)]


def _of_state(rule: Rule, state: str) -> bool:
    states = _states().get(rule.id)
    return states is None or state in states


# Once for all: to ask whether an object meets a protocol takes longer than most rules do.
@cache
def _host() -> tuple[tuple[Rule, Conditional | None], ...]:
    """Return the rules of the host, with the way to ask whether they apply."""
    # Those before the first lock's have said no already, or the lock's rules would not be asked.
    first = min((r.rank for r in rules() if isinstance(r, HeldRule)), default=0)
    host = [r for r in rules() if first < r.rank < _HOST_RANKS and r.id not in _ids()]
    return tuple((r, r if isinstance(r, Conditional) else None) for r in host)


@cache
def _states() -> dict[str, frozenset[str]]:
    return {r.id: r.states for r in rules() if isinstance(r, OfStates)}


@cache
def _ids() -> frozenset[str]:
    return frozenset(r.id for r in rules() if isinstance(r, HeldRule))
