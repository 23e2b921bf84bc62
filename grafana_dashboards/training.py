"""The dashboard of one training: what the loss, the gradients, the layers and the learning rate do."""

from grafana_dashboards.assembly import assemble, run_variable, variable
from grafana_dashboards.look import OPEN
from grafana_dashboards.panels import Panel, Part, heat, lines, number, section
from grafana_dashboards.queries import RUN, Query, events, gauge, happened, highest, level, threshold

_LAYERS = f'{RUN}, layer=~"$layer"'
# As the detector has it: so many deviations above the center, but at least so many times the center.
_CENTER = gauge("train_loss_robust_center")
_DEVIATIONS = f"{threshold('robust_score')} * on (run) {gauge('train_loss_robust_scale')}"
_LEAST = f"{threshold('robust_least_ratio')} * on (run) {_CENTER}"
_LOSS_LIMIT = f"({_CENTER} + on (run) {_DEVIATIONS}) > on (run) ({_LEAST}) or {_LEAST}"
_STEP_SECONDS = "histogram_quantile({share}, sum by (le) (rate({metric}_bucket{{{run}}}[$__rate_interval])))"


def build() -> str:
    """The dashboard's JSON."""
    return assemble(
        "guard-training",
        "Training",
        "One run: loss, gradients, layers, learning rate and throughput, with the limits of the alert rules.",
        [
            *_now(),
            section("Loss"),
            *_loss(),
            section("Gradients and layers"),
            *_gradients(),
            section("Learning rate and throughput"),
            _learning_rate(),
            *_throughput(),
            section("AMP (only with a GradScaler)", *_amp()),
        ],
        variables=[
            run_variable(),
            variable("layer", "Layer", f"label_values(train_layer_grad_norm{{{RUN}}}, layer)", several=True),
        ],
    )


def _now() -> list[Part]:
    return [
        number("Step", "The current global step; goes back on a rollback.", f"run:train_step:max{{{RUN}}}"),
        number("Loss", "The loss of the last step. Not there while it is NaN or infinite.", gauge("train_loss")),
        number(
            "Values",
            "Whether a loss or a gradient of the last minute was NaN or infinite, on any rank.",
            f"sum by (run) (increase(train_nonfinite_total{{{RUN}}}[1m])) > bool 0",
            words={0: ("finite", "green"), 1: ("non-finite", "red")},
            alerts=["TrainNonFinite", "TrainWeightsNonFinite"],
        ),
        number(
            "Incident",
            "Whether the job's policy has an incident open.",
            level("train_incident_open"),
            words=OPEN,
        ),
        number(
            "Learning rate factor",
            "The guard's own factor over the schedule; 1 while it leaves the rate alone.",
            level("train_lr_factor"),
            unit="percentunit",
        ),
        number("Steps a second", "Over the last minute.", f"run:train_steps:rate1m{{{RUN}}}"),
    ]


def _loss() -> list[Part]:
    return [
        lines(
            "Loss and its usual band",
            "The loss, its outlier-free baselines, and the band up to the limit above which the robust detector "
            "speaks. The highest loss of each minute shows what lies between two scrapes. NaN is a gap.",
            Query(expr=_LOSS_LIMIT, legend="limit", color="semi-dark-green", style="hidden", down_to="usual"),
            Query(expr=gauge("train_loss_robust_center"), legend="usual", color="semi-dark-green"),
            Query(expr=gauge("train_loss_ema"), legend="EMA", color="orange", style="dashed"),
            Query(expr=highest("train_loss_recent_max"), legend="highest of a minute", color="red", style="thin"),
            Query(expr=gauge("train_loss"), legend="loss", color="blue"),
            unit="none",
            width=16,
            height=10,
            alerts=["TrainLossSpike"],
        ),
        lines(
            "Verdicts",
            "What the job's own detectors said, and about which signal. Empty is good.",
            Query(
                expr=events("train_detections_total", "detector, signal"),
                legend="{{detector}}: {{signal}}",
                style="bars",
            ),
            unit="none",
            width=8,
            height=10,
            least=0,
        ),
        lines(
            "Loss over its EMA",
            "The highest loss of each minute, over the moving average that outliers do not enter.",
            Query(
                expr=f"{highest('train_loss_recent_max')} / {gauge('train_loss_ema')}",
                legend="highest",
                color="red",
                style="thin",
            ),
            Query(expr=f"{gauge('train_loss')} / {gauge('train_loss_ema')}", legend="last", color="blue"),
            unit="none",
            width=8,
            limits=[3],
            alerts=["TrainLossSpike", "TrainLossSpikeSustained"],
        ),
        lines(
            "Steps beyond a limit",
            "Steps of a minute beyond each rule's limit: 8 robust deviations, 3 times the EMA, mean + 3.5 deviations. "
            "The last is told and raises nothing: noise alone gets there.",
            Query(expr=highest("run:train_loss_robust_score_high:increase1m"), legend="robust score > 8", color="red"),
            Query(expr=highest("run:train_loss_ema_ratio_high:increase1m"), legend="ratio > 3", color="orange"),
            Query(expr=highest("run:train_loss_zscore_high:increase1m"), legend="z > 3.5", color="blue", style="thin"),
            unit="none",
            width=8,
            least=0,
            limits=[0.5],
            alerts=["TrainLossSpike"],
        ),
        lines(
            "Steps in a row",
            "Steps since the loss left its band, and steps in a row above 3 times its EMA. At 200 the rules ask for a "
            "rollback.",
            Query(expr=highest("train_loss_unrecovered_steps"), legend="out of the band", color="red"),
            Query(
                expr=highest("train_loss_high_steps", of=f'{RUN}, above="3"'), legend="above 3 x EMA", color="orange"
            ),
            unit="none",
            width=8,
            least=0,
            most=220,
            limits=[200],
            alerts=["TrainLossNotRecovering", "TrainLossSpikeSustained"],
        ),
    ]


def _gradients() -> list[Part]:
    return [
        lines(
            "Gradient norm",
            "Before clipping, with its EMA, the norm to which it is clipped, and 10 times the EMA: from there on it is "
            "a surge, clipped in that very step.",
            Query(expr=f"10 * {gauge('train_grad_norm_ema')}", legend="surge", color="red", style="dashed"),
            Query(expr=level("train_clip_max_norm"), legend="clipped to", color="purple", style="dashed"),
            Query(expr=gauge("train_grad_norm_ema"), legend="EMA", color="orange"),
            Query(expr=highest("train_grad_norm_recent_max"), legend="highest of a minute", color="red", style="thin"),
            Query(expr=f"{gauge('train_grad_norm')} > 0", legend="norm", color="blue"),
            unit="none",
            width=16,
            height=9,
            log=True,
            alerts=["TrainGradNormSurge"],
        ),
        lines(
            "Surges",
            "Steps of a minute whose gradient norm was above 10 times its EMA, or 8 robust deviations out of its band.",
            Query(expr=highest("run:train_grad_norm_ema_ratio_high:increase1m"), legend="ratio > 10", color="red"),
            Query(
                expr=highest("run:train_grad_norm_robust_score_high:increase1m"),
                legend="robust score > 8",
                color="orange",
            ),
            unit="none",
            width=8,
            height=9,
            least=0,
            limits=[0.5],
            alerts=["TrainGradNormSurge"],
        ),
        heat(
            "Gradient norm by layer",
            "The logarithm (base 10) of each layer's gradient norm: a layer that leaves the others behind changes its "
            "colour alone, a surge changes all of them. A gap is a gradient of 0 or one that is not finite.",
            Query(
                expr=f"log10(max by (layer) (train_layer_grad_norm{{{_LAYERS}}} > 0 < Inf))",
                legend="{{layer}}",
            ),
            alerts=["TrainLayerNormOutlier"],
        ),
        lines(
            "Update over weight by layer",
            "What one step adds to a layer's weights, over their norm; read by turns. About 0.001 is usual.",
            Query(expr=f"max by (layer) (train_layer_update_ratio{{{_LAYERS}}} > 0 < Inf)", legend="{{layer}}"),
            unit="sci",
            log=True,
        ),
        lines(
            "Layers with non-finite gradients",
            "In how many steps a layer's gradient was NaN or infinite. Empty is good.",
            Query(
                expr=f"sum by (layer) (increase(train_layer_nonfinite_total{{{_LAYERS}}}[$__rate_interval])) > 0",
                legend="{{layer}}",
                style="bars",
            ),
            unit="none",
            least=0,
            alerts=["TrainNonFinite"],
        ),
    ]


def _learning_rate() -> Panel:
    return lines(
        "Learning rate",
        "The effective rate of each parameter group (schedule x factor), and the guard's own factor.",
        Query(expr=level("train_learning_rate", by="group"), legend="group {{group}}"),
        Query(expr=level("train_lr_factor"), legend="factor", color="orange", style="dashed", right_unit="percentunit"),
        unit="sci",
        width=6,
        least=0,
    )


def _amp() -> list[Panel]:
    return [
        lines(
            "AMP loss scale",
            "Only there with a GradScaler. Below 1, after ten halvings, the gradients themselves are beyond half "
            "precision; above 2^24 they vanish.",
            Query(expr=f"{level('train_amp_loss_scale')} > 0 < Inf", legend="scale", color="blue"),
            unit="none",
            log=True,
            limits=[16777216],
            alerts=["TrainAmpScaleCollapse", "TrainAmpScaleRunaway"],
        ),
        lines(
            "AMP overflows",
            "Steps that the scaler itself withheld; one now and then is its way of finding its scale.",
            Query(expr=happened("train_amp_overflows_total", "run"), legend="overflows", color="orange", style="bars"),
            unit="none",
            least=0,
        ),
    ]


def _throughput() -> list[Part]:
    return [
        lines(
            "Steps and tokens a second",
            "Over a minute. Tokens only where the loop tells them.",
            Query(expr=f"run:train_steps:rate1m{{{RUN}}}", legend="steps", color="blue"),
            Query(expr=f"run:train_tokens:rate1m{{{RUN}}}", legend="tokens", color="green", right_unit="short"),
            unit="none",
            width=6,
            least=0,
            alerts=["TrainStalled"],
        ),
        lines(
            "Step time and wait for data",
            "The median and the slowest twentieth of all ranks' steps, and the median wait for a batch.",
            *(
                Query(expr=_STEP_SECONDS.format(share=share, metric=metric, run=RUN), legend=legend, color=color)
                for share, metric, legend, color in (
                    (0.95, "train_step_seconds", "slowest twentieth", "orange"),
                    (0.5, "train_step_seconds", "median", "blue"),
                    (0.5, "train_data_wait_seconds", "wait for data", "purple"),
                )
            ),
            unit="s",
            width=6,
            least=0,
        ),
        lines(
            "Updates withheld",
            "Steps whose update did not reach the weights, by reason, and how many in a row.",
            Query(expr=events("train_steps_skipped_total", "reason"), legend="{{reason}}", style="bars"),
            Query(expr=highest("train_steps_withheld"), legend="in a row", color="red"),
            unit="none",
            width=6,
            least=0,
            limits=[10],
            alerts=["TrainUpdatesWithheld"],
        ),
    ]
