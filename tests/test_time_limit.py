"""Work with a time limit: its result, its error, or the end of waiting."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from trainer_plugin.checkpoints.time_limit import Disk, within


def test_what_ends_in_time_gives_its_result_or_its_error():
    """The caller sees what the work returned or raised."""
    assert within(60.0, divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        within(60.0, divmod, 7, 0)


def test_what_hangs_is_left_behind():
    """The caller goes on, and hears what it was."""
    end = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer within 0 s"):
        within(0.01, end.wait, 60.0)
    end.set()


def test_a_disk_that_hangs_is_asked_once():
    """Whoever waits to be told is told at once from then on; a disk that merely fails is asked again."""
    disk, end, asked = Disk("local", 0.01), threading.Event(), []
    assert disk.ask_or_none(lambda: os.open("/nowhere", os.O_RDONLY)) is None
    assert disk.ask_or_none(lambda: 3) == 3
    assert disk.ask_or_none(end.wait) is None
    with pytest.raises(TimeoutError, match="not answered before"):
        disk.ask(lambda: asked.append(1))
    assert asked == []
    end.set()


_STOPPED = """
import time
from trainer_plugin.checkpoints.time_limit import Disk, within

def work():
    print("begun", flush=True)
    for _ in range(10):
        time.sleep(0.05)
    return "done"

print(within(2.0, work))
"""


def test_a_machine_that_stood_still_is_no_disk_that_hangs():
    """A process stopped for longer than the limit goes on as before: the time that it did not have does not count."""
    process = subprocess.Popen([sys.executable, "-c", _STOPPED], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begun\n"
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2.3)
    os.kill(process.pid, signal.SIGCONT)
    assert process.communicate(timeout=30.0)[0] == "done\n"
