"""Numbers and series as they stand in Prometheus' text format."""

import math
from collections.abc import Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def series(name: str, labels: Mapping[str, str]) -> str:
    """What stands before a sample's value: name and labels."""
    pairs = [f'{key}="{value.translate(_ESCAPES)}"' for key, value in labels.items()]
    return f"{name}{{{','.join(pairs)}}}" if pairs else name


def number(value: float) -> str:
    """A number as Prometheus reads it; a whole one given as `int` to its last digit."""
    if isinstance(value, int):
        return str(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))
