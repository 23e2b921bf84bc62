"""Incidents: one thing that went wrong, its evidence, and the remedies tried on it."""

import math
from collections.abc import Mapping, Sequence

import msgspec

from trainer_plugin.detection.detectors import Verdict
from trainer_plugin.detection.layer_baselines import OUTLIER_RATIO
from trainer_plugin.detection.readings import Readings
from trainer_plugin.detection.weight_jumps import WeightJump
from trainer_plugin.policy.attribution import (
    CLIMB_STEPS,
    LASTING_STEPS,
    LR_SIGNS,
    QUICK_SIGN,
    RISE_STEPS,
    SHORT_STEPS,
    classify,
    has_jumped,
)
from trainer_plugin.signals import Signals

MAX_EVIDENCE = 20
MAX_LAYERS = 20
_WITHHELD = "spike withheld in the same step"


class Remedy(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One action taken (or refused) in an incident. `steps_total` never goes back, `step` does on a rollback."""

    action: str
    step: int
    steps_total: int
    source: str
    outcome: str
    alert: str | None = None
    command: str | None = None
    detail: str = ""


class Incident(msgspec.Struct, kw_only=True):
    """From the first bad step to the measured recovery. `last_step` is the last one with a verdict.

    `layers` are those whose gradient norm was an outlier to their own past, each with its largest ratio. What the class
    is read from: `signs`, `grad_norm_ratio`, `rate_rise`, `course` and `machine`, as in `classify`. `weights_jumped`:
    when it began, weights were thrown to where no usual update takes them. `withheld_step`: the
    last spike withheld in the row that the first bad step began.
    """

    id: int
    first_step: int
    detected_step: int
    last_step: int
    class_: str = msgspec.field(name="class", default="unknown")
    evidence: list[str] = msgspec.field(default_factory=list)
    remedies: list[Remedy] = msgspec.field(default_factory=list)
    healed: bool = False
    healed_step: int | None = None
    good_steps: int = 0
    opened_total: int = 0
    signs: dict[str, int] = msgspec.field(default_factory=dict)
    grad_norm_ratio: float | None = None
    rate_rise: float | None = None
    weights_jumped: bool = False
    course: str = ""
    out_steps: int = 0
    machine: list[str] = msgspec.field(default_factory=list)
    layers: dict[str, float] = msgspec.field(default_factory=dict)
    withheld_step: int = 0

    def take_in(self, signals: Signals, readings: Readings, verdicts: Sequence[Verdict]) -> None:
        """One step of it: what the acting detectors said, and what else the class is read from."""
        self.surge(readings.layer_ratios)
        for verdict in verdicts:
            self.add(verdict, readings.grad_norm_ema_ratio)
        if readings.rate_rise is not None:
            self.rate_rose(*readings.rate_rise)
        if readings.weight_jump is not None:
            self.hear_of_jump(readings.weight_jump)
        self.follow(signals.step, readings.loss_unrecovered_steps)

    def add(self, verdict: Verdict, grad_norm_ratio: float) -> None:
        """Take a verdict in: where the deviation began, what it was, and the class as far as the signs tell.

        `grad_norm_ratio` is that of the verdict's step; the one of the step at which the loss jumped is kept.
        """
        self.first_step = min(self.first_step, verdict.first_step)
        self.last_step = max(self.last_step, verdict.step)
        sign = f"{verdict.detector}:{verdict.signal}"
        if sign not in self.signs and len(self.evidence) < MAX_EVIDENCE:
            against = "" if math.isnan(verdict.baseline) else f" against {verdict.baseline:.4g}"
            self.evidence.append(
                f"step {verdict.step}: {verdict.detector} on {verdict.signal}, {verdict.value:.4g}{against}"
            )
        quick = sign == "drift:loss" and verdict.step - verdict.first_step < CLIMB_STEPS
        if sign == "robust:loss" and not has_jumped(self.signs) and math.isfinite(grad_norm_ratio):
            self.grad_norm_ratio = grad_norm_ratio
        if quick:
            self.signs.setdefault(QUICK_SIGN, verdict.first_step)
        self.signs.setdefault(sign, verdict.first_step)
        self._classify()

    def rate_rose(self, step: int, ratio: float) -> None:
        """The learning rate became `ratio` times as high in a step: a cause, if what is wrong began soon after."""
        if self.rate_rise is None and 0 < self.first_step - step <= RISE_STEPS:
            self.rate_rise = ratio
            self._tell(f"step {step}: the learning rate rose to {ratio:.3g} times what it had been")

    def hear_of_jump(self, jump: WeightJump) -> None:
        """A layer's weights jumped: of this incident, if they may have done so in its first steps or right before."""
        if not self.weights_jumped and jump.after_step < self.first_step <= jump.last_step + SHORT_STEPS:
            self.weights_jumped = True
            self._tell(
                f"step {jump.last_step}: the weight norm of {jump.layer} is {jump.ratio:.3g} times what it was after "
                f"step {jump.after_step}"
            )

    def follow(self, step: int, unrecovered_steps: int) -> None:
        """How it goes on: `unrecovered_steps` is how long the loss has been away, 0 when it is back."""
        if unrecovered_steps >= LASTING_STEPS and self.course != "lasting":
            self.course = "lasting"
            self._tell(f"step {step}: the loss has stayed away for {unrecovered_steps} steps: no single batch")
        elif unrecovered_steps == 0 < self.out_steps <= SHORT_STEPS and not self.course:
            self.course = "over"
            self._tell(f"step {step}: the loss is back, {self.out_steps} steps after it left: the weights are well")
        self.out_steps = max(self.out_steps, unrecovered_steps)

    def hear(self, alert: str, words: str) -> None:
        """What is known of the run's machines, by an alert or by the step times."""
        if alert not in self.machine:
            self.machine.append(alert)
            self._tell(words)

    def hear_of_slow_steps(self, step: int, words: str) -> None:
        """What the times of the last steps say, if anything."""
        if words:
            self.hear("slow steps", f"step {step}: {words}")

    def _tell(self, line: str) -> None:
        """A line of evidence, and what class it makes."""
        if len(self.evidence) < MAX_EVIDENCE:
            self.evidence.append(line)
        self._classify()

    def _classify(self) -> None:
        self.class_ = classify(
            self.signs, self.grad_norm_ratio, rate_rise=self.rate_rise, course=self.course, machine=self.machine
        )

    def surge(self, ratios: Mapping[str, float]) -> None:
        """Take in each layer's gradient norm over its baseline; the layers that surged most are kept."""
        surging = {layer: ratio for layer, ratio in ratios.items() if ratio > OUTLIER_RATIO}
        for layer, ratio in surging.items():
            self.layers[layer] = max(ratio, self.layers.get(layer, 0.0))
        if surging:
            largest = sorted(self.layers.items(), key=lambda item: -item[1])
            self.layers = dict(largest[:MAX_LAYERS])

    def done_in_step(self, signals: Signals, steps_total: int, *, withheld: bool, acts: bool) -> None:
        """Keep what was done to a step within it, once an incident: a surge clipped, a spike withheld."""
        if withheld:
            action, what, detail = "skip_batch", _WITHHELD, f"loss {signals.loss:.4g}"
            if signals.step in (self.first_step, max(self.first_step, self.withheld_step) + 1):
                self.withheld_step = signals.step
        else:
            action, what, detail = "clip", "surge clipped in the same step", f"x {signals.clip_coefficient:.3g}"
        if not any(remedy.detail.startswith(what) for remedy in self.remedies):
            remedy = Remedy(
                action=action, step=signals.step, steps_total=steps_total, source="local",
                outcome="done" if acts else "observed", detail=f"{what}, {detail}",
            )  # fmt: skip
            self.remedies.append(remedy)

    @property
    def before_step(self) -> int:
        """A state to go back to must lie before this step: a loss shows the update of the step before it."""
        return self.first_step - 1

    @property
    def lr_sign(self) -> str | None:
        """What says that the learning rate is too high for this run now, if anything does."""
        return next((sign.replace(":", " of the ") for sign in LR_SIGNS if sign in self.signs), None)

    @property
    def left_out(self) -> bool:
        """Whether its batch has been left out for later, or was tried to be; a step withheld comes again."""
        return any(not remedy.detail.startswith(_WITHHELD) for remedy in self.tried("skip_batch"))

    def tried(self, action: str) -> list[Remedy]:
        """The remedies of one kind, oldest first."""
        return [remedy for remedy in self.remedies if remedy.action == action]
