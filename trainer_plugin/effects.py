"""What an action did to the loss: its level before and after, for the trail."""

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

EFFECT_STEPS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """Medians of the loss in `EFFECT_STEPS` steps before and after an action at `step`; None where none is finite."""

    action: str
    step: int
    incident: int
    loss_before: float | None
    loss_after: float | None


@dataclass(kw_only=True, slots=True)
class _Waiting:
    action: str
    step: int
    incident: int
    before: float | None
    after: list[float] = field(default_factory=list)


class Effects:
    """Watches the loss around actions. Of what a restart interrupts nothing is told."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=EFFECT_STEPS)
        self._waiting: list[_Waiting] = []

    def acted(self, action: str, *, step: int, incident: int) -> None:
        """An action was done at the boundary of `step`."""
        before = _level(list(self._losses))
        self._waiting.append(_Waiting(action=action, step=step, incident=incident, before=before))

    def see(self, loss: float) -> list[Effect]:
        """Take in the loss of one step; return the effects that are known by it."""
        self._losses.append(loss)
        for one in self._waiting:
            one.after.append(loss)
        done = [one for one in self._waiting if len(one.after) >= EFFECT_STEPS]
        self._waiting = [one for one in self._waiting if len(one.after) < EFFECT_STEPS]
        return [
            Effect(
                action=one.action,
                step=one.step,
                incident=one.incident,
                loss_before=one.before,
                loss_after=_level(one.after),
            )
            for one in done
        ]


def _level(losses: list[float]) -> float | None:
    finite = [loss for loss in losses if math.isfinite(loss)]
    return median(finite) if finite else None
