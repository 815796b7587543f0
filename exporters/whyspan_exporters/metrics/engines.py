"""Metrics of inference engines: work, batches, KV cache, by service and engine.

Batch size and tokens per step come twice. As means over the last seconds, to be read as they are; and as counters of
batches, of sequences and of tokens in them, whose rates give the exact mean over any time and over any hosts together.
A histogram would say more, but its values would have to cross from the collector one by one, at hundreds a second.
Ratios of tokens are left to the query for the same reason: cached to prompt, recomputed to computed.

Counts are of everything the engine does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from whyspan_exporters.metrics.figures import Figures, engines, number
from whyspan_exporters.metrics.instrument import (
    OTHER,
    OVERFLOW,
    SERVICE,
    Instrument,
    Point,
    Read,
    counter,
    gauge,
    totals,
    updown,
)

_ENGINE: Final = "whyspan.engine.name"
_TEMPLATE: Final = "whyspan.template"
_BOTH: Final = (SERVICE, _ENGINE)


def _counter(name: str, unit: str, description: str, counted: str, scale: float = 1.0) -> Instrument:
    read = totals(f"engine_{counted}", SERVICE, _ENGINE, scale)
    return counter(f"whyspan.engine.{name}", unit, description, read, *_BOTH, whole=scale == 1.0)


def _sum(field: str) -> Read:
    def read(figures: Figures) -> Iterator[Point]:
        for service, engine, e in engines(figures.collector()):
            if (value := number(e.get(field))) is not None:
                yield Point(value, {SERVICE: service, _ENGINE: engine})

    return read


def _mean(field: str) -> Read:
    """The mean over the processes of an engine; the points of one engine would be added up."""

    def read(figures: Figures) -> Iterator[Point]:
        found: dict[tuple[str, str], list[float]] = {}
        for service, engine, e in engines(figures.collector()):
            if (value := number(e.get(field))) is not None:
                found.setdefault((service, engine), []).append(value)
        for (service, engine), values in found.items():
            yield Point(sum(values) / len(values), {SERVICE: service, _ENGINE: engine})

    return read


def _blocks(figures: Figures) -> Iterator[Point]:
    for service, engine, e in engines(figures.collector()):
        blocks = e.get("kv_blocks")
        if not isinstance(blocks, dict):
            continue
        for state in ("used", "cached", "free"):
            if (value := number(blocks.get(state))) is not None:
                yield Point(value, {SERVICE: service, _ENGINE: engine, "whyspan.state": state})


def _frozen(figures: Figures) -> Iterator[Point]:
    for service, engine, e in engines(figures.collector()):
        if (value := number(e.get("frozen_s"))) is not None:
            yield Point((1 if value > 0 else 0), {SERVICE: service, _ENGINE: engine})


def _prompts(figures: Figures) -> Iterator[Point]:
    for service, tag, value in figures.totals("engine_prompts"):
        if (service, tag) == OTHER:
            yield Point(value, {OVERFLOW: True})
        else:
            yield Point(value, {SERVICE: service, _TEMPLATE: tag or "none"})


INSTRUMENTS: Final[tuple[Instrument, ...]] = (
    _counter("step.count", "{step}", "Steps that engine cores made.", "steps"),
    _counter("batch.count", "{batch}", "Steps with something to do.", "batches"),
    _counter("batch.sequences", "{sequence}", "Sequences in these, once for each step.", "sequences"),
    _counter("step.time", "s", "Wall time of steps, each its own stretch.", "step_ns", 1e-9),
    _counter("token.computed", "{token}", "Tokens scheduled, of prompts and of outputs.", "tokens"),
    _counter("token.recomputed", "{token}", "Of these, those computed before a preemption.", "recomputed"),
    _counter("token.prompt", "{token}", "Tokens of prompts queued.", "prompt_tokens"),
    _counter("token.cached", "{token}", "Of these, those found in the prefix cache.", "cached_tokens"),
    _counter("token.output", "{token}", "Tokens generated.", "output_tokens"),
    _counter("preemption.count", "{preemption}", "Sequences that lost their KV blocks.", "preemptions"),
    _counter("kv.evicted", "{block}", "Cached KV blocks overwritten by others.", "evicted_blocks"),
    counter(
        "whyspan.engine.prompt.count",
        "{prompt}",
        "Prompts by the tag of their template, of those allowed; other: not allowed, none: without.",
        _prompts,
        SERVICE,
        _TEMPLATE,
    ),
    updown(
        "whyspan.engine.sequence.running",
        "{sequence}",
        "Sequences in the batch.",
        _sum("running"),
        *_BOTH,
    ),
    updown(
        "whyspan.engine.sequence.waiting",
        "{sequence}",
        "Sequences in the queue.",
        _sum("waiting"),
        *_BOTH,
    ),
    updown(
        "whyspan.engine.sequence.zombie",
        "{sequence}",
        "Sequences at work for clients that have left.",
        _sum("zombies"),
        *_BOTH,
    ),
    gauge(
        "whyspan.engine.kv.utilization",
        "1",
        "Share of the KV pool in use.",
        _mean("kv_usage"),
        *_BOTH,
        whole=False,
    ),
    updown(
        "whyspan.engine.kv.blocks",
        "{block}",
        "KV blocks: used; cached, free but with a prefix that can be found; free.",
        _blocks,
        *_BOTH,
        "whyspan.state",
    ),
    gauge(
        "whyspan.engine.kv.fragmentation",
        "1",
        "Share of the KV blocks given to sequences that no token fills.",
        _mean("fragmentation"),
        *_BOTH,
        whole=False,
    ),
    gauge(
        "whyspan.engine.batch.size",
        "{sequence}",
        "Sequences per step, mean of the last 10 s.",
        _mean("batch"),
        *_BOTH,
        whole=False,
    ),
    gauge(
        "whyspan.engine.step.tokens",
        "{token}",
        "Tokens scheduled per step, mean of the last 10 s.",
        _mean("tokens_per_step"),
        *_BOTH,
        whole=False,
    ),
    gauge(
        "whyspan.engine.frozen",
        "{process}",
        "Engine cores that have work and make no progress.",
        _frozen,
        *_BOTH,
    ),
)
