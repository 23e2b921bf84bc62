"""The assembly: reports to the first rank, its word to all, and an end to waiting."""

import threading

import pytest

from trainer_plugin.checkpoints.assembly import Assembly
from trainer_plugin.ranks import Ranks


class Line:
    """Both ends of one line: what one rank sends, the other hears."""

    def __init__(self, open_to) -> None:
        self.open_to = open_to
        self.hears = {}
        self.other = None

    def on(self, kind, hear):
        """As the lines."""
        self.hears[kind] = hear

    def send(self, kind, body):
        """As the lines, from rank 1 or to it."""
        self.other.hears[kind](1 if 0 in self.open_to else 0, body)


@pytest.fixture
def two():
    """The assemblies of two ranks."""
    first, second = Line({1}), Line({0})
    first.other, second.other = second, first
    other = Ranks()
    other.rank, other.first = 1, False
    return Assembly(Ranks(), first), Assembly(other, second), first


def test_the_word_comes_when_all_have_reported(two):
    """The first rank has what each has reported, once; what it says then all hear, itself too."""
    first, second, _ = two
    heard = []
    waits = threading.Thread(target=lambda: heard.append(second.word("a", 10.0)))
    waits.start()
    first.report("a/part", {"files": 1})
    second.report("a/part", {"files": 2})
    parts = first.collect("a/part", (0, 1), 10.0)
    first.give("a", {"whole": True})
    waits.join(10.0)
    assert parts == {0: {"files": 1}, 1: {"files": 2}}
    assert heard == [first.word("a", 1.0)] == [{"whole": True}]
    with pytest.raises(TimeoutError):
        first.collect("a/part", (0,), 0.0)


def test_a_rank_that_does_not_report_is_named(two):
    """When the time is over, or at once when it is gone; so is a first rank that says nothing."""
    first, second, line = two
    first.report("a/part", {})
    with pytest.raises(TimeoutError, match="rank 1 has not answered within 0 s"):
        first.collect("a/part", (0, 1), 0.0)
    line.open_to.clear()
    with pytest.raises(TimeoutError, match="rank 1 is gone"):
        first.collect("a/part", (0, 1), 100.0)
    line.other.open_to.clear()
    with pytest.raises(TimeoutError, match="rank 0"):
        second.word("a", 100.0)


def test_what_nobody_takes_is_not_kept_for_ever(two):
    """Reports and words that came too late are let go, the oldest first."""
    first, _, _ = two
    for number in range(1500):
        first.report(f"{number}", {})
    assert len(first._reports) == 1000
    assert first.collect("1499", (0,), 0.0) == {0: {}}
