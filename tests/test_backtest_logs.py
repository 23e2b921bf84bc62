"""Tests of the backtest's logs: five formats found out and read alike, and whatever else a user may give."""

import gzip
import math
import sys
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from old_logs import (
    REAL,
    VALUES,
    csv_text,
    event_values,
    json_lines_text,
    megatron_line,
    megatron_text,
    read,
    trainer_state_text,
    write,
    write_events,
)

from trainer_plugin.backtest.logs import FORMATS, read_log

TEXTS = {"csv": csv_text, "jsonl": json_lines_text, "trainer_state": trainer_state_text, "megatron": megatron_text}


def values(rows):
    """Rows without what only some formats have, in a form in which NaN equals NaN."""
    return [str((row.step, row.loss, row.grad_norm, row.learning_rate)) for row in rows]


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_found_out_and_gives_the_same_rows(tmp_path, name):
    """The same run in any format has the same rows, NaN and Inf included, whatever the file is called."""
    path = write_events(tmp_path, event_values()) if name == "tensorboard" else write(tmp_path, "log", TEXTS[name]())

    rows, log = read(path)

    assert log.format == name
    assert values(rows) == [str(row) for row in VALUES]
    assert {(row.run, row.restart) for row in rows} == {(1, 0)}


@pytest.mark.parametrize("name", FORMATS)
def test_a_log_may_be_gzipped(tmp_path, name):
    """A gzip file is read as what is in it, by its content and not by its name."""
    plain = write_events(tmp_path, event_values()) if name == "tensorboard" else write(tmp_path, "log", TEXTS[name]())
    path = write(tmp_path, "packed", gzip.compress(plain.read_bytes()))

    rows, log = read(path)

    assert log.format == name
    assert values(rows) == [str(row) for row in VALUES]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", TEXTS)
def test_a_text_log_may_have_other_encodings_and_line_ends(tmp_path, name, encoding):
    """A mark at the beginning, two bytes a letter, carriage returns: nothing of it changes a row."""
    text = TEXTS[name]()

    for changed in (text, text.replace("\n", "\r\n"), text.replace("\n", "\r")):
        rows, log = read(write(tmp_path, "log", changed.encode(encoding)))

        assert log.format == name
        assert values(rows) == [str(row) for row in VALUES]


@pytest.mark.parametrize("name", TEXTS)
def test_nul_bytes_are_no_trouble(tmp_path, name):
    """Where a machine died there are NUL bytes in a log; they are left out."""
    text = TEXTS[name]().encode()

    rows, _ = read(write(tmp_path, "log", text.replace(b"\n", b"\n\0\0\0") + b"\0" * 100))

    assert values(rows) == [str(row) for row in VALUES]


@pytest.mark.parametrize("name", TEXTS)
def test_a_line_may_be_very_long(tmp_path, name):
    """A line of ten million bytes in the middle is passed over like any other that tells of no step."""
    text = TEXTS[name]()
    long = {"trainer_state": " ", "csv": "#x", "jsonl": '{"note": "' + "x" * 10_000_000 + '"}'}.get(name, "x")
    head, _, rest = text.partition("\n")

    line = long if name == "jsonl" else long * (10_000_000 // len(long))
    rows, _ = read(write(tmp_path, "log", f"{head}\n{line}\n{rest}"))

    assert values(rows) == [str(row) for row in VALUES]


@pytest.mark.parametrize("name", ["csv", "jsonl", "megatron"])
def test_lines_across_blocks_stay_whole(tmp_path, name):
    """A log of more bytes than are read at a time has every row once, also with two bytes at the end of each line."""
    many = [(step, 2.0 + step % 7 / 8, 0.5, 0.25) for step in range(12_000)]

    rows, _ = read(write(tmp_path, "log", TEXTS[name](many).replace("\n", "\r\n")))

    assert values(rows) == [str(row) for row in many]


@pytest.mark.parametrize("name", ["csv", "jsonl", "megatron"])
def test_a_long_log_needs_little_memory(tmp_path, name):
    """Rows come one by one: a log is never in memory as a whole."""
    steps = {"csv": 40_000, "jsonl": 30_000, "megatron": 15_000}[name]
    path = write(tmp_path, "log", TEXTS[name]([(step, 2.0 + 1.0 / (step + 3), 0.5, 0.25) for step in range(steps)]))

    tracemalloc.start()
    try:
        count = sum(1 for _ in read_log(path))
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert count == steps
    # A block of a quarter of a million bytes, and its lines.
    assert most_bytes < 2_500_000


def test_a_log_can_be_read_again(tmp_path):
    """Each iteration begins anew, also after one that was broken off, and its notes are not doubled."""
    log = read_log(write(tmp_path, "log.csv", csv_text() + "50,,,\n"))

    next(iter(log))
    first = list(log)
    notes = list(log.notes)

    assert str(list(log)) == str(first)
    assert log.notes == notes == ["1 row without a loss: left out (line 6)"]


def test_real_excerpts():
    """Excerpts of public logs have every row, with the spike, the loss scale and the NaN that are in them."""
    spike, _ = read(REAL["gptoss20b_spike"])
    scale, _ = read(REAL["bert_base_loss_scale"])
    nan, log = read(REAL["pgolf_nan"])

    assert (len(spike), len(scale), len(nan)) == (180, 76, 40)
    assert max(spike, key=lambda row: row.loss).step == 888
    assert {row.amp_loss_scale for row in scale} == {0.125, 0.25, 0.5, 2.0, 4.0, 8.0}
    assert [row.step for row in nan if math.isnan(row.loss)][0] == 1050  # noqa: RUF015 - the first, and there are more
    assert log.notes == []


BAD = {
    "empty": (b"", "found an empty file"),
    "blank": (b"\n \n\0\0", "found an empty file"),
    "image": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(range(256)) * 9, "found a binary file"),
    "zeros": (b"x" + b"\0" * 9000, "found none of them; it begins with 'x'"),
    "prose": (b"Loss of appetite, for example,\nis no loss.\n", "found none of them; it begins with 'Loss of"),
    "source": (b"import os\n\nprint(os.name)\n", "found none of them"),
    "no loss": (b"step,val_loss\n1,2.5\n2,2.5\n", "no loss: wanted a name such as loss"),
    "no names": (b"1,2.5\n2,2.5\n", "no loss: wanted a name such as loss"),
    "names only": (b"step,loss\n", "no step with a loss in it, as csv"),
    "all empty": (b"step,loss\n1,\n2,\n", "2 rows without a loss: left out"),
    "no number": (b"step,loss\n1,2.5\n".replace(b"2.5", b"abc"), "found none of them"),
    "json": (b'{"version": 1, "metric": "accuracy"}', "no loss: wanted a name such as loss"),
    "document": (b'{\n "version": 1\n}', "wanted; found 'version'"),
    "empty list": (b"[]", "no loss: wanted a name"),
    "empty history": (b'{"log_history": []}', "no step with a loss in it, as trainer_state"),
    "cut document": (trainer_state_text()[:300].encode(), "JSON document wanted, found a broken one (cut off?)"),
    "deep document": (b'[{"a": ' * 50_000, "a whole JSON document wanted"),
    "gzip of nothing": (gzip.compress(b""), "found an empty file"),
    "cut gzip": (gzip.compress(csv_text().encode())[:5], "a gzip file wanted, found a damaged one"),
    "megatron without loss": (megatron_line(1, None, None, 0.1, skipped=1).encode(), "no loss: wanted a name such"),
    "event file": (b"\x18\0\0\0\0\0\0\0\xa3\x7fK\x22\t\0\0\0\0\0\0\xf0?\x1a\rbrain.Event:2", "without a whole record"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_other_files_are_refused_in_one_line(tmp_path, what):
    """A file that is no log is refused with its name, what was wanted and what was found."""
    content, said = BAD[what]
    path = write(tmp_path, "given", content)

    with pytest.raises(ValueError, match="given") as error:
        read(path)

    message = str(error.value)
    assert message.startswith(f"{path}: ")
    assert said in message
    assert len(message.splitlines()) == 1


def test_what_is_no_file_is_refused(tmp_path):
    """A missing path, a loop of links, a device and a file that cannot be read are told in one line each."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    cases = {
        tmp_path / "missing": "No such file",
        tmp_path / "loop": "symbolic links",
        tmp_path / "given" / "deeper": "No such file",
        "/dev/null": "a log file wanted",
        "/proc/self/mem": "Input/output error",
    }
    for path, said in cases.items():
        with pytest.raises(ValueError, match=f"^{path}: .*{said}"):
            read(path)


@pytest.mark.parametrize("name", ["csv", "jsonl", "megatron"])
def test_half_a_last_line_is_left_out_and_told(tmp_path, name):
    """A log that stops within a line is read up to there, and says so."""
    text = TEXTS[name]([*VALUES, (50, 2.125, 0.5, 0.25)])
    lines = text.splitlines(keepends=True)
    last = next(index for index in reversed(range(len(lines))) if "2.125" in lines[index])
    cut = lines[last][: lines[last].index("2.125") - (1 if name == "csv" else -3)]

    rows, log = read(write(tmp_path, "log", "".join(lines[:last]) + cut))

    assert values(rows) == [str(row) for row in VALUES]
    assert log.notes == [f"cut off in line {last + 1}: read up to there"]


@pytest.mark.parametrize("name", ["csv", "jsonl", "megatron"])
def test_a_last_line_without_an_end_counts_if_it_is_whole(tmp_path, name):
    """A file that somebody wrote without a line end at its end loses nothing."""
    rows, log = read(write(tmp_path, "log", TEXTS[name]().rstrip("\n")))

    assert values(rows) == [str(row) for row in VALUES]
    assert log.notes == []


def test_a_gzip_file_that_was_cut_off_is_read_up_to_there(tmp_path):
    """What can be unpacked is read, and a note says that there was more."""
    many = [(step, math.sin(step) + 3.0, 0.5, 0.25) for step in range(5000)]
    packed = gzip.compress(csv_text(many).encode())

    rows, log = read(write(tmp_path, "log.gz", packed[: len(packed) // 2]))

    assert 1000 < len(rows) < 4000
    assert values(rows) == [str(row) for row in many[: len(rows)]]
    assert "the gzip file is cut off or damaged: read up to there" in log.notes


def test_a_text_log_may_begin_with_anything(tmp_path):
    """The first step may come after thousands of other lines, and JSON behind other words of its line."""
    preamble = "[NeMo I 2025] setting up, please wait: {not json}\nloss,what\n" * 3000

    assert read(write(tmp_path, "a", preamble + megatron_text()))[1].format == "megatron"

    lines = "".join(f"2022-05-01 | INFO | train_inner | {line}\n" for line in json_lines_text().splitlines())
    rows, log = read(write(tmp_path, "b", preamble + lines))
    assert log.format == "jsonl"
    assert values(rows) == [str(row) for row in VALUES]


def test_a_line_without_end_is_refused(tmp_path):
    """A file of one endless line, as of a program's dump, is refused before it fills the memory."""
    path = tmp_path / "endless"
    with path.open("wb") as file:
        file.write(b"step,loss\n1,2.5\n")
        for _ in range(70):
            file.write(b"x" * (1 << 20))

    with pytest.raises(ValueError, match=r"endless: lines of a log wanted, found one of more than 67108864 bytes"):
        read(path)


FRAGMENTS = [
    b"step,loss\n", b"1,2.5\n", b'"1","2.5"\n', b"2;3,5\n", b"loss", b",", b"nan", b"\0", b"\r", b"\xff\xfe", b"{",
    b"}", b"[", b'{"step": 1, "loss": NaN}\n', b'{"loss": {"loss": [1]}}\n', b'{"log_history": [', b'"', b"\x1f\x8b",
    b" iteration 1/ 5 | lm loss: 2.5 |", b" iteration 2/ 5 | number of nan iterations: 1 |\n", b"brain.Event:2", b"\n",
    b"-1,1e999\n", b"99999999999999999999,1\n", b"# loss,loss\n", b"\xef\xbb\xbf", b"run,step,loss\n", b"1e400",
]  # fmt: skip


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(
    st.one_of(st.binary(max_size=200), st.lists(st.sampled_from(FRAGMENTS), max_size=12).map(b"".join)), st.booleans()
)
@pytest.mark.timeout(60)
def test_garbage_gives_rows_or_a_message(tmp_path, content, packed):
    """Whatever is in a file, reading it gives rows with steps and losses, or an error of one line that names it."""
    path = write(tmp_path, "garbage", gzip.compress(content)[: -len(content) % 7 or None] if packed else content)
    message = None
    try:
        rows, log = read(path)
    except ValueError as error:
        message = str(error)
    if message is not None:
        assert message.startswith(f"{path}: ")
        assert len(message.splitlines()) == 1
    else:
        assert rows
        assert log.format in FORMATS
        assert all(isinstance(row.step, int) and row.step >= 0 and isinstance(row.loss, float) for row in rows)
        assert all(len(note.splitlines()) == 1 for note in log.notes)


def test_tensorboard_is_needed_for_its_files_only(tmp_path, monkeypatch):
    """Without the package, an event file is refused with what to install, and the other logs are read."""
    events = write_events(tmp_path, event_values())
    text = write(tmp_path, "log.csv", csv_text())
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.setitem(sys.modules, name, None)

    assert len(read(text)[0]) == 4
    with pytest.raises(ValueError, match="pip install tensorboard"):
        read(events)
