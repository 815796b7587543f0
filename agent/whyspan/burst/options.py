"""What whoever wants a burst says, and how it is kept informed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from whyspan_probes.kernel_btf import KernelBtf

#: The programs do nothing from so long after the planned end, whatever becomes of this process.
SLACK_NS = 2_000_000_000
TOP = 100


@dataclass(frozen=True)
class Options:
    """One burst. The functions are called from its own thread: what it will cost, seconds passed, whether to end."""

    tgid: int
    seconds: float
    force: bool = False
    top: int = TOP
    kernel: KernelBtf | None = None
    say: Callable[[str], None] = lambda _: None
    progress: Callable[[float], None] = lambda _: None
    stopped: Callable[[], bool] = lambda: False
