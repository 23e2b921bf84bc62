"""Tests of the signals that ask a job to end: the step is finished, the run saved, and the old handlers come back."""

import os
import signal
import threading

import pytest

from trainer_plugin.stop_signals import StopSignals


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_at_the_next_boundary_and_stops(make_guard, sent):
    """The step under way is finished and saved at its end, whatever the period; then the loop is told to end."""
    job = make_guard()
    job.run(3)
    os.kill(os.getpid(), sent)
    assert not job.guard.stopping
    job.run(30)
    assert (job.guard.step, job.guard.stopping) == (4, True)
    assert [m.step for m in job.guard._parts.checkpoints.newest_first()] == [4]
    before = signal.getsignal(sent)
    job.guard.close()
    assert signal.getsignal(sent) != before


def test_the_programs_own_handler_is_called_too():
    """A handler that was there before hears of the signal, and is back afterwards."""
    heard = []

    def own(sent, _frame):
        heard.append(sent)

    before = signal.signal(signal.SIGUSR1, own)
    try:
        signals = StopSignals()
        signals.install()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (heard, signals.asked) == ([signal.SIGUSR1], "SIGUSR1")
        signals.remove()
        assert signal.getsignal(signal.SIGUSR1) is own
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2)])
def test_several_come_off_in_any_order(order):
    """Whichever of three is removed first, at the end the program's own handler is back, and none of them is asked."""
    before = signal.getsignal(signal.SIGUSR1)
    three = [StopSignals() for _ in range(3)]
    for one in three:
        one.install()
    three[order[0]].remove()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert [one.asked for one in three] == [None if place == order[0] else "SIGUSR1" for place in range(3)]
    for place in order[1:]:
        three[place].remove()
    assert signal.getsignal(signal.SIGUSR1) == before


def test_outside_the_main_thread_nothing_is_taken():
    """A guard in another thread leaves the process's handlers alone instead of failing."""
    before = signal.getsignal(signal.SIGTERM)
    signals = StopSignals()
    thread = threading.Thread(target=lambda: (signals.install(), signals.remove()))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
    assert signals.asked is None
