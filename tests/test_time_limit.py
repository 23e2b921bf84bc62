"""Work with a time limit: its result, its error, or the end of waiting."""

import threading

import pytest

from trainer_plugin.checkpoints.time_limit import within


def test_what_ends_in_time_gives_its_result_or_its_error():
    """The caller sees what the work returned or raised."""
    assert within(60.0, divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        within(60.0, divmod, 7, 0)


def test_what_hangs_is_left_behind():
    """The caller goes on, and hears what it was."""
    end = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer within 0 s"):
        within(0.01, end.wait, 60.0)
    end.set()
