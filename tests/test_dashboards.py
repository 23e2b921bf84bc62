"""The dashboards: what the code builds, valid queries about series that exist, limits that are the rules' own."""

import json
import re
import subprocess
import sys

import pytest
from dashboards import (
    ALERTS,
    DASHBOARDS,
    GPU_RULES,
    PATHS,
    RECORDS,
    filled,
    nodes,
    panels,
    queries,
    selectors,
)
from promql_parser import Call, MatrixSelector, VectorSelector
from test_rules import COUNTER_FUNCTIONS, GAUGE_FUNCTIONS, run
from tools import ROOT, find_tool

from exporter.catalog import CATALOG

KINDS = {metric.name: metric.kind for metric in CATALOG}
LABELS = {(metric.name, label): values for metric in CATALOG for label, values in metric.labels}
# Of the receiver's and the servers' own pages; test_rules.py and test_alertmanager.py hold these against real ones.
SERVERS = {
    "up", "ALERTS", "receiver_run_state", "receiver_command_wait_seconds", "receiver_deliveries_total",
    "receiver_last_heartbeat_timestamp_seconds", "alertmanager_notifications_failed_total",
    "prometheus_notifications_dropped_total", "prometheus_rule_evaluation_failures_total",
}  # fmt: skip
OF_MACHINES = re.compile(r"(gpu|host|rank):|train_rank_info$")
by_name = pytest.mark.parametrize("name", DASHBOARDS)


def known(name):
    """Whether a series is in the catalog, a record of the rules, or one of the servers' own."""
    histogram = re.sub(r"_(bucket|count|sum)$", "", name)
    return name in KINDS or KINDS.get(histogram) == "histogram" or name in RECORDS or name in SERVERS


def kind(name):
    """The kind of a series: a histogram's parts are counters, and so is what ends like one."""
    if KINDS.get(name) == "gauge" or ":" in name:
        return "gauge"
    return "counter" if re.search(r"_(total|bucket|count|sum)$", name) else "gauge"


def every_value(node, key):
    """What stands under `key` anywhere in JSON."""
    for name, child in node.items() if isinstance(node, dict) else enumerate(node):
        if name == key:
            yield child
        if isinstance(child, (dict, list)):
            yield from every_value(child, key)


def test_the_json_is_what_the_code_builds(tmp_path):
    """Built anew, every dashboard is the committed file to the last byte; `make dashboards` would change nothing."""
    code = (
        "import sys; from pathlib import Path; from grafana_dashboards.dashboards import write_dashboards; "
        "write_dashboards(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, cwd=ROOT)

    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        path.name: path.read_text() for path in PATHS
    }


def test_d07_no_dashboard_takes_the_place_of_another():
    """Uids are unique, short and begin with the product's name; titles are unique (case D07)."""
    uids = [dashboard["uid"] for dashboard in DASHBOARDS.values()]
    titles = [dashboard["title"] for dashboard in DASHBOARDS.values()]
    assert len(set(uids)) == len(set(titles)) == len(DASHBOARDS) == 5
    assert all(re.fullmatch(r"guard-[a-z]{1,34}", uid) for uid in uids)


@by_name
def test_d01_the_data_source_is_a_variable(name):
    """Every reference to a data source is the variable, so that a dashboard loads wherever it is put (case D01)."""
    text = json.dumps(DASHBOARDS[name])
    assert "__inputs" not in text
    assert "DS_" not in text
    assert DASHBOARDS[name]["id"] is None

    references = list(every_value(DASHBOARDS[name], "datasource"))
    assert len(references) >= 2
    assert all(reference == {"type": "prometheus", "uid": "${datasource}"} for reference in references)
    (variable,) = [each for each in DASHBOARDS[name]["templating"]["list"] if each["type"] == "datasource"]
    assert (variable["name"], variable["query"]) == ("datasource", "prometheus")


@by_name
def test_panels_have_numbers_of_their_own(name):
    """No two panels share an id, and none lies over another."""
    every = DASHBOARDS[name]["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    assert not {panel["id"] for row in every for panel in row.get("panels", ())} & {panel["id"] for panel in every}
    taken = [
        (x, y)
        for grid in (panel["gridPos"] for panel in every)
        for x in range(grid["x"], grid["x"] + grid["w"])
        for y in range(grid["y"], grid["y"] + grid["h"])
    ]
    assert len(set(taken)) == len(taken)
    assert max(x for x, _ in taken) < 24


@by_name
def test_every_query_is_about_series_that_exist(name):
    """Every selector names a series of the catalog, of the rules or of the servers, with label values that exist."""
    for title, expr in queries(name):
        for selector in selectors(expr):
            assert known(selector.name), f"{title}: {selector.name}"
            for matcher in selector.matchers.matchers:
                values = LABELS.get((selector.name, matcher.name), ())
                assert not values or set(matcher.value.split("|")) <= set(values), f"{title}: {matcher.value}"


def test_the_records_of_machines_exist():
    """Every series of the dashboard of machines is a record of gpu.yml, or the job's own word on where it runs."""
    named = {selector.name for _, expr in queries("gpu") for selector in selectors(expr)}
    assert {name for name in named if OF_MACHINES.match(name)} <= {*RECORDS, *KINDS}


def test_the_dashboard_of_machines_reads_records_alone():
    """No name of an exporter of GPUs, old or new, is in any query."""
    for name in DASHBOARDS:
        for title, expr in queries(name):
            assert not re.search(r"DCGM|gpu_|node_", expr), title


@by_name
def test_no_rate_of_a_gauge_and_no_counter_without_one(name):
    """Functions for counters are given counters, functions for gauges gauges."""
    for title, expr in queries(name):
        for node, above in nodes(expr):
            function = next((each.func.name for each in reversed(above) if isinstance(each, Call)), "")
            if not isinstance(node, VectorSelector) or not above or not isinstance(above[-1], MatrixSelector):
                continue
            if function in COUNTER_FUNCTIONS:
                assert kind(node.name) == "counter", f"{title}: {function}({node.name})"
            if function in (*GAUGE_FUNCTIONS, "max_over_time"):
                assert kind(node.name) == "gauge", f"{title}: {function}({node.name})"


def limits(panel):
    """The limits that are drawn in a panel."""
    defaults = panel.get("fieldConfig", {}).get("defaults", {})
    steps = defaults.get("thresholds", {}).get("steps", [])
    for override in panel.get("fieldConfig", {}).get("overrides", ()):
        steps = steps + [
            step for each in override["properties"] if each["id"] == "thresholds" for step in each["value"]["steps"]
        ]
    return [step["value"] for step in steps if step.get("value") is not None]


def linked_alerts(panel):
    """The alerts to whose pages a panel links."""
    return [link["title"].removeprefix("Runbook: ") for link in panel.get("links", ())]


@by_name
def test_limits_are_those_of_the_rules(name):
    """Each limit that a panel draws stands in the expression of an alert that it links to, or in what that one reads.

    Counts have 1 as theirs: one incident, one faulty GPU.
    """
    for panel in panels(name):
        for limit in limits(panel):
            if limit == 1 and panel["type"] == "stat":
                continue
            alerts = [alert for alert in linked_alerts(panel) if alert in ALERTS]
            text = " ".join(reach(ALERTS[alert]["expr"]) for alert in alerts)
            number = re.escape(f"{limit:.8g}")
            written = rf'(>=|>|<=|<) *{number}\b|\b{number} \* |above="{number}"|le=~"{number}\|'
            assert re.search(written, text), (panel["title"], limit, alerts)


def reach(expr):
    """An expression and those of the records that it reads."""
    return " ".join([expr, *(text for record, text in RECORDS.items() if record in expr)])


def test_the_line_of_a_surge_is_the_rules_own():
    """Where the limit moves with the run it is a line: as many times the moving average as the rule has it."""
    expr = query_of("training", "Gradient norm", "10 * ")
    assert "train_grad_norm_ema{" in expr
    assert 'train_grad_norm_ema_ratio_bucket{le=~"10|10[.]0"}' in ALERTS["TrainGradNormSurge"]["expr"]


@by_name
def test_every_link_leads_somewhere(name):
    """Links lead to a dashboard that is there, and to the alert's own panel of the runbook."""
    uids = {dashboard["uid"]: key for key, dashboard in DASHBOARDS.items()}
    titles = {panel["id"]: panel["title"] for panel in panels("runbook")}
    for panel in panels(name):
        for link in panel.get("links", ()):
            alert = link["title"].removeprefix("Runbook: ")
            assert alert in ALERTS
            uid, number = re.fullmatch(r"/d/([\w-]+)\?viewPanel=(\d+)", link["url"]).groups()
            assert uids[uid] == "runbook"
            assert titles[int(number)] == alert
    text = json.dumps(DASHBOARDS[name])
    assert set(re.findall(r"/d/([\w-]+)", text)) <= set(uids)
    (link,) = DASHBOARDS[name]["links"]
    assert (link["type"], link["keepTime"], link["includeVars"]) == ("dashboards", True, True)
    assert all(set(link["tags"]) <= set(dashboard["tags"]) for dashboard in DASHBOARDS.values())


def test_the_runbook_has_a_panel_for_every_alert():
    """Each alert has its page in Grafana, word for word that of the runbook."""
    pages = {panel["title"]: panel["options"]["content"] for panel in panels("runbook") if panel["type"] == "text"}
    assert set(ALERTS) <= set(pages)
    runbook = (ROOT / "alert_rules" / "runbook.md").read_text()
    assert all(content in runbook for content in pages.values())


def story(tmp_path, series, expected):
    """Hold queries against series in promtool: `expected` maps each query to the samples that it gives, by minute."""
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [
                {"expr": filled(expr), "eval_time": f"{minute}m", "exp_samples": samples}
                for expr, by_minute in expected.items()
                for minute, samples in by_minute.items()
            ],
        }
    ]
    (tmp_path / "story.yml").write_text(json.dumps({"rule_files": [], "tests": tests}))
    run(find_tool("promtool"), "test", "rules", tmp_path / "story.yml")


def query_of(name, title, containing):
    """The one query of a panel that contains this text."""
    (found,) = [expr for panel, expr in queries(name) if panel == title and containing in expr]
    return found


def test_d04_a_loss_that_is_nan_is_a_gap_and_a_red_state(tmp_path):
    """Where the loss is NaN there is no point at all, and a panel of its own says "non-finite" in red (case D04)."""
    loss = query_of("training", "Loss and its usual band", "(train_loss{")
    state = query_of("training", "Values", "train_nonfinite_total")
    series = {'train_loss{run="a"}': "2 2 NaN NaN +Inf", 'train_nonfinite_total{run="a",where="loss"}': "0 0 1 2 3"}
    value = {"labels": '{run="a"}'}

    story(tmp_path, series, {loss: {1: [value | {"value": 2}], 2: [], 3: [], 4: []}})
    # Two samples in the minute: promtool's own interval is one.
    story(tmp_path, series, {state.replace("[1m]", "[2m]"): {1: [value | {"value": 0}], 3: [value | {"value": 1}]}})
    (panel,) = [panel for panel in panels("training") if panel["title"] == "Values"]
    words = panel["fieldConfig"]["defaults"]["mappings"][0]["options"]
    assert words["1"] | {"index": 1} == {"text": "non-finite", "color": "red", "index": 1}


def test_a_checkpoint_is_never_newer_than_the_step(tmp_path):
    """Step and checkpoint are of one scrape: a step of the last evaluation lies before the checkpoint of a fast run."""
    age = query_of("incidents", "Intervals since the newest checkpoint", "train_checkpoint_step")
    series = {
        'train_step{run="a"}': "250 950", 'run:train_step:max{run="a"}': "0 250",
        'train_checkpoint_step{run="a",tier="local",kind="periodic"}': "200 900",
        'train_threshold{run="a",name="checkpoint_every_steps"}': "100 100",
    }  # fmt: skip
    value = {"labels": '{run="a",tier="local"}', "value": 0.5}
    story(tmp_path, series, {age: {0: [value], 1: [value]}})


def test_the_band_ends_where_the_detector_speaks(tmp_path):
    """Its upper end is that of the robust detector: so many deviations, and never nearer than its least ratio."""
    limit = query_of("training", "Loss and its usual band", "robust_score")
    series = {
        'train_loss_robust_center{run="a"}': "2x3",
        'train_loss_robust_scale{run="a"}': "0.001 0.125 0.125",
        'train_threshold{run="a",name="robust_score"}': "8x3",
        'train_threshold{run="a",name="robust_least_ratio"}': "1.25x3",
    }
    value = {"labels": '{run="a"}'}
    story(tmp_path, series, {limit: {0: [value | {"value": 2.5}], 1: [value | {"value": 3}]}})


def test_d05_an_infinite_norm_does_not_stretch_the_axis(tmp_path):
    """What is infinite is left out, and the axis of the norm is logarithmic (case D05)."""
    norm = query_of("training", "Gradient norm", "(train_grad_norm{")
    value = {"labels": '{run="a"}', "value": 1}

    story(tmp_path, {'train_grad_norm{run="a"}': "1 1 +Inf 1"}, {norm: {1: [value], 2: [], 3: [value]}})
    (panel,) = [panel for panel in panels("training") if panel["title"] == "Gradient norm"]
    assert panel["fieldConfig"]["defaults"]["custom"]["scaleDistribution"] == {"type": "log", "log": 10}


@by_name
def test_d05_a_number_that_is_not_there_is_not_green(name):
    """Stat panels call null and NaN "no value", in no colour that means anything (case D05)."""
    for panel in panels(name):
        if panel["type"] != "stat":
            continue
        special = [each for each in panel["fieldConfig"]["defaults"]["mappings"] if each["type"] == "special"]
        assert [each["options"]["match"] for each in special] == ["null+nan"]
        assert special[0]["options"]["result"]["text"] == "no value"
        assert special[0]["options"]["result"]["color"] == "text"
        assert panel["targets"][0]["instant"] is True  # A range's last point may be of a run that is long dead.


def test_d06_one_gpu_is_one_line(tmp_path):
    """A GPU whose exporter changed its labels within the hour is one line, named by rank and host (case D06)."""
    clock = query_of("gpu", "Temperature", "gpu:temperature:celsius")
    uuid = 'UUID="GPU-1"'
    (tmp_path / "gpu.yml").write_text(GPU_RULES.read_text())
    tests = {
        "rule_files": ["gpu.yml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": f'DCGM_FI_DEV_GPU_TEMP{{{uuid},gpu="0",Hostname="h",pod="x"}}', "values": "50x2 _x10"},
                    {"series": f'DCGM_FI_DEV_GPU_TEMP{{{uuid},gpu="0",hostname="h",pod="y"}}', "values": "_ _ 60x10"},
                    {"series": f'train_rank_info{{run="a",rank="3",{uuid},Hostname="h"}}', "values": "1x12"},
                ],
                "promql_expr_test": [
                    {
                        "expr": filled(clock),
                        "eval_time": "8m",
                        "exp_samples": [{"labels": f'{{rank="3",Hostname="h",{uuid}}}', "value": 60}],
                    }
                ],
            }
        ],
    }
    (tmp_path / "story.yml").write_text(json.dumps(tests))
    run(find_tool("promtool"), "test", "rules", tmp_path / "story.yml")
    legends = [target["legendFormat"] for panel in panels("gpu") for target in panel.get("targets", ())]
    assert not [legend for legend in legends if re.search("pod|container|namespace", legend)]


@by_name
def test_no_event_is_lost_at_any_zoom(name):
    """What counts events is read over the whole of each interval of the picture, whatever that is."""
    for title, expr in queries(name):
        assert "$__interval" not in expr, title
        for node, above in nodes(expr):
            if isinstance(node, VectorSelector) and ":increase1m" in node.name:
                assert isinstance(above[-1], MatrixSelector), title
