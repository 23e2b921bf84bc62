"""Checkpoints in two tiers: whole or not at all, mended from the other tier, kept by number and branch."""

import math
import shutil
import sys
import threading

import msgspec
import pytest
import torch
from training import snapshot

from trainer_plugin import manifest
from trainer_plugin.checkpoints import Checkpoints
from trainer_plugin.retention import CheckpointsConfig, Lineage
from trainer_plugin.state import Snapshot


@pytest.fixture
def failures():
    """The tiers whose failures were counted."""
    return []


@pytest.fixture
def make(tmp_path, failures):
    """A function that opens the checkpoints of a run below `tmp_path`, everything in them proven."""

    def make(lineage=None, proven=10**9, **options) -> Checkpoints:
        options = {"keep_local": 3, "keep_shared": 3, **options}
        config = CheckpointsConfig(local=str(tmp_path / "local"), shared=str(tmp_path / "shared"), **options)
        checkpoints = Checkpoints(config, "tiny", on_failure=failures.append)
        checkpoints.lineage = lineage or Lineage()
        checkpoints.open()
        checkpoints.proven_step = proven
        return checkpoints

    return make


def save(checkpoints: Checkpoints, *steps: int, **values: float) -> None:
    """Save these steps, one after the other."""
    for step in steps:
        assert checkpoints.save(snapshot(step, **values), step)
        assert checkpoints.wait(8.0)


def steps(checkpoints: Checkpoints, before: int = 1 << 62, **options) -> list[int]:
    """The steps of the targets, best first."""
    return [target.step for target in checkpoints.targets(before, **options)]


def hurt(tmp_path, tier: str, step: int, *, how: str = "flip", branch: int = 0) -> None:
    """Damage a checkpoint in one tier."""
    folder = tmp_path / tier / "tiny" / f"step-{step:09d}-{branch:03d}"
    file = next(folder.glob("*.distcp"))
    if how == "manifest":
        (folder / manifest.NAME).unlink()
    elif how == "missing":
        file.unlink()
    else:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content[:-1] if how == "cut" else content)


def test_a_saved_state_comes_back_from_both_tiers(make, tmp_path, failures):
    """After a save both tiers hold it whole, also for a process that opens them anew, and it loads as it was."""
    save(make(), 10)
    checkpoints = make()
    (target,) = checkpoints.targets(11)
    assert checkpoints.tiers(target) == ("local", "shared")
    loaded = checkpoints.load(target)
    assert (loaded.tier, loaded.degraded) == ("local", ())
    assert loaded.snapshot.plain == {"guard": {"step": 10}}
    assert torch.equal(loaded.snapshot.tensors["model/weight"], torch.ones(64))
    assert checkpoints.seconds() == {}
    assert failures == []
    assert (tmp_path / "local" / "tiny").stat().st_mode & 0o777 == 0o700


def test_the_manifest_is_written_last(make, tmp_path):
    """No file of a checkpoint is newer than its manifest."""
    save(make(), 10)
    for tier in ("local", "shared"):
        (folder,) = (tmp_path / tier / "tiny").iterdir()
        times = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
        assert max(times, key=times.get) == manifest.NAME


@pytest.mark.parametrize("how", ["flip", "cut", "missing", "manifest"])
@pytest.mark.parametrize("tier", ["local", "shared"])
def test_one_damaged_tier_is_mended_from_the_other(make, tmp_path, tier, how):
    """Damage of any kind in one tier is found before loading, the other is used, and then both are whole again."""
    checkpoints = make()
    save(checkpoints, 10)
    (target,) = checkpoints.targets(11)
    hurt(tmp_path, tier, 10, how=how)
    loaded = checkpoints.load(target)
    assert loaded.degraded == ()
    assert loaded.tier == ("shared" if tier == "local" else "local")
    for folder in (tmp_path / "local" / "tiny", tmp_path / "shared" / "tiny"):
        assert manifest.faults(folder / target.name, manifest.read(folder / target.name)) == []


def test_damage_in_both_tiers_is_never_loaded(make, tmp_path):
    """With no whole copy left the load fails, and says what is wrong where."""
    checkpoints = make()
    save(checkpoints, 10)
    (target,) = checkpoints.targets(11)
    hurt(tmp_path, "local", 10)
    hurt(tmp_path, "shared", 10, how="missing")
    with pytest.raises(OSError, match="whole in no tier") as caught:
        checkpoints.load(target)
    assert str(tmp_path / "local") in str(caught.value)
    assert str(tmp_path / "shared") in str(caught.value)


def test_a_tier_out_of_order_makes_the_load_degraded(make, tmp_path):
    """When the other tier cannot be mended the surviving copy is used, marked degraded."""
    checkpoints = make()
    save(checkpoints, 10)
    (target,) = checkpoints.targets(11)
    shutil.rmtree(tmp_path / "shared" / "tiny")
    (tmp_path / "shared" / "tiny").write_text("a file in the folder's place")
    loaded = checkpoints.load(target)
    assert (loaded.tier, loaded.degraded) == ("local", ("shared",))
    assert checkpoints.tiers(target) == ("local",)


def test_a_good_copy_in_one_tier_is_first_copied_to_the_other(make, tmp_path):
    """A checkpoint that only the shared tier holds is in both after it was loaded."""
    save(make(), 10)
    shutil.rmtree(tmp_path / "local")
    checkpoints = make()
    (target,) = checkpoints.targets(11)
    assert checkpoints.tiers(target) == ("shared",)
    assert checkpoints.load(target).tier == "shared"
    assert checkpoints.tiers(target) == ("local", "shared")


def test_a_writer_that_fails_is_counted_by_tier(make, tmp_path, failures):
    """A full or broken tier costs its own copy only, is counted, and the next save works again."""
    checkpoints = make()
    shutil.rmtree(tmp_path / "shared" / "tiny")
    (tmp_path / "shared" / "tiny").touch()
    save(checkpoints, 10)
    assert failures == ["shared"]
    assert steps(checkpoints) == [10]
    (tmp_path / "shared" / "tiny").unlink()
    shutil.rmtree(tmp_path / "local" / "tiny")
    (tmp_path / "local" / "tiny").touch()
    save(checkpoints, 20)
    assert failures == ["shared", "local"]
    (tmp_path / "local" / "tiny").unlink()
    (tmp_path / "local" / "tiny").mkdir()
    save(checkpoints, 30)
    assert failures == ["shared", "local"]
    assert checkpoints.newest_step("shared") == 30


def test_a_save_during_a_save_is_left_out(make):
    """While one checkpoint is being written another is refused; nothing waits."""
    checkpoints = make()
    with checkpoints._local._held():  # The writer stands before its first file.
        assert checkpoints.save(snapshot(10), 10)
        assert not checkpoints.save(snapshot(11), 11)
        assert not checkpoints.wait(0.0)
    assert checkpoints.wait(8.0)
    assert steps(checkpoints) == [10]


def test_an_interrupt_while_the_writer_starts_loses_nothing(make):
    """Ctrl-C inside `save`: the write that has begun ends, is waited for, and the next one is taken."""

    def interrupt(frame, _event, _value) -> None:
        if frame.f_code is threading.Event.wait.__code__:  # Where a starting thread is waited for.
            sys.settrace(None)
            raise KeyboardInterrupt

    checkpoints = make()
    before = sys.gettrace()
    try:
        sys.settrace(interrupt)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(snapshot(10), 10)
    finally:
        sys.settrace(before)
    assert checkpoints.wait(8.0)
    save(checkpoints, 20)
    assert steps(checkpoints) == [20, 10]


def test_a_folder_that_cannot_be_is_told_at_the_start(make, tmp_path):
    """A file in the place of a tier's folder is an error at start-up."""
    (tmp_path / "shared").touch()
    with pytest.raises(OSError, match="shared"):
        make()


def test_leftovers_are_removed_and_other_things_left_alone(make, tmp_path):
    """At the start a folder without a manifest goes; what another version wrote, and what is not ours, stays."""
    save(make(), 10, 20)
    folder = tmp_path / "local" / "tiny"
    (folder / "step-000000030-000").mkdir()
    (folder / "step-000000030-000" / "plain.pt").touch()
    (folder / "notes").mkdir()
    newer = folder / "step-000000020-000" / manifest.NAME
    found = msgspec.json.decode(newer.read_bytes())
    newer.write_bytes(msgspec.json.encode({**found, "schema": 99}))
    checkpoints = make()
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["notes", "step-000000010-000", "step-000000020-000"]
    assert checkpoints.newest_step("local") == 10


def test_retention_keeps_the_newest_in_each_tier(make):
    """Each tier keeps its own number of checkpoints, the newest ones."""
    checkpoints = make(keep_local=2, keep_shared=4)
    save(checkpoints, *range(10, 70, 10))
    assert steps(checkpoints) == [60, 50, 40, 30]
    assert [len(checkpoints.tiers(target)) for target in checkpoints.targets(100)] == [2, 2, 1, 1]


def test_the_newest_proven_one_is_never_removed(make):
    """However many unproven ones come after it, the newest proven checkpoint stays in both tiers."""
    checkpoints = make(keep_local=2, keep_shared=2, proven=20)
    save(checkpoints, *range(10, 70, 10))
    assert steps(checkpoints) == [20]
    assert steps(checkpoints, proven_only=False) == [60, 50, 20]
    assert len(checkpoints.tiers(checkpoints.targets(100)[0])) == 2


def test_c19_retention_goes_by_number(make):
    """Of 9000 to 9900 and 10000 with ten kept, 9000 goes and 10000 stays."""
    checkpoints = make(keep_local=10, keep_shared=10)
    save(checkpoints, *range(9000, 10_001, 100))
    assert steps(checkpoints) == list(range(10_000, 9000, -100))


def test_c19_an_abandoned_branch_is_never_chosen(make):
    """Back from 10000 to 9500 and on to 9600', the newest is 9600', and nothing of the old branch comes up again."""
    checkpoints = make(keep_local=10, keep_shared=10)
    save(checkpoints, *range(9400, 10_001, 100))
    checkpoints.lineage.begin(9500)
    assert steps(checkpoints) == [9500, 9400]
    assert checkpoints.newest_step("shared") == 9500
    save(checkpoints, 9600)
    newest = checkpoints.targets(1 << 62)[0]
    assert (newest.step, newest.branch) == (9600, 1)
    assert steps(make(checkpoints.lineage)) == [9600, 9500, 9400]


def test_a_step_saved_again_does_not_overwrite_the_other_branch(make):
    """One step number in two branches is two folders, and the live one is found."""
    checkpoints = make()
    save(checkpoints, 10, 20)
    checkpoints.lineage.begin(10)
    save(checkpoints, 20, weight=2.0)
    assert checkpoints.load(checkpoints.targets(21)[0]).snapshot.tensors["model/weight"][0] == 2.0


@pytest.mark.parametrize("values", [{"weight": math.nan}, {"moment": math.inf}], ids=["weight", "moment"])
def test_c22_a_checkpoint_with_a_bad_number_is_never_a_target(make, failures, values):
    """With NaN weights, or one bad element in a moment, from step 100 on, a rollback goes to 50."""
    checkpoints = make()
    save(checkpoints, 50)
    save(checkpoints, 101, 151, **values)
    assert steps(checkpoints) == [50]
    assert steps(make()) == [50]
    assert failures == ["local", "local"]  # Counted: nothing was saved that anybody could go back to.
    save(checkpoints, 160)
    assert [m.step for m in checkpoints._local.whole.values()] == [50, 160]


def test_targets_are_the_nearest_first_and_whole_before_half(make, tmp_path):
    """Only what lies before the step counts; the nearest first, at one step the one that both tiers hold."""
    checkpoints = make()
    save(checkpoints, 10, 20)
    checkpoints.lineage.began_at = [0, 20]
    save(checkpoints, 20)
    hurt(tmp_path, "shared", 20, how="manifest", branch=1)
    again = make(checkpoints.lineage)
    found = [(target.step, target.branch) for target in again.targets(30)]
    assert found == [(20, 0), (20, 1), (10, 0)]
    assert steps(again, before=20) == [10]
    assert steps(again, before=10) == []


def test_unproven_checkpoints_are_no_targets(make):
    """What a verdict could still come about is not gone back to, except by a restart."""
    checkpoints = make(proven=15)
    save(checkpoints, 10, 20)
    assert steps(checkpoints) == [10]
    assert steps(checkpoints, proven_only=False) == [20, 10]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "`every` must be at least 1"),
        ({"proof_steps": -1}, "`proof_steps` must be at least 0"),
        ({"local": "a", "shared": "./a"}, "two folders"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, message):
    """Bad options are told by name."""
    with pytest.raises(ValueError, match=message):
        CheckpointsConfig(**options)


def test_what_was_saved_in_a_healed_incident_is_no_target(make):
    """A checkpoint inside an incident's steps is passed over, however long ago the run has healed."""
    checkpoints = make()
    save(checkpoints, 50, 100)
    checkpoints.suspect = [(97, 130)]
    assert [m.step for m in checkpoints.targets(200)] == [50]
    assert [m.step for m in checkpoints.targets(200, proven_only=False)] == [100, 50]


def test_a_failed_save_leaves_nothing_behind(make, failures, tmp_path):
    """A snapshot that cannot be written is counted in both tiers, and its half-made folders are gone."""
    checkpoints = make()
    broken = Snapshot(tensors={}, plain={"odd": object()})
    assert checkpoints.save(broken, 10)
    assert checkpoints.wait(8.0)
    assert failures == ["local", "shared"]
    assert [list((tmp_path / tier / "tiny").iterdir()) for tier in ("local", "shared")] == [[], []]
