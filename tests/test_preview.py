"""The preview: Grafana's variables, units and looks, and its command line."""

import json
import math
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import parse_qs, urlsplit

import pytest

from grafana_dashboards.__main__ import cli
from grafana_dashboards.preview.charts import _with_gaps
from grafana_dashboards.preview.command import preview
from grafana_dashboards.preview.source import Series, View
from grafana_dashboards.preview.style import limit_color, mapped, say

END = 1_800_000_000


class FakePrometheus:
    """Answers every query with the same two series and remembers what it was asked."""

    def __init__(self):
        asked = self.asked = []
        self.values = ["2", "2.5"]
        values = self.values

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                url = urlsplit(self.path)
                query = {name: found[-1] for name, found in parse_qs(url.query).items()}
                asked.append((url.path, query))
                if "refuse" in query.get("match[]", ""):
                    return self._answer(400, {"status": "error", "error": "unexpected end of input"})
                return self._answer(200, {"status": "success", "data": self._data(url.path, query)})

            def _data(self, path, query):
                if path.endswith("/values"):
                    return ["gpt-0", "gpt-1"]
                labels = [{"run": "gpt-0", "rank": rank} for rank in ("0", "1")]
                if path.endswith("query"):
                    time = float(query["time"])
                    pairs = zip(labels, values, strict=True)
                    return {"result": [{"metric": label, "value": [time, value]} for label, value in pairs]}
                times = range(int(float(query["start"])), int(float(query["end"])), int(query["step"]))
                pairs = [[time, values[0]] for time in times]
                return {"result": [{"metric": label, "values": pairs} for label in labels]}

            def _answer(self, code, content):
                body = json.dumps(content).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def prometheus():
    """A fake Prometheus on loopback."""
    fake = FakePrometheus()
    yield fake
    fake.close()


def test_variables_are_filled_in_as_grafana_does():
    """An hour in 15 s steps: the rate interval is four scrapes; of a day it is a step and a scrape."""
    hour = View(start=END - 3600, end=END, variables={"run": "a"})
    day = View(start=END - 86400, end=END)

    assert hour.fill('rate(x{run="$run"}[$__rate_interval]) + ${run}') == 'rate(x{run="a"}[60s]) + a'
    assert (day.step, day.fill("$__rate_interval $__range")) == (173, "188s 86400s")


def test_a_variable_without_a_value_is_told():
    """The name and the query are in the message."""
    with pytest.raises(ValueError, match=r"the variable \$layer has no value in 'x\{layer=\"\$layer\"\}'"):
        View(start=0, end=1).fill('x{layer="$layer"}')


@pytest.mark.parametrize(
    ("value", "unit", "said"),
    [
        (1600, "none", "1600"), (2.0371, "none", "2.04"), (0.5, "percentunit", "50 %"), (0.014, "s", "14 ms"),
        (90, "s", "90 s"), (1.98e9, "hertz", "1.98 GHz"), (73_400_320_000, "bytes", "68.4 GiB"), (0, "bytes", "0 B"),
        (88, "celsius", "88 °C"), (12_345, "short", "12.3 k"), (math.nan, "none", "no value"), (math.inf, "s", "∞"),
    ],
)  # fmt: skip
def test_a_value_is_said_in_its_unit(value, unit, said):
    """As in Grafana: prefixes, per cent, and no number where there is none."""
    assert say(value, unit) == said


def test_nan_is_no_value_and_no_green():
    """A mapping for NaN is found for NaN alone, in the colour of text."""
    result = {"text": "no value", "color": "text"}
    mappings = [
        {"type": "value", "options": {"1": {"text": "up", "color": "green"}}},
        {"type": "special", "options": {"match": "null+nan", "result": result}},
    ]
    assert mapped(mappings, math.nan)[0] == "no value"
    assert mapped(mappings, 1.0)[0] == "up"
    assert mapped(mappings, 2.0) is None


def test_a_value_has_the_colour_of_the_limit_that_it_has_reached():
    """At the limit it is red, below it is calm."""
    steps = {"steps": [{"color": "green", "value": None}, {"color": "red", "value": 200}]}
    assert limit_color(steps, 199) != limit_color(steps, 200) == limit_color(steps, 201)


def test_a_line_ends_where_points_are_missing():
    """A hole of more than a step becomes a NaN, and is never bridged."""
    view = View(start=0, end=100, interval_seconds=10)
    times, values = _with_gaps(Series(labels={}, times=[0, 10, 40, 50], values=[1, 2, 3, 4]), view)

    assert times == [0, 10, 20, 40, 50]
    assert [math.isnan(value) for value in values] == [False, False, True, False, False]


@pytest.mark.parametrize("name", ["training", "fleet", "runbook"])
def test_a_dashboard_becomes_a_picture(tmp_path, prometheus, name):
    """Each kind of panel is drawn; every query goes to the run that was chosen, over the time that was wanted."""
    (path,) = preview(prometheus.url, tmp_path / "new", span="30m", at=str(END), run="gpt-1", only=[name])

    assert path == tmp_path / f"new/{name}.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    ranges = [query for place, query in prometheus.asked if place.endswith("query_range")]
    assert {float(query["end"]) for query in ranges} == {END}
    assert not [query for query in ranges if "$" in query["query"]]
    if name == "training":
        assert all('run="gpt-1"' in query["query"] or 'run=~"gpt-1"' in query["query"] for query in ranges)


def test_a_picture_of_nothing_but_nan_is_a_picture(tmp_path, prometheus):
    """What is not a number is drawn nowhere, and breaks nothing."""
    prometheus.values[:] = ["NaN", "+Inf"]
    assert cli("preview", "--prometheus", prometheus.url, "--out", str(tmp_path), "--only", "training") == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--run", "nobody"), "--run: one of gpt-0, gpt-1 wanted, found nobody"),
        (("--only", "costs"), "--only: one of fleet, gpu, incidents, runbook, training wanted, found costs"),
        (
            ("--prometheus", "host:9090"),
            "--prometheus: an address such as http://127.0.0.1:9090 wanted, found host:9090",
        ),
        (("--range", "soon"), "a time such as 90s, 30m, 6h or 2d wanted, found 'soon'"),
    ],
)
def test_bad_arguments_are_one_line(tmp_path, prometheus, capsys, arguments, told):
    """The message says what was wanted and what was found; no picture is left."""
    assert cli("preview", "--prometheus", prometheus.url, "--out", str(tmp_path), *arguments) == 1
    assert capsys.readouterr().err == f"python -m grafana_dashboards: {told}\n"
    assert not list(tmp_path.glob("*.png"))


def test_a_server_that_does_not_answer_is_one_line(tmp_path, capsys):
    """No traceback where there is no Prometheus."""
    fake = FakePrometheus()
    fake.close()
    assert cli("preview", "--prometheus", fake.url, "--out", str(tmp_path)) == 1
    assert capsys.readouterr().err == f"python -m grafana_dashboards: {fake.url} does not answer: Connection refused\n"
