"""The report's pictures, as SVG that lies within the page: the run from afar, each incident near by, the layers."""

import io
import math
from collections.abc import Sequence
from typing import Any

from trainer_plugin.report.story import LoggedAction, LoggedIncident, Story
from trainer_plugin.scenes.step_line import StepLine

# One colour a meaning, also for those who do not tell red from green.
_LOSS, _NORM, _BAND, _BAD = "#0b6fb8", "#7a5195", "#9ecae1", "#d1495b"
_ACTIONS = {
    "rollback": "#d1495b",
    "lower_lr": "#e08e0b",
    "clip": "#5b8c5a",
    "skip_batch": "#8d6a9f",
    "stop": "#000000",
}
_MOST_LAYERS = 60
_BEFORE_STEPS, _AFTER_STEPS = 150, 250
# R7's band: eight deviations above the center is a spike.
_BAND_SCORE = 8.0


class Charts:
    """Draws.

    Raises:
        ValueError: matplotlib is not installed.
    """

    def __init__(self) -> None:
        try:
            from matplotlib.figure import Figure  # noqa: PLC0415 - only those who want a picture need it
        except ImportError as error:
            raise ValueError("report needs matplotlib: pip install 'pretraining-guard[report]'") from error
        self._figure = Figure

    def timeline(self, story: Story) -> str:
        """Loss and gradient norm of the whole run over the steps that were run, with incidents and actions."""
        stretches = story.stretches
        if not stretches:
            return ""
        figure = self._figure(figsize=(11, 4.6), layout="constrained")
        top, bottom = figure.subplots(2, sharex=True, height_ratios=(3, 2))
        for axis, pick, colour, name in ((top, "loss", _LOSS, "loss"), (bottom, "grad_norm", _NORM, "gradient norm")):
            known = [one for one in stretches if getattr(one, pick).count]
            totals = [one.steps_total for one in known]
            axis.fill_between(
                totals,
                [getattr(one, pick).least for one in known],
                [getattr(one, pick).largest for one in known],
                color=colour, alpha=0.25, linewidth=0, step="mid",
            )  # fmt: skip
            axis.plot(totals, [getattr(one, pick).mean for one in known], color=colour, linewidth=1.0)
            axis.set_ylabel(name)
            _scale(axis, [getattr(one, pick).largest for one in known], [getattr(one, pick).mean for one in known])
        for one in stretches:
            if one.nonfinite:
                top.axvline(one.steps_total, color=_BAD, linewidth=0.6, alpha=0.5)
        self._mark_incidents(story, (top, bottom))
        bottom.set_xlabel("optimizer steps run, repeated ones included")
        return _svg(figure)

    def _mark_incidents(self, story: Story, axes: Sequence[Any]) -> None:
        for incident in story.incidents:
            first = incident.opened_total - (incident.detected_step - incident.first_step)
            last = max([incident.opened_total, *(action.steps_total for action in incident.actions)])
            for axis in axes:
                axis.axvspan(first, last + 1, color=_BAD, alpha=0.12, linewidth=0)
            axes[0].annotate(
                f"#{incident.id}", (first, 1.0), xycoords=("data", "axes fraction"), fontsize=8, color=_BAD, va="bottom"
            )
            _mark_actions(axes[0], [(action.steps_total, action) for action in incident.actions])

    def incident(self, story: Story, incident: LoggedIncident) -> str:
        """The steps around an incident: loss with its band, gradient norm, learning rate; nothing if they are gone."""
        lines = _around(story.steps, incident)
        if len(lines) < 2:
            return ""
        figure = self._figure(figsize=(11, 4.8), layout="constrained")
        top, middle, bottom = figure.subplots(3, sharex=True, height_ratios=(3, 2, 1))
        totals = [line.steps_total for line in lines]
        center = [_or_nan(line.loss_center) for line in lines]
        edge = [_or_nan(line.loss_center) + _BAND_SCORE * _or_nan(line.loss_scale) for line in lines]
        top.fill_between(totals, center, edge, color=_BAND, alpha=0.4, linewidth=0, label="the run's own band")
        top.plot(totals, [_or_nan(line.loss) for line in lines], color=_LOSS, linewidth=1.0, label="loss")
        middle.plot(totals, [_or_nan(line.grad_norm) for line in lines], color=_NORM, linewidth=1.0)
        bottom.plot(
            totals,
            [max(map(_or_nan, line.learning_rates), default=math.nan) for line in lines],
            color="black",
            linewidth=1,
        )
        losses = [line.loss for line in lines if line.loss is not None]
        norms = [line.grad_norm for line in lines if line.grad_norm is not None]
        _scale(top, losses, losses)
        _scale(middle, norms, norms)
        for line in lines:
            if line.nonfinite or line.withheld:
                top.axvline(line.steps_total, color=_BAD, linewidth=0.6, alpha=0.6)
        _mark_actions(top, [(action.steps_total, action) for action in incident.actions])
        for axis, name in ((top, "loss"), (middle, "gradient norm"), (bottom, "learning rate")):
            axis.set_ylabel(name)
        top.legend(loc="upper left", fontsize=8, frameon=False)
        bottom.set_xlabel("optimizer steps run, repeated ones included")
        return _svg(figure)

    def layers(self, story: Story, incident: LoggedIncident) -> str:
        """Each layer's gradient norm over its own median, as a heat map of the steps around an incident."""
        lines = [line for line in _around(story.steps, incident) if line.layer_grad_norms]
        if len(lines) < 2:
            return ""
        names = list(dict.fromkeys(name for line in lines for name in line.layer_grad_norms))
        rows = {name: _over_median([line.layer_grad_norms.get(name) for line in lines]) for name in names}
        if len(names) > _MOST_LAYERS:  # Those that were furthest out; in the model's own order.
            furthest = sorted(names, key=lambda name: -max(map(_finite_or_zero, rows[name])))[:_MOST_LAYERS]
            names = [name for name in names if name in furthest]
        figure = self._figure(figsize=(11, 1.2 + 0.18 * len(names)), layout="constrained")
        axis = figure.subplots()
        picture = axis.imshow(
            [rows[name] for name in names],
            aspect="auto", interpolation="nearest", cmap="RdBu_r", vmin=-1.0, vmax=1.0,
            extent=(lines[0].steps_total - 0.5, lines[-1].steps_total + 0.5, len(names) - 0.5, -0.5),
        )  # fmt: skip
        axis.set_yticks(range(len(names)), names, fontsize=7, parse_math=False)
        axis.set_xlabel("optimizer steps run")
        figure.colorbar(picture, ax=axis, label="x the layer's median", ticks=[-1, 0, 1], format=_power)
        return _svg(figure)


def _around(steps: list[StepLine], incident: LoggedIncident) -> list[StepLine]:
    last = max([incident.opened_total, *(action.steps_total for action in incident.actions)])
    first = incident.opened_total - max(0, incident.detected_step - incident.first_step)
    return [line for line in steps if first - _BEFORE_STEPS <= line.steps_total <= last + _AFTER_STEPS]


def _mark_actions(axis: Any, actions: list[tuple[int, LoggedAction]]) -> None:  # noqa: ANN401 - matplotlib has no types
    for at, action in actions:
        if action.outcome in {"done", "observed"}:
            axis.axvline(at, color=_ACTIONS.get(action.action, "#555555"), linewidth=1.2, linestyle="--")
            axis.annotate(
                action.action,
                (at, 0.97),
                xycoords=("data", "axes fraction"),
                rotation=90,
                fontsize=7,
                va="top",
                ha="right",
                parse_math=False,
            )


def _scale(axis: Any, highest: Sequence[float], usual: Sequence[float]) -> None:  # noqa: ANN401
    """A logarithmic axis where one value would flatten all others."""
    middle = sorted(usual)[len(usual) // 2] if usual else 0.0
    if middle > 0.0 and max(highest, default=0.0) > 10.0 * middle and min(usual) > 0.0:
        axis.set_yscale("log")


def _over_median(norms: Sequence[float | None]) -> list[float]:
    known = sorted(norm for norm in norms if norm is not None and norm > 0.0)
    if not known:
        return [math.nan] * len(norms)
    middle = known[len(known) // 2]
    return [math.log10(norm / middle) if norm is not None and norm > 0.0 else math.nan for norm in norms]


def _finite_or_zero(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _power(value: float, _: object) -> str:
    return f"{10.0**value:g}"


def _svg(figure: Any) -> str:  # noqa: ANN401
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    text = drawn.getvalue()
    return text[text.index("<svg") :]
