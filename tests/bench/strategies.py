"""What people do against a fault: nothing, a clip, a human with checkpoints, peers' rules, and our guard.

Each is a training loop's other half: `next_batch`, `before_optimizer(loss)` (whether the optimizer shall step),
`end_step`. `step` counts the steps in the history of the weights as they are, and `applied` those of them that changed
the weights; both go back with the weights. `actions` tells what was done that the recipe does not do anyway.
"""

import copy
import math
import random
import shutil
import sys
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path

import torch
from peers import SkipStep, ZClip
from recovery_plan import LOOK_STEPS, PROMETHEUS
from torch import nn
from twins import options

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from waiting import wait_for

from trainer_plugin.demo.servers import Stack
from trainer_plugin.guard import Guard

CLIP_MAX_NORM = 1.0
# The human sees a loss that is a tenth off: the mean of the last steps against that of the last ones before the fork.
_SEEN_STEPS, _USUAL_STEPS, _OFF_RATIO = 20, 100, 1.1


class Plain:
    """No clip, and nobody who looks. All that has no guard goes on from the fork's state."""

    stopping = False

    def __init__(self, bench, fork):
        self.step = self.applied = fork.step
        self.actions = []
        self._bench = bench
        self._stepped = True
        self._load(fork)

    def next_batch(self):
        """The next one of the data."""
        return next(self._bench.data)

    def before_optimizer(self, loss):
        """Look at loss and gradients, change these, and say whether the optimizer shall step."""
        self._stepped = self._judge(loss.item())
        return self._stepped

    def end_step(self):
        """Count."""
        self.step += 1
        self.applied += self._stepped

    def close(self):
        """Nothing is left open."""

    def _judge(self, loss):
        del loss
        return True

    def _clip(self, max_norm=CLIP_MAX_NORM):
        """Clip as torch does; the norm before."""
        return nn.utils.clip_grad_norm_(self._bench.model.parameters(), max_norm).item()

    def _load(self, fork, *, data=True):
        # A copy: an optimizer takes the tensors themselves for its own, and goes on to change them.
        for name, state in copy.deepcopy(fork.state).items():
            if name != "data" or data:
                getattr(self._bench, name).load_state_dict(state)


class Clip(Plain):
    """The gradient norm clipped to 1, as most recipes do, and the twin's does."""

    def _judge(self, loss):
        self._clip()
        return True


class Human(Clip):
    """Checkpoints, and a human who looks every `LOOK_STEPS`, the first time at any of so many steps.

    Who sees a loss that is off restarts from the newest checkpoint before the fault, which is the fork, and leaves out
    the data from there to now.
    """

    def __init__(self, bench, fork, *, seed):
        super().__init__(bench, fork)
        self._fork = fork
        self._until_look = random.Random(seed).randint(1, LOOK_STEPS)
        self._losses = []
        before = [loss for loss, _ in fork.history[-_USUAL_STEPS:]]
        self._usual = sum(before) / len(before)

    def _judge(self, loss):
        self._losses.append(loss)
        return super()._judge(loss)

    def end_step(self):
        """Look, when it is time."""
        super().end_step()
        self._until_look -= 1
        if self._until_look:
            return
        self._until_look = LOOK_STEPS
        seen = self._losses[-_SEEN_STEPS:]
        # Written as "not within", so that NaN is off.
        if not sum(seen) / len(seen) <= _OFF_RATIO * self._usual:
            self._load(self._fork, data=False)
            self.step = self.applied = self._fork.step
            self._losses = []
            self.actions.append("restart")


class SkippingSteps(Clip):
    """OLMo-core's skip-step: no update where loss or norm is 6 deviations above the last 128 (R2 of the peers)."""

    def __init__(self, bench, fork):
        super().__init__(bench, fork)
        self._rule = SkipStep()
        for loss, norm in fork.history:
            self._rule.fires(loss, norm)

    def _judge(self, loss):
        norm = self._clip()
        if not self._rule.fires(loss, norm):
            return True
        self.actions.append("skip")
        # There an update is left out by a factor of 0, and 0 x NaN is NaN: what is not finite gets through.
        return not (math.isfinite(loss) and math.isfinite(norm))


class ZClipping(Plain):
    """ZClip: the norm clipped by its z-score (R5 of the peers), and to 1 at most."""

    def __init__(self, bench, fork):
        super().__init__(bench, fork)
        self._rule = ZClip()
        for loss, norm in fork.history:
            self._rule.fires(loss, norm)

    def _judge(self, loss):
        norm = nn.utils.get_total_norm([p.grad for p in self._bench.model.parameters()]).item()
        if self._rule.fires(loss, norm) and self._rule.limit < CLIP_MAX_NORM:
            self.actions.append("clip")
        self._clip(min(self._rule.limit, CLIP_MAX_NORM))
        return True


class Spam(Plain):
    """SPAM: elements of a gradient clipped by their own second moment, and moments reset every 500 steps.

    Huang et al., 2025, written anew from the description: |g| at most sqrt(5000 v) from 20 steps after a reset on, then
    a cosine warm-up of 150 steps. It stands in the place of the clip of the norm.
    """

    _RATIO, _RESET_STEPS, _BLIND_STEPS, _WARMUP_STEPS = 5000.0, 500, 20, 150

    def __init__(self, bench, fork):
        super().__init__(bench, fork)
        self._rates = None
        self._since_reset = fork.step % self._RESET_STEPS

    @torch.no_grad()
    def _judge(self, loss):
        del loss
        optimizer = self._bench.optimizer
        self._since_reset += 1
        if self._since_reset == self._RESET_STEPS:
            self._since_reset = 0
            optimizer.state.clear()
            self.actions.append("reset")
        elif self._since_reset >= self._BLIND_STEPS:
            for parameter, moments in optimizer.state.items():
                limit = (self._RATIO * moments["exp_avg_sq"]).sqrt()
                # By where, and not by clamp: an element that never had a gradient has a moment of 0, and is left.
                large = (parameter.grad.abs() > limit) & (limit > 0.0)
                parameter.grad = torch.where(large, parameter.grad.sign() * limit, parameter.grad)
        self._rates = [group["lr"] for group in optimizer.param_groups]
        # The first reset is to come, so the run before it is in no warm-up.
        if self.actions and self._since_reset < self._WARMUP_STEPS:
            share = 0.5 * (1.0 - math.cos(math.pi * (self._since_reset + 1) / self._WARMUP_STEPS))
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * share
        return True

    def end_step(self):
        """Put the learning rates back."""
        for group, rate in zip(self._bench.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        super().end_step()


class Guarded:
    """Our guard, started on a copy of the twin's folders as after a kill; with real servers around it, or without."""

    def __init__(self, bench, fork, *, plan, folder, servers=False, **sections):
        self._folder = Path(folder) / "guarded"
        self._withheld = set()
        shutil.copytree(fork.folder, self._folder, ignore=shutil.ignore_patterns("state.pt"))
        with ExitStack() as undo:
            if servers:
                undo.enter_context(Stack(self._folder / "servers", self._folder / "runs", files("alert_rules")))
            self._guard = Guard(
                options(self._folder, plan, **sections),
                model=bench.model,
                optimizer=bench.optimizer,
                scheduler=bench.scheduler,
                data=bench.data,
                resume="require",
                local_only=not servers,
                on_signals=self._hear,
            )
            undo.callback(self._guard.close)
            assert self._guard.step == fork.step
            if servers:
                wait_for(lambda: self._guard._parts.loop.up, 60.0, pause_seconds=0.1)
            self._undo = undo.pop_all()
        self._total = self._guard._parts.history.steps_total

    @property
    def step(self):
        """As above."""
        return self._guard.step

    @property
    def applied(self):
        """As above."""
        return self.step - sum(step <= self.step for step in self._withheld)

    @property
    def stopping(self):
        """Whether the guard has given up."""
        return self._guard.stopping

    @property
    def actions(self):
        """Every remedy that was done, also within a step."""
        incidents = self._guard._parts.policy.state.incidents
        done = [remedy for incident in incidents for remedy in incident.remedies if remedy.outcome == "done"]
        return [remedy.action for remedy in done if remedy.steps_total > self._total]

    def next_batch(self):
        """As above."""
        return self._guard.next_batch()

    def before_optimizer(self, loss):
        """The guard withholds by itself what is not to be applied."""
        self._guard.before_optimizer(loss)
        return True

    def end_step(self):
        """As above."""
        self._guard.end_step()

    def close(self):
        """End guard and servers."""
        self._undo.close()

    def _hear(self, signals):
        if signals.withheld is None:
            self._withheld.discard(signals.step)
        else:
            self._withheld.add(signals.step)


def strategy_of(trial, bench, fork, *, plan, folder):
    """The strategy of a trial, at the fork; a guard's files lie in `folder`."""
    no_way_back = {"budget": {"rollbacks_per_day": 0}, "actions": {"last_resort": "go_on"}}
    made = {
        "none": lambda: Plain(bench, fork),
        "clip 1.0": lambda: Clip(bench, fork),
        "checkpoints and a human": lambda: Human(bench, fork, seed=f"{trial.seed} {trial.fault} {trial.moment}"),
        "skip-step 128/6": lambda: SkippingSteps(bench, fork),
        "ZClip": lambda: ZClipping(bench, fork),
        "SPAM": lambda: Spam(bench, fork),
        "guardrails": lambda: Guarded(bench, fork, plan=plan, folder=folder, **no_way_back),
        "full ladder, local": lambda: Guarded(bench, fork, plan=plan, folder=folder),
        PROMETHEUS: lambda: Guarded(bench, fork, plan=plan, folder=folder, servers=True),
    }
    return made[trial.strategy]()
