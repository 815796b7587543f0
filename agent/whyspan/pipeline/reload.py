"""A reload of the collector: what is new is read, and taken over by the parts that it concerns."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from whyspan_exporters.client import Client
from whyspan_probes.governor import Budget, Governor

from whyspan.config import Config
from whyspan.engine import Engine
from whyspan.pipeline.bursts import Bursts
from whyspan.pipeline.explain_budget import ExplainBudget
from whyspan.pipeline.feeds import Feeds
from whyspan.pipeline.settings import engine_settings
from whyspan.pipeline.source import LiveSource
from whyspan.reloading import Changes, changes

log = logging.getLogger("whyspan.collector")

_BUDGETS = frozenset(("collector.budget_core_ratio", "collector.budget_target_ratio"))


class Parts(NamedTuple):
    """What of a collector goes by the configuration."""

    source: LiveSource
    engine: Engine
    feeds: Feeds
    bursts: Bursts
    budget: ExplainBudget
    governor: Governor
    client: Client


def read(load: Callable[[], Config], old: Config) -> tuple[Config, Changes]:
    """Read the configuration and compare it with *old*; what only a start can take over stays as it was.

    Raises:
        WhyspanError: It is wrong.
    """
    new = load()
    found = changes(old, new)
    if found.restart:
        log.warning("%s: taken over at the next start", ", ".join(found.restart))
    return msgspec.structs.replace(new, run=old.run), found


def rebudgeted(found: Changes) -> bool:
    """Whether the limits of what probes may cost have changed."""
    return not _BUDGETS.isdisjoint(found.live)


def apply(config: Config, found: Changes, parts: Parts) -> None:
    """Have the parts go by *config*. Only those that something has changed for: others keep what they have counted."""
    c, keys = config.collector, frozenset(found.live)
    sections = {key.partition(".")[0] for key in keys}
    if keys & _BUDGETS:
        parts.governor.rebudget(Budget(c.budget_core_ratio, c.budget_target_ratio))
    if "collector.explain_core_ratio" in keys:
        parts.budget.reconfigure(c.explain_core_ratio)
    if sections & {"slo", "collector"}:
        parts.engine.reconfigure(engine_settings(config.slo, c, parts.client.instance))
    if "collector.header_allow" in keys:
        parts.source.allow_headers(c.header_allow)
    if "collector.stall_ms" in keys:
        parts.source.snapshots.stall_ms = c.stall_ms
    if "collector.queue_findings" in keys:
        parts.client.resize(c.queue_findings)
    if "feeds" in sections:
        parts.feeds.reconfigure(config.feeds)
    if "burst" in sections:
        parts.bursts.reconfigure(config.burst)
    if "targets" in sections:
        parts.engine.unwatched(parts.source.retarget(config.targets))
