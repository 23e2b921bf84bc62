"""Tests of what forked children, such as a data loader's workers, do not inherit (case P25)."""

import os
import signal
import socket
import threading

import pytest

from exporter.page import Page
from exporter.serving import MetricsServer
from trainer_plugin.run_folder import RunLock

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def in_child(work) -> int:
    """The exit code of a forked child that does `work`, which must take no more than 5 s; 1 if it raises."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(5)
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_p25_a_worker_forked_while_the_page_is_held_does_not_hang():
    """A child forked at the moment in which another thread holds the page can write a metric, and ends."""
    page = Page(run="gpt-0")
    held, release = threading.Event(), threading.Event()

    def hold():
        with page.update():
            held.set()
            release.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    try:
        assert in_child(lambda: page.set("train_step", 1)) == 0
    finally:
        release.set()
        thread.join()
    assert page.value("train_step") is None


def test_p25_children_do_not_hold_the_port():
    """A child has no socket of the endpoint: the port is free as soon as the parent closes it."""
    server = MetricsServer(Page(run="gpt-0"), host="127.0.0.1", port=0)

    def look():
        assert server._server.socket.fileno() == -1

    assert in_child(look) == 0
    with socket.create_connection(("127.0.0.1", server.port), timeout=5):
        pass  # The parent still answers.
    server.close()


def test_a_worker_that_outlives_its_parent_does_not_keep_the_run(tmp_path):
    """The child's copy of the run's lock is closed, and the parent's own lock is not given up by that."""
    lock = RunLock(tmp_path / "lock")

    def look():
        assert lock._descriptor == -1

    assert in_child(look) == 0
    with pytest.raises(RuntimeError, match="in use"):
        RunLock(tmp_path / "lock")
    lock.release()
