"""When the next rung of the ladder may be climbed: a gentler remedy has had its time, or nothing is left. Pure."""

from trainer_plugin.detection.readings import Readings
from trainer_plugin.policy.attribution import LASTING_STEPS
from trainer_plugin.policy.decisions import ActionsConfig, Moment
from trainer_plugin.policy.incidents import Incident, Remedy
from trainer_plugin.policy.partial import rollback_kind

_SURE_STEPS = 10  # Good steps after a bad batch, until it is left out for good.
NO_UPDATES_STEPS = 10  # Fewer updates withheld in a row are a stretch of bad batches, and nothing to act upon.

# Of the steps after which a loss counts as not recovering, a lower rate shows within this part whether it helps.
SETTLE_PART = 0.25
# Tries of the job's own to go back, a cool-down apart, after which it is given up.
MOST_FAILURES = 3


def quick_remedy(incident: Incident, *, surged: bool, saved: bool) -> tuple[str, str] | None:
    """What to do before anything else, and why.

    `surged` says that this step did and that the rate may be lowered; `saved`, that a checkpoint was asked for lately.
    """
    if incident.class_ == "hardware":
        return None if saved or incident.tried("checkpoint") else ("checkpoint", "the machine is at fault")
    if incident.tried("lower_lr"):
        return None
    if incident.rate_rise is not None:
        return "lower_lr", f"the learning rate rose to {incident.rate_rise:.3g} times what it had been"
    return ("lower_lr", "gradient surge") if surged else None


def gentle_remedy(incident: Incident, *, clips: bool) -> tuple[str, str] | None:
    """What is done where nothing harder is due; `clips`: a step was out of its band and applied, and the run clips."""
    sure = incident.class_ == "bad_sample" and incident.course == "over" and incident.good_steps >= _SURE_STEPS
    if sure and not incident.left_out:
        return "skip_batch", "one bad batch"
    remedied = {remedy.action for remedy in incident.remedies} - {"note", "skip_batch", "checkpoint"}
    return ("clip", "out of the robust band") if clips and not remedied else None


def is_brief(action: str, source: str, incident: Incident, *, again: bool, surged: bool) -> bool:
    """Whether a lower learning rate is but a precaution: the surge was clipped in its own step, or the run goes back.

    Each step at half the rate is half a step lost, so it lasts only where the rate itself is suspect: the loss climbed
    or oscillated before, or the run goes back to the same place `again`; and, until it has gone back, where the rate
    jumped. What is asked for lasts.
    """
    if again or (incident.class_ == "lr_too_high" and incident.rate_rise is None):
        return False
    if action == "lower_lr":
        return source == "local" and surged and incident.rate_rise is None
    return "rollback" in action


def going_back_pays(lost_steps: int, sustained_steps: int, *, least_steps: int, step: int, target_step: int) -> bool:
    """Whether as many steps are lost by now as going back from `step` to `target_step` would undo of those before them.

    `least_steps` at least, `sustained_steps` at most: who rents until the rent has reached the price pays twice the
    least at most (the ski-rental problem). The target is -1 if there is none.
    """
    undone = step - lost_steps - target_step if target_step >= 0 else 0
    return lost_steps >= max(least_steps, min(undone, sustained_steps))


def withheld_too_long(withheld_steps: int, sustained_steps: int, *, step: int, target_step: int) -> bool:
    """Whether so many updates withheld in a row are reason enough to go back; the alert's rule says the same."""
    return going_back_pays(
        withheld_steps, sustained_steps, least_steps=NO_UPDATES_STEPS, step=step, target_step=target_step
    )


def damage_stays(incident: Incident, readings: Readings, sustained_steps: int, *, step: int, target_step: int) -> bool:
    """Whether weights were seen to jump, the loss will not be back in its time as it falls now, and going back pays."""
    lost = readings.loss_unrecovered_steps
    return (
        incident.weights_jumped
        and lost + readings.loss_back_in_steps >= sustained_steps
        and going_back_pays(lost, sustained_steps, least_steps=LASTING_STEPS, step=step, target_step=target_step)
    )


def slow_remedy(
    incident: Incident,
    readings: Readings,
    actions: ActionsConfig,
    moment: Moment,
    sustained_steps: int,
    *,
    budget_left: bool,
) -> tuple[str, str] | None:
    """What to do and why, where the alert comes first. A lower rate mends no machine.

    `budget_left` says whether a rollback would be allowed. One that would be refused is not asked for early: the answer
    is for the whole incident.
    """
    may_lower = not incident.tried("lower_lr") and incident.class_ != "hardware"
    withheld, lost = readings.withheld_steps, readings.loss_unrecovered_steps
    if lost >= sustained_steps:
        return rollback_kind(incident, readings, actions), f"loss unrecovered for {lost} steps"
    place = {"step": moment.step, "target_step": moment.target_step}
    if budget_left and moment.target_step >= 0 and damage_stays(incident, readings, sustained_steps, **place):
        return rollback_kind(incident, readings, actions), f"weights jumped, and loss unrecovered for {lost} steps"
    if withheld_too_long(withheld, sustained_steps, **place):
        return "rollback", f"{withheld} updates withheld in a row"
    if readings.amp_scale_collapsed and may_lower:
        return "lower_lr", "AMP loss scale collapsed"
    if (sign := incident.lr_sign) and may_lower:
        return "lower_lr", sign
    return None


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
