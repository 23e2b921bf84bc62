"""Incidents: one thing that went wrong, its evidence, and the remedies tried on it."""

import math
from collections.abc import Mapping

import msgspec

from trainer_plugin.detection.detectors import Verdict
from trainer_plugin.detection.layer_baselines import OUTLIER_RATIO
from trainer_plugin.signals import Signals

MAX_EVIDENCE = 20
MAX_LAYERS = 20
# A sum of scores begins by chance a step or two before a jump; earlier than that it is a climb.
CLIMB_STEPS = 3
LR_SIGNS = ("drift:loss", "drift:grad_norm", "oscillation:loss")


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

    `layers` are those whose gradient norm was an outlier to their own past, each with its largest ratio.
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
    layers: dict[str, float] = msgspec.field(default_factory=dict)

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
        if sign == "robust:loss" and sign not in self.signs and math.isfinite(grad_norm_ratio):
            self.grad_norm_ratio = grad_norm_ratio
        self.signs.setdefault(sign, verdict.first_step)
        self.class_ = classify(self.signs, self.grad_norm_ratio)

    def surge(self, ratios: Mapping[str, float]) -> None:
        """Take in each layer's gradient norm over its baseline; the layers that surged most are kept."""
        surging = {layer: ratio for layer, ratio in ratios.items() if ratio > OUTLIER_RATIO}
        for layer, ratio in surging.items():
            self.layers[layer] = max(ratio, self.layers.get(layer, 0.0))
        if surging:
            largest = sorted(self.layers.items(), key=lambda item: -item[1])
            self.layers = dict(largest[:MAX_LAYERS])

    def done_in_step(self, signals: Signals, steps_total: int, *, outcome: str) -> None:
        """Keep what was done to a step within it, once an incident: a surge clipped, a spike withheld."""
        if signals.withheld == "spike":
            action, what, detail = "skip_batch", "spike withheld in the same step", f"loss {signals.loss:.4g}"
        else:
            action, what, detail = "clip", "surge clipped in the same step", f"x {signals.clip_coefficient:.3g}"
        if not any(remedy.detail.startswith(what) for remedy in self.remedies):
            remedy = Remedy(
                action=action, step=signals.step, steps_total=steps_total, source="local", outcome=outcome,
                detail=f"{what}, {detail}",
            )  # fmt: skip
            self.remedies.append(remedy)

    def lasts(self) -> None:
        """The loss has stayed away: whatever one batch can do, it is not that."""
        if self.class_ == "bad_sample":
            self.grad_norm_ratio = None
            self.class_ = classify(self.signs, None)

    @property
    def before_step(self) -> int:
        """A state to go back to must lie before this step: a loss shows the update of the step before it."""
        return self.first_step - 1

    @property
    def lr_sign(self) -> str | None:
        """What says that the learning rate is too high for this run now, if anything does."""
        return next((sign.replace(":", " of the ") for sign in LR_SIGNS if sign in self.signs), None)

    def tried(self, action: str) -> list[Remedy]:
        """The remedies of one kind, oldest first."""
        return [remedy for remedy in self.remedies if remedy.action == action]


def classify(signs: dict[str, int], grad_norm_ratio: float | None) -> str:
    """The class of an incident from its first signs (`detector:signal` -> step), asked in the order of R18.

    R3: a gradient that surges before or with the loss is a divergence; a loss that jumps over a calm gradient is the
    batch. `grad_norm_ratio` is the gradient norm over its baseline when the loss jumped, None while it has not. A loss
    that climbs before it jumps, or is thrown out again and again, has been let go too fast.
    """
    if any(sign.startswith("nonfinite:") or sign == "drift:amp_loss_scale" for sign in signs):
        return "numerical"
    if "ema_ratio:grad_norm" in signs:
        return "gradient_explosion"
    loss = signs.get("robust:loss")
    norm = min((signs[sign] for sign in ("robust:grad_norm", "drift:grad_norm") if sign in signs), default=None)
    if norm is not None and (loss is None or norm <= loss):
        return "gradient_explosion"
    slow = signs.get("drift:loss")
    if "oscillation:loss" in signs or (slow is not None and (loss is None or loss - slow >= CLIMB_STEPS)):
        return "lr_too_high"
    if loss is not None and grad_norm_ratio is not None and grad_norm_ratio < 1.5:
        return "bad_sample"
    return "unknown"
