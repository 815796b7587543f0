"""A session of probes under test: attach, watch, drain, look at what came."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from whyspan.heads import HeadAssembler
from whyspan.model import Batch, HttpHead
from whyspan_probes.kernel_btf import KernelBtf
from whyspan_probes.loader import Session
from whyspan_probes.registry import Found
from whyspan_probes.rings import RowBuffer
from whyspan_probes.schema import EVENT, Events, Schema
from whyspan_probes.state import HEALTHY, ProbeState

from tests.bpf.waiting import DEADLINE_S, until


class Watcher:
    """Everything drained so far is kept: ``events``, ``heads`` and the raw ``blobs`` they came in."""

    def __init__(
        self,
        found: Iterable[Found],
        *,
        ring_bytes: int = 4 << 20,
        config: Mapping[str, Mapping[str, int]] | None = None,
        may_fail: bool = False,
        kernel: KernelBtf | None = None,
    ) -> None:
        self.session = Session(found, ring_bytes, kernel)
        try:
            self.session.attach(config)
            if not may_fail:
                for state in self.states.values():
                    assert state.state in HEALTHY, f"{state.name}: {state.state}, {state.reason}"
            self.schema = Schema(self.session.event_types())
        except BaseException:
            self.session.close()
            raise
        self.events: Events = np.empty(0, dtype=EVENT)
        self.heads: list[HttpHead] = []
        self.blobs: list[bytes] = []
        self._assembler = HeadAssembler(["x-request-id"])

    @property
    def states(self) -> dict[str, ProbeState]:
        """The states of the probes by name."""
        return {p.state.name: p.state for p in self.session.probes}

    def watch(self, *tgids: int) -> None:
        """Add processes to the watched set."""
        for tgid in tgids:
            self.session.maps.watch(tgid, 0)

    def drain(self) -> Batch:
        """Take what has arrived, keep it and return it."""
        rows = RowBuffer()
        for ring in self.session.maps.rings:
            ring.drain(rows)
        events = rows.take()
        blobs = self.session.maps.blobs.drain()
        heads = self._assembler.feed(blobs)
        self.blobs += blobs
        self.heads += heads
        self.events = np.concatenate([self.events, events])
        return Batch(int(events["ts_ns"][-1]) if len(events) else 0, events, heads)

    def rows(self, name: str, **equal: int) -> Events:
        """Drain, and return the events of a kind whose fields have these values, in order of time."""
        self.drain()
        rows = self.schema.select(self.events, name)
        for field, value in equal.items():
            rows = rows[rows[field] == value]
        return rows[np.argsort(rows["ts_ns"], kind="stable")]

    def count(self, name: str, **equal: int) -> int:
        """How many such events have come."""
        return len(self.rows(name, **equal))

    def wait(self, condition: Callable[[], Any], what: str, timeout_s: float = DEADLINE_S) -> Any:
        """Drain until the condition holds."""

        def drained() -> Any:
            self.drain()
            return condition()

        return until(drained, what, timeout_s)

    def drops(self, name: str) -> list[int]:
        """Records of a kind that found their ring full, for each CPU."""
        return self.session.maps.drops.read(self.schema.kind(name))

    def dropped(self) -> int:
        """Records of all kinds that found their ring full."""
        return sum(sum(self.drops(name)) for name in self.schema.types)

    def close(self) -> None:
        """Detach everything."""
        self.session.close()
