"""The robust detector: a value far above the run's present level, in deviations that the run itself has taught.

Pure: no torch, no clock, no files. R7 of the design; the default that acts.
"""

import math
from collections import deque
from itertools import pairwise
from typing import Any

from trainer_plugin.detection.detectors import Verdict
from trainer_plugin.detection.ordered_window import OrderedWindow
from trainer_plugin.detection.tail import Tail

# A window without noise would make every value an outlier: one per mille of the level is no deviation.
_LEAST_SCALE_RATIO = 1e-3
# While a planned change has its time to show, the threshold is so much higher.
_WIDENED = 2.0
# But no plan makes a loss half as high again.
_UNPLANNED_RATIO = 1.5
# The center is marked once in so many values (half of what it is a median of), and so many marks are kept.
_MARK_VALUES = 16
_MARKS = 8
# The center of noise stays within one deviation; a rise back by three would add up to a drift.
_DROP_SCORE = 3.0
# In windows: for so long a return to where the run came from is none of our business, and for so long it is at least
# no reason to go back. Between them lies what a public run's labels call a data shift: the way back up, 170 values on.
_SILENT_WINDOWS = 1
_KNOWN_WINDOWS = 4
# Back is who has made up all but so much of the drop.
_BACK_SHARE = 0.25


class Robust:
    """R7: a value above the median of the newest accepted values by more than `score` deviations.

    Outliers are kept out of every window, so that a second spike is judged like the first. The median is of a quarter
    of `window`: near enough to follow a falling loss. The deviation is that of the values from the medians before
    them, over the whole of `window`, by the distance between quantiles: the trend of a falling loss, which shifts them
    all, does not widen it. Where the run's own tail is heavier than a normal one, the deviation is that of the
    tail. `log` takes the logarithm first: for a positive, skewed signal such as a gradient norm. `least_ratio` is how
    many times the center a value must be besides: a norm that doubles on one batch is the ordinary tail of a healthy
    run, and a loss that rises by a hundredth is nothing to act upon, however calm it was.

    A stretch of easier data takes the center down with it, and the return to where the run came from is no fault. So a
    center that has dropped (below its highest of the last 64 values by 3 deviations, and by twice as much as in the 64
    before: a falling loss does not drop) leaves a `reference` behind, and values are scored against that one until the
    center is back or a window has passed. Up to 4 windows, the return is a verdict, but the level is the old one.
    """

    # Scores above this, unbroken up to a verdict, belong to the deviation that it found.
    ONSET_SCORE = 4.0

    def __init__(
        self,
        signal: str,
        *,
        window: int,
        score: float,
        warmup_steps: int,
        log: bool = False,
        least_ratio: float = 1.0,
    ) -> None:
        self._signal = signal
        self._threshold = score
        self._warmup_steps = warmup_steps
        self._log = log
        self._least_rise = least_ratio - 1.0
        self._values = OrderedWindow(max(1, window // 4))
        self._residuals = OrderedWindow(window)
        self._least_values = min(20, self._values.size)
        self.tail = Tail(8 * window)
        self._first_step: int | None = None
        self._onset: int | None = None
        self.widened = 0  # Values that are left of the time that a planned change has.
        self._marks: deque[float] = deque(maxlen=_MARKS)
        # What is printed to two digits differs by a hundredth or not at all: no less is a deviation.
        self._quantum = 0.0
        self._unmarked = 0
        self._former: float | None = None
        self._former_values = self._silent_values = 0
        self._drop_below = -math.inf
        self._center = math.nan
        self._deviation = math.nan
        self.warm = False
        self.center = math.nan
        self.scale = math.nan
        # The score of the value seen last, by what was accepted before it; NaN for one that is not finite.
        self.last_score = math.nan
        # The same for whoever counts scores above the threshold, as rules do: no more than that unless a verdict came.
        self.shown_score = math.nan

    @property
    def dropped(self) -> bool:
        """Whether the center is below a level that the run has come from."""
        return self._former is not None

    @property
    def reference(self) -> float:
        """The level that the next value is scored against: the center, or where it has dropped from."""
        if self._former is None or not self._silent_values or self._former <= self._center:
            return self.center
        return math.exp(self._former) if self._log else self._former

    @property
    def limit(self) -> float:
        """The value above which the next one is an outlier, in the signal's own unit; infinite while none is judged."""
        if not self.warm:
            return math.inf
        center, former = self._center, self._former
        if former is not None and former > center and self._silent_values:
            center = former
        deviation, reference = self._deviation * self.tail.ratio, self.reference
        edge = center + self._threshold_now * deviation
        if not self._log:  # A planned change is let no further than this.
            unplanned = reference + (_UNPLANNED_RATIO - 1.0) * abs(reference)
            edge = min(edge, max(center + self._threshold * deviation, unplanned))
        least = reference + self._least_rise * abs(reference)
        return max(math.exp(min(edge, 700.0)) if self._log else edge, least)

    @property
    def _threshold_now(self) -> float:
        return self._threshold * (_WIDENED if self.widened else 1.0)

    def update(self, step: int, value: float, *, learn: bool = True) -> Verdict | None:
        """Judge the value of one step, then take it in unless it is an outlier (or not to be learnt from)."""
        if not math.isfinite(value):
            self.last_score = self.shown_score = math.nan
            return None
        # A gradient norm of exactly 0 is no outlier above anything.
        scaled = math.log(max(value, 1e-30)) if self._log else value
        deviation = self._deviation
        center, former = self._center, self._former
        if former is not None and former > center and self._silent_values:
            center = former
        raw = (scaled - center) / deviation if deviation > 0.0 else math.nan
        tail = self.tail
        self.last_score = self.shown_score = score = raw / tail.ratio
        verdict = None
        if score > self.ONSET_SCORE:
            if self.warm:
                verdict = self._judge(step, value, score)
            if verdict is None and score > self._threshold:
                self.shown_score = self._threshold
        else:
            self._onset = None
        if not learn or verdict is not None:
            tail.update(None)
        else:
            tail.update(raw if self.warm or len(self._residuals.ordered) >= self._least_values else None)
            self._take_in(scaled)
        self.scale = self._deviation * tail.ratio
        if not self.warm:
            self.warm = self._is_warm(step)
        if self.widened:
            self.widened -= 1
        if former is not None:
            self._come_back(former, scaled if verdict is not None else -math.inf)
        return verdict

    def _is_warm(self, step: int) -> bool:
        """After warm-up and with enough values; a full window of them where the first steps were not seen."""
        self._first_step = step if self._first_step is None else self._first_step
        if step - self._first_step + 1 < self._warmup_steps:
            return step >= self._warmup_steps and len(self._residuals.ordered) == self._residuals.size
        return len(self._values.ordered) >= self._least_values

    def _come_back(self, former: float, outlier: float) -> None:
        """Count the values since a drop, and go on from where it was if an outlier is back there."""
        self._silent_values = max(0, self._silent_values - 1)
        self._former_values -= 1
        if self._former_values <= 0:
            self._former = None
        elif self._is_back(outlier, former):
            self._go_on_from(former)

    def _is_back(self, scaled: float, former: float) -> bool:
        """Whether an outlier is the way back up to where the run came from, and not only higher than it was."""
        least = former - _BACK_SHARE * (former - self._center)
        return least < scaled < former + self.ONSET_SCORE * self.scale

    def _judge(self, step: int, value: float, score: float) -> Verdict | None:
        self._onset = step if self._onset is None else self._onset
        baseline = self.reference
        unplanned = not self._log and value - baseline > (_UNPLANNED_RATIO - 1.0) * abs(baseline)
        if score <= (
            self._threshold if unplanned else self._threshold_now
        ) or value - baseline <= self._least_rise * abs(baseline):
            return None
        return Verdict(
            detector="robust", signal=self._signal, step=step, value=value, baseline=baseline, first_step=self._onset
        )

    def _take_in(self, scaled: float) -> None:
        ordered, residuals = self._values.ordered, self._residuals
        if ordered:
            residuals.add(scaled - self._center)
        self._values.add(scaled)
        count = len(ordered)
        half = count // 2
        self._center = center = ordered[half] if count % 2 else ordered[half - 1] / 2.0 + ordered[half] / 2.0
        quarters, tenths = residuals.deviations()
        if self._log:
            self.center, least = math.exp(center), _LEAST_SCALE_RATIO
        else:
            self.center, least = center, _LEAST_SCALE_RATIO * abs(center)
            if least < self._quantum:
                least = self._quantum
        if quarters < least:
            quarters = least
        self._deviation = quarters if quarters > tenths else tenths
        self._unmarked += 1
        if self._unmarked >= _MARK_VALUES:
            self._mark(center, quarters)
        if self._former is not None and center > self._former - self._deviation:
            self._former = None
        if center < self._drop_below and self.warm and (self._former is None or not self._silent_values):
            self._keep(max(list(self._marks)[_MARKS // 2 :]), _SILENT_WINDOWS, _KNOWN_WINDOWS)

    def _mark(self, center: float, deviation: float) -> None:
        """Mark the center, and tell below what it has dropped and not just gone on falling."""
        self._unmarked = 0
        if not self._log:
            steps = [above - below for below, above in pairwise(self._values.ordered) if above > below]
            self._quantum = min(steps, default=0.0)
        marks = self._marks
        marks.append(center)
        if len(marks) == _MARKS:
            former = max(list(marks)[_MARKS // 2 :])
            fell = max(list(marks)[: _MARKS // 2]) - former
            self._drop_below = former - max(_DROP_SCORE * deviation * self.tail.ratio, 2.0 * fell)

    def _keep(self, former: float, silent_windows: int, known_windows: int) -> None:
        self._former = former
        self._silent_values = silent_windows * self._residuals.size
        self._former_values = known_windows * self._residuals.size

    def go_back(self) -> None:
        """Earlier steps of the run come again: until they have, its level is the highest of that time."""
        if self._marks:
            self._keep(max(self._marks), 1, 1)

    def relearn(self) -> None:
        """Forget the level: it has changed for good. The next values are the new one."""
        self._values.fill(())
        self._residuals.fill(())
        self.tail.forget_newest()
        self._forget_drop()
        self._onset = None
        self.warm = False

    def _forget_drop(self) -> None:
        self._marks.clear()
        self._unmarked, self._former, self._drop_below = 0, None, -math.inf

    def widen(self, values: int) -> None:
        """Be twice as patient with the next `values`: what comes was planned."""
        self.widened = values

    def hold(self, center: float, value: float) -> None:
        """Judge by this level, and go on from it: that now has followed what went wrong, up to `value`.

        If that is back at the level before a drop, it is that one.
        """
        scaled, reached = (math.log(max(one, 1e-30)) if self._log else one for one in (center, value))
        back = self._former is not None and self._is_back(reached, self._former)
        self._go_on_from(max(scaled, self._former) if back and self._former is not None else scaled)

    def _go_on_from(self, scaled: float) -> None:
        self._center = scaled
        self.center = math.exp(scaled) if self._log else scaled
        self._values.fill([scaled] * len(self._values.ordered))
        self._forget_drop()

    def state_dict(self) -> dict[str, Any]:
        """The accepted values and what was made of them."""
        return {
            "values": self._values.values, "residuals": self._residuals.values, "tail": self.tail.state_dict(),
            "first_step": self._first_step, "onset": self._onset, "widened": self.widened, "warm": self.warm,
            "marks": [*self._marks], "unmarked": self._unmarked, "quantum": self._quantum,
            "former": self._former, "former_values": [self._silent_values, self._former_values],
            "drop_below": None if self._drop_below == -math.inf else self._drop_below,
            "level": [None if math.isnan(one) else one for one in (self._center, self._deviation)],
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self._values.fill(state["values"])
        self._residuals.fill(state["residuals"])
        self.tail.load_state_dict(state["tail"])
        self._first_step, self._onset, self.widened = state["first_step"], state["onset"], state["widened"]
        self._marks.clear()
        self._marks.extend(state["marks"])
        self._unmarked, self._former, self._quantum = state["unmarked"], state["former"], state["quantum"]
        self._silent_values, self._former_values = state["former_values"]
        self._drop_below = -math.inf if state["drop_below"] is None else state["drop_below"]
        self.warm = state["warm"]
        self._center, self._deviation = (math.nan if one is None else one for one in state["level"])
        self.center = math.exp(self._center) if self._log else self._center
        self.scale = self._deviation * self.tail.ratio
