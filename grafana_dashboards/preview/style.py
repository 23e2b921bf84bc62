"""Colours and units as Grafana has them, near enough to recognize a panel."""

import math
from collections.abc import Callable
from typing import Any

BACKGROUND, PANEL, TEXT, FAINT, GRID = "#111217", "#181b1f", "#ccccdc", "#8e8e99", "#2c2f36"
_NAMED = {
    "red": "#f2495c",
    "orange": "#ff9830",
    "green": "#73bf69",
    "semi-dark-green": "#56a64b",
    "blue": "#5794f2",
    "purple": "#b877d9",
    "text": TEXT,
    "transparent": "#22252b",
}
_PALETTE = (
    "#7eb26d",
    "#eab839",
    "#6ed0e0",
    "#ef843c",
    "#e24d42",
    "#1f78c1",
    "#ba43a9",
    "#705da0",
    "#508642",
    "#cca300",
)
_NO_VALUE = "no value"
_POWERS = ("", "k", "M", "G", "T", "P")


def color_of(name: str) -> str:
    """A colour that has a name in Grafana."""
    return _NAMED[name]


def palette(place: int) -> str:
    """The colour of the n-th series."""
    return _PALETTE[place % len(_PALETTE)]


def say(value: float, unit: str) -> str:
    """A value in its unit."""
    if math.isnan(value):
        return _NO_VALUE
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return _UNITS.get(unit, _short)(value)


def words_of(panel: dict[str, Any], value: float) -> tuple[str, str] | None:
    """What a panel calls a value, and the colour of the word."""
    return mapped(panel["fieldConfig"]["defaults"].get("mappings", ()), value)


def mapped(mappings: Any, value: float) -> tuple[str, str] | None:  # noqa: ANN401 - JSON
    """What these mappings call a value, and the colour of the word."""
    for mapping in mappings:
        options = mapping["options"]
        if mapping["type"] == "special" and math.isnan(value):
            return options["result"]["text"], color_of(options["result"]["color"])
        if mapping["type"] == "value" and (result := options.get(f"{value:g}")) is not None:
            return result["text"], color_of(result["color"])
    return None


def limit_color(thresholds: dict[str, Any], value: float) -> str:
    """The colour of the highest limit that a value has reached."""
    reached = [step["color"] for step in thresholds["steps"] if step.get("value") is None or value >= step["value"]]
    return color_of(reached[-1])


def _short(value: float) -> str:
    if value == int(value) and abs(value) < 1e7:
        return f"{value:.0f}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.4g}"


def _seconds(value: float) -> str:
    return f"{_short(value)} s" if abs(value) >= 1 or value == 0 else f"{_short(1000 * value)} ms"


def _scaled(value: float, base: int = 1000, infix: str = "") -> str:
    power = min(int(math.log(abs(value), base)), len(_POWERS) - 1) if abs(value) >= base else 0
    return f"{_short(value / base**power)} {_POWERS[power]}{infix if power else ''}"


# By Grafana's name of the unit; others are numbers.
_UNITS: dict[str, Callable[[float], str]] = {
    "percentunit": lambda value: f"{_short(100 * value)} %",
    "s": _seconds,
    "bytes": lambda value: f"{_scaled(value, 1024, 'i')}B",
    "Bps": lambda value: f"{_scaled(value)}B/s",
    "hertz": lambda value: f"{_scaled(value)}Hz",
    "celsius": lambda value: f"{_short(value)} °C",
    "watt": lambda value: f"{_short(value)} W",
    "sci": lambda value: f"{value:.3g}",
    "short": lambda value: _scaled(value).strip(),
}
