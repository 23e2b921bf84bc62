"""Tests of the demo's command line: bad input is one line, exit code 2, and nothing half-made."""

import os
from pathlib import Path

import pytest

from exporter.commands import Command, Inbox
from trainer_plugin.__main__ import cli
from trainer_plugin.demo.job import _schedule
from trainer_plugin.demo.machine import LONGEST_WAIT_SECONDS, FakeMachine, PlayedMachine, find_driver
from trainer_plugin.demo.run import _config
from trainer_plugin.demo.scenarios import SCENARIOS
from trainer_plugin.faults.driver import uuid
from trainer_plugin.faults.table import RIGHT
from trainer_plugin.run_folder import JobFolder


def refused(capsys, *arguments: str) -> str:
    """The one line on stderr of a command that must end with exit code 2."""
    assert cli(["demo", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_an_unknown_key_in_guard_yaml_is_refused_by_its_path(tmp_path, capsys):
    """The message names file, section and known keys, and no folder is made."""
    config = tmp_path / "guard.yaml"
    config.write_text("detection: {warmup: 5}\n")

    message = refused(capsys, "--config", str(config), "--out", str(tmp_path / "out"))

    assert str(config) in message
    assert "`warmup`" in message
    assert "warmup_steps" in message
    assert "`detection`" in message
    assert not (tmp_path / "out").exists()


def test_a_wrong_type_in_guard_yaml_is_refused_by_its_path(tmp_path, capsys):
    """The message names the key, what was wanted and what was found."""
    config = tmp_path / "guard.yaml"
    config.write_text("checkpoints: {every: soon}\n")

    message = refused(capsys, "--config", str(config), "--out", str(tmp_path / "out"))

    assert "`checkpoints.every`" in message
    assert "`int`" in message
    assert not (tmp_path / "out").exists()


def test_a_missing_guard_yaml_is_refused(tmp_path, capsys):
    """A config that is not there is told by its name."""
    assert "nowhere.yaml" in refused(capsys, "--config", str(tmp_path / "nowhere.yaml"))


def test_an_out_folder_that_cannot_be_made_is_refused(tmp_path, capsys):
    """A file in the way of --out is told, and stays."""
    (tmp_path / "file").write_text("mine")

    message = refused(capsys, "--out", str(tmp_path / "file" / "out"))

    assert str(tmp_path / "file") in message
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_with_files_in_it_is_refused(tmp_path, capsys):
    """The demo never writes over what is there."""
    (tmp_path / "precious").write_text("mine")

    assert "new or empty" in refused(capsys, "--out", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_a_run_folder_in_use_is_refused(tmp_path, capsys):
    """A second demo in the folder of one that runs is told who runs there."""
    folder = JobFolder(tmp_path / "runs", "demo")

    assert "in use by process" in refused(capsys, "--out", str(tmp_path))

    folder.lock.release()


@pytest.mark.parametrize("arguments", [("--steps", "100"), ("--seed", "-1"), ("--seed", "9" * 20)])
def test_numbers_out_of_range_are_refused(tmp_path, capsys, arguments):
    """Too few steps for the fault and a seed that no generator takes are told before anything is made."""
    assert arguments[0] in refused(capsys, *arguments, "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_the_help_shows_an_example(capsys):
    """--help has an example and the exit codes."""
    with pytest.raises(SystemExit) as ended:
        cli(["demo", "--help"])
    told = capsys.readouterr().out

    assert ended.value.code == 0
    assert "example:" in told
    assert "exit code" in told


def test_the_schedule_warms_up_holds_and_decays():
    """The rate rises over 100 steps, holds, and falls to a tenth over the last fifth."""
    shares = [_schedule(step, 1000) for step in range(1000)]

    assert shares[0] == pytest.approx(0.01)
    assert shares[99:800] == [1.0] * 701
    assert shares[999] == pytest.approx(0.1 + 0.9 / 200)
    assert shares[800:] == sorted(shares[800:], reverse=True)


def test_the_default_folder_is_below_the_working_directory():
    """Without --out everything lands in demo-out, which git ignores."""
    assert "/demo-out/" in (Path(__file__).parents[1] / ".gitignore").read_text()


def test_beside_running_servers_each_demo_is_a_run_of_its_own(tmp_path):
    """With --prometheus the run is called like its folder and lies where those servers look; else all is in `out`."""
    path = tmp_path / "guard.yaml"
    path.write_text("{run: mine, runs: /shared/runs, metrics: {port: 9401}}")

    outside, inside = (_config(path, tmp_path / "sustained-1", named=named) for named in (True, False))

    assert (outside.run, outside.runs) == ("sustained-1", "/shared/runs")
    assert (inside.run, inside.runs) == ("demo", str(tmp_path / "sustained-1" / "runs"))
    assert outside.metrics.port == inside.metrics.port == 9401


def test_a_demo_is_either_local_or_beside_servers(tmp_path, capsys):
    """Both at once is bad usage."""
    with pytest.raises(SystemExit) as ended:
        cli(["demo", "--local-only", "--prometheus", "http://127.0.0.1:9090", "--out", str(tmp_path / "out")])

    assert ended.value.code == 2
    assert "not allowed with" in capsys.readouterr().err


def test_scenarios_want_what_the_table_of_faults_calls_right():
    """All scenarios that DESIGN names are there, and each wants the class that was fixed for its fault."""
    assert set(SCENARIOS) == {
        "clean", "bad-sample", "grad-explosion", "lr-too-high", "numerical", "hardware", "sustained",
    }  # fmt: skip
    for scenario in SCENARIOS.values():
        if scenario.fault is not None:
            kind = "xid" if scenario.breaks_gpu else scenario.fault
            assert scenario.class_ in RIGHT[kind].classes


def test_the_played_note_says_which_gpu_rank_and_host(tmp_path):
    """Without a GPU the demo puts what TrainGpuFault leads to into the inbox, and says that it was the demo."""
    inbox = Inbox(tmp_path)
    inbox.create()
    PlayedMachine(tmp_path, lambda: 600).fail(0, 79)
    (command,) = inbox.waiting()
    assert (command.action, command.alert, command.by, command.step) == ("note", "TrainGpuFault", "demo", 600)
    assert f"rank 0 on {uuid(0)}, GPU 0 of node-1, last XID 79" in command.reason


class Failing:
    """A driver that is told of an XID, and the alert that comes of it after so many looks."""

    def __init__(self, inbox: Inbox, alert: str, *, after_looks: int) -> None:
        self.inbox, self.alert, self.looks_left = inbox, alert, after_looks
        self.failed, self.now = [], 100.0
        inbox.create()

    def fail(self, gpu, xid):
        """As the fake driver's own."""
        self.failed.append((gpu, xid))

    def sleep(self, seconds):
        """Time goes on, and at last the alert comes."""
        self.now += seconds
        self.looks_left -= 1
        if self.looks_left == 0:
            note = {"run": "demo", "action": "note", "source": "alert", "received": 1.0}
            self.inbox.put(Command(id="a1", alert=self.alert, **note))


@pytest.mark.parametrize(
    ("alert", "looks", "seconds", "end"),
    [
        ("TrainGpuFault", 30, 3.0, "TrainGpuFault is in the inbox after 3.0 s"),
        ("TrainGpuFault", 10_000, LONGEST_WAIT_SECONDS, "no TrainGpuFault has come after 60."),
        ("TrainLossSpike", 30, LONGEST_WAIT_SECONDS, "no TrainGpuFault has come after 60."),
    ],
)
def test_the_training_waits_for_the_alert_and_not_for_ever(tmp_path, alert, looks, seconds, end):
    """The step goes on when that alert is there, or when its time is over; a line says so."""
    inbox, told = Inbox(tmp_path), []
    driver = Failing(inbox, alert, after_looks=looks)
    FakeMachine(driver, inbox, told.append, clock=lambda: driver.now, sleep=driver.sleep).fail(1, 79)
    assert driver.failed == [(1, 79)]
    assert driver.now - 100.0 == pytest.approx(seconds, abs=0.2)
    assert uuid(1) in told[0]
    assert end in told[1]


def test_without_a_compiler_the_demo_says_so_and_has_no_driver(tmp_path, monkeypatch, capsys):
    """Where nothing compiles there is no fake driver, no folder of it, and one line with the reason."""
    pytest.importorskip("pynvml")
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    assert find_driver(tmp_path / "driver") is None
    told = capsys.readouterr().out
    assert told.count("\n") == 1
    assert "neither cc nor gcc" in told
    assert not (tmp_path / "driver").exists()
