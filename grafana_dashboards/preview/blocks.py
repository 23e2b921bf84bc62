"""Panels without a time axis: a number, a table, words."""

import math
import re
import textwrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from grafana_dashboards.preview.charts import Found
from grafana_dashboards.preview.style import FAINT, TEXT, limit_color, mapped, say, words_of

_MOST_ROWS = 12


def draw_number(axes: Axes, panel: dict[str, Any], found: list[Found]) -> None:
    """A stat panel."""
    series = [each for query in found for each in query.series]
    value = series[-1].values[-1] if series else math.nan
    defaults = panel["fieldConfig"]["defaults"]
    words = words_of(panel, value)
    if words is None:
        text, color = say(value, defaults["unit"]), limit_color(defaults["thresholds"], value)
    else:
        text, color = words
        if not math.isnan(value) and panel["options"]["colorMode"] == "background":
            axes.add_patch(Rectangle((0, 0), 1, 1, transform=axes.transAxes, color=color, alpha=0.85, linewidth=0))
            color = "white"
    axes.text(0.5, 0.5, text, ha="center", va="center", fontsize=17, color=color, transform=axes.transAxes)
    axes.set_axis_off()


def draw_table(axes: Axes, panel: dict[str, Any], found: list[Found]) -> None:
    """A table: the queries' results, joined by the label that they share."""
    organized = next(each["options"] for each in panel["transformations"] if each["id"] == "organize")
    key = min(organized["indexByName"], key=organized["indexByName"].get)
    looks = {each["matcher"]["options"]: _properties(each) for each in panel["fieldConfig"]["overrides"]}
    columns = [organized["renameByName"][f"Value #{query.ref_id}"] for query in found]
    rows: dict[str, dict[str, float]] = {}
    for column, query in zip(columns, found, strict=True):
        for series in query.series:
            rows.setdefault(series.labels[key], {})[column] = series.values[-1]
    places = [0.0, *(0.16 + 0.84 * place / len(columns) for place in range(len(columns)))]
    for place, name in zip(places, [key, *columns], strict=True):
        _write(axes, place, 0, name, FAINT)
    for line, (name, values) in enumerate(sorted(rows.items())[:_MOST_ROWS], start=1):
        _write(axes, 0.0, line, name, "#5794f2")
        for place, column in zip(places[1:], columns, strict=True):
            if column in values:
                _write(axes, place, line, *_cell(looks[column], values[column]))
    axes.set_axis_off()


def _properties(override: dict[str, Any]) -> dict[str, Any]:
    return {each["id"]: each.get("value") for each in override["properties"]}


def _cell(look: dict[str, Any], value: float) -> tuple[str, str]:
    words = mapped(look.get("mappings", ()), value)
    if words is not None:
        return words
    color = limit_color(look["thresholds"], value) if "thresholds" in look else TEXT
    return say(value, look["unit"]), color


def _write(axes: Axes, place: float, line: int, text: str, color: str) -> None:
    axes.text(place, 0.97 - line / (_MOST_ROWS + 1), text, va="top", fontsize=8, color=color, transform=axes.transAxes)


def draw_text(axes: Axes, panel: dict[str, Any]) -> None:
    """Words, without their markup."""
    words = re.sub(r"\*\*|`|\[(.*?)\]\(.*?\)", r"\1", panel["options"]["content"])
    paragraphs = [" ".join(each.split()) for each in words.split("\n\n")]
    wide = round(axes.get_position().width * 200)
    text = "\n\n".join(textwrap.fill(each, wide) for each in paragraphs)
    axes.text(0, 1, text, va="top", fontsize=7, color=TEXT, transform=axes.transAxes)
    axes.set_axis_off()
