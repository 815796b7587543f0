"""A board: its variables, rows of panels, and the links at its top."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as models

from whyspan_dashboards import links
from whyspan_dashboards.panels import METRICS


def source(name: str, label: str, kind: str) -> dashboard.DatasourceVariable:
    """Return a variable that chooses a data source of *kind*."""
    return dashboard.DatasourceVariable(name).label(label).type(kind).multi(False).include_all(False)


def choice(
    name: str, label: str, query: str, text: str, *, many: bool = True, datasource: Any = METRICS
) -> dashboard.QueryVariable:
    """Return a variable with the values that *query* finds; ``All`` also takes what lacks the label."""
    found = (
        dashboard.QueryVariable(name)
        .label(label)
        .description(text)
        .query({"query": query, "refId": f"variable-{name}"})
        .datasource(datasource)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(many)
        .include_all(many)
    )
    if many:
        found.all_value(".*").current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
    return found


def constant(name: str, value: str) -> dashboard.ConstantVariable:
    """Return a hidden variable with one value."""
    return dashboard.ConstantVariable(name).value(value)


def picked(
    name: str, label: str, values: Sequence[str], text: str, multi: bool = False
) -> dashboard.CustomVariable:
    """Return a variable with fixed values, each ``text : value`` or both in one; the first, or all, are chosen."""
    pairs = [tuple(v.split(" : ")) if " : " in v else (v, v) for v in values]
    options = [
        models.VariableOption(selected=number == 0, text=shown, value=value)
        for number, (shown, value) in enumerate(pairs)
    ]
    found = dashboard.CustomVariable(name).label(label).description(text).values(",".join(values))
    if multi:
        every = models.VariableOption(selected=True, text=["All"], value=["$__all"])
        return found.multi(True).include_all(True).current(every)
    return found.multi(False).include_all(False).options(options).current(options[0])


HOST = (
    "host",
    "Host",
    "label_values(whyspan_collector_up_ratio, host_name)",
    "Host of the agent (host.name).",
)
SERVICE = (
    "service",
    "Service",
    'label_values(whyspan_request_count_total{host_name=~"$host"}, whyspan_service)',
    "Watched service, as [targets] names it.",
)
MODEL = (
    "model",
    "Model",
    'label_values(gen_ai_server_request_duration_seconds_count{whyspan_service=~"$service"}, gen_ai_request_model)',
    "Model that requests are for.",
)


def make(
    uid: str,
    title: str,
    text: str,
    variables: Sequence[Any],
    rows: Sequence[tuple[str, Sequence[Any]]],
    *,
    traces: bool = True,
) -> models.Dashboard:
    """Return a board of *rows* (title, panels); *traces*: some of them ask Tempo."""
    out = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(text)
        .tags([links.TAG])
        .timezone("browser")
        .time("now-1h", "now")
        .refresh("1m")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .readonly()
        .link(links.all_boards())
        .with_variable(source("metrics", "Metrics", "prometheus"))
        .with_variable(constant(links.RUNBOOKS_VARIABLE, links.RUNBOOKS))
    )
    if traces:
        out.with_variable(source("traces", "Traces", "tempo"))
    for variable in variables:
        out.with_variable(variable)
    number = 0
    for name, panels in rows:
        number += 100  # ids stay the same when a row above gets one more panel: alerts and links name them
        out.with_row(dashboard.Row(name).id(number))
        for at, panel in enumerate(panels, 1):
            out.with_panel(panel.id(number + at))
    return out.build()
