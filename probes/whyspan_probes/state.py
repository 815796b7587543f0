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


@dataclass
class ProbeState:
    """``state``: attached, partial (an optional hook is missing), failed, disabled, shed."""

    name: str
    title: str
    cost: str
    state: str = "disabled"
    reason: str = ""
    hooks: dict[str, HookState] = field(default_factory=dict)
    hits_per_s: float = 0.0
    ns_per_hit: float = 0.0
    core_ratio: float = 0.0  # share of one core
    drops: int = 0
    missed: int = 0  # runs that the kernel skipped because the program was already running on that CPU
