"""Where batches come from: real loaders, with workers that read ahead, go back to what was handed out."""

import multiprocessing
from itertools import islice

import pytest
import torch
from loaders import Samples, indices, loader
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from trainer_plugin.data.batches import Data, Quarantine
from trainer_plugin.data.sampler import IndexSampler
from trainer_plugin.data.source import source_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.timeout(60),  # Workers are processes.
]
# Five batches are an epoch: what is cut is the middle of the first and the second one, and the end of the first.
CUTS = [(kind, 0, cut) for kind in ("bare", "index", "stateful", "both") for cut in (3, 5, 7)]
CUTS += [("index", 2, 5), ("index", 2, 7), ("stateful", 2, 5), ("stateful", 2, 7), ("both", 2, 7)]


def draw(source, batches):
    """The samples of so many batches."""
    return [indices(source.draw()[0]) for _ in range(batches)]


def entry(*sample_ids, first=0, last=0):
    """Something suspect."""
    return Quarantine(first=first, last=last, incident=1, reason="test", sample_ids=sample_ids)


@pytest.mark.parametrize(("kind", "workers", "cut"), CUTS)
def test_a_loader_goes_back_and_a_new_one_goes_on(kind, workers, cut):
    """C15, C17: from any place in an epoch the same loader, and one of a new process, draw the same as before."""
    torch.manual_seed(1)
    source = source_of(loader(kind, workers=workers))
    used = draw(source, cut)
    state = source.state_dict()
    rest = draw(source, 10 - cut)
    for epoch in range(2):
        assert sorted(i for batch in (used + rest)[5 * epoch : 5 * epoch + 5] for i in batch) == list(range(20))
    source.load_state_dict(state)
    assert draw(source, 10 - cut) == rest
    torch.manual_seed(2)
    other = source_of(loader(kind, workers=workers))
    other.load_state_dict(state)
    assert draw(other, 10 - cut) == rest


@pytest.mark.parametrize(("kind", "workers"), [("index", 2), ("stateful", 2)])
def test_c16_the_second_and_third_resume_are_as_exact_as_the_first(kind, workers):
    """Resumed at 3, at 4, and taken back to 6, a loader has used the undisturbed order and nothing else."""
    torch.manual_seed(1)
    source = source_of(loader(kind, workers=workers))
    state, whole = source.state_dict(), draw(source, 8)
    used = []
    for batches in (3, 1, 2):
        source = source_of(loader(kind, workers=workers))
        source.load_state_dict(state)
        used += draw(source, batches)
        state = source.state_dict()
    draw(source, 1)
    source.load_state_dict(state)
    assert used + draw(source, 2) == whole


@pytest.mark.parametrize("kind", ["index", "stateful"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_is_back_does_not_draw_from_torchs_generator(kind, workers):
    """A loader seeds its workers from torch's generator when it begins: not after that has been restored."""
    source = source_of(loader(kind, workers=workers))
    draw(source, 2)
    data, generator = source.state_dict(), torch.get_rng_state()
    source.load_state_dict(data)
    torch.set_rng_state(generator)
    draw(source, 3)
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize("options", [{"persistent_workers": True}, {"prefetch_factor": 4}])
def test_workers_that_stay_or_read_far_ahead_change_nothing(options):
    """Going back in the middle of an epoch is as exact with workers that outlive it."""
    source = source_of(loader("index", workers=2, **options))
    plain = draw(source_of(loader("index")), 12)
    assert draw(source, 7) == plain[:7]
    state = source.state_dict()
    draw(source, 4)
    source.load_state_dict(state)
    assert draw(source, 5) == plain[7:]


def test_who_looks_at_the_loader_meanwhile_moves_nothing():
    """A second loop over the same loader, to evaluate say, leaves the training where it was."""
    batches = loader("index")
    source, plain = source_of(batches), draw(source_of(loader("index")), 10)
    used = draw(source, 2)
    assert len(list(batches)) == 3
    assert used + draw(source, 8) == plain


def test_a_closed_guard_has_no_workers(make_guard):
    """They end with it, and do not wait for the garbage collector, in whose hands torch waits 5 s for each of them."""
    before = set(multiprocessing.active_children())
    job = make_guard(data=loader("index", workers=2))
    job.guard.next_batch()
    assert len(set(multiprocessing.active_children()) - before) == 2
    job.guard.close()
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_are_left_out_for_good(workers):
    """Suspect ids are in no batch from the state on that is loaded next: in this epoch, the next, a new process."""
    data = Data(loader("index", workers=workers, size=40))
    whole = [indices(data.next_batch(step)[0]) for step in range(1, 7)]
    state, bad = data.state_dict(), [whole[2][1], whole[3][0]]
    data.quarantine = [entry(*map(str, bad), first=2, last=3)]
    data.load_state_dict({"position": 2, "source": {**state["source"], "place": 8}})
    wanted = [index for batch in whole[2:] for index in batch if index not in bad]
    again = [index for step in range(3, 7) for index in indices(data.next_batch(step)[0])]
    assert again[: len(wanted)] == wanted
    assert data.next_batch(7)[1] == 0  # By the samples, and not by their batches as well.
    other = Data(DataLoader(Samples(40), batch_sampler=IndexSampler(40, batch_size=6, seed=5)))
    other.quarantine = data.quarantine
    for batches in (7, 7):  # 38 samples in batches of six.
        epoch = [index for step in range(batches) for index in indices(other.next_batch(step)[0])]
        assert sorted(epoch) == [index for index in range(40) if index not in bad]


def test_what_is_left_out_is_not_handed_out_though_it_was_read_ahead():
    """From the next batch on a suspect id is gone, and the place is still that of what was handed out."""
    source, whole = source_of(loader("index", workers=2, size=40)), draw(source_of(loader("index", size=40)), 10)
    draw(source, 2)
    assert source.leave_out([[str(whole[2][0])]]) == [True]
    used = draw(source, 2)
    assert [index for batch in used for index in batch] == [index for batch in whole[2:] for index in batch][1:9]
    other = source_of(loader("index", size=40))
    other.leave_out([[str(whole[2][0])]])
    other.load_state_dict(source.state_dict())
    assert draw(other, 3) == draw(source, 3)


def test_the_sampler_knows_what_is_suspect_and_what_will_be():
    """Without a word from the loop the ids of a window are known, over an epoch's end, run already or still to come."""
    data = Data(loader("index", workers=2))
    whole = draw(source_of(loader("index")), 10)
    for step in range(1, 5):
        data.next_batch(step)
        data.tell(["nonsense"])
    found = data.suspect(3, 7, incident=1, reason="test")
    assert (found.first, found.last) == (2, 6)
    assert found.sample_ids == tuple(dict.fromkeys(str(index) for batch in whole[2:7] for index in batch))


def test_more_than_a_tenth_of_the_data_is_not_left_out_for_good():
    """A window that is long against the data set is left out once, by its positions; ids of another still are."""
    data = Data(loader("index", size=40))
    whole = draw(source_of(loader("index", size=40)), 20)
    wide = entry(*(str(index) for batch in whole[1:4] for index in batch), first=1, last=3)
    data.quarantine = [entry("7"), wide]
    first, left_out = data.next_batch(1)
    assert left_out == 0
    second, left_out = data.next_batch(2)
    assert left_out == 3
    rest = [indices(data.next_batch(step)[0]) for step in range(3, 18)]
    used = [index for batch in [indices(first), indices(second), *rest] for index in batch]
    assert 7 not in used
    assert set(used) == set(range(40)) - {7}


def test_samples_are_not_left_out_where_they_count_less():
    """With a weight the batches stay as they are: it is theirs, and not the samples'."""
    data = Data(loader("index", size=40), suspect_weight=0.5)
    data.quarantine = [entry("0", first=0, last=0)]
    assert [indices(data.next_batch(1)[0])] == draw(source_of(loader("index", size=40)), 1)
    assert data.weight(1) == 0.5


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"batch_sampler": None, "batch_size": 4}, "as `batch_sampler`, not as `sampler`"),
        ({"in_order": False}, "in_order"),
    ],
)
def test_a_loader_that_the_sampler_cannot_work_in_is_refused(options, told):
    """Given as `sampler`, or to a loader that mixes its workers' batches: told before anything is trained."""
    sampler = IndexSampler(20, batch_size=4)
    given = {"batch_sampler": sampler, "num_workers": 2, **options}
    if given["batch_sampler"] is None:
        del given["batch_sampler"]
        given["sampler"] = sampler
    with pytest.raises(ValueError, match=told):
        source_of(DataLoader(Samples(20), **given))


def test_a_plain_loader_goes_on_forward():
    """A loader with a sampler of torch's own has no place to go back to."""
    source = source_of(DataLoader(Samples(8), batch_size=4, shuffle=True))
    assert not source.rewindable
    assert source.state_dict() is None
    assert len(list(islice(iter(source.draw, None), 5))) == 5


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # What torchdata calls of torch.
@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_each_epoch_of_a_distributed_sampler_has_an_order_of_its_own(stateful, own):
    """The loop does not see where an epoch ends, and the sampler has to be told; a loop that tells it is left alone.

    What goes back over the end of an epoch has the order of before.
    """
    dataset = Samples(20)
    sampler = DistributedSampler(dataset, num_replicas=2, rank=1, seed=0)
    kind = StatefulDataLoader if stateful else DataLoader
    data = Data(kind(dataset, batch_size=2, sampler=sampler))
    used = [indices(data.next_batch(step)[0]) for step in range(1, 4)]
    state = data.state_dict()
    used += [indices(data.next_batch(step)[0]) for step in range(4, 6)]
    if own:
        sampler.set_epoch(7)
    later = [indices(data.next_batch(step)[0]) for step in range(6, 11)]
    sampler.set_epoch(7 if own else 1)
    assert [index for batch in later for index in batch] == list(sampler)
    assert later != used
    if stateful:
        data.load_state_dict(state)
        assert [indices(data.next_batch(step)[0]) for step in range(4, 6)] == used[3:]
