"""The control loop: commands in, records out, a heartbeat judged by its arrival, and no waiting on a hung disk."""

import os
import shutil
import threading

import msgspec
import pytest
from training import Clock
from waiting import wait_for

from exporter.commands import Command, Record
from trainer_plugin.control_loop import HEARTBEAT_TIMEOUT_SECONDS, ControlLoop
from trainer_plugin.run_folder import JobFolder

COMMAND = Command(id="a1", run="tiny", action="rollback", source="operator", received=1.0)


@pytest.fixture
def folder(tmp_path):
    """A run's folder, held by this job."""
    folder = JobFolder(tmp_path / "runs", "tiny")
    yield folder
    if folder.lock._descriptor >= 0:
        folder.lock.release()


@pytest.fixture
def errors():
    """What was held back."""
    return []


@pytest.fixture
def turned():
    """Monotonic seconds, turned by hand."""
    return Clock(0.0)


@pytest.fixture
def loop(folder, errors, turned):
    """A loop that is not started: a test turns it with `poll`."""
    return ControlLoop(folder, on_error=errors.append, clock=turned)


@pytest.fixture
def started(loop):
    """A loop with its thread."""
    loop.start()
    yield loop
    loop.stop()


def test_a_command_waits_until_it_has_its_outcome(loop, folder):
    """A command stays in sight until it is finished, then at once no more, and its record is written."""
    folder.inbox.put(COMMAND)
    assert loop.commands() == []
    loop.poll()
    assert loop.commands() == [COMMAND]
    loop.poll()
    assert loop.commands() == [COMMAND]
    record = Record(command=COMMAND, outcome="done", decided=2.0, at_step=7)
    loop.finish(record)
    assert loop.commands() == []
    loop.poll()
    assert loop.commands() == []
    assert folder.inbox.records() == [record]
    assert folder.inbox.waiting() == []


def test_a_finished_command_does_not_come_again_while_the_disk_is_away(loop, folder, tmp_path, errors):
    """A record that cannot be written is counted, and the command is still not obeyed twice in this process."""
    folder.inbox.put(COMMAND)
    loop.poll()
    shutil.move(folder.path / "commands", tmp_path / "away")
    loop.finish(Record(command=COMMAND, outcome="done", decided=2.0, at_step=7))
    loop.poll()
    assert len(errors) == 1
    shutil.move(tmp_path / "away", folder.path / "commands")
    loop.poll()
    assert loop.commands() == []


def test_the_loop_is_up_while_heartbeats_arrive(loop, folder, turned):
    """Up from a heartbeat's arrival for 90 s of our own clock, whatever time is written in it."""
    loop.poll()
    assert not loop.up
    folder.outer.beat(12345.0)
    assert not loop.up
    loop.poll()
    assert loop.up
    turned.now += HEARTBEAT_TIMEOUT_SECONDS - 0.1
    loop.poll()
    assert loop.up
    turned.now += 0.2
    loop.poll()
    assert not loop.up
    folder.outer.beat(12345.0)
    loop.poll()
    assert loop.up


def test_a_heartbeat_from_before_the_start_does_not_count(folder, errors):
    """The file that an earlier outer loop left behind is no sign of life."""
    folder.outer.beat(1.0)
    loop = ControlLoop(folder, on_error=errors.append)
    loop.poll()
    assert not loop.up


def test_the_lock_is_kept_alive(loop, folder, turned):
    """Every ten seconds the lock shows that the job lives."""
    before = (folder.path / "lock").read_bytes()
    turned.now += 9.0
    loop.poll()
    assert (folder.path / "lock").read_bytes() == before
    turned.now += 2.0
    loop.poll()
    assert (folder.path / "lock").read_bytes() != before


def test_writing_is_in_order_and_flush_waits_for_it(started):
    """What was handed in is done in that order, and is done when flush says so."""
    done = []
    for round_ in range(50):
        for number in range(3):
            started.write(lambda entry=(round_, number): done.append(entry))
        assert started.flush(5.0)
        assert done == [(r, n) for r in range(round_ + 1) for n in range(3)]


def test_a_hung_disk_holds_up_nobody(started):
    """While a write hangs, handing in more and looking for commands return at once, and flush gives up."""
    release, began = threading.Event(), threading.Event()

    def hang() -> None:
        began.set()
        release.wait(8.0)

    started.write(hang)
    assert began.wait(8.0)
    done = threading.Event()
    started.write(done.set)
    assert started.commands() == []
    assert not started.flush(0.01)
    assert not done.is_set()
    release.set()
    assert started.flush(5.0)
    assert done.is_set()


def test_an_error_is_held_back_and_the_thread_goes_on(started, errors):
    """A write that raises is handed to `on_error`; the next one is done all the same."""
    done = []
    started.write(lambda: 1 // 0)
    started.write(lambda: done.append(1))
    assert started.flush(5.0)
    assert done == [1]
    assert [type(error) for error in errors] == [ZeroDivisionError]


def test_a_lost_inbox_is_an_error_and_not_the_end(loop, folder, errors):
    """With a link where the inbox was, looking fails and is counted; nothing is obeyed."""
    folder.inbox.put(COMMAND)
    folder.inbox.new.rename(folder.path / "moved")
    folder.inbox.new.symlink_to(folder.path / "moved")
    loop.poll()
    assert loop.commands() == []
    assert [type(error) for error in errors] == [OSError]


def test_the_thread_finds_commands_by_itself(started, folder):
    """Nobody has to ask: a started loop looks into the folder."""
    folder.inbox.put(COMMAND)
    wait_for(started.commands)


def test_stop_writes_what_is_left(loop):
    """What was handed in before the end is written, and the thread is gone."""
    done = []
    loop.start()
    loop.write(lambda: done.append(1))
    loop.stop()
    assert done == [1]
    assert not loop._thread.is_alive()
    assert loop.flush(0.0)


def test_a_record_that_a_full_disk_did_not_take_is_written_later(loop, folder, errors, turned):
    """Else the command would wait for ever, and the next job would do it again; others are read meanwhile."""
    folder.inbox.put(COMMAND)
    loop.poll()
    done = folder.inbox.done
    done.rmdir()
    done.touch()  # A file: nothing can be written into it.
    loop.finish(Record(command=COMMAND, outcome="done", decided=2.0, at_step=7))
    loop.poll()
    assert len(errors) == 1
    other = msgspec.structs.replace(COMMAND, id="b2")
    folder.inbox.put(other)
    loop.poll()
    assert loop.commands() == [other]
    done.unlink()
    done.mkdir()
    turned.wait(10.0)
    loop.poll()
    assert folder.inbox.record("a1").outcome == "done"
    assert [command.id for command in folder.inbox.waiting()] == ["b2"]


def test_an_inbox_that_cannot_be_read_leaves_lock_and_heartbeat_alive(loop, folder, errors, turned):
    """A link in its place costs the commands alone: no other host takes the run for dead, and alerts go first still."""
    folder.inbox.new.rename(folder.path / "elsewhere")
    folder.inbox.new.symlink_to(folder.path / "elsewhere")
    os.utime(folder.path / "lock", (1.0, 1.0))
    folder.outer.beat(2.0)
    turned.wait(10.0)
    loop.poll()
    assert len(errors) == 1
    assert loop.up
    assert (folder.path / "lock").stat().st_mtime > 1.0
