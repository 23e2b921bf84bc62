"""Tests of the README: every block in it runs, is read by its own parser, or is held against what is there."""

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tools import find_tool

from exporter.files import packaged_files, write_files
from trainer_plugin.__main__ import cli
from trainer_plugin.config import Config, read_config

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    """The blocks of one language."""
    return [text for kind, text in BLOCKS if kind == language]


def test_every_block_has_a_known_language():
    """No block escapes the tests of this file."""
    assert {kind for kind, _ in BLOCKS} == {"python", "sh", "text", "yaml"}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("block", [one for one in blocks("python") if "torchrun" not in one], ids=itertools.count())
def test_the_python_blocks_run(block, tmp_path):
    """The loops in the README train in fresh processes, with an empty guard.yaml; ours warn of nothing."""
    (tmp_path / "guard.yaml").write_text("metrics: {port: 0}\n")
    ours = re.search("^import lightning|^from transformers", block, re.MULTILINE) is None

    done = subprocess.run(
        [sys.executable, *(("-W", "error") if ours else ()), "-c", block],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert done.stderr == "" or not ours
    run = re.search('run="([^"]+)"', block)
    state = json.loads((tmp_path / "runs" / (run[1] if run else "gpt-0") / "state.json").read_text())
    assert state["steps_total"] >= 5


@pytest.mark.timeout(60)
def test_the_scene_of_the_readmes_job_is_replayed(tmp_path):
    """With one sample NaN the job of that block leaves a scene, and replay names the sample by its id."""
    (block,) = [block for block in blocks("python") if block.startswith("# train.py") and "def build" in block]
    spoilt = block.replace("    samples =", '    inputs[13, 2] = float("nan")\n    samples =')
    (tmp_path / "train.py").write_text(spoilt)
    (tmp_path / "guard.yaml").write_text("metrics: {port: 0}\n")
    subprocess.run([sys.executable, "train.py"], cwd=tmp_path, check=True, capture_output=True)
    scene = next((tmp_path / "runs" / "gpt-0" / "scenes").iterdir())
    done = subprocess.run(
        [sys.executable, "-m", "trainer_plugin", "replay", scene],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert re.match(r"sample \d of 4 \(id 13\): its loss is not finite\n", done.stdout)


@pytest.mark.live
@pytest.mark.timeout(200)
def test_the_block_of_several_ranks_runs_under_torchrun(tmp_path):
    """Two ranks train as the README has it; once more, with rank 0 killed on the way, torchrun's restart goes on."""
    (block,) = [block for block in blocks("python") if "torchrun" in block]
    kill = """
        if dist.get_rank() == 0 and guard.step == 16 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            guard._parts.checkpoints.wait()
            os.kill(os.getpid(), 9)
"""
    deadly = block.replace("        guard.end_step()\n", f"        guard.end_step()\n{kill}").replace(
        "20 and", "30 and"
    )
    # Without it torch 2.13 hands the addresses of the dead to gloo after a restart.
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    options = "metrics: {port: 0}\ncheckpoints: {every: 5}\nranks: {timeout_seconds: 20}\n"
    for name, program, restarts in (("plain", block, 0), ("deadly", f"import os\n{deadly}", 1)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "guard.yaml").write_text(options)
        (folder / "train.py").write_text(program)
        command = [
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            f"--max-restarts={restarts}",
            "train.py",
        ]
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=folder, env=environment, capture_output=True, text=True, check=False,
            timeout=90,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        # On a busy machine a checkpoint may be left out while the one before it is still being written.
        assert bool(re.search(r"goes on from step (5|10|15)\b", done.stderr)) == (name == "deadly")
    assert list((tmp_path / "deadly/checkpoints/shared/gpt-0").glob("step-*-002/manifest.json"))


def test_the_yaml_block_is_a_config_and_states_the_defaults():
    """What the README shows as options is accepted, and each value in it is the default."""
    options, _ = blocks("yaml")

    assert read_config(yaml.safe_load(options)) == Config()


def test_prometheus_takes_the_example_for_other_trainers(tmp_path):
    """The rules lie where the README says, and Prometheus accepts what it shows."""
    _, config = blocks("yaml")
    write_files(tmp_path / "monitoring", packaged_files(runs=tmp_path))
    (tmp_path / "prometheus.yml").write_text(config)

    subprocess.run([find_tool("promtool"), "check", "config", tmp_path / "prometheus.yml"], check=True)


@pytest.mark.timeout(30)
def test_the_commands_exist(tmp_path, monkeypatch):
    """Every make target is known to make, every module's command line accepts what is written, a backtest runs."""
    monkeypatch.chdir(tmp_path)
    for line in "".join(blocks("sh")).splitlines():
        words = shlex.split(line)
        if words[0] == "make":
            subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)
        elif "files" in words:
            subprocess.run([sys.executable, *words[1:]], cwd=tmp_path, check=True, capture_output=True)
            assert (tmp_path / "monitoring/alert_rules/training.yml").exists()
        elif "backtest" in words:
            logs = [str(path) for word in words[4:] if word.endswith(".csv") for path in ROOT.glob(word)]
            assert logs
            assert cli(["backtest", *logs, *(word for word in words[4:] if not word.endswith(".csv"))]) == 0
        elif words[0] == "docker":
            assert (ROOT / "docker-compose.yml").exists()
        elif words[0].startswith("prometheus"):
            (option,) = [word for word in words if word.startswith("--config.file=")]
            assert (ROOT / "alert_rules" / Path(option).name).exists()
        else:
            command = words[1:4] if words[3].isalpha() else words[1:3]
            told = subprocess.run(
                [sys.executable, *command, "--help"], check=True, capture_output=True, text=True
            ).stdout
            assert all(word in told for word in words[3:] if word.startswith("--"))


def test_the_file_map_names_every_module():
    """The map in the README lists each source file, and none that is not there."""
    file_map = next(block for block in blocks("text") if block.startswith("exporter/"))
    named, folders = set(), [""]
    for indent, name in re.findall(r"^( *)(\w+/|\w+\.py) ", file_map, re.MULTILINE):
        folders[len(indent) // 2 :] = [name]
        if name.endswith(".py"):
            named.add("".join(folders))

    there = {
        path.relative_to(ROOT).as_posix()
        for package in ("exporter", "trainer_plugin", "grafana_dashboards")
        for path in (ROOT / package).rglob("*.py")
        if not path.name.startswith("__") and path.parent.name not in {"backtest", "demo", "gpu", "replay", "report"}
    }
    assert named == there
