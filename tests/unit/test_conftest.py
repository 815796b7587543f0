"""A missing privilege skips with its reason, and fails when its tier is required."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import pytest

from tests import conftest


class FakeItem:
    """As much of a pytest item as the hook looks at."""

    def __init__(self, *markers: str) -> None:
        self.markers = markers

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.markers else None


def set_up(*markers: str) -> None:
    conftest.pytest_runtest_setup(cast(pytest.Item, FakeItem(*markers)))


@pytest.fixture
def unprivileged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.delenv("WHYSPAN_REQUIRE", raising=False)


@pytest.mark.usefixtures("unprivileged")
def test_bpf_skips_without_root() -> None:
    with pytest.raises(pytest.skip.Exception, match="needs root"):
        set_up("bpf")
    set_up()


@pytest.mark.usefixtures("unprivileged")
@pytest.mark.parametrize("required", ["bpf", "engine,bpf", " bpf , engine"])
def test_required_tier_fails(monkeypatch: pytest.MonkeyPatch, required: str) -> None:
    monkeypatch.setenv("WHYSPAN_REQUIRE", required)
    with pytest.raises(pytest.fail.Exception, match="needs root"):
        set_up("bpf")


@pytest.mark.usefixtures("unprivileged")
def test_other_tiers_still_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHYSPAN_REQUIRE", "engine")
    with pytest.raises(pytest.skip.Exception):
        set_up("bpf")


@pytest.mark.usefixtures("unprivileged")
def test_boards_say_what_is_missing_and_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WHYSPAN_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(pytest.skip.Exception, match=r"needs prometheus, .*node.*tests\.boards\.tools"):
        set_up("boards")
    monkeypatch.setenv("WHYSPAN_REQUIRE", "boards")
    with pytest.raises(pytest.fail.Exception, match="WHYSPAN_REQUIRE has boards"):
        set_up("boards")
