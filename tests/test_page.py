"""The metrics page: its text says what was set, its series stay few, and it shows one step at a time."""

import math
import subprocess
import threading
from itertools import product

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tools import find_tool

from exporter.catalog import CATALOG, Metric
from exporter.page import Page

KNOWN = {m.name: m for m in CATALOG}
HISTOGRAMS = [m.name for m in CATALOG if m.kind == "histogram"]
HOSTILE = 'a"b\\c\nd{e="f"} ü 1'


def samples(page, names=frozenset()):
    """The page, parsed: (name, labels without run and rank) -> value."""
    found = {}
    for family in text_string_to_metric_families(page.render(frozenset(names)).decode()):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key not in ("run", "rank")}
            key = (sample.name, *sorted(labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def families(page, names=frozenset()):
    """The names of the families on the page, as in its text."""
    lines = page.render(frozenset(names)).decode().splitlines()
    return [line.split()[2] for line in lines if line.startswith("# TYPE")]


def some_labels(metric, rng):
    """Label values that a job could give."""
    return tuple(str(rng.choice(values or ("layer.0", "layer.1"))) for _, values in metric.labels)


@pytest.fixture
def page():
    """A page of rank 0."""
    return Page(run="gpt-0")


def test_what_is_set_is_what_is_read(page):
    """Gauges, counters and their labels come out of the text as they went in."""
    page.set("train_loss", 2.25)
    page.set("train_step", 7)
    page.set("train_layer_grad_norm", 0.1, "h.0")
    page.add("train_steps_total", 3)
    page.add("train_steps_total", 2)
    page.add("train_detections_total", 1.0, "robust", "loss")
    found = samples(page)
    assert found["train_loss",] == 2.25
    assert found["train_step",] == 7.0
    assert found["train_layer_grad_norm", ("layer", "h.0")] == 0.1
    assert found["train_steps_total",] == page.value("train_steps_total") == 5.0
    assert found["train_detections_total", ("detector", "robust"), ("signal", "loss")] == 1.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -1.5, 1e-300, 1.7976931348623157e308, 1e16, 3])
def test_every_number_survives_the_text(page, value):
    """NaN, infinities and the ends of the range are written so that Prometheus reads the same number."""
    page.set("train_loss", value)
    read = samples(page)["train_loss",]
    assert read == value or (math.isnan(read) and math.isnan(value))


def test_label_values_are_escaped():
    """Quotes, backslashes and line breaks in a label do not break the page."""
    page = Page(run=HOSTILE)
    page.set("train_layer_grad_norm", 1.0, HOSTILE)
    (family,) = text_string_to_metric_families(page.render(frozenset({"train_layer_grad_norm"})).decode())
    assert family.samples[0].labels == {"run": HOSTILE, "rank": "0", "layer": HOSTILE}


def test_run_and_rank_are_on_every_series(page):
    """Each series carries the run and the rank."""
    for family in text_string_to_metric_families(page.render().decode()):
        for sample in family.samples:
            assert sample.labels["run"] == "gpt-0"
            assert sample.labels["rank"] == "0"


def test_kinds_and_helps_are_the_catalogs(page):
    """The text gives each family the kind and the help that the catalog gives it."""
    page.set("train_loss", 1.0)
    text = page.render().decode()
    for name in families(page):
        assert f"# HELP {name} {KNOWN[name].help}\n# TYPE {name} {KNOWN[name].kind}\n" in text


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_histograms_are_cumulative(page, name):
    """Buckets hold what is at or below their bound; the last one and `_count` hold all, `_sum` the sum."""
    bounds = KNOWN[name].buckets
    values = [bounds[0] / 2, bounds[0], bounds[1], bounds[-1], bounds[-1] * 2]
    for value in values:
        page.observe(name, value)
    found = samples(page, {name})
    for bound in bounds:
        assert found[f"{name}_bucket", ("le", repr(bound))] == sum(value <= bound for value in values)
    assert found[f"{name}_bucket", ("le", "+Inf")] == found[f"{name}_count",] == len(values)
    assert found[f"{name}_sum",] == pytest.approx(sum(values))
    assert len(found) == len(bounds) + 3


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_histograms_leave_out_what_is_not_finite(page, value):
    """A value that is not finite would spoil the sum for ever: it is not observed."""
    page.observe("train_loss_ema_ratio", value)
    assert set(samples(page, {"train_loss_ema_ratio"}).values()) == {0.0}


def test_counters_with_known_labels_are_born_at_0(page):
    """Before the first step every counter is there at 0, in every combination of known label values (case R09)."""
    found = samples(page)
    for metric in CATALOG:
        if metric.kind != "counter" or metric.where_known:
            continue
        series = [key for key in found if key[0] == metric.name]
        assert len(series) == math.prod(len(values) for _, values in metric.labels), metric.name
        assert all(found[key] == 0.0 for key in series)
    for name in HISTOGRAMS:
        assert found[f"{name}_count",] == 0.0


def test_gauges_are_absent_until_they_are_known(page):
    """A gauge that nobody has set is not on the page, not even by name; a cleared one is not either."""
    assert not [name for name in families(page) if KNOWN[name].kind == "gauge"]
    page.set("train_grad_norm", 1.0)
    assert "train_grad_norm" in families(page)
    page.clear("train_grad_norm")
    page.clear("train_loss")
    assert not [name for name in families(page) if KNOWN[name].kind == "gauge"]
    assert page.value("train_grad_norm") is None


def test_series_do_not_grow(page):
    """After 10,000 random updates there are as many series as after the first update of each (case P24)."""
    rng = np.random.default_rng(0)
    change = {
        "gauge": lambda name, labels: page.set(name, rng.normal(), *labels),
        "counter": lambda name, labels: page.add(name, 1.0, *labels),
        "histogram": lambda name, _: page.observe(name, rng.lognormal()),
    }
    children = [(m, labels) for m in CATALOG for labels in product(*(v or ("a", "b") for _, v in m.labels))]
    for metric, labels in children:
        change[metric.kind](metric.name, labels)
    before = len(samples(page))
    for index in rng.integers(len(children), size=10_000):
        metric, labels = children[index]
        change[metric.kind](metric.name, labels)
    assert len(samples(page)) == before


def test_names_choose_families(page):
    """With names given only those families are on the page, histograms whole, unknown names ignored."""
    page.set("train_loss", 1.0)
    assert families(page, {"train_loss", "train_loss_zscore", "nobody"}) == ["train_loss", "train_loss_zscore"]
    assert page.render(frozenset({"nobody"})) == b""


def test_other_ranks_keep_what_every_rank_exports():
    """A page of another rank holds the every-rank metrics only, and takes updates of the others without a word."""
    page = Page(run="gpt-0", rank="3")
    page.set("train_loss", 1.0)
    page.add("train_steps_total")
    page.observe("train_loss_zscore", 1.0)
    page.clear("train_loss")
    for name in ("train_info", "train_rank_info"):
        page.set(name, 1.0, *["x"] * len(KNOWN[name].labels))
    assert set(families(page)) == {m.name for m in CATALOG if m.every_rank}
    assert page.value("train_loss") is None


def test_a_wrong_number_of_labels_is_an_error(page):
    """A forgotten label is told at once and not put on the page."""
    with pytest.raises(ValueError, match="zip"):
        page.set("train_layer_grad_norm", 1.0)
    assert "train_layer_grad_norm" not in families(page)


def test_a_page_shows_one_step(page):
    """A scrape that comes in the middle of an update waits for its end, and shows none of the values between."""
    read = []
    scraper = threading.Thread(target=lambda: read.append(samples(page)))
    with page.update():
        page.set("train_step", 1)
        scraper.start()
        scraper.join(0.2)  # It cannot end: were it not to wait, it would have read half a step by now.
        assert scraper.is_alive()
        page.set("train_loss", 1.0)
    scraper.join()
    assert (read[0]["train_step",], read[0]["train_loss",]) == (1.0, 1.0)


def test_many_scrapes_beside_many_steps(page):
    """Under a running job every scrape finds all values of a step to be of that step."""
    stop = threading.Event()

    def train():
        step = 0
        while not stop.is_set():
            step += 1
            with page.update():
                page.set("train_step", step)
                page.set("train_layer_grad_norm", step, "h.0")
                page.set("train_loss", step)

    job = threading.Thread(target=train)
    with page.update():
        page.set("train_step", 0)
        page.set("train_layer_grad_norm", 0, "h.0")
        page.set("train_loss", 0)
        job.start()
    names = frozenset({"train_step", "train_layer_grad_norm", "train_loss"})
    seen = [set(samples(page, names).values()) for _ in range(200)]
    stop.set()
    job.join()
    assert all(len(values) == 1 for values in seen)


def test_a_catalog_of_ones_own():
    """The metrics are an argument: another list gives another page."""
    page = Page(run="a", catalog=[Metric(name="x_total", kind="counter", help="X.", labels=(("k", ("1", "2")),))])
    assert samples(page) == {("x_total", ("k", "1")): 0.0, ("x_total", ("k", "2")): 0.0}


def test_promtool_finds_nothing_wrong(page):
    """Prometheus's own linter accepts the page with everything on it."""
    promtool = find_tool("promtool")
    rng = np.random.default_rng(0)
    for metric in CATALOG:
        if metric.kind == "gauge":
            page.set(metric.name, 1.0, *some_labels(metric, rng))
    done = subprocess.run(
        [promtool, "check", "metrics"], input=page.render(), capture_output=True, check=False
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
