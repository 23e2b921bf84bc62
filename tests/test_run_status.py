"""What the runs' folders tell: the states of a run that lives or has ended, what waits for it, and nothing hostile."""

import json
import os
import socket
import time

import msgspec
import pytest
from training import kick, spoil_weights
from waiting import wait_for

from exporter.commands import Command
from exporter.run_status import MOST_STATE_BYTES, STATE_SCHEMA, read_runs
from exporter.runs import STATES, RunFolder
from trainer_plugin import run_folder
from trainer_plugin.policy.state import PolicyState
from trainer_plugin.run_folder import JobFolder, RunState

NOW = 1_700_000_000.0
QUIET = dict.fromkeys(STATES, False)


def command(number: int) -> Command:
    """A command that an alert has led to."""
    return Command(id=f"c{number}", run="gpt-0", action="rollback", source="alert", received=NOW)


@pytest.fixture
def runs(tmp_path):
    """A folder with one run that has ended in order."""
    write_run(tmp_path, "gpt-0", RunState())
    return tmp_path


def write_run(runs, name, state, *, written=NOW):
    """A run's folder as a job leaves it; its state was written at a time."""
    folder = RunFolder(runs, name)
    folder.inbox.create()
    path = folder.path / "state.json"
    path.write_bytes(state if isinstance(state, bytes) else msgspec.json.encode(state))
    os.utime(path, (written, written))
    (folder.path / "lock").touch()
    return folder


def states(runs, now=NOW):
    """The states of each run."""
    return {status.run: status.states for status in read_runs(runs, now)}


def test_a_run_that_has_ended_in_order_is_quiet(runs):
    """All states are told and none holds; nothing waits."""
    (status,) = read_runs(runs, NOW)
    assert (status.run, status.states, status.waits) == ("gpt-0", QUIET, [])


def test_the_schema_is_the_jobs_own():
    """Reader and writer of state.json agree on its number."""
    assert STATE_SCHEMA == run_folder.SCHEMA


def test_states_are_those_of_the_jobs_file(runs):
    """An open incident, a spent budget and a stop are read as the policy keeps them."""
    policy = PolicyState(budget_spent_step=0, stopped_step=0)
    incident = policy.open(5, 7, 7)
    write_run(runs, "gpt-0", RunState(policy=policy))
    assert states(runs)["gpt-0"] == QUIET | {"incident_open": True, "budget_spent": True, "stopped_by_guard": True}
    incident.healed = True
    write_run(runs, "gpt-0", RunState(policy=policy))
    assert states(runs)["gpt-0"]["incident_open"] is False


@pytest.mark.parametrize(
    ("age", "running"), [(0.0, True), (29.0, True), (-29.0, True), (31.0, False), (-31.0, False), (1e9, False)]
)
def test_a_job_runs_while_its_lock_beats(runs, age, running):
    """A heartbeat of the last 30 s, by clocks that may differ by some seconds, is a job."""
    lock = {"host": "h", "pid": 1, "heartbeat": NOW - age}
    (runs / "gpt-0" / "lock").write_text(json.dumps(lock).ljust(200))
    assert states(runs)["gpt-0"]["running"] is running


def test_the_lock_of_a_real_job_beats_until_it_ends(tmp_path):
    """A job's own lock says that it runs; let go, it says no more; a job that was killed falls silent."""
    job = JobFolder(tmp_path, "gpt-0")
    job.save_state(msgspec.json.encode(RunState()))
    beat = json.loads((tmp_path / "gpt-0/lock").read_text())["heartbeat"]
    assert states(tmp_path, beat + 1.0)["gpt-0"]["running"] is True
    assert states(tmp_path, beat + 60.0)["gpt-0"]["running"] is False
    job.lock.release()
    assert states(tmp_path, beat + 1.0)["gpt-0"]["running"] is False


def test_commands_are_counted_with_their_age_and_not_read(runs):
    """Each command in the inbox has waited since its file was written; a damaged one as well; decided ones do not."""
    inbox = RunFolder(runs, "gpt-0").inbox
    for number, age in enumerate((10.0, 130.0)):
        inbox.put(command(number))
        os.utime(inbox.new / f"c{number}.json", (NOW - age, NOW - age))
    (inbox.new / "c2.json").write_text("{")
    os.utime(inbox.new / "c2.json", (NOW + 5.0, NOW + 5.0))  # Another host's clock.
    (inbox.new / ".c3.json.1.2").touch()
    (inbox.done / "c4.json").touch()
    (status,) = read_runs(runs, NOW)
    assert sorted(status.waits) == [0.0, 10.0, 130.0]


def test_a_flooded_inbox_is_counted_to_a_limit(runs, tmp_path):
    """However many files somebody puts there, a thousand are looked at."""
    for number in range(1010):
        (tmp_path / "gpt-0/commands/new" / f"{number}.json").touch()
    assert len(read_runs(runs, NOW)[0].waits) == 1000


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'"x"', b'{"schema": 1}', b'{"schema": 2, "policy": {}}', b"[" * 100_000,
     b'{"schema": 1, "policy": {"incidents": [{"healed": "yes"}]}}', b"\xff"],
)  # fmt: skip
def test_a_state_that_cannot_be_read_is_not_told(runs, content):
    """What a file does not say is absent, not guessed; that the lock is silent is known all the same."""
    write_run(runs, "gpt-0", content)
    assert states(runs) == {"gpt-0": {"running": False}}


def test_a_state_that_is_too_large_is_not_read(runs):
    """No file takes the receiver's memory."""
    padded = msgspec.json.encode(RunState(policy=PolicyState(stopped_step=1))).ljust(MOST_STATE_BYTES)
    write_run(runs, "gpt-0", padded)
    assert states(runs)["gpt-0"]["stopped_by_guard"] is True
    write_run(runs, "gpt-0", padded + b" ")
    assert states(runs) == {"gpt-0": {"running": False}}


def test_only_folders_that_a_job_has_made_are_runs(runs, tmp_path):
    """Files, links, odd names and folders without a state are none."""
    (tmp_path / "targets").mkdir()
    (tmp_path / "file").touch()
    write_run(tmp_path / "elsewhere", "gpt-1", RunState())
    (tmp_path / "gpt-1").symlink_to(tmp_path / "elsewhere/gpt-1")
    (tmp_path / "gpt-0").rename(tmp_path / "läuft")
    assert states(runs) == {}
    assert states(tmp_path / "elsewhere").keys() == {"gpt-1"}


@pytest.mark.parametrize("name", ["state.json", "lock", "commands"])
def test_nothing_is_read_through_a_link_or_from_a_pipe(runs, tmp_path, name):
    """A link in the place of a file tells nothing, and a pipe holds up nobody."""
    path = tmp_path / "gpt-0" / name
    policy = PolicyState(stopped_step=1)
    outside = write_run(tmp_path / "outside", "x", RunState(policy=policy))
    (outside.path / "lock").write_text(json.dumps({"heartbeat": NOW}))
    outside.inbox.put(command(0))
    path.rename(tmp_path / "gpt-0" / "moved")
    path.symlink_to(outside.path / name)
    (status,) = read_runs(runs, NOW)
    assert not any(status.states.values())
    assert status.waits == []
    path.unlink()
    os.mkfifo(path)
    (status,) = read_runs(runs, NOW)
    assert not any(status.states.values())


def test_a_socket_in_the_place_of_a_lock_is_no_job(runs, tmp_path, monkeypatch):
    """What cannot be opened tells nothing."""
    monkeypatch.chdir(tmp_path / "gpt-0")  # A socket's path must be short.
    (tmp_path / "gpt-0/lock").unlink()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind("lock")
        assert states(runs) == {"gpt-0": QUIET}


def test_the_newest_runs_are_told(tmp_path):
    """Of more runs than are shown, those whose state was written last, by their names."""
    for number in range(205):
        write_run(tmp_path, f"r{number:03d}", RunState(), written=NOW - number)
    assert [status.run for status in read_runs(tmp_path, NOW)] == [f"r{number:03d}" for number in range(200)]


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    """Whoever asks learns that the folder of the runs cannot be read."""
    with pytest.raises(FileNotFoundError):
        read_runs(tmp_path / "nowhere", NOW)


def told(job):
    """What a real job's folder says now."""
    job.guard._parts.loop.flush(5.0)
    runs = job.guard._parts.folder.path.parent
    return states(runs)["tiny"]


def test_a_job_that_the_guard_stops_says_so_until_it_is_started_again(make_guard):
    """NaN weights and no way back: the folder outlives the job; a new start clears it."""
    job = make_guard(checkpoints={"every": 1_000_000})
    job.run(3)
    job.step(spoil_weights)
    job.run(10)
    assert job.guard.stopping
    job.guard.close()
    assert told(job)["stopped_by_guard"] is True
    again = make_guard()
    assert told(again)["stopped_by_guard"] is False


@pytest.mark.parametrize(("source", "told_of"), [("alert", True), ("operator", False)])
def test_a_stop_that_an_operator_wants_is_no_news(make_guard, source, told_of):
    """A run that an alert stops is told of; who stops it by hand knows."""
    job = make_guard()
    job.run(25)
    stop = Command(id="a1", run="tiny", action="stop", source=source, received=time.time(), alert="TheirOwn")
    job.guard._parts.folder.inbox.put(stop)
    wait_for(job.guard._parts.loop.commands)
    job.step()
    assert job.guard.stopping
    assert told(job)["stopped_by_guard"] is told_of


def test_a_job_without_budget_says_so_until_something_has_helped(make_guard):
    """A rollback that is refused for want of budget is in the folder; a new start clears it."""
    job = make_guard(budget={"rollbacks_per_day": 0})
    job.run(40)
    assert told(job)["budget_spent"] is False
    kick(job)
    job.run(job.guard.step + 30)
    assert told(job) | {"running": True} == QUIET | {"running": True, "incident_open": True, "budget_spent": True}
    job.guard.close()
    assert told(job)["budget_spent"] is True
    assert told(make_guard(job))["budget_spent"] is False
