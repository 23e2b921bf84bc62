"""Alert rules, their configuration files and their runbook: valid, tested, routed, and about metrics that exist."""

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools import find_tool

from exporter.catalog import ACTIONS, CATALOG

ROOT = Path(__file__).resolve().parent.parent
RULES = ROOT / "alert_rules"
# The variant for VictoriaMetrics is held against the other one in test_any_trainer.py.
NO_RULES = {"prometheus.yml", "alertmanager.yml", "any_trainer_victoriametrics.yml"}
RULE_FILES = sorted(path for path in RULES.glob("*.yml") if path.name not in NO_RULES)
# What is loaded unless one asks for more, and reads scraped series only.
LOADED = [path for path in RULE_FILES if path.name != "any_trainer.yml"]
STORIES = sorted((ROOT / "tests" / "rules").glob("*_test.yml"))

KINDS = {metric.name: metric.kind for metric in CATALOG}
SEVERITIES = {"critical", "warning", "info", "none"}
COUNTER_FUNCTIONS = ("rate", "irate", "increase", "resets")
GAUGE_FUNCTIONS = ("delta", "idelta", "deriv", "predict_linear")


def run(*command: str | Path) -> str:
    """The output of a program that must succeed."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


def load(path: Path) -> Any:
    """A YAML file's content."""
    return yaml.safe_load(path.read_text())


def rules(paths: Iterable[Path] = RULE_FILES) -> list[dict[str, Any]]:
    """Every rule of these rule files."""
    return [rule for path in paths for group in load(path)["groups"] for rule in group["rules"]]


ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}
RECORDS = [rule["record"] for rule in rules(LOADED) if "record" in rule]


def expected_alerts() -> Iterator[tuple[str, dict[str, str]]]:
    """Every firing alert that a story spells out: its name, and its labels as Alertmanager gets them."""
    for path in STORIES:
        for story in load(path)["tests"]:
            for case in story.get("alert_rule_test", []):
                for alert in case.get("exp_alerts", []):
                    yield case["alertname"], {"alertname": case["alertname"], **alert["exp_labels"]}


def texts(alert: dict[str, Any]) -> str:
    """The expression and the annotations of an alert, which ask for series as well."""
    return "\n".join([alert["expr"], *alert["annotations"].values()])


def catalog_kind(series: str) -> str | None:
    """The kind of the series `series` on the job's page, or None if it is not there."""
    stem = re.sub(r"_(bucket|count|sum)$", "", series)
    if KINDS.get(stem) == "histogram":
        return None if series == stem else "counter"
    return KINDS.get(series)


def misuses(expr: str) -> list[str]:
    """Functions for counters that are given a gauge in `expr`, and the other way round."""
    found = []
    for function, series in re.findall(r"\b(\w+)\s*\(\s*(train_\w+)", expr):
        kind = catalog_kind(series)
        if (function in COUNTER_FUNCTIONS and kind != "counter") or (function in GAUGE_FUNCTIONS and kind == "counter"):
            found.append(f"{function}({series}), a {kind}")
    return found


@pytest.mark.parametrize("path", RULE_FILES, ids=lambda path: path.stem)
def test_rule_file_is_valid(path):
    """Promtool accepts every rule file."""
    run(find_tool("promtool"), "check", "rules", path)


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_story_comes_true(path):
    """Every alert fires at the very evaluation that its story says, with those labels and words, and else is silent."""
    run(find_tool("promtool"), "test", "rules", path)


def test_prometheus_configuration_is_valid_and_loads_every_rule_file(tmp_path):
    """Prometheus's configuration is valid where its rule files lie beside it, and names all of them."""
    for path in (*RULE_FILES, RULES / "prometheus.yml"):
        shutil.copy(path, tmp_path)
    run(find_tool("promtool"), "check", "config", tmp_path / "prometheus.yml")
    assert sorted(load(RULES / "prometheus.yml")["rule_files"]) == [path.name for path in LOADED]


def test_two_prometheus_servers_send_one_alert():
    """The label that tells two Prometheus servers apart is dropped from alerts (case M04)."""
    relabel = load(RULES / "prometheus.yml")["alerting"]["alert_relabel_configs"]
    assert relabel == [{"action": "labeldrop", "regex": "replica"}]


def test_alertmanager_configuration_is_valid_with_and_without_its_examples(tmp_path):
    """Alertmanager's configuration is valid as it is, and with every example in its comments taken up."""
    shipped = (RULES / "alertmanager.yml").read_text()
    taken_up = tmp_path / "alertmanager.yml"
    taken_up.write_text(shipped.replace("#: ", ""))
    assert taken_up.read_text() != shipped
    run(find_tool("amtool"), "check-config", RULES / "alertmanager.yml")
    run(find_tool("amtool"), "check-config", taken_up)


@pytest.mark.parametrize(
    ("name", "labels"),
    [pytest.param(name, labels, id=f"{name}-{number}") for number, (name, labels) in enumerate(expected_alerts())],
)
def test_alert_reaches_its_receivers(name, labels):
    """An alert as it really fires goes to the job only if the job shall act, the heartbeat nowhere else."""
    wanted = ["people"]
    if "action" in ALERTS[name]["labels"]:
        wanted = ["job", "people"]
    if name == "TrainWatchdog":
        wanted = ["heartbeat"]
    pairs = [f"{key}={value}" for key, value in labels.items()]
    config = f"--config.file={RULES / 'alertmanager.yml'}"
    assert run(find_tool("amtool"), "config", "routes", "test", config, *pairs).strip() == ",".join(wanted)


def test_the_job_is_told_at_once():
    """The action route neither groups nor waits, and has no longer interval in which a second firing could be lost."""
    action = load(RULES / "alertmanager.yml")["route"]["routes"][0]
    del action["repeat_interval"]
    assert action == {
        "receiver": "job",
        "matchers": ['action!=""'],
        "group_by": ["..."],
        "group_wait": "0s",
        "group_interval": "1s",
        "continue": True,
    }


def test_repeats_fall_on_a_flush():
    """The repeat interval of every route is its own and a multiple of the route's group interval (case M03)."""
    unit = {"s": 1, "m": 60, "h": 3600}
    root = load(RULES / "alertmanager.yml")["route"]
    for route in (root, *root["routes"]):
        repeat = route["repeat_interval"]
        group = route.get("group_interval", root["group_interval"])
        repeat_seconds, group_seconds = (int(text[:-1]) * unit[text[-1]] for text in (repeat, group))
        assert repeat_seconds > group_seconds, route
        assert repeat_seconds % group_seconds == 0, route


def test_inhibition_compares_labels_that_both_sides_carry():
    """Every alert on either side of an inhibition carries the labels it compares, and none has an action (case M07)."""
    (rule,) = load(RULES / "alertmanager.yml")["inhibit_rules"]
    names = set(re.findall(r"Train\w+", " ".join(rule["source_matchers"] + rule["target_matchers"])))
    assert names <= set(ALERTS)
    fired = [(name, labels) for name, labels in expected_alerts() if name in names]
    assert {name for name, _ in fired} == names
    for name, labels in fired:
        assert set(rule["equal"]) <= set(labels), name
        assert "action" not in labels, name


@pytest.mark.parametrize("name", ALERTS)
def test_alert_has_a_story_in_which_it_fires_and_one_in_which_it_is_silent(name):
    """Every alert is spelled out firing, and there is an evaluation at which it must not fire."""
    cases = [case for path in STORIES for story in load(path)["tests"] for case in story.get("alert_rule_test", [])]
    own = [case for case in cases if case["alertname"] == name]
    assert any(case.get("exp_alerts") for case in own)
    silent_by_query = name == "TrainWatchdog"  # It ends with its run's series: the stories ask for ALERTS.
    assert silent_by_query or any(not case.get("exp_alerts") for case in own)


def test_stories_are_about_alerts_that_exist():
    """No story asks whether an alert is silent that no rule could raise."""
    cases = [case for path in STORIES for story in load(path)["tests"] for case in story.get("alert_rule_test", [])]
    assert {case["alertname"] for case in cases} == set(ALERTS)


@pytest.mark.parametrize("record", RECORDS)
def test_record_has_a_story(record):
    """Every recorded series is asked for in a story, and its name says level, metric and operation."""
    assert re.fullmatch(r"run:[a-z_]+:[a-z0-9_]+", record)
    asked = [
        case["expr"] for path in STORIES for story in load(path)["tests"] for case in story.get("promql_expr_test", [])
    ]
    assert record in asked


@pytest.mark.parametrize("name", ALERTS)
def test_alert_is_complete(name):
    """Every alert has its severity and its words, and its identity is made of no label that a restart changes."""
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in SEVERITIES
    assert {"summary", "description", "runbook_url"} <= set(alert["annotations"])
    assert "{{" not in alert["annotations"]["summary"]
    assert alert["annotations"]["runbook_url"] == f"runbook.md#{name.lower()}"
    for fired, labels in expected_alerts():
        if fired == name:
            assert not {"instance", "rank"} & set(labels)
            assert "run" in labels or name == "TrainReceiverDown"


@pytest.mark.parametrize("name", [name for name, alert in ALERTS.items() if "action" in alert["labels"]])
def test_alert_with_an_action_can_be_obeyed(name):
    """An alert with an action names one that exists, says at which step, and ends with its condition."""
    alert = ALERTS[name]
    assert alert["labels"]["action"] in ACTIONS
    assert {"step", "steps_total"} <= set(alert["annotations"])
    assert not {"for", "keep_firing_for"} & set(alert)


def test_only_alerts_that_ask_for_an_action_carry_the_label():
    """No alert inherits the label `action` from its series: the report of a rollback would ask for the next one."""
    for name, labels in expected_alerts():
        assert labels.get("action") == ALERTS[name]["labels"].get("action"), name


def test_no_alert_waits_long():
    """No `for` is longer than 2 minutes: long conditions are ranges, which survive Prometheus's restart (case R20)."""
    assert {alert["for"] for alert in ALERTS.values() if "for" in alert} <= {"30s", "1m", "2m"}


def test_every_alert_has_a_runbook_heading_and_every_heading_an_alert():
    """The runbook has exactly one heading for each alert, each with its three paragraphs."""
    chapters = re.split(r"^## ", (RULES / "runbook.md").read_text(), flags=re.MULTILINE)[1:]
    headings = [chapter.splitlines()[0] for chapter in chapters]
    assert sorted(headings) == sorted(ALERTS)
    for chapter in chapters:
        marks = re.findall(r"^\*\*(.+?)\.\*\*", chapter, flags=re.MULTILINE)
        assert marks == ["Meaning", "What the stack did", "What you do"], chapter.splitlines()[0]


def test_rules_ask_for_metrics_that_exist():
    """Every metric of the job that a rule asks for is in the catalog, with label values that it knows (case R12)."""
    text = "\n".join([rule["expr"] for rule in rules()] + [texts(alert) for alert in ALERTS.values()])
    asked = set(re.findall(r"\btrain_\w+", text))
    assert {series for series in asked if catalog_kind(series) is None} == set()
    known = {(metric.name, label): values for metric in CATALOG for label, values in metric.labels}
    for series, selector in re.findall(r"\b(train_\w+)\{(.+?)\}", text):
        for label, value in re.findall(r'(\w+)=~?"(.*?)"', selector):
            values = known.get((series, label), ())
            assert not values or set(value.split("|")) <= set(values), f"{series}{{{selector}}}"


def test_histogram_tails_begin_at_a_bucket():
    """The bounds that the spike alerts ask for are buckets of their histograms, in both spellings of `le`."""
    buckets = {metric.name: metric.buckets for metric in CATALOG}
    asked = [found for rule in rules() for found in re.findall(r'(train_\w+)_bucket\{le=~"(.+?)"\}', rule["expr"])]
    assert len(asked) == 2
    for histogram, pattern in asked:
        for spell in ("{:g}", "{:.1f}"):
            matching = [bound for bound in buckets[histogram] if re.fullmatch(pattern, spell.format(bound))]
            assert len(matching) == 1, f"{histogram} {pattern}"


def test_no_rate_of_a_gauge_and_no_slope_of_a_counter():
    """Functions for counters are given counters, functions for gauges gauges (case R15)."""
    assert misuses("increase(train_loss[1m]) + deriv(train_steps_total[5m]) + rate(train_steps_total[1m])") == [
        "increase(train_loss), a gauge",
        "deriv(train_steps_total), a counter",
    ]
    assert [found for rule in rules() for found in misuses(rule["expr"])] == []


def test_no_rule_reads_a_recorded_series():
    """Rules read scraped series only: no order of groups matters, and no rule can read its own past (case R07)."""
    assert [rule for rule in rules(LOADED) if re.search(r"\w:\w", re.sub(r'"[^"]*"', "", rule["expr"]))] == []


def test_tool_that_is_missing_is_named_with_its_remedy():
    """A missing program is an error that says how to get it."""
    with pytest.raises(FileNotFoundError, match=r"no-such-tool is neither on PATH nor in .*: run `make tools` first"):
        find_tool("no-such-tool")
