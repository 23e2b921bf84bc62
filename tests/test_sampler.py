"""The index sampler: each sample once an epoch, in an order that any process, rank and batch size agrees on."""

import json
import math
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_plugin.data.sampler import IndexSampler


def flat(batches):
    """The samples of some batches, in order."""
    return [index for batch in batches for index in batch]


def copy_of(sampler, **options):
    """Another sampler at the same place, as after a restart: the state goes through JSON."""
    size, seed = sampler.size, sampler.state_dict()["seed"]
    other = IndexSampler(size, **{"batch_size": 4, "seed": seed, **options})
    other.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    return other


def test_the_order_is_that_of_seed_and_epoch_for_good():
    """These very numbers come with every release of numpy and on every machine: a run must be able to go on."""
    sampler = IndexSampler(10, batch_size=5, seed=7)
    assert list(sampler) == [[8, 4, 1, 6, 3], [2, 7, 5, 9, 0]]
    assert list(sampler) == [[3, 9, 1, 6, 2], [5, 4, 8, 0, 7]]
    assert list(IndexSampler(10, batch_size=10, seed=8)) == [[9, 8, 4, 3, 1, 6, 7, 2, 5, 0]]


def test_every_epoch_has_each_sample_once_in_an_order_of_its_own():
    """Three epochs are three permutations; without shuffling each is the order of the data set."""
    sampler = IndexSampler(100, batch_size=7, seed=1)
    epochs = [flat(sampler) for _ in range(3)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert flat(IndexSampler(10, batch_size=4, shuffle=False)) == list(range(10))


@pytest.mark.parametrize("epoch", [0, 2])
def test_c15_what_is_left_of_an_epoch_comes_once_and_in_order(epoch):
    """64 samples shuffled, stopped at 20: a new process has the other 44, each once, as the undisturbed run does."""
    sampler = IndexSampler(64, batch_size=4, seed=3)
    for _ in range(epoch):
        list(sampler)
    whole = flat(copy_of(sampler))
    first = flat(islice(sampler, 5))
    rest = flat(copy_of(sampler))
    assert first + rest == whole
    assert sorted(first + rest) == list(range(64))


def test_c16_a_second_and_third_resume_are_as_exact_as_the_first():
    """Resumed at 30, at 40, and taken back to 35: what is used, joined together, is the undisturbed order."""
    whole = flat(IndexSampler(60, batch_size=1))
    sampler = IndexSampler(60, batch_size=1)
    used = flat(islice(sampler, 30))
    sampler = copy_of(sampler, batch_size=1)
    used += flat(islice(sampler, 5))
    at_35 = sampler.state_dict()
    flat(islice(sampler, 5))
    sampler = copy_of(sampler, batch_size=1)
    flat(islice(sampler, 5))
    sampler.load_state_dict(at_35)
    assert used + flat(sampler) == whole


def test_c17_a_state_of_an_epochs_end_leads_into_the_next_one():
    """Saved when the last batch has come but the end was not seen yet, it yields nothing once, then epoch 1."""
    sampler = IndexSampler(12, batch_size=4)
    batches = iter(sampler)
    for _ in range(3):
        next(batches)
    other = copy_of(sampler)
    assert next(batches, None) is None
    assert [list(other), list(other)] == [[], list(sampler)]
    assert (other.epoch, other.place) == (2, 0)


@pytest.mark.parametrize(("size", "drop_last", "each"), [(24, False, 4), (26, False, 4), (29, False, 5), (29, True, 4)])
def test_the_ranks_share_an_epoch(size, drop_last, each):
    """With 3 ranks of 2 samples each sample comes on one rank, all have as many, and batches are those of one rank."""
    ranks = [IndexSampler(size, batch_size=2, rank=rank, world_size=3, drop_last=drop_last) for rank in range(3)]
    parts = [list(rank) for rank in ranks]
    assert [len(part) for part in parts] == [each] * 3 == [len(rank) for rank in ranks]
    assert [[len(batch) for batch in part] for part in parts].count([len(batch) for batch in parts[0]]) == 3
    joined = [[index for row in zip(*batches, strict=True) for index in row] for batches in zip(*parts, strict=True)]
    assert flat(joined) == flat(IndexSampler(size, batch_size=6))[: len(flat(joined))]
    assert size - len(flat(joined)) < (6 if drop_last else 3)


@given(
    size=st.integers(1, 60),
    seed=st.integers(0, 2**64 - 1),
    splits=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=4),
    bad=st.sets(st.integers(0, 59), max_size=20),
)
def test_whatever_the_split_nothing_comes_twice_or_is_lost(size, seed, splits, bad):
    """Over any changes of ranks and batch size an epoch has each sample once, but for those that are left out.

    What is lost at its end is less than a sample a rank.
    """
    left_out = frozenset(map(str, bad))
    state, used = IndexSampler(size, batch_size=1, seed=seed).state_dict(), []
    for place, (world_size, batch_size, batches) in enumerate(splits):
        ranks = [IndexSampler(size, batch_size=batch_size, seed=seed, rank=rank, world_size=world_size)
                 for rank in range(world_size)]  # fmt: skip
        for rank in ranks:
            rank.load_state_dict(state)
            rank.left_out = left_out
        count = math.inf if place == len(splits) - 1 else batches
        drawn = [list(islice(rank, None if count == math.inf else count)) for rank in ranks]
        assert len({tuple(map(len, part)) for part in drawn}) == 1
        used += [index for part in drawn for index in flat(part)]
        state = ranks[0].state_dict()
        if state["epoch"]:
            break
    assert len(used) == len(set(used))
    good = set(range(size)) - bad
    assert set(used) <= good
    if state["epoch"]:
        assert len(good) - len(used) < world_size


def test_samples_are_left_out_by_their_ids_in_every_epoch():
    """Batches stay full: the next sample comes forward; the sampler says which ids were at which places."""
    sampler = IndexSampler(10, batch_size=4, shuffle=False, sample_id=lambda index: f"file{index}")
    sampler.left_out = frozenset({"file1", "file2", "file9"})
    assert list(sampler) == list(sampler) == [[0, 3, 4, 5], [6, 7, 8]]
    assert sampler.sample_ids(1, 1, 4) == ["file1", "file2", "file3"]


def test_nothing_left_is_an_empty_epoch():
    """With every sample left out an epoch is empty, and the next one too."""
    sampler = IndexSampler(3, batch_size=2)
    sampler.left_out = frozenset("012")
    assert [list(sampler), list(sampler)] == [[], []]


def test_another_iterator_does_not_disturb_one_under_way():
    """Who only looks at a first batch moves nobody else."""
    sampler = IndexSampler(8, batch_size=2, shuffle=False)
    batches = iter(sampler)
    assert next(batches) == [0, 1]
    assert next(iter(sampler)) == [2, 3]
    assert list(batches) == [[2, 3], [4, 5], [6, 7]]


def test_another_split_is_said(caplog):
    """A place saved by two ranks and taken up by three is told by the first of them, with the place."""
    sampler = IndexSampler(64, batch_size=4, world_size=2)
    list(islice(sampler, 3))
    copy_of(sampler, rank=2, world_size=3)
    assert "data: split" not in caplog.text
    copy_of(sampler, rank=0, world_size=3)
    assert "data: split over 3 ranks, before it was 2: from sample 24 of epoch 0 on" in caplog.text


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"size": 0}, "`size` must be at least 1, found 0"),
        ({"batch_size": 0}, "`batch_size` must be at least 1, found 0"),
        ({"world_size": 0}, "`world_size` must be at least 1, found 0"),
        ({"rank": 2, "world_size": 2}, "`rank` must be at least 0 and below world_size 2, found 2"),
        ({"seed": -1}, "`seed` must be at least 0 and below 2\\^64, found -1"),
    ],
)
def test_a_number_out_of_its_range_is_refused(options, told):
    """The option, what was wanted and what was found."""
    with pytest.raises(ValueError, match=told):
        IndexSampler(**{"size": 8, "batch_size": 2, **options})


def test_an_id_that_is_no_text_is_refused():
    """Ids are compared with those of a file of text: a number would never be found there."""
    with pytest.raises(TypeError, match="`sample_id` must give a text, found 0 for sample 0"):
        IndexSampler(8, batch_size=2, sample_id=int)


@pytest.mark.parametrize("options", [{"seed": 1}, {"size": 9}, {"shuffle": False}])
def test_a_place_in_another_order_is_refused(options):
    """With another seed or data set the place means other samples: some would come twice and others never."""
    state = IndexSampler(8, batch_size=2).state_dict()
    with pytest.raises(ValueError, match="a place in the order of"):
        IndexSampler(**{"size": 8, "batch_size": 2, **options}).load_state_dict(state)
