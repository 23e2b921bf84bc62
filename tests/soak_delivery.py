"""Delivery at length (`make soak`): twenty incidents in five minutes, and a heartbeat that never lapses meanwhile."""

import threading
import time
from itertools import pairwise

import pytest
from test_delivery import all_well, delivered, inbox, incidents, live_through
from test_loop import a_run, wait_for

from trainer_plugin.control_loop import HEARTBEAT_TIMEOUT_SECONDS, ControlLoop

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

WATCHED_SECONDS = 300.0


def test_twenty_incidents_are_twenty_commands_and_the_heartbeat_goes_on(tmp_path):
    """Twenty incidents 3 to 20 s apart lead to twenty commands, each in time; the job never takes the loop for down."""
    planned = incidents(20)
    with a_run(tmp_path) as (folder, page, stack):
        all_well(page, stack)
        wait_for(folder.outer.heartbeat, 60.0)
        errors, beats, lapses = [], [], []
        loop = ControlLoop(folder, on_error=errors.append)
        loop.start()
        stop, began = threading.Event(), time.monotonic()

        def listen():
            """Every beat, and every look at which the job would have acted alone."""
            while not stop.wait(0.1):
                beat = folder.outer.heartbeat()
                if beat is not None and (not beats or beat.received != beats[-1]):
                    beats.append(beat.received)
                if len(beats) > 2 and not loop.up:
                    lapses.append(time.monotonic() - began)

        listener = threading.Thread(target=listen)
        listener.start()
        try:
            live_through(page, planned)
            commands = wait_for(lambda: len(folder.inbox.waiting()) >= len(planned) and folder.inbox.waiting())
            kept = inbox(folder)
            wait_for(lambda: delivered(stack, "not_actionable") == len(planned))
            threading.Event().wait(max(0.0, began + WATCHED_SECONDS - time.monotonic()))
        finally:
            stop.set()
            listener.join()
            loop.stop()
        gaps = [later - earlier for earlier, later in pairwise(beats)]
        print(
            f"largest gap between {len(beats)} heartbeats: {max(gaps):.1f} s; last {time.time() - beats[-1]:.1f} s ago"
        )
        assert [command.alert for command in commands] == [each.alert for each in planned]
        assert inbox(folder) == kept
        assert (delivered(stack, "queued"), delivered(stack, "duplicate")) == (len(planned), 0)
        assert (errors, lapses) == ([], [])
        assert max(gaps) < HEARTBEAT_TIMEOUT_SECONDS
