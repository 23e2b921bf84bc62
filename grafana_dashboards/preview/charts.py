"""Panels with a time axis: lines, bars, bands of states, and rows of colours."""

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from matplotlib import dates
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter

from grafana_dashboards.preview.source import Series, View
from grafana_dashboards.preview.style import FAINT, GRID, TEXT, color_of, palette, say, words_of

_LETTERS_AN_INCH = 18


@dataclass(frozen=True, kw_only=True)
class Found:
    """One query's series and the properties that its look changes."""

    ref_id: str
    series: list[Series]
    names: list[str]
    properties: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Event:
    """One annotation: a stretch of time (Unix seconds) and its colour."""

    start: float
    end: float
    color: str


def draw_lines(axes: Axes, panel: dict[str, Any], found: list[Found], view: View, events: list[Event]) -> None:
    """A time series panel."""
    right: Axes | None = None
    handles: list[tuple[Any, str]] = []
    for query in found:
        on, own = axes, query.properties
        if query.series and own.get("custom.axisPlacement") == "right":
            right = on = right or axes.twinx()
            _dress(right, view, own["unit"])
            right.grid(visible=False)
        for name, series in zip(query.names, query.series, strict=True):
            fixed = own.get("color")
            color = palette(len(handles)) if fixed is None else color_of(fixed["fixedColor"])
            handles.append((_draw_one(on, series, own, view, color), name))
    _fill(axes, found)
    defaults = panel["fieldConfig"]["defaults"]
    if defaults["custom"].get("scaleDistribution", {}).get("type") == "log":
        axes.set_yscale("log")
    _dress(axes, view, defaults["unit"])
    _limit(axes, defaults)
    _mark(axes, events)
    _name(axes, handles)


def _fill(axes: Axes, found: list[Found]) -> None:
    """The areas down to the line of another query."""
    drawn = {name: series for query in found for name, series in zip(query.names, query.series, strict=True)}
    for query in found:
        name = query.properties.get("custom.fillBelowTo")
        if name is None or (below := drawn.get(name)) is None:
            continue
        for series in query.series:
            _fill_between(axes, series, below, color_of(query.properties["color"]["fixedColor"]))


def _limit(axes: Axes, defaults: dict[str, Any]) -> None:
    """The ends of the axis, and those limits that lie between them, as Grafana draws them."""
    low, high = axes.get_ylim()
    low, high = defaults.get("min", low), max(high, defaults["custom"].get("axisSoftMax", high))
    for step in defaults["thresholds"]["steps"]:
        if step.get("value") is not None and low <= step["value"] <= high:
            axes.axhline(step["value"], color=color_of(step["color"]), linestyle=(0, (5, 4)), linewidth=0.9)
    axes.set_ylim(low, high)


def _draw_one(axes: Axes, series: Series, own: dict[str, Any], view: View, color: str) -> Any:  # noqa: ANN401 - an artist of matplotlib
    if own.get("custom.drawStyle") == "bars":
        width = view.step / 86400
        return axes.bar(_days(series.times), series.values, width=width, color=color, alpha=0.75, linewidth=0)
    times, values = _with_gaps(series, view)
    dash = own.get("custom.lineStyle", {}).get("fill") == "dash"
    width = 1.3 * float(own.get("custom.lineWidth", 1))
    (line,) = axes.plot(
        _days(times),
        values,
        color=color,
        linewidth=width,
        linestyle=(0, (5, 3)) if dash else "-",
        solid_joinstyle="round",
    )
    alone = [i for i, value in enumerate(values) if not math.isnan(value) and _is_alone(values, i)]
    axes.plot(_days([times[i] for i in alone]), [values[i] for i in alone], ".", color=color, markersize=3)
    return line


def _is_alone(values: list[float], place: int) -> bool:
    """Whether a value has none beside it to which a line could be drawn."""
    beside = [values[i] for i in (place - 1, place + 1) if 0 <= i < len(values)]
    return all(math.isnan(value) for value in beside)


def _with_gaps(series: Series, view: View) -> tuple[list[float], list[float]]:
    """The series with a NaN wherever a point is not there: a line ends there."""
    times: list[float] = []
    values: list[float] = []
    for time, value in zip(series.times, series.values, strict=True):
        if times and time - times[-1] > 1.5 * view.step:
            times.append(times[-1] + view.step)
            values.append(math.nan)
        times.append(time)
        values.append(value)
    return times, values


def _fill_between(axes: Axes, upper: Series, lower: Series, color: str) -> None:
    below = dict(zip(lower.times, lower.values, strict=True))
    both = [(time, value, below[time]) for time, value in zip(upper.times, upper.values, strict=True) if time in below]
    if both:
        times, tops, bottoms = zip(*both, strict=True)
        axes.fill_between(_days(list(times)), tops, bottoms, color=color, alpha=0.35, linewidth=0)


def draw_states(axes: Axes, panel: dict[str, Any], found: list[Found], view: View) -> None:
    """A state timeline: one band for each series, by what its values are called."""
    bands = [(name, series) for query in found for name, series in zip(query.names, query.series, strict=True)]
    bands.sort(key=lambda band: band[0], reverse=True)
    legend: dict[str, str] = {}
    for row, (_, series) in enumerate(bands):
        for time, value in zip(series.times, series.values, strict=True):
            text, color = words_of(panel, value) or ("", "#22252b")
            legend[text] = color
            corner = (dates.date2num(_moment(time)), row - 0.4)
            axes.add_patch(Rectangle(corner, view.step / 86400, 0.8, color=color, linewidth=0))
    axes.set_ylim(-0.6, max(len(bands), 1) - 0.4)
    axes.set_yticks(range(len(bands)), [name for name, _ in bands])
    _dress(axes, view, None)
    axes.grid(visible=False)
    handles = [(Rectangle((0, 0), 1, 1, color=color), text) for text, color in sorted(legend.items())]
    _name(axes, handles)


def draw_heat(axes: Axes, found: list[Found], view: View) -> None:
    """A heat map: one row for each series."""
    bands = [(name, series) for query in found for name, series in zip(query.names, query.series, strict=True)]
    bands.sort(key=lambda band: band[0], reverse=True)
    count = math.ceil((view.end - view.start) / view.step) + 1
    cells = [[math.nan] * count for _ in bands]
    for row, (_, series) in enumerate(bands):
        for time, value in zip(series.times, series.values, strict=True):
            cells[row][round((time - view.start) / view.step)] = value
    if bands:
        left, right = _days([view.start, view.start + count * view.step])
        image = axes.imshow(
            cells, aspect="auto", origin="lower", cmap="turbo", interpolation="nearest",
            extent=(left, right, -0.5, len(bands) - 0.5),
        )  # fmt: skip
        bar = axes.figure.colorbar(image, ax=axes, pad=0.01, fraction=0.02)
        bar.ax.tick_params(colors=FAINT, labelsize=6.5)
    axes.set_yticks(range(len(bands)), [name for name, _ in bands])
    _dress(axes, view, None)
    axes.grid(visible=False)


def _dress(axes: Axes, view: View, unit: str | None) -> None:
    axes.set_facecolor("none")
    axes.set_xlim(*_days([view.start, view.end]))
    most = max(4, int(1.5 * axes.get_window_extent().width / axes.figure.dpi))
    locator = dates.AutoDateLocator(minticks=3, maxticks=most)
    locator.intervald[dates.MINUTELY] = [1, 2, 5, 10, 15, 30]
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator, show_offset=False))
    if unit is not None:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: say(float(value), unit)))
    axes.tick_params(colors=FAINT, labelsize=7, length=0, which="both")
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _mark(axes: Axes, events: list[Event]) -> None:
    for event in events:
        start, end = _days([event.start, event.end])
        color = color_of(event.color)
        axes.axvspan(start, end, color=color, alpha=0.06, linewidth=0)
        axes.axvline(start, color=color, linewidth=0.8, linestyle=(0, (2, 2)))


def _name(axes: Axes, handles: list[tuple[Any, str]]) -> None:
    """The legend, below the picture; as many names as there is room for."""
    if not handles:
        return
    box = axes.get_window_extent()
    wide, high = box.width / axes.figure.dpi, box.height / axes.figure.dpi
    columns = max(1, int(wide * _LETTERS_AN_INCH / (max(len(name) for _, name in handles) + 5)))
    shown = handles[: 2 * columns]
    names = [name for _, name in shown]
    if len(handles) > len(shown):
        names[-1] = f"and {len(handles) - len(shown) + 1} more"
    legend = axes.legend(
        [handle for handle, _ in shown], names, loc="upper left", bbox_to_anchor=(0.0, -0.22 / high), borderaxespad=0,
        ncols=columns, fontsize=6.5, frameon=False, handlelength=1.0, columnspacing=1.0, labelspacing=0.3,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_color(TEXT)


def _moment(time: float) -> datetime:
    return datetime.fromtimestamp(time, UTC)


def _days(times: list[float]) -> list[float]:
    return [float(dates.date2num(_moment(time))) for time in times]
