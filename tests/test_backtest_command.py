"""`backtest` from the command line: text, JSON, a picture, sweeps, and one line for every mistake."""

import json
import math
import resource
from pathlib import Path

import numpy as np
import pytest
from test_backtest_judge import calm, options, write

from trainer_plugin.__main__ import cli
from trainer_plugin.backtest.curve import Curve
from trainer_plugin.backtest.judge import judge
from trainer_plugin.backtest.logs import read_log
from trainer_plugin.backtest.plot import Plot


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
    arguments = ["--sweep", "robust_score=8,1000", "--sweep", "detection.drift_limit=6,1000"]
    arguments += ["--sweep", "level_least_ratio=100", "--json", str(out)]
    assert cli(["backtest", str(log), *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["robust_score", "drift_limit", "level_least_ratio", "incidents"]
    assert [line.split()[:4] for line in lines[1:]] == [
        ["8", "6", "100", "1"], ["8", "1000", "100", "1"], ["1000", "6", "100", "1"], ["1000", "1000", "100", "0"]
    ]  # fmt: skip
    swept = json.loads(out.read_text())["sweep"]
    assert swept[3]["values"] == {
        "detection.robust_score": 1000,
        "detection.drift_limit": 1000,
        "detection.level_least_ratio": 100,
    }
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
        (["LOG", "--plot", "a.what"], "ends in .png, .svg, .pdf wanted"),
        (["nowhere.csv", "--plot", "a.html"], "ends in .png, .svg, .pdf wanted"),
        (["nowhere.csv", "--plot", "a.pgf"], "ends in .png, .svg, .pdf wanted"),
        (["nowhere.csv", "--plot", "a"], "ends in .png, .svg, .pdf wanted"),
        (["nowhere.csv", "--plot", ""], "ends in .png, .svg, .pdf wanted"),
        (["nowhere.csv", "--json", ""], "a file's name wanted, found a folder"),
        (["nowhere.csv", "LOG", "--json", "LOG"], "would overwrite what is read"),
        (["nowhere.csv", "LOG", "--json", "./old.csv"], "would overwrite what is read"),
        (["nowhere.csv", ".", "--json", "events.tfevents.1"], "would be one of the event files in ."),
        (["nowhere.csv", "--json", "a.svg", "--plot", "./a.svg"], "--json and --plot both name a.svg"),
        ([""], "LOG: a file's name wanted, found an empty one"),
        (["no\nwhere.csv"], "no\\nwhere.csv: No such file"),
        (["no\udcffwhere.csv"], "no\\udcffwhere.csv: No such file"),
        *[
            (["LOG", "--sweep", f"robust_score={value}"], "a YAML value wanted, found ")
            for value in ("[6,8]", "*a", '"6', ": :", "!!python/object:x y", "!!timestamp x", "!!int", "[" * 5000)
        ],
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


def test_a_sweep_reads_values_as_guard_yaml_does(log, capsys):
    """1e1 is a number; a key that comes again adds its values, and an equal one counts once."""
    arguments = ["--sweep", "robust_score=1e1,8", "--sweep", "detection.robust_score=8.0,1e3,10"]
    assert cli(["backtest", str(log), *arguments]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["10.0", "8", "1000.0"]


def test_a_configuration_that_is_nested_too_deeply(log, tmp_path, capsys):
    """Twenty thousand brackets are refused in one line."""
    deep = tmp_path / "deep.yaml"
    deep.write_text("[" * 20_000)
    assert cli(["backtest", str(log), "--config", str(deep)]) == 2
    assert capsys.readouterr().err == f"trainer_plugin: {deep}: not YAML of options: nested too deeply\n"


def test_a_full_disk_leaves_the_earlier_file(log, tmp_path, capsys):
    """What cannot be written whole is not written at all, and leaves no draft."""
    outs = {"--json": tmp_path / "found.json", "--plot": tmp_path / "found.png"}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for option, out in outs.items():
        out.write_text("earlier")
        # To a writer, a file that may not grow is a disk that is full.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            assert cli(["backtest", str(log), option, str(out)]) == 2
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert capsys.readouterr().err == f"trainer_plugin: {out}: cannot be written: File too large\n"
        assert out.read_text() == "earlier"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json", "found.png", "old.csv"]


def test_a_link_and_a_device_are_written_to_where_they_lead(log, tmp_path):
    """A link stays one, and a device is not replaced by a file."""
    link, target = tmp_path / "link.json", tmp_path / "target.json"
    link.symlink_to(target)
    assert cli(["backtest", str(log), "--json", str(link)]) == 0
    assert link.is_symlink()
    assert json.loads(target.read_text())["files"]
    assert cli(["backtest", str(log), "--json", "/dev/null"]) == 0
    assert not Path("/dev/null").is_file()


@pytest.mark.parametrize(
    "name", ["$a_{$.csv", "a$b^$c$.csv", "\udcff.csv", "\u6f22\U0001f600.csv", "a\nb.csv", "x" * 200]
)
def test_a_plot_of_a_log_of_any_name(tmp_path, capsys, name):
    """A name is neither a formula nor a trouble, on the terminal, in JSON and in the picture."""
    path, out = write(tmp_path / name, calm(60)), tmp_path / "out.svg"
    assert cli(["backtest", str(path), "--plot", str(out), "--json", str(tmp_path / "out.json")]) == 0
    assert out.read_bytes().startswith(b"<?xml")
    assert len(json.loads((tmp_path / "out.json").read_text())["files"][0]["path"].splitlines()) == 1
    assert capsys.readouterr().out.count("\n") == 2


@pytest.mark.parametrize("losses", [[1e308, -1.7e308, 1.7e308] * 30, [math.nan] * 3, [2.5], [math.inf, 5e-324]])
def test_a_plot_of_any_values(tmp_path, losses):
    """Values at the end of what floats hold, none at all, and one alone are drawn without a warning."""
    out = tmp_path / "out.png"
    assert cli(["backtest", str(write(tmp_path / "log.csv", losses)), "--plot", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_panel_for_the_gradient_norm_only_if_there_is_one(tmp_path):
    """Two panels or three, by what is in the log."""
    for norms, panels in ((None, 2), ([1.0, 2.0, math.nan], 3), ([math.nan] * 3, 2)):
        plot = Plot()
        judged = judge(read_log(write(tmp_path / "log.csv", calm(3), norms=norms)), options(), watch=plot.watch)
        assert plot.draw(judged, ".svg").count(b'<g id="axes_') == panels


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


def test_one_bad_log_of_many_costs_the_others_nothing(log, tmp_path, capsys):
    """What can be read is judged, printed and written; each other file is a line, and the exit code says so."""
    bad, out = tmp_path / "bad.csv", tmp_path / "found.json"
    bad.write_text("step,loss\n")
    assert cli(["backtest", str(bad), str(log), str(tmp_path / "none.csv"), "--json", str(out)]) == 2
    said = capsys.readouterr()
    assert f"{log}: csv" in said.out
    assert [line.split(": ")[1] for line in said.err.splitlines()] == [str(bad), str(tmp_path / "none.csv")]
    assert [file["path"] for file in json.loads(out.read_text())["files"]] == [str(log)]


def test_a_configuration_that_is_not_there_is_one_plain_line(log, tmp_path, capsys):
    """The file and what is wrong with it, and no number of an error."""
    assert cli(["backtest", str(log), "--config", str(tmp_path / "none.yaml")]) == 2
    assert capsys.readouterr().err == f"trainer_plugin: {tmp_path / 'none.yaml'}: No such file or directory\n"
