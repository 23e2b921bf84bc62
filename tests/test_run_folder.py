"""The run folder: one job at a time, what never rewinds comes back, and a torn line costs nothing else."""

import fcntl
import os
import socket
import stat
import time

import msgspec
import pytest

from trainer_plugin.checkpoints.retention import Lineage
from trainer_plugin.data.batches import Quarantine
from trainer_plugin.learning_rate import LrState
from trainer_plugin.run_folder import JobFolder, RunInUseError, RunState

ENTRY = Quarantine(first=3, last=9, incident=1, reason="unknown at step 7", sample_ids=("a", "b"))


@pytest.fixture
def open_folder(tmp_path):
    """A function that opens the folder of one run; what is left open is closed at the end."""
    folders = []

    def open_folder(**options) -> JobFolder:
        folders.append(JobFolder(tmp_path / "runs", "tiny", **options))
        return folders[-1]

    yield open_folder
    for folder in folders:
        if folder.lock._descriptor >= 0:
            folder.lock.release()


def holder(path, *, host: str, age_seconds: float, ahead_seconds: float = 0.0) -> None:
    """Write a lock as a job on some host would have left it, whose clock is so much ahead."""
    beat_at = time.time() - age_seconds
    path.write_bytes(msgspec.json.encode({"host": host, "pid": 4711, "heartbeat": beat_at + ahead_seconds}))
    os.utime(path, (beat_at, beat_at))


def test_a_new_folder_is_empty_and_closed_to_others(open_folder):
    """A first job finds nothing, and nobody else may look in."""
    folder = open_folder()
    assert folder.state is None
    assert folder.quarantine == []
    assert folder.inbox.exists()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


def test_a_second_job_is_refused_in_one_line(open_folder):
    """While a job holds the folder another is told which process on which host has it."""
    folder = open_folder()
    with pytest.raises(RunInUseError) as caught:
        open_folder()
    assert str(caught.value) == (
        f"run folder {folder.path} is in use by process {os.getpid()} on {socket.gethostname()}"
    )
    folder.lock.release()
    open_folder()


def test_an_unreadable_lock_that_is_held_is_a_lock_all_the_same(open_folder, tmp_path):
    """A lock whose holder cannot be read still keeps others out."""
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)
    with (folder / "lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RunInUseError, match="another process"):
            open_folder()


@pytest.mark.parametrize(
    ("left", "waited", "refused"),
    [(("far", 5, 0), 10, True), (("far", 5, 0), 55, False), (("far", 100, 0), 0, False), (("far", 5, -3600), 10, True),
     (("far", 100, 3600), 0, False), ((None, 5, 0), 0, False)],
)  # fmt: skip
def test_a_lock_from_elsewhere_holds_while_its_heart_beats(open_folder, tmp_path, left, waited, refused):
    """A lock of another host, where flock may not reach, is waited for: it beats, or its job has died there.

    A minute without a beat is death, by the file system's time: a clock that is an hour off neither holds a lock nor
    loses it. One of this host holds only while it is held.
    """
    lock = tmp_path / "runs" / "tiny" / "lock"
    lock.parent.mkdir(parents=True)
    host, age, ahead = left
    holder(lock, host=host or socket.gethostname(), age_seconds=age, ahead_seconds=ahead)
    waits = []

    def wait(seconds):
        waits.append(seconds)
        if refused and len(waits) == waited:
            holder(lock, host="far", age_seconds=0, ahead_seconds=ahead)
        else:
            os.utime(lock, (lock.stat().st_mtime - seconds,) * 2)

    if refused:
        with pytest.raises(RunInUseError, match="process 4711 on far"):
            open_folder(wait=wait)
    else:
        open_folder(wait=wait)
    assert sum(waits) == pytest.approx(waited, abs=1.0)
    assert [path.name for path in lock.parent.iterdir() if path.name.startswith(".lock")] == []


def test_the_heartbeat_of_the_lock_goes_on(open_folder):
    """Each beat writes a new time, and a released lock names nobody."""
    folder = open_folder()
    path = folder.path / "lock"
    first = msgspec.json.decode(path.read_bytes())
    folder.lock.beat()
    second = msgspec.json.decode(path.read_bytes())
    assert second["heartbeat"] > first["heartbeat"]
    assert second["pid"] == os.getpid()
    folder.lock.release()
    assert path.read_bytes() == b""


def test_a_beat_after_the_release_writes_nowhere(open_folder, tmp_path):
    """A late beat is an error, and does not reach the file that has the descriptor's number now."""
    folder = open_folder()
    folder.lock.release()
    other = tmp_path / "other"
    other.write_bytes(b"precious")
    with other.open("r+b"):
        with pytest.raises(OSError, match="descriptor"):
            folder.lock.beat()
        assert other.read_bytes() == b"precious"


def test_state_comes_back(open_folder):
    """What never rewinds is read back as it was saved."""
    folder = open_folder()
    state = RunState(
        steps_total=70,
        proven_step=40,
        lineage=Lineage(began_at=[0, 50]),
        learning_rate=LrState(lowered_to=0.5, hold_until=90, return_until=100),
        clip_until=80,
    )
    folder.save_state(msgspec.json.encode(state))
    folder.lock.release()
    assert open_folder().state == state


@pytest.mark.parametrize(
    ("content", "message"),
    [(b'{"schema": 2}', "schema 2, written by another version"), (b"{", "not the state of a run")],
)
def test_a_state_that_cannot_be_read_is_refused_and_the_lock_let_go(open_folder, content, message):
    """Another schema or a damaged file stops the start in one line, and does not keep the folder locked."""
    folder = open_folder()
    path = folder.path / "state.json"
    path.write_bytes(content)
    folder.lock.release()
    with pytest.raises(ValueError, match=message):
        open_folder()
    path.unlink()
    open_folder()


def test_quarantine_comes_back(open_folder):
    """Ranges of data stay in quarantine over restarts."""
    folder = open_folder()
    folder.add_quarantine(ENTRY)
    folder.add_quarantine(msgspec.structs.replace(ENTRY, incident=2))
    folder.lock.release()
    assert open_folder().quarantine == [ENTRY, msgspec.structs.replace(ENTRY, incident=2)]


def test_a_quarantine_of_another_version_is_refused(open_folder):
    """A line with an unknown schema stops the start and names the file: what it keeps out must not come in unseen."""
    folder = open_folder()
    folder.add_quarantine(ENTRY)
    with (folder.path / "quarantine.jsonl").open("ab") as file:
        file.write(b'{"schema": 2, "shards": ["a"]}\n')
    folder.lock.release()
    with pytest.raises(ValueError, match=r"quarantine.jsonl: schema 2, written by another version; this reads 1"):
        open_folder()


def test_a_torn_line_costs_itself_only(open_folder):
    """A line that a killed job left unfinished is left out, and does not swallow the one written next."""
    folder = open_folder()
    folder.add_quarantine(ENTRY)
    folder.log("note", {"step": 1})
    for name in ("quarantine.jsonl", "incidents.jsonl"):
        with (folder.path / name).open("ab") as file:
            file.write(b'{"first":10,"la')
    folder.lock.release()
    again = open_folder()
    again.add_quarantine(msgspec.structs.replace(ENTRY, incident=2))
    again.log("note", {"step": 2})
    again.lock.release()
    assert [entry.incident for entry in open_folder().quarantine] == [1, 2]
    lines = (folder.path / "incidents.jsonl").read_bytes().splitlines()
    assert msgspec.json.decode(lines[-1])["step"] == 2


def test_the_trail_has_one_line_each(open_folder):
    """A line of the trail says schema, time and kind beside what it was given."""
    folder = open_folder()
    folder.log("action", {"step": 7})
    line = msgspec.json.decode((folder.path / "incidents.jsonl").read_bytes())
    assert {key: line[key] for key in ("schema", "kind", "step")} == {"schema": 1, "kind": "action", "step": 7}
    assert line["time"] == pytest.approx(time.time(), abs=60)


def test_a_folder_that_cannot_be_made_is_told_in_one_line(tmp_path):
    """A file in the place of the runs folder is an error that names the run folder."""
    (tmp_path / "runs").touch()
    with pytest.raises(OSError, match=r"run folder .*tiny cannot be written: Not a directory"):
        JobFolder(tmp_path / "runs", "tiny")


def test_a_lock_behind_a_link_is_not_followed(tmp_path):
    """A link in the place of the lock is refused, and what it points to is not written."""
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)
    (tmp_path / "target").write_bytes(b"precious")
    (folder / "lock").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="cannot be written"):
        JobFolder(tmp_path / "runs", "tiny")
    assert (tmp_path / "target").read_bytes() == b"precious"
