"""Alert rules, their configuration files and their runbook: valid, tested, routed, and about metrics that exist."""

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from test_guard_page import Stack
from tools import find_tool

from exporter.catalog import ACTIONS, CATALOG, THRESHOLDS
from exporter.runs import RunFolder
from exporter.webhook import MAX_BODY_BYTES, build_app
from trainer_plugin.detection.detectors import DetectionConfig

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
# About the stack itself, which all runs share.
WITHOUT_RUN = {
    "TrainReceiverDown", "TrainAlertmanagerDown", "TrainNotificationsFailing", "TrainAlertsDropped",
    "TrainRulesFailing", "TrainRulesLate", "TrainAlertsTruncated", "TrainGpuMetricsDown",
}  # fmt: skip
SECONDS = {"s": 1, "m": 60, "h": 3600}
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


def asked() -> str:
    """Everything in which a rule asks for series: expressions and annotations."""
    return "\n".join([rule["expr"] for rule in rules()] + [texts(alert) for alert in ALERTS.values()])


def seconds(duration: str) -> int:
    """A duration with one unit, as the configurations have it."""
    return int(duration[:-1]) * SECONDS[duration[-1]]


def selectors(text: str) -> set[tuple[str, tuple[tuple[str, str, str], ...]]]:
    """Every selector of a metric of ours, of Prometheus's or Alertmanager's: its name, and its matchers but `run`."""
    found = set()
    for name, inside in re.findall(r"\b((?:train|receiver|prometheus|alertmanager)_\w+)(?:\{(.*?)\})?", text):
        matchers = re.findall(r'(\w+)(=~|!=|!~|=)"(.*?)"', inside)
        found.add((name, tuple(matcher for matcher in matchers if matcher[0] != "run")))
    return found


def selects(matchers: tuple[tuple[str, str, str], ...], labels: dict[str, str]) -> bool:
    """Whether a selector's or a route's matchers select these labels; a label that is not there is empty."""
    return all(
        (re.fullmatch(wanted, labels.get(name, "")) is not None if "~" in kind else wanted == labels.get(name, ""))
        != kind.startswith("!")
        for name, kind, wanted in matchers
    )


def misuses(expr: str, kinds: dict[str, str]) -> list[str]:
    """Functions for counters that are given a gauge in `expr`, and the other way round; `kinds` by series."""
    found = []
    for at in re.finditer(r"(\w+)(\{[^{}]*\})?\[\w+\]", expr):
        depth, function = 0, ""
        for place in range(at.start() - 1, -1, -1):  # Back to the bracket that is open here, and the word before it.
            depth += {")": 1, "(": -1}.get(expr[place], 0)
            if depth < 0:
                function = re.search(r"\w*$", expr[:place])[0]
                break
        kind = kinds.get(at[1], "")  # Other trainers' series have none here.
        if (function in COUNTER_FUNCTIONS and kind not in ("counter", "")) or (
            function in GAUGE_FUNCTIONS and kind == "counter"
        ):
            found.append(f"{function}({at[1]}), a {kind}")
    return found


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> str:
    """The real pages of a job under way and of the receiver beside it."""
    folder = tmp_path_factory.mktemp("job")
    job = Stack(folder, layers=3, scaled=True)
    try:
        for loss in (2.0, float("nan"), 2.0):
            job.step(loss, tokens=8, sample_ids=["a"])
        job.guard._parts.loop.flush(5.0)
        RunFolder(folder / "runs", "tiny").beat(0.0)
        transport = httpx.ASGITransport(build_app(folder / "runs"))

        async def scrape() -> str:
            async with httpx.AsyncClient(transport=transport, base_url="http://receiver") as client:
                return (await client.get("/metrics")).text

        return job.guard.page.render().decode() + asyncio.run(scrape())
    finally:
        job.guard.close()


@pytest.fixture(scope="module")
def series(pages) -> list[tuple[str, dict[str, str]]]:
    """Every series of the real pages: its name and labels."""
    return [(s.name, s.labels) for family in text_string_to_metric_families(pages) for s in family.samples]


def kinds_told(pages: str) -> dict[str, str]:
    """The kind of every series of these pages, by their TYPE lines."""
    told = dict(re.findall(r"^# TYPE (\w+) (\w+)$", pages, re.MULTILINE))
    histograms = [name for name, kind in told.items() if kind == "histogram"]
    return told | {f"{name}_{part}": "counter" for name in histograms for part in ("bucket", "count", "sum")}


@pytest.fixture(scope="module")
def kinds(pages) -> dict[str, str]:
    """The kind of every series by the real pages; of those of the servers, by their names."""
    servers = {name for name, _ in selectors(asked()) if name.startswith(("prometheus_", "alertmanager_"))}
    return kinds_told(pages) | {name: "counter" if name.endswith("_total") else "gauge" for name in servers}


@pytest.mark.parametrize("path", RULE_FILES, ids=lambda path: path.stem)
def test_rule_file_is_valid(path):
    """Promtool accepts every rule file."""
    run(find_tool("promtool"), "check", "rules", path)


@pytest.mark.timeout(60)
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


def test_m04_two_prometheus_servers_send_one_alert():
    """The label that tells two Prometheus servers apart is dropped from alerts (case M04)."""
    relabel = load(RULES / "prometheus.yml")["alerting"]["alert_relabel_configs"]
    assert relabel == [{"action": "labeldrop", "regex": "replica"}]


@pytest.fixture(scope="module")
def taken_up(tmp_path_factory) -> Path:
    """Alertmanager's configuration with every example in its comments taken up."""
    path = tmp_path_factory.mktemp("alertmanager") / "alertmanager.yml"
    path.write_text((RULES / "alertmanager.yml").read_text().replace("#: ", ""))
    shutil.copy(RULES / "messages.tmpl", path.parent)
    return path


def test_alertmanager_configuration_is_valid_with_and_without_its_examples(taken_up):
    """Alertmanager's configuration is valid as it is, and with every example taken up, templates and all."""
    shipped = {receiver["name"] for receiver in load(RULES / "alertmanager.yml")["receivers"]}
    assert {receiver["name"] for receiver in load(taken_up)["receivers"]} - shipped == {"pager", "chat", "log"}
    for path in (RULES / "alertmanager.yml", taken_up):
        assert "1 templates" in run(find_tool("amtool"), "check-config", path)


def test_no_secret_stands_in_the_configuration(taken_up):
    """Tokens, keys and addresses that are secret themselves are named as files, in the examples too."""
    secret = re.compile(r"^(credentials|password|token|routing_key|service_key|api_key|api_url|bearer_token)$")

    def keys(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            yield from node
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            yield from keys(child)

    assert [key for key in keys(load(taken_up)) if secret.match(key)] == []
    assert {"credentials_file", "routing_key_file", "api_url_file"} <= set(keys(load(taken_up)))


DIFFERENT = {(name, tuple(sorted(labels.items()))) for name, labels in expected_alerts()}


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_alert_reaches_its_receivers(name, taken_up):
    """An alert as it really fires goes to the job only if the job shall act, the heartbeat nowhere else.

    People get it as well: one receiver of theirs by its severity, once the examples are taken up.
    """
    by_severity = {"critical": "pager", "warning": "chat", "info": "log"}
    fired = [labels for fired, labels in DIFFERENT if fired == name]
    assert fired
    for config, people in ((RULES / "alertmanager.yml", None), (taken_up, by_severity)):
        for labels in fired[:2]:
            wanted = [people[dict(labels)["severity"]] if people and name != "TrainWatchdog" else "people"]
            wanted = ["heartbeat"] if name == "TrainWatchdog" else wanted
            wanted = ["job", *wanted] if "action" in ALERTS[name]["labels"] else wanted
            pairs = [f"{key}={value}" for key, value in labels]
            told = run(find_tool("amtool"), "config", "routes", "test", f"--config.file={config}", *pairs)
            assert told.strip() == ",".join(wanted)


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


def test_m03_repeats_fall_on_a_flush(taken_up):
    """The repeat interval of every route is its own and a multiple of the route's group interval (case M03)."""
    root = load(taken_up)["route"]
    assert len(root["routes"]) == 6
    for route in (root, *root["routes"]):
        repeat = seconds(route["repeat_interval"])
        group = seconds(route.get("group_interval", root["group_interval"]))
        assert repeat > group, route
        assert repeat % group == 0, route


def test_m02_runs_and_alerts_are_told_apart(taken_up):
    """No route puts two runs into one group, and only the pager two alerts of one run: they are one page (case M02)."""
    root = load(taken_up)["route"]
    together = []
    for route in (root, *root["routes"]):
        group_by = route.get("group_by", root["group_by"])
        assert "run" in group_by or group_by == ["..."], route
        if "alertname" not in group_by and group_by != ["..."]:
            together.append(route["receiver"])
    assert together == ["pager"]


def test_m06_a_message_has_a_limit_and_the_receiver_room_for_it():
    """What comes to the receiver is limited, and so many alerts with all their words fit into its largest body."""
    config = load(RULES / "alertmanager.yml")
    limits = [hook["max_alerts"] for receiver in config["receivers"] for hook in receiver.get("webhook_configs", ())]
    assert limits
    longest = max(len(json.dumps([rule["labels"], rule["annotations"]])) for rule in ALERTS.values())
    for limit in limits:
        assert 0 < limit * 2 * longest < MAX_BODY_BYTES


def matchers(lines: list[str]) -> tuple[tuple[str, str, str], ...]:
    """The matchers of an inhibition."""
    return tuple(re.fullmatch(r'(\w+)(=~|!=|!~|=)"(.*)"', line).groups() for line in lines)


def test_m07_inhibition_compares_labels_that_both_sides_carry():
    """Every alert on either side of an inhibition carries the labels it compares, and none has an action (case M07).

    One without `equal` is by an alert about the stack, which all runs share.
    """
    for rule in load(RULES / "alertmanager.yml")["inhibit_rules"]:
        sources = [(n, labels) for n, labels in DIFFERENT if selects(matchers(rule["source_matchers"]), dict(labels))]
        targets = [(n, labels) for n, labels in DIFFERENT if selects(matchers(rule["target_matchers"]), dict(labels))]
        named = set(re.findall(r"Train\w+", " ".join(rule["source_matchers"] + rule["target_matchers"])))
        assert sources
        assert named <= {name for name, _ in sources + targets}
        for name, labels in sources + targets:
            assert set(rule.get("equal", ())) <= set(dict(labels)), name
        if "equal" not in rule:
            assert {name for name, _ in sources} <= WITHOUT_RUN
        assert not [name for name, labels in targets if "action" in dict(labels)]
        assert not {name for name, _ in targets} & {name for name, _ in sources}


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
    assert re.fullmatch(r"(run|rank|gpu|host):[a-z_]+:[a-z0-9_]+", record)
    asked = [
        case["expr"] for path in STORIES for story in load(path)["tests"] for case in story.get("promql_expr_test", [])
    ]
    assert any(record in expr for expr in asked)


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
            assert ("run" in labels) != (name in WITHOUT_RUN)


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


def test_r20_no_alert_waits_long():
    """No `for` is longer than 2 minutes, of a critical alert no longer than 1 (case R20).

    A restart of Prometheus forgets what is pending; long conditions are ranges, which it does not forget.
    """
    for name, alert in ALERTS.items():
        assert seconds(alert.get("for", "0s")) <= (60 if alert["labels"]["severity"] == "critical" else 120), name
    assert not [group for path in RULE_FILES for group in load(path)["groups"] if "interval" in group]


def test_r11_what_a_job_may_die_of_is_kept():
    """A signal that informs is kept for 5 minutes, so that the job's death does not look like its cure (case R11).

    Other than those of a range that is longer, and of limits that do not change. Prometheus 2.42 has that option first.
    """
    kept = {name for name, alert in ALERTS.items() if seconds(alert.get("keep_firing_for", "0s")) >= 300}
    signals = {rule["alert"] for rule in load(RULES / "training.yml")["groups"][0]["rules"]}
    informing = {name for name in signals if "action" not in ALERTS[name]["labels"]}
    assert informing - kept == {"TrainStalled", "TrainThresholdsDiffer"}
    assert "2.42" in (RULES / "prometheus.yml").read_text().splitlines()[0]


def test_every_alert_has_a_runbook_heading_and_every_heading_an_alert():
    """The runbook has exactly one heading for each alert, each with its three paragraphs."""
    chapters = re.split(r"^## ", (RULES / "runbook.md").read_text(), flags=re.MULTILINE)[1:]
    headings = [chapter.splitlines()[0] for chapter in chapters]
    assert sorted(headings) == sorted(ALERTS)
    for chapter in chapters:
        marks = re.findall(r"^\*\*(.+?)\.\*\*", chapter, flags=re.MULTILINE)
        assert marks == ["Meaning", "What the stack did", "What you do"], chapter.splitlines()[0]


def test_r12_rules_ask_for_series_that_are_on_a_real_page(series):
    """Every series that a rule or its words ask for is on the page of a job or of the receiver, label values too.

    Those of Prometheus and Alertmanager themselves: see test_alertmanager.py (case R12).
    """
    ours = {(name, wanted) for name, wanted in selectors(asked()) if name.startswith(("train_", "receiver_"))}
    assert len(ours) > 40
    for name, wanted in ours:
        wanted_here = tuple(matcher for matcher in wanted if matcher[0] != "job")
        assert any(name == there and selects(wanted_here, labels) for there, labels in series), f"{name}{wanted}"


def test_rules_ask_for_metrics_of_the_catalog():
    """Every metric of the job that a rule asks for is in the catalog, with label values that it knows."""
    known = {(metric.name, label): values for metric in CATALOG for label, values in metric.labels}
    for name, wanted in selectors(asked()):
        if not name.startswith("train_"):
            continue
        assert name in KINDS or KINDS.get(re.sub(r"_(bucket|count|sum)$", "", name)) == "histogram", name
        for label, _, value in wanted:
            values = known.get((name, label), ())
            assert not values or set(value.split("|")) <= set(values), f"{name}{wanted}"


def test_histogram_tails_begin_at_a_bucket():
    """The bounds that rules and their words ask for are buckets of their histograms, in both spellings of `le`.

    Recorded series and alerts ask for the same bound of the same histogram.
    """
    buckets = {metric.name: metric.buckets for metric in CATALOG}
    tails = {
        (name.removesuffix("_bucket"), *(value for label, _, value in wanted if label == "le"))
        for name, wanted in selectors(asked())
        if name.endswith("_bucket") and any(label == "le" for label, _, _ in wanted)
    }
    assert len(tails) == len(dict(tails)) == 5
    for histogram, pattern in tails:
        for spell in ("{:g}", "{!r}"):
            matching = [bound for bound in buckets[histogram] if re.fullmatch(pattern, spell.format(bound))]
            assert len(matching) == 1, f"{histogram} {pattern}"


def test_r15_no_rate_of_a_gauge_and_no_slope_of_a_counter(kinds):
    """Functions for counters are given counters, functions for gauges gauges, by the pages' own TYPE (case R15)."""
    wrong = "increase(train_loss[1m]) + deriv(train_steps_total[5m]) + rate(train_steps_total[1m])"
    assert misuses(wrong + " + max(resets( train_grad_norm{run='a'}[5m] offset 1m))", kinds) == [
        "increase(train_loss), a gauge",
        "deriv(train_steps_total), a counter",
        "resets(train_grad_norm), a gauge",
    ]
    assert misuses(asked(), kinds) == []
    assert not re.search(r"\[\w+:\w*\]", asked())  # A subquery would hide what it holds.


def test_limits_that_differ_are_told_by_the_rules_own():
    """TrainThresholdsDiffer holds the job's limits against the defaults, and these are the rules' own numbers."""
    limits = dict(re.findall(r'train_threshold\{name="(\w+)"\} != ([0-9.]+)', ALERTS["TrainThresholdsDiffer"]["expr"]))
    assert set(limits) <= set(THRESHOLDS)
    for name, limit in limits.items():
        assert float(limit) == getattr(DetectionConfig(), name), name
    used = {
        "robust_score": ("TrainLossSpike", 'robust_score_bucket{le=~"8|8[.]0"}'),
        "loss_ratio": ("TrainLossSpike", 'ema_ratio_bucket{le=~"3|3[.]0"}'),
        "sigma": ("TrainLossSpike", 'le="3.5"'),
        "grad_norm_ratio": ("TrainGradNormSurge", 'le=~"10|10[.]0"'),
        "sustained_steps": ("TrainLossNotRecovering", ">= 200"),
        "amp_scale_floor": ("TrainAmpScaleCollapse", "< 1\n"),
        "amp_scale_ceiling": ("TrainAmpScaleRunaway", "> 16777216"),
    }
    assert set(used) == set(limits)
    for name, (alert, words) in used.items():
        assert words in texts(ALERTS[alert]), name
        assert f"{float(limits[name]):.10g}" in words


def test_r19_gauges_of_dead_targets_do_not_count():
    """Every rule that takes the latest sample of a gauge of the job's takes it of pages that answer (case R19).

    One of so many hours ago is of a page that answered then.
    """
    latest = r"\b(?:max|min|sum|count) by \([\w, ]+\) \(\s*(train_\w+)(\{[^}]*\})?(?![\[\w{]| offset)"
    unguarded = set()
    for rule in rules():
        expr = rule["expr"]
        for at in re.finditer(latest, expr):
            depth, end = 1, at.end()
            while depth:
                depth += {"(": 1, ")": -1}.get(expr[end], 0)
                end += 1
            if "and on (job, instance) up == 1" not in expr[at.end() : end]:
                unguarded.add(at[1])
    # What has happened and what was set stay so; the heartbeat of a dead job harms nobody.
    assert unguarded == {"train_steps_total", "train_threshold", "train_restore_proofs_total"}


def test_m06_the_nan_of_512_ranks_is_a_handful_of_alerts(tmp_path):
    """Where all of 512 ranks are NaN, 3 alerts of the run reach the receiver, and people get one a place (case M06)."""
    ranks = [f'run="a",rank="{rank}",job="train",instance="h:{rank}"' for rank in range(512)]
    given = [
        {"series": f'train_nonfinite_total{{{rank},where="{where}"}}', "values": "0 1 1 1"}
        for rank in ranks
        for where in ("loss", "grad", "weight")
    ]
    given += [{"series": f"up{{{rank}}}", "values": "1x3"} for rank in ranks]
    given += [
        {"series": f"{name}{{{ranks[0]}}}", "values": values}
        for name, values in (("train_steps_total", "0+30x3"), ("train_steps_withheld", "0+10x3"))
    ]
    firing = 'count by (run) (ALERTS{alertstate="firing",action!=""} or ALERTS{alertname="TrainWatchdog"})'
    asked_for = [(firing, [{"labels": '{run="a"}', "value": 3}]),
                 ("count by (run) (ALERTS)", [{"labels": '{run="a"}', "value": 6}])]  # fmt: skip
    story = {
        "rule_files": [str(RULES / "training.yml"), str(RULES / "stack.yml")],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": [*given, *({"series": f'up{{job="{job}"}}', "values": "1x3"}
                                           for job in ("receiver", "alertmanager"))],
                "promql_expr_test": [
                    {"expr": expr, "eval_time": "30s", "exp_samples": samples} for expr, samples in asked_for
                ],
            }
        ],
    }  # fmt: skip
    (tmp_path / "story.yml").write_text(json.dumps(story))
    run(find_tool("promtool"), "test", "rules", tmp_path / "story.yml")


def test_r07_no_rule_reads_a_recorded_series_but_of_its_own_group():
    """Rules read scraped series only: no order of groups matters, and no rule can read its own past (case R07).

    Those of the machine read what their own group has recorded before them in the same evaluation.
    """
    recorded = re.compile(r"\b[a-z]+:\w+:\w+")
    for path in LOADED:
        for group in load(path)["groups"]:
            earlier: set[str] = set()
            for rule in group["rules"]:
                read = set(recorded.findall(re.sub(r'"[^"]*"', "", rule["expr"])))
                assert read <= earlier, rule
                assert path.name == "gpu.yml" or not read, rule
                earlier.add(rule.get("record", ""))


def test_tool_that_is_missing_is_named_with_its_remedy():
    """A missing program is an error that says how to get it."""
    with pytest.raises(FileNotFoundError, match=r"no-such-tool is neither on PATH nor in .*: run `make tools` first"):
        find_tool("no-such-tool")
