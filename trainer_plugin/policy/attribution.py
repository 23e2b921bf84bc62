"""Attribution (R18): which of five classes an incident is. Pure.

The order is that of R18: gradient and learning rate, numerical, hardware, data. A cause that was seen itself (a rate
that rose, a loss scale that collapsed, a GPU that reports a fault) comes before one that is read from a symptom.
"""

import math
from collections import deque
from collections.abc import Collection, Mapping
from statistics import median

import msgspec

from trainer_plugin.detection.readings import Readings
from trainer_plugin.signals import Signals

# A sum of scores begins by chance a step or two before a jump; earlier than that it is a climb.
CLIMB_STEPS = 3
# A drift that is found so few steps after it began is a jump, found by the sum of its scores.
QUICK_SIGN = "jump:loss"
LR_SIGNS = ("drift:loss", "drift:grad_norm", "oscillation:loss")
# A rate that rose shows in the loss within so many steps, or it was well chosen.
RISE_STEPS = 100
# Of a rise that comes again ratio and rate are the same to within this factor.
_ALIKE_RATIO = 1.25
_MOST_BORNE = 8
# R3: a gradient norm below so many times its baseline is calm.
_CALM_RATIO = 1.5
# A batch or three, and the eight good steps by which a loss counts as back.
SHORT_STEPS = 12
# So long no batch is to blame.
LASTING_STEPS = 20
# What the driver says of memory, bus or chip explains any symptom there is.
GPU_FAULT = "TrainGpuFault"
# What a link drops or garbles comes before the data. That something is slow explains a wrong loss only where nothing
# else does.
_LINK_FAULTS = frozenset({"TrainNetworkErrors"})
_SLOW = frozenset({"TrainStraggler", "TrainGpuThrottled", "slow steps"})
MACHINE_ALERTS = frozenset({GPU_FAULT, *_LINK_FAULTS, "TrainStraggler", "TrainGpuThrottled"})


def classify(
    signs: Mapping[str, int],
    grad_norm_ratio: float | None,
    *,
    rate_rise: float | None = None,
    course: str = "",
    machine: Collection[str] = (),
) -> str:
    """The class of an incident from its first signs (`detector:signal` -> step), asked in the order of R18.

    R3: a gradient that surges before the loss, or without it, is a divergence. Both at once say nothing yet: so does a
    batch, and so do weights that went wrong in the step before. A batch is soon over. A loss that jumps over a calm
    gradient is the batch at once. A loss that climbs before it jumps, or is thrown out again and again, has been let
    go too fast; what comes after a jump is its aftermath.

    Args:
        signs: where each began.
        grad_norm_ratio: gradient norm over its baseline when the loss jumped, None while it has not.
        rate_rise: how many times as high the learning rate has become shortly before; None for as ever.
        course: `over` when the loss was back after a few steps, `lasting` when it was not, else empty.
        machine: alerts about the run's machines, and "slow steps".
    """
    if rate_rise is not None:
        return "lr_too_high"
    if "drift:amp_loss_scale" in signs:
        return "numerical"
    if GPU_FAULT in machine:
        return "hardware"
    if any(sign.startswith("nonfinite:") for sign in signs):
        return "numerical"
    return _by_loss_and_norm(signs) or _by_course(signs, grad_norm_ratio, course, machine)


def has_jumped(signs: Mapping[str, int]) -> bool:
    """Whether the loss has left its band at once."""
    return _jump(signs) < math.inf


def _jump(signs: Mapping[str, int]) -> float:
    """The step in which it did; infinite for none."""
    return min((signs[sign] for sign in ("robust:loss", QUICK_SIGN) if sign in signs), default=math.inf)


def _by_loss_and_norm(signs: Mapping[str, int]) -> str:
    """Which of them went first; empty where that says nothing."""
    loss = _jump(signs)
    norm = min((step for sign, step in signs.items() if sign.endswith(":grad_norm")), default=math.inf)
    climb, again = signs.get("drift:loss", math.inf), signs.get("oscillation:loss", math.inf)
    if norm < loss:
        return "gradient_explosion"
    climbed = loss - climb >= CLIMB_STEPS and climb < math.inf
    return "lr_too_high" if climbed or (again < math.inf and again <= loss) else ""


def _by_course(signs: Mapping[str, int], grad_norm_ratio: float | None, course: str, machine: Collection[str]) -> str:
    """How it went on after a jump of the loss, and who else was there."""
    if not has_jumped(signs):
        return "unknown"
    if not _LINK_FAULTS.isdisjoint(machine):
        return "hardware"
    calm = grad_norm_ratio is not None and grad_norm_ratio < _CALM_RATIO
    if course == "over" or (calm and course != "lasting"):
        return "bad_sample"
    if signs.get("ema_ratio:grad_norm", -1) > _jump(signs):
        return "gradient_explosion"
    return "hardware" if not _SLOW.isdisjoint(machine) else "unknown"


class Rise(msgspec.Struct, frozen=True, kw_only=True):
    """A learning rate that jumped: where, to how many times what it had been, and to what."""

    step: int
    ratio: float
    rate: float

    def is_like(self, other: "Rise") -> bool:
        """Whether two rises are the same, as those of a cyclic schedule are."""
        pairs = ((self.ratio, other.ratio), (self.rate, other.rate))
        return all(a <= _ALIKE_RATIO * b and b <= _ALIKE_RATIO * a for a, b in pairs)


class RateRises(msgspec.Struct, kw_only=True):
    """The rises of the learning rate that the run has borne: nothing was wrong for twice RISE_STEPS, or until the next.

    What a cyclic schedule does again and again is no cause of what comes after it once; what has harmed is forgotten.
    `known`: `newest` is such a one.
    """

    newest: Rise | None = None
    known: bool = False
    harmless: bool = True
    borne: list[Rise] = msgspec.field(default_factory=list)

    def judge(self, signals: Signals, readings: Readings, *, quiet: bool) -> Readings:
        """Take in a step, `quiet` without an incident; its readings, without a rise that was borne before.

        Nor with the weights that may have jumped at it.
        """
        told, newest = readings.rate_rise, self.newest
        if newest is not None and signals.step < newest.step:  # The run has gone back.
            self.newest, self.known = None, False
        elif newest is not None and signals.step <= newest.step + 2 * RISE_STEPS:
            self.harmless = self.harmless and quiet
            if not self.harmless:
                self.borne = [one for one in self.borne if not newest.is_like(one)]
        if told is not None and told[0] == signals.step:
            if self.newest is not None and self.harmless and not self.known:
                self.borne = [*self.borne, self.newest][-_MOST_BORNE:]
            newest = Rise(step=told[0], ratio=told[1], rate=max(signals.learning_rates))
            finite = math.isfinite(newest.ratio) and math.isfinite(newest.rate)  # JSON has no infinity to keep.
            self.newest = newest if finite else None
            self.known = finite and any(newest.is_like(one) for one in self.borne)
            # In warm-up nobody would see whether it harms.
            self.harmless = quiet and not math.isnan(readings.loss_robust_score)
        if not self.known or self.newest is None:
            return readings
        jump, rise = readings.weight_jump, self.newest.step
        borne = jump is not None and rise <= jump.last_step and jump.after_step < rise + RISE_STEPS
        return msgspec.structs.replace(readings, rate_rise=None, weight_jump=None if borne else jump)


class StepTimes:
    """Seconds of the last steps, and whether the newest of them are slow against those before."""

    _KEPT = 64
    _NEWEST = 10
    _MOST_QUICK = 2
    _SLOW_RATIO = 2.0

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=self._KEPT)

    def add(self, step_seconds: float, data_wait_seconds: float) -> None:
        """One step; what is not known is left out."""
        if math.isfinite(step_seconds):
            self._steps.append((step_seconds, data_wait_seconds))

    def slow(self) -> str:
        """What there is to say of the newest steps; empty where they are as ever. One long step is not enough."""
        steps = list(self._steps)
        earlier, newest = steps[: -self._NEWEST], steps[-self._NEWEST :]
        if len(earlier) < 2 * self._NEWEST:
            return ""
        usual = median(seconds for seconds, _ in earlier)
        slow = [one for one in newest if one[0] > self._SLOW_RATIO * usual]
        if len(slow) < self._NEWEST - self._MOST_QUICK:
            return ""
        seconds, waits = median(one[0] for one in slow), median(one[1] for one in slow)
        waiting = f", {waits:.3g} s of them for data" if waits > seconds / 2 else ""
        return f"slow steps, {seconds:.3g} s against {usual:.3g} s{waiting}"
