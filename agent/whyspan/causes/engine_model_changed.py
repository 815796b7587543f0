"""``engine.model_changed``: the model behind the name is another than the one the usual figures were learnt on."""

from __future__ import annotations

from whyspan.causes.context import Context
from whyspan.causes.rule import Claim
from whyspan.critical_path import Path, PathSegment
from whyspan.model import Culprit


def culprit(ctx: Context) -> Culprit | None:
    """Return the changed model as the culprit; None when it is the same, or not known."""
    if ctx.engine is None or not ctx.engine.model_change:
        return None
    name = ctx.engine.model.get("name", "") or "model"
    return Culprit(kind="model", name=name, tgid=ctx.engine.core, detail=ctx.engine.model_change)


class _ModelChanged:
    id = "engine.model_changed"
    title = "of ordinary work, by a model that is not the one the usual figures come from"
    neighbours = ("engine.reload", "gpu.clocks")
    fix = "Try pinning the revision, dtype and attention backend, and comparing releases before routing to them."
    rank = 99

    def match(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Claim nothing: a changed model shows in no segment, only in what all of them take (see ``verdict``)."""
        return None

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return whether the model is known to be the same."""
        if ctx.engine is None or not ctx.engine.model:
            return "the model's identity is not known: no marks from the engine"
        return ctx.engine.model_change or "the model is the one that the usual figures come from"


RULE = _ModelChanged()
