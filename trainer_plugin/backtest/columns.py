"""By which names logs call step, loss, gradient norm, learning rate and loss scale."""

import re
from collections.abc import Iterable

import msgspec

# Words that say whose value it is, not what: `train/loss` is a `loss`.
_OWNERS = {"train", "training", "trainer", "metric", "metrics", "optim", "optimizer", "stats", "log", "logs", "losses",
           "perf", "data", "scalars", "values"}  # fmt: skip
# Each list: the best name first. Names are lower case, with one underscore for whatever stands between two words.
_STEP = ("step", "global_step", "iteration", "iter", "steps", "global_steps", "iterations", "current_step",
         "current_steps", "num_updates", "update", "updates", "wandb_step", "samples", "consumed_samples",
         "samples_count")  # fmt: skip
_LOSS = ("loss", "lm_loss", "reduced_train_loss", "total_loss", "loss_total", "loss_train", "loss_train_total",
         "loss_step", "ce_loss", "nll_loss", "cross_entropy_loss", "cross_entropy", "language_cross_entropy",
         "loss_metrics_global_avg_loss", "global_avg_loss", "avg_loss", "mean_loss", "loss_avg", "loss_mean",
         "batch_loss", "running_loss")  # fmt: skip
_GRAD_NORM = ("grad_norm", "gradient_norm", "gnorm", "grad_norm_before_clip", "total_grad_norm", "global_grad_norm",
              "grad_norm_total", "grad_norm_global", "global_gradient_norm", "gradnorm", "grad_total_norm",
              "l2_norm_grad_global", "grad_2_0_norm_total", "grad_2_norm_total", "total_norm", "norm")  # fmt: skip
_LEARNING_RATE = ("lr", "learning_rate", "lrs", "base_lr", "max_lr", "lr_0", "learning_rate_0", "lr_group_0",
                  "lr_adamw", "lr_adamw_pg1", "lr_adam", "lr_sgd", "lr_decoupledadamw_group0")  # fmt: skip
_AMP_LOSS_SCALE = ("loss_scale", "amp_loss_scale", "amp_scale", "grad_scale", "loss_scaler", "scaler_scale",
                   "grad_scaler_scale", "cur_scale", "scale")  # fmt: skip
_SPLIT = ("split", "mode", "phase", "stage", "subset")
_RUN = ("run", "run_id", "runid", "run_name")
# Words for what a run is not trained on.
EVALUATION = {"val", "valid", "validation", "validate", "eval", "evaluation", "evaluate", "test", "testing", "dev"}
# A loss with one of these words is not what is trained on, or not of one step.
_OTHER_LOSS = EVALUATION | {"aux", "auxiliary", "z", "mtp", "moe", "router", "balance", "balancing", "min", "max",
                            "scale", "scaler", "epoch", "value", "policy", "kl", "best", "delta", "diff",
                            "last"}  # fmt: skip
# Longer than a name is a sentence.
_MOST_WORDS = 4
# TensorBoard's own export of one series.
_ONE_SERIES = {"wall_time", "step", "value"}


class Columns(msgspec.Struct, frozen=True, kw_only=True):
    """The names that a log uses; None for what it lacks.

    `guessed`: no column is called a loss, but one is likely to be it. `remarks`: what the user should know.
    """

    step: str | None = None
    loss: str | None = None
    grad_norm: str | None = None
    learning_rate: str | None = None
    amp_loss_scale: str | None = None
    run: str | None = None
    split: str | None = None
    guessed: bool = False
    remarks: tuple[str, ...] = ()

    @property
    def samples(self) -> str | None:
        """The name of the step as it is shown, if samples are counted in it."""
        return shown(self.step) if self.step is not None and "samples" in plain(self.step) else None


def plain(name: str) -> str:
    """A name in lower case, with one underscore between its words."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") if name.strip() != "_step" else "wandb_step"


def choose(names: Iterable[str]) -> Columns:
    """The best name for each value, among the names in a log."""
    names = list(dict.fromkeys(names))
    losses = _ranked(names, _LOSS)
    remarks = []
    if len(losses) > 1:
        others = ", ".join(shown(name) for name in losses[1:4]) + (", ..." if len(losses) > 4 else "")
        remarks.append(f"the loss is read from {shown(losses[0])}; there too: {others}")
    guessed = False
    if not losses:
        losses = _likely_losses(names)
        guessed = bool(losses)
        if guessed:
            remarks.append(f"no column is named as a loss usually is: {shown(losses[0])} is taken for it")
    return Columns(
        step=_best(names, _STEP),
        loss=losses[0] if losses else None,
        grad_norm=_best(names, _GRAD_NORM),
        learning_rate=_best(names, _LEARNING_RATE),
        amp_loss_scale=_best(names, _AMP_LOSS_SCALE),
        run=_best(names, _RUN),
        split=_best(names, _SPLIT),
        guessed=guessed,
        remarks=tuple(remarks),
    )


def is_evaluation(split: object) -> bool:
    """Whether a word in a column of splits or modes says that its row is none of training."""
    return isinstance(split, str) and plain(split) in EVALUATION


def shown(name: str) -> str:
    """A name as the user reads it."""
    return f"`{''.join(letter if letter.isprintable() else '?' for letter in name[:60])}`"


def missing_loss(names: Iterable[str]) -> str:
    """What to say when there is no loss among the names of a log."""
    found = [name.strip()[:40] for name in names if name.strip()]
    listed = ", ".join(repr(name) for name in found[:12]) + (f" and {len(found) - 12} more" if len(found) > 12 else "")
    return f"no loss: wanted a name such as loss, train_loss, train/loss or lm_loss, found {listed or 'none'}"


def _best(names: list[str], wanted: tuple[str, ...]) -> str | None:
    ranked = _ranked(names, wanted)
    return ranked[0] if ranked else None


def _ranked(names: list[str], wanted: tuple[str, ...]) -> list[str]:
    """The names that are wanted, best first: by the list, then the shorter, then as they come."""
    found = []
    for position, name in enumerate(names):
        # Weights & Biases puts the run's name and ` - ` before it.
        whole = plain(name.rpartition(" - ")[2])
        words = whole.split("_")
        while len(words) > 1 and words[0] in _OWNERS and "_".join(words) not in wanted:
            words = words[1:]
        bare = "_".join(words)
        if bare in wanted:
            found.append((wanted.index(bare), len(whole), position, name))
    return [name for *_, name in sorted(found)]


def _likely_losses(names: list[str]) -> list[str]:
    if {plain(name) for name in names} == _ONE_SERIES:
        return [name for name in names if plain(name) == "value"]
    likely = []
    for name in names:
        words = plain(name.rpartition(" - ")[2]).split("_")
        if len(words) <= _MOST_WORDS and "loss" in (words[0], words[-1]) and not _OTHER_LOSS & set(words):
            likely.append(name)
    return likely
