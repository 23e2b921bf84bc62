"""The judge: the job's own detectors and policy over old logs, and nothing that the log could not tell."""

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from curves import worked_example

from trainer_plugin.backtest.judge import Options, judge
from trainer_plugin.backtest.logs import read_log
from trainer_plugin.detection.detectors import DetectionConfig
from trainer_plugin.detection.monitor import Monitor
from trainer_plugin.policy.budget import BudgetConfig
from trainer_plugin.policy.decisions import ActionsConfig
from trainer_plugin.signals import Signals

WARM = 100


def options(**detection):
    """The defaults, but for a shorter warm-up and a checkpoint every 100 steps."""
    return Options(
        detection=DetectionConfig(**{"warmup_steps": WARM, **detection}),
        actions=ActionsConfig(),
        budget=BudgetConfig(),
        checkpoint_every_steps=100,
    )


def calm(steps, seed=0):
    """A loss that falls slowly, with some noise."""
    noise = np.random.default_rng(seed).normal(0.0, 0.02, steps)
    return 2.0 + np.exp(-np.arange(steps) / 300.0) + noise


def write(path, losses, *, first=1, norms=None, scales=None):
    """A CSV log of these losses."""
    lines = ["step,loss,grad_norm,loss_scale"]
    for place, loss in enumerate(losses):
        norm = "" if norms is None else norms[place]
        scale = "" if scales is None else scales[place]
        lines.append(f"{first + place},{loss},{norm},{scale}")
    path.write_text("\n".join(lines) + "\n")
    return path


def judged(path, **detection):
    """The log, judged."""
    return judge(read_log(path), options(**detection))


def test_a_healthy_log_has_no_incident(tmp_path):
    """A calm run is read to its end, and nothing would have been done."""
    found = judged(write(tmp_path / "log.csv", calm(2000)))
    assert (found.steps, found.runs, found.format) == (2000, 1, "csv")
    assert found.incidents == []
    assert found.would_do == []


def test_events_are_those_of_the_monitor(tmp_path):
    """Every verdict of every detector is an event, in order, with the step that the log gives."""
    losses = calm(600)
    losses[[300, 400]] *= 3.0
    found = judged(write(tmp_path / "log.csv", losses))
    monitor = Monitor(options().detection)
    said = []
    for place, loss in enumerate(losses):
        said += monitor.update(Signals(step=place + 1, loss=float(loss), grad_norm=None))[1]
    assert [(e.step, e.detector, e.signal, e.value) for e in found.events] == [
        (v.step, v.detector, v.signal, v.value) for v in said
    ]
    assert {(event.step, event.detector) for event in found.events} >= {(301, "robust"), (401, "robust")}


def test_a_loss_that_stays_up_is_one_incident_and_one_rollback(tmp_path):
    """A jump for good: found at once, rolled back after 200 steps to the checkpoint before it, and asked no more."""
    losses = calm(1200)
    losses[650:] += 2.0
    found = judged(write(tmp_path / "log.csv", losses))
    (incident,) = found.incidents
    assert (incident.first_step, incident.detected_step) == (651, 651)
    rollbacks = [deed for deed in found.would_do if deed.action == "rollback"]
    assert [deed.step for deed in rollbacks] == [850]
    assert rollbacks[0].reason.endswith("to step 600")
    assert found.would_do[-1] is rollbacks[0]


@pytest.mark.parametrize(("wanted", "withheld"), [("repeated", [652]), ("all", [652]), ("never", [])])
def test_a_spike_behind_a_spike_would_be_withheld(tmp_path, wanted, withheld):
    """Unless it was asked to withhold none; the first is clipped."""
    losses = calm(1000)
    losses[650:653] *= 4.0
    actions = ActionsConfig(withhold_spikes=wanted)
    for norm in (1.0, 50.0):  # A surge is not clipped where it is withheld.
        norms = [norm if 650 <= place < 653 else 1.0 for place in range(1000)]
        log = read_log(write(tmp_path / "log.csv", losses, norms=norms))
        found = judge(log, replace(options(), actions=actions))
        deeds = [(deed.step, deed.action) for deed in found.would_do if "withheld" in deed.reason]
        assert deeds == [(step, "skip_batch") for step in withheld]


def test_without_a_checkpoint_before_it_there_is_no_rollback(tmp_path):
    """A fault in the first steps of a log has nowhere to go back to, and the user hears that one was wanted."""
    losses = [*calm(20), *[math.nan] * 30]
    found = judged(write(tmp_path / "log.csv", losses, first=5010))
    assert [deed.action for deed in found.would_do] == ["skip_batch", "note"]
    assert found.would_do[1].reason == "10 updates withheld in a row: a rollback, but no checkpoint lies before it"


def test_a_scale_that_is_one_is_no_scaler(tmp_path):
    """Some print 1.0 where nothing is scaled: a norm that is not finite is then a fault, and no overflow."""
    losses, norms = calm(400), [math.nan if 250 <= place < 320 else 1.0 for place in range(400)]
    for scale, actions in ((1.0, ["skip_batch", "rollback"]), (65536.0, [])):
        log = write(tmp_path / f"{scale}.csv", losses, norms=norms, scales=[scale] * 400)
        assert [deed.action for deed in judged(log).would_do] == actions


def test_what_is_not_finite_is_withheld_and_leads_back_when_that_costs_less(tmp_path):
    """One NaN is left out; as many in a row as going back undoes (50 here) lead back, as in the job."""
    losses = calm(400)
    losses[250] = math.nan
    found = judged(write(tmp_path / "one.csv", losses))
    assert [(deed.step, deed.action) for deed in found.would_do] == [(251, "skip_batch")]
    losses[250:] = math.nan
    found = judged(write(tmp_path / "all.csv", losses))
    assert [(deed.step, deed.action) for deed in found.would_do] == [(251, "skip_batch"), (300, "rollback")]
    assert found.incidents[0].class_ == "numerical"


def test_an_overflow_under_a_loss_scale_is_none(tmp_path):
    """An infinite norm in a log with a loss scale is the scaler's own business."""
    norms = [1.0] * 300
    norms[200] = math.inf
    path = write(tmp_path / "log.csv", calm(300), norms=norms, scales=[1024.0] * 300)
    assert judged(path).incidents == []
    assert len(judged(write(path, calm(300), norms=norms)).incidents) == 1


def test_a_surge_would_be_clipped_and_the_rate_lowered(tmp_path):
    """A norm of 50 times its baseline: clipped in that step, then a lower rate."""
    norms = [1.0 + 0.1 * math.sin(step) for step in range(400)]
    norms[300] = 50.0
    found = judged(write(tmp_path / "log.csv", calm(400), norms=norms))
    assert [(deed.step, deed.action) for deed in found.would_do] == [(301, "clip"), (301, "lower_lr")]
    assert found.incidents[0].class_ == "gradient_explosion"


def test_each_run_of_a_log_is_judged_anew(tmp_path):
    """A second run in one file begins with nothing learnt, and its findings carry its number."""
    first, second = calm(400), calm(400, seed=1) + 5.0
    second[300] *= 3.0
    path = write(tmp_path / "log.csv", first)
    rows = "\n".join(f"{place + 1},{loss},," for place, loss in enumerate(second))
    path.write_text(path.read_text() + rows + "\n")
    found = judged(path)
    assert (found.runs, found.steps) == (2, 800)
    assert [(incident.run, incident.detected_step) for incident in found.incidents] == [(2, 301)]
    assert {event.run for event in found.events if event.detector == "robust"} == {2}


def test_the_budget_counts(tmp_path):
    """Four separate disasters in one day are three rollbacks."""
    losses = calm(6000)
    for begin in (1000, 2200, 3400, 4600):
        losses[begin : begin + 400] += 3.0
    found = judged(write(tmp_path / "log.csv", losses))
    assert [deed.action for deed in found.would_do].count("rollback") == 3


def test_the_worked_example_comes_out_to_the_digit(tmp_path):
    """Numpy seed 42, three spikes: `rolling_sigma` finds exactly 100, 180, 240; `ema_ratio` at 3.0 none of them."""
    found = judged(write(tmp_path / "log.csv", worked_example(), first=0), warmup_steps=0)
    sigma = [event for event in found.events if event.detector == "rolling_sigma"]
    assert [event.step for event in sigma] == [100, 180, 240]
    assert [round(event.value, 3) for event in sigma] == [3.369, 1.848, 1.805]
    assert [round(event.baseline, 3) for event in sigma] == [1.258, 0.734, 0.541]
    assert not [event for event in found.events if event.detector == "ema_ratio" and event.signal == "loss"]


def test_json_has_the_words_of_the_contract(tmp_path):
    """Keys are those of the contract, and a NaN is null, so that any reader of JSON can read it."""
    losses = calm(300)
    losses[200] = math.nan
    found = msgspec.json.decode(msgspec.json.encode(judged(write(tmp_path / "log.csv", losses))))
    assert found["events"][0] == {
        "step": 201, "detector": "nonfinite", "signal": "loss", "value": None, "baseline": None, "run": 1
    }  # fmt: skip
    assert found["incidents"][0]["class"] == "numerical"
    assert {"path", "format", "steps", "events", "incidents", "would_do"} <= found.keys()


def test_what_cannot_be_read_is_one_line(tmp_path):
    """A trouble in the middle of a log is the reader's one-line error."""
    path = tmp_path / "log.csv"
    path.write_text("step,loss\n")
    with pytest.raises(ValueError, match=r"log\.csv: no step with a loss"):
        judged(path)


def test_verdicts_are_kept_up_to_a_number(tmp_path):
    """Of a run that is NaN for good the first verdicts are kept and the others counted; the incident stays whole."""
    path = write(tmp_path / "log.csv", [*calm(200), *[math.nan] * 300])
    found = judge(read_log(path), options(), most_events=50)
    every = judge(read_log(path), options())
    assert str(found.events) == str(every.events[:50])
    assert found.events_left_out == len(every.events) - 50 > 200
    assert found.notes == [f"the first 50 verdicts are kept and listed, {found.events_left_out} more are only counted"]
    assert found.incidents == every.incidents
    assert (every.events_left_out, every.notes) == (0, [])


def test_an_incident_lasts_until_what_would_be_done_about_it(tmp_path):
    """A loss that stays up a little has verdicts for some steps only; its incident is not over before the rollback."""
    losses = calm(1200)
    losses[650:] += 0.15
    found = judged(write(tmp_path / "log.csv", losses))
    assert [(deed.step, deed.action) for deed in found.would_do] == [(652, "lower_lr"), (849, "rollback")]
    assert max(event.step for event in found.events if event.step <= 849) < 700
    assert [incident.last_step for incident in found.incidents] == [849]


def test_a_run_whose_loss_goes_missing_is_a_sick_one(tmp_path):
    """Cells that are empty from one step on are an incident, as NaN is."""
    text = "".join(f"{step},{'' if step > 600 else loss},0.1\n" for step, loss in enumerate(calm(800)))
    path = tmp_path / "log.csv"
    path.write_text("step,loss,lr\n" + text)
    found = judged(path)
    assert [(incident.first_step, incident.class_) for incident in found.incidents] == [(601, "numerical")]


def test_a_log_says_how_much_of_it_was_judged(tmp_path):
    """After a warm-up; of a log that begins later in the run, after one full window."""
    assert judged(write(tmp_path / "whole.csv", calm(400))).steps_judged == 400 - WARM + 1
    assert judged(write(tmp_path / "part.csv", calm(400), first=9000), warmup_steps=500).steps_judged == 400 - 128
