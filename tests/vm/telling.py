"""A plugin of pytest for guests: a failure is told when it happens, so that a guest that dies later still said why."""

from __future__ import annotations

import pytest

_CHARS = 4000


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print the end of a failure's text, or how long a test took."""
    if report.failed:
        print(f"\n{report.nodeid}, {report.when}:\n{report.longreprtext[-_CHARS:]}", flush=True)
    elif report.when == "call":
        print(f"({report.duration:.1f} s) ", end="", flush=True)
