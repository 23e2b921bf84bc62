"""The inventory: what lies on disk and what a rollback would take, told from outside, whatever state it is in."""

import os
import shutil

import msgspec
import pytest
from training import snapshot

from trainer_plugin.checkpoints import manifest
from trainer_plugin.checkpoints.inventory import Inventory, take_inventory
from trainer_plugin.checkpoints.retention import CheckpointsConfig
from trainer_plugin.checkpoints.store import Checkpoints
from trainer_plugin.policy.incidents import Incident
from trainer_plugin.policy.state import PolicyState
from trainer_plugin.run_folder import RunState


class Run:
    """A run on disk with checkpoints of these steps, and its state; `look` takes its inventory."""

    def __init__(self, folder, *steps: int) -> None:
        self.folder = folder / "runs" / "tiny"
        self.folder.mkdir(parents=True)
        self.tiers = {tier: folder / tier / "tiny" for tier in ("local", "shared")}
        self.config = CheckpointsConfig(
            local=str(folder / "local"), shared=str(folder / "shared"), keep_local=9, keep_shared=9
        )
        self.checkpoints = Checkpoints(self.config, "tiny", on_failure=lambda _: None)
        self.checkpoints.open()
        self.incidents: list[Incident] = []
        self.save(*steps)
        self.proven_up_to(10**9)

    def save(self, *steps: int, **values: float) -> None:
        """Save these steps in the branch of today."""
        for step in steps:
            self.checkpoints.save(snapshot(step, **values), step)
            assert self.checkpoints.wait(8.0)

    def proven_up_to(self, step: int) -> None:
        """Write the state with this step proven."""
        self.checkpoints.proven_step = step
        state = RunState(
            proven_step=step, lineage=self.checkpoints.lineage, policy=PolicyState(incidents=self.incidents)
        )
        (self.folder / "state.json").write_bytes(msgspec.json.encode(state))

    def met(self, first_step: int, healed_step: int | None) -> None:
        """An incident that is over, or open."""
        incident = Incident(
            id=len(self.incidents) + 1, first_step=first_step, detected_step=first_step, last_step=first_step,
            healed=healed_step is not None, healed_step=healed_step,
        )  # fmt: skip
        self.incidents.append(incident)
        if healed_step is not None:
            self.checkpoints.suspect.append((incident.before_step, healed_step))
        self.proven_up_to(self.checkpoints.proven_step)

    def path(self, tier: str, step: int, branch: int = 0):
        """Where a checkpoint lies."""
        return self.tiers[tier] / f"step-{step:09d}-{branch:03d}"

    def look(self, *, verify: bool = True) -> Inventory:
        """What there is."""
        return take_inventory(self.folder, "tiny", self.config, verify=verify)


def told(found: Inventory) -> dict[tuple[int, int], str]:
    """Step and branch of each checkpoint, and why it is not taken."""
    return {(one.step, one.branch): one.obstacle for one in found.checkpoints}


@pytest.fixture
def run(tmp_path):
    """A run with three proven checkpoints."""
    return Run(tmp_path, 10, 20, 30)


def test_a_whole_run_is_listed_newest_first(run):
    """Each checkpoint with its tiers, size and proof; the newest is the target, and nothing is wrong."""
    found = run.look()
    assert [one.step for one in found.checkpoints] == [30, 20, 10]
    assert all(one.tiers == {"local": "whole", "shared": "whole"} for one in found.checkpoints)
    assert all(one.finite and one.proven and one.kind == "periodic" and one.bytes > 256 for one in found.checkpoints)
    assert (found.rollback_target, found.problems, found.notes) == (30, [], [])
    assert found.tiers == {tier: str(folder) for tier, folder in run.tiers.items()}


def test_nothing_is_changed_by_looking(run):
    """No file is made, mended, removed or touched."""

    def state():
        return {
            (path, path.stat().st_mtime_ns, path.stat().st_size)
            for folder in (run.folder, *run.tiers.values())
            for path in folder.rglob("*")
        }

    (run.path("local", 20) / manifest.NAME).unlink()
    before = state()
    run.look()
    assert state() == before


def test_each_reason_against_a_checkpoint_is_told(run):
    """Not finite, not proven, saved in an incident, of an abandoned branch, not before the open incident."""
    run.proven_up_to(5)  # While nothing is proven, what an earlier branch saved is kept.
    run.checkpoints.lineage.begin(20)
    run.save(30, 50, 60, 70)
    run.save(80, weight=float("nan"))
    run.met(51, 55)
    run.proven_up_to(65)
    assert told(run.look()) == {
        (80, 1): "holds values that are not finite",
        (70, 1): "not proven",
        (60, 1): "",
        (50, 1): "saved in an incident",
        (30, 1): "",
        (30, 0): "of a branch that was abandoned",
        (20, 0): "",
        (10, 0): "",
    }
    run.met(61, None)
    assert told(run.look())[60, 1] == "not before incident 2, which is open"
    assert run.look().rollback_target == 30


def test_the_target_is_the_one_that_a_rollback_takes(run, tmp_path):
    """Over branches, incidents, proofs and damage, the command and the job's own choice agree."""
    run.checkpoints.lineage.begin(20)
    run.save(30, 40, 50)
    shutil.rmtree(run.path("shared", 50, 1))
    for proven in (5, 10, 35, 45, 60):
        for incident in (None, (42, 47), (36, None), (9, None)):
            case = Run(tmp_path / f"{proven}-{incident}")
            for tier in run.tiers:
                shutil.copytree(run.tiers[tier], case.tiers[tier], dirs_exist_ok=True)
            case.checkpoints.open()
            case.checkpoints.lineage = run.checkpoints.lineage
            case.proven_up_to(proven)
            if incident is not None:
                case.met(*incident)
            open_incident = next((one for one in case.incidents if not one.healed), None)
            before = open_incident.before_step if open_incident is not None else 1 << 60
            wanted = [(m.step, m.branch) for m in case.checkpoints.targets(before)]
            found = case.look()
            assert [place for place, obstacle in told(found).items() if not obstacle] == wanted, (proven, incident)
            assert found.rollback_target == (wanted[0][0] if wanted else None)


@pytest.mark.parametrize("verify", [False, True])
def test_damage_is_told_by_its_file(run, verify):
    """A missing or cut file is seen by its size, a flipped byte by its hash; the next whole one is the target."""
    next(run.path("local", 30).glob("*.distcp")).unlink()
    cut = run.path("shared", 30) / "plain.pt"
    cut.write_bytes(cut.read_bytes()[:-1])
    flipped = next(run.path("local", 20).glob("*.distcp"))
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    found = run.look(verify=verify)
    newest, middle, _ = found.checkpoints
    assert newest.tiers == {"local": "damaged", "shared": "damaged"}
    assert newest.obstacle == "whole in no tier"
    assert middle.tiers == {"local": "damaged" if verify else "whole", "shared": "whole"}
    assert found.rollback_target == 20
    assert any(str(cut) in problem for problem in found.problems)
    assert any(str(flipped) in problem for problem in found.problems) == verify
    assert len(found.problems) == 2 + verify


def test_what_has_no_manifest_is_unfinished_and_not_damaged(run):
    """It may be being written right now: it is noted, and absent."""
    (run.path("local", 30) / manifest.NAME).unlink()
    (run.tiers["shared"] / "step-000000040-000").mkdir()
    found = run.look()
    assert found.checkpoints[0].tiers == {"local": "absent", "shared": "whole"}
    assert (found.rollback_target, found.problems, len(found.notes)) == (30, [], 2)


def test_hostile_things_are_lines(run, tmp_path):
    """Pipes, links to nowhere, rubbish, other versions, files for folders: each a line, none opened or waited for."""
    shared = run.tiers["shared"]
    pipe = run.path("local", 10) / "plain.pt"
    pipe.unlink()
    os.mkfifo(pipe)
    deep = run.path("shared", 10) / manifest.NAME
    deep.write_bytes(b"[" * 100_000)
    other = run.path("shared", 20) / manifest.NAME
    other.write_bytes(msgspec.json.encode({**msgspec.json.decode(other.read_bytes()), "schema": 99}))
    link = run.path("local", 30) / manifest.NAME
    link.unlink()
    link.symlink_to(tmp_path / "nowhere")
    (shared / "step-000000050-000").touch()
    (shared / "step-000000060-000").symlink_to("/dev/zero")
    (shared / "step-odd").mkdir()
    (shared / "step-000000070-000").mkdir()
    os.mkfifo(shared / "step-000000070-000" / manifest.NAME)
    upwards = run.path("local", 20) / manifest.NAME
    fields = msgspec.json.decode(upwards.read_bytes())
    upwards.write_bytes(msgspec.json.encode({**fields, "files": {"../../x": {"bytes": 1, "sha256": ""}}}))
    found = run.look()
    assert found.rollback_target == 30
    assert {one.step for one in found.checkpoints} == {10, 20, 30, 50, 60, 70}
    assert len(found.problems) == 8
    assert all("\n" not in problem for problem in found.problems)
    assert any(problem.startswith(f"{other}: schema 99, written by pretraining-guard") for problem in found.problems)


def test_what_has_no_hash_is_damaged(run):
    """A manifest that does not vouch for a file which a restore would open makes no checkpoint whole."""
    for tier in run.tiers:
        path = run.path(tier, 30) / manifest.NAME
        fields = msgspec.json.decode(path.read_bytes())
        del fields["files"]["plain.pt"]
        path.write_bytes(msgspec.json.encode(fields))
    found = run.look(verify=False)
    assert found.rollback_target == 20
    assert found.problems == [f"{run.path(tier, 30)}: no hash of plain.pt" for tier in run.tiers]


@pytest.mark.parametrize("content", [None, b"{", b"[" * 100_000, b'{"schema": 7}', b'{"proven_step": "x"}'])
def test_without_a_state_nothing_is_known_to_be_proven(run, content):
    """A state that is missing, damaged or another version's is a problem, and there is no target."""
    path = run.folder / "state.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    found = run.look()
    assert set(told(found).values()) == {"not proven"}
    assert found.rollback_target is None
    assert len(found.problems) == 1
    assert str(path) in found.problems[0]


def test_a_tier_that_is_not_there_is_a_problem(run):
    """The other tier's checkpoints are listed all the same, and are targets."""
    shutil.rmtree(run.tiers["local"])
    found = run.look()
    assert found.problems == [f"tier local: {run.tiers['local']}: No such file or directory"]
    assert found.rollback_target == 30
    assert found.checkpoints[0].tiers == {"local": "absent", "shared": "whole"}


def test_what_anybody_may_write_is_not_read(run):
    """The job refuses that tier, so nothing of it counts: a line says what to do, and the other tier's are targets."""
    run.tiers["local"].chmod(0o777)
    found = run.look()
    assert found.problems == [
        f"tier local: anybody may write in {run.tiers['local']}: take that right away (chmod o-w)"
    ]
    assert [one.tiers for one in found.checkpoints] == [{"local": "absent", "shared": "whole"}] * 3
    assert found.rollback_target == 30


def test_another_runs_checkpoint_is_none(run):
    """Copied here by hand it is told and never a target, as the job leaves it alone."""
    path = run.path("local", 30) / manifest.NAME
    path.write_bytes(msgspec.json.encode({**msgspec.json.decode(path.read_bytes()), "run": "other"}))
    shutil.rmtree(run.path("shared", 30))
    found = run.look()
    assert found.problems == [f"{path}: another run's checkpoint"]
    assert (found.checkpoints[0].step, found.checkpoints[0].obstacle) == (30, "whole in no tier")
    assert found.rollback_target == 20


def test_a_run_without_checkpoints_has_no_target(tmp_path):
    """Nothing is wrong with it, and a rollback could go nowhere."""
    found = Run(tmp_path).look()
    assert (found.checkpoints, found.rollback_target, found.problems) == ([], None, [])
