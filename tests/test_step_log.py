"""The flight recorder on disk: lines that survive a kill, never more than so many."""

import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading

import pytest
import torch
from curves import signals

from trainer_plugin.detection.detectors import DetectionConfig
from trainer_plugin.detection.monitor import Monitor
from trainer_plugin.scenes.recorder import Start
from trainer_plugin.scenes.step_line import NAMES, read_steps
from trainer_plugin.scenes.step_log import StepLog


class Disk:
    """Work that was handed over, done when it is asked for."""

    def __init__(self):
        self.jobs = []

    def turn(self):
        """Do what waits."""
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            job()


def filled(folder, steps, *, keep=10, each=1, loss=2.0, first=1, start=None, branch=0):
    """A log of so many steps, flushed after every `each` of them."""
    disk, monitor = Disk(), Monitor(DetectionConfig())
    log = StepLog(folder, steps=keep, write=disk.jobs.append)
    for step in range(first, first + steps):
        seen = signals(step, loss)
        readings, verdicts = monitor.update(seen)
        log.add(seen, readings, verdicts, start or Start(), steps_total=step, branch=branch, now=1e9, lr_factor=0.5)
        if step % each == 0:
            disk.turn()
            disk = Disk()
            log._write = disk.jobs.append
    disk.turn()
    return log


def test_the_last_steps_are_there_and_the_disk_is_bounded(tmp_path):
    """At least so many and at most twice as many, in order, the newest last."""
    filled(tmp_path, 1000, keep=10)
    steps = [line.step for line in read_steps(tmp_path)]
    assert steps == list(range(1001 - len(steps), 1001))
    assert 10 <= len(steps) <= 20


@pytest.mark.parametrize("each", [1, 7, 1000])
def test_nothing_is_lost_however_rarely_the_disk_has_its_turn(tmp_path, each):
    """A thread that comes late writes what has waited, but for what would be rotated away at once."""
    filled(tmp_path, 35, keep=40, each=each)
    assert [line.step for line in read_steps(tmp_path)] == list(range(1, 36))


def test_a_hung_disk_keeps_no_more_than_the_newest_in_memory(tmp_path):
    """While nothing is written, old steps make room for new ones, and one piece of work waits."""
    disk, monitor = Disk(), Monitor(DetectionConfig())
    log = StepLog(tmp_path, steps=10, write=disk.jobs.append)
    for step in range(1, 1001):
        seen = signals(step, 2.0)
        log.add(seen, *monitor.update(seen), Start(), steps_total=step, branch=0, now=0.0, lr_factor=1.0)
    assert len(disk.jobs) == 1
    disk.turn()
    assert [line.step for line in read_steps(tmp_path)] == list(range(991, 1001))


def test_a_restart_goes_on_behind_what_is_there(tmp_path):
    """Also behind a line that a killed job left half, which is left out and spoils no other."""
    filled(tmp_path, 5, keep=10)
    with (tmp_path / NAMES[0]).open("ab") as file:
        file.write(b'{"step":6,"steps_to')
    filled(tmp_path, 3, keep=10, first=6)
    assert [line.step for line in read_steps(tmp_path)] == list(range(1, 9))


def test_a_damaged_line_is_left_out(tmp_path):
    """Bytes that are no line cost only themselves; so does a line of another schema."""
    filled(tmp_path, 5, keep=10)
    path = tmp_path / NAMES[0]
    lines = path.read_bytes().splitlines()
    lines[2] = b"\0" * 40
    lines[3] = lines[3].replace(b'"step":4', b'"step":4,"schema":9')
    path.write_bytes(b"\n".join(lines) + b"\n")
    assert [line.step for line in read_steps(tmp_path)] == [1, 2, 5]


def test_a_line_is_json_and_tells_what_was_not_finite(tmp_path):
    """NaN is null in JSON; its name and value are told beside."""
    filled(tmp_path, 1, loss=math.nan)
    line = json.loads((tmp_path / NAMES[0]).read_text())
    assert line["loss"] is None
    assert line["nonfinite"] == ["loss=nan"]
    assert line["verdicts"] == ["nonfinite loss"]
    assert line["lr_factor"] == 0.5


def test_the_random_state_has_a_mark(tmp_path):
    """The same for the same state, another for another."""
    marks = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        folder = tmp_path / str(len(marks))
        folder.mkdir()
        filled(folder, 1, start=Start(rng=[{"torch": torch.get_rng_state()}]))
        marks.append(read_steps(folder)[0].rng)
    assert marks[0] == marks[1] != marks[2]
    assert marks[0] is not None


def test_none_is_kept_where_none_is_wanted(tmp_path):
    """`recorder_steps: 0` writes nothing."""
    filled(tmp_path, 5, keep=0)
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_writes_on_takes_nothing_away_in_between(tmp_path):
    """Read a thousand times while the files begin anew every 400 steps: what is there follows without a gap."""
    writing = threading.Thread(target=filled, args=(tmp_path, 20_000), kwargs={"keep": 400})
    writing.start()
    reads = 0
    while writing.is_alive() or not reads:
        steps = [line.step for line in read_steps(tmp_path)]
        assert steps == list(range(steps[0], steps[-1] + 1)) if steps else True
        reads += 1
    writing.join()
    assert reads >= 10


_JOB = """
import sys
import threading
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from test_step_log import filled
print("ready", flush=True)
filled(Path(sys.argv[1]), 10**9, keep=50)
"""


@pytest.mark.parametrize("wait_lines", [1, 60, 200])
def test_a_kill_at_any_moment_leaves_it_readable(tmp_path, wait_lines):
    """After SIGKILL the steps that are there follow each other, and are no fewer than were seen before."""
    process = subprocess.Popen(
        [sys.executable, "-c", _JOB, str(tmp_path), *sys.path], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        seen = []
        while not seen or seen[-1] < wait_lines:
            seen = [line.step for line in read_steps(tmp_path)]
            assert process.poll() is None
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    steps = [line.step for line in read_steps(tmp_path)]
    assert steps == list(range(steps[0], steps[-1] + 1))
    assert steps[-1] >= seen[-1]
    assert len(steps) <= 100


def seen_steps(log, first, last, **changes) -> None:
    """Hand steps over, all of them alike."""
    monitor = Monitor(DetectionConfig())
    for step in range(first, last + 1):
        seen = signals(step, 2.0, **changes)
        log.add(seen, *monitor.update(seen), Start(), steps_total=step, branch=0, now=1e9, lr_factor=1.0)


def test_a_disk_that_was_full_costs_no_line(tmp_path):
    """Half a line that it took spoils no other: when there is room again, every step is there once."""
    jobs = []
    log = StepLog(tmp_path, steps=50, write=jobs.append)
    seen_steps(log, 1, 5)
    jobs.pop()()
    size = (tmp_path / NAMES[0]).stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    seen_steps(log, 6, 9)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + size // 2, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            jobs.pop()()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / NAMES[0]).stat().st_size == size
    seen_steps(log, 10, 12)
    jobs.pop()()
    assert [line.step for line in read_steps(tmp_path)] == list(range(1, 13))


def test_a_folder_that_cannot_be_written_costs_no_line(tmp_path):
    """The newest steps wait in memory, and are written when it can be."""
    jobs = []
    log = StepLog(tmp_path, steps=10, write=jobs.append)
    (tmp_path / NAMES[0]).mkdir()
    for step in range(1, 15):
        seen_steps(log, step, step)
        with pytest.raises(IsADirectoryError):
            jobs.pop()()
    (tmp_path / NAMES[0]).rmdir()
    seen_steps(log, 15, 15)
    jobs.pop()()
    assert [line.step for line in read_steps(tmp_path)] == list(range(6, 16))


def test_a_rate_or_clip_that_is_no_number_costs_no_line(tmp_path):
    """A schedule that divides by zero is what somebody will look for: null in JSON, and the line is read again."""
    jobs = []
    log = StepLog(tmp_path, steps=10, write=jobs.append)
    seen_steps(log, 1, 1, learning_rates=(math.inf, 0.1), clip_coefficient=math.nan)
    jobs.pop()()
    [line] = read_steps(tmp_path)
    assert (line.learning_rates, line.clip_coefficient) == ((None, 0.1), None)


def test_steps_of_a_killed_job_stand_before_those_of_the_next_one(tmp_path):
    """Its last steps are counted again by the next, which is another branch: two lives are not mixed, nor lost."""
    filled(tmp_path, 15, keep=20)
    filled(tmp_path, 19, keep=20, first=11, branch=1)  # Into the second file.
    filled(tmp_path, 4, keep=20, first=16, branch=2)
    ran = [(line.branch, line.step) for line in read_steps(tmp_path)]
    assert ran == sorted(ran)
    assert ran[-23:] == [(1, step) for step in range(11, 30)] + [(2, step) for step in range(16, 20)]
