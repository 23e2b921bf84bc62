"""The monitor and the default policy over the rows of an old log, as the benchmark needs them."""

import csv
import math
from pathlib import Path

from trainer_plugin.budget import BudgetConfig
from trainer_plugin.decisions import ActionsConfig, Moment
from trainer_plugin.detectors import DetectionConfig
from trainer_plugin.monitor import Monitor
from trainer_plugin.policy import Policy
from trainer_plugin.signals import Signals

CHECKPOINT_STEPS = 1000


def read_rows(path):
    """Step, loss, gradient norm and learning rate of each row of a CSV file; None where it has no value."""
    with Path(path).open() as lines:
        for row in csv.DictReader(lines):
            number = {name: float(text) for name, text in row.items() if text}
            if "loss" in number:
                yield int(number["step"]), number["loss"], number.get("grad_norm"), number.get("lr")


def signals(step, loss, grad_norm=None, lr=None):
    """What a log tells of a step."""
    return Signals(
        step=step, loss=loss, grad_norm=grad_norm, layer_grad_norms={}, clip_coefficient=1.0, surge=False,
        withheld=None, amp_loss_scale=None, learning_rates=() if lr is None else (lr,), step_seconds=1.0,
        data_wait_seconds=0.0, data_position=None,
    )  # fmt: skip


def backtest(rows, config=None):
    """The incidents of a run and what the default policy would have done, as `backtest --json` tells them.

    Nothing is healed by it: the log goes on as it was.
    """
    config = config or DetectionConfig()
    monitor = Monitor(config)
    policy = Policy(mode="auto", actions=ActionsConfig(), budget=BudgetConfig(), sustained_steps=config.sustained_steps)
    incidents, would_do = [], []
    for steps_total, (step, loss, grad_norm, lr) in enumerate(rows, 1):
        seen = signals(step, loss, grad_norm, lr)
        verdicts = monitor.judge(seen)
        if not verdicts and policy.open_incident is None:
            continue
        for incident in policy.observe(
            seen, monitor.readings(), verdicts, weights_finite=True, steps_total=steps_total
        ):
            if incident not in incidents:
                incidents.append(incident)
        before = (policy.open_incident.before_step if policy.open_incident else step + 1) - 1
        moment = Moment(
            step=step, steps_total=steps_total, now=float(steps_total), loop_up=False,
            target_step=before // CHECKPOINT_STEPS * CHECKPOINT_STEPS,
        )  # fmt: skip
        decision, _ = policy.decide(moment, [])
        if decision is not None:
            policy.record(decision, moment, "done", detail="", to_step=None)
            would_do.append({"step": step, "action": decision.action})
    return {
        "incidents": [
            {
                "first_step": incident.first_step, "last_step": incident.last_step, "class": incident.class_,
                "detected_step": incident.detected_step, "signs": list(incident.signs),
            }
            for incident in incidents
        ],
        "would_do": would_do,
    }  # fmt: skip


def score(label, result):
    """Events, found, late, false and rows of one log by `score.py`'s rules, and rollbacks on an eventless run."""
    interval, start = label["interval"], 300 * label["interval"]
    spans = [(event["first"], event["end"] or math.inf) for event in label["events"] + label["minor"]]
    spans += [tuple(span) for span in label["nan_ranges"]]
    seen = [(incident["detected_step"], incident["last_step"]) for incident in result["incidents"]]
    false = [
        at for at, _ in seen
        if at >= start and not any(a - 20 * interval <= at <= b + 20 * interval for a, b in spans)
    ]  # fmt: skip
    found, late = [], []
    for event in label["events"]:
        first, end = event["first"], event["end"] or math.inf
        hits = [max(at, first) for at, last in seen if last >= first - 20 * interval and at <= end]
        if hits:
            found.append(first)
            if (min(hits) - first) / interval > (20 if event["slow"] else 1):
                late.append((first, min(hits)))
    rollbacks = [done["step"] for done in result["would_do"] if "rollback" in done["action"]]
    missed = [event["first"] for event in label["events"] if event["first"] not in found]
    return {
        "events": len(label["events"]), "found": len(found), "missed": missed, "late": late, "false": false,
        "rows": label["rows"], "rollbacks": [] if label["events"] or label["nan_ranges"] else rollbacks,
    }  # fmt: skip
