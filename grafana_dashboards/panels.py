"""The shared look: what becomes of queries and limits in each kind of panel."""

import zlib
from collections.abc import Sequence
from typing import TypeVar

from grafana_foundation_sdk.builders import heatmap, prometheus, stat, statetimeline, table, text, timeseries
from grafana_foundation_sdk.builders.common import (
    GraphThresholdsStyleConfig,
    ReduceDataOptions,
    ScaleDistributionConfig,
    VizTooltipOptions,
)
from grafana_foundation_sdk.builders.dashboard import DashboardLink, Row
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode, HeatmapColorScale
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from grafana_dashboards.look import (
    NO_VALUE,
    Words,
    cell,
    color,
    legend,
    limit_steps,
    mappings,
    series_look,
    set_property,
)
from grafana_dashboards.queries import Query

DATASOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")
RUNBOOK_UID = "guard-runbook"
_REF_IDS = "ABCDEFGHIJ"

Panel = timeseries.Panel | stat.Panel | statetimeline.Panel | heatmap.Panel | table.Panel
Part = Panel | text.Panel | Row
AnyPanel = TypeVar("AnyPanel", timeseries.Panel, stat.Panel, statetimeline.Panel, heatmap.Panel, table.Panel)


def lines(
    title: str,
    text: str,
    *queries: Query,
    unit: str,
    width: int = 12,
    height: int = 8,
    limits: Sequence[float] = (),
    alerts: Sequence[str] = (),
    log: bool = False,
    least: float | None = None,
    most: float | None = None,
) -> timeseries.Panel:
    """Series over time.

    Args:
        title: a few words.
        text: what the panel shows, and what is good or bad.
        queries: what is drawn.
        unit: Grafana's name of the unit.
        width: of 24 columns.
        height: in rows of Grafana's grid.
        limits: values from which on a rule says that it is bad.
        alerts: the alerts of these limits, to whose pages the panel links.
        log: whether the axis is logarithmic.
        least: the bottom of the axis.
        most: the top of the axis.
    """
    panel = _dress(timeseries.Panel(), title, text, width=width, height=height, alerts=alerts).unit(unit)
    panel.thresholds(limit_steps(limits)).color_scheme(color(dashboard.FieldColorModeId.PALETTE_CLASSIC))
    panel.thresholds_style(
        GraphThresholdsStyleConfig().mode(
            common.GraphThresholdsStyleMode.DASHED if limits else common.GraphThresholdsStyleMode.OFF
        )
    )
    panel.line_width(1).fill_opacity(0).show_points(common.VisibilityMode.NEVER).span_nulls(False)
    panel.legend(legend()).tooltip(
        VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING)
    )
    if log:
        panel.scale_distribution(ScaleDistributionConfig().type(common.ScaleDistribution.LOG).log(10))
    if least is not None:
        panel.min(least)
    if most is not None:
        panel.axis_soft_max(most)
    for ref_id, query in zip(_REF_IDS, queries, strict=False):
        panel.with_target(_target(query, ref_id))
        if properties := series_look(query):
            panel.override_by_query(ref_id, properties)
    return panel


def number(
    title: str,
    text: str,
    expr: str,
    *,
    unit: str = "none",
    words: Words | None = None,
    limits: Sequence[float] = (),
    alerts: Sequence[str] = (),
    width: int = 4,
) -> stat.Panel:
    """The value at the end of what is shown, by an instant query: one of a dead run is no value.

    So is one that is NaN, and in no colour: green would be a lie.
    """
    panel = _dress(stat.Panel(), title, text, width=width, height=4, alerts=alerts).unit(unit).no_value(NO_VALUE)
    panel.mappings(mappings(words or {})).thresholds(limit_steps(limits, calm="green" if limits else "text"))
    panel.color_mode(common.BigValueColorMode.BACKGROUND if words else common.BigValueColorMode.VALUE)
    panel.graph_mode(common.BigValueGraphMode.NONE).text_mode(common.BigValueTextMode.VALUE)
    panel.reduce_options(ReduceDataOptions().calcs(["last"]))
    return panel.with_target(_target(Query(expr=expr, legend=title), "A", instant=True))


def states(
    title: str, text: str, *queries: Query, words: Words, width: int = 24, height: int = 8, alerts: Sequence[str] = ()
) -> statetimeline.Panel:
    """A band of colour for each series, by what its values are called."""
    panel = _dress(statetimeline.Panel(), title, text, width=width, height=height, alerts=alerts).no_value(NO_VALUE)
    panel.unit("none").mappings(mappings(words)).thresholds(limit_steps((), calm="transparent"))
    panel.color_scheme(color(dashboard.FieldColorModeId.THRESHOLDS))
    panel.show_value(common.VisibilityMode.NEVER).row_height(0.8).fill_opacity(80).merge_values(True)
    panel.legend(legend()).tooltip(VizTooltipOptions().mode(common.TooltipDisplayMode.SINGLE))
    for ref_id, query in zip(_REF_IDS, queries, strict=False):
        panel.with_target(_target(query, ref_id))
    return panel


def heat(title: str, text: str, query: Query, *, alerts: Sequence[str] = (), height: int = 9) -> heatmap.Panel:
    """One row for each series, its values as colours."""
    panel = _dress(heatmap.Panel(), title, text, width=24, height=height, alerts=alerts).calculate(False).cell_gap(0)
    color = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Turbo")
    panel.color(color.scale(HeatmapColorScale.LINEAR).steps(64))
    # Grafana hides cells of 0 and less unless it is told otherwise.
    panel.filter_values(heatmap.FilterValueRange().le(-1e9))
    return panel.with_target(_target(query, "A"))


def rows(
    title: str,
    text: str,
    columns: dict[str, str],
    *,
    units: dict[str, str],
    words: dict[str, Words],
    limits: dict[str, float],
    link: tuple[str, str],
    key: str,
    alerts: Sequence[str],
    height: int = 8,
) -> table.Panel:
    """One row for each value of the label `key`, and a column for each query, in this order.

    Args:
        title: a few words.
        text: what the panel shows.
        columns: an instant query for each column.
        units: Grafana's unit, by column.
        words: what values are called, by column.
        limits: from which value on a column is bad.
        link: title and address of where a row leads to.
        key: the label by which the queries' results belong together.
        alerts: the alerts of the limits.
        height: in rows of Grafana's grid.
    """
    panel = _dress(table.Panel(), title, text, width=24, height=height, alerts=alerts).no_value("").unit("none")
    panel.mappings(mappings({}))
    names = dict(zip(columns, _REF_IDS, strict=False))
    for name, ref_id in names.items():
        panel.with_target(
            _target(Query(expr=columns[name], legend=name), ref_id, instant=True).format(PromQueryFormat.TABLE)
        )
    panel.with_transformation(dashboard.DataTransformerConfig(id_val="merge", options={}))
    order = [key, *(f"Value #{ref_id}" for ref_id in names.values())]
    panel.with_transformation(
        dashboard.DataTransformerConfig(
            id_val="organize",
            options={
                "excludeByName": {"Time": True},
                "indexByName": {name: place for place, name in enumerate(order)},
                "renameByName": {f"Value #{ref_id}": name for name, ref_id in names.items()},
            },
        )
    )
    panel.override_by_name(key, [set_property("links", [{"title": link[0], "url": link[1]}])])
    for name in columns:
        properties = [set_property("unit", units.get(name, "none"))]
        if name in words:
            properties += [set_property("mappings", mappings(words[name])), cell("color-background")]
        if name in limits:
            properties += [set_property("thresholds", limit_steps((limits[name],)).build()), cell("color-text")]
        panel.override_by_name(name, properties)
    return panel


def section(title: str, *folded: Panel) -> Row:
    """A heading over the panels that follow; or, given panels, one that shows them when it is clicked."""
    row = Row(title)
    for panel in folded:
        row.with_panel(panel)
    return row


def _dress(panel: AnyPanel, title: str, text: str, *, width: int, height: int, alerts: Sequence[str]) -> AnyPanel:
    panel.title(title).description(text).datasource(DATASOURCE).span(width).height(height)
    if alerts:
        panel.links([runbook_link(alert) for alert in alerts])
    return panel


def runbook_link(alert: str) -> Builder[dashboard.DashboardLink]:
    """To the alert's panel in the dashboard that shows the runbook."""
    link = DashboardLink(f"Runbook: {alert}").type(dashboard.DashboardLinkType.LINK)
    return link.url(f"/d/{RUNBOOK_UID}?viewPanel={runbook_panel_id(alert)}")


def runbook_panel_id(alert: str) -> int:
    """A number that follows from the alert's name alone: no link changes when the runbook gets another chapter."""
    return 1000 + zlib.crc32(alert.encode()) % 1_000_000


def _target(query: Query, ref_id: str, *, instant: bool = False) -> prometheus.Dataquery:
    target = prometheus.Dataquery().datasource(DATASOURCE).ref_id(ref_id)
    target.expr(query.expr).legend_format(query.legend)
    return target.instant() if instant else target.range()
