"""Disks that fail under a whole guard, full, read-only, gone, forbidden or hung; and a kill at every file operation.

Training goes on, the tier's failures are counted, `TrainCheckpointStale` has what it fires on, nothing good is deleted,
and the tier is taken up again.
"""

import ctypes
import multiprocessing
import os
import shutil
import signal
import subprocess
from contextlib import contextmanager, suppress

import pytest
from last_operation import be_killed_at
from tiers import open_checkpoints, save, whole
from training import adamw_job, spoil_weights

from trainer_plugin.checkpoints import manifest

TIERS = ("local", "shared")
MOUNTED = ("full", "read-only")


def done(*command) -> bool:
    """Whether a command of the system could be run."""
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


@contextmanager
def hung(folder):
    """A file system over the folder that answers nothing, as a FUSE daemon that was stopped."""
    descriptor = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={descriptor},rootmode=40000,user_id=0,group_id=0"
    assert ctypes.CDLL(None).mount(b"stopped", bytes(folder), b"fuse", 0, options.encode()) == 0
    try:
        yield
    finally:
        os.close(descriptor)  # Who waits is answered with an error.
        assert done("umount", "-l", folder)


@contextmanager
def full(folder):
    """Not a block is left."""
    with suppress(OSError), (folder / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    try:
        yield
    finally:
        (folder / "filler").unlink()


@contextmanager
def read_only(folder):
    """As the kernel makes it after errors."""
    assert done("mount", "-o", "remount,ro", folder)
    try:
        yield
    finally:
        assert done("mount", "-o", "remount,rw", folder)


@contextmanager
def gone(folder):
    """Unmounted: neither the folder nor the one above it is there."""
    folder.parent.rename(folder.parent.with_name("away"))
    try:
        yield
    finally:
        folder.parent.with_name("away").rename(folder.parent)


@contextmanager
def forbidden(folder):
    """Not even root may write there."""
    assert done("chattr", "+i", folder)
    try:
        yield
    finally:
        assert done("chattr", "-i", folder)


FAULTS = {"full": full, "read-only": read_only, "gone": gone, "forbidden": forbidden, "hung": hung}


def possible(kind, folder) -> bool:
    """Whether this fault can be made here."""
    if kind == "forbidden":
        return done("chattr", "+i", folder) and done("chattr", "-i", folder)
    if kind in MOUNTED:
        return done("mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", folder)
    return kind == "gone" or (os.geteuid() == 0 and os.path.exists("/dev/fuse"))  # noqa: PTH110 - a device


def stale(page, tier) -> bool:
    """What TrainCheckpointStale asks."""
    behind = page.value("train_step") - page.value("train_checkpoint_step", tier, "periodic")
    return behind > 2.5 * page.value("train_threshold", "checkpoint_every_steps")


@pytest.mark.live
@pytest.mark.timeout(120)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("kind", FAULTS)
def test_a_disk_out_of_order_costs_its_own_copies_only(make_guard, tmp_path, kind, tier):
    """From step 15 to 45 a tier's disk fails as real ones do; what was whole before is so after it."""
    folder = tmp_path / tier / "tiny"
    folder.mkdir(parents=True, mode=0o700)
    if not possible(kind, folder):
        pytest.skip("no right to do this to a file system here")
    try:
        job = make_guard(checkpoints={"keep_local": 9, "keep_shared": 9})
        page, other = job.guard.page, TIERS[tier == "local"]
        job.run(15)
        with FAULTS[kind](folder):
            job.disk_seconds = 0.1 if kind == "hung" else None
            job.run(45)
            assert job.guard.step == 45
            assert page.value("train_checkpoint_failures_total", tier) >= 1
            assert stale(page, tier)
            if kind != "hung":  # There the other tier's next copy comes once the time of this one is up.
                assert page.value("train_checkpoint_step", other, "periodic") == 40
                assert page.value("train_checkpoint_failures_total", other) == 0
        job.guard._parts.checkpoints.wait()
        job.disk_seconds = None
        job.run(75)
        assert page.value("train_guard_errors_total") == 0
        assert not stale(page, tier)
        found = whole(tmp_path, tier)
        assert {10, 50, 60, 70} <= set(found)
        assert not any(found.values())
        spoil_weights(job.model)
        job.step()
        assert job.guard.step == 70
    finally:
        if kind in MOUNTED:
            assert done("umount", "-l", folder)


def test_a_clock_set_back_changes_nothing(make_guard, clock):
    """By a day, twice in a run: checkpoints, rollback and restart go by steps, and none is judged by its age."""
    clock.now = 1e9
    job = make_guard(clock=clock)
    job.run(25)
    clock.now -= 86_400.0
    job.run(45)
    spoil_weights(job.model)
    job.step()
    assert job.guard.step == 40
    clock.now -= 86_400.0
    while job.guard._parts.policy.open_incident is not None or job.guard.step % 10:
        job.step()
        assert job.guard.step < 200
    job.run(job.guard.step + 10)
    job.guard.close()
    again = make_guard(adamw_job(seed=4), clock=clock)
    assert again.guard.step == job.guard.step
    assert again.guard.page.value("train_guard_errors_total") == 0


def one_life(folder, end: int) -> None:
    """Find, mend, save and rotate checkpoints, and be killed at the file operation with this number."""
    be_killed_at(folder, end)
    checkpoints = open_checkpoints(folder, options={"keep_local": 1, "keep_shared": 1}, proven=1 << 62)
    checkpoints.load(checkpoints.targets(1 << 62)[0])
    save(checkpoints, 30, 40)


@pytest.mark.live
@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_c01_killed_at_each_file_operation_there_is_a_whole_checkpoint(tmp_path):
    """Whichever of a hundred file operations of a start, a mending, two saves and two rotations is the last one.

    Each checkpoint that is listed afterwards is whole, the newest is no older than before, and no half one is left.
    """
    save(open_checkpoints(tmp_path / "first"), 10, 20)
    shutil.rmtree(tmp_path / "first" / "shared" / "tiny" / "step-000000020-000")
    (tmp_path / "first" / "local" / "tiny" / "step-000000025-000").mkdir()
    newest, end, ended = 0, 0, False
    while not ended:
        end += 1
        folder = tmp_path / str(end)
        shutil.copytree(tmp_path / "first", folder)
        life = multiprocessing.get_context("fork").Process(target=one_life, args=(folder, end), daemon=True)
        life.start()
        life.join()
        assert life.exitcode in (0, -signal.SIGKILL)
        ended = life.exitcode == 0
        sealed = [path.parent for path in folder.rglob(manifest.NAME)]
        assert not any(manifest.faults(path, manifest.read(path)) for path in sealed)
        again = open_checkpoints(folder)
        for tier in TIERS:
            assert not any(whole(folder, tier).values())
        target = again.targets(1 << 62)[0]
        assert again.load(target).snapshot.plain["guard"]["step"] == target.step >= max(20, newest)
        newest = target.step
        shutil.rmtree(folder)
    assert newest == 40
    print(end - 1, "file operations")  # Shown with -s.
    assert end > 60
