"""The benchmark of the rules: what its pages are to Prometheus, and that it tells every group's time."""

import sys
from pathlib import Path

import pytest

# Last: the folder has modules named as some of the tests'.
sys.path.append(str(Path(__file__).parent / "bench"))
from rules import STEPS_PER_SCRAPE, Fleet, bench_delivery, bench_rules, recorded

GROUPS = ("train-signals", "train-recording", "train-stack", "train-people", "train-gpu")


@pytest.fixture(scope="module")
def steps():
    """Calm steps and those of a storm."""
    return recorded(20, loss=1.0), recorded(220, loss=3.5)[200:]


def test_a_scrape_moves_a_page_on(steps):
    """The first rank's page counts the steps between two scrapes, and a storm is more than 200 high losses."""
    calm, storm = steps
    fleet = Fleet(["a"], calm)
    try:
        counted = [float(_sample(fleet.scraped("/a/0"), "train_steps_total")) for _ in range(3)]
        assert counted == [STEPS_PER_SCRAPE, 2 * STEPS_PER_SCRAPE, 3 * STEPS_PER_SCRAPE]
        assert float(_sample(fleet.scraped("/a/0"), "train_loss_unrecovered_steps")) == 0.0
        fleet.steps = storm
        assert float(_sample(fleet.scraped("/a/0"), "train_loss_unrecovered_steps")) > 200.0
        assert b"train_step_seconds_count" in fleet.scraped("/a/7")
        assert len(fleet.targets()) == 8
    finally:
        fleet.close()


def _sample(page: bytes, name: str) -> str:
    """The value of a page's one series of this name."""
    (value,) = [line.rpartition(" ")[2] for line in page.decode().splitlines() if line.startswith(f"{name}{{")]
    return value


@pytest.mark.live
@pytest.mark.timeout(240)
def test_it_tells_the_time_of_every_group():
    """Two runs on a real Prometheus: calm, then a storm, each with all groups, and alerts that fire."""
    told = list(bench_rules(2, 1.0))
    parts = [place for place, line in enumerate(told) if line.startswith("2 runs x 8 ranks")]
    assert len(parts) == 2
    for group in GROUPS:
        assert sum(line.strip().startswith(f"{group}:") for line in told) == 2
    assert "failed scrapes nan" in told[-1]
    assert int(told[-1].partition("alerts firing ")[2].partition(",")[0]) > 2


@pytest.mark.live
@pytest.mark.timeout(120)
def test_it_tells_how_long_a_condition_takes():
    """Four incidents of two runs, each of which came to the inbox."""
    assert bench_delivery(4, runs=2).startswith("4 incidents of 2 runs: p50 ")
