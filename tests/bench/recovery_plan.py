"""What `make bench-recovery` runs: faults, moments, strategies and seeds, and in which order."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple

from trainer_plugin.faults import Faults

CLEAN = "nothing"
PROMETHEUS = "full ladder, Prometheus"
# A step stands for 10 s of a large run. The human looks once an hour then, and takes 10 minutes for a restart.
STEP_SECONDS = 10.0
LOOK_STEPS = 360
RESTART_MINUTES = 10.0
# Every kind of fault, as short and as long as it comes: `at` counts the clean steps before it, `position` the batches.
FAULTS: dict[str, Callable[[int, int], Faults]] = {
    CLEAN: lambda *_: Faults(),
    "garbage text, 1 batch": lambda _, position: Faults().garbage_text(at=position),
    "garbage text, 5 batches": lambda _, position: Faults().garbage_text(at=position, steps=5),
    "text in any order, 1 batch": lambda _, position: Faults().shuffled_labels(at=position),
    "one sample x 1000, 1 step": lambda at, _: Faults().huge_sample(at=at),
    "learning rate x 100, 10 steps": lambda at, _: Faults().lr_jump(at=at, times=100.0, steps=10),
    "learning rate x 30, 10 steps": lambda at, _: Faults().lr_jump(at=at, times=30.0, steps=10),
    "gradients x 1e6, 1 step": lambda at, _: Faults().grad_scale(at=at, times=1e6),
    "gradients x 1e6, 20 steps": lambda at, _: Faults().grad_scale(at=at, times=1e6, steps=20),
    "gradients of a block x 1e4, 1 step": lambda at, _: Faults().exploding_layer(
        at=at, times=1e4, parameter="blocks.0"
    ),
    "overflow in fp16, 1 step": lambda at, _: Faults().fp16_overflow(at=at),
    "layer norm without eps, 1 step": lambda at, _: Faults().layer_norm_eps(at=at),
    "NaN in a gradient, 1 step": lambda at, _: Faults().nan_gradient(at=at),
    "NaN in a gradient, 20 steps": lambda at, _: Faults().nan_gradient(at=at, steps=20),
    "a bit of a weight flips": lambda at, _: Faults().bit_flip(at=at),
    "noise in all weights": lambda at, _: Faults().weight_noise(at=at, times=1.0),
}
# Nothing is lost by them, or a trial here could not show it.
LEFT_OUT: dict[str, str] = {
    "duplicated_document": "the loss is in the noise",
    "slow_rank": "the loss is calm",
    "stalled_loader": "the loss is calm",
    "lr_peak": "a run that never was better forks from no twin",
    "amp_collapse": "there is no loss scale here",
    "xid": "what it does to weights is `a bit of a weight flips`",
    "ecc": "what it does to weights is `a bit of a weight flips`",
    "network_errors": "what they do to weights is `noise in all weights`",
}
STRATEGIES = (
    "none",
    "clip 1.0",
    "checkpoints and a human",
    "guardrails",
    "full ladder, local",
    "skip-step 128/6",
    "ZClip",
    "SPAM",
)


class Trial(NamedTuple):
    """One trial: a seed's run with one fault, after so many clean steps, under one strategy."""

    seed: int
    fault: str
    moment: int
    strategy: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All trials. `after` is the steps run from the fault on; `every` is the steps between checkpoints and forks."""

    seeds: tuple[int, ...] = (0, 1, 2)
    faults: tuple[str, ...] = tuple(FAULTS)
    # 30 and 70 steps after a checkpoint, so half an interval in the mean.
    moments: tuple[int, ...] = (630, 1870)
    # Real seconds: the alert's way takes as many steps as fit into it, so one moment tells as much as two.
    prometheus_moments: tuple[int, ...] = (1870,)
    strategies: tuple[str, ...] = STRATEGIES
    after: int = 600
    every: int = 100
    look_every: int = 10

    def forks(self) -> list[int]:
        """The steps at which trials leave the twin: the newest checkpoint before each moment."""
        return sorted({self.fork_of(moment) for moment in self.moments})

    def fork_of(self, moment: int) -> int:
        """The newest checkpoint before a fault at this moment."""
        return moment // self.every * self.every

    @property
    def twin_steps(self) -> int:
        """Steps of the twin: as many as a trial could apply."""
        return -(-(max(self.moments) + self.after) // self.look_every) * self.look_every

    def trials(self) -> list[Trial]:
        """Every trial, seed by seed, so that a run that is cut off has whole seeds."""
        trials = []
        for seed in self.seeds:
            for fault in self.faults:
                for moment in self.moments:
                    names = self.strategies
                    if moment in self.prometheus_moments:
                        names = (*names, PROMETHEUS)
                    trials += [Trial(seed, fault, moment, name) for name in names]
        return trials

    def settings(self) -> dict[str, object]:
        """What results must have in common to stand in one table."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


FULL = Plan()
# To see that it runs, a rollback included: figures of so few steps say nothing.
QUICK = Plan(
    seeds=(7,),
    faults=(CLEAN, "NaN in a gradient, 20 steps"),
    moments=(120,),
    prometheus_moments=(),
    after=30,
    every=50,
)
