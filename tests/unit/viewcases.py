"""The kinds of slow request, and the harmful text, of the stores that `viewlab` makes."""

from __future__ import annotations

from typing import Final, NamedTuple

from whyspan.model import Culprit

#: Text that a client or a watched process may send: markup, script, terminal codes, RTL overrides, long, not UTF-8.
EVIL: Final = (
    "<script>window.owned=1</script>",
    '"><img src=x onerror="window.owned=1">',
    "</script><svg/onload=window.owned=1>",
    "javascript:window.owned=1//",
    "\x1b]0;owned\x07\x1b[2J[red]x[/red]",
    "\u202egnp.exe\u2066 \u200b\ufeff",
    "../../../../etc/passwd",
    "x" * 10_000,
    b"\xff\xfe invalid \xc3".decode("utf-8", "replace"),
    "{{7*7}} ${7*7} %s %n '; DROP TABLE findings;--",
    "\u0000\u0001\n\r\t",
)


class Case(NamedTuple):
    """A kind of slow request."""

    cause: str
    state: str
    weight: int
    detail: str
    culprit: Culprit
    title: str
    phase: str  # of the engine, in which it happens
    ms: float  # typical excess
    fix: str


CASES: Final = (
    Case(
        "cpu.throttled",
        "throttled",
        26,
        "quota 20 ms of 100 ms",
        Culprit(kind="cgroup", name="/kubepods/burstable/chat", tgid=4100, detail="20 ms of 100 ms"),
        "throttled by its CPU quota",
        "frontend",
        380,
        "Raise the CPU quota, or pin the server to whole CPUs without one.",
    ),
    Case(
        "engine.prefill_interference",
        "running",
        22,
        "steps with 6144 prompt tokens of another request",
        Culprit(kind="request", name="req-long-prompt", trace_id="b" * 32, detail="6144 prompt tokens"),
        "behind the prefill of another request",
        "decode",
        520,
        "Lower max_num_batched_tokens, or turn chunked prefill on.",
    ),
    Case(
        "python.gc",
        "running",
        14,
        "collection of generation 2, 812,000 objects",
        Culprit(kind="thread", name="MainThread", tgid=4100, tid=4100, detail="generation 2"),
        "in Python's garbage collector",
        "frontend",
        210,
        "Call gc.freeze() once the server is warm.",
    ),
    Case(
        "io.log_blocked",
        "blocked",
        12,
        "write to a pipe that nobody reads, 64 KiB full",
        Culprit(kind="file", name="pipe:[48213]", tgid=977, detail="vector, the reader"),
        "writing a log line into a full pipe",
        "delivery",
        160,
        "Log through a queue, or make the reader faster.",
    ),
    Case(
        "engine.queueing",
        "blocked",
        10,
        "waiting for KV blocks: 31 running, 12 waiting",
        Culprit(kind="cache", name="KV pool", detail="98% used"),
        "queued by the engine for want of KV blocks",
        "queue",
        700,
        "Give the engine more memory, or fewer sequences at once.",
    ),
    Case(
        "memory.reclaim",
        "blocked",
        8,
        "direct reclaim, 42 times",
        Culprit(kind="process", name="etl-export", tgid=2210, detail="7.2 GiB resident"),
        "in direct reclaim",
        "prefill",
        240,
        "Give the host more memory, or move etl-export away.",
    ),
    Case("unknown", "unknown", 8, "lost or not seen", Culprit(), "", "decode", 150, ""),
)
