"""Run folders: which names may be runs, which folders count, and heartbeats that survive anything."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from exporter.runs import Heartbeat, RunFolder, find_run, valid_run_name, write_atomically

HOSTILE = [
    "",
    ".",
    "..",
    "../x",
    "a/b",
    "/etc",
    "a\0b",
    "a" * 101,
    "a" * 10_000,
    "läuft",
    "-a",
    "_a",
    "a b",
    "a\n",
    "٣",
]


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run's folder as a job leaves it."""
    folder = RunFolder(tmp_path, "gpt-0")
    folder.inbox.create()
    return folder


@pytest.mark.parametrize("name", ["a", "gpt-0", "A.b_c-9", "0", "a..b", "a" * 100])
def test_plain_names_are_runs(name):
    """Letters, digits, dots, underscores and dashes make a run's name."""
    assert valid_run_name(name)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_not_found(tmp_path, name):
    """A name that could lead anywhere else is no run, even if its folder is there."""
    (tmp_path / "commands" / "new").mkdir(parents=True)
    assert not valid_run_name(name)
    assert find_run(tmp_path, name) is None
    with pytest.raises(ValueError, match="run name must be"):
        RunFolder(tmp_path, name)


def test_find_run_wants_a_jobs_folder(tmp_path, folder):
    """Only a folder with an inbox is a run: not a bare folder, not a file, not a name alone."""
    (tmp_path / "bare").mkdir()
    (tmp_path / "file").write_text("x")
    found = find_run(tmp_path, "gpt-0")
    assert found is not None
    assert found.path == folder.path
    assert [find_run(tmp_path, name) for name in ("bare", "file", "absent")] == [None] * 3


@pytest.mark.parametrize("linked", ["gpt-0", "gpt-0/commands", "gpt-0/commands/new", "gpt-0/commands/done"])
def test_a_run_behind_a_link_is_not_found(tmp_path, folder, linked):
    """A link in the place of the run's folder or of its inbox hides the run."""
    assert folder.exists()
    (tmp_path / linked).rename(tmp_path / "moved")
    (tmp_path / linked).symlink_to(tmp_path / "moved")
    assert find_run(tmp_path, "gpt-0") is None


def test_heartbeats_count_up(folder):
    """Each beat has its time and one more than the last."""
    assert folder.heartbeat() is None
    folder.beat(10.0)
    folder.beat(20.0)
    assert folder.heartbeat() == Heartbeat(received=20.0, count=2)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"received": "x"}', b"\xff"])
def test_a_damaged_heartbeat_is_written_anew(folder, content):
    """A heartbeat that cannot be read counts as none, and the next one mends it."""
    folder.heartbeat_path.write_bytes(content)
    assert folder.heartbeat() is None
    folder.beat(5.0)
    assert folder.heartbeat() == Heartbeat(received=5.0, count=1)


def test_heartbeats_at_the_same_time_all_succeed(folder):
    """Two senders at once do not trip over each other, and leave one whole file."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(folder.beat, [float(number) for number in range(64)]))
    assert folder.heartbeat() is not None
    assert _names(folder.path) == ["commands", "heartbeat.json"]


def test_a_failed_write_leaves_nothing_behind(tmp_path):
    """Where the file cannot be replaced, the old thing stays and no draft does."""
    (tmp_path / "target").mkdir()
    with pytest.raises(OSError, match="target"):
        write_atomically(tmp_path / "target", b"x")
    assert _names(tmp_path) == ["target"]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("odd", ["pipe", "link", "deep"])
def test_what_is_no_heartbeat_is_not_waited_for(folder, tmp_path, odd):
    """A pipe in the place of the heartbeat hangs nobody, a link leads nowhere, and the next beat takes their place."""
    if odd == "pipe":
        os.mkfifo(folder.heartbeat_path)
    elif odd == "link":
        (tmp_path / "elsewhere").write_text('{"received":1.0,"count":5}')
        folder.heartbeat_path.symlink_to(tmp_path / "elsewhere")
    else:
        folder.heartbeat_path.write_text("[" * 900)
    assert folder.heartbeat() is None
    folder.beat(2.0)
    assert folder.heartbeat() == Heartbeat(received=2.0, count=1)
