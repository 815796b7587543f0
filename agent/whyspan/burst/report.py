"""What a burst found, as it is printed, written to a file and read again. Types only."""

from __future__ import annotations

import msgspec

from whyspan.model import CodeStack


class Hooked(msgspec.Struct, kw_only=True):
    """A hook and what became of it. ``state``: attached; entry only: without times; refused."""

    name: str
    path: str = ""
    state: str
    by: list[str] = []
    functions: list[str] = []
    reason: str = ""


class Expected(msgspec.Struct, kw_only=True):
    """What the burst was expected to cost, from a short look before it.

    ``slowdown`` is how many times as long the busiest thread was to take for the same work. ``host_per_s`` are the
    calls of all other processes that pay for it too.
    """

    thread: str = ""
    tid: int = 0
    calls_per_s: float = 0.0
    all_per_s: float = 0.0
    call_ns: int = 0
    slowdown: float = 1.0
    host_per_s: float = 0.0
    host_call_ns: int = 0


class MallocRow(msgspec.Struct, kw_only=True):
    """The calls of one thread, at one place, of one function, for one class of sizes.

    ``size_class`` is the most bytes that one asks for, more than half of it the least; -1: the function is told no
    size. The times are of the ``timed`` calls: those whose return could be seen. ``mean_ns`` and ``max_ns`` contain
    the cost of the probe itself; the time blocked and runnable does not. ``stack``: the caller first.
    """

    tid: int
    thread: str
    allocator: str
    function: str
    size_class: int
    calls: int
    timed: int
    bytes: int
    mean_ns: float
    max_ns: int
    blocked_ns: int
    mean_blocked_ns: float
    max_blocked_ns: int
    runnable_ns: int
    lock_waits: int
    depth: int
    stack: list[str] = []


class SyscallRow(msgspec.Struct, kw_only=True):
    """The calls of one system call by one thread. ``buckets[n]``: calls of at least 2^(n-1) and less than 2^n ns.

    ``waits_in`` is the kernel's function of the longest sleep, ``stack`` the program's at the slowest call.
    """

    tid: int
    thread: str
    nr: int
    name: str
    calls: int
    errors: int
    mean_ns: float
    p50_ns: int
    p99_ns: int
    max_ns: int
    total_ns: int
    blocked_ns: int
    runnable_ns: int
    on_cpu_ns: int
    longest_ns: int
    waits_in: str = ""
    buckets: list[int] = []
    stack: list[str] = []


class Unfinished(msgspec.Struct, kw_only=True):
    """A thread that was still in a call when the burst ended."""

    tid: int
    thread: str
    name: str
    since_ns: int


class Report(msgspec.Struct, kw_only=True):
    """One burst. ``seconds`` is how long it was on; ``ended``: time, asked, process ended. Samples are ``calls``."""

    kind: str
    tgid: int
    process: str
    begun_unix_ns: int
    seconds: float
    ended: str
    expected: Expected = msgspec.field(default_factory=Expected)
    hooks: list[Hooked] = []
    notes: list[str] = []
    malloc: list[MallocRow] = []
    syscalls: list[SyscallRow] = []
    samples: list[CodeStack] = []  # without a cause; ``holder``: it had the interpreter lock
    unfinished: list[Unfinished] = []
    left_out: int = 0  # rows beyond the limit, those with the least time blocked
    calls: int = 0  # of all rows
    blocked_ns: int = 0
    lock_waits: int = 0
    missed: dict[str, int] = {}
    symbols: str = ""  # by what the addresses were named
