"""``engine.batch_timer``: an idle engine held the request back for a configured delay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from whyspan.causes.context import MS, Context
from whyspan.causes.during import During, DuringRule
from whyspan.causes.work import by_timer
from whyspan.critical_path import PathSegment
from whyspan.engines import EngineView
from whyspan.engines.view import HANDOVER, QUEUE
from whyspan.model import Culprit
from whyspan.timeline import BLOCKED

#: Shorter idle stretches are the engine's own loop.
MIN_NS: Final = 2_000_000


class _BatchTimer(DuringRule):
    id = "engine.batch_timer"
    title = "held back by the engine's batching timer"
    neighbours = ("engine.queueing",)
    fix = "Try a shorter batching delay: the engine was idle while the request waited."
    rank = 61
    nothing = "the engine was not idle while the request waited"

    def find(self, engine: EngineView, ctx: Context) -> Iterable[During]:
        """Yield the parts of hand-over and queue in which the engine ran no step."""
        for name in (HANDOVER, QUEUE):
            phase = engine.phase(name)
            if phase is None:
                continue
            at = phase.start_ns
            busy = sorted((s.begin_ns, s.done_ns or phase.end_ns) for s in engine.steps)
            for begin, done in [*busy, (phase.end_ns, phase.end_ns)]:
                if done <= at:
                    continue
                until = min(begin, phase.end_ns)
                if until - at >= MIN_NS:
                    yield During(at, until, self._detail(engine, until - at), self._culprit(engine))
                at = max(at, done)
                if at >= phase.end_ns:
                    break

    def takes(self, segment: PathSegment, ctx: Context) -> bool:
        """Take only sleeps that a timer ended."""
        return segment.state == BLOCKED and segment.wait is not None and by_timer(segment.wait)

    @staticmethod
    def _configured(engine: EngineView) -> str:
        hello = engine.instance.hello if engine.instance is not None else None
        return hello.config.get("batch_wait_ms", "") if hello is not None else ""

    def _detail(self, engine: EngineView, ns: int) -> str:
        configured = self._configured(engine)
        return f"idle for {ns / MS:.0f} ms" + (f", configured delay {configured} ms" if configured else "")

    def _culprit(self, engine: EngineView) -> Culprit:
        configured = self._configured(engine)
        return Culprit(
            kind="process",
            name=engine.facts.comm(engine.core) or "engine",
            tgid=engine.core,
            detail=f"batching delay of {configured} ms" if configured else "a batching timer",
        )


RULE = _BatchTimer()
