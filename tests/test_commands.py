"""The command inbox: put once, taken once, kept for good, whatever dies in between and whatever lies in the folder."""

import os
import resource
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from exporter import catalog
from exporter.commands import (
    MAX_COMMAND_BYTES,
    Action,
    Command,
    Inbox,
    Outcome,
    Record,
    Source,
    alert_identity,
)

COMMAND = Command(id="a1", run="gpt-0", action="rollback", source="alert", received=1.0, reason="loss is up")
RECORD = Record(command=COMMAND, outcome="done", decided=2.0, at_step=7)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def inbox(tmp_path: Path) -> Inbox:
    """An empty inbox."""
    inbox = Inbox(tmp_path)
    inbox.create()
    return inbox


def test_the_words_are_the_catalogs():
    """Actions, sources and outcomes are the same words in commands and in metrics."""
    assert get_args(Action) == catalog.ACTIONS
    assert get_args(Source) == catalog.SOURCES
    assert get_args(Outcome) == catalog.OUTCOMES


def test_put_then_waiting_gives_the_command_back(inbox):
    """A command comes out of the folder as it went in."""
    assert inbox.put(COMMAND)
    assert inbox.waiting() == [COMMAND]
    assert inbox.knows("a1")
    assert not inbox.knows("a2")


def test_a_second_put_is_no_second_command(inbox):
    """The same id put twice is one file with the first content."""
    assert inbox.put(COMMAND)
    assert not inbox.put(msgspec.structs.replace(COMMAND, action="stop"))
    assert inbox.waiting() == [COMMAND]


def test_puts_at_the_same_time_make_one_command(inbox):
    """Of many writers of one id exactly one is told that it queued the command, and no draft stays behind."""
    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(inbox.put, [COMMAND] * 32)) == [False] * 31 + [True]
    assert _names(inbox.new) == ["a1.json"]


def test_put_after_done_is_refused(inbox):
    """A decided command does not come back."""
    inbox.put(COMMAND)
    inbox.finish(RECORD)
    assert not inbox.put(COMMAND)
    assert inbox.knows("a1")
    assert inbox.waiting() == []


def test_finish_twice_keeps_the_first_outcome(inbox):
    """The record of a command is written once."""
    inbox.put(COMMAND)
    inbox.finish(RECORD)
    inbox.finish(msgspec.structs.replace(RECORD, outcome="failed"))
    assert inbox.records() == [RECORD]


def test_a_job_that_dies_between_record_and_removal_takes_it_once(inbox):
    """A command that has its record but still waits is removed, not taken again."""
    inbox.put(COMMAND)
    (inbox.done / "a1.json").write_bytes(msgspec.json.encode(RECORD))
    assert inbox.waiting() == []
    assert _names(inbox.new) == []
    assert inbox.records() == [RECORD]


def test_waiting_and_records_are_in_order_of_time(inbox):
    """The oldest comes first, by the time in the file and not by its name."""
    for name, at in (("b", 3.0), ("c", 1.0), ("a", 2.0)):
        command = msgspec.structs.replace(COMMAND, id=name, received=at)
        inbox.put(command)
    assert [command.id for command in inbox.waiting()] == ["c", "a", "b"]
    for command in inbox.waiting():
        inbox.finish(Record(command=command, outcome="done", decided=10 - command.received, at_step=1))
    assert [record.command.id for record in inbox.records()] == ["b", "a", "c"]


def test_of_a_flood_the_oldest_are_read_and_then_the_next(inbox):
    """However many commands wait, a look at them costs so many reads at most, and none is lost."""
    commands = [msgspec.structs.replace(COMMAND, id=f"c{number}", received=float(number)) for number in range(2500)]
    for number, command in enumerate(commands):
        path = inbox.new / f"{command.id}.json"
        path.write_bytes(msgspec.json.encode(command))
        os.utime(path, ns=(number, number))
    seen = []
    while waiting := inbox.waiting():
        assert len(waiting) <= 1000
        for command in waiting:
            seen.append(command.id)
            (inbox.new / f"{command.id}.json").unlink()
    assert seen == [command.id for command in commands]


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "a.b", "ü", "a\0", "a" * 65, "a\n", "٣"])
def test_an_id_that_is_no_plain_name_is_refused(inbox, name):
    """An id never leads out of the folder."""
    with pytest.raises(ValueError, match="command id must be"):
        inbox.put(msgspec.structs.replace(COMMAND, id=name))
    assert _names(inbox.new) == []


@pytest.mark.parametrize("name", ["../../state", "../done/a1", "/etc/x", "a" * 300])
def test_a_record_reaches_no_other_file_by_its_id(inbox, name):
    """Whoever tells what came of a command removes nothing but the command, and learns of nothing else."""
    (inbox.new.parent.parent / "state.json").write_text("the run's own")
    inbox.put(COMMAND)
    with pytest.raises(ValueError, match="command id must be"):
        inbox.knows(name)
    with pytest.raises(ValueError, match="command id must be"):
        inbox.finish(msgspec.structs.replace(RECORD, command=msgspec.structs.replace(COMMAND, id=name)))
    assert (inbox.new.parent.parent / "state.json").exists()
    assert (_names(inbox.new), _names(inbox.done)) == (["a1.json"], [])


def test_what_would_not_be_read_is_not_put(inbox):
    """A command larger than any that the job reads is refused to who asks, and not set aside unseen."""
    with pytest.raises(ValueError, match="at most 16384 are read"):
        inbox.put(msgspec.structs.replace(COMMAND, layers=("x" * MAX_COMMAND_BYTES,)))
    assert _names(inbox.new) == []


def test_a_long_story_is_cut_and_the_outcome_can_be_read(inbox):
    """A rollback that failed on a thousand tensors has a record all the same, beside the largest of commands."""
    command = msgspec.structs.replace(COMMAND, layers=("x" * (MAX_COMMAND_BYTES - 1000),))
    inbox.put(command)
    inbox.finish(Record(command=command, outcome="failed", decided=2.0, at_step=7, detail="\0blocks.3, " * 10_000))
    record = inbox.record("a1")
    assert (record.outcome, record.command) == ("failed", command)
    assert record.detail.startswith("\0blocks.3, ")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        msgspec.json.encode(COMMAND)[:-1],
        msgspec.json.encode(msgspec.structs.replace(COMMAND, schema=2)),
        msgspec.json.encode(msgspec.structs.replace(COMMAND, id="other")),
        msgspec.json.encode(COMMAND).replace(b"rollback", b"rm -rf"),
        msgspec.json.encode(msgspec.structs.replace(COMMAND, reason="x" * MAX_COMMAND_BYTES)),
        b'{"x":' + b"[" * (MAX_COMMAND_BYTES - 10),
    ],
    ids=["empty", "cut", "array", "no-utf8", "short", "schema", "name", "action", "oversized", "deep"],
)
def test_a_damaged_file_is_set_aside_and_the_rest_is_read(inbox, content, caplog):
    """What is no command of ours becomes `*.bad`, the log says so, and it does not hold the others up."""
    (inbox.new / "a1.json").write_bytes(content)
    other = msgspec.structs.replace(COMMAND, id="b2")
    inbox.put(other)
    assert inbox.waiting() == [other]
    assert _names(inbox.new) == ["a1.bad", "b2.json"]
    assert "a1.json: no command that this can read" in caplog.text


def test_links_pipes_and_folders_are_set_aside(inbox, tmp_path):
    """A link to a good command, a pipe and a folder are no commands; none of them blocks or is followed."""
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_bytes(msgspec.json.encode(msgspec.structs.replace(COMMAND, id="link")))
    (inbox.new / "link.json").symlink_to(elsewhere)
    os.mkfifo(inbox.new / "pipe.json")
    (inbox.new / "folder.json").mkdir()
    assert inbox.waiting() == []
    assert _names(inbox.new) == ["folder.bad", "link.bad", "pipe.bad"]
    assert elsewhere.exists()


def test_an_error_that_may_pass_does_not_cost_a_command(inbox):
    """With no file descriptor left, the command is not read now, and is still there later."""
    inbox.put(COMMAND)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        read = inbox._read(inbox.new / "a1.json")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert read is None
    assert inbox.waiting() == [COMMAND]


@pytest.mark.parametrize("linked", ["commands", "commands/new", "commands/done"])
def test_an_inbox_behind_a_link_is_not_used(tmp_path, linked):
    """A link in the place of a folder is refused by every method, and nothing is written behind it."""
    run, target = tmp_path / "run", tmp_path / "target"
    Inbox(run).create()
    Inbox(target).create()
    (run / linked).rename(tmp_path / "moved")
    (run / linked).symlink_to(target / linked)
    inbox = Inbox(run)
    assert not inbox.exists()
    for use in (lambda: inbox.put(COMMAND), inbox.waiting, lambda: inbox.finish(RECORD), inbox.records):
        with pytest.raises(OSError, match="a link where a folder"):
            use()
    assert [path for path in target.rglob("*") if path.is_file()] == []


def test_damaged_records_are_left_out(inbox):
    """A record that cannot be read hides no other."""
    inbox.finish(RECORD)
    (inbox.done / "b.json").write_bytes(b"{")
    assert inbox.records() == [RECORD]


def test_folders_and_files_are_closed_to_others(inbox):
    """Only the owner may read or write commands."""
    inbox.put(COMMAND)
    assert stat.S_IMODE(inbox.new.stat().st_mode) == 0o700
    assert stat.S_IMODE(inbox.done.stat().st_mode) == 0o700
    assert stat.S_IMODE((inbox.new / "a1.json").stat().st_mode) == 0o600


def test_an_absent_inbox_is_no_place_to_put(tmp_path):
    """Without a job's folder, a put fails and a look finds nothing."""
    inbox = Inbox(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        inbox.put(COMMAND)
    assert inbox.waiting() == []
    assert not inbox.exists()


def test_identity_is_of_fingerprint_and_start():
    """Deliveries of one firing share an id; another firing or another alert has its own, and each is a plain name."""
    ids = {alert_identity(*pair) for pair in [("a", "1"), ("a", "1"), ("a", "2"), ("b", "1")]}
    assert len(ids) == 3
    assert all(name.isalnum() and len(name) == 32 for name in ids)
