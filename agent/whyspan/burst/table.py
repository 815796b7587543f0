"""A report as people read it."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from whyspan.burst import histogram
from whyspan.burst.report import Report
from whyspan.clock import rfc3339
from whyspan.text import clean

_FRAMES = 3
_FRAME_CHARS = 40
_STACK_CHARS = 90
_NO_FRAME_POINTERS = (
    "stacks follow frame pointers: libraries without, such as Debian's libc and most of Python's extensions, end "
    "them after one or two frames"
)
#: From so large a share of the hottest row on.
_HEAT = ((0.5, "bold red"), (0.1, "yellow"), (0.0, ""))


def show(report: Report, out: Console, rows: int) -> None:
    """Print it."""
    out.print(
        f"{report.kind} burst of process {report.tgid} ({clean(report.process)}), {rfc3339(report.begun_unix_ns)}, "
        f"{report.seconds:.2f} s, ended by: {report.ended}"
    )
    for hook in report.hooks:
        why = f" ({hook.reason})" if hook.reason else ""
        out.print(clean(f"  {hook.name} {hook.path}: {hook.state} by {', '.join(hook.by)}{why}", 300))
    out.print(_malloc(report, rows) if report.kind == "malloc" else _syscalls(report, rows))
    for line in _foot(report, rows):
        out.print(clean(line, 400))


def _malloc(report: Report, rows: int) -> Table:
    table = _table("thread", "function")
    for name in ("size", "calls", "bytes", "blocked µs", "lock waits", "max ms", "depth"):
        table.add_column(name, justify="right")
    table.add_column("stack")
    shown = report.malloc[:rows]
    top = max((r.blocked_ns for r in shown), default=0)
    for r in shown:
        timed = r.timed > 0
        table.add_row(
            f"{r.tid} {clean(r.thread, 20)}",
            f"{r.allocator} {r.function}" if len(report.hooks) > 1 else r.function,
            size(r.size_class),
            f"{r.calls:,}",
            amount(r.bytes) if r.size_class >= 0 else "-",
            _heat(f"{r.mean_blocked_ns / 1e3:,.1f}" if timed else "-", r.blocked_ns, top),
            _heat(f"{r.lock_waits:,}" if timed else "-", r.blocked_ns, top),
            f"{r.max_ns / 1e6:,.2f}" if timed else "-",
            str(r.depth),
            stack(r.stack),
        )
    return table


def _syscalls(report: Report, rows: int) -> Table:
    table = _table("thread", "call")
    for name in ("calls", "errors", "mean µs", "p50 <", "p99 <", "max ms", "blocked ms", "on CPU ms"):
        table.add_column(name, justify="right")
    for name in ("512 ns - 34 s", "waits in", "stack of the slowest"):
        table.add_column(name, no_wrap=name.startswith("512"))
    shown = report.syscalls[:rows]
    top = max((r.blocked_ns for r in shown), default=0)
    for r in shown:
        table.add_row(
            f"{r.tid} {clean(r.thread, 20)}",
            r.name,
            f"{r.calls:,}",
            f"{r.errors:,}",
            f"{r.mean_ns / 1e3:,.1f}",
            duration(r.p50_ns),
            duration(r.p99_ns),
            f"{r.max_ns / 1e6:,.2f}",
            _heat(f"{r.blocked_ns / 1e6:,.1f}", r.blocked_ns, top),
            f"{r.on_cpu_ns / 1e6:,.1f}",
            histogram.bars(r.buckets),
            clean(r.waits_in, 30),
            stack(r.stack),
        )
    return table


def _foot(report: Report, rows: int) -> Iterable[str]:
    hidden = report.left_out + max(0, len(report.malloc) + len(report.syscalls) - rows)
    yield (
        f"{report.calls:,} calls, {report.blocked_ns / 1e6:,.1f} ms blocked in all"
        + (f", {report.lock_waits:,} lock acquisitions that blocked" if report.kind == "malloc" else "")
        + (f"; {hidden:,} rows are not shown, all with less time blocked" if hidden else "")
    )
    if report.kind == "malloc":
        yield (
            "max ms contains the probe's own time (microseconds); the time blocked does not. "
            + _NO_FRAME_POINTERS
        )
    for u in report.unfinished[:rows]:
        yield f"still in a call at the end: thread {u.tid} ({u.thread}), {u.name}, for {u.since_ns / 1e6:,.0f} ms"
    if report.missed:
        yield "missed: " + ", ".join(f"{name.replace('_', ' ')} {n:,}" for name, n in report.missed.items())
    if report.symbols not in ("", "bcc"):
        yield f"names by {report.symbols}: install python3-bpfcc for the names of functions"
    yield from report.notes


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, no_wrap=True)
    return table


def _heat(text: str, value: int, top: int) -> Text:
    share = value / top if top else 0.0
    return Text(text, style=next(style for least, style in _HEAT if share >= least) if share else "")


def stack(frames: Iterable[str]) -> str:
    """Return the first frames in one line, the caller first."""
    shown = [clean(f, _FRAME_CHARS) for f in frames]
    more = " < …" if len(shown) > _FRAMES else ""
    return clean(" < ".join(shown[:_FRAMES]) + more, _STACK_CHARS)


def size(size_class: int) -> str:
    """Return a class of sizes; each reaches from half of its bound to it."""
    return "-" if size_class < 0 else f"≤ {amount(size_class)}"


def amount(n: float) -> str:
    """Return bytes in a unit that fits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:,.0f} {unit}" if unit == "B" or n == int(n) else f"{n:,.1f} {unit}"
        n /= 1024
    return f"{n:,.1f} TiB"


def duration(ns: float) -> str:
    """Return a time in a unit that fits."""
    for unit, scale in (("ns", 1.0), ("µs", 1e3), ("ms", 1e6)):
        if ns < 1000 * scale:
            return f"{ns / scale:.3g} {unit}"
    return f"{ns / 1e9:.3g} s"
