"""A backtest as a picture: loss and gradient norm, every detector's verdicts, and the incidents."""

from pathlib import Path

from trainer_plugin.backtest.curve import Curve
from trainer_plugin.backtest.judged import Judged
from trainer_plugin.backtest.rows import LogRow

_MOST_MARKS = 2000


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
        self._loss.add(row.step, row.loss)
        self._grad_norm.add(row.step, row.grad_norm)

    def draw(self, judged: Judged, path: Path) -> None:
        """Write the picture; its kind is that of the file's name.

        Raises:
            OSError: it cannot be written.
            ValueError: no such kind of picture.
        """
        figure = self._figure
        top, middle, bottom = figure.subplots(3, sharex=True, height_ratios=(3, 2, 1))
        top.set_title(f"{Path(judged.path).name}: {judged.steps} logged steps, {len(judged.incidents)} incidents")
        for axis, curve, name in ((top, self._loss, "loss"), (middle, self._grad_norm, "gradient norm")):
            steps, lows, highs = curve.points()
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
            for axis in (top, middle, bottom):
                axis.axvspan(incident.first_step, incident.last_step + 1, color="tab:red", alpha=0.2)
        figure.savefig(path, dpi=120)
