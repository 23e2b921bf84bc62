"""The committed dashboards, taken apart for the tests: panels, queries, and what these select."""

import json
import re
from collections.abc import Iterator
from typing import Any

import promql_parser
import yaml
from tools import ROOT

RULES = ROOT / "alert_rules"
PATHS = sorted((ROOT / "grafana_dashboards" / "json").glob("*.json"))
DASHBOARDS: dict[str, dict[str, Any]] = {path.stem: json.loads(path.read_text()) for path in PATHS}
GPU_RULES = RULES / "gpu.yml"
SAMPLES = {"__rate_interval": "5m", "__range": "1h", "run": "a", "rank": ".+", "layer": ".+"}


def panels(name: str) -> list[dict[str, Any]]:
    """The panels of a dashboard, also those that a heading hides, without the headings."""
    every = [each for panel in DASHBOARDS[name]["panels"] for each in (panel, *panel.get("panels", ()))]
    return [panel for panel in every if panel["type"] != "row"]


def queries(name: str) -> Iterator[tuple[str, str]]:
    """Every query of a dashboard, by the title of its panel; annotations too."""
    for panel in panels(name):
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for annotation in DASHBOARDS[name].get("annotations", {}).get("list", ()):
        yield annotation["name"], annotation["expr"]


def filled(expr: str) -> str:
    """A query as Prometheus would get it."""
    return re.sub(r"\$(\w+)", lambda found: SAMPLES[found[1]], expr)


def nodes(expr: str) -> Iterator[tuple[promql_parser.Expr, list[promql_parser.Expr]]]:
    """Every node of a query with those above it, the nearest last."""
    found: list[tuple[promql_parser.Expr, list[promql_parser.Expr]]] = []
    above: list[promql_parser.Expr] = []

    def enter(node: promql_parser.Expr) -> None:
        found.append((node, list(above)))
        above.append(node)

    def leave(_: promql_parser.Expr) -> None:
        above.pop()

    promql_parser.walk(promql_parser.parse(filled(expr)), enter, leave)
    yield from found


def selectors(expr: str) -> list[promql_parser.VectorSelector]:
    """Every selector of a query."""
    return [node for node, _ in nodes(expr) if isinstance(node, promql_parser.VectorSelector)]


def rules() -> list[dict[str, Any]]:
    """Every rule that prometheus.yml loads."""
    loaded = yaml.safe_load((RULES / "prometheus.yml").read_text())["rule_files"]
    files = [yaml.safe_load((RULES / name).read_text()) for name in loaded]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}
RECORDS = {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}
