"""Tests of TensorBoard's event files: tags, both forms of a scalar, several files, and damaged ones."""

import gzip

import pytest
from old_logs import VALUES, event_values, read, scalar, write, write_events
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto


@pytest.mark.parametrize("tensor", [False, True], ids=["simple value", "tensor"])
def test_both_forms_of_a_scalar(tmp_path, tensor):
    """Summaries of TensorFlow 1 and PyTorch, and those of TensorFlow 2, are read alike."""
    rows, log = read(write_events(tmp_path, event_values(tensor=tensor)))

    assert [str((row.step, row.loss, row.grad_norm, row.learning_rate)) for row in rows] == [str(row) for row in VALUES]
    assert log.notes == []


def test_the_best_tag_is_taken_and_told(tmp_path):
    """Among several losses the plainest is read, that of an evaluation never, and texts are no scalars."""
    summaries = [(1, scalar("loss", 2.5)), (1, scalar("train/lm loss", 3.5)), (1, scalar("eval/loss", 9.0)),
                 (1, Summary.Value(tag="lr", tensor=make_tensor_proto("text"))),
                 (1, Summary.Value(tag="grad_norm", tensor=make_tensor_proto([1.0, 2.0])))]  # fmt: skip

    (row,), log = read(write_events(tmp_path, summaries))

    assert (row.loss, row.learning_rate, row.grad_norm) == (2.5, None, None)
    assert log.notes == ["the loss is read from `loss`; there too: `train/lm loss`"]


def test_without_a_loss_the_tags_are_told(tmp_path):
    """A file without a loss is refused with the tags that it has."""
    path = write_events(tmp_path, [(1, scalar("reward", 1.0)), (1, scalar("eval/loss", 1.0))])

    with pytest.raises(ValueError, match=r"tfevents.*: no loss: wanted .* found 'eval/loss', 'reward' among its tags"):
        read(path)


def test_series_of_other_strides_and_orders(tmp_path):
    """Values belong together by their step, in whatever order the tags were written."""
    summaries = [(step, scalar("loss", 2.0 + step)) for step in range(4)]
    summaries += [(step, scalar("grad_norm", float(step))) for step in (0, 2)]

    rows, _ = read(write_events(tmp_path, summaries))

    assert [(row.step, row.loss, row.grad_norm) for row in rows] == [
        (0, 2.0, 0.0), (1, 3.0, None), (2, 4.0, 2.0), (3, 5.0, None)]  # fmt: skip


def test_a_folder_of_files_is_one_run_with_restarts(tmp_path):
    """Each start of a job writes another file: they are one run, whose repeated steps are a restart."""
    write_events(tmp_path, [value for row in range(200) for value in event_values([(row, 2.5, 1.0, 0.5)])], suffix=".1")
    write_events(
        tmp_path, [value for row in range(100, 300) for value in event_values([(row, 2.25, 2.0, 0.5)])], suffix=".2"
    )

    rows, log = read(tmp_path)

    assert [row.step for row in rows] == [*range(200), *range(100, 300)]
    assert [(row.loss, row.grad_norm, row.restart) for row in (rows[150], rows[250])] == [(2.5, 1.0, 0), (2.25, 2.0, 1)]
    assert "steps 100 to 199 come twice" in log.notes[0]


def test_folders(tmp_path):
    """Files below the folder that is given are found if they are of one run; more than one are told, none too."""
    with pytest.raises(ValueError, match="event files; found none in it"):
        read(tmp_path)

    (tmp_path / "runs" / "a").mkdir(parents=True)
    write_events(tmp_path / "runs" / "a", event_values())
    assert len(read(tmp_path)[0]) == 4

    (tmp_path / "runs" / "b").mkdir()
    write_events(tmp_path / "runs" / "b", event_values())
    with pytest.raises(ValueError, match=r"event files of one run wanted, found those of 2 in it: runs/a, runs/b"):
        read(tmp_path)


def test_a_file_that_was_cut_off(tmp_path):
    """A file that ends within a record is read up to there, gzipped or not, and the user told."""
    whole = write_events(tmp_path, event_values([(step, 2.5, 0.5, 0.5) for step in range(100)])).read_bytes()
    cut = write(tmp_path, "cut", whole[: len(whole) // 2])
    packed = gzip.compress(whole)

    rows, log = read(cut)
    assert [row.step for row in rows] == [*range(len(rows))]
    assert 40 < len(rows) < 60
    assert log.notes[0].startswith("cut is cut off or damaged after event ")

    rows, log = read(write(tmp_path, "cut.gz", packed[: len(packed) * 2 // 3]))
    assert 10 < len(rows) < 100
    assert "the gzip file is cut off or damaged: read up to there" in log.notes


def test_damaged_bytes_end_a_file(tmp_path):
    """A record whose checksum is wrong is where reading ends, and that is told."""
    whole = bytearray(write_events(tmp_path, event_values([(step, 2.5, 0.5, 0.5) for step in range(100)])).read_bytes())
    whole[len(whole) // 2] ^= 0xFF

    rows, log = read(write(tmp_path, "damaged", bytes(whole)))

    assert 40 < len(rows) < 60
    assert len(log.notes) == 1


def test_a_record_that_is_no_event(tmp_path):
    """A whole record with something else in it is left out, and the records behind it are read."""
    path = write_events(tmp_path, event_values())
    with path.open("ab") as file:
        writer = RecordWriter(file)
        writer.write(b"\xff no event")
        writer.write(Event(step=50, summary=Summary(value=[scalar("train/loss", 2.5)])).SerializeToString())

    rows, log = read(path)

    assert [row.step for row in rows] == [10, 20, 30, 40, 50]
    assert log.notes == ["1 event that cannot be read: left out (event 14)"]


def test_negative_steps_are_left_out(tmp_path):
    """A step below 0 is none."""
    rows, log = read(write_events(tmp_path, [(-1, scalar("loss", 9.0)), (1, scalar("loss", 2.5))]))

    assert [row.step for row in rows] == [1]
    assert log.notes == ["1 row with a step below 0: left out (event 2)"]
