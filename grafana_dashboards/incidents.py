"""The dashboard of incidents and remedies: what fired, what was done, what it cost, and whether the loop is whole."""

from grafana_dashboards.assembly import assemble, run_variable
from grafana_dashboards.look import OPEN, SEVERITIES, UP
from grafana_dashboards.panels import Part, lines, number, section, states
from grafana_dashboards.queries import RUN, Query, events, gauge, happened, level, threshold

# Each alert's severity as a number; `max_over_time`, so that an alert of one evaluation is seen at any zoom.
_FIRING = " or ".join(
    f"{value} * max by (alertname) (max_over_time("
    f'ALERTS{{{RUN}, alertstate="firing", severity="{severity}"}}[$__rate_interval]))'
    for value, (severity, _) in sorted(SEVERITIES.items(), reverse=True)
)
_STATES = {0: ("no", "transparent"), 1: ("yes", "blue")}


def build() -> str:
    """The dashboard's JSON."""
    return assemble(
        "guard-incidents",
        "Incidents and remedies",
        "One run: open incidents, alerts and actions on a timeline, rollbacks, checkpoints, and the control loop.",
        [
            *_now(),
            section("What happened"),
            *_timeline(),
            section("Rollbacks and checkpoints"),
            *_checkpoints(),
            section("Control loop"),
            *_control_loop(),
        ],
        variables=[run_variable()],
    )


def _now() -> list[Part]:
    return [
        number(
            "Incident",
            "Whether the job's policy has an incident open.",
            level("train_incident_open"),
            words=OPEN,
        ),
        number(
            "Steps out of the band",
            "Steps since the loss left its robust band and has not come back for good; at 200 the alert asks for a "
            "rollback.",
            level("train_loss_unrecovered_steps"),
            limits=[200],
            alerts=["TrainLossNotRecovering"],
        ),
        number(
            "A rollback goes to step",
            "The newest checkpoint that is whole, verified and proven; -1 if there is none.",
            level("train_rollback_target_step"),
            alerts=["TrainNoRollbackTarget"],
        ),
        number(
            "Steps lost",
            "Steps undone by rollbacks, in the time that is shown; about, as Prometheus extrapolates.",
            f"round(sum by (run) (increase(train_rollback_lost_steps_total{{{RUN}}}[$__range])))",
        ),
        number(
            "Actions done",
            "Remedies that the job has taken, in the time that is shown.",
            f'round(sum by (run) (increase(train_actions_total{{{RUN}, outcome="done"}}[$__range])))',
            alerts=["TrainActionTaken"],
        ),
        number(
            "Outer loop",
            "Whether heartbeats come all the way through Prometheus, Alertmanager and receiver to the job.",
            level("train_control_loop_up"),
            words=UP,
            alerts=["TrainControlLoopDown"],
        ),
    ]


def _timeline() -> list[Part]:
    return [
        states(
            "Alerts",
            "Which alerts fired, by severity; the heartbeat is left out. An alert is shown for at least one interval "
            "of the picture.",
            Query(expr=_FIRING, legend="{{alertname}}"),
            words=SEVERITIES,
            width=12,
            height=9,
        ),
        lines(
            "Loss and step",
            "The loss as it was seen, and the step, which goes back on a rollback.",
            Query(expr=gauge("train_loss"), legend="loss", color="blue"),
            Query(expr=f"run:train_step:max{{{RUN}}}", legend="step", color="orange", right_unit="none"),
            unit="none",
            height=9,
        ),
        lines(
            "Actions",
            "What the job decided, who asked for it, and what came of it. Empty is good.",
            Query(
                expr=events("train_actions_total", "action, source, outcome"),
                legend="{{action}} by {{source}}: {{outcome}}",
                style="bars",
            ),
            unit="none",
            width=8,
            least=0,
            alerts=["TrainActionTaken", "TrainActionFailed", "TrainBudgetSpent"],
        ),
        lines(
            "Incidents opened",
            "By the class that their evidence speaks for. Empty is good.",
            Query(expr=events("train_incidents_total", "class"), legend="{{class}}", style="bars"),
            unit="none",
            width=8,
            least=0,
        ),
        states(
            "State",
            "What the run's folder says, also after the job has ended.",
            Query(expr=level("receiver_run_state", by="state"), legend="{{state}}"),
            words=_STATES,
            width=8,
            alerts=["TrainStoppedByGuard", "TrainBudgetSpent"],
        ),
    ]


def _checkpoints() -> list[Part]:
    newest = f"{level('train_checkpoint_step', by='run, tier, kind')} >= 0"
    periodic = level("train_checkpoint_step", 'kind="periodic"', by="run, tier")
    step = level("train_step")
    return [
        lines(
            "Checkpoints by tier",
            "The newest whole checkpoint of each tier and kind, the one for a rollback, and the step itself.",
            Query(expr=f"run:train_step:max{{{RUN}}}", legend="step", color="orange", style="thin"),
            Query(expr=newest, legend="{{kind}}, {{tier}}"),
            Query(expr=f"{level('train_rollback_target_step')} >= 0", legend="rollback target", color="red"),
            unit="none",
            width=8,
            least=0,
        ),
        lines(
            "Intervals since the newest checkpoint",
            "Steps over those between two checkpoints, by tier. At 2.5 a checkpoint has failed or hangs.",
            Query(
                expr=f"({step} - on (run) group_right () ({periodic} >= 0))"
                f" / on (run) group_left () {threshold('checkpoint_every_steps')}",
                legend="{{tier}}",
            ),
            unit="none",
            width=8,
            least=0,
            limits=[2.5],
            alerts=["TrainCheckpointStale", "TrainNoRollbackTarget"],
        ),
        lines(
            "Seconds to write a checkpoint",
            "From the save until it was whole in the tier; in the background.",
            Query(expr=level("train_checkpoint_seconds", by="tier"), legend="{{tier}}"),
            unit="s",
            width=8,
            least=0,
        ),
        lines(
            "Steps lost and withheld",
            "Steps undone by rollbacks, and steps whose update was withheld.",
            Query(expr=happened("train_rollback_lost_steps_total", "run"), legend="lost", color="red", style="bars"),
            Query(expr=happened("train_steps_skipped_total", "run"), legend="withheld", color="orange", style="bars"),
            unit="none",
            least=0,
        ),
        lines(
            "Failures of checkpoints",
            "Checkpoints and scenes that could not be written, and restored states that were not what had been saved. "
            "Anything above 0 wants a look.",
            Query(expr=happened("train_checkpoint_failures_total", "tier"), legend="not written, {{tier}}"),
            Query(expr=happened("train_scene_failures_total", "run"), legend="scenes not kept", color="purple"),
            Query(
                expr=happened("train_restore_proofs_total", "run", 'outcome="different"'),
                legend="restored, and different",
                color="red",
            ),
            unit="none",
            least=0,
            alerts=["TrainRestoreRejected"],
        ),
    ]


def _control_loop() -> list[Part]:
    return [
        states(
            "Servers",
            "Whether Prometheus reaches the job, the receiver, Alertmanager and itself, and the heartbeat the job.",
            Query(expr=f'min by (job) (up{{job="train", {RUN}}})', legend="job's page"),
            Query(expr='min by (job) (up{job=~"receiver|alertmanager|prometheus"})', legend="{{job}}"),
            Query(expr=level("train_control_loop_up"), legend="heartbeat in the job"),
            words=UP,
            width=8,
            alerts=["TrainMetricsDown", "TrainReceiverDown", "TrainAlertmanagerDown", "TrainControlLoopDown"],
        ),
        lines(
            "Waits",
            "How long the oldest command has waited for the job, and how long ago the last heartbeat came in. "
            "A heartbeat comes every 20 to 30 s; without one for 90 s the job decides by itself.",
            Query(expr=level("receiver_command_wait_seconds"), legend="command", color="red"),
            Query(
                expr=f"time() - {level('receiver_last_heartbeat_timestamp_seconds')}",
                legend="since the heartbeat",
                color="blue",
            ),
            unit="s",
            width=8,
            least=0,
            limits=[120],
            alerts=["TrainCommandNotTaken"],
        ),
        lines(
            "What became of alerts",
            "At the receiver, for all runs: heartbeats, queued commands, duplicates, refusals.",
            Query(
                expr="sum by (outcome) (increase(receiver_deliveries_total[$__rate_interval])) > 0",
                legend="{{outcome}}",
                style="bars",
            ),
            unit="none",
            width=8,
            least=0,
        ),
        lines(
            "Failures of the loop",
            "Notifications that Alertmanager could not deliver, alerts that Prometheus could not hand over, rules that "
            "could not be evaluated, errors that the guard held back. Anything above 0 wants a look.",
            *(
                Query(expr=f"sum(increase({counter}[$__rate_interval]))", legend=legend)
                for counter, legend in (
                    ("alertmanager_notifications_failed_total", "not delivered"),
                    ("prometheus_notifications_dropped_total", "not handed over"),
                    ("prometheus_rule_evaluation_failures_total", "rules that failed"),
                )
            ),
            Query(expr=happened("train_guard_errors_total", "run"), legend="guard errors"),
            unit="none",
            width=24,
            height=6,
            least=0,
            alerts=["TrainNotificationsFailing", "TrainAlertsDropped", "TrainRulesFailing"],
        ),
    ]
