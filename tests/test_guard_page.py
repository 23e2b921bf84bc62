"""The page of a training job: one step at a time, no more series than at the start, NaN as NaN, and no ghosts."""

import json
import math
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import threading
import urllib.request
from contextlib import suppress
from functools import partial

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from tools import find_tool
from torch import nn
from training import settings
from waiting import wait_for

from trainer_plugin.guard import Guard

UNHURRIED = {"warmup_steps": 1_000_000, "sustained_steps": 1000}


def scrape(port, query=""):
    """The page's text as Prometheus gets it."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics{query}", timeout=5) as answer:
        return answer.read().decode()


def series(text):
    """Every series: (name, label values without run and rank) -> value. None of them has a timestamp."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.timestamp is None
            key = (sample.name, *(value for label, value in sample.labels.items() if label not in ("run", "rank")))
            assert key not in found
            found[key] = sample.value
    return found


class Stack:
    """A job on as many tiny layers as wanted, whose losses and gradients are told rather than computed."""

    def __init__(self, folder, *, layers=1, scaled=False, optimizer=None, **sections):
        self.model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
        kind = optimizer or partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
        self.optimizer = kind(self.model.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000) if scaled else None
        self.guard = Guard(
            settings(folder, **sections),
            model=self.model,
            optimizer=self.optimizer,
            scaler=self.scaler,
            local_only=True,
        )

    def step(self, loss, gradient=0.1, **told):
        """One step with that loss, and that value in every gradient; None: there is no gradient."""
        value = torch.tensor(float(loss))
        scale = 1.0 if self.scaler is None else self.scaler.scale(torch.ones(())).item()
        for parameter in self.model.parameters():
            parameter.grad = None if gradient is None else torch.full_like(parameter, gradient * scale)
        if told:
            self.guard.micro_step(value, **told)
            self.guard.before_optimizer()
        else:
            self.guard.before_optimizer(value)
        if gradient is not None:
            self.optimizer.step() if self.scaler is None else self.scaler.step(self.optimizer)
            if self.scaler is not None:
                self.scaler.update()
        self.guard.end_step()
        self.guard._parts.checkpoints.wait()

    def ruin(self):
        """Weights that are not finite, and the loss that comes of them."""
        self.model[0].weight.data.fill_(math.nan)
        self.step(math.nan, math.nan)


@pytest.fixture
def stack(tmp_path):
    """A function that makes a `Stack`; what is left open is closed at the end."""
    made = []

    def make(**options):
        made.append(Stack(tmp_path, **options))
        return made[-1]

    yield make
    for job in made:
        job.guard.close()


def live_through(job, *, steps, spikes, rollbacks):
    """So many steps, in each `rollbacks`th part of them first single spikes and at its end NaN weights; their numbers.

    Parts are long enough for an incident to heal, and for a checkpoint after it to be proven.
    """
    part, each = (steps - 30) // rollbacks, spikes // rollbacks
    assert part >= 2 * each + 40
    noise = torch.randn(steps, generator=torch.Generator().manual_seed(0)).mul_(0.01).tolist()
    for number in range(1, steps + 1):
        place = (number - 30) % part
        if number > 30 and place == part - 1:
            job.ruin()
        elif number > 30 and place < 2 * each and place % 2:
            job.step(9.0, 0.5)
        else:
            job.step(2.0 + noise[number - 1], 0.1 * (1.0 + noise[number - 1]))
        yield number


def names(job):
    """Every series of the page by its text, quicker than parsed."""
    return {line.rpartition(" ")[0] for line in job.guard.page.render().decode().splitlines() if line[0] != "#"}


EVENTFUL = {
    "budget": {"rollbacks_per_day": 1000, "same_target": 1000},
    "detection": {"sustained_steps": 50},
    "metrics": {"port": 0, "layers_every": 25, "activations": True},
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("scaled", [False, True])
def test_p24_an_eventful_run_has_no_more_series_than_its_first_step(stack, scaled):
    """48 layers, 50 spikes and 5 rollbacks later each series of step 1 is there, and none besides.

    No label holds a step, an id, a path, a text of an exception, or an address.
    """
    job = stack(layers=48, scaled=scaled, **EVENTFUL)
    first = None
    for number in live_through(job, steps=330, spikes=50, rollbacks=5):
        first = names(job) if number == 1 else first
        if number % 10 == 0:
            assert names(job) == first, number
    page = job.guard.page
    assert page.value("train_actions_total", "rollback", "local", "done") == 5
    assert page.value("train_detections_total", "robust", "loss") == 50
    assert page.value("train_guard_errors_total") == 0
    text = scrape(job.guard.metrics_port)
    assert len(series(text)) == len(first) < 1500
    # Where the rank runs is what it is, and without a GPU nothing.
    told = {str(torch.__version__), socket.gethostname(), ""}
    for value in set(re.findall(r'="([^"]*)"', text)) - told:
        assert re.fullmatch(r"[a-z][a-z_0-9]*|\+Inf|[0-9.]{1,5}", value), value


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("scaled", [False, True])
def test_p24_what_is_withheld_or_missing_makes_no_series(stack, scaled, kind):
    """A withheld first step, an overflow, and a step without gradients leave no series more, and none less for good."""
    metrics = {"port": 0, "layers_every": 4, "activations": True}
    job = stack(layers=3, scaled=scaled, optimizer=kind, metrics=metrics)
    job.step(math.nan)
    first = series(job.guard.page.render().decode())
    for loss, gradient in ((2.0, math.nan), (2.0, 0.1), (math.inf, 0.1), (2.0, 1e30), (2.0, math.inf)):
        job.step(loss, gradient)
        assert series(job.guard.page.render().decode()).keys() == first.keys() | {("train_loss_recent_max",)}
    if not scaled:  # With a scaler, a loop without gradients fails by itself.
        job.step(2.0, None)
        without = series(job.guard.page.render().decode())
        assert without["train_grad_norm_available",] == 0.0
        norms = {("train_grad_norm",), *(("train_layer_grad_norm", str(layer)) for layer in range(3))}
        assert {*first} - {*without} == norms
    for _ in range(9):
        job.step(2.0)
    assert series(job.guard.page.render().decode()).keys() == first.keys() | {("train_loss_recent_max",)}
    assert job.guard.page.value("train_guard_errors_total") == 0


def test_the_page_of_a_job_before_its_first_step_holds_what_can_be_known(stack):
    """Before any step all counters, thresholds and layers are there, and what has no value yet is absent or NaN."""
    job = stack(layers=4, scaled=True)
    before = series(scrape(job.guard.metrics_port))
    job.step(2.0)
    after = series(scrape(job.guard.metrics_port))
    assert {*before} <= {*after}
    new = {key[0] for key in {*after} - {*before}}
    assert not [name for name in new if name.endswith(("_total", "_bucket", "_count", "_sum"))]
    for key, value in before.items():
        if key[0].startswith("train_layer_") and not key[0].endswith("_total"):
            assert math.isnan(value), key


@pytest.mark.parametrize(
    ("loss", "gradient"), [(2.0, 0.1), (math.nan, math.nan), (math.inf, math.inf), (2.0, 1e30), (2.0, None)]
)
def test_whatever_a_step_shows_its_text_is_right(stack, loss, gradient):
    """The page parses, promtool finds nothing wrong, no sample has a timestamp, and what is not finite is shown so."""
    job = stack(layers=2, scaled=True)
    job.step(2.0, tokens=10, sample_ids=["a"])
    job.step(loss, gradient, tokens=10, sample_ids=["a"])
    text = scrape(job.guard.metrics_port)
    found = series(text)
    assert found["train_loss",] == pytest.approx(loss, nan_ok=True)
    if gradient is None:
        assert ("train_grad_norm",) not in found
    else:
        norm = gradient * math.sqrt(12)
        assert found["train_grad_norm",] == pytest.approx(norm, nan_ok=True, rel=1e-5)
    for spelling in re.findall(r"^train_(?:loss|grad_norm)\{[^}]*\} (.*)$", text, re.MULTILINE):
        assert spelling in {"NaN", "+Inf"} or math.isfinite(float(spelling))
    assert "nan" not in text.replace("NaN", "")
    done = subprocess.run(
        [find_tool("promtool"), "check", "metrics"], input=text.encode(), capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_layers_are_scraped_as_a_slower_job(stack):
    """Layers' series come by `name[]`, however encoded; the rest of the page can do without them."""
    job = stack(layers=3)
    job.step(2.0)
    found = series(scrape(job.guard.metrics_port, "?name%5B%5D=train_layer_grad_norm&name[]=train_layer_weight_norm"))
    assert {key[0] for key in found} == {"train_layer_grad_norm", "train_layer_weight_norm"}
    assert len(found) == 6


@pytest.mark.timeout(60)
def test_every_scrape_shows_one_step(stack):
    """In each of 300 scrapes of a job that trains, loss, norms and counters are those of one and the same step."""
    job = stack(actions={"clip_max_norm": None}, detection=UNHURRIED, checkpoints={"every": 1_000_000})
    job.step(1.0, 1.0 / math.sqrt(6))
    pages, failed = [], []

    def read():
        try:
            pages.extend(scrape(job.guard.metrics_port) for _ in range(300))
        except OSError as error:
            failed.append(error)

    scraper = threading.Thread(target=read)
    scraper.start()
    number = 1
    while scraper.is_alive():
        number += 1
        # Six elements with number / sqrt(6) in each: the norm is the number. Every fifth step is withheld.
        job.step(number, number / math.sqrt(6) if number % 5 else math.inf)
    scraper.join()
    assert not failed
    shown = set()
    for page in map(series, pages):
        step = page["train_step",]
        norm = step if step % 5 else math.inf
        shown.add(step)
        assert page["train_loss",] == page["train_steps_total",] == page["train_loss_recent_max",] == step
        assert page["train_grad_norm",] == pytest.approx(norm, rel=1e-5)
        assert page["train_layer_grad_norm", "0"] == pytest.approx(norm, rel=1e-5)
        assert page["train_steps_skipped_total", "nonfinite"] == page["train_nonfinite_total", "grad"] == step // 5
        assert page["train_layer_nonfinite_total", "0"] == step // 5
        assert page["train_steps_applied_total",] == step - step // 5
        assert page["train_step_seconds_count",] == step
    assert len(shown) > 10


def test_scrapers_that_hang_do_not_stop_the_training(stack):
    """With 50 silent connections, half a request and one that never reads, steps go on, scrapes come, `close` ends."""
    job = stack(layers=2)
    address = ("127.0.0.1", job.guard.metrics_port)
    hanging = [socket.create_connection(address, timeout=5) for _ in range(52)]
    hanging[50].sendall(b"GET /metr")
    hanging[51].sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    try:
        for number in range(1, 31):
            job.step(2.0)
            if number % 10 == 0:
                assert series(scrape(job.guard.metrics_port))["train_step",] == number
        job.guard.close()
        with pytest.raises(OSError, match="refused"):
            scrape(address[1])
    finally:
        for client in hanging:
            client.close()


def test_p13_a_loss_that_the_trainers_log_hides_is_seen(make_guard):
    """A trainer that logs the running average in the place of a NaN shows nothing; page and detector do, at step 7."""
    job = make_guard()
    logged, at_seven, running = [], None, 0.0
    for number in range(1, 13):
        batch = job.guard.next_batch()
        loss = nn.functional.mse_loss(job.model(batch), batch.sum(1, keepdim=True))
        if number == 7:
            loss = loss * math.nan
        # As Trainer.train with logging_nan_inf_filter=True, which is the default; logged every 100 steps.
        if torch.isnan(loss) or torch.isinf(loss):
            running += running / (1 + number - 1)
        else:
            running += loss.item()
        logged.append(running / number)
        loss.backward()
        job.guard.before_optimizer(loss)
        job.optimizer.step()
        job.optimizer.zero_grad()
        job.guard.end_step()
        if number == 7:
            at_seven = series(scrape(job.guard.metrics_port))
            assert job.guard._parts.policy.open_incident.first_step == 7
    assert all(math.isfinite(value) for value in logged)
    assert math.isnan(at_seven["train_loss",])
    assert at_seven["train_nonfinite_total", "loss"] == 1.0
    assert at_seven["train_detections_total", "nonfinite", "loss"] == 1.0
    assert at_seven["train_steps_skipped_total", "nonfinite"] == 1.0
    assert at_seven["train_incident_open",] == 1.0
    assert all(parameter.isfinite().all() for parameter in job.model.parameters())
    assert job.guard.page.value("train_nonfinite_total", "loss") == 1.0


def targets(folder):
    """What Prometheus would scrape: run -> port. Nothing else may lie in the folder."""
    paths = list((folder / "runs" / "targets").iterdir())
    assert all(path.suffix == ".json" and not path.name.startswith(".") for path in paths)
    entries = [entry for path in paths for entry in json.loads(path.read_text())]
    return {entry["labels"]["run"]: int(entry["targets"][0].rpartition(":")[2]) for entry in entries}


def _rank(folder, name, losses, ready):
    """In a process of its own: train on these losses, tell that it is done, and wait to be killed."""
    job = Stack(folder / name, run=name, runs=str(folder / "runs"), checkpoints={"every": 5})
    for loss in losses:
        job.step(loss)
    job.guard._parts.loop.flush(5.0)
    ready.set()
    signal.pause()


class Ranks:
    """Processes that train, each with a page of its own."""

    def __init__(self, folder):
        self.folder = folder
        self.running = {}
        self._context = multiprocessing.get_context("fork")

    def start(self, name, *losses):
        """Start one, and wait until it has trained on its losses."""
        ready = self._context.Event()
        process = self._context.Process(target=_rank, args=(self.folder, name, losses, ready), daemon=True)
        process.start()
        self.running[name] = process
        assert ready.wait(8)

    def kill(self, name):
        """As a machine that loses power would."""
        process = self.running.pop(name)
        os.kill(process.pid, signal.SIGKILL)
        process.join()

    def pages(self):
        """Every page that can be scraped, by run."""
        found = {}
        for run, port in targets(self.folder).items():
            with suppress(ConnectionError, urllib.error.URLError):
                found[run] = scrape(port)
        return found


@pytest.fixture
def ranks(tmp_path):
    """Processes that train; all are killed at the end."""
    ranks = Ranks(tmp_path)
    yield ranks
    for name in list(ranks.running):
        ranks.kill(name)


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_p22_nothing_of_a_killed_process_is_shown_again(ranks, tmp_path):
    """Killed with -9 at loss 9.0, a process takes it along; its steps go on from what it saved, and one file remains.

    What is not possible: steps that were not saved yet are not counted after a kill (here the sixth), so the counter
    falls by so many, which Prometheus takes for a restart from 0. All other counters begin at 0 in each process.
    """
    ranks.start("a", *[2.0] * 5, 9.0)
    ranks.start("b", *[2.0] * 5)
    pages = ranks.pages()
    assert pages.keys() == {"a", "b"}
    assert series(pages["a"])["train_loss",] == 9.0
    ranks.kill("a")
    assert ranks.pages().keys() == {"b"}
    for _ in range(4):
        ranks.start("a")
        pages = ranks.pages()
        assert sum(series(page)["train_steps_total",] for page in pages.values()) == 10.0
        assert not [line for page in pages.values() for line in page.splitlines() if line.endswith(" 9.0")]
        ranks.kill("a")
    ranks.start("a", *[2.0] * 5)
    assert series(ranks.pages()["a"])["train_steps_total",] == 10.0
    assert sorted(path.name for path in (tmp_path / "runs" / "targets").iterdir()) == ["a-0.json", "b-0.json"]


def restart(folder, times):
    """Build a run again and again without a close, and look at what is there."""
    before = {thread.name for thread in threading.enumerate()}
    for number in range(times):
        job = Stack(folder, checkpoints={"every": 1_000_000})
        assert series(scrape(job.guard.metrics_port))["train_steps_total",] == number
        job.step(2.0)
        assert targets(folder) == {"tiny": job.guard.metrics_port}
    assert sum(thread.name == "metrics" for thread in threading.enumerate()) == 1
    job.guard.close()
    assert targets(folder) == {}
    wait_for(lambda: {thread.name for thread in threading.enumerate()} <= before)


@pytest.mark.timeout(30)
def test_p22_restarts_leave_one_target(tmp_path):
    """Built twenty times without a close (`make soak`: a hundred), a run has one target, one endpoint, one counter."""
    restart(tmp_path, 20)


@pytest.mark.parametrize(("advertise", "follows"), [("node.example:{port}", True), ("outside.example:80", False)])
def test_the_address_that_is_told_is_that_of_this_page(make_guard, tmp_path, advertise, follows):
    """Where another job of this host has the port, Prometheus hears of the one that was had; a mapped port stays."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = advertise.format(port=port)
        job = make_guard(metrics={"port": port, "advertise": told})
        assert job.guard.metrics_port != port
        (entry,) = json.loads((tmp_path / "runs" / "targets" / "tiny-0.json").read_text())
        assert entry["targets"] == [f"node.example:{job.guard.metrics_port}" if follows else told]
