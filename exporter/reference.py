"""The reference of metrics and alerts, `alert_rules/reference.md`, made of the catalog, the GPU table and the rules.

python -m exporter.reference > alert_rules/reference.md
"""

from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from exporter.catalog import CATALOG, Metric
from exporter.gpu.families import METRICS as GPU_METRICS
from exporter.receiver_metrics import ReceiverMetrics

_HEAD = """# Reference: metrics and alerts

Made of the code by `make reference`; a test holds it against what is exported. What an alert means and what you do is
in [runbook.md](runbook.md).
"""
_RULES = ("training", "stack", "gpu", "any_trainer")


def reference() -> str:
    """The whole text."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield _HEAD
    yield "## Metrics of a training job\n"
    yield "`run` and `rank` are on every series. What several ranks have in common is on the page of rank 0 alone.\n"
    yield from _table(("metric", "type", "labels", "every rank", "what it is"), map(_job_metric, CATALOG))
    yield "\n## Metrics of the receiver\n"
    yield from _table(("metric", "type", "what it is"), _receiver_metrics())
    yield "\n## Metrics of GPUs\n"
    yield "Names and labels are dcgm-exporter's; our own begin with `gpu_`. What a GPU does not have is absent.\n"
    gpu = ((f"`{name}`", kind, text) for name, (kind, text) in GPU_METRICS.items())
    yield from _table(("metric", "type", "what it is"), gpu)
    yield "\n## Alerts\n"
    yield "An alert with an action is a command to the job; `note` is evidence for its incident.\n"
    alerts = (_alert(name, rule) for name in _RULES for rule in _rules(name))
    yield from _table(("alert", "in", "severity", "action", "what it says"), alerts)


def _receiver_metrics() -> Iterator[tuple[str, ...]]:
    registry = ReceiverMetrics(Path("none"), now=lambda: 0.0, look_seconds=0.0).registry
    for family in registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        yield f"`{name}`", family.type, family.documentation


def _job_metric(metric: Metric) -> tuple[str, ...]:
    every_rank = "yes" if metric.every_rank else ""
    return f"`{metric.name}`", metric.kind, _labels(label for label, _ in metric.labels), every_rank, metric.help


def _labels(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _rules(name: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((files("alert_rules") / f"{name}.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def _alert(file: str, rule: dict[str, Any]) -> tuple[str, ...]:
    name, labels = rule["alert"], rule.get("labels", {})
    link = f"[{name}](runbook.md#{name.lower()})"
    return link, f"`{file}.yml`", labels["severity"], labels.get("action", ""), rule["annotations"]["summary"]


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield _row(head)
    yield "|" + "---|" * len(head)
    yield from map(_row, rows)


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


if __name__ == "__main__":
    print(reference(), end="")
