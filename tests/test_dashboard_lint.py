"""The rules of Grafana's own dashboard linter (grafana/dashboard-linter 0.2), by their names there.

The linter is a Go program that no package here ships, so each rule is a test. Two pairs of rules do not hold, on
purpose: `template-job-rule` with `target-job-rule` and `template-instance-rule` with `target-instance-rule` want every
query to select by the variables `job` and `instance`. A run is known by `run`, whatever job and address it is scraped
under: a restart elsewhere must not split it. What they are for, that one picture never mixes two runs, is
`test_every_query_selects_the_run` instead. Those about LogQL have nothing to say here.
"""

import re

import promql_parser
import pytest
from dashboards import DASHBOARDS, filled, nodes, panels, selectors

LINTED = {"stat", "timeseries"}
UNITS = {"none", "short", "percentunit", "sci", "s", "bytes", "Bps", "hertz", "celsius", "watt"}
# Servers that all runs share.
OF_ALL_RUNS = re.compile(r"up$|alertmanager_|prometheus_|receiver_deliveries_total$|(gpu|host):|ALERTS$")
by_name = pytest.mark.parametrize("name", DASHBOARDS)


def variables(name, kind):
    """The variables of one kind."""
    return [each for each in DASHBOARDS[name]["templating"]["list"] if each["type"] == kind]


def linted(name):
    """The panels of the kinds that the linter looks at."""
    return [panel for panel in panels(name) if panel["type"] in LINTED]


def targets(name):
    """Every query of a panel, with the title of that one."""
    return [(panel["title"], target["expr"]) for panel in panels(name) for target in panel.get("targets", ())]


@by_name
def test_template_datasource_rule(name):
    """There is a variable for the data source, with the name and the label that all dashboards give it."""
    assert [(each["name"], each["label"]) for each in variables(name, "datasource")] == [("datasource", "Data source")]


@by_name
def test_template_label_promql_rule(name):
    """Every variable asks for the values of a label, with a valid selector."""
    for variable in variables(name, "query"):
        function, selector, _ = re.fullmatch(r"(\w+)\((.+), (\w+)\)", variable["query"]).groups()
        assert function == "label_values"
        promql_parser.parse(filled(selector))


@by_name
def test_template_on_time_change_reload_rule(name):
    """Every variable is asked for anew when the time range changes."""
    assert {variable["refresh"] for variable in variables(name, "query")} <= {2}


@by_name
def test_panel_datasource_rule(name):
    """Every panel and every query uses the data source that is chosen."""
    for panel in panels(name):
        if panel["type"] == "text":
            continue
        for part in (panel, *panel["targets"]):
            assert part["datasource"]["uid"] == "${datasource}", panel["title"]


@by_name
def test_panel_title_description_rule(name):
    """Every panel has a title and says what it shows."""
    for panel in panels(name):
        assert panel["title"]
        assert panel["type"] == "text" or len(panel["description"]) > len("Of this run")


@by_name
def test_panel_units_rule(name):
    """Every panel of numbers has one of Grafana's units."""
    for panel in linted(name):
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]


@by_name
def test_panel_no_targets_rule(name):
    """Every panel of numbers asks for something."""
    assert all(panel["targets"] for panel in linted(name))


@by_name
def test_target_promql_rule(name):
    """Every query is valid, once its variables have values."""
    for title, expr in targets(name):
        assert expr
        try:
            promql_parser.parse(filled(expr))
        except ValueError as error:
            raise AssertionError(f"{title}: {error}: {expr}") from error


@by_name
def test_target_rate_interval_rule(name):
    """Every rate is over $__rate_interval: right at any zoom and any scrape interval."""
    for title, expr in targets(name):
        for used in re.findall(r"\b(?:rate|irate)\(.*?\[(.*?)\]", expr):
            assert used == "$__rate_interval", title


@by_name
def test_target_counter_agg_rule(name):
    """Every counter is inside of rate or increase."""
    for title, expr in targets(name):
        for node, above in nodes(expr):
            if isinstance(node, promql_parser.VectorSelector) and node.name.endswith("_total"):
                assert isinstance(above[-1], promql_parser.MatrixSelector), title
                assert above[-2].func.name in {"rate", "irate", "increase"}, title


@by_name
def test_uneditable_rule(name):
    """A dashboard that is provisioned is changed in the code."""
    assert DASHBOARDS[name]["editable"] is False


@by_name
def test_every_query_selects_the_run(name):
    """Every series of a run is selected by the run that is chosen; on the fleet by those."""
    if not variables(name, "query"):
        return
    for title, expr in targets(name):
        for selector in selectors(expr):
            chosen = [matcher for matcher in selector.matchers.matchers if matcher.name == "run"]
            if not chosen and OF_ALL_RUNS.match(selector.name):
                continue
            assert chosen, f"{title}: {selector.name}"
            assert re.search(r'run=~?"\$run"', expr), title
