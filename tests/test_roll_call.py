"""The roll call by a clock that is turned by hand: who is silent, who has died, and when the others end."""

import pytest
from training import Clock

from trainer_plugin.ranks import Ranks
from trainer_plugin.roll_call import RollCall


class Lines:
    """Lines on which nothing is sent but what a test says."""

    def __init__(self, ranks) -> None:
        self.open_to = set(ranks)
        self.sent = []
        self.hears = {}
        self.lost = None
        self.look = None

    def on(self, kind, hear):
        """As the lines."""
        self.hears[kind] = hear

    def on_lost(self, lost):
        """As the lines."""
        self.lost = lost

    def every(self, work):
        """As the lines."""
        self.look = work

    def send(self, kind, body=None, *, at_once):
        """As the lines."""
        assert at_once
        self.sent.append((kind, body))


class Call:
    """The first of three ranks, with a time-out of ten seconds."""

    def __init__(self, timeout_seconds=10.0) -> None:
        ranks = Ranks()
        ranks.hosts = ["a", "b", "c"]
        self.lines, self.clock, self.ended = Lines([1, 2]), Clock(), []
        RollCall(ranks, self.lines, timeout_seconds=timeout_seconds, end=self.ended.append, clock=self.clock)

    def wait(self, seconds, *here):
        """Seconds go by one after the other, in each of which these ranks are heard."""
        for _ in range(seconds):
            self.clock.now += 1.0
            for rank in here:
                self.lines.hears["here"](rank, None)
            self.lines.look()


@pytest.fixture
def call():
    """A roll call."""
    return Call()


def test_a_rank_that_is_heard_is_not_missed(call):
    """However long the training takes: what counts is that the rank says that it is there."""
    call.wait(1000, 1, 2)
    assert call.ended == []
    assert {kind for kind, _ in call.lines.sent} == {"here"}
    assert len(call.lines.sent) == 500


def test_a_silent_rank_ends_all(call):
    """After the time-out the others are told, and after a moment to end by itself this rank ends too."""
    call.wait(10, 1)
    assert call.ended == []
    call.wait(1, 1)
    said = "rank 2 on c is silent for 11 s (ranks.timeout_seconds is 10)"
    assert ("missing", said) in call.lines.sent
    call.wait(5, 1)
    assert call.ended == []
    call.wait(1, 1)
    assert call.ended == [f"rank 0 ends, as it cannot go on alone: {said}"]


def test_a_rank_that_has_died_is_missed_at_once(call):
    """Its line breaks: no time-out is waited for."""
    call.lines.open_to.discard(1)
    call.lines.lost(1)
    assert call.lines.sent == [("missing", "rank 1 on b has died")]
    call.wait(6, 2)
    assert call.ended[0].endswith("rank 1 on b has died")


def test_a_rank_that_has_left_is_not_missed(call):
    """Who has said good-bye may be silent."""
    call.lines.open_to.discard(1)
    call.wait(100, 2)
    assert call.ended == []


def test_others_hear_who_is_missing(call):
    """What another rank has found out ends this one."""
    call.lines.hears["missing"](1, "rank 7 on x has died")
    call.wait(6, 1, 2)
    assert call.ended == ["rank 0 ends, as it cannot go on alone: rank 7 on x has died"]


def test_a_job_that_was_suspended_goes_on(call):
    """All ranks stood still for an hour: none was silent, and from then on they are heard again, or missed."""
    call.wait(100, 1, 2)
    call.clock.now += 3600.0
    call.lines.look()
    call.wait(9, 1)
    assert call.ended == []
    call.wait(8, 1)
    assert "rank 2 on c is silent" in call.ended[0]


def test_without_a_time_out_nobody_is_missed():
    """Null switches the roll call off."""
    assert Call(timeout_seconds=None).lines.look is None
