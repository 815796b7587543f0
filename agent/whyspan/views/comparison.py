"""The shapes of a comparison. Types only, no behaviour."""

from __future__ import annotations

import msgspec

from whyspan.views.resample import Interval


class Metric(msgspec.Struct, kw_only=True, frozen=True):
    """A figure of both sides, and by how much B's is above A's. ``unit``: ms or ratio (0..1)."""

    key: str
    label: str
    unit: str
    a: Interval
    b: Interval
    change: Interval


class CauseChange(msgspec.Struct, kw_only=True, frozen=True):
    """The time of a mean request that went into a cause, in ms. ``p`` is corrected for the number of causes."""

    cause: str
    a_ms: float
    b_ms: float
    change: Interval
    p: float
    state: str  # worse, better, same


class Gate(msgspec.Struct, kw_only=True, frozen=True):
    """Whether a figure got worse by more than allowed.

    ``state``: ``worse`` (by more than the limit, and the interval excludes no change), ``ok`` (the interval is within
    the limit), ``unclear`` (neither).
    """

    key: str
    label: str
    unit: str
    limit: float
    change: Interval
    state: str


class Side(msgspec.Struct, kw_only=True, frozen=True):
    """The requests of one side. ``stands_for``: the requests that ended, as far as they are known; else ``stored``."""

    selector: str
    stored: int
    stands_for: float
    slow: int  # of the stored
    failed: int
    first_unix_ms: float
    last_unix_ms: float


class CompareView(msgspec.Struct, kw_only=True, frozen=True):
    """``weighted``: figures are of all requests, else of those in the store, of which too many are slow."""

    a: Side
    b: Side
    weighted: bool
    too_few: str  # what there is too little of; empty: nothing
    metrics: list[Metric]
    causes: list[CauseChange]  # greatest change first
    gates: list[Gate]
