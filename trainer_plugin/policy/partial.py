"""Partial rollback (R13): whether it fits an incident, and which layers it takes back. Pure."""

from exporter.commands import Command
from trainer_plugin.detection.readings import Readings
from trainer_plugin.policy.decisions import ActionsConfig
from trainer_plugin.policy.incidents import Incident


def rollback_kind(incident: Incident | None, readings: Readings | None, config: ActionsConfig) -> str:
    """`partial_rollback` where the layers that surged are few and nothing has gone back yet, else `rollback`.

    Few means `partial_layers` at most, and no more than half of the model.
    """
    if not config.partial_rollback or incident is None or readings is None:
        return "rollback"
    few = 0 < len(incident.layers) <= min(config.partial_layers, len(readings.layer_ratios) // 2)
    gone_back = any("rollback" in remedy.action and remedy.outcome != "observed" for remedy in incident.remedies)
    fits = few and incident.class_ in ("gradient_explosion", "unknown") and not gone_back
    return "partial_rollback" if fits else "rollback"


def partial_layers(
    incident: Incident, readings: Readings | None, most: int, command: Command | None = None
) -> tuple[str, ...]:
    """The layers that a command names, else those that surged most; empty if none is known.

    In the incident, that is, or in the last step where no layer has surged in it.
    """
    if command is not None and command.layers:
        return command.layers
    ratios = incident.layers or (readings.layer_ratios if readings is not None else {})
    return tuple(sorted(ratios, key=lambda layer: -ratios[layer])[:most])
