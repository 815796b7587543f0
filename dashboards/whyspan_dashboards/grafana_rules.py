"""Alert rules as a provisioning file for Grafana."""

from __future__ import annotations

import re
from typing import Any, Final

from whyspan_dashboards.alerts import ALERTS, GROUP, INTERVAL_S, Alert
from whyspan_dashboards.links import RUNBOOKS
from whyspan_dashboards.sources import PROMETHEUS_UID

FOLDER: Final = "whyspan"
# Long enough for the newest point of a series; windows are within the queries.
_LOOK_BACK_S: Final = 600


def rules(runbooks: str = RUNBOOKS) -> dict[str, Any]:
    """Return the provisioning file."""
    rules = [_rule(a, runbooks) for a in ALERTS]
    group = {"orgId": 1, "name": GROUP, "folder": FOLDER, "interval": f"{INTERVAL_S}s", "rules": rules}
    return {"apiVersion": 1, "groups": [group]}


def _rule(alert: Alert, runbooks: str) -> dict[str, Any]:
    return {
        "uid": re.sub(r"(?<!^)([A-Z])", r"-\1", alert.name).lower(),
        "title": alert.name,
        "condition": "C",
        "data": [_query(alert), _threshold(alert)],
        # No such series is no such trouble; that an agent is silent has its own rule.
        "noDataState": "OK",
        "execErrState": "Error",
        "for": alert.for_,
        "annotations": {
            # No `$`: Grafana would look for an environment variable.
            "summary": alert.summary.replace("VALUE", f"{{{{ .Values.A.Value | {alert.form} }}}}"),
            "description": alert.text,
            "runbook_url": f"{runbooks}/{alert.page}.md",
            "__dashboardUid__": alert.board,
        },
        "labels": {"severity": alert.severity},
    }


def _query(alert: Alert) -> dict[str, Any]:
    return {
        "refId": "A",
        "relativeTimeRange": {"from": _LOOK_BACK_S, "to": 0},
        "datasourceUid": PROMETHEUS_UID,
        "model": {"refId": "A", "expr": alert.value, "instant": True, "range": False, "editorMode": "code"},
    }


def _threshold(alert: Alert) -> dict[str, Any]:
    evaluator = {"type": "gt" if alert.op == ">" else "lt", "params": [alert.limit]}
    return {
        "refId": "C",
        "relativeTimeRange": {"from": 0, "to": 0},
        "datasourceUid": "__expr__",
        "model": {
            "refId": "C",
            "type": "threshold",
            "expression": "A",
            "conditions": [{"evaluator": evaluator}],
        },
    }
