"""Every generated file and its text; the same input gives the same bytes."""

from __future__ import annotations

import json
from typing import Any, Final

import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from whyspan_dashboards import agent, grafana_rules, host, kv, links, prometheus_rules, service, sources, tail

BOARDS: Final = (tail, service, host, kv, agent)
_HEAD: Final = "# Made by dashboards/generate.py: edit dashboards/whyspan_dashboards, then run it.\n"


def generated(runbooks: str = links.RUNBOOKS) -> dict[str, str]:
    """Return the text of each file, by its path below ``dashboards/``."""
    out = {}
    for number, module in enumerate(BOARDS, 1):
        name = module.UID.removeprefix("whyspan-")
        out[f"grafana/boards/{number}-{name}.json"] = _json(module.make(), runbooks)
    provisioning = "grafana/provisioning"
    out[f"{provisioning}/datasources/whyspan.yaml"] = _yaml(sources.datasources())
    out[f"{provisioning}/dashboards/whyspan.yaml"] = _yaml(sources.boards())
    out[f"{provisioning}/alerting/whyspan.yaml"] = _yaml(grafana_rules.rules(runbooks))
    out["prometheus/whyspan.rules.yml"] = _yaml(prometheus_rules.rules(runbooks))
    return out


def _json(board: Dashboard, runbooks: str) -> str:
    text = json.dumps(board, cls=JSONEncoder, indent=2, sort_keys=True, ensure_ascii=False)
    return text.replace(links.RUNBOOKS, runbooks) + "\n"


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _yaml(data: dict[str, Any]) -> str:
    return _HEAD + yaml.dump(data, Dumper=_Plain, sort_keys=False, width=10_000, allow_unicode=True)
