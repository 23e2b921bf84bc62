"""The budget: how much the guard may do before a person has to look, and what it has spent."""

import msgspec

_DAY_SECONDS = 86_400.0


class BudgetConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`budget:` of guard.yaml: how much the guard may do before a person has to look."""

    rollbacks_per_day: int = 3
    same_target: int = 2
    lr_floor: float = 0.1
    cooldown_steps: int = 200

    def __post_init__(self) -> None:
        for name in ("rollbacks_per_day", "same_target", "cooldown_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}` must be at least 0, found {getattr(self, name)}")
        if not 0.0 < self.lr_floor <= 1.0:
            raise ValueError(f"`lr_floor` must be above 0 and at most 1, found {self.lr_floor}")


class Rollback(msgspec.Struct, frozen=True, kw_only=True):
    """A rollback that was done; `nearest_step` was the nearest target, `to_step` the one it took.

    `answers` are the commands that had asked for one by the time it was done: they have it.
    """

    at: float
    at_step: int
    at_steps_total: int
    to_step: int
    nearest_step: int
    incident: int
    answers: tuple[str, ...] = ()


def recent(rollbacks: list[Rollback], now: float) -> list[Rollback]:
    """The rollbacks of the last day; one that is more than a day ahead was told by a clock that was wrong."""
    return [rollback for rollback in rollbacks if abs(now - rollback.at) < _DAY_SECONDS]


def in_vain(rollbacks: list[Rollback], incident: int, nearest_step: int, now: float) -> list[Rollback]:
    """The rollbacks of the last day that have not helped: of this very incident, or with the same nearest target.

    A nearest target of -1 is not known, and the same as no other.
    """
    return [
        rollback
        for rollback in recent(rollbacks, now)
        if rollback.incident == incident or rollback.nearest_step == nearest_step >= 0
    ]


def overspent(config: BudgetConfig, rollbacks: list[Rollback], vain: list[Rollback], now: float) -> str:
    """Why another rollback is not allowed, or an empty text; `vain` are those that have not helped."""
    if len(recent(rollbacks, now)) >= config.rollbacks_per_day:
        return f"rollbacks_per_day ({config.rollbacks_per_day}) is spent"
    if len(vain) >= config.same_target:
        return f"same_target ({config.same_target}) is spent: the last one went to step {vain[-1].to_step}"
    return ""
