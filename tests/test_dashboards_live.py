"""The dashboards against a real Prometheus: every query of every panel finds something in the scene that it is for."""

import time
from importlib.resources import files

import pytest
from dashboard_scene import Machines, TroubledRun
from dashboards import DASHBOARDS, panels
from simulated_run import play

from grafana_dashboards.preview.command import choose, preview
from grafana_dashboards.preview.source import Prometheus, View
from trainer_plugin.demo.servers import Stack

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

CALM_SECONDS = 12.0
# What nothing in the scene brings about: a loop that is broken, and a checkpoint that is.
NOTHING_THERE: set[str] = set()


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    """Servers that have watched a run in trouble, and where and when to look."""
    folder = tmp_path_factory.mktemp("scene")
    with Stack(folder / "servers", folder / "runs", files("alert_rules")) as stack:
        run = TroubledRun(folder / "runs", "gpt-0")
        machines = Machines(folder / "runs" / "targets", "gpt-0")
        began = time.time()
        try:
            play([(run, run.trouble(CALM_SECONDS))])
            yield Prometheus(stack.urls["prometheus"]), View(start=began, end=time.time(), interval_seconds=1.0)
        finally:
            machines.close()
            run.close()


def empty_queries(name, scene):
    """The queries of a dashboard that find no value, by panel and legend."""
    source, view = scene
    view = choose(DASHBOARDS[name], source, view, None)
    found = {}
    for panel in panels(name):
        for target in panel.get("targets", ()):
            ask = source.at_end if target["instant"] else source.over
            values = [value for series in ask(target["expr"], view) for value in series.values]
            found[f"{panel['title']}: {target['legendFormat']}"] = any(value == value for value in values)  # noqa: PLR0124 - NaN
    assert found
    return {query for query, there in found.items() if not there}


@pytest.mark.parametrize("name", [name for name in DASHBOARDS if name != "gpu"])
def test_every_query_finds_something(name, scene):
    """A run in trouble is seen in every panel, by every query of it."""
    assert empty_queries(name, scene) == NOTHING_THERE


def test_every_query_about_machines_finds_something(scene):
    """A hot GPU with an XID beside a slow rank is seen in every panel of the dashboard of machines."""
    assert empty_queries("gpu", scene) == set()


def test_every_dashboard_can_be_drawn(tmp_path, scene):
    """The preview draws each dashboard from that Prometheus."""
    source, view = scene
    paths = list(preview(source.url, tmp_path, span="60s", at=str(view.end), interval="1s", only=list(DASHBOARDS)))

    assert [path.stem for path in paths] == sorted(DASHBOARDS)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
