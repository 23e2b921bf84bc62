"""A finding as a picture: what each sample adds, the layers then and now, and the loss of the steps before."""

import io
import math
from collections.abc import Sequence
from typing import Any

from trainer_plugin.replay.finding import Finding
from trainer_plugin.replay.normal import number

_MOST_TITLE = 110
_MOST_SAMPLES = 256
_MOST_LAYERS = 64
# Losses further apart are drawn by their logarithm.
_LOG_RATIO = 10.0
_COLOURS = ("tab:blue", "tab:orange")


class Plot:
    """Draws one finding.

    Raises:
        ValueError: matplotlib is not installed.
    """

    def __init__(self) -> None:
        try:
            from matplotlib.figure import Figure  # noqa: PLC0415 - only those who want a picture need it
        except ImportError as error:
            raise ValueError("--plot needs matplotlib: pip install 'pretraining-guard[report]'") from error
        self._figure = Figure(figsize=(12, 9), layout="constrained")

    def draw(self, finding: Finding, steps: Sequence[dict[str, Any]], kind: str) -> bytes:
        """The picture, as `.png`, `.svg` or `.pdf`."""
        history, samples, layers = self._figure.subplots(3)
        line = finding.verdict.line if finding.verdict is not None else ""
        history.set_title(line[:_MOST_TITLE] + ("..." if len(line) > _MOST_TITLE else ""), parse_math=False)
        points = [(step["step"], number(step.get("loss"))) for step in steps]
        history.plot(range(len(points)), [loss for _, loss in points], color=_COLOURS[0])
        if finding.replayed is not None:
            history.plot([len(points) - 1], [finding.replayed.loss], "o", color=_COLOURS[1], label="run again")
            history.legend()
        losses = [loss for _, loss in points if math.isfinite(loss)]
        if losses and min(losses) > 0.0 and max(losses) > _LOG_RATIO * min(losses):
            history.set_yscale("log")
        history.set_ylabel("loss")
        history.set_xlabel(f"the last {len(points)} steps, to step {finding.step}")
        self._samples(samples, finding)
        self._layers(layers, finding)
        drawn = io.BytesIO()
        self._figure.savefig(drawn, dpi=120, format=kind.removeprefix("."))
        return drawn.getvalue()

    @staticmethod
    def _samples(axis: Any, finding: Finding) -> None:  # noqa: ANN401 - matplotlib's axes
        shown = sorted(finding.samples[:_MOST_SAMPLES], key=lambda one: one.index)
        worst = finding.samples[0].index if finding.samples else -1
        axis.bar(
            [str(one.index + 1) for one in shown],
            [one.loss if math.isfinite(one.loss) else 0.0 for one in shown],
            color=[_COLOURS[one.index == worst] for one in shown],
        )
        axis.set_ylabel("loss of each sample")
        axis.set_xlabel("sample; the one that adds most in orange")

    @staticmethod
    def _layers(axis: Any, finding: Finding) -> None:  # noqa: ANN401
        layers = finding.layer_order[:_MOST_LAYERS]
        ran = finding.replayed.layer_grad_norms if finding.replayed is not None else {}
        both = (("recorded", finding.recorded.layer_grad_norms, "o"), ("run again", ran, "x"))
        for (label, norms, marker), colour in zip(both, _COLOURS, strict=True):
            values = [norms.get(layer, math.nan) for layer in layers]
            axis.plot(
                layers, [v if 0.0 < v < math.inf else math.nan for v in values], marker, color=colour, label=label
            )
        axis.set_yscale("log")
        axis.set_ylabel("gradient norm of each layer")
        axis.tick_params(axis="x", rotation=60)
        if layers:
            axis.legend()
