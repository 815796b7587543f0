"""How a span of time is cut into the steps of a chart."""

from __future__ import annotations

from typing import Final, NamedTuple

from whyspan_exporters.recall import finest_step_ns

from whyspan.views.shapes import MAX_POINTS

_S: Final = 1_000_000_000
#: Steps that people read easily, in s.
_NICE: Final = (10, 30, 60, 300, 900, 1800, 3600, 10_800, 21_600, 86_400)
#: Steps of a chart when nobody says how long they are.
_POINTS: Final = 120
_DEFAULT_NS: Final = 3600 * _S


class Steps(NamedTuple):
    """Equal steps from ``since_unix_ns`` on; ``number`` of them."""

    since_unix_ns: int
    step_ns: int
    number: int

    @property
    def until_unix_ns(self) -> int:
        """When the last one ends."""
        return self.since_unix_ns + self.number * self.step_ns

    @property
    def times_unix_ms(self) -> list[float]:
        """When each begins."""
        return [(self.since_unix_ns + i * self.step_ns) / 1e6 for i in range(self.number)]


def steps(since_unix_ns: int, until_unix_ns: int, now_unix_ns: int, step_ns: int = 0) -> Steps:
    """Return the steps that cover a span of time, aligned to whole multiples of a step; at most `MAX_POINTS`.

    Args:
        since_unix_ns: The beginning; 0: an hour before the end.
        until_unix_ns: The end; 0, or in the future: now.
        now_unix_ns: The wall clock.
        step_ns: How long a step is, longer where nothing finer is known or they would be too many; 0 chooses.
    """
    until = min(until_unix_ns or now_unix_ns, now_unix_ns)
    since = max(min(since_unix_ns or until - _DEFAULT_NS, until - 1), 0)
    finest = finest_step_ns(since, now_unix_ns)
    least = max(finest, step_ns, -(-(until - since) // ((MAX_POINTS if step_ns else _POINTS) - 1)))
    step = next(
        (nice * _S for nice in _NICE if nice * _S >= least), -(-least // (_NICE[-1] * _S)) * _NICE[-1] * _S
    )
    since = since // step * step
    return Steps(since, step, max(1, min(-(-(until - since) // step), MAX_POINTS)))
