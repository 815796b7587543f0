"""An engine's start as one trace: from the first exec of its processes through weights and caches to ready. Pure.

::

    whyspan.engine.start                  of a service: from the first process's exec to the last stage
    └─ whyspan.engine.process             each process: from its exec to its last stage
       └─ whyspan.engine.stage.<name>     import, device, load_model, kv_cache, compile, capture, warmup ... ready

Only what the marks told while the agent watched: it must run before the server starts.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from whyspan import __version__
from whyspan.text import clean

_SCOPE: Final = InstrumentationScope("whyspan", __version__)
_READY: Final = "ready"
_MAX_SPANS: Final = 200
_CHARS: Final = 64
_MS: Final = 1_000_000


class Start(NamedTuple):
    """The start of a service's engine; ``key`` is the same whenever it is seen again."""

    key: str
    service: str
    engines: list[Mapping[str, Any]]


def ready(engines: Iterable[Mapping[str, Any]]) -> list[Start]:
    """Return the starts that came to their end, one per service.

    Args:
        engines: The entries of the collector's status (``whyspan.engines.status``).
    """
    by_service: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for e in engines:
        if isinstance(e, Mapping) and e.get("state") != "ended" and _stages(e):
            by_service[str(e.get("service", ""))].append(e)
    found = []
    for service, members in by_service.items():
        if any(s["name"] == _READY for e in members for s in _stages(e)):
            first = min(members, key=_began)
            found.append(Start(f"{service}/{first.get('tgid')}/{_began(first)}", service, members))
    return found


def to_spans(start: Start, resource: Resource, offset_ns: int) -> list[ReadableSpan]:
    """Return the spans of a start, the root first.

    Args:
        start: One of `ready`.
        resource: Of the service.
        offset_ns: CLOCK_REALTIME minus CLOCK_MONOTONIC.
    """
    trace_id = _derived(start.key, "trace", 16)

    def span(
        name: str, role: str, at: tuple[int, int], parent: SpanContext | None, **values: Any
    ) -> ReadableSpan:
        context = SpanContext(
            trace_id,
            _derived(start.key, role, 8),
            is_remote=False,
            trace_flags=TraceFlags(TraceFlags.SAMPLED),
        )
        return ReadableSpan(
            name=name,
            context=context,
            parent=parent,
            resource=resource,
            attributes={k.replace("__", "."): v for k, v in values.items() if v not in ("", None)},
            kind=SpanKind.INTERNAL,
            start_time=max(at[0] + offset_ns, 0),
            end_time=max(at[1] + offset_ns, 0),
            instrumentation_scope=_SCOPE,
        )

    begin = min(_began(e) for e in start.engines)
    end = max(_ended(e) for e in start.engines)
    root = span("whyspan.engine.start", "start", (begin, end), None)
    out = [root]
    for e in start.engines:
        tgid, role = int(e.get("tgid") or 0), clean(str(e.get("role", "")), _CHARS)
        process = span(
            "whyspan.engine.process",
            f"process/{tgid}",
            (_began(e), _ended(e)),
            root.context,
            process__pid=tgid,
            whyspan__engine__role=role,
            whyspan__engine__name=clean(str(e.get("engine", "")), _CHARS),
            whyspan__engine__version=clean(str(e.get("version", "")), _CHARS),
        )
        out.append(process)
        for i, s in enumerate(_stages(e)):
            out.append(
                span(
                    f"whyspan.engine.stage.{clean(s['name'], _CHARS)}",
                    f"stage/{tgid}/{i}",
                    _stage_times(e, s),
                    process.context,
                    whyspan__engine__stage__what=clean(str(s.get("what", "")), _CHARS),
                )
            )
    return out[:_MAX_SPANS]


def _stages(e: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    stages = e.get("stages")
    if not isinstance(stages, list):
        return []
    return [s for s in stages if isinstance(s, Mapping) and isinstance(s.get("name"), str)]


def _stage_times(e: Mapping[str, Any], s: Mapping[str, Any]) -> tuple[int, int]:
    begin = int(e.get("stages_from_ns") or 0) + int(float(s.get("at_ms") or 0) * _MS)
    return begin, begin + int(float(s.get("ms") or 0) * _MS)


def _began(e: Mapping[str, Any]) -> int:
    first = min((_stage_times(e, s)[0] for s in _stages(e)), default=0)
    executed = int(e.get("exec_ns") or 0)
    return min(executed, first) if executed else first


def _ended(e: Mapping[str, Any]) -> int:
    return max((_stage_times(e, s)[1] for s in _stages(e)), default=_began(e))


def _derived(key: str, role: str, size: int) -> int:
    digest = hashlib.blake2b(f"{key}/{role}".encode("utf-8", "backslashreplace"), digest_size=size)
    return int.from_bytes(digest.digest(), "big") or 1
