"""The training data: batches in order, epochs joined, positions that go back, and quarantined batches left out."""

import pytest

from trainer_plugin.data.batches import Data, Quarantine


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
    data.quarantine = [quarantine(2, 4)]
    assert [data.next_batch(step) for step in range(1, 5)] == [(0, 0), (1, 0), (5, 3), (6, 0)]
    assert data.position == 7


def test_a_quarantine_does_not_go_back():
    """What was quarantined since a state was taken is left out when that state is back."""
    data = Data(Sampler())
    state = data.state_dict()
    draw(data, 6)
    data.quarantine = [quarantine(3, 4)]
    data.load_state_dict(state)
    assert draw(data, 6) == [0, 1, 2, 5, 6, 7]


def test_a_quarantine_is_about_positions_and_not_about_epochs():
    """The same batch of the next epoch is another position, and is trained on; a whole epoch may be left out."""
    data = Data(Sampler(3))
    data.quarantine = [quarantine(1, 1)]
    assert draw(data, 5) == [0, 2, 0, 1, 2]
    data.quarantine = [*data.quarantine, quarantine(6, 30)]
    assert data.next_batch(6) == (1, 25)


def suspect(data, first_step, last_step):
    """First and last position of the data of these steps, or None."""
    entry = data.suspect(first_step, last_step, incident=1, reason="test")
    return entry and (entry.first, entry.last)


def test_suspect_data_are_those_of_the_steps():
    """The positions that a stretch of steps was handed are known, left out ones apart."""
    data = Data(Sampler())
    data.quarantine = [quarantine(3, 4)]
    draw(data, 8)
    assert suspect(data, 2, 3) == (1, 2)
    assert suspect(data, 3, 4) == (2, 5)
    assert suspect(data, -3, 1) == (0, 0)
    assert suspect(data, 7, 8) == (8, 9)
    assert suspect(data, 50, 60) is None


def test_suspect_data_of_steps_to_come():
    """A step that was not run yet will have as many batches as the last one had."""
    data = Data(Sampler())
    for step in (1, 1, 2, 2, 2, 3, 3, 3):
        data.next_batch(step)
    assert suspect(data, 2, 2) == (2, 4)
    assert suspect(data, 2, 5) == (2, 13)
    assert suspect(data, 4, 5) is None


def test_suspect_data_are_those_of_the_last_run_of_a_step():
    """After going back and leaving data out, a step's positions are the ones that it was handed the second time."""
    data = Data(Sampler())
    draw(data, 3)
    state = data.state_dict()
    draw(data, 5, 4)
    data.quarantine = [quarantine(3, 6)]
    data.load_state_dict(state)
    draw(data, 2, 4)
    assert suspect(data, 4, 4) == (7, 7)
    assert suspect(data, 3, 5) == (2, 8)


def test_suspect_data_have_the_ids_that_were_told():
    """What the loop tells belongs to the batch handed out last, and is forgotten where that will come again."""
    data = Data(Sampler())
    state = None
    for step in range(1, 7):
        state = data.state_dict() if step == 4 else state
        for half in "ab":
            data.next_batch(step)
            data.tell([f"{step}{half}", 7])
    assert data.suspect(2, 3, incident=1, reason="test").sample_ids == ("2a", "7", "2b", "3a", "3b")
    data.load_state_dict(state)
    data.next_batch(4)
    assert data.suspect(3, 9, incident=1, reason="test").sample_ids == ("3a", "7", "3b")


def test_what_goes_on_forward_is_suspect_by_its_ids_only():
    """Positions of a list mean nothing to the next process; ids do to whoever makes its batches."""
    data = Data(list(range(10)))
    draw(data, 4)
    assert suspect(data, 2, 3) is None
    data.tell(["x"])
    assert data.suspect(4, 4, incident=1, reason="test").sample_ids == ("x",)
    data = Data(list(range(10)))
    data.quarantine = [quarantine(0, 4)]
    assert draw(data, 3) == [0, 1, 2]


def test_a_source_that_cannot_go_back_says_so_once(caplog):
    """The first time that it should go back there is a line, with both places; later there is none."""
    data = Data(list(range(10)))
    draw(data, 4)
    for _ in range(2):
        data.load_state_dict({"position": 2, "source": None})
    assert [record.getMessage() for record in caplog.records] == [
        "data cannot go back: it goes on with its batch 4, the weights were at batch 2"
    ]


def test_a_state_of_another_source_is_refused_in_one_line():
    """What a source makes of a state that is not its own is told as one kind of error."""
    state = Data(Sampler()).state_dict()
    with pytest.raises(ValueError, match="data does not take the state that it was saved with: KeyError"):
        Data(Sampler()).load_state_dict({**state, "source": {"other": 1}})


def test_reweighted_data_are_handed_out():
    """With a weight above 0 nothing is left out; a step with a suspect batch has the weight, any other has 1."""
    data = Data(Sampler(), suspect_weight=0.25)
    data.quarantine = [quarantine(3, 4)]
    weights = []
    for step in range(1, 5):
        assert [data.next_batch(step) for _ in range(2)] == [(2 * step - 2, 0), (2 * step - 1, 0)]
        weights.append(data.weight(step))
    assert weights == [1.0, 0.25, 0.25, 1.0]
    assert data.weight(5) == 1.0
