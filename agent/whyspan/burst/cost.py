"""What a burst will cost, out of a short look at how often the process calls what it hooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from whyspan.burst.errors import TooDearError
from whyspan.burst.report import Expected

#: Of one call, in ns: while its entry is looked at, and while the burst is on. The traps are most of it, and a
#: first instruction that the kernel cannot emulate but has to step over takes another one. Measured in a loop of
#: malloc (emulated) and free (stepped) of glibc 2.36 in a virtual machine with Linux 6.18; bare metal is faster.
LOOK_NS = {False: 2_000, True: 6_500}  # by whether it is stepped over
ENTRY_NS = {False: 2_700, True: 7_200}
PAIR_NS = {False: 3_800, True: 8_300}
#: Of one system call by raw tracepoints, of the process itself and of anybody on the host: getppid of the same machine,
#: 320 -> 910 ns and 350 -> 720 ns; on an idle one 100 -> 168 ns.
SYSCALL_NS, HOST_SYSCALL_NS = 600, 370
LOOK_S = 0.1
#: The most that the busiest thread may be slowed down without ``--force``.
MAX_SLOWDOWN = 2.0
#: However much of the look went into looking, so much of it was the thread's own.
_LEAST_OWN = 0.05


class Load(NamedTuple):
    """What a thread did during the look: its calls, what looking cost, what the burst would have cost, in ns."""

    calls: int = 0
    look_ns: int = 0
    burst_ns: int = 0

    def plus(self, calls: int, look_ns: int, burst_ns: int) -> Load:
        """Add some calls that cost so much each."""
        return Load(self.calls + calls, self.look_ns + calls * look_ns, self.burst_ns + calls * burst_ns)


def expect(loads: Mapping[int, Load], names: Mapping[int, str], seconds: float, usual_ns: int) -> Expected:
    """Return what to expect.

    The look itself slows a busy thread down: what it takes is subtracted before the rate is told.

    Args:
        loads: By thread; 0 stands for all other processes.
        names: Of the threads.
        seconds: How long the look was.
        usual_ns: What a call will cost, if none was seen.
    """
    own = {tid: load for tid, load in loads.items() if tid and load.calls}
    others = loads.get(0, Load()).calls
    if not own or seconds <= 0:
        return Expected(call_ns=usual_ns, host_per_s=others / seconds if seconds > 0 else 0.0)

    def its_own_s(load: Load) -> float:
        return max(seconds - load.look_ns / 1e9, seconds * _LEAST_OWN)

    busiest = max(own, key=lambda tid: (own[tid].burst_ns, -tid))
    load = own[busiest]
    return Expected(
        thread=names.get(busiest, ""),
        tid=busiest,
        calls_per_s=load.calls / its_own_s(load),
        all_per_s=sum(one.calls / its_own_s(one) for one in own.values()),
        call_ns=load.burst_ns // load.calls,
        slowdown=1 + load.burst_ns / 1e9 / its_own_s(load),
        host_per_s=others / seconds,
    )


def describe(e: Expected, what: str, seconds: float) -> str:
    """Return the cost in one sentence or two."""
    if not e.tid:
        text = f"no {what} call in {LOOK_S * 1000:.0f} ms; each call will cost about {e.call_ns / 1000:.1f} µs more"
    else:
        text = (
            f"thread {e.tid} ({e.thread}) makes {e.calls_per_s:,.0f} {what} calls/s, all threads {e.all_per_s:,.0f}; "
            f"each costs about {e.call_ns / 1000:.1f} µs more: expect that thread to take {e.slowdown:.2f} times as "
            f"long for {seconds:g} s"
        )
    if e.host_call_ns:
        text += (
            f". All other processes make {e.host_per_s:,.0f} calls/s, which cost about {e.host_call_ns} ns more each "
            f"({e.host_per_s * e.host_call_ns / 1e9:.2%} of a CPU)"
        )
    return text


def check(e: Expected, *, force: bool) -> None:
    """Refuse what is too dear.

    Raises:
        TooDearError: the busiest thread would be slowed down more than `MAX_SLOWDOWN` times.
    """
    if e.slowdown > MAX_SLOWDOWN and not force:
        raise TooDearError(
            f"thread {e.tid} ({e.thread}) would take {e.slowdown:.1f} times as long while it lasts "
            f"({e.calls_per_s:,.0f} calls/s at {e.call_ns / 1000:.1f} µs more each), and {MAX_SLOWDOWN:g} is the "
            "bound; use --force, and fewer seconds"
        )
