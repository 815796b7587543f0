"""A small store, and the application on it without a server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from whyspan.page.app import build
from whyspan.page.settings import Settings

from tests.unit import viewlab

Client = Callable[..., TestClient]


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> viewlab.Written:
    """A store with 30 requests, those of hostile names, and the host."""
    return viewlab.build(tmp_path_factory.mktemp("small") / "s.db", 30, hours=0.05, evil=True)


@pytest.fixture
def client(small: viewlab.Written) -> Client:
    """Return clients of the application: ``client(token="...", prefix="/x")``; ``store`` names another one."""

    def make(store: Path = small.path, **settings: Any) -> TestClient:
        app = build(Settings(store=store, **settings))
        return TestClient(
            app, base_url="http://localhost:9466", raise_server_exceptions=False, follow_redirects=False
        )

    return make
