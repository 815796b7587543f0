"""Usual work: where time goes when nothing is wrong. Claims whatever no root cause claimed."""

from __future__ import annotations

from typing import Final

from whyspan import syscalls
from whyspan.causes.context import Context
from whyspan.causes.rule import Claim
from whyspan.critical_path import NET_RX, PathSegment
from whyspan.model import UNKNOWN
from whyspan.timeline import BLOCKED, HARDIRQ, HRTIMER, NO_WAKE, RUNNING, SOFTIRQ, TASK, UNKNOWN_STATE, Wait

CPU: Final = "work.cpu"  # running
TIMER: Final = "work.timer"  # a sleep or a time-out
PEER: Final = "work.peer"  # waiting for a network peer
PIPE: Final = "work.pipe"  # waiting at a pipe
BLOCKED_WORK: Final = "work.blocked"  # any other wait
SCHED: Final = "work.sched"  # short or unexplained waits for a CPU

_TIMER_VECTORS: Final = (1, 8)  # TIMER_SOFTIRQ, HRTIMER_SOFTIRQ. Source: include/linux/interrupt.h
_BLOCK_VECTORS: Final = (4, 5)  # BLOCK_SOFTIRQ, IRQ_POLL_SOFTIRQ
_FD_PIPE: Final = 3
_FD_SOCKET: Final = 4


def match(segment: PathSegment, ctx: Context) -> Claim:
    """Return the kind of usual work a segment is."""
    if segment.state == UNKNOWN_STATE:
        return Claim(UNKNOWN, "lost or not seen")
    if segment.state == RUNNING:
        return Claim(CPU)
    if segment.state != BLOCKED:
        return Claim(SCHED)
    if segment.wait is None:
        return Claim(BLOCKED_WORK)
    return _blocked(segment, segment.wait, ctx)


def _blocked(segment: PathSegment, wait: Wait, ctx: Context) -> Claim:
    call = syscalls.name(wait.syscall_nr) or "the kernel"
    if by_timer(wait):
        return Claim(TIMER, f"{call}, ended by a timer")
    if wait.context == SOFTIRQ and wait.softirq_vec == NET_RX:
        return Claim(PEER, f"{call}, ended by the network")
    if block_interrupt(wait):
        return Claim(BLOCKED_WORK, f"{call}, ended by a device")
    kind = wait.fd.kind if wait.fd is not None else 0
    cause = PIPE if kind == _FD_PIPE else PEER if kind == _FD_SOCKET else BLOCKED_WORK
    if wait.context == TASK:
        who = ctx.process_label(wait.waker_tgid, wait.waker_tid)
        return Claim(cause, f"{call}, ended by {who}")
    return Claim(
        cause, f"{call}, {'wake-up not seen' if wait.context == NO_WAKE else 'ended by an interrupt'}"
    )


def by_timer(wait: Wait) -> bool:
    """Return whether a timer ended the wait."""
    return wait.context == HRTIMER or (wait.context == SOFTIRQ and wait.softirq_vec in _TIMER_VECTORS)


def block_interrupt(wait: Wait) -> bool:
    """Return whether a device's interrupt, or the block layer's half of it, ended the wait."""
    return wait.context == HARDIRQ or (wait.context == SOFTIRQ and wait.softirq_vec in _BLOCK_VECTORS)
