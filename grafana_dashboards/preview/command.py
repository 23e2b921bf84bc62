"""`python -m grafana_dashboards preview`: from the JSON and a Prometheus to one picture for each dashboard."""

import json
import re
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from grafana_dashboards.preview.source import Prometheus, View

JSON_FOLDER = Path(__file__).resolve().parent.parent / "json"
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
# Grafana's own choice of nothing in particular, where several may be chosen.
_ALL = ".+"


def preview(
    url: str,
    out: Path,
    *,
    span: str,
    at: str | None = None,
    interval: str = "5s",
    run: str | None = None,
    only: Sequence[str] | None = None,
) -> Iterator[Path]:
    """Draw the dashboards one after the other, and tell the path of each picture.

    Args:
        url: where Prometheus answers.
        out: the folder of the pictures.
        span: how much time to show, such as 30m.
        at: its end, as ISO 8601 or Unix seconds; now if None.
        interval: the scrape interval, such as 5s.
        run: the run to show; the first that is there if None.
        only: names of dashboards; all if None.

    Raises:
        ValueError: an argument cannot be used, a query is refused, or matplotlib is not installed.
        OSError: Prometheus does not answer, or a picture cannot be written.
    """
    try:
        from grafana_dashboards.preview.page import draw  # noqa: PLC0415 - only those who want a picture need it
    except ModuleNotFoundError as error:
        raise ValueError("preview needs matplotlib: pip install 'pretraining-guard[report]'") from error
    end = _moment(at)
    view = View(start=end - _seconds(span), end=end, interval_seconds=_seconds(interval))
    paths = sorted(JSON_FOLDER.glob("*.json"))
    if unknown := sorted(set(only or ()) - {path.stem for path in paths}):
        raise ValueError(f"--only: one of {', '.join(path.stem for path in paths)} wanted, found {unknown[0]}")
    source = Prometheus(url)
    dashboards = {path.stem: json.loads(path.read_text()) for path in paths if only is None or path.stem in only}
    views = {name: choose(dashboard, source, view, run) for name, dashboard in dashboards.items()}
    out.mkdir(parents=True, exist_ok=True)
    for name, dashboard in dashboards.items():
        picture = out / f"{name}.png"
        picture.write_bytes(draw(dashboard, source, views[name]))
        yield picture


def choose(dashboard: dict[str, Any], source: Prometheus, view: View, run: str | None) -> View:
    """The view with a value for each of the dashboard's variables, as Grafana chooses at first.

    Raises:
        ValueError: there is nothing to choose from.
    """
    variables = dict(view.variables)
    for variable in dashboard["templating"]["list"]:
        name = variable["name"]
        if variable["type"] != "query":
            continue
        if variable.get("multi"):
            variables[name] = _ALL
            continue
        known = View(start=view.start, end=view.end, interval_seconds=view.interval_seconds, variables=variables)
        choices = source.choices(variable["query"], known)
        if not choices:
            raise ValueError(f"no {name} in this Prometheus between {_iso(view.start)} and {_iso(view.end)}")
        if run is not None and name == "run" and run not in choices:
            raise ValueError(f"--run: one of {', '.join(choices)} wanted, found {run}")
        variables[name] = run if run is not None and name == "run" else choices[0]
    return View(start=view.start, end=view.end, interval_seconds=view.interval_seconds, variables=variables)


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+)([smhd])", text)
    if found is None or not int(found[1]):
        raise ValueError(f"a time such as 90s, 30m, 6h or 2d wanted, found {text!r}")
    return float(int(found[1]) * _SECONDS[found[2]])


def _moment(text: str | None) -> float:
    if text is None:
        return time.time()
    try:
        return float(text)
    except ValueError:
        moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


def _iso(moment: float) -> str:
    return f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%dT%H:%M:%S}"
