"""`python -m trainer_plugin command`: what a person asks for goes the way of an alert's command, and is answered."""

import json
import os
import threading

import pytest
from test_guard import actions, trail
from waiting import wait_for

from exporter.catalog import ACTIONS
from exporter.commands import Record
from exporter.runs import RunFolder
from trainer_plugin.__main__ import cli
from trainer_plugin.operator_command import send_command

# However many steps it makes until it is asked, the job has nothing to say of its own.
CALM = {"detection": {"warmup_steps": 1_000_000}}


def training(job, until_done):
    """Train in this thread until the command's thread has ended; its exit code."""
    code = []
    asking = threading.Thread(target=lambda: code.append(until_done()))
    asking.start()
    while asking.is_alive() and not job.guard.stopping:
        job.step()
    job.guard._parts.loop.flush(5.0)
    asking.join()
    return code[0]


def ask(job, *words):
    """Run the command line on a job in training."""
    return training(job, lambda: cli(["command", str(job.guard._parts.folder.path), *words]))


def test_a_person_is_obeyed_and_answered(make_guard, capsys):
    """The rollback is done at a boundary; the line, the record and the trail say so, with who asked and why."""
    job = make_guard(**CALM)
    job.run(25)
    assert ask(job, "rollback", "--reason", "loss is off\x1b[31m") == 0
    (record,) = job.guard._parts.folder.inbox.records()
    assert capsys.readouterr().out == f"tiny: rollback done at step {record.at_step}: {record.detail}\n"
    assert (record.command.source, record.command.reason) == ("operator", "loss is off[31m")
    assert "@" in record.command.by
    (line,) = trail(job, "action")
    assert (line["by"], line["asked"], line["outcome"]) == (record.command.by, "loss is off[31m", "done")
    assert actions(job, "rollback", "done", "operator") == 1


def test_a_refusal_is_1_and_one_line(make_guard, capsys):
    """What the policy refuses a person hears, with the reason."""
    job = make_guard(budget={"rollbacks_per_day": 0}, **CALM)
    job.run(25)
    assert ask(job, "rollback") == 1
    told = capsys.readouterr().err
    assert "tiny: rollback refused_budget at step" in told
    assert "rollbacks_per_day (0) is spent" in told
    assert told.count("\n") == 1


def test_a_stop_by_hand_goes_on_from_where_it_ended(make_guard):
    """The run ends with a checkpoint in both tiers, and the next start goes on from that step."""
    job = make_guard(**CALM)
    job.run(25)
    assert ask(job, "stop") == 0
    assert job.guard.stopping
    stopped = job.guard.step
    job.guard.close()
    again = make_guard()
    assert again.guard.step == stopped
    assert again.guard._parts.policy.open_incident is None


@pytest.mark.parametrize("action", ACTIONS)
def test_every_action_has_an_outcome(make_guard, action):
    """No word of the catalog is left without an answer, once each layer has a past to be held against."""
    job = make_guard(**CALM)
    job.run(60)
    assert ask(job, action) == 0
    assert len(job.guard._parts.folder.inbox.records()) == 1


def test_nobody_waits_for_ever(make_guard, capsys):
    """A job that comes to no boundary in time is told of; with --wait 0 the command is only put."""
    job = make_guard()
    folder = job.guard._parts.folder.path
    assert cli(["command", str(folder), "note", "--wait", "0.01"]) == 1
    assert "tiny: note not decided within 0.01 s" in capsys.readouterr().err
    assert cli(["command", str(folder), "note", "--wait", "0"]) == 0
    assert "tiny: note is asked for, as command " in capsys.readouterr().out
    assert len(job.guard._parts.folder.inbox.waiting()) == 2


def test_nothing_is_asked_of_a_run_without_a_job(make_guard, capsys):
    """A command would wait until somebody starts the job, and surprise them: it is refused."""
    job = make_guard()
    folder = job.guard._parts.folder
    job.guard.close()
    assert cli(["command", str(folder.path), "rollback"]) == 2
    assert "no job runs in it now" in capsys.readouterr().err
    assert folder.inbox.waiting() == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["/none", "stop"], "/none: no such run folder"),
        (["{here}", "stop"], "not a run's folder"),
        (["{run}", "clip", "--layers", "a"], "--layers: wanted with partial_rollback alone, found with clip"),
        (["{run}", "stop", "--wait", "-1"], "--wait: wanted seconds, at least 0, found -1"),
        (["{run}", "stop", "--wait", "nan"], "--wait: wanted seconds"),
    ],
)
def test_bad_usage_is_one_line_and_2(make_guard, tmp_path, capsys, words, said):
    """What cannot be asked is told, and nothing is put."""
    job = make_guard()
    run = job.guard._parts.folder
    assert cli(["command", *(word.format(here=tmp_path, run=run.path) for word in words)]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
    assert run.inbox.waiting() == []


def test_help_has_an_example(capsys):
    """It shows how it is called, and lists the actions."""
    with pytest.raises(SystemExit):
        cli(["command", "--help"])
    told = capsys.readouterr().out
    assert "python -m trainer_plugin command runs/gpt-0 rollback" in told
    assert all(action in told for action in ACTIONS)


def test_the_inbox_of_a_pulled_run_takes_commands_too(tmp_path):
    """At the receiver a person asks a far job just so; it is known to run by what it last reported."""
    run = RunFolder(tmp_path, "far")
    run.inbox.create()
    (run.path / "reported.json").write_text(json.dumps({"at": 1000.0, "states": {"running": True}, "schema": 1}))
    command = send_command(run.path, "lower_lr", clock=lambda: 1010.0)
    assert run.inbox.waiting() == [command]
    run.inbox.finish(Record(command=command, outcome="done", decided=1.0, at_step=1))
    wait_for(lambda: run.inbox.record(command.id))
    with pytest.raises(ValueError, match="no job runs in it now"):
        send_command(run.path, "lower_lr", clock=lambda: 1100.0)


def test_two_who_ask_at_once_go_back_once(make_guard):
    """Both are answered: the one by the rollback, the other with the step that it went to."""
    job = make_guard(**CALM)
    job.run(25)
    loop, folder = job.guard._parts.loop, job.guard._parts.folder
    first, second = (send_command(folder.path, "rollback") for _ in range(2))
    wait_for(lambda: len(loop.commands()) == 2)
    for _ in range(3):
        job.step()
    loop.flush(5.0)
    assert {folder.inbox.record(command.id).outcome for command in (first, second)} == {"done", "duplicate"}
    assert actions(job, "rollback", "done", "operator") == 1


def test_a_user_without_a_name_may_ask(make_guard):
    """In a container whose user stands in no list of users the trail has the number."""

    def nameless():
        raise KeyError("getpwuid(): uid not found: 1000630000")

    job = make_guard(**CALM)
    job.run(2)
    command = send_command(job.guard._parts.folder.path, "note", user=nameless)
    assert command.by.startswith(f"uid {os.getuid()}@")
