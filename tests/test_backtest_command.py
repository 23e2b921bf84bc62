"""`backtest` from the command line: text, JSON, a picture, sweeps, and one line for every mistake."""

import json

import numpy as np
import pytest
from test_backtest_judge import calm, write

from trainer_plugin.__main__ import cli
from trainer_plugin.backtest.curve import Curve


@pytest.fixture
def log(tmp_path, monkeypatch):
    """A log with one spike of 20 steps after the default warm-up, in the folder where the command runs."""
    monkeypatch.chdir(tmp_path)
    losses = calm(1500)
    losses[1000:1020] *= 2.5
    return write(tmp_path / "old.csv", losses)


def test_the_table_tells_all(log, capsys):
    """Format, steps, each detector's steps, the incident and what would be done."""
    assert cli(["backtest", str(log)]) == 0
    said = capsys.readouterr().out
    assert f"{log}: csv, 1500 logged steps" in said
    assert "robust           loss" in said
    assert "1001       1001       1020" in said
    assert "would clip after step 1001" in said


def test_json_holds_every_log(log, tmp_path, capsys):
    """Several logs are one document, in their order."""
    calm_log = write(tmp_path / "calm.csv", calm(700))
    out = tmp_path / "found.json"
    assert cli(["backtest", str(calm_log), str(log), "--json", str(out)]) == 0
    files = json.loads(out.read_text())["files"]
    assert [file["path"] for file in files] == [str(calm_log), str(log)]
    assert [len(file["incidents"]) for file in files] == [0, 1]
    assert "no incident" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_plot_is_a_picture(log, tmp_path, kind):
    """The picture is written in the kind that its name asks for."""
    path = tmp_path / f"old.{kind}"
    assert cli(["backtest", str(log), "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG" if kind == "png" else b"<?xml")


def test_a_sweep_is_one_line_a_combination(log, tmp_path, capsys):
    """Every combination of the values, with what came of it, as text and as JSON."""
    out = tmp_path / "sweep.json"
    arguments = ["--sweep", "robust_score=8,1000", "--sweep", "detection.drift_limit=6,1000", "--json", str(out)]
    assert cli(["backtest", str(log), *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["robust_score", "drift_limit", "incidents"]
    assert [line.split()[:3] for line in lines[1:]] == [
        ["8", "6", "1"], ["8", "1000", "1"], ["1000", "6", "1"], ["1000", "1000", "0"]
    ]  # fmt: skip
    swept = json.loads(out.read_text())["sweep"]
    assert swept[3]["values"] == {"detection.robust_score": 1000, "detection.drift_limit": 1000}
    assert swept[0]["files"][0]["incidents"][0]["detected_step"] == 1001


def test_the_configuration_is_that_of_the_job(log, tmp_path, capsys):
    """A guard.yaml says by what is judged."""
    config = tmp_path / "guard.yaml"
    config.write_text("detection: {warmup_steps: 2000}\n")
    assert cli(["backtest", str(log), "--config", str(config)]) == 0
    assert "no incident" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.csv"], "nowhere.csv: No such file"),
        (["LOG", "--sweep", "robust_score"], "KEY=V1,V2,... wanted"),
        (["LOG", "--sweep", "score=8"], "no option 'score'; known are"),
        (["LOG", "--sweep", "robust_score=high"], "`detection.robust_score`"),
        (["LOG", "--sweep", "robust_score=-1"], "must be above 0"),
        (["LOG", "--sweep", "window=" + ",".join(map(str, range(1, 300)))], "at most 200 combinations"),
        (["LOG", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["LOG", "LOG", "--plot", "a.png"], "--plot draws one log"),
        (["LOG", "--json", "no/such/folder/a.json"], "no such folder"),
        (["LOG", "--plot", "a.what"], "what"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(log, tmp_path, capsys, arguments, said):
    """What, where, what was wanted; on stderr, with nothing written."""
    assert cli(["backtest", *(str(log) if argument == "LOG" else argument for argument in arguments)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("trainer_plugin: ")
    assert error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old.csv"]


def test_a_curve_keeps_its_extremes():
    """Ten thousand values and one spike in at most 4,096 stretches: the spike is in them, and so are gaps."""
    curve = Curve()
    values = np.sin(np.arange(10_000) / 100.0)
    values[7777] = 50.0
    for step, value in enumerate(values):
        curve.add(step, None if step < 100 else float(value))
    steps, lows, highs = curve.points()
    assert len(steps) == len(lows) == len(highs) <= 4096
    assert np.nanmax(highs) == 50.0
    assert np.nanmin(lows) == pytest.approx(-1.0, abs=1e-3)
    assert np.isnan(lows[0])
    assert steps == sorted(steps)
