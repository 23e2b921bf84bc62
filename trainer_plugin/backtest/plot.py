"""A backtest as a picture: loss and gradient norm, every detector's verdicts, and the incidents."""

import io
import math
import warnings
from pathlib import Path

from trainer_plugin.backtest.curve import Curve
from trainer_plugin.backtest.judged import Judged
from trainer_plugin.backtest.rows import LogRow

KINDS = (".png", ".svg", ".pdf")
_MOST_MARKS = 2000
_MOST_TITLE = 80
# Beyond, the axes could not be worked out in floats.
_LARGEST = 1e100


class Plot:
    """Hears the rows of a log while it is judged, and draws it afterwards.

    Raises:
        ValueError: matplotlib is not installed.
    """

    def __init__(self) -> None:
        try:
            from matplotlib.figure import Figure  # noqa: PLC0415 - only those who want a picture need it
        except ImportError as error:
            raise ValueError("--plot needs matplotlib: pip install 'pretraining-guard[report]'") from error
        self._figure = Figure(figsize=(12, 8), layout="constrained")
        self._loss, self._grad_norm = Curve(), Curve()

    def watch(self, row: LogRow) -> None:
        """Take in a row."""
        self._loss.add(row.step, _drawable(row.loss))
        self._grad_norm.add(row.step, _drawable(row.grad_norm))

    def draw(self, judged: Judged, kind: str) -> bytes:
        """The picture, as one of `KINDS`; without a panel for the gradient norm if there is none."""
        figure = self._figure
        curves = [("loss", self._loss.points()), ("gradient norm", self._grad_norm.points())]
        if all(math.isnan(high) for high in curves[1][1][2]):
            del curves[1]
        *panels, bottom = figure.subplots(len(curves) + 1, sharex=True, height_ratios=(3, 2, 1)[-len(curves) - 1 :])
        # A file's name is no formula, whatever is in it.
        panels[0].set_title(
            f"{Path(judged.path).name[:_MOST_TITLE]}: {judged.steps} logged steps, {len(judged.incidents)} incidents",
            parse_math=False,
        )
        for axis, (name, (steps, lows, highs)) in zip(panels, curves, strict=True):
            axis.fill_between(steps, lows, highs, linewidth=0.8, color="tab:blue")
            axis.set_ylabel(name)
        marks: dict[str, list[int]] = {}
        for event in judged.events:
            marks.setdefault(f"{event.detector} {event.signal}", []).append(event.step)
        for line, steps in enumerate(marks.values()):
            shown = steps[:: len(steps) // _MOST_MARKS + 1]
            bottom.plot(shown, [line] * len(shown), "|")
        bottom.set_yticks(range(len(marks)), list(marks))
        bottom.set_ylim(-0.5, max(len(marks) - 0.5, 0.5))
        bottom.set_xlabel("step")
        for incident in judged.incidents:
            for axis in (*panels, bottom):
                axis.axvspan(incident.first_step, incident.last_step + 1, color="tab:red", alpha=0.2)
        drawn = io.BytesIO()
        with warnings.catch_warnings():
            # A letter that the font lacks is drawn as a box.
            warnings.filterwarnings("ignore", message="Glyph .* missing from")
            figure.savefig(drawn, dpi=120, format=kind.removeprefix("."))
        return drawn.getvalue()


def _drawable(value: float | None) -> float | None:
    return value if value is None or not math.isfinite(value) else max(-_LARGEST, min(_LARGEST, value))
