"""The committed boards, rules and provisioning, and their queries as Grafana would send them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from tests.demo.procs import ROOT

FOLDER: Final = ROOT / "dashboards"
GRAFANA: Final = FOLDER / "grafana"
RULES: Final = FOLDER / "prometheus" / "whyspan.rules.yml"
RUNBOOKS: Final = ROOT / "docs" / "runbooks"

#: Metrics of hardware that this machine lacks. Queries that read one of them may be empty, and must be.
NEEDS_HARDWARE: Final = frozenset(
    {
        "hw_gpu_utilization_ratio",
        "hw_gpu_memory_utilization_ratio",
        "hw_gpu_memory_usage_bytes",
        "hw_gpu_memory_limit_bytes",
        "whyspan_gpu_fragmentation_ratio",
    }
)
_METRIC: Final = re.compile(r"\b(?:whyspan|gen_ai|hw)_[a-z0-9_]+(?=[{\[) ,])")
_BUCKETS: Final = re.compile(r"_(bucket|count|sum)$")


class Query(NamedTuple):
    """One query: where it stands, its language (promql, traceql), its text as Grafana would send it."""

    where: str
    language: str
    text: str
    legend: str = ""


def boards() -> dict[str, Any]:
    """Return the boards' JSON, by the name of the file."""
    found = sorted((GRAFANA / "boards").glob("*.json"))
    return {p.name: json.loads(p.read_text(encoding="utf-8")) for p in found}


def provisioning(kind: str) -> Any:
    """Return a provisioning file of Grafana: datasources, dashboards, alerting."""
    return yaml.safe_load((GRAFANA / "provisioning" / kind / "whyspan.yaml").read_text(encoding="utf-8"))


def rules() -> list[dict[str, Any]]:
    """Return Prometheus' alert rules."""
    loaded = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    return [rule for group in loaded["groups"] for rule in group["rules"]]


def panels(board: Any) -> Iterator[Any]:
    """Yield the panels of a board, no rows."""
    for panel in board["panels"]:
        if panel["type"] == "row":
            yield from panel.get("panels") or ()
        else:
            yield panel


def fill(text: str, board: Any, values: dict[str, str] | None = None) -> str:
    """Return *text* with the variables of *board* as they are when the board opens, or as *values* has them."""
    known = {"__rate_interval": "1m", "__range": "10m", **(values or {})}
    for variable in board["templating"]["list"]:
        known.setdefault(variable["name"], _value(variable))
    for name in sorted(known, key=len, reverse=True):
        text = text.replace(f"${{{name}}}", known[name]).replace(f"${name}", known[name])
    return text


def _value(variable: Any) -> str:
    if variable.get("includeAll"):
        if variable.get("allValue"):
            return str(variable["allValue"])
        return "|".join(str(variable["query"]).split(","))
    current = variable.get("current") or {}
    value = current.get("value") or ".*"
    return str(value[0] if isinstance(value, list) else value)


def panel_queries(values: dict[str, str] | None = None) -> list[Query]:
    """Return the queries of all panels."""
    out = []
    for name, board in boards().items():
        for panel in panels(board):
            for target in panel["targets"]:
                where = f"{name}: {panel['title']} {target['refId']}"
                language = "traceql" if "query" in target else "promql"
                text = fill(target.get("expr") or target["query"], board, values)
                out.append(Query(where, language, text, target.get("legendFormat", "")))
    return out


def instant_places() -> set[str]:
    """Return where the queries stand that ask for one time only."""
    return {
        f"{name}: {panel['title']} {target['refId']}"
        for name, board in boards().items()
        for panel in panels(board)
        for target in panel["targets"]
        if target.get("instant")
    }


def max_points() -> int:
    """Return how many points a curve of any panel may have at most."""
    return max(int(p.get("maxDataPoints", 0)) for board in boards().values() for p in panels(board))


def exemplar_queries() -> list[Query]:
    """Return the queries of panels that show exemplars."""
    out = []
    for name, board in boards().items():
        for panel in panels(board):
            for target in panel["targets"]:
                if target.get("exemplar"):
                    where = f"{name}: {panel['title']} {target['refId']}"
                    out.append(Query(where, "promql", fill(target["expr"], board)))
    return out


def link_queries() -> list[Query]:
    """Return the queries by which Grafana goes from a trace to metrics, for a span of any service and host."""
    tempo = next(d for d in provisioning("datasources")["datasources"] if d["type"] == "tempo")
    linked = tempo["jsonData"]["tracesToMetrics"]
    tags = ", ".join(f'{tag["value"]}=~".+"' for tag in linked["tags"])
    return [
        Query(f"trace to metrics: {q['name']}", "promql", q["query"].replace("$$__tags", tags))
        for q in linked["queries"]
    ]


def alert_queries() -> list[Query]:
    """Return what Grafana's alert rules evaluate before they compare it."""
    groups = provisioning("alerting")["groups"]
    return [
        Query(f"alert {rule['title']}", "promql", rule["data"][0]["model"]["expr"])
        for group in groups
        for rule in group["rules"]
    ]


def variable_queries() -> list[Query]:
    """Return what fills the boards' variables, as the series that must exist."""
    out = []
    for name, board in boards().items():
        for variable in board["templating"]["list"]:
            if variable["type"] != "query":
                continue
            text = fill(variable["query"]["query"], board)
            found = re.fullmatch(r"label_values\((.+), ([a-z_]+)\)", text)
            assert found, text
            query = f"count by ({found[2]}) ({found[1]})"
            out.append(Query(f"{name}: variable {variable['name']}", "promql", query, f"{{{{{found[2]}}}}}"))
    return out


def promql() -> list[Query]:
    """Return every PromQL query there is."""
    found = [q for q in panel_queries() if q.language == "promql"]
    return [*found, *link_queries(), *alert_queries(), *variable_queries()]


def traceql() -> list[Query]:
    """Return every TraceQL query there is."""
    return [q for q in panel_queries() if q.language == "traceql"]


def metrics_of(query: str) -> set[str]:
    """Return the metrics that a PromQL query reads, histograms by their base name."""
    bare = re.sub(
        r'"[^"]*"', '""', re.sub(r"\b(?:by|on|ignoring|group_left|group_right) \([^)]*\)", " ", query)
    )
    bare = re.sub(r"\{[^}]*\}", "{", bare)
    return {_BUCKETS.sub("", name) if name.startswith("gen_ai") else name for name in _METRIC.findall(bare)}


def needs_hardware(query: str) -> bool:
    """Whether *query* reads a metric of hardware that this machine lacks."""
    return bool(metrics_of(query) & NEEDS_HARDWARE)


def label_names(legend: str) -> list[str]:
    """Return the labels that a legend shows."""
    return re.findall(r"\{\{(\w+)\}\}", legend)


def anchors(page: Path) -> set[str]:
    """Return the sections of a Markdown page, as links name them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-") for head in heads}
