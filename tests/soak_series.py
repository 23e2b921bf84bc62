"""Long and large runs (`make soak`): the page of 10,000 steps, and 200 forked workers under a scraper in a hurry."""

import multiprocessing
import threading
import urllib.request

import pytest
import torch
from test_guard_page import EVENTFUL, Stack, live_through, names, restart, scrape
from torch.utils.data import DataLoader, Dataset

from exporter.page import Page
from exporter.serving import MetricsServer

pytestmark = [
    pytest.mark.soak,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scaled", [False, True])
def test_p24_10_000_steps_have_no_more_series_than_the_first(tmp_path, scaled):
    """10,000 steps on 48 layers with 50 spikes and 5 rollbacks end with the series of step 1."""
    job = Stack(tmp_path, layers=48, scaled=scaled, checkpoints={"every": 50}, **EVENTFUL)
    try:
        first = None
        for number in live_through(job, steps=10_030, spikes=50, rollbacks=5):
            first = names(job) if number == 1 else first
            if number % 100 == 0:
                assert names(job) == first, number
        assert names(job) == first
        assert job.guard.page.value("train_actions_total", "rollback", "local", "done") == 5
        assert job.guard.page.value("train_detections_total", "robust", "loss") >= 50
        assert job.guard.page.value("train_guard_errors_total") == 0
        assert "train_step{" in scrape(job.guard.metrics_port)
    finally:
        job.guard.close()


@pytest.mark.timeout(300)
def test_p22_a_hundred_restarts_leave_one_target(tmp_path):
    """Built a hundred times without a close, a run has one target, one endpoint, and its counter goes on."""
    restart(tmp_path, 100)


class Writing(Dataset):
    """Data whose worker writes a metric with each item, and reads the page."""

    def __init__(self, page):
        self.page = page

    def __len__(self):
        return 80

    def __getitem__(self, index):
        self.page.set("train_step", index)
        self.page.add("train_steps_total")
        assert self.page.render()
        return torch.tensor([index, self.page.value("train_step")])


@pytest.mark.timeout(600)
def test_p25_200_workers_under_50_scrapes_a_second(tmp_path):
    """Ten times twenty forked workers each write metrics while the page is scraped 50 times a second.

    None hangs, none serves the port, the parent answers every scrape and has none of their numbers.
    """
    del tmp_path
    page = Page(run="gpt-0")
    for layer in range(3000):
        page.set("train_layer_grad_norm", 1.0, f"h.{layer}")
    server = MetricsServer(page, host="127.0.0.1", port=0)
    stop, answered, failed = threading.Event(), [], []

    def hurry():
        while not stop.wait(0.02):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
                    answered.append(len(answer.read()))
            except OSError as error:
                failed.append(error)

    def train():
        while not stop.is_set():
            with page.update():
                page.set("train_loss", 1.0)

    threads = [threading.Thread(target=hurry), threading.Thread(target=hurry), threading.Thread(target=train)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            # A worker that hangs is an error of the loader after 30 s.
            loader = DataLoader(Writing(page), num_workers=20, multiprocessing_context="fork", timeout=30)
            items = torch.cat(list(loader))
            assert torch.equal(items[:, 0], items[:, 1])
            assert sorted(items[:, 0].tolist()) == list(range(80))
        assert multiprocessing.active_children() == []
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failed
    assert len(answered) > 100
    assert page.value("train_step") is None
    assert page.value("train_steps_total") == 0.0
    server.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=5)
