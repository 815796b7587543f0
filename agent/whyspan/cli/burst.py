"""``whyspan burst``: a dear measurement of one process, for seconds."""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import click

from whyspan.cli._options import btf_option, config_option, console

if TYPE_CHECKING:
    from whyspan.burst.report import Report

F = TypeVar("F", bound=Callable[..., Any])

_MAX_SECONDS = 60.0


@click.group(name="burst")
def command() -> None:
    """Measure one process for seconds: what is too dear to be always on. Needs root.

    What it will cost is told first, from a short look; what would cost too much is refused. It ends by itself, also
    when this command is killed; Ctrl-C ends it early and prints what there is.
    """


def _a_number(_ctx: click.Context, _option: click.Parameter, value: float) -> float:
    if math.isnan(value):  # lies in any range
        raise click.BadParameter("not a number")
    return value


def _options(function: F) -> F:
    for option in reversed(
        (
            click.option("--pid", type=click.IntRange(min=1), required=True, help="The process."),
            click.option(
                "--seconds",
                type=click.FloatRange(min=0.1, max=_MAX_SECONDS),
                callback=_a_number,
                default=5.0,
                show_default=True,
                help="How long, at most 60.",
            ),
            click.option(
                "--force", is_flag=True, help="Even if the process is slowed down beyond the bound."
            ),
            click.option("--top", type=click.IntRange(1, 1000), default=30, show_default=True, help="Rows."),
            btf_option,
            click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        )
    ):
        function = option(function)
    return function


@command.command(name="malloc")
@_options
def malloc_command(**options: Any) -> None:
    """Who allocates how much, where, and who sleeps for the allocator's locks.

    Hooks malloc, calloc, realloc, free and their like in whatever allocators the process maps: libc's, jemalloc,
    tcmalloc, mimalloc, also linked into the program if that has symbols. Each call costs some microseconds more.
    """
    from whyspan.burst import malloc

    _run(malloc, **options)


@command.command(name="syscalls")
@_options
def syscalls_command(**options: Any) -> None:
    """How long each system call takes, by thread, and what it sleeps in.

    By kprobes where the kernel has them, else by the raw tracepoints of all system calls, which every process on the
    host pays for while they are on (0.1 to 0.4 µs for each call).
    """
    from whyspan.burst import syscalls

    _run(syscalls, **options)


@command.command(name="samples")
@_options
@click.option(
    "--speedscope",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Also write all stacks to a file for speedscope.",
)
def samples_command(*, speedscope: Path | None, **options: Any) -> None:
    """What it executes: 999 samples per second and CPU, with the stacks of Python, program and kernel.

    The daemon samples all the time, 49 times per second (`whyspan flame`): this is for what is over in a second.
    """
    from whyspan.burst import samples

    report = _run(samples, **options)
    if speedscope is None:
        return
    from whyspan.errors import WhyspanError
    from whyspan.exchange import speedscope as format_
    from whyspan.views import flame

    view = flame.of_stacks(report.samples)
    try:
        speedscope.write_text(
            json.dumps(format_.document(view, f"whyspan burst {report.process}")), encoding="utf-8"
        )
    except OSError as e:
        raise WhyspanError(f"cannot write {speedscope}: {e.strerror}") from e


@command.command(name="last")
@config_option
@click.option("--top", type=click.IntRange(1, 1000), default=30, show_default=True, help="Rows.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def last_command(*, config_path: Path | None, top: int, as_json: bool) -> None:
    """Show the newest burst that a slow request triggered ([burst] on_breach in the configuration)."""
    from whyspan.burst import files
    from whyspan.burst.errors import BurstError
    from whyspan.config import load_config

    folder = load_config(config_path).collector_dir
    for path in files.stored(folder):
        report = files.read(path)
        if report is not None:
            _print(report, top, as_json)
            return
    raise BurstError(f"there is no burst in {files.folder(folder)}; see [burst] on_breach")


def _run(
    kind: ModuleType, *, pid: int, seconds: float, force: bool, top: int, btf: Path | None, as_json: bool
) -> Report:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from whyspan_probes.errors import ProbeFrameworkError

    from whyspan.burst.errors import BurstError
    from whyspan.burst.options import Options
    from whyspan.pipeline.settings import kernel_btf

    err = Console(stderr=True, markup=False, emoji=False, highlight=False)
    stopped: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        if stopped:  # a second one does not wait
            raise KeyboardInterrupt
        stopped.append(number)

    bar = Progress(
        TextColumn("measuring"),
        BarColumn(),
        TimeRemainingColumn(),
        console=err,
        disable=not err.is_terminal,
        transient=True,
    )
    before = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        with bar:
            task = bar.add_task("measuring", total=seconds, start=True)
            report: Report = kind.run(
                Options(
                    tgid=pid,
                    seconds=seconds,
                    force=force,
                    top=top,
                    kernel=kernel_btf(str(btf) if btf else ""),
                    say=lambda text: err.print(text, soft_wrap=True),
                    progress=lambda passed: bar.update(task, completed=passed),
                    stopped=lambda: bool(stopped),
                )
            )
    except ProbeFrameworkError as e:
        raise BurstError(str(e)) from e
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    _print(report, top, as_json)
    return report


def _print(report: Report, top: int, as_json: bool) -> None:
    import msgspec

    from whyspan.burst import table

    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(report), indent=2))
    else:
        table.show(report, console(), top)
    sys.stdout.flush()
