"""What rules say beside the path: why a request failed, and what led to its cause."""

from __future__ import annotations

from whyspan.causes.context import Context
from whyspan.causes.rule import Claim, Ending, LeadingTo, Rule, rules


def why(ctx: Context) -> tuple[Rule, Claim] | None:
    """Return the cause of a failed request's failure, with its rule; None when none is known."""
    for rule in rules():
        if isinstance(rule, Ending):
            claim = rule.ended(ctx)
            if claim is not None:
                return rule, claim
    return None


def behind(cause: str, ctx: Context) -> list[Claim]:
    """Return what led to the verdict's cause."""
    found = [r.led_to(cause, ctx) for r in rules() if isinstance(r, LeadingTo)]
    return [c for c in found if c is not None]
