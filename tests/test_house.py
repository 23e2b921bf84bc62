"""The house: who may import whom, which lists agree, and what every file has."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from exporter import catalog
from exporter.catalog import CATALOG
from exporter.commands import Action, Outcome, Source
from trainer_plugin.detection.monitor import Monitor
from trainer_plugin.detection.readings import Readings
from trainer_plugin.metrics import _READING_GAUGES, _READING_HISTOGRAMS

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("exporter", "trainer_plugin", "alert_rules", "grafana_dashboards")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MAX_LINES = 300

# The modules of the trainer's side in one order: each may import only what stands before it.
ORDER = (
    # Plain numbers: no torch.
    "signals", "sample_ids", "damage", "detection.detectors", "detection.ordered_window", "detection.tail",
    "detection.robust", "detection.drift", "detection.level", "detection.oscillation", "detection.loss_scale",
    "detection.hard_batches", "detection.spikes", "detection.nonfinite", "detection.recovery",
    "detection.weight_jumps", "detection.readings",
    "detection.continuity", "detection.layer_baselines", "detection.monitor", "policy.table", "policy.attribution",
    "policy.incidents", "policy.decisions", "policy.partial", "policy.escalation", "policy.budget", "policy.state",
    "policy.alerts", "policy.ladder", "data.sampler", "data.source", "data.batches", "scenes.scene", "scenes.step_line",
    "scenes.overview", "checkpoints.manifest",
    "checkpoints.retention", "checkpoints.inventory", "checkpoints.inventory_table", "checkpoints.time_limit",
    "operator_command", "effects",
    # Torch, and no policy.
    "ranks", "lines", "roll_call", "step.row", "step.norms", "step.probe", "step.shared_probe", "step.untraced",
    "step.layer_signals", "step.shared_layers", "step.accumulation", "step.unscaling", "step.shield",
    "learning_rate", "schedule", "faults.table", "faults.damage", "faults.driver", "faults.links",
    "faults.plan", "faults.injector",
    "placement", "checkpoints.places", "checkpoints.plain", "checkpoints.rng",
    "checkpoints.proof", "checkpoints.snapshot", "checkpoints.state", "checkpoints.layer_state", "checkpoints.slots",
    "checkpoints.tensor_files", "checkpoints.shard_files", "checkpoints.tier", "checkpoints.assembly",
    "checkpoints.joint_plan", "checkpoints.joint_tier", "checkpoints.writer", "checkpoints.set_aside",
    "checkpoints.store",
    # What sees both rows.
    "stop_signals", "scenes.weights", "scenes.recorder", "history", "scenes.store", "scenes.step_log", "actions",
    "config", "metrics", "endpoint", "step.reader", "step.shared_reader", "step.instruments", "run_folder",
    "control_loop", "pull", "journal", "keeper", "errors", "parts", "omissions", "boundary", "guard", "__init__",
    "framework", "hf",
    "lightning",
)  # fmt: skip
NO_TORCH = ORDER[: ORDER.index("ranks")]
TORCH_ROW = ORDER[ORDER.index("ranks") : ORDER.index("history")]
KINDS = {"set": "gauge", "set_known": "gauge", "clear": "gauge", "add": "counter", "observe": "histogram"}
KNOWN = {metric.name: metric for metric in CATALOG}


def name_of(path):
    """A file as told in a message."""
    return path.relative_to(ROOT).as_posix()


def imports(path):
    """The modules that a file imports, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return found


def packages(path):
    """The top-level packages that a file imports."""
    return {module.split(".")[0] for module in imports(path)}


def path_of(module):
    """The file of a module of `trainer_plugin`."""
    return ROOT / "trainer_plugin" / f"{module.replace('.', '/')}.py"


def module_of(path):
    """The name of a file's module within `trainer_plugin`."""
    return path.relative_to(ROOT / "trainer_plugin").with_suffix("").as_posix().replace("/", ".")


def ours(path):
    """The modules of `trainer_plugin` that a file imports."""
    found = {name.removeprefix("trainer_plugin.") for name in imports(path) if name.startswith("trainer_plugin.")}
    return {name for name in found if path_of(name).exists() or name in {"backtest", "demo", "replay", "report"}}


def page_calls():
    """Every call that names a metric on a page: place, method, name, label arguments (None if not all are told)."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
                continue
            name = node.args[0]
            if node.func.attr not in KINDS or not isinstance(name, ast.Constant) or not isinstance(name.value, str):
                continue
            if not name.value.startswith("train_"):
                continue
            labels = node.args[1 if node.func.attr == "clear" else 2 :]
            starred = any(isinstance(label, ast.Starred) for label in labels)
            yield f"{name_of(path)}:{node.lineno}", node.func.attr, name.value, None if starred else labels


@pytest.mark.parametrize("path", [p for p in SOURCES if p.is_relative_to(ROOT / "exporter")], ids=name_of)
def test_exporter_imports_neither_torch_nor_the_plugin(path):
    """What speaks to Prometheus runs on hosts without torch, and knows nothing of the job's insides."""
    assert not packages(path) & {"torch", "trainer_plugin"}


@pytest.mark.parametrize("path", [p for p in SOURCES if p.is_relative_to(ROOT / "grafana_dashboards")], ids=name_of)
def test_dashboards_import_nothing_of_ours(path):
    """Dashboards know series by their names; what draws them needs no SDK, and what builds them no drawing."""
    used = packages(path)
    assert not used & {"torch", "trainer_plugin", "exporter"}
    assert "grafana_foundation_sdk" not in used or path.parent.name != "preview"
    assert "matplotlib" not in used or path.parent.name == "preview"


def test_rules_import_nothing():
    """The folder of the rules holds no code that needs anything."""
    assert imports(ROOT / "alert_rules" / "__init__.py") == set()


def test_every_module_has_its_place_in_the_order():
    """The order names every module of the trainer's side, but for what stands above: commands, demo, replay, report."""
    modules = {module_of(path) for path in (ROOT / "trainer_plugin").rglob("*.py")}
    commands = {name for name in modules if name.split(".")[0] in {"__main__", "backtest", "demo", "replay", "report"}}
    packages_themselves = {name for name in modules if name.endswith(".__init__")}
    assert modules - commands - packages_themselves == set(ORDER)


@pytest.mark.parametrize("module", ORDER)
def test_imports_go_one_way(module):
    """Each module imports only modules that stand before it."""
    assert ours(path_of(module)) <= set(ORDER[: ORDER.index(module)])


@pytest.mark.parametrize("module", NO_TORCH)
def test_judgement_needs_no_torch(module):
    """Signals, detectors, incidents and policy are plain arithmetic, also through what they import."""
    assert "torch" not in packages(path_of(module))
    assert ours(path_of(module)) <= set(NO_TORCH)


@pytest.mark.parametrize("module", ORDER[: ORDER.index("data.sampler")])
def test_judgement_has_no_clock_and_no_files(module):
    """What judges a run reads no clock, no file and no environment: it is told all it needs."""
    path = path_of(module)
    assert not packages(path) & {"os", "pathlib", "io", "shutil", "time", "datetime", "socket", "threading", "logging"}
    called = {node.func.id for node in ast.walk(ast.parse(path.read_text()))
              if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}  # fmt: skip
    assert not called & {"open", "print", "input"}


@pytest.mark.parametrize("module", TORCH_ROW)
def test_what_handles_tensors_knows_no_policy(module):
    """Probe, shield, learning rate, state and checkpoints know how, and not why or when."""
    judgement = {"policy.ladder", "policy.incidents", "detection.monitor", "detection.detectors", "guard"}
    assert not ours(path_of(module)) & judgement


@pytest.mark.parametrize(
    "path",
    sorted(path for path in (ROOT / "trainer_plugin" / "backtest").glob("*.py") if path.stem != "command"),
    ids=name_of,
)
def test_backtest_needs_no_torch(path):
    """What reads and judges old logs imports nothing with torch in it; only the command, for guard.yaml, does."""
    assert "torch" not in packages(path)
    used = {module for module in ours(path) if not module.startswith("backtest")}
    assert used <= set(NO_TORCH)


def test_the_page_needs_no_torch():
    """A process that serves a page does not load torch."""
    code = "import sys, exporter.page, exporter.serving; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_lists_of_words_agree():
    """Actions, outcomes and sources are the same words in commands and in the catalog's labels."""
    assert get_args(Action) == catalog.ACTIONS
    assert get_args(Outcome) == catalog.OUTCOMES
    assert get_args(Source) == catalog.SOURCES


def test_what_acts_has_words_in_the_catalog():
    """Each acting detector and its signal are label values of the catalog."""
    for detector, signal in Monitor.ACTING:
        assert detector in catalog.DETECTORS
        assert signal in catalog.SIGNALS


def test_every_metric_that_is_named_exists_with_the_right_kind():
    """Whatever is set, added or observed by name is in the catalog, of that kind, with that many known labels."""
    calls = list(page_calls())
    assert len(calls) > 30
    for place, method, name, labels in calls:
        assert name in KNOWN, f"{place}: {name} is not in the catalog"
        metric = KNOWN[name]
        assert metric.kind == KINDS[method], f"{place}: {method} on a {metric.kind}"
        if labels is None:
            continue
        assert len(labels) == len(metric.labels), f"{place}: {name} has {len(metric.labels)} labels"
        for label, (key, values) in zip(labels, metric.labels, strict=True):
            if isinstance(label, ast.Constant) and values:
                assert label.value in values, f"{place}: {key}={label.value!r}"


def test_the_guards_facts_are_in_the_catalogs_order():
    """What the guard tells of itself is handed over without names: its order is that of the labels."""
    told = [
        [key.value for key in node.body[0].value.keys]
        for node in ast.walk(ast.parse((ROOT / "trainer_plugin" / "parts.py").read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "_info"
    ]
    assert told == [[key for key, _ in KNOWN["train_info"].labels]]


def test_readings_are_named_after_their_metrics():
    """Each reading that is shown under its own name is a field, and a gauge or a histogram of the catalog."""
    for names, kind in ((_READING_GAUGES, "gauge"), (_READING_HISTOGRAMS, "histogram")):
        for name in names:
            assert name in Readings.__struct_fields__
            assert KNOWN[f"train_{name}"].kind == kind


def test_names_follow_prometheus():
    """Counters end in `_total` and nothing else does; no two metrics share a base name (case P20)."""
    for metric in CATALOG:
        assert metric.name.startswith("train_")
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert not {key for key, _ in metric.labels} & {"run", "rank", "le"}
    bases = [metric.name.removesuffix("_total") for metric in CATALOG]
    assert len(set(bases)) == len(bases)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_file_says_what_is_inside_and_is_not_too_long(path):
    """Every source file begins with a docstring, and has one job: not more lines than fit one."""
    text = path.read_text()
    docstring = ast.get_docstring(ast.parse(text))
    assert docstring
    assert docstring.splitlines()[0].endswith(".")
    assert len(text.splitlines()) <= MAX_LINES


def test_every_test_says_what_is_true():
    """Each test has a docstring of one sentence."""
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), name_of(path)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                said = ast.get_docstring(node)
                assert said, f"{name_of(path)}: {node.name}"
                assert said.endswith("."), f"{name_of(path)}: {node.name}"


@pytest.mark.timeout(60)
def test_the_command_line_imports_no_torch():
    """What reads old logs answers at once, and on hosts without torch; `Guard` is there all the same."""
    code = "import sys, trainer_plugin.__main__; assert 'torch' not in sys.modules; import trainer_plugin as t; t.Guard"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
