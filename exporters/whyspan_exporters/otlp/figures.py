"""The agent's own figures, as the collector's counts and states told them last. Thread-safe, bounded."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from whyspan.model import FAILED, UNKNOWN
from whyspan.text import clean

from whyspan_exporters.records import EXPORTER, Counts, Explained, Status

Key = tuple[str, str, str]  # name, service, label

_MAX_INSTANCES: Final = 8
_MAX_KEYS: Final = 2000
_LABEL_CHARS: Final = 64
_MAX_PROBES: Final = 64
_MAX_ENGINES: Final = 64
_OF_FINDINGS: Final = frozenset(("findings", "finding_input_tokens", "finding_output_tokens"))
#: A collector that has said nothing for so long is taken for gone.
FRESH_S: Final = 30.0


class Totals:
    """Totals over all collectors that ever connected: one that restarts begins at 0 again, this does not."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._ended: dict[Key, float] = {}
        self._running: OrderedDict[str, dict[Key, float]] = OrderedDict()

    def put(self, instance: str, values: Mapping[Key, float]) -> None:
        """Take the newest totals of *instance*."""
        self._running.setdefault(instance, {}).update(values)
        self._running.move_to_end(instance)
        while len(self._running) > _MAX_INSTANCES:
            _, last = self._running.popitem(last=False)
            _add(self._ended, last)

    def all(self) -> dict[Key, float]:
        """Return the sums, at most some 2,000 of them; more are added up under the label ``other``."""
        out: dict[Key, float] = {}
        for values in (self._ended, *self._running.values()):
            _add(out, values)
        return out


def _add(out: dict[Key, float], values: Mapping[Key, float]) -> None:
    for key, value in values.items():
        known = key if key in out or len(out) < _MAX_KEYS else (key[0], "", "other")
        out[known] = out.get(known, 0.0) + value


class Figures:
    """What the metrics report. Values come from another process: anything that is no number counts as absent."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        """Begin with nothing known; *now_s* is a clock in s."""
        self._now_s = now_s
        self._lock = threading.Lock()
        self._totals = Totals()
        self._findings: dict[Key, float] = {}
        self._collector: dict[str, Any] = {}
        self._collector_at_s = float("-inf")
        self._exporter: dict[str, Any] = {}

    def add(self, record: Explained | Counts | Status) -> None:
        """Take in what the collector, or the exporter itself, says."""
        with self._lock:
            if isinstance(record, Explained):
                f = record.finding
                # A failure may have a cause although it came at once.
                ended = f.request.outcome in FAILED and f.verdict.cause != UNKNOWN
                cause = f.verdict.cause if f.slow or ended else "none"
                service = _label(f.request.service)
                _add(self._findings, {("findings", service, _label(cause)): 1.0})
                if f.engine is not None and f.request.outcome != "open":  # it comes again when it has ended
                    tag = _label(f.engine.template)
                    _add(self._findings, {("finding_input_tokens", service, tag): f.engine.prompt_tokens})
                    _add(self._findings, {("finding_output_tokens", service, tag): f.engine.output_tokens})
            elif isinstance(record, Counts):
                values = {(c.name, _label(c.service), _label(c.label)): float(c.value) for c in record.counts}
                self._totals.put(record.instance, values)
            elif record.instance == EXPORTER:
                self._exporter = record.status
            else:
                self._collector, self._collector_at_s = record.status, self._now_s()
                self._totals.put(record.instance, _status_totals(record.status))

    def totals(self, name: str) -> list[tuple[str, str, float]]:
        """Return (service, label, total) of everything counted as *name*."""
        with self._lock:
            everything = self._findings if name in _OF_FINDINGS else self._totals.all()
            return [(service, label, v) for (n, service, label), v in everything.items() if n == name]

    def collector(self) -> dict[str, Any]:
        """Return the collector's last state; empty when it has gone."""
        with self._lock:
            return self._collector if self._now_s() - self._collector_at_s < FRESH_S else {}

    def exporter(self) -> dict[str, Any]:
        """Return the exporter's last state."""
        with self._lock:
            return self._exporter


def number(value: Any) -> float | None:
    """Return *value* as a finite number; None when it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def probes(status: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Yield the probes of a collector's state by name, a bounded number of them."""
    found = status.get("probes", ())
    for p in found[:_MAX_PROBES] if isinstance(found, list) else ():
        if isinstance(p, dict) and isinstance(p.get("name"), str):
            yield _label(p["name"]), p


def engines(status: Mapping[str, Any]) -> Iterable[tuple[str, str, Mapping[str, Any]]]:
    """Yield (service, engine, what it says) of a collector's state, a bounded number of them, none that ended."""
    found = status.get("engines", ())
    for e in found[:_MAX_ENGINES] if isinstance(found, list) else ():
        if isinstance(e, dict) and e.get("state") != "ended":
            service, engine = e.get("service"), e.get("engine")
            if isinstance(service, str) and isinstance(engine, str):
                yield _label(service), _label(engine), e


def _status_totals(status: Mapping[str, Any]) -> dict[Key, float]:
    # What the state says since the start of its process: these restart with it, like the counts.
    out: dict[Key, float] = {}
    for name, probe in probes(status):
        for field in ("events", "drops", "missed"):
            if (value := number(probe.get(field))) is not None:
                out[f"probe_{field}", "", name] = value
    for field in ("cpu_s", "findings_dropped"):
        if (value := number(status.get(field))) is not None:
            out[field, "", ""] = value
    return out


def _label(text: str) -> str:
    return clean(text, _LABEL_CHARS)
