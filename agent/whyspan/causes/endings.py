"""What rules say beside the path: why a request failed, and what led to its cause."""

from __future__ import annotations

from functools import cache

from whyspan.causes.context import Context
from whyspan.causes.rule import Claim, Ending, LeadingTo, Rule, rules


def why(ctx: Context) -> tuple[Rule, Claim] | None:
    """Return the cause of a failed request's failure, with its rule; None when none is known."""
    for rule, ending in _endings():
        claim = ending.ended(ctx)
        if claim is not None:
            return rule, claim
    return None


def behind(cause: str, ctx: Context) -> list[Claim]:
    """Return what led to the verdict's cause."""
    found = [r.led_to(cause, ctx) for r in _leading()]
    return [c for c in found if c is not None]


# Whether a rule has a protocol takes longer to find out than most rules take.
@cache
def _endings() -> tuple[tuple[Rule, Ending], ...]:
    return tuple((r, r) for r in rules() if isinstance(r, Ending))


@cache
def _leading() -> tuple[LeadingTo, ...]:
    return tuple(r for r in rules() if isinstance(r, LeadingTo))
