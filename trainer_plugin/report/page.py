"""The report as one HTML page that needs nothing else: no script, no font, no picture from elsewhere."""

import math
import shlex
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from html import escape

from trainer_plugin.checkpoints.inventory_table import inventory_table
from trainer_plugin.report.charts import Charts
from trainer_plugin.report.story import LoggedAction, LoggedIncident, Story

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; max-width: 1120px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.2rem; margin-top: 2.4rem; }
.sub { color: #57606a; } svg { width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; margin: .6rem 0; font-size: 14px; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #d8dee4; vertical-align: top; }
th { color: #57606a; font-weight: 600; } td.n { font-variant-numeric: tabular-nums; }
.tag { display: inline-block; padding: 0 .5rem; border-radius: .7rem; font-size: 13px; background: #eef1f4; }
.open { background: #f8d7da; } .healed { background: #d6efdc; } pre { overflow-x: auto; font-size: 12.5px; }
section { border-top: 3px solid #eef1f4; margin-top: 2rem; } .figures { display: flex; flex-wrap: wrap; gap: 1.6rem; }
.figures b { display: block; font-size: 1.25rem; }
"""
# Each takes half a second, and the page some 100 kB.
_MOST_PICTURED = 40


def report_page(story: Story, charts: Charts) -> str:
    """The page. Every text that comes from a file is escaped."""
    body = [_head(story), _summary(story), _picture(charts.timeline, story)]
    pictured = {id(incident) for incident in story.incidents[-_MOST_PICTURED:]}
    body += [_incident(story, one, charts if id(one) in pictured else None) for one in story.incidents]
    if story.refused:
        body.append("<h2>Asked for beside any incident</h2>" + _actions(story.refused))
    if story.inventory is not None:
        body.append(f"<h2>Checkpoints</h2><pre>{escape(chr(10).join(inventory_table(story.inventory)))}</pre>")
    if story.problems:
        body.append("<h2>What could not be read</h2><ul>")
        body += [f"<li>{escape(problem)}</li>" for problem in story.problems]
        body.append("</ul>")
    title = f"Run {escape(story.run)}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n'
        f"<body>{chr(10).join(body)}</body></html>\n"
    )


def _head(story: Story) -> str:
    last = story.steps[-1] if story.steps else None
    where = (
        f"at step {last.step}, after {last.steps_total} optimizer steps, {_when(last.time)}"
        if last is not None
        else "no recorded step"
    )
    return f'<h1>Run {escape(story.run)}</h1><p class="sub">{where}</p>'


def _summary(story: Story) -> str:
    incidents = story.incidents
    figures = [
        ("incidents", len(incidents)),
        ("still open", sum(not one.healed for one in incidents)),
        ("rollbacks", sum(_rollbacks(one) for one in incidents)),
        ("steps rolled back", sum(one.lost_steps for one in incidents)),
        ("steps withheld", sum(one.withheld_steps for one in incidents)),
    ]
    shown = "".join(f"<div><b>{number}</b>{name}</div>" for name, number in figures)
    rows = "".join(
        f'<tr><td><a href="#incident-{one.id}">#{one.id}</a></td><td>{escape(one.class_)}</td>'
        f'<td class="n">{one.first_step}</td><td>{_state(one)}</td>'
        f"<td>{escape(_done(one))}</td>"
        f'<td class="n">{one.lost_steps}</td></tr>'
        for one in incidents
    )
    table = (
        f"<table><tr><th>incident</th><th>class</th><th>first bad step</th><th>state</th><th>what was done</th>"
        f"<th>steps rolled back</th></tr>{rows}</table>"
        if incidents
        else "<p>No incident.</p>"
    )
    return f'<div class="figures">{shown}</div>{table}'


def _picture(draw: Callable[..., str], *what: object) -> str:
    """A picture; one that cannot be drawn, of numbers that no axis holds, costs itself alone."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Glyphs that no font has, numbers that no axis holds.
            return draw(*what)
    except Exception as error:  # noqa: BLE001 - whatever a file says, and whatever matplotlib makes of it
        return f"<p>The picture could not be drawn: {escape(f'{type(error).__name__}: {error}'[:200])}</p>"


def _incident(story: Story, one: LoggedIncident, charts: Charts | None) -> str:
    evidence = "".join(f"<li>{escape(line)}</li>" for line in one.evidence)
    losses = [
        f"{name} {value:.3f}"
        for name, value in (("before", one.loss_before), ("worst", one.loss_worst), ("after", one.loss_after))
        if math.isfinite(value)
    ]
    cost = [f"{one.lost_steps} steps rolled back", f"{one.withheld_steps} withheld"]
    if losses:
        cost.append("loss " + ", ".join(losses))
    near = f"<p>Only the newest {_MOST_PICTURED} incidents have pictures.</p>"
    layers = ""
    if charts is not None:
        near = _picture(charts.incident, story, one) or "<p>The recorder no longer holds its steps.</p>"
        layers = _picture(charts.layers, story, one)
    return (
        f'<section id="incident-{one.id}"><h2>Incident {one.id}: {escape(one.class_)}</h2>'
        f'<p class="sub">first bad step {one.first_step}, found at {one.detected_step}, {_when(one.time)} &middot; '
        f"{_state(one)}</p><h3>Evidence</h3><ul>{evidence}</ul>"
        f"<h3>What was done</h3>{_actions(one.actions, _done(one))}<p>Cost: {'; '.join(cost)}.</p>{_scene(one)}"
        f"{near}"
        f"{'<h3>Layers</h3>' + layers if layers else ''}</section>"
    )


def _scene(one: LoggedIncident) -> str:
    if one.scene_folder is None:
        return "<p>Its scene is not there (any more).</p>" if one.scene_step is not None else ""
    again = f"python -m trainer_plugin replay {shlex.quote(one.scene_folder)}"
    return f"<p>Scene: <code>{escape(one.scene_folder)}</code>; run its step again: <code>{escape(again)}</code></p>"


def _actions(actions: list[LoggedAction], nothing: str = "nothing") -> str:
    if not actions:
        return f"<p>{nothing.capitalize()}.</p>"
    rows = "".join(
        f'<tr><td class="n">{action.step}</td><td>{escape(action.action)}</td>'
        f"<td>{escape(action.alert or action.source)}</td><td>{escape(action.outcome)}</td>"
        f"<td>{escape('; '.join(filter(None, (action.reason, action.detail))))}</td></tr>"
        for action in actions
    )
    return (
        "<table><tr><th>step</th><th>action</th><th>asked by</th><th>outcome</th><th>why, and what came of it</th></tr>"
        f"{rows}</table>"
    )


def _state(one: LoggedIncident) -> str:
    if one.healed:
        return f'<span class="tag healed">healed at step {one.healed_step}</span>'
    return '<span class="tag open">open</span>'


def _done(one: LoggedIncident) -> str:
    done = list(dict.fromkeys(action.action for action in one.actions if action.outcome == "done"))
    if one.withheld_steps:
        done.insert(0, f"{one.withheld_steps} update{'s' * (one.withheld_steps > 1)} withheld")
    return ", ".join(done) or "nothing"


def _rollbacks(one: LoggedIncident) -> int:
    return sum(action.action in {"rollback", "partial_rollback"} and action.outcome == "done" for action in one.actions)


def _when(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return "at an unknown time"
