"""The one list of the metrics that a training job exports: name, kind, help, labels and their values.

Rules, dashboards, tests and the job's own page read this list; nothing is exported that is not in it.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter", "histogram"]

SKIP_REASONS = ("nonfinite", "amp_overflow", "spike", "quarantined")
NONFINITE_PLACES = ("loss", "grad", "weight")
DETECTORS = ("nonfinite", "ema_ratio", "rolling_sigma", "robust", "drift", "oscillation")
SIGNALS = ("loss", "grad_norm", "amp_loss_scale", "weight")
CLASSES = ("gradient_explosion", "lr_too_high", "numerical", "hardware", "bad_sample", "unknown")
ACTIONS = ("clip", "lower_lr", "skip_batch", "rollback", "partial_rollback", "checkpoint", "note", "stop")
SOURCES = ("alert", "local", "operator")
OUTCOMES = ("done", "failed", "refused_cooldown", "refused_budget", "duplicate", "stale", "observed", "no_target")
TIERS = ("local", "shared")
CHECKPOINT_KINDS = ("periodic", "scene")
MOMENTS = ("first", "second")
PROOFS = ("equal", "different")
FACTS = ("framework", "torch", "world_size", "mode", "data_rewind", "loss_mean", "shield")
# All numbers of `detection` and `budget` in guard.yaml, by their names there, and two more.
THRESHOLDS = (
    "warmup_steps", "ema_alpha", "loss_ratio", "grad_norm_ratio", "window", "sigma", "sustained_steps",
    "robust_window", "robust_score", "robust_least_ratio", "drift_limit", "drift_least_ratio", "level_least_ratio",
    "oscillation_spikes", "relearn_steps", "amp_scale_floor", "amp_scale_ceiling", "rollbacks_per_day", "same_target",
    "lr_floor", "cooldown_steps", "alert_grace_seconds", "checkpoint_every_steps",
)  # fmt: skip

LOSS_RATIO_LEVELS = (1.2, 1.5, 2.0, 3.0)
GRAD_NORM_RATIO_LEVELS = (3.0, 10.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One metric family of the job's page.

    `labels` maps each label to the values that are known beforehand: those children exist from the first scrape on,
    counters at 0, so that the first increase of a run is seen by `increase()`. A label mapped to () has values that
    only the job knows (layers, parameter groups); it creates them when it starts. So it does with a counter that is
    there only `where_known`. `run` and `rank` are on every series.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()
    buckets: tuple[float, ...] = ()
    every_rank: bool = False
    where_known: bool = False


def _levels(levels: tuple[float, ...]) -> tuple[str, ...]:
    return tuple(f"{level:g}" for level in levels)


_LOSS_RATIO_BUCKETS = (1.05, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0)
_GRAD_NORM_RATIO_BUCKETS = (1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0)
_ROBUST_SCORE_BUCKETS = (3.0, 4.0, 6.0, 8.0, 12.0, 20.0, 50.0)
_SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

CATALOG: tuple[Metric, ...] = (
    # Progress.
    Metric(name="train_step", kind="gauge", help="Current global step; goes back on a rollback."),
    Metric(name="train_steps_total", kind="counter", help="Optimizer steps run, repeated ones included."),
    Metric(
        name="train_steps_skipped_total",
        kind="counter",
        help="Steps whose update was withheld, or batches left out.",
        labels=(("reason", SKIP_REASONS),),
    ),
    Metric(name="train_batches_reweighted_total", kind="counter", help="Suspect batches trained on with less weight."),
    Metric(name="train_steps_applied_total", kind="counter", help="Optimizer steps whose update reached the weights."),
    Metric(name="train_steps_withheld", kind="gauge", help="Updates withheld in a row up to now, AMP's own left out."),
    Metric(
        name="train_tokens_total",
        kind="counter",
        help="Tokens trained on, where the loop tells them.",
        where_known=True,
    ),
    Metric(
        name="train_samples_total",
        kind="counter",
        help="Samples trained on, where the loop tells their ids.",
        where_known=True,
    ),
    # Values of the last step and their baselines.
    Metric(name="train_loss", kind="gauge", help="Loss of the last step; NaN and Inf as such."),
    Metric(name="train_grad_norm", kind="gauge", help="Total gradient norm before clipping; NaN and Inf as such."),
    Metric(name="train_grad_norm_available", kind="gauge", help="1 if the last step had gradients to measure, else 0."),
    Metric(
        name="train_grad_norm_huge_total",
        kind="counter",
        help="Steps with finite gradients whose norm is beyond float32's squares, above 1.8e19.",
    ),
    Metric(name="train_loss_ema", kind="gauge", help="Step-exact EMA of the loss, outliers kept out."),
    Metric(name="train_grad_norm_ema", kind="gauge", help="Step-exact EMA of the gradient norm, outliers kept out."),
    Metric(name="train_loss_mean", kind="gauge", help="Mean of the rolling window before this step."),
    Metric(name="train_loss_stddev", kind="gauge", help="Population deviation of the rolling window before this step."),
    Metric(name="train_loss_robust_center", kind="gauge", help="Median of the accepted losses."),
    Metric(name="train_loss_robust_scale", kind="gauge", help="Scaled median absolute deviation of accepted losses."),
    Metric(name="train_grad_norm_robust_center", kind="gauge", help="Median of accepted norms (geometric)."),
    Metric(name="train_grad_norm_robust_scale", kind="gauge", help="Scaled MAD of the accepted norms, in log units."),
    Metric(
        name="train_loss_ema_ratio",
        kind="histogram",
        help="Loss over its EMA, one observation a step.",
        buckets=_LOSS_RATIO_BUCKETS,
    ),
    Metric(
        name="train_grad_norm_ema_ratio",
        kind="histogram",
        help="Gradient norm over its EMA, one observation a step.",
        buckets=_GRAD_NORM_RATIO_BUCKETS,
    ),
    Metric(
        name="train_loss_zscore",
        kind="histogram",
        help="Deviations of the loss above its rolling mean.",
        buckets=(2.0, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 10.0),
    ),
    Metric(
        name="train_loss_robust_score",
        kind="histogram",
        help="Robust deviations of the loss above its center; above the limit only with a verdict.",
        buckets=_ROBUST_SCORE_BUCKETS,
    ),
    Metric(
        name="train_grad_norm_robust_score",
        kind="histogram",
        help="Robust deviations of the log gradient norm above its center; above the limit only with a verdict.",
        buckets=_ROBUST_SCORE_BUCKETS,
    ),
    Metric(
        name="train_loss_high_steps",
        kind="gauge",
        help="Consecutive steps with loss / EMA above the level.",
        labels=(("above", _levels(LOSS_RATIO_LEVELS)),),
    ),
    Metric(
        name="train_grad_norm_high_steps",
        kind="gauge",
        help="Consecutive steps with gradient norm / EMA above the level.",
        labels=(("above", _levels(GRAD_NORM_RATIO_LEVELS)),),
    ),
    Metric(
        name="train_loss_unrecovered_steps",
        kind="gauge",
        help="Steps since the loss left its robust band and has not come back for good.",
    ),
    Metric(name="train_loss_recent_max", kind="gauge", help="Largest finite loss of the last 60 s."),
    Metric(name="train_grad_norm_recent_max", kind="gauge", help="Largest finite gradient norm of the last 60 s."),
    # Layers, learning rate, AMP.
    Metric(
        name="train_layer_grad_norm",
        kind="gauge",
        help="Gradient norm of one layer before clipping.",
        labels=(("layer", ()),),
    ),
    Metric(
        name="train_layer_weight_norm",
        kind="gauge",
        help="Norm of one layer's weights, read every so many steps.",
        labels=(("layer", ()),),
    ),
    Metric(
        name="train_layer_update_ratio",
        kind="gauge",
        help="Norm of what one step added to one layer's weights, over the norm of these.",
        labels=(("layer", ()),),
    ),
    Metric(
        name="train_layer_moment_norm",
        kind="gauge",
        help="Norm of one layer's optimizer moment, in the unit of the gradient; absent where there is none.",
        labels=(("layer", ()), ("moment", MOMENTS)),
    ),
    Metric(
        name="train_layer_activation_max",
        kind="gauge",
        help="Largest absolute output of one layer in its last turn; absent unless asked for.",
        labels=(("layer", ()),),
    ),
    Metric(
        name="train_layer_nonfinite_total",
        kind="counter",
        help="Steps in which the layer's gradient was not finite.",
        labels=(("layer", ()),),
    ),
    Metric(
        name="train_learning_rate",
        kind="gauge",
        help="Effective learning rate: schedule x factor.",
        labels=(("group", ()),),
    ),
    Metric(name="train_lr_factor", kind="gauge", help="The guard's own factor on the learning rate."),
    Metric(name="train_clip_max_norm", kind="gauge", help="Norm to which gradients are clipped now; absent if never."),
    Metric(name="train_amp_loss_scale", kind="gauge", help="AMP loss scale of the last step; absent without a scaler."),
    Metric(
        name="train_amp_overflows_total",
        kind="counter",
        help="Steps that the AMP scaler withheld; absent without a scaler.",
        where_known=True,
    ),
    # Verdicts, incidents, actions.
    Metric(
        name="train_detections_total",
        kind="counter",
        help="Verdicts of the job's own detectors.",
        labels=(("detector", DETECTORS), ("signal", SIGNALS)),
    ),
    Metric(
        name="train_nonfinite_total",
        kind="counter",
        help="Steps with a non-finite value, by place.",
        labels=(("where", NONFINITE_PLACES),),
        every_rank=True,
    ),
    Metric(name="train_incident_open", kind="gauge", help="1 while an incident is open."),
    Metric(
        name="train_incidents_total", kind="counter", help="Incidents opened, by class.", labels=(("class", CLASSES),)
    ),
    Metric(
        name="train_actions_total",
        kind="counter",
        help="Actions decided upon, by who asked and what came of them.",
        labels=(("action", ACTIONS), ("source", SOURCES), ("outcome", OUTCOMES)),
    ),
    Metric(name="train_rollback_lost_steps_total", kind="counter", help="Steps undone by rollbacks."),
    Metric(name="train_control_loop_up", kind="gauge", help="1 while the outer loop's heartbeat keeps coming."),
    Metric(name="train_guard_errors_total", kind="counter", help="Errors of the guard itself that were held back."),
    # Checkpoints.
    Metric(
        name="train_checkpoint_step",
        kind="gauge",
        help="Step of the newest whole checkpoint; -1 while there is none.",
        labels=(("tier", TIERS), ("kind", CHECKPOINT_KINDS)),
    ),
    Metric(
        name="train_checkpoint_seconds",
        kind="gauge",
        help="Seconds that the last checkpoint took to be whole in this tier.",
        labels=(("tier", TIERS),),
    ),
    Metric(
        name="train_checkpoint_failures_total",
        kind="counter",
        help="Checkpoints that could not be written.",
        labels=(("tier", TIERS),),
    ),
    Metric(name="train_scene_failures_total", kind="counter", help="Spike scenes that could not be kept."),
    Metric(
        name="train_restore_proofs_total",
        kind="counter",
        help="Restored states held against the loss of their probe batch; a different one is not trained on.",
        labels=(("outcome", PROOFS),),
    ),
    Metric(
        name="train_rollback_target_step",
        kind="gauge",
        help="Step that a rollback would go to now; -1 if there is none.",
    ),
    # Time, thresholds, what runs.
    Metric(
        name="train_step_seconds",
        kind="histogram",
        help="Wall time from boundary to boundary.",
        buckets=_SECONDS_BUCKETS,
        every_rank=True,
    ),
    Metric(
        name="train_data_wait_seconds",
        kind="histogram",
        help="Time the step waited for its batch.",
        buckets=_SECONDS_BUCKETS,
        every_rank=True,
    ),
    Metric(
        name="train_threshold",
        kind="gauge",
        help="The job's own thresholds, to be held against the rules'.",
        labels=(("name", THRESHOLDS),),
    ),
    Metric(
        name="train_info",
        kind="gauge",
        help="Always 1; what runs here, as labels.",
        labels=tuple((fact, ()) for fact in FACTS),
        every_rank=True,
    ),
    Metric(
        name="train_rank_info",
        kind="gauge",
        help="Always 1; where this rank runs: the UUID of its GPU, empty without one, and the name of its host.",
        labels=(("UUID", ()), ("Hostname", ())),
        every_rank=True,
    ),
)
