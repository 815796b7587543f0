"""What a root-cause rule is, and how rules are found."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Final, NamedTuple, Protocol, runtime_checkable

from whyspan.causes.context import Context
from whyspan.critical_path import Path, PathSegment
from whyspan.model import Culprit


class Claim(NamedTuple):
    """A rule's claim on a segment, or on the part of it between ``start_ns`` and ``end_ns`` (0: its ends)."""

    cause: str
    detail: str = ""
    culprit: Culprit | None = None
    inferred: bool = False
    start_ns: int = 0
    end_ns: int = 0


@runtime_checkable
class Rule(Protocol):
    """One root cause. A module of this package that has such an object named ``RULE`` adds a cause.

    ``rank`` orders the rules: the lowest that claims a segment has it. ``fix`` is worded as a thing to try.
    """

    @property
    def id(self) -> str:
        """The id of CAUSES.md."""

    @property
    def title(self) -> str:
        """What happened, to follow '540 ms' in a sentence."""

    @property
    def neighbours(self) -> tuple[str, ...]:
        """The causes it is easily mixed up with."""

    @property
    def fix(self) -> str:
        """What to try."""

    @property
    def rank(self) -> int:
        """Order of asking, lowest first."""

    def match(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Return a claim on the segment or a part of it, or None."""

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return the check, with numbers, by which the cause was set aside."""


@runtime_checkable
class Conditional(Protocol):
    """A rule that can tell, once per request, that it has nothing to claim of it."""

    def applies(self, ctx: Context) -> bool:
        """Return whether ``match`` may claim anything."""


@runtime_checkable
class OfStates(Protocol):
    """A rule that only ever claims segments in some states: it is not asked about others."""

    @property
    def states(self) -> frozenset[str]:
        """States as in ``PathSegment.state``."""


#: What a segment must have for some rules to be asked: a wait for a lock that led to it; and, where it is a wait for a
#: CPU, a length worth a cause.
LOCK: Final = "lock"
LONG_WAIT: Final = "long wait"


@runtime_checkable
class Needing(Protocol):
    """A rule that only ever claims segments with something about them: it is not asked about others."""

    @property
    def needs(self) -> frozenset[str]:
        """Of LOCK and LONG_WAIT."""


@runtime_checkable
class Ending(Protocol):
    """A rule that can tell why a request failed. Asked of failed requests only, by rank; the first answer counts.

    Such a request need not have been slow, nor have any time of the cause on its path.
    """

    def ended(self, ctx: Context) -> Claim | None:
        """Return the cause of the failure, or None. ``detail`` says why, to follow a colon in a sentence."""


@runtime_checkable
class LeadingTo(Protocol):
    """A rule of something that is not slow by itself but leads to another cause, beside which it is reported."""

    def led_to(self, cause: str, ctx: Context) -> Claim | None:
        """Return what led to the verdict's cause, or None. ``detail`` is the evidence, in one line."""


@cache
def rules() -> tuple[Rule, ...]:
    """Return every rule of this package, by rank."""
    import whyspan.causes as package

    found: list[Rule] = []
    for info in pkgutil.iter_modules(package.__path__):
        rule = getattr(importlib.import_module(f"{package.__name__}.{info.name}"), "RULE", None)
        if rule is not None:
            assert isinstance(rule, Rule), f"{info.name}.RULE is not a rule"
            found.append(rule)
    return tuple(sorted(found, key=lambda r: (r.rank, r.id)))
