"""The story of a run, read from its folder: steps, incidents with what was done about them, checkpoints, scenes."""

import math
import os
from pathlib import Path
from typing import Any

import msgspec

from trainer_plugin.checkpoints.inventory import Inventory
from trainer_plugin.scenes.overview import Stretch, read_overview
from trainer_plugin.scenes.step_line import StepLine, read_recorder

_SCHEMA = 1
_MOST_TRAIL_BYTES = 1 << 26


class LoggedAction(msgspec.Struct, kw_only=True):
    """Something that was done, or that was asked for and refused."""

    time: float
    step: int
    steps_total: int
    action: str
    source: str
    outcome: str
    detail: str = ""
    reason: str = ""
    alert: str | None = None
    incident: int | None = None
    to_step: int | None = None
    tier: str | None = None


class LoggedIncident(msgspec.Struct, kw_only=True):
    """An incident as it was told last. Losses are the recorder's: NaN where it does not reach so far back.

    `loss_before` is the mean over the 20 steps before the first bad one, `loss_worst` the largest finite one until it
    healed, `loss_after` the mean over the 20 steps after; `lost_steps` were rolled back, `withheld_steps` left out.
    """

    id: int
    class_: str = msgspec.field(name="class")
    first_step: int
    detected_step: int
    last_step: int
    evidence: list[str] = []
    healed: bool = False
    healed_step: int | None = None
    opened_total: int = 0
    layers: dict[str, float] = {}
    time: float = 0.0
    actions: list[LoggedAction] = []
    scene_step: int | None = None
    scene_folder: str | None = None
    loss_before: float = math.nan
    loss_worst: float = math.nan
    loss_after: float = math.nan
    lost_steps: int = 0
    withheld_steps: int = 0


class Story(msgspec.Struct, kw_only=True):
    """All of a run. `refused` are wishes that belong to no incident; `problems` what could not be read."""

    run: str
    steps: list[StepLine]
    stretches: list[Stretch]
    incidents: list[LoggedIncident]
    refused: list[LoggedAction]
    inventory: Inventory | None
    problems: list[str]


def read_story(run_folder: Path, inventory: Inventory | None) -> Story:
    """Put together what a run's folder tells.

    Raises:
        ValueError: it is no run's folder.
        OSError: a file in it cannot be read.
    """
    if not run_folder.is_dir():
        raise ValueError(f"{run_folder}: no such run folder")
    trail_path = run_folder / "incidents.jsonl"
    (steps, unread), stretches = read_recorder(run_folder), read_overview(run_folder)
    if not (trail_path.exists() or steps or stretches or (run_folder / "state.json").exists()):
        raise ValueError(f"{run_folder}: a run's folder wanted, found none of its files in it")
    trail, problems = _read_trail(trail_path)
    incidents, refused = _told(trail)
    scenes = {one.incident: one for one in inventory.checkpoints if one.kind == "scene"} if inventory else {}
    for incident in incidents:
        _weigh(incident, steps)
        scene = scenes.get(incident.id)
        if scene is not None and scene.folder is not None:
            incident.scene_folder = scene.folder
    return Story(
        run=run_folder.resolve().name,
        steps=steps,
        stretches=stretches,
        incidents=incidents,
        refused=refused,
        inventory=inventory,
        problems=[*unread, *problems],
    )


def _read_trail(path: Path, most_bytes: int = _MOST_TRAIL_BYTES) -> tuple[list[dict[str, Any]], list[str]]:
    entries: list[dict[str, Any]] = []
    if not path.exists():
        return entries, []
    problems: list[str] = []
    with path.open("rb") as file:
        if path.stat().st_size > most_bytes:
            file.seek(-most_bytes, os.SEEK_END)
            file.readline()
            problems.append(
                f"{path.name}: only its newest {most_bytes >> 20} MiB are read: older incidents are missing"
            )
        lines = file.read().splitlines()
    damaged = 0
    for line in lines:
        try:
            entry = msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError):
            damaged += 1
            continue
        if entry.get("schema") == _SCHEMA:
            entries.append(entry)
        else:
            damaged += 1
    if damaged:
        problems.append(f"{path.name}: {damaged} lines cannot be read and are left out")
    return entries, problems


def _told(trail: list[dict[str, Any]]) -> tuple[list[LoggedIncident], list[LoggedAction]]:
    incidents: dict[int, LoggedIncident] = {}
    refused: list[LoggedAction] = []
    newest: LoggedIncident | None = None
    for entry in trail:
        try:
            kind = entry.get("kind")
            if kind in {"incident_opened", "incident_healed"}:
                told = msgspec.convert(entry, LoggedIncident)
                known = incidents.get(told.id)
                if known is not None:
                    told.actions, told.scene_step, told.time = known.actions, known.scene_step, known.time
                incidents[told.id] = newest = told
            elif kind in {"action", "refused"}:
                action = msgspec.convert(entry, LoggedAction)
                incident = incidents.get(action.incident) if action.incident is not None else None
                if incident is None and kind == "refused" and newest is not None and not newest.healed:
                    incident = newest
                (incident.actions if incident is not None else refused).append(action)
            elif kind == "scene" and entry.get("incident") in incidents:
                incidents[entry["incident"]].scene_step = int(entry["step"])
        except (msgspec.ValidationError, KeyError, TypeError, ValueError):
            continue  # Of another version, or written by somebody else.
    return sorted(incidents.values(), key=lambda one: one.id), refused


def _weigh(incident: LoggedIncident, steps: list[StepLine]) -> None:
    """What it cost, as far as the recorder reaches."""
    # The steps that a killed job had run last are counted twice: by when it was told.
    begun = [
        at
        for at, line in enumerate(steps)
        if line.steps_total >= incident.opened_total and (at == 0 or steps[at - 1].steps_total < incident.opened_total)
    ]
    opened = min(begun, key=lambda at: abs(steps[at].time - incident.time), default=None)
    rollbacks = [action for action in incident.actions if action.action == "rollback" and action.outcome == "done"]
    incident.lost_steps = sum(action.step - action.to_step for action in rollbacks if action.to_step is not None)
    if opened is None:
        return
    first = max(0, opened - max(0, incident.detected_step - incident.first_step))
    healed = next((at for at, line in enumerate(steps) if at >= opened and _is_healed(line, incident, rollbacks)), None)
    end = len(steps) if healed is None else healed + 1
    incident.loss_before = _mean(steps[max(0, first - 20) : first])
    worst = [line.loss for line in steps[first:end] if line.loss is not None]
    incident.loss_worst = max(worst, default=math.nan)
    incident.loss_after = _mean(steps[end : end + 20]) if healed is not None else math.nan
    incident.withheld_steps = sum(line.withheld is not None for line in steps[first:end])


def _is_healed(line: StepLine, incident: LoggedIncident, rollbacks: list[LoggedAction]) -> bool:
    gone_back = max((action.steps_total for action in rollbacks), default=0)
    return incident.healed_step is not None and line.step >= incident.healed_step and line.steps_total > gone_back


def _mean(lines: list[StepLine]) -> float:
    losses = [line.loss for line in lines if line.loss is not None]
    return sum(losses) / len(losses) if losses else math.nan
