"""The look of values: colours, words, limits, and what sets the series of one query apart."""

from collections.abc import Sequence
from typing import Any, Literal

from grafana_foundation_sdk.builders.common import VizLegendOptions
from grafana_foundation_sdk.builders.dashboard import FieldColor, ThresholdsConfig
from grafana_foundation_sdk.models import common, dashboard

from grafana_dashboards.queries import Query

NO_VALUE = "no value"

Words = dict[int, tuple[str, str]]
UP: Words = {0: ("down", "red"), 1: ("up", "green")}
OPEN: Words = {0: ("none", "green"), 1: ("open", "red")}
SEVERITIES: Words = {1: ("info", "blue"), 2: ("warning", "orange"), 3: ("critical", "red")}


def series_look(query: Query) -> list[dashboard.DynamicConfigValue]:
    """What sets the series of one query apart from the panel's own look."""
    properties = []
    if query.color is not None:
        properties.append(set_property("color", {"mode": "fixed", "fixedColor": query.color}))
    match query.style:
        case "thin":
            properties.append(set_property("custom.lineStyle", {"fill": "solid"}))
            properties.append(set_property("custom.lineWidth", 0.5))
        case "dashed":
            properties.append(set_property("custom.lineStyle", {"fill": "dash", "dash": [6, 4]}))
        case "points":
            properties += [set_property("custom.drawStyle", "points"), set_property("custom.pointSize", 4)]
            properties.append(set_property("custom.showPoints", "always"))
        case "bars":
            properties += [set_property("custom.drawStyle", "bars"), set_property("custom.fillOpacity", 70)]
        case "hidden":
            properties.append(set_property("custom.lineWidth", 0))
        case "line":
            pass
    if query.down_to is not None:
        properties += [set_property("custom.fillBelowTo", query.down_to), set_property("custom.fillOpacity", 25)]
    if query.right_unit is not None:
        properties += [set_property("custom.axisPlacement", "right"), set_property("unit", query.right_unit)]
    return properties


def set_property(name: str, value: Any) -> dashboard.DynamicConfigValue:  # noqa: ANN401 - each has its own type
    """One of the properties that an override changes."""
    return dashboard.DynamicConfigValue(id_val=name, value=value)


def cell(kind: Literal["color-background", "color-text"]) -> dashboard.DynamicConfigValue:
    """A table's cell in the colour of its value."""
    return set_property("custom.cellOptions", {"type": kind})


def limit_steps(limits: Sequence[float], *, calm: str = "green") -> ThresholdsConfig:
    """Red from each limit on."""
    steps = [dashboard.Threshold(value=None, color=calm)]
    steps += [dashboard.Threshold(value=limit, color="red") for limit in limits]
    return ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps)


def color(mode: dashboard.FieldColorModeId) -> FieldColor:
    """How series get their colours."""
    return FieldColor().mode(mode)


def legend() -> VizLegendOptions:
    """Names below the picture."""
    shown = VizLegendOptions().show_legend(True).display_mode(common.LegendDisplayMode.LIST)
    return shown.placement(common.LegendPlacement.BOTTOM)


def mappings(words: Words) -> list[dashboard.ValueMapping]:
    """What values are called; what is not there or NaN is none."""
    named = {
        str(value): dashboard.ValueMappingResult(text=text, color=color, index=value)
        for value, (text, color) in words.items()
    }
    nothing = dashboard.ValueMappingResult(text=NO_VALUE, color="text", index=len(named))
    special = dashboard.SpecialValueMap(
        dashboard.DashboardSpecialValueMapOptions(match=dashboard.SpecialValueMatch.NULL_AND_NAN, result=nothing)
    )
    return [dashboard.ValueMap(named), special] if named else [special]
