"""Tests of what forked children, such as a data loader's workers, do not inherit (case P25)."""

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import urllib.request
from pathlib import Path

import pytest

from exporter.page import Page
from exporter.serving import MetricsServer
from trainer_plugin.guard import _close_all
from trainer_plugin.run_folder import RunLock
from trainer_plugin.stop_signals import StopSignals

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


def sockets():
    """The descriptors of this process that are sockets."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        # The descriptor of the listing itself is gone by now.
        with contextlib.suppress(FileNotFoundError):
            if str(path.readlink()).startswith("socket:"):
                found.append(int(path.name))
    return sorted(found)


def test_p25_a_fork_in_the_middle_of_a_scrape_harms_neither_side():
    """Forked while an answer is half sent, a child has no socket and can use the page; the scrape is sent to its end.

    Others are answered meanwhile, and the half-sent answer arrives whole though the child lives on.
    """
    before = sockets()
    page = Page(run="gpt-0")
    for layer in range(30_000):
        page.set("train_layer_grad_norm", 1.0, f"a.layer.with.a.long.name.{layer}")
    server = MetricsServer(page, host="127.0.0.1", port=0)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(5)
    client.connect(("127.0.0.1", server.port))
    client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    answer = client.recv(1)
    context = multiprocessing.get_context("fork")
    looked, end = context.Event(), context.Event()

    def look():
        assert sockets() == sorted([*before, client.fileno()])
        page.add("train_steps_total")
        assert len(page.render()) > 1_000_000
        looked.set()
        end.wait(8)

    child = context.Process(target=look)
    child.start()
    try:
        assert looked.wait(5)
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=5) as other:
            assert other.read() == page.render()
        while more := client.recv(1 << 20):
            answer += more
        assert answer.endswith(page.render())
    finally:
        end.set()
        child.join()
        client.close()
        server.close()
    assert child.exitcode == 0


def test_a_child_of_a_job_dies_of_sigterm():
    """The wish to end in order is the job's: a worker that is terminated ends at once, by the signal."""
    signals = StopSignals()
    signals.install()
    ready_in, ready_out = os.pipe()
    try:
        pid = os.fork()
        if pid == 0:
            os.write(ready_out, b"x")
            signal.alarm(5)
            while True:
                signal.pause()
        os.read(ready_in, 1)
        os.kill(pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.asked == "SIGTERM"  # The job's own listening goes on.
    finally:
        signals.remove()
        os.close(ready_in)
        os.close(ready_out)


def test_a_child_that_ends_in_order_does_not_close_its_parents_run(make_guard, tmp_path):
    """What a child does at its exit leaves the job's target, lock, endpoint and state as they are."""
    job = make_guard()
    job.run(2)
    assert in_child(_close_all) == 0
    assert in_child(job.guard.close) == 0
    assert (tmp_path / "runs/targets/tiny-0.json").exists()
    with pytest.raises(RuntimeError, match="in use"):
        RunLock(tmp_path / "runs/tiny/lock")
    with urllib.request.urlopen(f"http://127.0.0.1:{job.guard.metrics_port}/metrics", timeout=5) as answer:
        assert b'train_step{run="tiny",rank="0"} 2.0' in answer.read()
    job.run(4)
    assert job.guard.page.value("train_guard_errors_total") == 0


def test_a_worker_that_outlives_its_parent_does_not_keep_the_run(tmp_path):
    """The child's copy of the run's lock is closed, and the parent's own lock is not given up by that."""
    lock = RunLock(tmp_path / "lock")

    def look():
        assert lock._descriptor == -1

    assert in_child(look) == 0
    with pytest.raises(RuntimeError, match="in use"):
        RunLock(tmp_path / "lock")
    lock.release()
