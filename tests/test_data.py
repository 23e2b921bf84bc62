"""The training data: batches in order, epochs joined, positions that go back, and quarantined batches left out."""

import pytest

from trainer_plugin.data import Data, Quarantine


class Sampler:
    """Ten batches an epoch, numbered; it can go back."""

    def __init__(self, batches=10):
        self.batches = batches
        self.drawn = 0

    def __iter__(self):
        # As loaders do, an iterator under way takes no notice of a state that is loaded meanwhile.
        for number in range(self.drawn, self.batches):
            self.drawn = number + 1
            yield number
        self.drawn = 0

    def state_dict(self):
        """How many batches of this epoch are drawn."""
        return {"drawn": self.drawn}

    def load_state_dict(self, state):
        """Go back."""
        self.drawn = state["drawn"]


def draw(data, steps, first_step=1):
    """The batches of these many steps."""
    return [data.next_batch(first_step + i)[0] for i in range(steps)]


def quarantine(first, last):
    """A quarantined stretch."""
    return Quarantine(first=first, last=last, incident=1, reason="test")


@pytest.mark.parametrize("source", [[0, 1, 2], Sampler(3)])
def test_epochs_are_joined(source):
    """After the last batch comes the first one again; positions go on."""
    data = Data(source)
    assert draw(data, 8) == [0, 1, 2, 0, 1, 2, 0, 1]
    assert data.position == 8


@pytest.mark.parametrize("source", [[], iter(())])
def test_an_empty_source_is_said_to_be_empty(source):
    """Without a single batch there is an error and not an endless search."""
    with pytest.raises(ValueError, match="data yields no batch"):
        Data(source).next_batch(1)


def test_only_a_source_with_both_methods_can_go_back():
    """A list goes on forward; what has `state_dict` and `load_state_dict` can go back."""
    half = type("Half", (list,), {"state_dict": lambda _: {}})
    assert Data(Sampler()).rewindable
    assert not Data([1]).rewindable
    assert not Data(half([1])).rewindable


@pytest.mark.parametrize("cut", [1, 9, 10, 11, 20, 25])
def test_a_state_put_back_gives_the_same_batches(cut):
    """A new source with the state of another, at an epoch's end too, yields what the first one yields."""
    first = Data(Sampler())
    draw(first, cut)
    second = Data(Sampler())
    second.load_state_dict(first.state_dict())
    assert second.position == cut
    assert draw(second, 25, cut + 1) == draw(first, 25, cut + 1)
    assert second.position == first.position


def test_going_back_gives_the_same_batches_again():
    """The same object taken back in the middle of an epoch draws the same batches once more."""
    data = Data(Sampler())
    draw(data, 14)
    state = data.state_dict()
    batches = draw(data, 20, 15)
    data.load_state_dict(state)
    assert draw(data, 20, 15) == batches


def test_a_source_that_cannot_go_back_goes_on_forward():
    """With a plain list a restore changes neither the batches nor the position."""
    data = Data(list(range(10)))
    state = data.state_dict()
    draw(data, 4)
    data.load_state_dict(state)
    assert (data.position, draw(data, 2, 5)) == (4, [4, 5])


def test_quarantined_batches_are_left_out_and_counted():
    """Batches from the first to the last quarantined position are not handed out; the next one tells how many."""
    data = Data(Sampler())
    data.quarantine.append(quarantine(2, 4))
    assert [data.next_batch(step) for step in range(1, 5)] == [(0, 0), (1, 0), (5, 3), (6, 0)]
    assert data.position == 7


def test_a_quarantine_does_not_go_back():
    """What was quarantined since a state was taken is left out when that state is back."""
    data = Data(Sampler())
    state = data.state_dict()
    draw(data, 6)
    data.quarantine.append(quarantine(3, 4))
    data.load_state_dict(state)
    assert draw(data, 6) == [0, 1, 2, 5, 6, 7]


def test_a_quarantine_is_about_positions_and_not_about_epochs():
    """The same batch of the next epoch is another position, and is trained on; a whole epoch may be left out."""
    data = Data(Sampler(3))
    data.quarantine.append(quarantine(1, 1))
    assert draw(data, 5) == [0, 2, 0, 1, 2]
    data.quarantine.append(quarantine(6, 30))
    assert data.next_batch(6) == (1, 25)


def test_positions_of_steps():
    """The positions that a stretch of steps was handed are known, quarantined ones apart."""
    data = Data(Sampler())
    data.quarantine.append(quarantine(3, 4))
    draw(data, 8)
    assert data.positions(2, 3) == (1, 2)
    assert data.positions(3, 4) == (2, 5)
    assert data.positions(-3, 1) == (0, 0)
    assert data.positions(7, 99) == (8, 9)
    assert data.positions(50, 60) is None


def test_positions_of_a_step_with_several_batches():
    """All batches of an accumulated step are its own."""
    data = Data(Sampler())
    for step in (1, 1, 1, 2, 2, 2):
        data.next_batch(step)
    assert data.positions(2, 2) == (3, 5)


def test_positions_are_those_of_the_last_run_of_a_step():
    """After going back and leaving data out, a step's positions are the ones that it was handed the second time."""
    data = Data(Sampler())
    draw(data, 3)
    state = data.state_dict()
    draw(data, 5, 4)
    data.quarantine.append(quarantine(3, 6))
    data.load_state_dict(state)
    draw(data, 2, 4)
    assert data.positions(4, 4) == (7, 7)
    assert data.positions(3, 5) == (2, 8)
