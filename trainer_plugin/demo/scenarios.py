"""The demo's scenarios: what is broken on purpose, and what must come of it."""

from collections.abc import Callable
from dataclasses import dataclass

from trainer_plugin.faults import Faults, Kind


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One scenario. `least_steps` leaves room for the fault, the verdict and the recovery."""

    name: str
    story: str
    steps: int
    least_steps: int
    fault: Kind | None
    inject: Callable[[], Faults]
    rollback: bool


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            name="clean",
            story="nothing is broken, and nothing may happen",
            steps=1400,
            least_steps=1,
            fault=None,
            inject=Faults,
            rollback=False,
        ),
        Scenario(
            name="sustained",
            story="learning rate x 100 for 10 steps: the weights are damaged, and only going back helps",
            steps=1600,
            least_steps=1200,
            fault="lr_jump",
            inject=lambda: Faults().lr_jump(at=700, times=100.0, steps=10),
            rollback=True,
        ),
        Scenario(
            name="grad-explosion",
            story="all gradients x 1,000,000 in one step: clipped in that very step",
            steps=1400,
            least_steps=800,
            fault="grad_scale",
            inject=lambda: Faults().grad_scale(at=700, times=1e6, steps=1),
            rollback=False,
        ),
    )
}
