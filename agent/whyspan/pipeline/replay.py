"""Feeds a recording to the core."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from whyspan.baseline import Baseline
from whyspan.config import Collector, Slo
from whyspan.engine import Engine
from whyspan.errors import RecordingError
from whyspan.model import Finding
from whyspan.pipeline.settings import engine_settings
from whyspan.recording import Reader


class Replayed(NamedTuple):
    """What a recording yields. ``torn`` tells where it was damaged, empty when it was whole."""

    findings: list[Finding]
    batches: int
    events: int
    torn: str


def replay(path: Path, progress: Callable[[float], None] = lambda _: None) -> Replayed:
    """Run the core on a recording.

    Args:
        path: The recording.
        progress: Told after each batch how much of the file is read, 0..1.

    Raises:
        RecordingError: it cannot be read at all.
    """
    reader = Reader(path)
    try:
        try:
            slo = msgspec.convert(reader.header.settings.get("slo", {}), Slo)
            collector = msgspec.convert(reader.header.settings.get("collector", {}), Collector)
            baseline = Baseline.from_dict(reader.header.baseline)
        except (msgspec.ValidationError, KeyError, TypeError, ValueError) as e:
            raise RecordingError(f"{path}: settings of another whyspan: {e}") from e
        settings = engine_settings(slo, collector, reader.header.instance)
        engine = Engine(reader.schema, settings, baseline)
        findings: list[Finding] = []
        batches = events = now_ns = 0
        for batch in reader.batches():
            findings += engine.feed(batch)
            batches += 1
            events += len(batch.events)
            now_ns = batch.now_ns
            progress(reader.read_ratio())
        findings += engine.flush(now_ns)
        return Replayed(findings, batches, events, reader.torn)
    finally:
        reader.close()
