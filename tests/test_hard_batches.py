"""Hard batches: which outliers are a kind of batch, and which are not."""

import json

from trainer_plugin.detection.detectors import Verdict
from trainer_plugin.detection.hard_batches import HardBatches


def outlier(step, rise=1.0):
    """The robust detector's word about a loss so much above its level."""
    return Verdict(detector="robust", signal="loss", step=step, value=2.0 + rise, baseline=2.0, first_step=step)


def show(batches, steps, *, every, rise=1.0):
    """Show some steps, each so-and-so-manieth an outlier; what was said of each."""
    return [batches.update(outlier(step, rise) if step % every == 0 else None) for step in range(1, steps + 1)]


def test_outliers_that_come_again_and_again_are_known_from_the_fifth_on():
    """Every tenth batch: from the fifth of them on, and in the steps between."""
    said = show(HardBatches(), 100, every=10)
    assert said == [False] * 49 + [True] * 51


def test_what_comes_rarely_is_not_known():
    """Fewer than five in 500 values are each a fault of their own."""
    assert not any(show(HardBatches(), 2000, every=126))


def test_what_goes_on_is_another_thing():
    """Two or three in a row come by chance; the fourth is a fault, and all that was known is forgotten."""
    batches = HardBatches()
    show(batches, 101, every=10)
    assert [batches.update(outlier(step)) for step in range(102, 107)] == [True, True, True, False, False]
    assert not any(show(batches, 39, every=10))


def test_what_is_much_higher_is_another_thing():
    """A batch more than twice as far out is none of the kind."""
    batches = HardBatches()
    show(batches, 105, every=10)
    assert batches.update(outlier(106, rise=2.1)) is False
    assert batches.update(None) is True


def test_a_state_put_back_goes_on_the_same():
    """Through JSON."""
    first, second = HardBatches(), HardBatches()
    show(first, 48, every=10)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert show(first, 30, every=7) == show(second, 30, every=7)
