"""Panels: one function per kind, each with a title, a description, a unit, queries and a runbook page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    table,
    tempo,
)
from grafana_foundation_sdk.builders import timeseries as ts
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from grafana_foundation_sdk.models.tempo import SearchTableType

from whyspan_dashboards import links

METRICS: Final = common_models.DataSourceRef(type_val="prometheus", uid="${metrics}")
TRACES: Final = common_models.DataSourceRef(type_val="tempo", uid="${traces}")
#: Of a curve. A panel has some 500 pixels; more would only make a day of a fleet dear to ask for.
MAX_POINTS: Final = 240

#: (from this value on, this colour), the first from -infinity.
Steps = Sequence[tuple[float | None, str]]
BLUE: Final[Steps] = ((None, "blue"),)


class Query(NamedTuple):
    """One PromQL query; its legend may name labels as ``{{label}}``."""

    expr: str
    legend: str = ""
    exemplar: bool = False


class Look(NamedTuple):
    """What most panels share. ``page`` is the runbook's, ``more`` are data links (title, board, variables)."""

    title: str
    text: str
    unit: str
    page: str
    span: int = 8
    height: int = 8
    steps: Steps = BLUE
    more: Sequence[tuple[str, str, str]] = ()
    least: float | None = 0
    most: float | None = None
    repeat: str = ""


def above(orange: float, red: float) -> Steps:
    """Return steps for what is bad when it is high."""
    return ((None, "green"), (orange, "orange"), (red, "red"))


def below(orange: float, red: float) -> Steps:
    """Return steps for what is bad when it is low."""
    return ((None, "red"), (red, "orange"), (orange, "green"))


def thresholds(steps: Steps) -> dashboard.ThresholdsConfig:
    """Return *steps* as Grafana has them."""
    found = [models.Threshold(value=value, color=colour) for value, colour in steps]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(found)


def _targets(
    panel: Any, queries: Sequence[Query], *, instant: bool = False, form: PromQueryFormat | None = None
) -> None:
    for number, q in enumerate(queries):
        target = prometheus.Dataquery().ref_id(chr(ord("A") + number)).datasource(METRICS).expr(q.expr)
        target = target.instant() if instant else target.range()
        if q.legend:
            target.legend_format(q.legend)
        if q.exemplar:
            target.exemplar(True)
        if form is not None:
            target.format(form)
        panel.with_target(target)


def _dress(panel: Any, look: Look, source: common_models.DataSourceRef = METRICS) -> Any:
    panel.title(look.title).description(look.text).datasource(source).links([links.runbook(look.page)])
    panel.span(look.span).height(look.height).unit(look.unit).thresholds(thresholds(look.steps))
    if look.least is not None:
        panel.min(look.least)
    if look.most is not None:
        panel.max(look.most)
    if look.more:
        panel.data_links([links.board(*more) for more in look.more])
    if look.repeat:
        panel.repeat(look.repeat).repeat_direction("h").max_per_row(3)
    return panel


def lines(look: Look, *queries: Query, stacked: bool = False) -> ts.Panel:
    """Return curves over time; a threshold is drawn as a dashed line."""
    panel = _dress(ts.Panel().max_data_points(MAX_POINTS), look)
    _targets(panel, queries)
    panel.line_width(1).fill_opacity(40 if stacked else 8).show_points(common_models.VisibilityMode.NEVER)
    legend = common.VizLegendOptions().show_legend(True).placement(common_models.LegendPlacement.BOTTOM)
    panel.legend(legend.display_mode(common_models.LegendDisplayMode.LIST).calcs([]))
    tooltip = common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI)
    panel.tooltip(tooltip.sort(common_models.SortOrder.DESCENDING))
    if stacked:
        panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
    if len(look.steps) > 1:
        style = common.GraphThresholdsStyleConfig().mode(common_models.GraphThresholdsStyleMode.DASHED)
        panel.thresholds_style(style)
    return panel  # type: ignore[no-any-return]


def number(look: Look, *queries: Query) -> stat.Panel:
    """Return the newest value of each series, large and coloured."""
    panel = _dress(stat.Panel(), look)
    _targets(panel, queries, instant=True)
    panel.color_mode(common_models.BigValueColorMode.BACKGROUND)
    panel.graph_mode(common_models.BigValueGraphMode.NONE)
    panel.text_mode(common_models.BigValueTextMode.AUTO)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    return panel  # type: ignore[no-any-return]


def bars(look: Look, *queries: Query) -> bargauge.Panel:
    """Return one horizontal bar per series, for the whole range."""
    panel = _dress(bargauge.Panel(), look)
    _targets(panel, queries, instant=True)
    panel.orientation(common_models.VizOrientation.HORIZONTAL)
    panel.display_mode(common_models.BarGaugeDisplayMode.BASIC)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    return panel  # type: ignore[no-any-return]


def _table() -> table.Panel:
    return table.Panel().align(common_models.FieldTextAlignment.AUTO).inspect(False)


def rows(look: Look, query: Query, columns: dict[str, str]) -> table.Panel:
    """Return a table, one row per series, highest value first; *columns* names labels and ``Value``."""
    panel = _dress(_table(), look)
    _targets(panel, (query,), instant=True, form=PromQueryFormat.TABLE)
    order = {name: at for at, name in enumerate(columns)}
    options = {"excludeByName": {"Time": True}, "indexByName": order, "renameByName": columns}
    keep = {"include": {"names": list(columns)}}
    panel.with_transformation(models.DataTransformerConfig(id_val="filterFieldsByName", options=keep))
    panel.with_transformation(models.DataTransformerConfig(id_val="organize", options=options))
    panel.sort_by([common.TableSortByFieldState().display_name(columns["Value"]).desc(True)])
    return panel  # type: ignore[no-any-return]


def heat(look: Look, query: Query) -> heatmap.Panel:
    """Return a histogram over time."""
    linear = common.ScaleDistributionConfig().type(common_models.ScaleDistribution.LINEAR)
    panel = _dress(heatmap.Panel().scale_distribution(linear).max_data_points(MAX_POINTS), look)
    _targets(panel, (query,), form=PromQueryFormat.HEATMAP)
    panel.calculate(False).y_axis(heatmap.YAxisConfig().unit(look.unit))
    panel.color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges").steps(64))
    return panel  # type: ignore[no-any-return]


def traces(look: Look, query: str, *, spans: bool = False) -> table.Panel:
    """Return the newest traces that TraceQL finds; a click opens one."""
    panel = _dress(_table(), look, TRACES)
    target = tempo.TempoQuery().ref_id("A").datasource(TRACES).query_type("traceql").query(query).limit(50)
    panel.with_target(target.table_type(SearchTableType.SPANS if spans else SearchTableType.TRACES))
    return panel  # type: ignore[no-any-return]


def trace_lines(look: Look, query: str) -> ts.Panel:
    """Return curves of a TraceQL metrics query (Tempo 2.4 or newer)."""
    panel = _dress(ts.Panel().line_width(1).max_data_points(MAX_POINTS), look, TRACES)
    panel.with_target(
        tempo.TempoQuery().ref_id("A").datasource(TRACES).query_type("traceql").query(query).limit(50)
    )
    return panel  # type: ignore[no-any-return]
