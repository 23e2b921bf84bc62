"""A whole dashboard as one picture: its panels where Grafana puts them."""

import io
import re
from datetime import UTC, datetime
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from grafana_dashboards.preview import blocks, charts
from grafana_dashboards.preview.charts import Event, Found
from grafana_dashboards.preview.source import Prometheus, Series, View
from grafana_dashboards.preview.style import BACKGROUND, FAINT, PANEL, TEXT

_COLUMNS = 24
_WIDTH_INCHES, _ROW_INCHES, _HEAD_ROWS = 14.0, 0.34, 1.6
_DPI = 80
# The room around a panel's picture, in inches: left, right, top, bottom.
_ROOM = {
    "timeseries": (0.56, 0.12, 0.32, 0.6),
    "state-timeline": (1.6, 0.12, 0.3, 0.42),
    "heatmap": (0.85, 0.4, 0.3, 0.24),
}
_LITTLE_ROOM = (0.1, 0.1, 0.28, 0.08)


def draw(dashboard: dict[str, Any], source: Prometheus, view: View) -> bytes:
    """The dashboard as PNG.

    Raises:
        ValueError: a query is refused, or asks for a variable that is not there.
        OSError: Prometheus does not answer.
    """
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"])
    height = (rows + _HEAD_ROWS) * _ROW_INCHES
    figure = Figure(figsize=(_WIDTH_INCHES, height), facecolor=BACKGROUND, dpi=_DPI)
    _write_head(figure, dashboard, view)
    events = _events(dashboard, source, view)
    for panel in dashboard["panels"]:
        _draw_panel(figure, panel, source, view, events)
    drawn, out = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", facecolor=BACKGROUND)
    # Few colours make a small file, and nobody sees it.
    with Image.open(drawn) as image:
        few = image.convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        few.save(out, format="png", optimize=True)
    return out.getvalue()


def find(panel: dict[str, Any], source: Prometheus, view: View) -> list[Found]:
    """What the queries of a panel find, each with the look that the panel gives it."""
    found = []
    for target in panel.get("targets", ()):
        series = (source.at_end if target.get("instant") else source.over)(target["expr"], view)
        names = [_name(target["legendFormat"], each) for each in series]
        look: dict[str, Any] = {}
        for override in panel["fieldConfig"]["overrides"]:
            if override["matcher"] == {"id": "byFrameRefID", "options": target["refId"]}:
                look |= {each["id"]: each["value"] for each in override["properties"]}
        found.append(Found(ref_id=target["refId"], series=series, names=names, properties=look))
    return found


def _name(pattern: str, series: Series) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda label: series.labels.get(label[1], ""), pattern)


def _events(dashboard: dict[str, Any], source: Prometheus, view: View) -> list[Event]:
    """The dashboard's annotations; points that lie side by side are one, as Grafana has it."""
    events = []
    for annotation in dashboard.get("annotations", {}).get("list", ()):
        for series in source.over(annotation["expr"], view):
            times = [time for time, value in zip(series.times, series.values, strict=True) if value > 0]
            start = None
            for number, time in enumerate(times):
                start = time if start is None else start
                if number + 1 == len(times) or times[number + 1] - time > max(60.0, view.step):
                    events.append(Event(start=start, end=time, color=annotation["iconColor"]))
                    start = None
    return events


def _write_head(figure: Figure, dashboard: dict[str, Any], view: View) -> None:
    chosen = ", ".join(f"{name}: {value}" for name, value in view.variables.items() if value != ".+")
    start, end = (f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S}" for time in (view.start, view.end))
    top = 1 - 0.25 / figure.get_figheight()
    figure.text(0.008, top, dashboard["title"], fontsize=13, color=TEXT, va="center", weight="bold")
    figure.text(0.992, top, f"{chosen}    {start} to {end} UTC", fontsize=8.5, color=FAINT, va="center", ha="right")


def _draw_panel(figure: Figure, panel: dict[str, Any], source: Prometheus, view: View, events: list[Event]) -> None:
    left, top, width, height = _place(panel["gridPos"])
    if panel["type"] == "row":
        _write_inches(
            figure, left, top + 0.5 * height, ("▸ " if panel["collapsed"] else "") + panel["title"], size=10.5
        )
        return
    gap = 0.04
    corner = (left + gap, top + gap)
    figure.add_artist(_rectangle(figure, *corner, width - 2 * gap, height - 2 * gap))
    _write_inches(figure, left + 0.12, top + 0.17, panel["title"], size=8.5)
    room = _ROOM.get(panel["type"], _LITTLE_ROOM)
    if panel["type"] == "timeseries" and "custom.axisPlacement" in [each["id"] for each in _overridden(panel)]:
        room = (room[0], 0.5, *room[2:])
    axes = _axes(figure, left + room[0], top + room[2], width - room[0] - room[1], height - room[2] - room[3])
    if panel["type"] == "text":
        blocks.draw_text(axes, panel)
        return
    found = find(panel, source, view)
    match panel["type"]:
        case "timeseries":
            charts.draw_lines(axes, panel, found, view, events)
        case "state-timeline":
            charts.draw_states(axes, panel, found, view)
        case "heatmap":
            charts.draw_heat(axes, found, view)
        case "stat":
            blocks.draw_number(axes, panel, found)
        case "table":
            blocks.draw_table(axes, panel, found)
    if panel["type"] != "stat" and not any(query.series for query in found):
        axes.text(0.5, 0.5, "no data", ha="center", va="center", color=FAINT, fontsize=9, transform=axes.transAxes)


def _overridden(panel: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for override in panel["fieldConfig"]["overrides"] for each in override["properties"]]


def _place(grid: dict[str, int]) -> tuple[float, float, float, float]:
    """Left, top (from above), width and height in inches."""
    column = _WIDTH_INCHES / _COLUMNS
    top = (grid["y"] + _HEAD_ROWS) * _ROW_INCHES
    return grid["x"] * column, top, grid["w"] * column, grid["h"] * _ROW_INCHES


def _axes(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    return figure.add_axes(_box(figure, left, top, width, height))


def _rectangle(figure: Figure, left: float, top: float, width: float, height: float) -> Rectangle:
    x, y, wide, high = _box(figure, left, top, width, height)
    return Rectangle((x, y), wide, high, transform=figure.transFigure, facecolor=PANEL, edgecolor="#25272d", zorder=-1)


def _box(figure: Figure, left: float, top: float, width: float, height: float) -> tuple[float, float, float, float]:
    wide, high = figure.get_size_inches()
    return left / wide, 1 - (top + height) / high, width / wide, height / high


def _write_inches(figure: Figure, left: float, top: float, text: str, *, size: float) -> None:
    wide, high = figure.get_size_inches()
    figure.text(left / wide, 1 - top / high, text, fontsize=size, color=TEXT, va="center", weight="normal")
