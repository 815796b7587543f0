"""Alert rules as a rules file for Prometheus (and vmalert)."""

from __future__ import annotations

from typing import Any

from whyspan_dashboards.alerts import ALERTS, GROUP, INTERVAL_S, Alert
from whyspan_dashboards.links import RUNBOOKS


def rules(runbooks: str = RUNBOOKS) -> dict[str, Any]:
    """Return the rules file."""
    rules = [_rule(a, runbooks) for a in ALERTS]
    return {"groups": [{"name": GROUP, "interval": f"{INTERVAL_S}s", "rules": rules}]}


def _rule(alert: Alert, runbooks: str) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": f"({alert.value}) {alert.op} {alert.limit:g}",
        "for": alert.for_,
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": alert.summary.replace("VALUE", f"{{{{ .Value | {alert.form} }}}}"),
            "description": alert.text,
            "runbook_url": f"{runbooks}/{alert.page}.md",
        },
    }
