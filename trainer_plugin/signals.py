"""Signals: what one training step showed, as plain numbers."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Signals:
    """One step, read at its boundary.

    `grad_norm` and `layer_grad_norms` are taken before clipping and after AMP's unscaling; they are None and empty
    when no gradient was there to measure (never 0). A non-finite value is kept as it was. `clip_coefficient` is what
    every gradient was multiplied with. `withheld` says why the optimizer did not apply this step, if it did not.
    `loss_mean` is how the loss was made of micro-batches: `none`, `micro_batch` or `token`.
    """

    step: int
    loss: float
    grad_norm: float | None
    layer_grad_norms: dict[str, float]
    clip_coefficient: float
    surge: bool
    withheld: str | None
    amp_loss_scale: float | None
    learning_rates: tuple[float, ...]
    step_seconds: float
    data_wait_seconds: float
    data_position: int | None
    sample_ids: tuple[str, ...] = ()
    tokens: int | None = None
    loss_mean: str = "none"
