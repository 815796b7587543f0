"""``engine.recompile``: what had been compiled before was compiled again, for a new shape or option."""

from __future__ import annotations

from whyspan.causes.engine_jit_compile import _JitCompile


class _Recompile(_JitCompile):
    id = "engine.recompile"
    title = "while code was compiled again"
    neighbours = ("engine.jit_compile", "engine.reload")
    fix = "Try marking the dimension that changes as dynamic, padding to fixed sizes, or warming up with every size."
    rank = 53
    nothing = "nothing was compiled a second time beside the request"
    again = True


RULE = _Recompile()
