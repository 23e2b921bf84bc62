"""Attribution: which class an incident is, how it becomes another one, and what each class is done about it."""

import math
import random

import msgspec
import pytest
from curves import signals
from test_policy import COOLDOWN_STEPS, SUSTAINED_STEPS, Job

from trainer_plugin.detection.detectors import DetectionConfig
from trainer_plugin.detection.monitor import Monitor
from trainer_plugin.detection.weight_jumps import WeightJump
from trainer_plugin.policy.attribution import (
    LASTING_STEPS,
    RISE_STEPS,
    SHORT_STEPS,
    RateRises,
    Rise,
    StepTimes,
    classify,
)
from trainer_plugin.policy.budget import BudgetConfig
from trainer_plugin.policy.decisions import ActionsConfig
from trainer_plugin.policy.incidents import Incident
from trainer_plugin.policy.ladder import Policy
from trainer_plugin.policy.state import PolicyState

JUMP = {"robust:loss": 5, "robust:grad_norm": 5}
XID = "1 of its GPUs report a fault: rank 0 on GPU-7, GPU 0 of node-1, last XID 79."


@pytest.mark.parametrize(
    ("signs", "facts", "expected"),
    [
        (JUMP, {"course": "over"}, "bad_sample"),
        (JUMP, {"course": "lasting"}, "unknown"),
        ({"robust:loss": 5}, {"course": "lasting"}, "unknown"),
        (JUMP, {"rate_rise": 10.0, "course": "over"}, "lr_too_high"),
        ({"nonfinite:loss": 6}, {"rate_rise": 10.0}, "lr_too_high"),  # The cause, not what came of it.
        (JUMP, {"machine": ["TrainGpuFault"]}, "hardware"),
        (JUMP, {"machine": ["TrainGpuFault"], "rate_rise": 10.0}, "lr_too_high"),
        ({"nonfinite:loss": 5}, {"machine": ["TrainGpuFault"]}, "hardware"),
        ({"robust:grad_norm": 5}, {"machine": ["TrainGpuFault"]}, "hardware"),
        ({"drift:amp_loss_scale": 5}, {"machine": ["TrainGpuFault"]}, "numerical"),
        (JUMP, {"machine": ["TrainNetworkErrors"], "course": "over"}, "hardware"),  # Before the data.
        ({"nonfinite:loss": 5}, {"machine": ["TrainNetworkErrors"]}, "numerical"),
        ({"robust:grad_norm": 5}, {"machine": ["TrainNetworkErrors"]}, "gradient_explosion"),
        (JUMP, {"machine": ["TrainStraggler"], "course": "over"}, "bad_sample"),  # Slow is not wrong.
        (JUMP, {"machine": ["TrainStraggler"], "course": "lasting"}, "hardware"),
        (JUMP, {"machine": ["slow steps"], "course": "lasting"}, "hardware"),
        ({"drift:loss": 5}, {"machine": ["slow steps"]}, "lr_too_high"),
    ],
)
def test_causes_that_were_seen_come_before_symptoms(signs, facts, expected):
    """Rate and scale, what the driver says, what loss and gradient say, links, data; what is slow comes last."""
    assert classify(signs, 9.0, **facts) == expected


def test_a_batch_is_known_by_its_end():
    """A loss that jumps with its gradient is unknown, until it is back at once; its data are then left out, once."""
    job = Job()
    job.see("robust:loss", "robust:grad_norm", ratio=9.0)
    job.obey()
    assert job.incident.class_ == "unknown"
    for _ in range(SHORT_STEPS - 2):
        job.see()
        job.obey()
    job.calm(1)
    assert job.incident.class_ == "bad_sample"
    assert job.calm(30) == [("skip_batch", "local", "done")]
    assert [went[0] for went in job.went] == ["clip", "skip_batch"]
    assert job.policy.state.incidents[0].evidence[-1].endswith("the weights are well")


def test_what_lasts_is_no_batch():
    """A loss that stays away over a calm gradient looks like a batch for some steps, and no longer."""
    job = Job()
    job.see("robust:loss", ratio=1.0)
    assert job.incident.class_ == "bad_sample"
    for _ in range(LASTING_STEPS):
        job.see()
    assert (job.incident.class_, job.incident.course) == ("unknown", "lasting")


@pytest.mark.parametrize(("ago", "blamed"), [(0, False), (1, True), (RISE_STEPS, True), (RISE_STEPS + 1, False)])
def test_a_rate_is_blamed_for_what_follows_it_soon(ago, blamed):
    """The loss shows an update one step later, and not hundreds of steps later."""
    incident = Incident(id=1, first_step=500, detected_step=500, last_step=500)
    incident.rate_rose(500 - ago, 30.0)
    assert (incident.class_ == "lr_too_high") == blamed
    assert bool(incident.evidence) == blamed


def cyclic(cycle_steps: int, *bad: int, harmful: bool = False) -> list[Incident]:
    """The incidents of 1500 steps in which the rate falls to a tenth and jumps back, with these bad batches."""
    monitor = Monitor(DetectionConfig())
    policy = Policy(mode="auto", actions=ActionsConfig(), budget=BudgetConfig(), sustained_steps=SUSTAINED_STEPS)
    draw = random.Random(0)
    for step in range(1, 1501):
        after_jump = step % cycle_steps == 1 and step > 500 and harmful
        loss = 9.0 if step in bad or after_jump else 2.0 + 0.05 * draw.gauss(0.0, 1.0)
        rate = 1e-3 * (1.0 - 0.9 * (step % cycle_steps) / cycle_steps)
        seen = signals(step, loss, grad_norm=math.exp(0.15 * draw.gauss(0.0, 1.0)), learning_rates=(rate,))
        policy.observe(seen, *monitor.update(seen), weights_finite=True, steps_total=step)
    return policy.state.incidents


@pytest.mark.parametrize("cycle_steps", [60, 400])
def test_a_rise_that_was_borne_before_is_not_blamed(cycle_steps):
    """A cyclic schedule jumps back again and again: one bad batch after it is a batch."""
    [incident] = cyclic(cycle_steps, 3 * 400 + 50)
    assert (incident.class_, incident.rate_rise) == ("bad_sample", None)


def test_a_rise_that_hurts_each_time_is_blamed_each_time():
    """That it comes again makes it no better."""
    assert [one.class_ for one in cyclic(400, harmful=True)] == ["lr_too_high"] * 2


def test_a_rise_unlike_those_that_were_borne_is_blamed():
    """A rate far above that of all cycles before is a cause, borne jumps or not; kept over a restart."""
    rises = RateRises(borne=[Rise(step=100, ratio=10.0, rate=1e-3)])
    rises = msgspec.json.decode(msgspec.json.encode(rises), type=RateRises)
    readings, _ = Monitor(DetectionConfig()).update(signals(1, 2.0))
    for step, ratio, rate, known in ((500, 9.0, 1.1e-3, True), (900, 9.0, 1e-4, False), (1300, 40.0, 1e-3, False)):
        told = msgspec.structs.replace(readings, rate_rise=(step, ratio))
        judged = rises.judge(signals(step, 2.0, learning_rates=(rate,)), told, quiet=True)
        assert judged.rate_rise == (None if known else (step, ratio))


@pytest.mark.parametrize(
    ("span", "told"), [((460, 510), False), ((590, 640), False), ((400, 450), True), ((650, 700), True)]
)
def test_weights_that_move_with_a_rise_that_was_borne_have_not_jumped(span, told):
    """A cycle begins anew with large updates; a jump before it, or long after it, is one."""
    rises = RateRises(borne=[Rise(step=100, ratio=10.0, rate=1e-3)])
    readings, _ = Monitor(DetectionConfig()).update(signals(1, 2.0))
    readings = msgspec.structs.replace(readings, rate_rise=(500, 10.0), weight_jump=WeightJump(*span, "wte", 1.3))
    for step in (500, 700):
        judged = rises.judge(signals(step, 2.0, learning_rates=(1e-3,)), readings, quiet=True)
    assert (judged.weight_jump is not None) == told


@pytest.mark.parametrize("rates", [(math.inf,), (math.nan, 1.0), (1.0, math.nan)])
def test_a_rate_that_is_no_number_breaks_no_state(rates):
    """A schedule that divides by zero is blamed, and what is kept of it is read again."""
    rises = RateRises(newest=Rise(step=1, ratio=10.0, rate=1e-3))
    readings, _ = Monitor(DetectionConfig()).update(signals(1, 2.0))
    told = msgspec.structs.replace(readings, rate_rise=(500, math.inf))
    assert rises.judge(signals(500, 2.0, learning_rates=rates), told, quiet=True).rate_rise == (500, math.inf)
    assert msgspec.json.decode(msgspec.json.encode(rises), type=RateRises) == rises


def test_a_rate_that_rose_is_lowered_at_once():
    """No grace for an alert that nobody sends: the job lowers the rate at the first bad step, and once."""
    job = Job()
    for _ in range(3):
        job.risen = (1000, 30.0)
        job.see("robust:loss", "robust:grad_norm", ratio=9.0)
        job.obey()
    assert job.went == [("lower_lr", "local", "done")]


def test_a_gpu_that_reports_a_fault_makes_it_hardware_and_no_rate_is_lowered():
    """The note is kept with its words, a checkpoint is saved, and neither surge nor drift lowers the rate."""
    job = Job(loop_up=False)
    job.see("robust:loss", "robust:grad_norm", surge=False, ratio=9.0)
    assert job.obey(job.alert("note", "TrainGpuFault", reason=XID)) == []
    assert job.incident.class_ == "hardware"
    assert job.incident.evidence[-1] == f"step {job.step}: TrainGpuFault: {XID}"
    for _ in range(SUSTAINED_STEPS):
        job.see("robust:loss", "ema_ratio:grad_norm", "drift:loss", surge=True, ratio=20.0)
        job.obey()
    assert [went[0] for went in job.went] == ["note", "checkpoint", "rollback"]


def test_a_gpu_fault_in_quiet_times_saves_a_checkpoint():
    """What a GPU has made before it fails is saved, once a report; an incident that follows knows of it."""
    job = Job()
    job.see()
    job.obey(job.alert("note", "TrainGpuFault", reason=XID))
    assert job.policy.state.may_act  # By which several ranks know that the first one has something to say.
    assert job.calm(20) == [("checkpoint", "local", "done")]
    assert (job.incident, job.policy.state.may_act) == (None, False)
    job.see("robust:loss", "robust:grad_norm", ratio=9.0)
    job.obey()
    assert job.incident.class_ == "hardware"
    assert job.went[-1] == ("clip", "local", "done")  # Saved just now: a second one adds nothing.


def test_a_note_of_long_ago_explains_nothing():
    """Ten minutes after it was received, a note is history."""
    job = Job()
    job.see()
    job.obey(job.alert("note", "TrainNetworkErrors", reason="node-1: 1 link failures"))
    job.now += 601.0
    job.see("robust:loss", "robust:grad_norm", ratio=9.0)
    job.obey()
    assert (job.incident.class_, job.incident.machine) == ("unknown", [])


def test_notes_are_heard_whatever_becomes_of_them():
    """In mode observe a note is refused like all commands, and is evidence all the same; it survives a restart."""
    job = Job("observe")
    job.see()
    assert job.obey(job.alert("note", "TrainGpuFault", reason=XID)) == ["observed"]
    state = msgspec.json.decode(msgspec.json.encode(job.policy.state), type=PolicyState)
    again = Job("observe", state=state)
    again.now = job.now
    again.see("nonfinite:loss")
    again.obey()
    assert again.incident.class_ == "hardware"


def test_one_alerts_note_does_not_hide_anothers():
    """Cool-down is for each alert by itself: a straggler's note keeps no GPU's fault away."""
    job = Job()
    job.see()
    assert job.obey(job.alert("note", "TrainStraggler")) == []
    job.see()
    assert job.obey(job.alert("note", "TrainGpuFault", id="another")) == []
    job.calm(COOLDOWN_STEPS // 2)
    assert job.obey(job.alert("note", "TrainStraggler", id="again")) == ["refused_cooldown"]


def times(*seconds, waits=0.0):
    """What is said of the last of these steps."""
    steps = StepTimes()
    for one in seconds:
        steps.add(one, waits if one > 1.0 else 0.0)
    return steps.slow()


def test_steps_are_slow_only_when_most_of_the_newest_are():
    """One long step is a checkpoint or a validation; ten of twice the time are a machine; too few say nothing."""
    assert times(*[0.1] * 40) == ""
    assert times(*[0.1] * 40, 9.0) == ""
    assert times(*[0.1] * 40, *[0.15] * 10) == ""
    assert times(*[0.1] * 8, *[5.0] * 10) == ""
    assert times(*[0.1] * 40, math.nan, *[5.0] * 10) == "slow steps, 5 s against 0.1 s"
    assert times(*[0.1] * 40, *[5.0] * 10, waits=4.5) == "slow steps, 5 s against 0.1 s, 4.5 s of them for data"


def test_slow_steps_are_evidence():
    """An incident that opens over slow steps says so."""
    job = Job()
    for number in range(60):
        job.policy._step_times.add(0.1 if number < 50 else 1.0, 0.0)
    job.see("robust:loss", "robust:grad_norm", ratio=9.0)
    assert "slow steps, 1 s against 0.1 s" in job.incident.evidence[0]
