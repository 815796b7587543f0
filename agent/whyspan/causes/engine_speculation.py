"""``engine.speculation``: drafting cost more than the accepted tokens saved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from whyspan.causes.context import Context
from whyspan.causes.during import During, DuringRule, last_part
from whyspan.engines import EngineView
from whyspan.model import Culprit

#: Fewer accepted than this share do not pay for the drafting.
ACCEPTED: Final = 0.3
MIN_DRAFTED: Final = 16


class _Speculation(DuringRule):
    id = "engine.speculation"
    title = "drafting tokens that were not accepted"
    neighbours = ("engine.prefill_interference", "engine.cpu_bound_step")
    fix = "Try fewer speculative tokens, another drafter, or none above a batch size; compare with the mode off."
    rank = 68
    nothing = "no tokens were drafted, or enough of them were accepted"

    def find(self, engine: EngineView, ctx: Context) -> Iterable[During]:
        """Yield of each step that share of its time in which rejected tokens were verified."""
        drafted = sum(s.drafted for s in engine.mine)
        accepted = sum(s.accepted for s in engine.mine)
        if drafted < MIN_DRAFTED or accepted > ACCEPTED * drafted:
            return
        text = f"{accepted} of {drafted} drafted tokens accepted"
        who = Culprit(
            kind="process", name=ctx.process_label(engine.core) or "engine", tgid=engine.core, detail=text
        )
        for step in engine.mine:
            rejected = step.drafted - step.accepted
            if rejected <= 0 or not step.done_ns:
                continue
            share = rejected / max(step.batch + step.drafted, 1)
            lo, hi = last_part(step, int(step.wall_ns * share), engine.request.end_ns)
            yield During(lo, hi, text, who)


RULE = _Speculation()
