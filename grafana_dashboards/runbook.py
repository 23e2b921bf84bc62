"""The runbook as a dashboard: one panel for each alert, to which the panels of the others link."""

import re
from importlib.resources import files

from grafana_foundation_sdk.builders import text as text_builders
from grafana_foundation_sdk.models import text

from grafana_dashboards.assembly import assemble
from grafana_dashboards.look import SEVERITIES
from grafana_dashboards.panels import RUNBOOK_UID, Part, runbook_panel_id, states
from grafana_dashboards.queries import Query

_FIRING = " or ".join(
    f"{value} * max by (alertname) (max_over_time("
    f'ALERTS{{alertstate="firing", severity="{severity}"}}[$__rate_interval]))'
    for value, (severity, _) in sorted(SEVERITIES.items(), reverse=True)
)


def build() -> str:
    """The dashboard's JSON."""
    chapters = re.split(r"^## ", files("alert_rules").joinpath("runbook.md").read_text(), flags=re.MULTILINE)
    introduction, *alerts = chapters
    panels: list[Part] = [
        states(
            "Alerts",
            "Which alerts of all runs fired, by severity; the heartbeat is left out.",
            Query(expr=_FIRING, legend="{{alertname}}"),
            words=SEVERITIES,
            width=12,
        ),
        _text("What is below", introduction.partition("\n")[2].strip()).span(12).height(8),
    ]
    for alert in alerts:
        name, _, words = alert.partition("\n")
        panels.append(_text(name, words.strip()).span(12).height(7).id(runbook_panel_id(name)))
    return assemble(
        RUNBOOK_UID,
        "Runbook",
        "What each alert means, what the stack did, and what you do.",
        panels,
        refresh="30s",
    )


def _text(title: str, words: str) -> text_builders.Panel:
    return text_builders.Panel().title(title).mode(text.TextMode.MARKDOWN).content(words)
