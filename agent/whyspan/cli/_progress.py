"""How commands show that long work goes on: a bar on a terminal's standard error, nothing else anywhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[float, str], None]


@contextmanager
def progress(text: str, total: float) -> Iterator[Advance]:
    """Show a bar while the block runs. The function that it gets says how much is done, and of what; "" as before."""
    if not sys.stderr.isatty():
        yield lambda _done, _text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(text, total=total)

        def advance(done: float, now: str = "") -> None:
            bar.update(task, completed=done, description=now or None)

        yield advance
