"""A report as people read it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from whyspan import codetext
from whyspan.burst import histogram
from whyspan.burst.report import Report
from whyspan.clock import rfc3339
from whyspan.model import CodeStack
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
    out.print(_TABLES[report.kind](report, rows))
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


def _samples(report: Report, rows: int) -> Table:
    table = _table("thread")
    for name in ("samples", "%", "with the GIL"):
        table.add_column(name, justify="right")
    for name in ("function", "called by", "mostly in", "kind of work"):
        table.add_column(name)
    shown = _functions(report)[:rows]
    top = max((f.samples for f in shown), default=0)
    for f in shown:
        python = codetext.python(f.example)
        lines = python or codetext.frames(f.example)
        table.add_row(
            f"{f.example.tid} {clean(f.example.thread, 20)}",
            _heat(f"{f.samples:,}", f.samples, top),
            f"{100 * f.samples / report.calls:.1f}",
            f"{f.holding:,}",
            clean(lines[0], _STACK_CHARS) if lines else "-",
            stack(lines[1:3]),
            clean(next(iter((*f.example.kernel, *f.example.native)), ""), _FRAME_CHARS) if python else "",
            clean(f.example.work, 30),
        )
    return table


class _Function(NamedTuple):
    samples: int
    holding: int
    example: CodeStack


def _functions(report: Report) -> list[_Function]:
    """Add samples up by thread and innermost function, of Python where there is one; the example is its commonest."""
    found: dict[tuple[object, ...], _Function] = {}
    for s in report.samples:
        inner = (s.python[0].file, s.python[0].function) if s.python else (*s.kernel, *s.native)[:1]
        known = found.get((s.tid, inner), _Function(0, 0, s))
        holding = s.samples if s.holder else 0
        example = max(known.example, s, key=lambda c: c.samples)
        found[s.tid, inner] = _Function(known.samples + s.samples, known.holding + holding, example)
    return sorted(found.values(), key=lambda f: -f.samples)


_TABLES = {"malloc": _malloc, "samples": _samples, "syscalls": _syscalls}


def _foot(report: Report, rows: int) -> Iterable[str]:
    if report.kind == "samples":
        named = sum(s.samples for s in report.samples if s.work)
        yield f"{report.calls:,} samples; the kind of work is known of {named:,}" + (
            f"; {report.left_out:,} stacks are not kept, those seen least often" if report.left_out else ""
        )
    else:
        yield from _calls(report, rows)
    if report.missed:
        yield "missed: " + ", ".join(f"{name.replace('_', ' ')} {n:,}" for name, n in report.missed.items())
    if report.symbols not in ("", "bcc"):
        hint = (
            "" if report.symbols.startswith("bcc") else ": install python3-bpfcc for the names of functions"
        )
        yield f"names by {report.symbols}{hint}"
    yield from report.notes


def _calls(report: Report, rows: int) -> Iterable[str]:
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
