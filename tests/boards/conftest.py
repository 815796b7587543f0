"""The tier ``boards``: what needs Prometheus, VictoriaMetrics and Node.js is skipped, with the reason, without them."""

from __future__ import annotations

import pytest

from tests.boards import tools


@pytest.fixture(scope="session")
def grammar() -> list[str]:
    """The command line that judges TraceQL; queries go in as a JSON list."""
    node, modules = tools.node(), tools.grammar()
    assert node is not None and modules is not None  # the tier's marker has seen to it
    return [str(node), str(tools.SCRIPT), str(modules)]


@pytest.fixture(scope="session")
def promtool() -> str:
    """Debian's promtool."""
    found = tools.program("promtool")
    assert found is not None
    return str(found)
