"""What an action did to the loss, in two numbers."""

import math

from trainer_plugin.effects import EFFECT_STEPS, Effects


def test_an_effect_is_told_when_enough_steps_were_run():
    """Medians before and after, once, after so many steps and not one earlier."""
    effects = Effects()
    for loss in [9.0] * 100 + [4.0] * EFFECT_STEPS:
        assert effects.see(loss) == []
    effects.acted("clip", step=120, incident=1)
    found = [effects.see(2.0 + 0.1 * step) for step in range(EFFECT_STEPS + 5)]
    assert [len(each) for each in found] == [0] * (EFFECT_STEPS - 1) + [1] + [0] * 5
    (effect,) = found[EFFECT_STEPS - 1]
    assert (effect.action, effect.step, effect.incident, effect.loss_before) == ("clip", 120, 1, 4.0)
    assert effect.loss_after == 2.0 + 0.1 * (EFFECT_STEPS - 1) / 2


def test_what_is_not_finite_has_no_level():
    """A NaN is left out of a level, and of NaNs alone there is none; nor is there one before the first step."""
    effects = Effects()
    effects.acted("rollback", step=0, incident=1)
    for _ in range(EFFECT_STEPS - 1):
        effects.see(math.nan)
    (effect,) = effects.see(math.inf)
    assert (effect.loss_before, effect.loss_after) == (None, None)
    effects.see(3.0)
    effects.acted("rollback", step=21, incident=1)
    effects.acted("lower_lr", step=21, incident=1)
    for _ in range(EFFECT_STEPS - 1):
        effects.see(math.nan)
    assert [(each.action, each.loss_before, each.loss_after) for each in effects.see(5.0)] == [
        ("rollback", 3.0, 5.0), ("lower_lr", 3.0, 5.0),
    ]  # fmt: skip
