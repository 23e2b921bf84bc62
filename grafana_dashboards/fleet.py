"""The dashboard of all runs at a glance."""

from grafana_dashboards.assembly import assemble, run_variable
from grafana_dashboards.look import OPEN, SEVERITIES
from grafana_dashboards.panels import Part, lines, number, rows, states
from grafana_dashboards.queries import FINITE, Query

_RUNS = 'run=~"$run"'
_DONE = ', outcome="done"'
_ROLLED_BACK = ', action="rollback", outcome="done"'
_WORST = " or ".join(
    f"{value} * max by (run) (max_over_time("
    f'ALERTS{{{_RUNS}, alertstate="firing", severity="{severity}"}}[$__rate_interval]))'
    for value, (severity, _) in sorted(SEVERITIES.items(), reverse=True)
)


def build() -> str:
    """The dashboard's JSON."""
    return assemble(
        "guard-fleet",
        "Fleet",
        "All runs: which of them run, which are in trouble, and how fast they are.",
        [*_now(), *_runs()],
        variables=[run_variable(several=True)],
        refresh="30s",
        hours=6,
    )


def _latest(metric: str) -> str:
    return f"max by (run) ({metric}{{{_RUNS}}} {FINITE})"


def _in_range(counter: str, matchers: str = "") -> str:
    return f"round(sum by (run) (increase({counter}{{{_RUNS}{matchers}}}[$__range])))"


def _now() -> list[Part]:
    return [
        number("Runs", "That are being scraped.", f"count(run:train_step:max{{{_RUNS}}})", width=6),
        number(
            "Incidents open",
            "Runs whose policy has an incident open.",
            f"sum(max by (run) (train_incident_open{{{_RUNS}}}))",
            limits=[1],
            width=6,
        ),
        number(
            "Critical alerts",
            "That are firing now. None is good.",
            f'count(ALERTS{{{_RUNS}, alertstate="firing", severity="critical"}})'
            f" or 0 * count(run:train_step:max{{{_RUNS}}})",
            limits=[1],
            width=6,
        ),
        number(
            "Rollbacks",
            "Of all runs, in the time that is shown.",
            f"sum({_in_range('train_actions_total', _ROLLED_BACK)})",
            width=6,
        ),
    ]


def _runs() -> list[Part]:
    return [
        rows(
            "Runs",
            "One row a run; a click on its name opens its training. Losses are the outlier-free moving average; "
            "remedies and lost steps are those of the time that is shown.",
            {
                "step": f"run:train_step:max{{{_RUNS}}}",
                "steps a second": f"run:train_steps:rate1m{{{_RUNS}}}",
                "loss": _latest("train_loss_ema"),
                "incident": _latest("train_incident_open"),
                "out of the band": _latest("train_loss_unrecovered_steps"),
                "rate factor": _latest("train_lr_factor"),
                "outer loop": _latest("train_control_loop_up"),
                "remedies": _in_range("train_actions_total", _DONE),
                "lost steps": _in_range("train_rollback_lost_steps_total"),
            },
            units={"rate factor": "percentunit"},
            words={
                "incident": OPEN,
                "outer loop": {0: ("down", "orange"), 1: ("up", "green")},
            },
            limits={"out of the band": 200},
            link=("Training", "/d/guard-training?var-run=${__value.raw}&${__url_time_range}"),
            key="run",
            alerts=["TrainLossNotRecovering"],
        ),
        states(
            "Worst alert",
            "The most severe alert of each run; nothing where none fires.",
            Query(expr=_WORST, legend="{{run}}"),
            words=SEVERITIES,
            height=6,
        ),
        lines(
            "Loss",
            "The outlier-free moving average of each run.",
            Query(expr=_latest("train_loss_ema"), legend="{{run}}"),
            unit="none",
        ),
        lines(
            "Steps a second",
            "Over a minute.",
            Query(expr=f"run:train_steps:rate1m{{{_RUNS}}}", legend="{{run}}"),
            unit="none",
            least=0,
            alerts=["TrainStalled"],
        ),
        lines(
            "Steps out of the band",
            "Since the loss of a run left its robust band and has not come back for good.",
            Query(
                expr=f"max by (run) (max_over_time(train_loss_unrecovered_steps{{{_RUNS}}}[$__rate_interval]))",
                legend="{{run}}",
            ),
            unit="none",
            least=0,
            most=220,
            limits=[200],
            alerts=["TrainLossNotRecovering"],
        ),
        lines(
            "Remedies",
            "What the jobs did to heal themselves.",
            Query(
                expr="sum by (run, action) "
                f'(increase(train_actions_total{{{_RUNS}, outcome="done"}}[$__rate_interval])) > 0',
                legend="{{run}}: {{action}}",
                style="bars",
            ),
            unit="none",
            least=0,
            alerts=["TrainActionTaken"],
        ),
    ]
