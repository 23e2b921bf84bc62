"""When the next rung of the ladder may be climbed: a gentler remedy has had its time, or nothing is left. Pure."""

from trainer_plugin.policy.incidents import Incident, Remedy

# Of the steps after which a loss counts as not recovering, a lower rate shows within this part whether it helps.
SETTLE_PART = 0.25
# Tries of the job's own to go back, a cool-down apart, after which it is given up.
MOST_FAILURES = 3


def settling(incident: Incident | None, steps_total: int, sustained_steps: int) -> bool:
    """Whether a lower rate, tried in this incident, has not had its time yet."""
    tried = incident.tried("lower_lr") if incident is not None else []
    return any(
        remedy.outcome == "done" and steps_total - remedy.steps_total < SETTLE_PART * sustained_steps
        for remedy in tried
    )


def answered(action: str, tried: list[Remedy], steps_total: int, started_total: int, cooldown_steps: int) -> bool:
    """Whether a wish of the job's own has had its answer in this incident, so that it is not said in every step.

    A failure is one for the cool-down, a stop until the next start (a loop may go on all the same).
    """
    if any(remedy.outcome in ("observed", "no_target") for remedy in tried):
        return True
    failures = [remedy.steps_total for remedy in tried if remedy.outcome == "failed"]
    if failures and steps_total - failures[-1] < cooldown_steps:
        return True
    return action == "stop" and any(remedy.steps_total > started_total for remedy in tried)


def refused_rollback(incident: Incident, *, after: int, until: int, updating: bool) -> Remedy | None:
    """Why going back is at an end, as the remedy that says so; None while it is not. Counted in optimizer steps.

    It was refused for good `after` the last start and has had its time, `until` now: for want of budget or target;
    but as long as weights are updated a run without a target may yet heal. Or it has failed too often (case W11).
    """
    final = ("refused_budget",) if updating else ("refused_budget", "no_target")
    tried = [remedy for remedy in incident.remedies if "rollback" in remedy.action and remedy.steps_total > after]
    # The job's own: an alert's may come at any time, and say nothing of the disk a while later.
    failed = [remedy for remedy in tried if remedy.outcome == "failed" and remedy.source == "local"]
    if len(failed) >= MOST_FAILURES:
        return failed[-1]
    return next((remedy for remedy in tried if remedy.outcome in final and remedy.steps_total <= until), None)
