"""The demo's text: what is held out, what a batch depends on, and the way back to a file."""

import sysconfig
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from trainer_plugin.demo.text import Batch, ByteBatches, Corpus, Text, held_out_batches


@pytest.fixture(scope="module")
def corpus():
    """The whole corpus."""
    return Corpus.load()


def source(corpus, seed=0):
    """A small source at its beginning."""
    return ByteBatches(corpus, batch_size=4, context=64, seed=seed)


def same(one: Batch, other: Batch) -> bool:
    """Whether two batches hold the same samples."""
    return torch.equal(one["tokens"], other["tokens"]) and one["sample_ids"] == other["sample_ids"]


def test_corpus_is_megabytes_of_source_without_tests(corpus):
    """The corpus is several megabytes of the standard library, and no test file is in it."""
    names = corpus.train.names + corpus.held_out.names
    assert len(corpus.train) > 3_000_000
    assert "argparse.py" in names
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/"))]


def test_no_file_is_on_both_sides(corpus):
    """No file that is trained on is held out."""
    assert set(corpus.train.names).isdisjoint(corpus.held_out.names)


def test_no_training_sample_comes_from_a_held_out_file(corpus):
    """Every sample of a training batch comes from a file that is not held out."""
    ids = [sample for batch in islice(source(corpus), 50) for sample in batch["sample_ids"]]
    assert {sample.rpartition(":")[0] for sample in ids}.isdisjoint(corpus.held_out.names)


def test_sample_id_leads_back_to_the_bytes(corpus):
    """The file and offset of a sample id are where its first bytes stand on disk."""
    batch = next(source(corpus))
    for row, sample in zip(batch["tokens"].tolist(), batch["sample_ids"], strict=True):
        name, _, offset = sample.rpartition(":")
        content = (Path(sysconfig.get_path("stdlib")) / name).read_bytes()[int(offset) : int(offset) + 65]
        assert bytes(row)[: len(content)] == content
        assert content


def test_offset_is_located_at_the_edges_of_files():
    """The first and last byte of each file are located in that file, and empty files are passed over."""
    text = Text([("a.py", b"abc"), ("empty.py", b""), ("b.py", b"de")])
    assert [text.locate(n) for n in range(5)] == [("a.py", 0), ("a.py", 1), ("a.py", 2), ("b.py", 0), ("b.py", 1)]
    with pytest.raises(IndexError, match="from 0 to 4, found 5"):
        text.locate(5)


def test_batch_has_shape_and_type(corpus):
    """A batch is int64 token ids, one more than predicted, with one id a row."""
    batch = next(source(corpus))
    assert batch["tokens"].shape == (4, 65)
    assert batch["tokens"].dtype == torch.int64
    assert len(batch["sample_ids"]) == 4


def test_going_back_gives_the_same_batches(corpus):
    """After going back, the same batches come again, also from an iterator that was under way."""
    batches = source(corpus)
    iterator = iter(batches)
    list(islice(iterator, 3))
    position = batches.state_dict()
    first = list(islice(iterator, 5))
    batches.load_state_dict(position)
    assert all(map(same, first, islice(iterator, 5)))
    batches.load_state_dict(position)
    assert all(map(same, first, islice(batches, 5)))


def test_fresh_source_goes_on_from_a_position(corpus):
    """A restarted process goes on where the position says."""
    batches = source(corpus)
    list(islice(batches, 3))
    fresh = source(corpus)
    fresh.load_state_dict(batches.state_dict())
    assert same(next(fresh), next(batches))


def test_position_of_another_seed_is_refused(corpus):
    """A position that belongs to another seed is refused and leaves the source where it was."""
    batches = source(corpus, seed=1)
    with pytest.raises(ValueError, match="position of seed 1 wanted, found one of seed 2"):
        batches.load_state_dict(source(corpus, seed=2).state_dict())
    assert batches.state_dict()["next_batch"] == 0


def test_seed_decides(corpus):
    """Two sources of one seed agree, one of another seed differs, and so do neighbouring batches."""
    one, twin, other = source(corpus, 7), source(corpus, 7), source(corpus, 8)
    assert same(one.batch(3), twin.batch(3))
    assert not same(one.batch(3), other.batch(3))
    assert not same(one.batch(3), one.batch(4))


def test_global_generators_are_not_touched(corpus):
    """Drawing batches and making the held-out set leaves the generators of torch and numpy as they were."""
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002 - the legacy state is the question
    list(islice(source(corpus), 3))
    held_out_batches(corpus)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002


def test_held_out_set_is_fixed_and_large_enough(corpus):
    """The held-out set predicts at least 64 k tokens and does not depend on how much is trained on."""
    batches = held_out_batches(corpus)
    assert sum(tokens[:, 1:].numel() for tokens in batches) >= 65_536
    small = Corpus.load(max_bytes=100_000)
    assert len(small.train) < len(corpus.train)
    assert all(map(torch.equal, batches, held_out_batches(small)))


def test_too_little_held_out_text_is_refused():
    """A held-out text shorter than the set is an error that says both sizes."""
    tiny = Corpus(train=Text([("a", b"x" * 99)]), held_out=Text([("b", b"y" * 99)]))
    with pytest.raises(ValueError, match="must have 65600 bytes, found 99"):
        held_out_batches(tiny)
