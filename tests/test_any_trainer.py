"""The rules for a trainer without our plugin: their state is the machine that it is said to be, on real servers too."""

import functools
import http.server
import json
import math
import random
import re
import shutil
import subprocess
import threading
import time
import urllib.parse
from pathlib import Path

import numpy as np
import pytest
import yaml
from tools import find_tool

from trainer_plugin.demo.process import Process, free_addresses, local_opener
from trainer_plugin.detection.detectors import EmaRatio

ROOT = Path(__file__).resolve().parent.parent
RULES = ROOT / "alert_rules" / "any_trainer.yml"
FOR_VICTORIAMETRICS = ROOT / "alert_rules" / "any_trainer_victoriametrics.yml"
STORY = ROOT / "tests" / "rules" / "any_trainer_victoriametrics_test.yml"

# Of the live test: steps a second, the step that its page begins at, and the steps of its spike.
RATE = 50
BEGIN, SPIKE, CALM = 1000, 1725, 2125
LOSSES = 2.5 + 0.5 * np.exp(-np.arange(6000) / 1000) + np.random.default_rng(1).normal(0.0, 0.025, 6000)
SUMS = np.cumsum(LOSSES)


def rules(path):
    """The rules of a file, by the names of what they record or raise."""
    (group,) = yaml.safe_load(path.read_text())["groups"]
    return {rule.get("record") or rule["alert"]: rule for rule in group["rules"]}


def tool(name):
    """A program of VictoriaMetrics, or the test is skipped."""
    try:
        return find_tool(name)
    except FileNotFoundError:
        pytest.skip(f"{name} is not here: it comes with the package victoria-metrics, unpacked into .tools")


def passes(*command):
    """A program that must succeed."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def promtool_tests(tmp_path, tests, rule_file=RULES):
    """Run stories that are made here, at an interval of 15 s."""
    path = tmp_path / "made_test.yml"
    path.write_text(json.dumps({"rule_files": [str(rule_file)], "evaluation_interval": "15s", "tests": tests}))
    passes(find_tool("promtool"), "test", "rules", path)


def remembered(state, step, loss):
    """What the state rule writes for a run of which it remembers `state`, once it sees this step and loss (or None)."""
    stale = step < state.get("step", 0) / 2 or state.get("high", 0) >= 2000
    new = {} if stale else dict(state)
    if loss is None:
        return new
    steps = step - state["step"] if "step" in state else -1
    ema = state.get("ema", -1.0)
    spike = ema > 0 and loss > 3 * ema and state.get("seen", 0) >= 500
    new["step"] = step
    new["high"] = 0
    if state.get("high", 0) > 0 and 0 <= steps < 2000 and not loss <= 3 * ema:
        new["high"] = state["high"] + steps
    elif steps > 0 and spike:
        new["high"] = 1
    if "ema" in state and steps >= 0:
        new["seen"] = state["seen"] + steps
    if "ema" in state and steps > 0 and math.isfinite(loss) and not spike:
        new["ema"] = ema + (loss - ema) * (1 - 0.99**steps)
    if math.isfinite(loss):
        new.setdefault("ema", loss)
    new.setdefault("seen", 0)
    return new


def wild_run(rng):
    """Steps and losses of 40 scrapes; no step where the scrape was lost, no loss where the page showed none."""
    usual = rng.choice([range(4), range(10, 60), range(300, 900)])
    step, level, spike_ends = rng.choice([0, 1000, 100_000]), rng.choice([0.3, 2.5]), 0
    for scrape in range(40):
        what = rng.choices(["steps", "lost", "back", "gap", "spike"], [75, 5, 5, 5, 10])[0]
        if what == "lost":
            yield None, None
            continue
        if what == "back":
            step = int(step * rng.choice([0.8, 0.4, 0.0]))
        else:
            step += rng.choice([1999, 2000]) if what == "gap" else rng.choice(usual)
        if what == "spike":
            spike_ends = scrape + rng.randint(1, 8)
        loss = level * (rng.uniform(8, 12) if scrape < spike_ends else rng.uniform(0.8, 1.2))
        yield step, rng.choice([math.nan, math.inf, None]) if rng.random() < 0.1 else loss


def series(run, name, values):
    """One input series of a promtool test: a lost scrape ends it, as Prometheus does."""
    words = {"None": "stale", "nan": "NaN", "inf": "Inf"}
    text = " ".join(words.get(str(value), repr(value)) for value in values)
    return {"series": f'any_train_{name}{{run="{run}"}}', "values": text}


@pytest.mark.parametrize("seed", range(3))
def test_the_state_is_a_small_machine(tmp_path, seed):
    """Through spikes, NaN, rollbacks, new runs, gaps and lost scrapes the rule remembers what a plain program does."""
    rng = random.Random(seed)
    inputs, expected, highest = [], {f"{15 * scrape}s": [] for scrape in range(40)}, 0
    for number in range(12):
        run, state = f"run-{number}", {}
        steps, losses = zip(*wild_run(rng), strict=True)
        inputs += [series(run, "step", steps), series(run, "loss", losses)]
        for at, step, loss in zip(expected, steps, losses, strict=True):
            if step is None:
                continue
            written = remembered(state, step, loss)
            state |= written
            highest = max(highest, written.get("high", 0))
            for kind, value in written.items():
                rounded = math.floor(value * 1e4 + 0.5) / 1e4
                expected[at].append({"labels": f'{{run="{run}",kind="{kind}"}}', "value": rounded})
    assert highest >= 200

    cases = [
        {"expr": "round(any_train:state, 0.0001)", "eval_time": at, "exp_samples": samples}
        for at, samples in expected.items()
    ]
    promtool_tests(tmp_path, [{"interval": "15s", "input_series": inputs, "promql_expr_test": cases}])


def test_an_average_that_stands_still_is_told(tmp_path):
    """Where the state rule does not work, frozen as it was or not there at all, the canary fires for each run."""
    groups = yaml.safe_load(RULES.read_text())
    (group,) = groups["groups"]
    group["rules"] = [rule for rule in group["rules"] if rule.get("record") != "any_train:state"]
    broken = tmp_path / "broken.yml"
    broken.write_text(yaml.safe_dump(groups))
    steps, losses = range(0, 1500, 30), [3 - scrape / 100 for scrape in range(50)]
    inputs = []
    for run in ("frozen", "none", "well"):
        inputs += [series(run, "step", steps), series(run, "loss", losses)]
    for run, ema in (("frozen", "2.9x50"), ("well", "3-0.005x50")):
        inputs.append({"series": f'any_train:state{{run="{run}",kind="ema"}}', "values": ema})
        inputs.append({"series": f'any_train:state{{run="{run}",kind="high"}}', "values": "0x50"})
    told = [{"labels": f'ALERTS{{alertname="AnyTrainStateFrozen",alertstate="firing",run="{run}",severity="warning"}}',
             "value": 1} for run in ("frozen", "none")]  # fmt: skip
    cases = [{"expr": "ALERTS", "eval_time": "10m", "exp_samples": told}]
    promtool_tests(tmp_path, [{"interval": "15s", "input_series": inputs, "promql_expr_test": cases}], broken)


def test_the_example_in_prometheus_yml_loads_the_rules(tmp_path):
    """Prometheus's configuration loads the rules for any trainer with its example taken up, and else does not."""
    for path in RULES.parent.glob("*.yml"):
        shutil.copy(path, tmp_path)
    config = tmp_path / "prometheus.yml"
    shipped = config.read_text()
    config.write_text(shipped.replace("#: ", ""))

    passes(find_tool("promtool"), "check", "config", config)

    assert RULES.name not in yaml.safe_load(shipped)["rule_files"]
    assert RULES.name in yaml.safe_load(config.read_text())["rule_files"]


def test_no_alert_asks_for_an_action():
    """A foreign job obeys nobody, so no alert about one goes to a receiver of commands."""
    for path in (RULES, FOR_VICTORIAMETRICS):
        for name, rule in rules(path).items():
            assert "record" in rule or set(rule["labels"]) == {"severity"}, name


def test_the_state_rule_reads_nothing_but_itself():
    """No rule reads the past of a rule that stands after it, and the state is read by an explicit range."""
    ours = rules(RULES)
    recorded = [name for name in ours if name.startswith("any_train:")]
    for place, name in enumerate(recorded):
        assert set(re.findall(r"any_train:\w+", ours[name]["expr"])) <= set(recorded[: place + 1])
    reads = re.findall(r"any_train:state(?:\{.*?\})?(.{5})", ours["any_train:state"]["expr"])
    assert set(reads) == {"[10m]"}


def test_both_variants_know_the_same_trainers():
    """The variant for VictoriaMetrics reads the same metrics, raises the same alerts, and remembers nothing."""
    ours, theirs = rules(RULES), rules(FOR_VICTORIAMETRICS)
    assert set(ours) - set(theirs) == {"any_train:state", "AnyTrainStateFrozen"}
    assert set(theirs) <= set(ours)
    assert theirs["any_train:step"] == ours["any_train:step"]
    assert _without_ranges(theirs["any_train:loss"]["expr"]) == _without_ranges(ours["any_train:loss"]["expr"])
    for name, rule in theirs.items():
        if "alert" in rule:
            assert rule["labels"] == ours[name]["labels"]
            assert rule["annotations"]["runbook_url"] == ours[name]["annotations"]["runbook_url"]
            assert rule["annotations"]["step"] == ours[name]["annotations"]["step"]
    passes(find_tool("promtool"), "check", "rules", FOR_VICTORIAMETRICS)


def _without_ranges(expr):
    return re.sub(r"last_over_time\((\w+)\[1m\]\)", r"\1", expr)


def test_vmalert_loads_its_variant():
    """VictoriaMetrics's own rule engine accepts the variant that is made for it."""
    passes(tool("vmalert"), "-dryRun", f"-rule={FOR_VICTORIAMETRICS}", "-loggerLevel=ERROR")


@pytest.mark.live
@pytest.mark.timeout(60)
def test_vmalert_tells_the_same_story(tmp_path):
    """In VictoriaMetrics the story of its variant comes true as in Prometheus, one evaluation later.

    vmalert reads what it has recorded only in the next evaluation.
    """
    unittest = tool("vmalert-tool")
    story = yaml.safe_load(STORY.read_text())
    story["rule_files"] = [str(FOR_VICTORIAMETRICS)]
    # Not every version can read an infinity in a story.
    story["tests"] = [test for test in story["tests"] if "Inf" not in str(test["input_series"])]
    for test in story["tests"]:
        test["metricsql_expr_test"] = test.pop("promql_expr_test", [])
        for case in test["alert_rule_test"]:
            case["groupname"] = "any-trainer"
        for case in test["alert_rule_test"] + test["metricsql_expr_test"]:
            minutes, seconds = re.fullmatch(r"(\d+)m(?:(\d+)s)?", case["eval_time"]).groups("0")
            case["eval_time"] = f"{60 * int(minutes) + int(seconds) + 15}s"
    path = tmp_path / "story.yml"
    path.write_text(yaml.safe_dump(story))
    passes(unittest, "unittest", f"-files={path}")


class Trainer(http.server.BaseHTTPRequestHandler):
    """The page of two trainers that make 50 steps a second: one shows its last loss, the other the sum of all."""

    def do_GET(self):
        """Where they are now; they begin with the first scrape."""
        steps = int((time.monotonic() - self.server.began()) * RATE)
        spike = 4 if SPIKE <= BEGIN + steps < CALM else 1
        page = (
            f'any_train_step{{run="gauge"}} {BEGIN + steps}\nany_train_loss{{run="gauge"}} {LOSSES[steps] * spike}\n'
            f'any_train_steps_total{{run="sum"}} {BEGIN + steps}\nany_train_loss_sum{{run="sum"}} {SUMS[steps]}\n'
        )
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(page.encode())

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture
def watched(tmp_path):
    """A function that asks the Prometheus that watches such a page."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Trainer) as page:
        page.began = functools.cache(time.monotonic)
        threading.Thread(target=page.serve_forever, daemon=True).start()
        server = prometheus(tmp_path, f"127.0.0.1:{page.server_address[1]}")

        def samples(selector):
            """Every sample of one series: its time in seconds, and its value."""
            query = urllib.parse.urlencode({"query": f"{selector}[5m]"})
            with local_opener.open(f"http://{server.address}/api/v1/query?{query}", timeout=10) as answer:
                result = json.load(answer)["data"]["result"]
            return [(at, float(value)) for at, value in result[0]["values"]] if result else []

        try:
            server.wait_ready(time.monotonic() + 20)
            yield samples
        finally:
            server.kill()
            page.shutdown()


def prometheus(folder, target):
    """A Prometheus that scrapes this address and evaluates the rules once a second."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "trainer", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    program = find_tool("prometheus").absolute()
    (address,) = free_addresses(1)
    options = (f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data")
    command = [str(program), *options, f"--web.listen-address={address}"]
    return Process("prometheus", command, address, folder / "prometheus.log", program.parent)


@pytest.mark.live
@pytest.mark.timeout(60)
def test_average_and_count_on_a_real_server(watched):
    """At 50 steps a second and an interval of 1 s the average is within 3 %, and 200 steps are told as soon as seen."""
    sustained = 'ALERTS{alertname="AnyTrainLossSpikeSustained",run="gauge",alertstate="firing"}'
    pause, deadline = threading.Event(), time.monotonic() + 40
    while not (fired := watched(sustained)):
        assert time.monotonic() < deadline, "it never fired"
        pause.wait(0.5)

    for run in ("gauge", "sum"):
        steps = [int(step) for _, step in watched(f'any_train:state{{run="{run}",kind="step"}}')]
        averages = [average for _, average in watched(f'any_train:state{{run="{run}",kind="ema"}}')]
        exact = exact_averages(steps[0], SPIKE)
        pairs = [pair for pair in zip(steps, averages, strict=False) if pair[0] < SPIKE]
        errors = [abs(average / exact[step] - 1) for step, average in pairs]
        assert len(errors) >= 10
        assert max(errors) < 0.03

    shown = watched('any_train:step{run="gauge"}')
    at_alert = next(int(step) for at, step in shown if at == fired[0][0])
    seen = [int(step) for _, step in shown if SPIKE <= step <= at_alert]
    interval_steps = max(seen[1] - seen[0], RATE)
    assert at_alert >= SPIKE + 199
    # Less than an interval until the spike is seen, and from 200 seen steps on told at once.
    assert seen[0] < SPIKE + interval_steps
    assert seen[-2] - seen[0] + 1 < 200 <= seen[-1] - seen[0] + 1


def exact_averages(first, end):
    """The average after each step from `first` on, as the job itself would make it from all of them."""
    ema = EmaRatio("loss", alpha=0.99, ratio=3.0, warmup_steps=500)
    averages = {}
    for step in range(first, end):
        loss = LOSSES[step - BEGIN]
        ema.update(step, loss, learn=not ema.ratio(loss) > 3.0)
        averages[step] = ema.ema
    return averages
