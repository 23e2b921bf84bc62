"""The demo's scenarios: what is broken on purpose, and what must come of it."""

from collections.abc import Callable
from dataclasses import dataclass

from trainer_plugin.faults.plan import Plan, RaisesXid
from trainer_plugin.faults.table import Kind


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One scenario. `least_steps` leaves room for the fault, the verdict and the recovery.

    `inject` plans the faults, on a machine whose GPU fails where `breaks_gpu`. `class_` and `actions` are what must
    come of it; no learning rate is lowered where `keeps_rate`.
    """

    name: str
    story: str
    steps: int
    least_steps: int
    fault: Kind | None = None
    inject: Callable[[Plan, RaisesXid], Plan] = lambda plan, _: plan
    breaks_gpu: bool = False
    class_: str = "none"
    actions: tuple[str, ...] = ()
    keeps_rate: bool = False

    @property
    def rollback(self) -> bool:
        """Whether only going back helps."""
        return "rollback" in self.actions


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(name="clean", story="nothing is broken, and nothing may happen", steps=1400, least_steps=1),
        Scenario(
            name="bad-sample",
            story="noise in the place of one batch: it is left out from now on, and nothing is lost",
            steps=1400,
            least_steps=800,
            fault="garbage_text",
            inject=lambda plan, _: plan.garbage_text(at=700),
            class_="bad_sample",
            actions=("skip_batch",),
        ),
        Scenario(
            name="grad-explosion",
            story="all gradients x 1,000,000 in one step: clipped in that very step",
            steps=1400,
            least_steps=800,
            fault="grad_scale",
            inject=lambda plan, _: plan.grad_scale(at=700, times=1e6, steps=1),
            class_="gradient_explosion",
            actions=("clip", "lower_lr"),
        ),
        Scenario(
            name="lr-too-high",
            story="learning rate x 20 in one step: the loss is thrown out, and the rate is lowered at once",
            steps=1600,
            least_steps=1600,
            fault="lr_jump",
            inject=lambda plan, _: plan.lr_jump(at=700, times=20.0, steps=1),
            class_="lr_too_high",
            actions=("lower_lr",),
        ),
        Scenario(
            name="numerical",
            story="NaN in one layer's gradient in three steps: none of them reaches the weights",
            steps=1400,
            least_steps=800,
            fault="nan_gradient",
            inject=lambda plan, _: plan.nan_gradient(at=700, steps=3, parameter="blocks.1.attn"),
            class_="numerical",
        ),
        Scenario(
            name="hardware",
            story="XID 79 on the GPU of rank 0, and weights that go wrong: saved, then taken back, at the same rate",
            steps=1600,
            least_steps=1200,
            fault="weight_noise",
            inject=lambda plan, machine: plan.xid(at=600, driver=machine).weight_noise(at=700, times=30.0),
            breaks_gpu=True,
            class_="hardware",
            actions=("checkpoint", "rollback"),
            keeps_rate=True,
        ),
        Scenario(
            name="sustained",
            story="learning rate x 100 for 10 steps: the weights are damaged, and only going back helps",
            steps=1600,
            least_steps=1200,
            fault="lr_jump",
            inject=lambda plan, _: plan.lr_jump(at=700, times=100.0, steps=10),
            class_="lr_too_high",
            actions=("rollback",),
        ),
    )
}
