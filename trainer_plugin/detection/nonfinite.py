"""The non-finite detector, and how many updates in a row were withheld. Pure: no torch, no clock, no files."""

import math
from typing import Any

from trainer_plugin.detection.detectors import Verdict
from trainer_plugin.signals import Signals

# A scaler halves its scale at most this often before the first step fits; overflows that go on are a fault.
_SCALE_SEARCH_STEPS = 20
# Where every other update is withheld, one that was not ends nothing.
_BACK_STEPS = 2


class NonFinite:
    """R5: NaN or Inf is a verdict at once, and needs no baseline.

    But for a gradient that overflows under AMP's scaler: while that looks for its scale, it is the scaler's business.
    """

    def __init__(self) -> None:
        self.withheld_steps = 0
        self._good_steps = 0
        self._overflow_steps = 0

    def update(self, signals: Signals) -> list[Verdict]:
        """Judge one step."""
        step, norm, verdicts = signals.step, signals.grad_norm, []
        self._overflow_steps = self._overflow_steps + 1 if signals.withheld == "amp_overflow" else 0
        counts = self._overflow_steps == 0 or self._overflow_steps > _SCALE_SEARCH_STEPS
        if not math.isfinite(signals.loss):
            verdicts.append(_verdict("loss", step, signals.loss))
        if norm is not None and not math.isfinite(norm) and counts:
            verdicts.append(_verdict("grad_norm", step, norm))
        if signals.withheld is not None:
            self.withheld_steps, self._good_steps = (self.withheld_steps + 1 if counts else 0), 0
        else:
            self._good_steps += 1
            if self._good_steps >= _BACK_STEPS:
                self.withheld_steps = 0
        return verdicts

    def state_dict(self) -> dict[str, Any]:
        """The counts."""
        return {
            "withheld_steps": self.withheld_steps,
            "good_steps": self._good_steps,
            "overflow_steps": self._overflow_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self.withheld_steps, self._overflow_steps = state["withheld_steps"], state["overflow_steps"]
        self._good_steps = state["good_steps"]


def _verdict(signal: str, step: int, value: float) -> Verdict:
    return Verdict(detector="nonfinite", signal=signal, step=step, value=value, baseline=math.nan, first_step=step)
