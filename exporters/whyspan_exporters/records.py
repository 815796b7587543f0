"""What the exporter process hands to its sinks."""

from __future__ import annotations

from typing import Any, NamedTuple

from whyspan.model import Finding

from whyspan_exporters.link import Count

#: The instance of `Status` records that the exporter makes about itself; collectors have random ones.
EXPORTER = "exporter"


class Explained(NamedTuple):
    """A finding with its identity and its wall-clock start.

    ``id`` (collector instance, connection, request number) is the same when a finding is sent again.
    """

    id: str
    start_unix_ns: int
    finding: Finding


class Counts(NamedTuple):
    """Totals since the collector *instance* started."""

    instance: str
    counts: list[Count]


class Status(NamedTuple):
    """The newest state of the collector *instance*, or of the exporter itself, JSON-like."""

    instance: str
    status: dict[str, Any]


Record = Explained | Counts | Status


def finding_id(instance: str, finding: Finding) -> str:
    """Return the identity of *finding*: unique over collectors, stable over resends."""
    return f"{instance}-{finding.request.cookie:x}-{finding.request.seq:x}"
