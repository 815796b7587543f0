"""How many requests each stored one stands for: the store keeps nearly all slow ones and few ordinary ones. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from whyspan.latency import latency_ms
from whyspan.outcome import error_type
from whyspan.tally import ASK, bucket
from whyspan.views.select import Measured

_FAILED, _SLOW, _ORDINARY = "failed", "slow", "ordinary"
_ASKED: Final = "asked"  # health checks and the like, which no histogram counts


class Totals(NamedTuple):
    """How many requests of a service ended, explained or not; by bucket of `tally.BOUNDS_S`, and the failed ones."""

    latency: Sequence[int]
    failed: int


def weights(requests: Sequence[Measured], totals: Mapping[str, Totals]) -> NDArray[np.float64]:
    """Return how many requests each stands for: the store has nearly all slow ones and few ordinary ones.

    In every bucket of latency the slow ones stand for themselves, and the ordinary ones for all others that ended. What
    a selector leaves out is taken to be no different: of each kind, the stored ones are a fair sample.
    """
    strata = [_stratum(m) for m in requests]
    stored = Counter(strata)
    failed: Counter[str] = Counter()
    for stratum, count in stored.items():
        failed[stratum.service] += count * (stratum.kind == _FAILED)
    each = {
        stratum: _stands_for(stratum, stored, failed[stratum.service], totals.get(stratum.service))
        for stratum in stored
    }
    return np.array([each[stratum] for stratum in strata], dtype=np.float64)


def _stands_for(stratum: _Stratum, stored: Counter[_Stratum], failed: int, total: Totals | None) -> float:
    if total is None or stratum.kind == _ASKED:
        return 1.0
    each_failed = max(total.failed / failed, 1.0) if failed else 1.0
    if stratum.kind == _FAILED:
        return each_failed
    slow, ordinary, bad = (stored[stratum._replace(kind=kind)] for kind in (_SLOW, _ORDINARY, _FAILED))
    answered = total.latency[stratum.bucket] - bad * each_failed
    if not ordinary:
        return max(answered / slow, 1.0)
    return max((answered - slow) / ordinary, 1.0) if stratum.kind == _ORDINARY else 1.0


class _Stratum(NamedTuple):
    service: str
    bucket: int  # of latency
    kind: str


def _stratum(m: Measured) -> _Stratum:
    r = m.request
    kind = _ASKED if r.method in ASK else _FAILED if error_type(r) else _SLOW if m.slow else _ORDINARY
    return _Stratum(r.service, bucket(latency_ms(r) / 1e3), kind)
