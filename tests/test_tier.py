"""One tier: a folder that is the training user's own, in which a failed write leaves nothing."""

import hashlib
import os
import pickle
import resource
import shutil
import subprocess
from contextlib import contextmanager
from functools import partial

import msgspec
import pytest
import torch
from tiers import Trap, flip
from training import snapshot

from trainer_plugin.checkpoints import manifest
from trainer_plugin.checkpoints.manifest import File, Manifest
from trainer_plugin.checkpoints.retention import SaveEvery
from trainer_plugin.checkpoints.snapshot import Snapshot
from trainer_plugin.checkpoints.tier import Tier

LARGE = Snapshot(tensors={"model/weight": torch.ones(100_000)}, plain={"guard": {"step": 20}})


def draft(step: int) -> Manifest:
    """What is known of a checkpoint before it is written."""
    return Manifest(
        run="tiny", step=step, branch=0, kind="periodic", finite=True, created=1.0, files={}, torch="2.13"
    )  # fmt: skip


@pytest.fixture
def tier(tmp_path):
    """An open tier with step 10 in it."""
    tier = Tier("local", tmp_path / "checkpoints" / "tiny", SaveEvery(every=10, keep=3))
    tier.open()
    tier.write(snapshot(10), draft(10))
    return tier


def anew(tier: Tier) -> Tier:
    """The tier as the next job finds it."""
    again = Tier(tier.name, tier.folder, tier.retention)
    again.open()
    return again


@contextmanager
def files_of_at_most(size_bytes: int):
    """The kernel lets no file of this process grow beyond a size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_takes_no_more_is_told_as_such(tier):
    """A write that the kernel cuts short is that error, nothing of it stays, and what was there is whole."""
    with files_of_at_most(50_000), pytest.raises(OSError, match="File too large"):
        tier.write(LARGE, draft(20))
    assert [path.name for path in tier.folder.iterdir()] == [draft(10).name]
    assert tier.whole.keys() == {draft(10).name}
    assert tier.faults(draft(10).name) == []


def test_a_copy_that_the_disk_cuts_short_leaves_nothing(tier, tmp_path):
    """The same for a copy from the other tier."""
    other = Tier("shared", tmp_path / "shared" / "tiny", SaveEvery(every=10, keep=3))
    other.open()
    tier.write(LARGE, draft(20))
    with files_of_at_most(50_000), pytest.raises(OSError, match="File too large"):
        other.take(tier, draft(20).name)
    assert list(other.folder.iterdir()) == []
    assert other.take(tier, draft(20).name).tier == "shared"
    assert other.faults(draft(20).name) == []


@pytest.mark.live
def test_a_full_file_system_costs_its_own_copy_only(tmp_path):
    """On a real file system of 300 KiB the second checkpoint does not fit, and the first one stays whole."""
    small = tmp_path / "small"
    small.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", small]
    if subprocess.run(mounting, check=False, capture_output=True).returncode:
        pytest.skip("no right to mount a file system here")
    try:
        tier = Tier("shared", small / "tiny", SaveEvery(every=10, keep=3))
        tier.open()
        tier.write(snapshot(10), draft(10))
        with pytest.raises(OSError, match="No space left on device"):
            tier.write(LARGE, draft(20))
        assert [path.name for path in tier.folder.iterdir()] == [draft(10).name]
        assert anew(tier).faults(draft(10).name) == []
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_tier_that_has_gone_away_is_not_made_anew(tier, tmp_path):
    """A folder that was there and is not is an unmounted file system: nothing is written beneath its mount point."""
    other = Tier("shared", tmp_path / "shared" / "tiny", SaveEvery(every=10, keep=3))
    other.open()
    other.write(snapshot(20), draft(20))
    tier.folder.rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError):
        tier.write(snapshot(20), draft(20))
    with pytest.raises(FileNotFoundError):
        tier.take(other, draft(20).name)
    assert not tier.folder.exists()
    (tmp_path / "away").rename(tier.folder)
    tier.write(snapshot(20), draft(20))
    assert anew(tier).whole.keys() == {draft(10).name, draft(20).name}


def test_a_tier_that_could_not_be_made_at_the_start_is_made_later(tmp_path):
    """A file system that comes only after the job gets the checkpoints from then on."""
    (tmp_path / "checkpoints").touch()
    tier = Tier("shared", tmp_path / "checkpoints" / "tiny", SaveEvery(every=10, keep=3))
    with pytest.raises(OSError, match=r"checkpoints\.shared: folder .* cannot be written"):
        tier.open()
    (tmp_path / "checkpoints").unlink()
    tier.write(snapshot(10), draft(10))
    assert anew(tier).faults(draft(10).name) == []


def test_a_folder_that_anybody_may_write_is_refused(tier):
    """Whoever may write there could have a restore run code: nothing in it is read, and the line says what to do."""
    tier.folder.chmod(0o777)
    again = Tier("local", tier.folder, tier.retention)
    with pytest.raises(PermissionError, match=r"checkpoints\.local: anybody may write in .*chmod o-w"):
        again.open()
    assert again.whole == {}
    tier.folder.chmod(0o700)
    assert anew(tier).whole.keys() == {draft(10).name}


def test_a_folder_above_that_anybody_may_write_is_warned_of(tier, caplog):
    """There the run's folder can be exchanged as a whole; a sticky bit, as on /tmp, forbids that."""
    tier.folder.parent.chmod(0o777)
    anew(tier)
    assert "anybody may replace the folders in" in caplog.text
    caplog.clear()
    tier.folder.parent.chmod(0o1777)
    anew(tier)
    assert caplog.text == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away, and take another user's place")
def test_a_folder_of_somebody_else_is_refused(tier):
    """Where others may make folders, one that was there before the job is not the job's; root takes any."""
    os.chown(tier.folder, 12345, -1)
    anew(tier)
    again = Tier("local", tier.folder, tier.retention)
    readable = [path for path in (tier.folder, *tier.folder.parents) if not path.stat().st_mode & 0o001]
    modes = {path: path.stat().st_mode for path in readable}
    try:
        for path in readable:
            path.chmod(modes[path] | 0o055)
        os.seteuid(54321)
        with pytest.raises(PermissionError, match="belongs to user 12345"):
            again.open()
    finally:
        os.seteuid(0)
        for path, mode in modes.items():
            path.chmod(mode)
    assert again.whole == {}


def test_what_is_refused_is_not_read_later_either(tier):
    """A folder that anybody may write is neither checked nor opened, copied to or written, until the right is gone."""
    tier.folder.chmod(0o777)
    again = Tier("local", tier.folder, tier.retention)
    with pytest.raises(PermissionError):
        again.open()
    name = draft(10).name
    for access in (again.faults, again.read, partial(again.take, tier), lambda _: again.write(snapshot(20), draft(20))):
        with pytest.raises(OSError, match="anybody may write"):
            access(name)
    tier.folder.chmod(0o700)
    assert again.faults(name) == []


def test_another_runs_checkpoint_is_left_alone(tier, caplog):
    """Copied here by hand it is neither listed nor whole nor removed, and one line says whose it is not."""
    other = tier.folder.with_name("other")
    shutil.copytree(tier.folder, other)
    found = Tier("local", other, tier.retention)
    found.open()
    assert found.whole == {}
    assert found.left_alone == [f"{other / draft(10).name}: left alone: another run's checkpoint"]
    assert caplog.messages == found.left_alone
    assert found.faults(draft(10).name) == [f"{other / draft(10).name}: no checkpoint there"]
    found.rotate(set())
    assert manifest.read(other / draft(10).name) is not None


def test_a_link_in_a_tier_is_read_and_rotated_as_one(tier, tmp_path):
    """A checkpoint that is linked in is found; rotated away, its archive is as it was, and nothing has failed."""
    archive = tmp_path / "archive"
    (tier.folder / draft(10).name).rename(archive)
    (tier.folder / draft(10).name).symlink_to(archive)
    again = anew(tier)
    assert again.faults(draft(10).name) == []
    again.rotate(set())
    assert list(tier.folder.iterdir()) == []
    assert {path.name for path in archive.iterdir()} == {"plain.pt", ".metadata", "__0_0.distcp", manifest.NAME}


def test_what_is_no_state_is_an_error_of_the_disk(tier, tmp_path):
    """A pickle that somebody planted with a manifest to fit runs no code, and the read fails in one line."""
    folder, marker = tier.folder / draft(10).name, tmp_path / "marker"
    (folder / "plain.pt").write_bytes(pickle.dumps(Trap(marker), protocol=2))
    found = manifest.read(folder)
    content = (folder / "plain.pt").read_bytes()
    entry = File(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    manifest.seal(folder, msgspec.structs.replace(found, files={**found.files, "plain.pt": entry}))
    assert tier.faults(found.name) == []
    with pytest.raises(OSError, match="not a state that can be read: UnpicklingError") as caught:
        tier.read(found.name)
    assert "\n" not in str(caught.value)
    assert not marker.exists()


def test_another_schema_is_left_alone_and_its_writer_told(tier, caplog):
    """A checkpoint of a later version is neither read nor removed, and one line says what wrote it."""
    path = tier.folder / draft(10).name / manifest.NAME
    told = msgspec.json.decode(path.read_bytes())
    path.write_bytes(
        msgspec.json.encode({**told, "schema": 7, "writer": "pretraining-guard 9.1", "files": "elsewhere"})
    )
    assert anew(tier).whole == {}
    assert "schema 7, written by pretraining-guard 9.1; this reads 1" in caplog.text
    assert path.exists()


def test_a_damaged_manifest_is_left_alone_and_told(tier, caplog):
    """A manifest that cannot be decoded is no leftover of a killed job: people may want to look at it."""
    path = tier.folder / draft(10).name / manifest.NAME
    flip(path, 0)
    assert anew(tier).whole == {}
    assert "its manifest is damaged" in caplog.text
    assert path.exists()


def test_hashes_are_those_of_the_files(tier):
    """What was hashed while it was written is what lies on the disk."""
    found = tier.whole[draft(10).name]
    assert found.files.keys() == {"plain.pt", ".metadata", "__0_0.distcp"}
    assert manifest.faults(tier.folder / found.name, found) == []
    assert found.total_bytes == sum((tier.folder / found.name / name).stat().st_size for name in found.files)
