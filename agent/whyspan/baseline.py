"""What is usual: time per cause and latency of ordinary requests, per service and size class."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from whyspan.latency import latency_ms, ttft_ms, waited_in_vain
from whyspan.model import FAILED, Request

#: Ordinary requests of a class before its figures are used.
MIN_COUNT: Final = 50
#: Ordinary requests kept per class, the latest.
RESERVOIR: Final = 512
MAX_CLASSES: Final = 1024
#: Without any figure to go by, a failed request that waited so long for its first byte is taken to be slow.
WAITED_MS: Final = 1000.0
#: In the reason of a request that is slow only with the time before it arrived.
BY_SENDER: Final = "by its sender's clock"
#: Greatest move of a figure per hour, as a share of it.
MAX_MOVE_PER_HOUR: Final = 0.05

_REFRESH_EVERY: Final = 16
_HOUR_NS: Final = 3_600_000_000_000
_MS: Final = 1_000_000
_VERSION: Final = 1


class Objectives(Protocol):
    """Limits in ms; 0 means none."""

    @property
    def ttft_ms(self) -> float:
        """Limit on the time to the first byte."""

    @property
    def e2e_ms(self) -> float:
        """Limit on the whole request."""


class Usual(NamedTuple):
    """The figures of a class, in ms; ``requests`` counts the ordinary ones seen so far.

    ``causes`` maps to (median, spread), spread being the median absolute deviation; ``ttft_causes`` is the
    same up to the first byte.
    """

    requests: int
    latency_median: float
    latency_p99: float
    ttft_median: float
    ttft_p99: float
    causes: dict[str, tuple[float, float]]
    ttft_causes: dict[str, tuple[float, float]]


class _Sample(NamedTuple):
    latency: float
    ttft: float  # -1: no first byte
    causes: dict[str, float]
    ttft_causes: dict[str, float]


class _Class:
    """One size class: a reservoir, and published figures that follow it slowly."""

    def __init__(self) -> None:
        self.count = 0
        self.samples: deque[_Sample] = deque(maxlen=RESERVOIR)
        self.usual: dict[str, float] = {}
        self._published: Usual | None = None
        self.moved_ns: int | None = None  # when the figures last moved; None right after a restart

    def add(self, sample: _Sample, now_ns: int) -> None:
        self.count += 1
        self.samples.append(sample)
        if self.count == MIN_COUNT or (self.count > MIN_COUNT and not self.usual):
            self.usual = self._figures()
            self.moved_ns = now_ns
        elif self.count > MIN_COUNT and self.count % _REFRESH_EVERY == 0:
            self._move(now_ns)

    def _move(self, now_ns: int) -> None:
        last, self.moved_ns = self.moved_ns, now_ns
        if last is None or now_ns <= last:  # the clock began anew: no credit for time not seen
            return
        # Compounds to the same in an hour, however many steps it is taken in.
        share = (1 + MAX_MOVE_PER_HOUR) ** min((now_ns - last) / _HOUR_NS, 1.0) - 1
        # A figure near zero would never move by a share of itself: its step is a share of the latency.
        scale = self.usual["latency_median"]
        target = self._figures()
        for key in sorted(target.keys() | self.usual.keys()):
            old, new = self.usual.get(key, 0.0), target.get(key, 0.0)
            step = share * max(abs(old), scale)
            self.usual[key] = min(max(new, old - step), old + step)

    def _figures(self) -> dict[str, float]:
        latency = np.array([s.latency for s in self.samples])
        ttft = np.array([s.ttft for s in self.samples if s.ttft >= 0] or [0.0])
        figures = {
            "latency_median": float(np.median(latency)),
            "latency_p99": float(np.percentile(latency, 99)),
            "ttft_median": float(np.median(ttft)),
            "ttft_p99": float(np.percentile(ttft, 99)),
        }
        for prefix, maps in (
            ("causes", [s.causes for s in self.samples]),
            ("ttft_causes", [s.ttft_causes for s in self.samples]),
        ):
            for cause in sorted({c for m in maps for c in m}):
                ms = np.array([m.get(cause, 0.0) for m in maps])
                median = float(np.median(ms))
                figures[f"{prefix}:{cause}:median"] = median
                figures[f"{prefix}:{cause}:spread"] = float(np.median(np.abs(ms - median)))
        return figures

    def published(self) -> Usual | None:
        if not self.usual:
            return None
        if self._published is None or self._published.requests != self.count:
            self._published = self._publish()
        return self._published

    def _publish(self) -> Usual:
        u = self.usual
        maps: dict[str, dict[str, tuple[float, float]]] = {"causes": {}, "ttft_causes": {}}
        for key, value in u.items():
            if key.endswith(":median"):
                prefix, cause, _ = key.split(":")
                maps[prefix][cause] = (value, u.get(f"{prefix}:{cause}:spread", 0.0))
        return Usual(
            self.count,
            u["latency_median"],
            u["latency_p99"],
            u["ttft_median"],
            u["ttft_p99"],
            maps["causes"],
            maps["ttft_causes"],
        )


class _Model(NamedTuple):
    """The identity of a service's model, and since when another is seen in its place."""

    identity: dict[str, str]
    other_since_ns: int = 0


class Baseline:
    """The usual figures of every class seen; the class used longest ago goes when there are too many.

    Figures appear with the 50th ordinary request of a class. From then on each follows the latest 512, but in
    an hour moves by at most 5% of itself (of the median latency, where that is more): a lasting fault
    that stays under the limits of :meth:`is_slow` is learnt over days, not minutes. The clock is the
    requests' own end times; hours without requests, or across a restart, give no credit beyond one hour.
    """

    def __init__(self) -> None:
        self._classes: OrderedDict[str, _Class] = OrderedDict()
        self._like: dict[tuple[str, bool], str] = {}  # of failed requests: the class that measures them
        self._models: dict[str, _Model] = {}

    def observe(
        self,
        request: Request,
        causes_ms: Mapping[str, float],
        ttft_causes_ms: Mapping[str, float] | None = None,
    ) -> bool:
        """Take in an ordinary request; return whether it counted.

        Failed requests and those slow for their class are refused. A request over a configured objective is
        the caller's to hold back.

        Args:
            request: A finished request.
            causes_ms: Its time per cause.
            ttft_causes_ms: The same up to its first byte, when known.
        """
        if request.outcome != "ok" or request.status >= 400 or self._slow_here(request, None) is not None:
            return False
        key = class_of(request)
        found = self._classes.get(key)
        if found is None:
            found = self._classes[key] = _Class()
            if len(self._classes) > MAX_CLASSES:
                self._classes.popitem(last=False)
        self._classes.move_to_end(key)
        sample = _Sample(latency_ms(request), ttft_ms(request), dict(causes_ms), dict(ttft_causes_ms or {}))
        found.add(sample, request.end_ns)
        if found.count == MIN_COUNT:
            self._like.clear()
        return True

    def model(self, service: str) -> dict[str, str]:
        """Return the identity of the model that the service's figures were learnt on; empty when not known."""
        found = self._models.get(service)
        return found.identity if found is not None else {}

    def observe_model(self, service: str, identity: Mapping[str, str], now_ns: int) -> None:
        """Take in what a service's engine says of its model. Another one takes its place after an hour."""
        found = self._models.get(service)
        if not identity or (found is not None and found.identity == identity and not found.other_since_ns):
            return
        if found is None or found.identity == identity:
            if found is None and len(self._models) >= MAX_CLASSES:
                return
            self._models[service] = _Model(dict(identity))
        elif not found.other_since_ns or now_ns < found.other_since_ns:
            self._models[service] = found._replace(other_since_ns=max(now_ns, 1))
        elif now_ns - found.other_since_ns > _HOUR_NS:
            self._models[service] = _Model(dict(identity))

    def usual(self, request: Request) -> Usual | None:
        """Return the figures of the request's class, or None until it has 50 ordinary requests.

        A failed request is measured by a class with at least as many chunks when its own has no figures: what it
        would have become is not known, and a part takes no longer than the whole.
        """
        key = class_of(request)
        found = self._classes.get(key)
        usual = found.published() if found is not None else None
        if request.outcome not in FAILED or (usual is not None and not waited_in_vain(request)):
            return usual
        memo = key, waited_in_vain(request)
        if memo not in self._like:
            if len(self._like) > MAX_CLASSES:
                self._like.clear()
            self._like[memo] = self._nearest(*memo)
        found = self._classes.get(self._like[memo])
        return found.published() if found is not None else None

    def _nearest(self, key: str, waited: bool) -> str:
        """Return the class that measures a failed request of class *key*; empty when there is none.

        One that ended without a byte is held against the class with the latest first byte; any other against the
        next larger one.
        """
        service, chunks, size = key.rsplit("|", 2)
        found: list[tuple[bool, float, str]] = []
        for other, c in self._classes.items():
            usual = c.published()
            name, more, like = other.rsplit("|", 2)
            if usual is not None and name == service and int(more) >= int(chunks):
                found.append((like != size, -usual.ttft_median if waited else int(more), other))
        return min(found)[2] if found else ""

    def is_slow(self, request: Request, objectives: Objectives | None) -> str | None:
        """Return why a request counts as slow, or None.

        Slow is over a configured objective; without one, above its class's 99th percentile and twice its
        median. A failed request with neither to go by is slow when its first byte took, or would have taken, more
        than a second. The reason begins with ``ttft`` or ``latency``, the phase it is about.

        A request that was in time here may have waited with its sender: it is slow to whoever asked, by what its
        sender says of its start, and the reason says so.
        """
        return self._slow_here(request, objectives) or self._slow_before(request, objectives)

    def _slow_before(self, request: Request, objectives: Objectives | None) -> str | None:
        waited, ttft = request.client_wait_ns / _MS, ttft_ms(request)
        if waited <= 0 or request.outcome in FAILED:
            return None
        usual = self.usual(request)
        for name, value, limit, p99, median in (
            (
                "ttft",
                ttft + waited if ttft >= 0 else -1.0,
                objectives.ttft_ms if objectives else 0,
                usual.ttft_p99 if usual else 0,
                usual.ttft_median if usual else 0,
            ),
            (
                "latency",
                latency_ms(request) + waited,
                objectives.e2e_ms if objectives else 0,
                usual.latency_p99 if usual else 0,
                usual.latency_median if usual else 0,
            ),
        ):
            how = f"{name} {value:.0f} ms {BY_SENDER}, {waited:.0f} ms of it before it arrived"
            if limit and value > limit:
                return f"{how}, over the objective of {limit:g} ms"
            if not limit and value > p99 and value > 2 * median > 0:
                return f"{how}, above its class's P99 of {p99:.0f} ms and twice the median of {median:.0f} ms"
        return None

    def _slow_here(self, request: Request, objectives: Objectives | None) -> str | None:
        latency, ttft = latency_ms(request), ttft_ms(request)
        if objectives is not None:
            for name, value, limit in (
                ("ttft", ttft, objectives.ttft_ms),
                ("latency", latency, objectives.e2e_ms),
            ):
                if limit and value > limit:
                    return f"{name} {value:.0f} ms over the objective of {limit:g} ms"
        usual = self.usual(request)
        if usual is None:
            limited = objectives is not None and (objectives.ttft_ms or objectives.e2e_ms)
            if request.outcome in FAILED and not limited and ttft > WAITED_MS:
                return f"ttft {ttft:.0f} ms of a failed request, and no baseline yet"
            return None
        for name, value, p99, median, limit in (
            ("ttft", ttft, usual.ttft_p99, usual.ttft_median, objectives.ttft_ms if objectives else 0),
            (
                "latency",
                latency,
                usual.latency_p99,
                usual.latency_median,
                objectives.e2e_ms if objectives else 0,
            ),
        ):
            if not limit and value > p99 and value > 2 * median > 0:
                measure = f"P99 of {p99:.0f} ms and twice the median of {median:.0f} ms"
                return f"{name} {value:.0f} ms above its class's {measure}"
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-compatible values."""
        return {
            "version": _VERSION,
            "classes": {
                key: {"count": c.count, "usual": c.usual, "samples": [list(s) for s in c.samples]}
                for key, c in self._classes.items()
            },
            "models": {service: m.identity for service, m in self._models.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Baseline:
        """Return the baseline that :meth:`to_dict` described; an empty one if of another version."""
        made = cls()
        if data.get("version") != _VERSION:
            return made
        for key, item in data["classes"].items():
            c = made._classes[key] = _Class()
            c.count = int(item["count"])
            c.usual = dict(item["usual"])
            c.samples.extend(_Sample(*s) for s in item["samples"])
        for service, identity in data.get("models", {}).items():
            made._models[service] = _Model({str(k): str(v) for k, v in identity.items()})
        return made


def class_of(request: Request) -> str:
    """Return the size class: the service, and response chunks and request bytes in powers of four."""
    return f"{request.service}|{_bucket(request.chunks)}|{_bucket(request.request_bytes)}"


def _bucket(n: int) -> int:
    return (max(n, 0).bit_length() + 1) // 2
