"""A query with its look, and the parts of PromQL that many panels share."""

from dataclasses import dataclass
from typing import Literal

# Of the run that is chosen above the dashboard.
RUN = 'run="$run"'
# Drops NaN and both infinities: what is not finite is a gap, never a 0, and stretches no axis.
FINITE = "> -Inf < Inf"

Style = Literal["line", "thin", "dashed", "points", "bars", "hidden"]


@dataclass(frozen=True, kw_only=True)
class Query:
    """One query of a panel; all its series have one look.

    Args:
        expr: PromQL, with Grafana's variables.
        legend: Grafana's pattern for the name of each series.
        color: Grafana's name of a colour; by the palette if None.
        style: how lines are drawn.
        down_to: the legend of another query down to which the area is filled.
        right_unit: the unit of an axis of its own on the right; on the left one if None.
    """

    expr: str
    legend: str
    color: str | None = None
    style: Style = "line"
    down_to: str | None = None
    right_unit: str | None = None


def gauge(metric: str, *, of: str = RUN, finite: bool = True, by: str = "run") -> str:
    """The value of a gauge of rank 0: one series a run, also while a restarted job shows it from another address."""
    return f"max by ({by}) ({metric}{{{of}}}{' ' + FINITE if finite else ''})"


def level(metric: str, *matchers: str, by: str = "run") -> str:
    """The same of a gauge that is finite by its nature, with further matchers."""
    return gauge(metric, of=", ".join((RUN, *matchers)), finite=False, by=by)


def threshold(name: str) -> str:
    """A limit of the job's own."""
    return level("train_threshold", f'name="{name}"')


def events(counter: str, by: str, *matchers: str) -> str:
    """How often something happened in each interval of the picture, where it did, at any zoom."""
    return f"{happened(counter, by, *matchers)} > 0"


def happened(counter: str, by: str, *matchers: str) -> str:
    """The same with the intervals in which it did not."""
    return f"sum by ({by}) (increase({counter}{{{', '.join((RUN, *matchers))}}}[$__rate_interval]))"


def highest(series: str, *, of: str = RUN) -> str:
    """The highest value of a gauge in each interval of the picture: no short event is lost at any zoom."""
    return f"max by (run) (max_over_time({series}{{{of}}}[$__rate_interval]) {FINITE})"
