"""Decisions: what the policy is asked at a boundary, what it answers, and the options of the actions it may choose."""

from dataclasses import dataclass
from typing import Literal

import msgspec

from exporter.commands import Command
from trainer_plugin.detection.readings import Readings
from trainer_plugin.policy.incidents import Incident
from trainer_plugin.signals import Signals

Mode = Literal["observe", "assist", "auto"]


class ActionsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`actions:` of guard.yaml.

    With `partial_rollback` the layers that surged go back before the whole run does, where they are `partial_layers`
    at most; a person's command may ask for it in any case. `withhold_spikes`: `repeated` withholds the second to the
    fourth spike of the loss in a row, `all` each of the first four out of their bands, `never` none. `last_resort` is
    what is done when it was refused to go back and the run is no better: stop it, or let people decide.
    """

    clip_max_norm: float | None = 1.0
    clip_factor: float = 0.5
    clip_steps: int = 200
    withhold_spikes: Literal["all", "repeated", "never"] = "repeated"
    lr_factor: float = 0.5
    lr_hold_steps: int = 200
    lr_return_steps: int = 200
    lr_stacking: bool = True
    schedule_follows: Literal["applied_steps", "iterations"] = "applied_steps"
    rollback_optimizer: Literal["restore", "reset", "keep"] = "restore"
    partial_rollback: bool = False
    partial_layers: int = 3
    suspect_data: Literal["skip", "reweight"] = "skip"
    suspect_weight: float = 0.1
    alert_grace_seconds: float = 30.0
    last_resort: Literal["stop", "go_on"] = "stop"

    def __post_init__(self) -> None:
        if self.clip_max_norm is not None and not self.clip_max_norm > 0.0:
            raise ValueError(f"`clip_max_norm` must be above 0 or null, found {self.clip_max_norm}")
        for name in ("clip_factor", "lr_factor", "suspect_weight"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise ValueError(f"`{name}` must be between 0 and 1, found {getattr(self, name)}")
        for name in ("clip_steps", "lr_hold_steps", "lr_return_steps", "alert_grace_seconds"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"`{name}` must be at least 0, found {getattr(self, name)}")
        if self.partial_layers < 1:
            raise ValueError(f"`partial_layers` must be at least 1, found {self.partial_layers}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """A boundary: the step just run, all steps ever run, Unix seconds, and whether the outer loop is alive.

    `target_step` is the nearest checkpoint that a rollback could go to now; -1 if there is none.
    """

    step: int
    steps_total: int
    now: float
    loop_up: bool
    target_step: int = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """One action to take now. A rollback goes to a state before `before_step`, its suspect window times `widen`.

    A partial one takes back `layers` alone, the one that surged most first. `brief`: the lower learning rate is a
    precaution, and need not last.
    """

    action: str
    source: str
    reason: str
    incident: Incident
    command: Command | None = None
    before_step: int = 0
    widen: int = 1
    layers: tuple[str, ...] = ()
    brief: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A command or wish that leads to no action, and why."""

    action: str
    source: str
    outcome: str
    detail: str
    command: Command | None = None


def spike_withheld(signals: Signals, readings: Readings, *, mode: Mode, actions: ActionsConfig) -> bool:
    """Whether a step was withheld as a spike, or would have been in mode `auto`; `all` is taken for `repeated` then."""
    would = mode != "auto" and readings.repeated_spike and actions.withhold_spikes != "never"
    return would or signals.withheld == "spike"
