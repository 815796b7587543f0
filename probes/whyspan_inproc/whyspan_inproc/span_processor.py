"""Tell which OpenTelemetry span runs on which thread and asyncio task; put into whatever SDK the host sets up."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any
from weakref import WeakKeyDictionary

from whyspan_inproc import emit
from whyspan_inproc.hooks import Hook
from whyspan_inproc.imports import when_imported
from whyspan_inproc.kinds import SPAN_ON

_MAX_NAME = 128
_tasks: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_numbers = itertools.count(1)


def task_number() -> int:
    """Return the number of the asyncio task that runs on this thread, 0 if none."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return 0
    if task is None:
        return 0
    number = _tasks.get(task)
    if number is None:
        number = _tasks[task] = next(_numbers)
    return number


class MarkingSpanProcessor:
    """Shaped like ``opentelemetry.sdk.trace.SpanProcessor``, which it cannot inherit: the SDK may not be there.

    Its methods never raise.
    """

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        """A span started on this thread."""
        if emit.watched():
            self._tell(span, end=False)

    def on_end(self, span: Any) -> None:
        """A span ended on this thread."""
        if emit.watched():
            self._tell(span, end=True)

    def _on_ending(self, span: Any) -> None:
        """The SDK calls it before ``on_end``; nothing to do."""

    def shutdown(self) -> None:
        """Nothing to shut down."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing to flush."""
        return True

    @staticmethod
    def _tell(span: Any, *, end: bool) -> None:
        try:
            context = span.get_span_context()
            body: dict[str, Any] = {
                "trace_id": format(context.trace_id, "032x"),
                "span_id": format(context.span_id, "016x"),
            }
            if end:
                body["end"] = True
            body["name"] = str(span.name)[:_MAX_NAME]
            parent = getattr(span, "parent", None)
            if parent is not None:
                body["parent_id"] = format(parent.span_id, "016x")
            task = task_number()
            if task:
                body["task"] = task
        except Exception:
            emit.dropped["failed"] += 1
            return
        emit.emit(SPAN_ON, body)


def _add(provider: Any) -> None:
    add = getattr(provider, "add_span_processor", None)
    if add is not None and not getattr(provider, "_whyspan", False):
        provider._whyspan = True
        add(MarkingSpanProcessor())


def _set(hook: Hook, _token: Any, _result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _add(hook.argument(args, kwargs, "tracer_provider"))


def _already(module: Any) -> None:
    _add(getattr(module, "_TRACER_PROVIDER", None))


# The API's setter, so that a provider of any SDK is found, once, however it was made.
_HOOK = Hook(
    "server", "opentelemetry.trace", "set_tracer_provider", "tracer_provider", after=_set, always=True
)
_registered = False


def register() -> None:
    """Add a processor to the global TracerProvider when one is set, or to that which is."""
    global _registered
    if not _registered:
        _registered = True
        _HOOK.wait()
        when_imported(_HOOK.module, _already)
