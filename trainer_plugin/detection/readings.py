"""Readings: what the detectors hold after a step, as the job exports it."""

import msgspec

from trainer_plugin.detection.weight_jumps import WeightJump


class Readings(msgspec.Struct, frozen=True, kw_only=True):
    """What the detectors hold after a step. NaN stands for "not known yet".

    `layer_ratios`: gradient norm over its own baseline, of each layer that has one. `rate_rise`: the step in which the
    learning rate jumped last, and to how many times what it had been. `weight_jump`: the last layer whose weights did.
    `repeated_spike`: the loss is a spike behind a spike, of those that `withhold_spikes: repeated` withholds.
    `loss_back_in_steps`: how much longer a loss that is away will be so, as it falls now.
    """

    loss_ema: float
    grad_norm_ema: float
    loss_ema_ratio: float
    grad_norm_ema_ratio: float
    loss_mean: float
    loss_stddev: float
    loss_zscore: float
    loss_robust_center: float
    loss_robust_scale: float
    loss_robust_score: float
    grad_norm_robust_center: float
    grad_norm_robust_scale: float
    grad_norm_robust_score: float
    loss_high_steps: dict[float, int]
    grad_norm_high_steps: dict[float, int]
    loss_unrecovered_steps: int
    withheld_steps: int
    amp_scale_collapsed: bool
    hard_batches: bool
    repeated_spike: bool
    layer_ratios: dict[str, float] = {}
    rate_rise: tuple[int, float] | None = None
    weight_jump: WeightJump | None = None
    loss_back_in_steps: float = 0.0
