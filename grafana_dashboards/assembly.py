"""A dashboard from its panels: variables, annotations, links, and the JSON that Grafana loads."""

import json
from collections.abc import Sequence

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard

from grafana_dashboards.panels import DATASOURCE, Part

TAG = "pretraining-guard"
# What happened, drawn into every panel that has a time axis: critical alerts and what was done. `[$__rate_interval]`,
# so that an alert of one evaluation is seen at any zoom. Actions are told by their counter: an alert about one comes
# later and stays longer.
_FIRING = 'ALERTS{alertstate="firing", severity="critical", run=~"$run"}'
_DONE = 'train_actions_total{outcome="done", run=~"$run"}'
_ALERTS = f"max by (alertname, run) (max_over_time({_FIRING}[$__rate_interval]))"
_ACTIONS = f"sum by (action, source, run) (increase({_DONE}[$__rate_interval])) > 0"


def assemble(
    uid: str,
    title: str,
    text: str,
    panels: Sequence[Part],
    *,
    variables: Sequence[builders.QueryVariable] = (),
    refresh: str = "10s",
    hours: int = 1,
) -> str:
    """The JSON of a dashboard; its panels flow from left to right, and begin anew below each row."""
    built = builders.Dashboard(title).uid(uid).description(text).tags([TAG]).readonly().timezone("browser")
    built.refresh(refresh).time(f"now-{hours}h", "now").tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
    built.with_variable(builders.DatasourceVariable("datasource").type("prometheus").label("Data source"))
    for variable in variables:
        built.with_variable(variable)
    if variables:
        built.annotation(_annotation("Critical alerts", _ALERTS, "{{alertname}}", "alertname,run", "red"))
        built.annotation(_annotation("Actions", _ACTIONS, "{{action}} by {{source}}", "action,source,run", "blue"))
    others = builders.DashboardLink("Dashboards").type(dashboard.DashboardLinkType.DASHBOARDS).tags([TAG])
    built.link(others.keep_time(True).include_vars(True).as_dropdown(False).icon("dashboard"))
    for panel in panels:
        if isinstance(panel, builders.Row):
            built.with_row(panel)
        else:
            built.with_panel(panel)
    return _to_json(built.build())


def variable(name: str, label: str, query: str, *, several: bool = False) -> builders.QueryVariable:
    """A choice above the dashboard: one value, or any number of them and all at first."""
    built = builders.QueryVariable(name).label(label).query(query).definition(query).datasource(DATASOURCE)
    built.refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(dashboard.VariableSort.NATURAL_ASC)
    return built.multi(True).include_all(True).all_value(".+") if several else built


def run_variable(*, several: bool = False) -> builders.QueryVariable:
    """Which run."""
    return variable("run", "Run", "label_values(train_steps_total, run)", several=several)


def _annotation(name: str, expr: str, title: str, tags: str, color: str) -> builders.AnnotationQuery:
    built = builders.AnnotationQuery().name(name).datasource(DATASOURCE).enable(True).icon_color(color)
    return built.expr(expr).title_format(title).tag_keys(tags)


def _to_json(model: dashboard.Dashboard) -> str:
    """With a number for each panel, and without the placement that would hide annotations and links in a menu."""
    content = json.loads(JSONEncoder().encode(model))
    content["id"] = None
    panels = [each for panel in content["panels"] for each in (panel, *panel.get("panels", ()))]
    for number, panel in enumerate(panels, start=1):
        panel["id"] = panel.get("id") or number
    for holder in (content, content.get("annotations", {}), *panels):
        for each in (*holder.get("links", ()), *holder.get("list", ())):
            each.pop("placement", None)
    return json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
