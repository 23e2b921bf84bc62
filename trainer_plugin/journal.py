"""The journal: every incident, action and refusal, told in the log, on the page, in the trail and to who asked."""

import logging
from dataclasses import asdict
from typing import Any

import msgspec

from exporter.catalog import TIERS
from exporter.commands import Command, Outcome, Record
from exporter.page import Page
from trainer_plugin.checkpoints.store import Loaded
from trainer_plugin.control_loop import ControlLoop
from trainer_plugin.effects import Effects
from trainer_plugin.policy.decisions import Decision, Moment, Refusal
from trainer_plugin.policy.incidents import Incident, Remedy
from trainer_plugin.run_folder import JobFolder
from trainer_plugin.scenes.scene import Scene

_log = logging.getLogger(__name__)
# The actions that shall change the loss.
_FELT = {"clip", "lower_lr", "skip_batch", "rollback", "partial_rollback"}


class Journal:
    """Writes in the background, in order; what is told is never lost to a slow disk, and never waits for one."""

    def __init__(self, page: Page, loop: ControlLoop, folder: JobFolder) -> None:
        self._page = page
        self._loop = loop
        self._folder = folder
        self._effects = Effects()
        self._loop_up = False
        self._called: tuple[int, str] | None = None

    def incident(self, incident: Incident, step: int) -> None:
        """An incident opened, or healed."""
        entry: dict[str, Any] = msgspec.to_builtins(incident)
        if incident.healed:
            _log.warning("step %d: incident %d healed", step, incident.id)
            self.trail("incident_healed", entry)
            return
        _log.warning("step %d: incident %d, %s: %s", step, incident.id, incident.class_, "; ".join(incident.evidence))
        self._page.add("train_incidents_total", 1.0, incident.class_)
        self.trail("incident_opened", entry)

    def follow(self, incident: Incident | None, step: int) -> None:
        """What the open incident is called after this step; told when that is another class than before."""
        called = (incident.id, incident.class_) if incident is not None else None
        before, self._called = self._called, called
        if incident is not None and before is not None and before[0] == incident.id and before != called:
            why = incident.evidence[-1] if incident.evidence else ""
            _log.warning("step %d: incident %d is called %s now: %s", step, incident.id, incident.class_, why)
            entry = {"id": incident.id, "step": step, "class": incident.class_, "evidence": incident.evidence}
            self.trail("incident_class", entry)

    def nonfinite(self, step: int, *, gradients: list[str], weights: list[str], withheld: bool) -> None:
        """What is not finite, by the names of the parameters, and whether the optimizer was kept from it."""
        remedy = ": the update is withheld" if withheld else ""
        for what, names in (("weights", weights), ("gradient", gradients)):
            if names:
                more = f" and {len(names) - 10} more" if len(names) > 10 else ""
                _log.warning("step %d: %s not finite in %s%s%s", step, what, ", ".join(names[:10]), more, remedy)
        self.trail("nonfinite", {"step": step, "parameters": gradients[:100], "weights": weights[:100]})

    def action(self, decision: Decision, remedy: Remedy, loaded: Loaded | None, layers: tuple[str, ...] = ()) -> None:
        """An action and its outcome; `loaded` is what a rollback went back to, or only these layers of the model."""
        self._page.add("train_actions_total", 1.0, remedy.action, remedy.source, remedy.outcome)
        _log.warning(
            "step %d: %s by %s (%s): %s, %s",
            remedy.step, remedy.action, remedy.alert or remedy.source, decision.reason, remedy.outcome, remedy.detail,
        )  # fmt: skip
        entry = {"incident": decision.incident.id, "reason": decision.reason, **msgspec.to_builtins(remedy)}
        entry |= _asked(decision.command)
        if remedy.outcome == "done" and remedy.action in _FELT:
            self._effects.acted(remedy.action, step=remedy.step, incident=decision.incident.id)
        if loaded is not None:
            tiers = {tier: "damaged" if tier in loaded.degraded else "whole" for tier in TIERS}
            entry |= {"tier": loaded.tier, "tiers": tiers}
            step = loaded.manifest.step
            entry |= {"layers": list(layers), "layers_step": step} if layers else {"to_step": step}
        self.trail("action", entry)

    def loss(self, loss: float) -> None:
        """The loss of one step: what an earlier action did to it is told when enough of it is known."""
        for effect in self._effects.see(loss):
            _log.info(
                "%s at step %d: loss %s before, %s after",
                effect.action,
                effect.step,
                effect.loss_before,
                effect.loss_after,
            )
            self.trail("effect", asdict(effect))

    def outer_loop(self, *, up: bool, step: int) -> None:
        """Whether the outer loop is alive, at this step; told when it changes."""
        if up != self._loop_up:
            self._loop_up = up
            who = "is alive: its alerts ask for the slow remedies" if up else "is silent: the job decides alone"
            _log.warning("step %d: the outer loop %s", step, who)
            self.trail("outer_loop", {"step": step, "up": up})

    def scene(self, scene: Scene, seconds: float) -> None:
        """What an incident began with has been stored."""
        _log.warning("step %d: the scene of incident %d is kept (%.1f s)", scene.step, scene.incident, seconds)
        entry = {"step": scene.step, "incident": scene.incident, "branch": scene.branch, "seconds": round(seconds, 3)}
        self.trail("scene", entry)

    def refusal(self, refusal: Refusal, moment: Moment) -> None:
        """A command or wish that led to no action."""
        self._page.add("train_actions_total", 1.0, refusal.action, refusal.source, refusal.outcome)
        words = "would %s" if refusal.outcome == "observed" else "no %s"
        _log.warning(f"step %d: {words}: %s, %s", moment.step, refusal.action, refusal.outcome, refusal.detail)
        entry = {
            "step": moment.step,
            "steps_total": moment.steps_total,
            "action": refusal.action,
            "source": refusal.source,
            "alert": refusal.command.alert if refusal.command else None,
            "outcome": refusal.outcome,
            "detail": refusal.detail,
            **_asked(refusal.command),
        }
        self.trail("refused", entry)

    def answer(self, command: Command | None, outcome: str, detail: str, moment: Moment) -> None:
        """Give a command its outcome, where there was one."""
        if command is not None:
            known: Outcome = msgspec.convert(outcome, Outcome)
            record = Record(command=command, outcome=known, decided=moment.now, at_step=moment.step, detail=detail)
            self._loop.finish(record)

    def trail(self, kind: str, entry: dict[str, Any]) -> None:
        """A line of the run's trail."""
        self._loop.write(lambda: self._folder.log(kind, entry))


def _asked(command: Command | None) -> dict[str, Any]:
    """Who asked for something, where anybody did."""
    if command is None:
        return {}
    asked = {"command": command.id, "asked": command.reason, "by": command.by or command.alert}
    return {name: value for name, value in asked.items() if value}
