"""The reference of metrics and alerts is what the code says today."""

import re
from pathlib import Path

import yaml

from exporter.catalog import CATALOG
from exporter.reference import reference

RULES = Path(__file__).parents[1] / "alert_rules"


def test_the_reference_is_what_the_code_says():
    """`alert_rules/reference.md` is what `make reference` would write."""
    assert (RULES / "reference.md").read_text() == reference()


def test_every_metric_and_every_alert_is_in_it_once():
    """Each metric of a job, and each alert of every rule file with a heading of its own in the runbook."""
    text, runbook = reference(), (RULES / "runbook.md").read_text()
    for metric in CATALOG:
        assert text.count(f"| `{metric.name}` |") == 1
    alerts = [
        rule["alert"]
        for path in RULES.glob("*.yml")
        for group in yaml.safe_load(path.read_text()).get("groups", ())
        for rule in group["rules"]
        if "alert" in rule
    ]
    headings = set(re.findall(r"^## (\w+)$", runbook, re.MULTILINE))
    assert len(alerts) > 40
    for alert in alerts:
        assert text.count(f"| [{alert}](runbook.md#{alert.lower()}) |") == 1
        assert alert in headings
