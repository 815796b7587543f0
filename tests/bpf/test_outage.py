"""The outage drill in small: a receiver away under load, two kills, a full disk, and nothing lost."""

from __future__ import annotations

import pytest

from tests.bench import outage
from tests.unit.receivers import RECEIVERS


@pytest.mark.parametrize("protocol", list(RECEIVERS))
def test_an_outage_loses_nothing(protocol: str) -> None:
    with outage.own_disk(64) as folder:
        figures = outage.outage(folder, protocol, seconds=8, rate=50)
    assert figures["lost"] == figures["out_of_order"] == 0
    assert "disk full" in figures["full_disk_said"]


def test_beyond_the_bound_losses_are_exact() -> None:
    with outage.own_disk(64) as folder:
        figures = outage.beyond_the_bound(folder, "http/protobuf", findings=9000)
    assert figures["bound_dropped"] > 0
