"""Checkpoints in two tiers: whole or not at all, mended from the other tier, kept by number and branch."""

import math
import pickle
import shutil
from dataclasses import replace

import msgspec
import pytest
import torch
from tiers import Trap, checkpoint_folder, flip, open_checkpoints, save, target_steps, whole
from training import snapshot

from trainer_plugin.checkpoints import manifest
from trainer_plugin.checkpoints.snapshot import Snapshot
from trainer_plugin.checkpoints.store import Checkpoints


@pytest.fixture
def failures():
    """The tiers whose failures were counted."""
    return []


@pytest.fixture
def make(tmp_path, failures):
    """A function that opens the checkpoints of a run below `tmp_path`, everything in them proven."""

    def make(lineage=None, proven=1 << 62, **options) -> Checkpoints:
        options = {"keep_local": 3, "keep_shared": 3, **options}
        return open_checkpoints(tmp_path, failures, lineage=lineage, proven=proven, options=options)

    return make


def hurt(tmp_path, tier: str, step: int, *, how: str = "flip", branch: int = 0) -> None:
    """Damage a checkpoint in one tier."""
    folder = checkpoint_folder(tmp_path, tier, step, branch)
    file = next(folder.glob("*.distcp"))
    if how == "manifest":
        (folder / manifest.NAME).unlink()
    elif how == "missing":
        file.unlink()
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        flip(file)


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
    save(make(), 10)
    hurt(tmp_path, tier, 10, how=how)
    checkpoints = make()
    (target,) = checkpoints.targets(11)
    loaded = checkpoints.load(target)
    assert loaded.degraded == ()
    assert loaded.tier == ("shared" if tier == "local" else "local")
    assert whole(tmp_path, "local") == whole(tmp_path, "shared") == {10: []}


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
    save(make(), 10)
    checkpoints = make()
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
    assert target_steps(checkpoints) == [60, 50, 40, 30]
    assert [len(checkpoints.tiers(target)) for target in checkpoints.targets(100)] == [2, 2, 1, 1]


def test_the_newest_proven_one_is_never_removed(make):
    """However many unproven ones come after it, the newest proven checkpoint stays in both tiers."""
    checkpoints = make(keep_local=2, keep_shared=2, proven=20)
    save(checkpoints, *range(10, 70, 10))
    assert target_steps(checkpoints) == [20]
    assert target_steps(checkpoints, proven_only=False) == [60, 50, 20]
    assert len(checkpoints.tiers(checkpoints.targets(100)[0])) == 2


def test_c19_retention_goes_by_number(make):
    """Of 9000 to 9900 and 10000 with ten kept, 9000 goes and 10000 stays."""
    checkpoints = make(keep_local=10, keep_shared=10)
    save(checkpoints, *range(9000, 10_001, 100))
    assert target_steps(checkpoints) == list(range(10_000, 9000, -100))


def test_c19_an_abandoned_branch_is_never_chosen(make):
    """Back from 10000 to 9500 and on to 9600', the newest is 9600', and nothing of the old branch comes up again."""
    checkpoints = make(keep_local=10, keep_shared=10)
    save(checkpoints, *range(9400, 10_001, 100))
    checkpoints.lineage.begin(9500)
    assert target_steps(checkpoints) == [9500, 9400]
    assert checkpoints.newest_step("shared") == 9500
    save(checkpoints, 9600)
    newest = checkpoints.targets(1 << 62)[0]
    assert (newest.step, newest.branch) == (9600, 1)
    assert target_steps(make(checkpoints.lineage)) == [9600, 9500, 9400]


def test_a_step_saved_again_does_not_overwrite_the_other_branch(make):
    """One step number in two branches is two folders, and the live one is found."""
    checkpoints = make()
    save(checkpoints, 10, 20)
    checkpoints.lineage.begin(10)
    save(checkpoints, 20, weight=2.0)
    checkpoints = make(checkpoints.lineage)
    assert checkpoints.load(checkpoints.targets(21)[0]).snapshot.tensors["model/weight"][0] == 2.0


@pytest.mark.parametrize("values", [{"weight": math.nan}, {"moment": math.inf}], ids=["weight", "moment"])
def test_c22_a_checkpoint_with_a_bad_number_is_never_a_target(make, failures, values):
    """With NaN weights, or one bad element in a moment, from step 100 on, a rollback goes to 50."""
    checkpoints = make()
    save(checkpoints, 50)
    save(checkpoints, 101, 151, **values)
    assert target_steps(checkpoints) == [50]
    assert target_steps(make()) == [50]
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
    assert target_steps(again, before=20) == [10]
    assert target_steps(again, before=10) == []


def test_unproven_checkpoints_are_no_targets(make):
    """What a verdict could still come about is not gone back to, except by a restart."""
    checkpoints = make(proven=15)
    save(checkpoints, 10, 20)
    assert target_steps(checkpoints) == [10]
    assert target_steps(checkpoints, proven_only=False) == [20, 10]


def test_what_was_saved_in_a_healed_incident_is_no_target(make):
    """A checkpoint inside an incident's steps is passed over, however long ago the run has healed."""
    checkpoints = make()
    save(checkpoints, 50, 100)
    checkpoints.suspect = [(97, 130)]
    assert [m.step for m in checkpoints.targets(200)] == [50]
    assert [m.step for m in checkpoints.targets(200, proven_only=False)] == [100, 50]


@pytest.mark.parametrize("tier", ["local", "shared"])
@pytest.mark.parametrize("name", ["plain.pt", ".metadata", "__0_0.distcp"])
def test_one_flipped_bit_in_any_file_is_found_and_mended(make, tmp_path, tier, name):
    """Whichever file of whichever tier it is in, the state comes from the other one, and both are whole after it."""
    save(make(), 10)
    flip(checkpoint_folder(tmp_path, tier, 10) / name)
    checkpoints = make()
    loaded = checkpoints.load(checkpoints.targets(11)[0])
    assert loaded.tier == ("shared" if tier == "local" else "local")
    assert torch.equal(loaded.snapshot.tensors["model/weight"], torch.ones(64))
    assert whole(tmp_path, "local") == whole(tmp_path, "shared") == {10: []}


def test_one_flipped_bit_anywhere_in_a_manifest_changes_no_decision(make, tmp_path):
    """Wherever it is, the checkpoint is none, or a file does not match, or what is decided by is as it was."""
    save(make(), 10)
    path = checkpoint_folder(tmp_path, "local", 10) / manifest.NAME
    content, wanted = path.read_bytes(), manifest.read(path.parent)
    for place in range(len(content)):
        flip(path, place)
        found = manifest.read(path.parent)
        if found is not None and not manifest.faults(path.parent, found):
            assert (found.step, found.branch, found.finite) == (wanted.step, wanted.branch, wanted.finite)
        path.write_bytes(content)


@pytest.mark.parametrize("name", ["plain.pt", ".metadata", "__0_0.distcp"])
def test_nothing_is_unpickled_before_its_hash_was_checked(make, tmp_path, name):
    """A file that was exchanged in both tiers is refused by its hash, and what it would have run has not run."""
    save(make(), 10)
    marker = tmp_path / "marker"
    for tier in ("local", "shared"):
        (checkpoint_folder(tmp_path, tier, 10) / name).write_bytes(pickle.dumps(Trap(marker)))
    checkpoints = make()
    with pytest.raises(OSError, match="whole in no tier"):
        checkpoints.load(checkpoints.targets(11)[0])
    assert not marker.exists()
    pickle.loads(pickle.dumps(Trap(marker)))  # noqa: S301 - the trap is one
    assert marker.exists()


def test_a_file_without_a_hash_is_never_opened(make, tmp_path):
    """A manifest that does not name what would be unpickled makes no whole checkpoint."""
    save(make(), 10)
    for tier in ("local", "shared"):
        path = checkpoint_folder(tmp_path, tier, 10)
        found = manifest.read(path)
        files = {name: file for name, file in found.files.items() if name != ".metadata"}
        manifest.seal(path, msgspec.structs.replace(found, files=files))
    checkpoints = make()
    with pytest.raises(OSError, match=r"no hash of \.metadata"):
        checkpoints.load(checkpoints.targets(11)[0])


def test_the_manifest_says_what_was_saved_where_and_by_what(make, tmp_path):
    """Step, kind, tier, whether it was proven then, the probe's loss, and who wrote it; with the same files in both."""
    state = snapshot(10)
    probed = replace(state, plain={**state.plain, "probe": {"loss": 2.5}})
    checkpoints = make(proven=9)
    assert checkpoints.save(probed, 10, "scene")
    checkpoints.wait()
    checkpoints.proven_step = 20
    save(checkpoints, 20)
    found = {tier: manifest.read(checkpoint_folder(tmp_path, tier, 10)) for tier in ("local", "shared")}
    for tier, told in found.items():
        assert (told.step, told.kind, told.tier, told.proven, told.probe_loss) == (10, "scene", tier, False, 2.5)
        assert told.writer.startswith("pretraining-guard ")
    assert found["local"].files == found["shared"].files
    later = manifest.read(checkpoint_folder(tmp_path, "shared", 20))
    assert (later.proven, later.probe_loss) == (True, None)


def test_the_newest_snapshot_comes_from_memory(make, tmp_path):
    """What is held in memory is restored from there once both tiers are found whole; an older one from disk."""
    checkpoints = make()
    save(checkpoints, 10, 20)
    newer, older = checkpoints.targets(30)
    loaded = checkpoints.load(newer)
    assert (loaded.tier, loaded.snapshot.plain) == ("memory", {"guard": {"step": 20}})
    assert checkpoints.load(older).tier == "local"
    hurt(tmp_path, "local", 20)
    assert checkpoints.load(newer).tier == "memory"
    assert whole(tmp_path, "local") == {10: [], 20: []}  # Mended all the same: R16 holds for it too.


def test_memory_alone_is_no_target(make, tmp_path):
    """With the newest checkpoint damaged in both tiers its copy in memory is not used (R16)."""
    checkpoints = make()
    save(checkpoints, 10)
    hurt(tmp_path, "local", 10)
    hurt(tmp_path, "shared", 10)
    with pytest.raises(OSError, match="whole in no tier"):
        checkpoints.load(checkpoints.targets(11)[0])


def test_c06_what_comes_from_memory_may_be_changed(make):
    """Whoever takes the plain half up and changes it does not change what the next rollback gets."""
    checkpoints = make()
    save(checkpoints, 10)
    (target,) = checkpoints.targets(11)
    checkpoints.load(target).snapshot.plain["guard"]["step"] = 99
    assert checkpoints.load(target).snapshot.plain == {"guard": {"step": 10}}


def test_a_tier_that_anybody_may_write_is_never_read(make, tmp_path):
    """Not at the start, and not for a checkpoint that the other tier has too: the load is degraded."""
    save(make(), 10)
    (tmp_path / "local" / "tiny").chmod(0o777)
    checkpoints = make()
    (target,) = checkpoints.targets(11)
    loaded = checkpoints.load(target)
    assert (loaded.tier, loaded.degraded) == ("shared", ("local",))


def test_what_cannot_be_read_back_is_whole_in_no_tier(make, tmp_path):
    """A state of other code, hashes and all, is passed over like a damaged one."""
    checkpoints = make()
    save(checkpoints, 10, 20)
    for tier in ("local", "shared"):
        path = checkpoint_folder(tmp_path, tier, 20)
        (path / "plain.pt").write_bytes(b"something else")
        files = {**manifest.read(path).files, "plain.pt": manifest._hash(path / "plain.pt")}
        manifest.seal(path, msgspec.structs.replace(manifest.read(path), files=files))
    again = make()
    newer, older = again.targets(100)
    with pytest.raises(OSError, match="not a state that can be read"):
        again.load(newer)
    assert again.load(older).snapshot.plain == {"guard": {"step": 10}}


def test_the_shared_tier_may_be_written_less_often(make):
    """With `every_shared` at three intervals it has every third checkpoint, what was asked for, and odd steps."""
    checkpoints = make(every=10, every_shared=30, keep_local=10, keep_shared=10)
    save(checkpoints, 10, 20, 30, 33, 40)
    assert checkpoints.save(snapshot(50), 50, everywhere=True)
    checkpoints.wait()
    found = {target.step: checkpoints.tiers(target) for target in checkpoints.targets(100)}
    both = ("local", "shared")
    assert found == {10: ("local",), 20: ("local",), 30: both, 33: both, 40: ("local",), 50: both}


def test_a_rollback_to_what_only_the_local_tier_holds_copies_it_first(make):
    """A target between two intervals of the shared tier is in both before it is loaded (R16)."""
    checkpoints = make(every=10, every_shared=30)
    save(checkpoints, 10)
    (target,) = checkpoints.targets(11)
    assert checkpoints.load(target).degraded == ()
    assert checkpoints.tiers(target) == ("local", "shared")


def test_c19_a_clock_set_back_changes_no_order(tmp_path):
    """Saved at times that run backwards, the newest by number is the newest, and the oldest goes first."""
    times = iter([5000.0, 4000.0, 3000.0, 2000.0, 1000.0])
    options = {"keep_local": 3, "keep_shared": 3}
    checkpoints = open_checkpoints(tmp_path, options=options, clock=lambda: next(times))
    save(checkpoints, 10, 20, 30, 40, 50)
    again = open_checkpoints(tmp_path, options=options)
    assert target_steps(checkpoints) == target_steps(again) == [50, 40, 30]
    assert again.targets(1 << 62)[0].created == 1000.0


def test_c26_a_key_that_comes_later_is_saved_and_loaded(make):
    """A tensor and a plain value that the first saves had not are there after a load, and gone where they are not."""
    checkpoints = make()
    save(checkpoints, 10, 20)
    state = snapshot(30)
    later = Snapshot(
        tensors={**state.tensors, "optimizer/0/weight/max_exp_avg_sq": torch.tensor([7.0])},
        plain={"guard": {"step": 30, "monitor": {"window": [1.0, 2.0]}, "cooldown_until": 99}},
    )
    assert checkpoints.save(later, 30)
    checkpoints.wait()
    save(checkpoints, 40)
    again = make()
    found = {m.step: again.load(m).snapshot for m in again.targets(100)}
    assert found[30].tensors["optimizer/0/weight/max_exp_avg_sq"].item() == 7.0
    assert found[30].plain == later.plain
    assert found[40].tensors.keys() == found[20].tensors.keys() == state.tensors.keys()
