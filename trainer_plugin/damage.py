"""The damage of a step gone bad: what is not finite, and on which ranks it began."""

import math
from dataclasses import dataclass

from trainer_plugin.signals import Signals


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """Names of the parameters whose gradient, and of the weights that, held a NaN or Inf."""

    gradients: list[str]
    weights: list[str]


def together(damages: list[Damage]) -> Damage:
    """What several ranks have found, each name once."""
    return Damage(
        gradients=list(dict.fromkeys(name for one in damages for name in one.gradients)),
        weights=list(dict.fromkeys(name for one in damages for name in one.weights)),
    )


def is_bad(signals: Signals) -> bool:
    """Whether a step's loss or gradient is not finite."""
    return not math.isfinite(signals.loss) or not math.isfinite(signals.grad_norm or 0.0)


def where(signals: Signals, told: list[str]) -> list[str]:
    """On which of several ranks it began, in a line, unless that is `told`.

    A gradient is every rank's by the time it can be looked at.
    """
    ranks = ", ".join(str(rank) for rank in signals.loss_ranks)
    line = f"the loss is not finite on rank{'s' * (len(signals.loss_ranks) > 1)} {ranks}"
    return [f"step {signals.step}: {line}"] if ranks and not any(one.endswith(line) for one in told) else []
