"""`checkpoints` from the command line: beside a job and after its death, without torch, one line for each mistake."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_plugin.__main__ import cli
from trainer_plugin.checkpoints import manifest

ROOT = Path(__file__).parents[1]
DESIGNED = {"step", "kind", "tiers", "finite", "proven", "bytes"}


@pytest.fixture
def job(make_guard):
    """A job at step 35, with checkpoints of steps 10, 20 and 30."""
    job = make_guard()
    job.run(35)
    job.guard._parts.loop.flush(5.0)
    return job


@pytest.fixture
def run_dir(job):
    """The run folder of a job that is at work."""
    return job.guard._parts.folder.path


def spoil(tmp_path, step: int, tier: str) -> Path:
    """Flip a bit in a checkpoint."""
    file = next((tmp_path / tier / "tiny" / f"step-{step:09d}-001").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)
    return file


def test_it_tells_beside_a_job_what_a_rollback_would_take(run_dir, job, capsys):
    """The target is the one that the job shows on its page, also of a checkpoint proven since it was saved."""
    assert cli(["checkpoints", str(run_dir), "--verify"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == ""
    assert lines[0] == "run tiny"
    assert lines[-1] == "a rollback would go to step 30, whole in both tiers (every byte checked)"
    assert int(job.guard.page.value("train_rollback_target_step")) == 30
    rows = [line.split() for line in lines if line.split()[0] in {"30", "20", "10"}]
    assert [row[:7] for row in rows] == [
        [step, "1", "periodic", "whole", "whole", "yes", "yes"] for step in ("30", "20", "10")
    ]
    assert [" ".join(row[9:]) for row in rows] == ["takes it", "would take it next", "would take it next"]


def test_json_is_as_designed(run_dir, job, tmp_path, capsys):
    """Each checkpoint has its step, kind, tiers, proof and size; the document has the target."""
    job.guard.close()
    out = tmp_path / "found.json"
    assert cli(["checkpoints", str(run_dir), "--json", str(out)]) == 0
    told = json.loads(out.read_text())
    assert told["rollback_target"] == 30
    assert all(set(one) >= DESIGNED for one in told["checkpoints"])
    assert told["checkpoints"][0]["tiers"] == {"local": "whole", "shared": "whole"}
    capsys.readouterr()


def test_damage_is_exit_code_1_and_named(run_dir, tmp_path, capsys):
    """A flipped bit is found by --verify only; the other tier still serves, and it is said that something is wrong."""
    file = spoil(tmp_path, 30, "local")
    assert cli(["checkpoints", str(run_dir)]) == 0
    capsys.readouterr()
    assert cli(["checkpoints", str(run_dir), "--verify"]) == 1
    out = capsys.readouterr().out
    assert f"problem: {file}: content is not what was written" in out
    assert "step 30, whole in the shared tier alone, copied to the other first" in out


def test_no_target_is_exit_code_1(make_guard, capsys):
    """A run that has saved nothing yet has nothing to go back to."""
    job = make_guard()
    job.run(5)
    assert cli(["checkpoints", str(job.guard._parts.folder.path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "a rollback has nothing to go to"


def test_it_needs_no_torch(run_dir):
    """On a host without torch it lists, and checks every byte."""
    code = (
        "import sys; sys.modules['torch'] = None; from trainer_plugin.__main__ import cli; "
        f"sys.exit(cli(['checkpoints', {str(run_dir)!r}, '--verify']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "every byte checked" in done.stdout


def test_a_moved_run_folder_and_one_without_options(run_dir, tmp_path, capsys):
    """The options written at the start tell where the tiers lie; without them --config and the folder's name do."""
    moved = run_dir.parent.parent / "moved"
    run_dir.rename(moved)
    assert cli(["checkpoints", str(moved)]) == 0
    config = tmp_path / "mine.yaml"
    config.write_text((moved / "guard.yaml").read_text())
    moved.rename(run_dir)
    (run_dir / "guard.yaml").unlink()
    capsys.readouterr()
    assert cli(["checkpoints", str(run_dir)]) == 2
    assert "no guard.yaml in it" in capsys.readouterr().err
    assert cli(["checkpoints", str(run_dir), "--config", str(config)]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere: no such run folder"),
        (["RUN/commands"], "no guard.yaml in it"),
        (["RUN", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["RUN", "--json", "no/such/folder.json"], "no such folder to write into"),
        (["RUN", "--json", "RUN/state.json"], "would overwrite what is read"),
        (["RUN", "--json", "RUN"], "a file's name wanted"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run_dir, capsys, arguments, said):
    """Each names the thing; nothing is printed beside it."""
    words = [word.replace("RUN", str(run_dir)) for word in arguments]
    assert cli(["checkpoints", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "content", ["a: [", "&a [*a, *a]", "checkpoints: {local: 3}", "x" * 10_000, "- 1\n", "2020-99-99: 1"]
)
def test_options_that_cannot_be_read_are_one_line(run_dir, capsys, content):
    """Whatever lies in guard.yaml's place."""
    (run_dir / "guard.yaml").write_text(content)
    assert cli(["checkpoints", str(run_dir)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_names_that_are_no_text_do_not_break_the_table(run_dir, tmp_path, capsys):
    """A file's name with a line end or with bytes that are no text stays on its line."""
    path = tmp_path / "shared" / "tiny" / "step-000000030-001" / manifest.NAME
    fields = json.loads(path.read_text())
    fields["files"]["a\nb\u2028"] = {"bytes": 1, "sha256": ""}
    path.write_text(json.dumps(fields))
    assert cli(["checkpoints", str(run_dir)]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem")]
    assert "a\\nb\\u2028" in line
