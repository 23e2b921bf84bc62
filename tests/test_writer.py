"""The background writer: what was taken is written, and a tier that fails, hangs or comes back stops nothing."""

import errno
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
from tiers import FaultyTier, checkpoint_folder, open_checkpoints, save, target_steps, whole
from training import snapshot
from waiting import wait_for

from trainer_plugin.checkpoints.snapshot import Snapshot
from trainer_plugin.checkpoints.tier import Tier

TIERS = ("local", "shared")


def fail(number: int) -> None:
    """Raise what the kernel says."""
    raise OSError(number, os.strerror(number))


@pytest.fixture
def failures():
    """The tiers whose failures were counted."""
    return []


def with_one_saved(folder, failures, **arguments):
    """Checkpoints in tiers that fail when told to, with step 10 in both."""
    options = {"keep_local": 3, "keep_shared": 3}
    checkpoints = open_checkpoints(folder, failures, options=options, make_tier=FaultyTier, **arguments)
    save(checkpoints, 10)
    return checkpoints


@pytest.fixture
def checkpoints(tmp_path, failures):
    """Checkpoints that wait for a slow tier."""
    return with_one_saved(tmp_path, failures)


@pytest.fixture
def impatient(tmp_path, failures):
    """Checkpoints for which a tier hangs that does not answer within a second."""
    return with_one_saved(tmp_path, failures, hang_seconds=1.0)


@pytest.fixture
def hang():
    """A fault that waits until the end of the test, or until it is set."""
    end = threading.Event()
    yield end
    end.set()


def tier_of(checkpoints, name: str) -> FaultyTier:
    """One of the two tiers."""
    return {"local": checkpoints._local, "shared": checkpoints._shared}[name]


def test_c03_what_is_written_is_the_state_of_its_step(tmp_path):
    """A weight of 1.0 that is set to 2.0 right after the save, and a writer that comes late, give 1.0."""
    checkpoints = open_checkpoints(tmp_path, make_tier=FaultyTier)
    late = threading.Event()
    tier_of(checkpoints, "local").fault = late.wait
    live = Snapshot(tensors={"model/weight": torch.ones(64)}, plain={"guard": {"step": 10}})
    assert checkpoints.save(live, 10)
    live.tensors["model/weight"].fill_(2.0)
    late.set()
    assert checkpoints.wait(8.0)
    again = open_checkpoints(tmp_path)
    for _ in range(2):
        assert torch.equal(again.load(again.targets(11)[0]).snapshot.tensors["model/weight"], torch.ones(64))


def test_a_save_during_a_save_is_left_out(checkpoints, hang):
    """While the only snapshot in memory is being written another is refused; nothing waits."""
    tier_of(checkpoints, "local").fault = hang.wait
    assert checkpoints.save(snapshot(20), 20)
    assert not checkpoints.save(snapshot(21), 21)
    assert not checkpoints.wait(0.0)
    assert checkpoints.writes_to == "local"
    hang.set()
    assert checkpoints.wait(8.0)
    assert target_steps(checkpoints) == [20, 10]


def test_with_more_memory_saves_wait_their_turn(tmp_path):
    """Three snapshots in memory are written one after the other, in the order in which they were taken."""
    checkpoints = open_checkpoints(tmp_path, options={"keep_memory": 3, "keep_local": 9}, make_tier=FaultyTier)
    late = threading.Event()
    tier_of(checkpoints, "local").fault = late.wait
    assert [checkpoints.save(snapshot(step), step) for step in (10, 20, 30, 40)] == [True, True, True, False]
    late.set()
    assert checkpoints.wait(8.0)
    assert list(checkpoints._local.whole) == ["step-000000010-000", "step-000000020-000", "step-000000030-000"]
    assert [checkpoints.load(target).tier for target in checkpoints.targets(100)] == ["memory"] * 3


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.ESTALE])
@pytest.mark.parametrize("name", TIERS)
def test_a_tier_that_fails_costs_its_own_copies_only(checkpoints, failures, tmp_path, name, number):
    """Full, read-only, forbidden, over quota or stale: counted for that tier, the other goes on, nothing is lost."""
    tier = tier_of(checkpoints, name)
    tier.fault = partial(fail, number)
    save(checkpoints, 20, 30)
    assert failures == [name, name]
    other = "shared" if name == "local" else "local"
    assert whole(tmp_path, other) == {10: [], 20: [], 30: []}
    assert whole(tmp_path, name) == {10: []}
    loaded = checkpoints.load(checkpoints.targets(100)[0])
    assert (loaded.manifest.step, loaded.degraded) == (30, (name,))
    tier.fault = lambda: None
    save(checkpoints, 40)
    assert failures == [name, name]
    assert whole(tmp_path, name) == {10: [], 40: []}


def test_a_save_that_fails_in_both_tiers_deletes_nothing(checkpoints, failures, tmp_path):
    """With both disks full every failure is counted and what was there stays, proven or not."""
    for name in TIERS:
        tier_of(checkpoints, name).fault = partial(fail, errno.ENOSPC)
    save(checkpoints, 20, 30, 40, 50)
    assert failures == ["local", "shared"] * 4
    for name in TIERS:
        assert whole(tmp_path, name) == {10: []}
    assert target_steps(checkpoints) == [10]


@pytest.mark.parametrize("name", TIERS)
def test_a_tier_that_hangs_is_left_behind(impatient, failures, hang, name):
    """It is counted once its time is up; the other tier has its copy, and a rollback does not wait for ever."""
    checkpoints = impatient
    tier_of(checkpoints, name).fault = hang.wait
    save(checkpoints, 20)
    assert failures == [name]
    (target, _) = checkpoints.targets(100)
    assert checkpoints.tiers(target) == ("shared" if name == "local" else "local",)
    assert checkpoints.load(target).degraded == (name,)


def test_a_shared_tier_that_hangs_holds_no_memory(impatient, failures, hang, tmp_path):
    """The copy is made from the local tier, so the next snapshots find memory and the local tier goes on."""
    tier_of(impatient, "shared").fault = hang.wait
    save(impatient, 20, 30)
    assert failures == ["shared"] * 2
    assert whole(tmp_path, "local") == {10: [], 20: [], 30: []}


def test_memory_that_a_hung_tier_reads_is_never_overwritten(impatient, failures, hang, tmp_path):
    """Saves are left out while the local tier hangs on the only snapshot; when it comes back it writes that one."""
    checkpoints = impatient
    tier_of(checkpoints, "local").fault = hang.wait
    save(checkpoints, 20)
    assert failures == ["local"]
    assert not checkpoints.save(snapshot(30, weight=3.0), 30)
    assert whole(tmp_path, "shared") == {10: [], 20: []}
    hang.set()
    wait_for(lambda: 20 in whole(tmp_path, "local"))
    wait_for(lambda: checkpoints.save(snapshot(40), 40))
    assert checkpoints.wait(8.0)
    assert whole(tmp_path, "local") == {10: [], 20: [], 40: []}
    read = checkpoints._local.read("step-000000020-000")
    assert torch.equal(read.tensors["model/weight"], torch.ones(64))


def test_the_shared_folder_may_go_and_come_back(tmp_path, failures):
    """Away, it is counted and the local tier goes on; back, the next checkpoint is in it beside the old ones."""
    checkpoints = open_checkpoints(tmp_path, failures, options={"keep_local": 9, "keep_shared": 9})
    save(checkpoints, 10)
    (tmp_path / "shared").rename(tmp_path / "away")
    save(checkpoints, 20)
    assert failures == ["shared"]
    assert not (tmp_path / "shared").exists()
    (tmp_path / "away").rename(tmp_path / "shared")
    save(checkpoints, 30)
    assert failures == ["shared"]
    assert whole(tmp_path, "shared") == {10: [], 30: []}
    assert checkpoints.load(checkpoints.targets(25)[0]).degraded == ()
    assert whole(tmp_path, "shared") == {10: [], 20: [], 30: []}


def test_c20_the_last_durable_step_is_the_previous_one_until_the_next_is_whole(checkpoints, hang, tmp_path):
    """While a writer stands, what is told and what a next job finds is the checkpoint before, whole."""
    tier_of(checkpoints, "local").fault = hang.wait
    assert checkpoints.save(snapshot(20), 20)
    assert [checkpoints.newest_step(name) for name in TIERS] == [10, 10]
    again = open_checkpoints(tmp_path)
    assert target_steps(again) == [10]
    assert again.load(again.targets(100)[0]).snapshot.plain == {"guard": {"step": 10}}
    hang.set()
    assert checkpoints.wait(8.0)
    assert [checkpoints.newest_step(name) for name in TIERS] == [20, 20]


class Halting(dict):
    """Tensors at which a writer stops until it is let go."""

    def __init__(self, tensors, end) -> None:
        super().__init__(tensors)
        self.end = end

    def items(self):
        """Wait."""
        self.end.wait()
        return super().items()


class HaltingTier(Tier):
    """A tier that stops in the middle of each checkpoint, its first file written, once it has an `end` to wait for."""

    end: threading.Event | None = None

    def write(self, snapshot, draft):
        """Write, as far as that goes."""
        halted = snapshot if self.end is None else replace(snapshot, tensors=Halting(snapshot.tensors, self.end))
        return super().write(halted, draft)


def half_saved(folder):
    """Checkpoints of which one each is kept: step 10 in both tiers, step 20 half in the local one."""
    checkpoints = open_checkpoints(folder, options={"keep_local": 1, "keep_shared": 1}, make_tier=HaltingTier)
    save(checkpoints, 10)
    checkpoints._local.end = threading.Event()
    assert checkpoints.save(snapshot(20), 20)
    wait_for((checkpoint_folder(folder, "local", 20) / "plain.pt").exists)
    return checkpoints


def test_c20_half_a_checkpoint_is_not_told_and_costs_no_other(tmp_path):
    """In the middle of a write the newest is the one before, which is there although one is all that is kept."""
    checkpoints = half_saved(tmp_path)
    assert [checkpoints.newest_step(name) for name in TIERS] == [10, 10]
    assert target_steps(checkpoints) == [10]
    assert checkpoint_folder(tmp_path, "local", 10).exists()
    checkpoints._local.end.set()
    assert checkpoints.wait(8.0)
    assert [checkpoints.newest_step(name) for name in TIERS] == [20, 20]
    assert whole(tmp_path, "local") == whole(tmp_path, "shared") == {20: []}


def test_c20_killed_in_the_middle_of_a_write_the_one_before_is_loaded(tmp_path):
    """After kill -9 the newest is the previous checkpoint, whole in both tiers, and the half one is gone."""

    def job():
        half_saved(tmp_path)
        (tmp_path / "half").touch()
        threading.Event().wait()

    process = multiprocessing.get_context("fork").Process(target=job, daemon=True)
    process.start()
    try:
        wait_for((tmp_path / "half").exists)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    again = open_checkpoints(tmp_path)
    assert target_steps(again) == [10]
    assert again.load(again.targets(100)[0]).snapshot.plain == {"guard": {"step": 10}}
    assert whole(tmp_path, "local") == whole(tmp_path, "shared") == {10: []}


def with_fault(name, fault):
    """A function that makes tiers, of which one has a fault from the beginning."""

    def make_tier(*arguments):
        tier = FaultyTier(*arguments)
        if tier.name == name:
            tier.fault = fault
        return tier

    return make_tier


@pytest.mark.parametrize("name", TIERS)
def test_a_tier_that_hangs_at_the_start_is_left_behind(tmp_path, hang, name):
    """The job goes on with the other one once its time is up, and takes it in when it answers."""
    save(open_checkpoints(tmp_path), 10)
    checkpoints = open_checkpoints(tmp_path, make_tier=with_fault(name, hang.wait), hang_seconds=0.5)
    (target,) = checkpoints.targets(100)
    assert checkpoints.tiers(target) == ("shared" if name == "local" else "local",)
    assert checkpoints.load(target).degraded == (name,)
    hang.set()
    wait_for(lambda: checkpoints.tiers(target) == TIERS)
    save(checkpoints, 20)
    assert whole(tmp_path, name) == {10: [], 20: []}


@pytest.mark.parametrize("name", TIERS)
def test_a_start_that_hangs_with_nothing_elsewhere_is_an_error(tmp_path, hang, name):
    """Where the other tier holds nothing the start fails in a line with the folder: nothing is begun anew beside it."""
    save(open_checkpoints(tmp_path), 10)
    shutil.rmtree(tmp_path / ("shared" if name == "local" else "local"))
    with pytest.raises(TimeoutError, match=rf"checkpoints\.{name}: folder .*{name}/tiny: no answer within"):
        open_checkpoints(tmp_path, make_tier=with_fault(name, hang.wait), hang_seconds=0.5)


def test_a_state_that_cannot_be_written_is_counted_and_leaves_nothing(checkpoints, failures, tmp_path):
    """A snapshot with what is no plain value fails in both tiers, and its half-made folders are gone."""
    assert checkpoints.save(Snapshot(tensors={}, plain={"odd": object()}), 20)
    assert checkpoints.wait(8.0)
    assert failures == ["local", "shared"]
    assert [len(list((tmp_path / name / "tiny").iterdir())) for name in TIERS] == [1, 1]


def test_an_interrupt_while_the_writer_starts_loses_nothing(tmp_path):
    """Ctrl-C inside `save`: the write that has begun ends, is waited for, and the next one is taken."""

    def interrupt(frame, _event, _value) -> None:
        if frame.f_code is threading.Event.wait.__code__:  # Where a starting thread is waited for.
            sys.settrace(None)
            raise KeyboardInterrupt

    checkpoints = open_checkpoints(tmp_path)
    before = sys.gettrace()
    try:
        sys.settrace(interrupt)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(snapshot(10), 10)
    finally:
        sys.settrace(before)
    assert checkpoints.wait(8.0)
    save(checkpoints, 20)
    assert target_steps(checkpoints) == [20, 10]


def resident_bytes() -> int:
    """How much memory of this process is in use now."""
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - no file but a question
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("keep_memory", [1, 2])
def test_c28_memory_is_bounded_and_no_file_is_mixed(tmp_path, keep_memory):
    """A snapshot at each of 50 steps under a writer that comes late: at most `keep_memory` + 1 states of memory more.

    What finds no memory is left out; each state on disk has one step's values only.
    """
    options = {"keep_memory": keep_memory, "keep_local": 99, "keep_shared": 99}
    checkpoints = open_checkpoints(tmp_path, options=options, make_tier=FaultyTier)
    late = threading.Event()
    tier_of(checkpoints, "local").fault = late.wait
    weight = torch.zeros(4, 1_000_000)
    state = Snapshot(tensors={f"model/{number}": weight[number] for number in range(4)}, plain={"guard": {}})
    before, most, left_out = resident_bytes(), 0, 0
    for step in range(1, 51):
        weight.fill_(step)
        if step == 46:
            late.set()
            checkpoints.wait()
        left_out += not checkpoints.save(state, step)
        most = max(most, resident_bytes())
    assert checkpoints.wait(30.0)
    most = max(most, resident_bytes())
    assert left_out >= 45 - keep_memory
    assert most - before <= (keep_memory + 1) * weight.nbytes
    again = open_checkpoints(tmp_path, options=options)
    found = again.targets(100)
    assert len(found) == 50 - left_out
    for target in found:
        values = torch.cat(list(again.load(target).snapshot.tensors.values()))
        assert values.unique().tolist() == [target.step]
