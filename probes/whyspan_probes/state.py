"""What became of each probe, for the CLI, ``doctor`` and self-metrics."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class HookState:
    """``used`` holds the ELF sections attached, empty when none could be; ``refused`` says why others were not.

    ``lacks`` says what the alternative in use may not see.
    """

    used: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)


#: States in which a probe does all that it can: attached, or waiting for a file that it would attach to.
HEALTHY = frozenset({"attached", "waiting"})


@dataclass
class FileState:
    """A file that a user hook is for, and what became of it.

    ``state``: attached, refused, or absent when it has none of the functions. ``by`` is the ELF section of the program
    attached. ``processes`` are some of the watched ones that map it.
    """

    hook: str
    path: str
    state: str
    by: str = ""
    reason: str = ""
    symbols: list[str] = field(default_factory=list)
    processes: list[int] = field(default_factory=list)
    build_id: str = ""


@dataclass
class ProbeState:
    """``state``: attached, partial (an optional hook is missing), waiting, failed, disabled, shed.

    waiting: its programs are loaded, and no watched process maps a file that they are for.
    """

    name: str
    title: str
    cost: str
    state: str = "disabled"
    reason: str = ""
    hooks: dict[str, HookState] = field(default_factory=dict)
    files: list[FileState] = field(default_factory=list)  # of user hooks
    hits_per_s: float = 0.0
    ns_per_hit: float = 0.0
    core_ratio: float = 0.0  # share of one core
    drops: int = 0
    missed: int = (
        0  # runs that the kernel skipped: running already on that CPU, or a return that it did not follow
    )
