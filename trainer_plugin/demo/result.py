"""What came of a demo: the JSON that DESIGN fixes, the report in words, and whether it went as it must."""

import json
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from trainer_plugin.demo.job import Trained
from trainer_plugin.demo.scenarios import Scenario
from trainer_plugin.demo.servers import Servers
from trainer_plugin.faults import Faults
from trainer_plugin.policy.incidents import Incident
from trainer_plugin.run_folder import RunState

# The two trainings see other batches after a rollback, so equal losses cannot be had.
CLOSE_RATIO = 0.02


@dataclass(frozen=True, kw_only=True)
class Result:
    """One demo, finished. `trail` is the run's incidents.jsonl; `alerts` are names, `pages` words."""

    scenario: Scenario
    seed: int
    steps: int
    mode: str
    versions: dict[str, str]
    faults: Faults
    incidents: list[Incident]
    trail: list[dict[str, Any]]
    alerts: list[str]
    pages: dict[str, str]
    guarded: Trained
    twin: Trained

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` writes; `alerts`, `pages`, `tiers` and `steps_per_second` are not fixed."""
        kind = self.scenario.fault
        fault = None
        if kind is not None:
            fault = {"kind": kind, "first_step": self.faults.first_step(kind), "last_step": self.faults.last_step(kind)}
        return {
            "schema": 1,
            "scenario": self.scenario.name,
            "seed": self.seed,
            "steps": self.steps,
            "mode": self.mode,
            "versions": self.versions,
            "fault": fault,
            "incidents": [_incident(incident) for incident in self.incidents],
            "rollbacks": [
                {
                    "at_step": entry["step"],
                    "to_step": entry["to_step"],
                    "tier": entry["tier"],
                    "tiers": entry["tiers"],
                    "lost_steps": entry["step"] - entry["to_step"],
                }
                for entry in self.trail
                if "to_step" in entry
            ],
            "alerts": self.alerts,
            "pages": self.pages,
            "final": {
                "step": self.guarded.step,
                "applied_steps": self.guarded.applied_steps,
                "loss": self.guarded.held_out_loss,
                "baseline_loss": self.twin.held_out_loss,
            },
            "steps_per_second": round(self.guarded.steps_per_second, 2),
        }

    def problems(self) -> list[str]:
        """What went otherwise than the scenario must go; empty if nothing did."""
        summary = self.to_json()
        problems = []
        fault, rollbacks = summary["fault"], summary["rollbacks"]
        ratio = self.guarded.held_out_loss / self.twin.held_out_loss
        if not ratio <= 1.0 + CLOSE_RATIO:
            problems.append(f"held-out loss is {ratio:.3f} x the fault-free twin's")
        if fault is None and (self.incidents or rollbacks):
            problems.append("nothing was broken, and yet there was an incident")
        if fault is not None and not self.incidents:
            problems.append("the fault was not detected")
        problems += [f"incident {incident.id} is not healed" for incident in self.incidents if not incident.healed]
        classes = [incident.class_ for incident in self.incidents]
        if self.incidents and classes[0] != self.scenario.class_:
            problems.append(f"the incident is called {classes[0]}, not {self.scenario.class_}")
        done = {entry["action"] for entry in self.trail if entry["kind"] == "action" and entry["outcome"] == "done"}
        done |= {remedy.action for incident in self.incidents for remedy in incident.remedies}
        problems += [f"no {action}" for action in self.scenario.actions if action not in done]
        if self.scenario.keeps_rate and "lower_lr" in done:
            problems.append("the learning rate was lowered, which mends no machine")
        if not self.scenario.rollback and rollbacks:
            problems.append("a rollback that was not needed")
        problems += [
            f"rollback to step {rollback['to_step']} is not before the fault"
            for rollback in rollbacks
            if fault is not None and rollback["to_step"] >= fault["first_step"]
        ]
        return problems

    def to_text(self, out: Path) -> str:
        """The report for people."""
        summary = self.to_json()
        final, fault = summary["final"], summary["fault"]
        lines = [
            f"Demo {self.scenario.name}: {self.scenario.story}",
            f"  seed {self.seed}, {self.steps} steps, mode {self.mode}, {summary['steps_per_second']:.0f} steps/s",
            f"  {', '.join(f'{name} {version}' for name, version in self.versions.items())}",
        ]
        if fault is not None:
            lines.append(f"  fault: {fault['kind']}, steps {fault['first_step']} to {fault['last_step']}")
        for incident in self.incidents:
            state = f"healed at step {incident.healed_step}" if incident.healed else "NOT healed"
            lines.append(
                f"  incident {incident.id}: {incident.class_}, first bad step {incident.first_step}, "
                f"detected at {incident.detected_step}, {state}"
            )
            lines += [f"    evidence  {line}" for line in incident.evidence]
            lines += [
                f"    remedy    step {r.step}: {r.action} by {r.alert or r.source}: {r.outcome}, {r.detail}"
                for r in incident.remedies
            ]
        lines += [
            f"  rollback: step {r['at_step']} to {r['to_step']} ({r['tier']} tier; "
            + ", ".join(f"{tier} {state}" for tier, state in r["tiers"].items())
            + f"), {r['lost_steps']} steps lost"
            for r in summary["rollbacks"]
        ]
        lines += [
            f"  alerts: {', '.join(self.alerts) or 'none'}",
            *(f"    page      {name}: {words}" for name, words in self.pages.items()),
            (
                f"  held-out loss {final['loss']:.4f}, fault-free twin {final['baseline_loss']:.4f} "
                f"({final['loss'] / final['baseline_loss'] - 1:+.2%}) after {final['applied_steps']} applied steps"
            ),
            f"  everything is in {out}",
        ]
        lines += [f"  NOT as it must be: {problem}" for problem in self.problems()]
        return "\n".join(lines)


def read_incidents(run_folder: Path) -> list[Incident]:
    """The incidents of a run whose job has ended."""
    return msgspec.json.decode((run_folder / "state.json").read_bytes(), type=RunState).policy.incidents


def versions(servers: Servers | None) -> dict[str, str]:
    """What took part."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if servers is not None:
        found |= {name: _version(getattr(servers, name)) for name in ("prometheus", "alertmanager")}
    return found


def write_json(path: Path, summary: dict[str, Any]) -> None:
    """Write the summary.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(json.dumps(summary, indent=2) + "\n")


def _incident(incident: Incident) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(incident)
    fields = ("id", "first_step", "detected_step", "last_step", "class", "evidence", "healed", "healed_step")
    remedies = [
        {key: getattr(remedy, key) for key in ("action", "step", "source", "alert", "outcome", "detail")}
        for remedy in incident.remedies
    ]
    return {field: built[field] for field in fields} | {"remedies": remedies}


def _version(program: str) -> str:
    """`prometheus, version 2.42.0+ds (branch: ...)` without the words around."""
    told = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=10)
    words = (told.stdout + told.stderr).split()
    return words[words.index("version") + 1] if "version" in words else "unknown"
