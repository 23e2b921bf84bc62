"""One scene run again, and every question asked of it in turn."""

import math
from collections.abc import Callable

import torch

from trainer_plugin.checkpoints.snapshot import Snapshot
from trainer_plugin.replay.earlier import find_earlier
from trainer_plugin.replay.factory import Built
from trainer_plugin.replay.factory import told as told_of
from trainer_plugin.replay.finding import Elsewhere, Finding, Measured
from trainer_plugin.replay.layers import nonfinite_layers, walk, weight_changes
from trainer_plugin.replay.material import Begin, Material
from trainer_plugin.replay.normal import earliest_surge, normal_of, number, numbers
from trainer_plugin.replay.samples import leave_one_out
from trainer_plugin.replay.stage import Ran, Stage
from trainer_plugin.replay.verdict import decide

# What a replay on the same kind of machine has to come to, relative.
TOLERANCE = 1e-6


def investigate(
    material: Material, built: Built, factory: str, tell: Callable[[str], None] = lambda _: None
) -> Finding:
    """Run a scene's step again, and find out why it was so. `tell` hears what is being done.

    Raises:
        ValueError: the factory does not fit the scene; in one line.
    """
    told, weights = material.scene, material.snapshot
    stage = Stage(built, weights, factory)
    recorded, normal = told.steps[-1], normal_of(told.steps)
    finding = Finding(
        scene=str(material.folder),
        run=told.run,
        step=told.step,
        weights_step=told.weights_step,
        incident=told.incident,
        class_=told.class_,
        factory=factory,
        torch={"recorded": told.torch, "here": str(torch.__version__)},
        recorded=Measured(
            loss=number(recorded.get("loss")),
            grad_norm=None if recorded.get("grad_norm") is None else number(recorded["grad_norm"]),
            layer_grad_norms=numbers(recorded),
        ),
        normal=Measured(loss=normal.loss, grad_norm=normal.grad_norm),
        nonfinite_weights=nonfinite_layers(stage, weights),
        earliest_surge=earliest_surge(told.steps),
    )
    if told.weights_step >= told.step:
        finding.notes.append(f"the scene has the weights after step {told.weights_step}: the loss cannot come again")
    if told.torch != finding.torch["here"]:
        finding.notes.append(f"recorded with torch {told.torch}, run again with {finding.torch['here']}")
    if recorded.get("loss_mean") == "token" and told.batches > 1:
        finding.notes.append("the loop weighted its micro-batches by tokens, here they count the same")
    begin = _with_batches(material, built, finding)
    if begin is not None:
        _run_again(finding, stage, begin, weights, tell)
    _look_back(finding, stage, material, begin, tell)
    if begin is not None and finding.replayed is not None:
        ran = stage.run(begin, weights)
        finding.samples = leave_one_out(stage, begin, weights, ran=ran, normal=normal, ids=told.sample_ids, tell=tell)
    finding.verdict = decide(finding, normal)
    return finding


def _with_batches(material: Material, built: Built, finding: Finding) -> Begin | None:
    """What the step began with; batches that are not stored are made of the samples' ids, where the factory can."""
    begin, told = material.begin, material.scene
    if begin.batches and len(begin.batches) == len(begin.rng):
        return begin
    ids = list(told.sample_ids)
    why = told.batches_left_out or "the loop drew it by itself"
    if built.batch_of is None or not ids or len(begin.rng) != 1:
        finding.notes.insert(0, f"the scene has no batch: {why}")
        return None
    finding.notes.append(f"the scene has no batch ({why}): made anew of {len(ids)} sample ids")
    try:
        return Begin(rng=begin.rng, batches=[built.batch_of(ids)])
    except (Exception, SystemExit) as error:
        raise ValueError(f"factory {finding.factory}: batch_of failed: {told_of(error)}") from error


def _run_again(finding: Finding, stage: Stage, begin: Begin, weights: Snapshot, tell: Callable[[str], None]) -> None:
    tell(f"step {finding.step}")
    ran = stage.run(begin, weights)
    finding.replayed = _measured(ran)
    walked = walk(stage, begin, weights)
    finding.layer_order = [*walked.order, *(layer for layer in stage.layers if layer not in walked.order)]
    finding.first_nonfinite = walked.module
    recorded = finding.recorded
    finding.errors = {
        "loss": _apart(ran.loss, recorded.loss),
        "grad_norm": _apart(ran.grad_norm, recorded.grad_norm),
        "layer_grad_norms": max(
            (_apart(ran.layer_grad_norms.get(layer), norm) for layer, norm in recorded.layer_grad_norms.items()),
            default=0.0,
        ),
    }
    finding.reproduced = all(error <= TOLERANCE for error in finding.errors.values())


def _look_back(
    finding: Finding, stage: Stage, material: Material, begin: Begin | None, tell: Callable[[str], None]
) -> None:
    """The same batch on earlier weights, other data on these weights, and which layers have moved in between."""
    before, weights = material.before, material.snapshot
    if before.batches and len(before.batches) == len(before.rng):
        tell(f"the batch of step {finding.step - 1}")
        measured = _measured(stage.run(before, weights))
        finding.other_batch = Elsewhere(step=finding.step - 1, measured=measured)
    tell("the checkpoint before")
    earlier = find_earlier(material)
    if earlier.state is None or not stage.fits(earlier.state):
        finding.notes.append(earlier.why or f"the checkpoint of step {earlier.step} is of another model")
        return
    finding.weight_changes = weight_changes(stage, weights, earlier.state)
    if begin is not None:
        finding.same_batch = Elsewhere(step=earlier.step, measured=_measured(stage.run(begin, earlier.state)))


def _measured(ran: Ran) -> Measured:
    return Measured(loss=ran.loss, grad_norm=ran.grad_norm, layer_grad_norms=ran.layer_grad_norms)


def _apart(here: float | None, there: float | None) -> float:
    """How far two numbers are apart, relative; the same that is not finite is none."""
    if here is None or there is None:
        return 0.0 if here is there else math.inf
    if math.isfinite(here) and math.isfinite(there):
        return abs(here - there) / max(abs(there), 1e-30)
    return 0.0 if str(here) == str(there) else math.inf
