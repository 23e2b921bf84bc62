"""The nearest checkpoint before a scene, for the same batch on other weights."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from trainer_plugin.backtest.command import read_options
from trainer_plugin.checkpoints import manifest
from trainer_plugin.checkpoints.inventory import take_inventory
from trainer_plugin.checkpoints.retention import Lineage
from trainer_plugin.checkpoints.snapshot import Snapshot
from trainer_plugin.policy.state import PolicyState
from trainer_plugin.replay.material import Material, read_state


@dataclass(frozen=True, kw_only=True, slots=True)
class Earlier:
    """A checkpoint's step and state; `why` says what stood in the way where there is none."""

    step: int = -1
    state: Snapshot | None = None
    why: str = ""


class _RunState(msgspec.Struct, kw_only=True):
    """What of state.json says which checkpoints came before."""

    policy: PolicyState = msgspec.field(default_factory=PolicyState)
    lineage: Lineage = msgspec.field(default_factory=Lineage)


def find_earlier(material: Material) -> Earlier:
    """The newest whole checkpoint before the incident from which the scene's weights have come, every byte checked."""
    told = material.scene
    run_folder = material.folder.parent.parent
    own = run_folder / "guard.yaml"
    try:
        if not own.is_file():
            return Earlier(why=f"no {own} tells where the run's checkpoints lie")
        config = read_options(own)
        inventory = take_inventory(run_folder, config.run, config.checkpoints, verify=False)
        state = msgspec.json.decode((run_folder / "state.json").read_bytes(), type=_RunState)
    except (OSError, ValueError, RecursionError) as error:
        return Earlier(why=f"the run's checkpoints are not looked at: {error}")
    last_step = told.weights_step - 1  # The very same weights would tell nothing.
    for incident in state.policy.incidents:
        if incident.id == told.incident:
            last_step = min(last_step, incident.before_step)
    began_at = state.lineage.began_at[: told.branch + 1]
    candidates = [
        one
        for one in inventory.checkpoints
        if one.kind == "periodic"
        and one.finite
        and one.branch <= told.branch
        and one.step <= min([last_step, *began_at[one.branch + 1 :]])
    ]
    faults: list[str] = []
    for one in sorted(candidates, key=lambda one: (-one.step, -one.branch)):
        for tier in (tier for tier, state in one.tiers.items() if state == "whole"):
            folder = Path(inventory.tiers[tier]) / f"step-{one.step:09d}-{one.branch:03d}"
            found = manifest.read(folder)
            try:
                if found is not None:
                    return Earlier(step=one.step, state=read_state(folder, found))
            except (OSError, ValueError) as error:
                faults.append(str(error))
    return Earlier(why="; ".join(faults) or f"no checkpoint of step {last_step} or before is there (any more)")
