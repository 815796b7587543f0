"""Whether a series is flat: its slope with a confidence interval that knows of neighbours being alike. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

import numpy as np

#: Fewer samples tell nothing. A series with a bend looks as if it had fewer independent ones than it has.
LEAST, LEAST_INDEPENDENT = 60, 4.0
#: Of the series' own size: what is left of a straight line by rounding.
_ROUNDING = 1e-9
_Z = 1.96  # 95% of a normal distribution


class Slope(NamedTuple):
    """Of a line through a series: per hour, with the bounds of its 95% interval; ``noise``: deviation from it."""

    per_hour: float
    low: float
    high: float
    noise: float
    mean: float
    samples: int
    independent: float
    hours: float

    @property
    def flat(self) -> bool:
        """No rise beyond noise: the interval reaches zero, or the rise in all is below the noise, or 0.1%."""
        return self.low <= 0 or self.per_hour * self.hours <= max(self.noise, self.mean / 1000)


def slope(at_s: Sequence[float], values: Sequence[float]) -> Slope | None:
    """Fit a line by least squares; None with too few samples.

    What makes memory breathe (a fault, a batch, a checkpoint) lasts many samples. So many of them as the correlation r
    of neighbouring residuals leaves count as independent: n (1 - r) / (1 + r), as for trends of climate (Santer et al.,
    J. Geophys. Res. 105, 2000). Student's quantile for these by its expansion in the degrees of freedom.
    """
    if len(values) < LEAST:
        return None
    x = (np.asarray(at_s) - at_s[0]) / 3600
    y = np.asarray(values, dtype=float)
    gradient, start = np.polyfit(x, y, 1)
    residuals = y - (gradient * x + start)
    square = float(residuals @ residuals)
    exact = square <= _ROUNDING**2 * float(y @ y)
    r = 0.0 if exact else max(float(residuals[1:] @ residuals[:-1]) / square, 0.0)
    independent = max(len(y) * (1 - r) / (1 + r), LEAST_INDEPENDENT)
    free = independent - 2
    quantile = _Z + (_Z**3 + _Z) / (4 * free)
    wide = quantile * sqrt(square / free / float(((x - x.mean()) ** 2).sum()))
    return Slope(
        per_hour=float(gradient),
        low=float(gradient) - wide,
        high=float(gradient) + wide,
        noise=float(residuals.std()),
        mean=float(y.mean()),
        samples=len(y),
        independent=independent,
        hours=float(x[-1]),
    )
