"""The builds that the tests of this tier look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.package.builds import Built, build, snapshot


@pytest.fixture(scope="session")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This tree as it is now."""
    return snapshot(tmp_path_factory.mktemp("origin"))


@pytest.fixture(scope="session")
def built(origin: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """One build of it."""
    return build(origin, tmp_path_factory.mktemp("one") / "whyspan")


@pytest.fixture(scope="session")
def elsewhere(origin: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The same in another folder, whose name is of another length."""
    return build(origin, tmp_path_factory.mktemp("another") / "deeper/and/longer/tree")
