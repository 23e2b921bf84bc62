"""What was normal before the scene: level and spread of the recorded steps, and which layers left theirs. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import msgspec

from trainer_plugin.detection.layer_baselines import OUTLIER_RATIO

# An interquartile range of 1.349 is a standard deviation of 1.
_QUARTILES = 1.349
# The last steps are not what the others are held against: a surge may have begun in them.
_LATE_STEPS = 10
_LEAST_STEPS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Normal:
    """Medians of loss and gradient norm, the run's own spread of the loss, and that of the norm's logarithm."""

    loss: float
    loss_scale: float
    grad_norm: float
    grad_norm_log_scale: float

    def loss_score(self, loss: float) -> float:
        """How many spreads a loss is above normal."""
        return (loss - self.loss) / self.loss_scale

    def norm_score(self, norm: float | None) -> float:
        """The same of a gradient norm."""
        if norm is None or not norm > 0.0 or not self.grad_norm > 0.0:
            return 0.0
        return math.log(norm / self.grad_norm) / self.grad_norm_log_scale


class Surge(msgspec.Struct, kw_only=True):
    """A layer whose gradient norm left its own past: in which step first, and how many times it was."""

    layer: str
    step: int
    ratio: float


def numbers(step: Mapping[str, Any]) -> dict[str, float]:
    """The layers' norms of a recorded step; what is not finite is there as such."""
    return {layer: number(norm) for layer, norm in step.get("layer_grad_norms", {}).items()}


def number(value: Any) -> float:  # noqa: ANN401 - a number of a scene: not finite, it is a text
    """A recorded number; NaN where there is none."""
    return math.nan if value is None else float(value)


def check(step: Mapping[str, Any]) -> None:
    """Whether a recorded step tells what is read of it.

    Raises:
        ValueError: it does not; the message says what was wanted.
    """
    if type(step.get("step")) is not int:
        raise ValueError(f"step: a number wanted, found {step.get('step')!r:.60}")
    norms = step.get("layer_grad_norms", {})
    if not isinstance(norms, Mapping):
        raise ValueError(f"layer_grad_norms: a number for each layer wanted, found {norms!r:.60}")  # noqa: TRY004
    for name, value in (("loss", step.get("loss")), ("grad_norm", step.get("grad_norm")), *norms.items()):
        if not (value is None or type(value) in (int, float) or value in ("nan", "inf", "-inf")):
            raise ValueError(f"{name}: a number wanted, found {value!r:.60}")


def normal_of(steps: Sequence[Mapping[str, Any]]) -> Normal:
    """What the steps before a scene's own were like."""
    before = steps[:-1]
    losses = _finite(number(step.get("loss")) for step in before)
    norms = [math.log(norm) for norm in _finite(number(step.get("grad_norm")) for step in before) if norm > 0.0]
    loss, norm = (median(values) if values else math.nan for values in (losses, norms))
    return Normal(
        loss=loss,
        loss_scale=max(_spread(losses), 1e-3 * abs(loss) if losses else 0.0, 1e-12),
        grad_norm=math.exp(norm) if norms else math.nan,
        grad_norm_log_scale=max(_spread(norms), 1e-2),
    )


def earliest_surge(steps: Sequence[Mapping[str, Any]]) -> Surge | None:
    """The layer that left its own past first, of several in one step the one that went furthest; None if none did."""
    past: dict[str, list[float]] = {}
    for place, step in enumerate(steps):
        late = place >= max(_LEAST_STEPS, len(steps) - _LATE_STEPS)
        surges = []
        for layer, norm in numbers(step).items():
            known = past.setdefault(layer, [])
            if late and len(known) >= _LEAST_STEPS:
                ratio = norm / math.exp(median(known))
                if not ratio <= OUTLIER_RATIO:  # NaN is a surge.
                    surges.append(Surge(layer=layer, step=int(step["step"]), ratio=ratio))
            elif not late and 0.0 < norm < math.inf:
                known.append(math.log(norm))
        if surges:
            return max(surges, key=lambda one: one.ratio if math.isfinite(one.ratio) else math.inf)
    return None


def _finite(values: Any) -> list[float]:  # noqa: ANN401 - any floats
    return [value for value in values if math.isfinite(value)]


def _spread(values: list[float]) -> float:
    if len(values) < 4:
        return 0.0
    ordered = sorted(values)
    return (ordered[(3 * len(ordered)) // 4] - ordered[len(ordered) // 4]) / _QUARTILES
