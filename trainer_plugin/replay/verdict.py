"""The verdict: sample, layer, weights, or the batch as a whole, from what a replay has found. Pure."""

import math
from typing import TYPE_CHECKING

from trainer_plugin.replay.finding import Elsewhere, Finding, Measured, Verdict
from trainer_plugin.replay.normal import Normal
from trainer_plugin.replay.samples import Sample
from trainer_plugin.step.probe import layer_of

if TYPE_CHECKING:
    from collections.abc import Callable

# Loss or gradient norm so many of the run's own spreads above normal is what a cause is looked for of.
_SPIKE_SPREADS = 4.0
# What takes away, or has by itself, so much of the way from normal to the spike accounts for it.
_MOST_OF_IT = 0.5
# A layer's norm that comes again only to within this factor came from elsewhere.
_APART_RATIO = 2.0
# The same loss, as far as a cause is asked for.
_SAME_LOSS = 0.01
# A layer that has moved so many times as far as any other stands out.
_MOVED_RATIO = 3.0


def decide(finding: Finding, normal: Normal) -> Verdict:
    """The first rule that has an answer; what is not finite, and what did not come from batch and weights, go first."""
    rules: tuple[Callable[[Finding, Normal], Verdict | None], ...] = (
        _weights_not_finite,
        _not_run,
        _not_finite,
        _came_from_elsewhere,
        _weights,
        _sample,
        _batch,
    )
    for rule in rules:
        verdict = rule(finding, normal)
        if verdict is not None:
            return verdict
    return _unknown(
        "loss and gradient norm of this step are not out of the ordinary"
        + (f"; {_who(finding, finding.samples[0])} adds most" if len(finding.samples) > 1 else "")
    )


def _weights_not_finite(finding: Finding, _: Normal) -> Verdict | None:
    layers = finding.nonfinite_weights
    if not layers:
        return None
    where = f"the weights of step {finding.weights_step}"
    if len(layers) > 1 and len(layers) >= len(finding.layer_order):
        return Verdict(kind="weights", name="", line=f"neither: {where} are not finite in any layer")
    first = next((layer for layer in finding.layer_order if layer in layers), layers[0])
    more = f", and in {len(layers) - 1} more" if len(layers) > 1 else ""
    return _layer(first, f"{where} are not finite in it{more}")


def _not_run(finding: Finding, _: Normal) -> Verdict | None:
    if finding.replayed is not None:
        return None
    odd = [layer for layer, norm in finding.recorded.layer_grad_norms.items() if not math.isfinite(norm)]
    if odd and len(odd) < len(finding.recorded.layer_grad_norms):
        return _layer(odd[-1], "its gradient was recorded as not finite; the step could not be run again")
    return _unknown("the step could not be run again: " + "; ".join(finding.notes[:1]))


def _not_finite(finding: Finding, _: Normal) -> Verdict | None:
    ran = finding.replayed
    if ran is None or _is_finite(ran):
        return None
    odd = [one for one in finding.samples if not math.isfinite(one.loss)]
    if not odd:
        odd = [one for one in finding.samples if one.adds == math.inf]
    if 0 < len(odd) < len(finding.samples):
        more = f", and {len(odd) - 1} more" if len(odd) > 1 else ""
        what = "its loss is" if not math.isfinite(odd[0].loss) else "its gradient is"
        return _of_sample(finding, odd[0], f"{what} not finite{more}")
    moved = _moved(finding)
    if moved is not None and finding.same_batch is not None and finding.weight_changes[moved] > 1.0:
        # What its weights do may show only in the output of a later one.
        far = _how_far(finding, moved, finding.same_batch)
        met = f"; {finding.first_nonfinite} is the first that is not finite" if finding.first_nonfinite else ""
        return _layer(moved, f"{far}{met}")
    if finding.first_nonfinite:
        layer = layer_of(f"{finding.first_nonfinite}.")
        return _layer(layer, f"{finding.first_nonfinite} is the first whose output is not finite, from inputs that are")
    layers = [layer for layer in finding.layer_order if not math.isfinite(ran.layer_grad_norms.get(layer, 0.0))]
    if layers and len(layers) < len(finding.layer_order):
        return _layer(layers[-1], "the backward pass is finite down to it, and not from there on")
    return _unknown("loss or gradient are not finite again, in every sample, and no layer is the first")


def _came_from_elsewhere(finding: Finding, _: Normal) -> Verdict | None:
    """Norms that batch and weights do not give again: something happened to the gradients, or to the machine."""
    ran, recorded = finding.replayed, finding.recorded
    if ran is None or finding.weights_step >= finding.step:
        return None
    if math.isfinite(recorded.loss) and abs(ran.loss - recorded.loss) > _SAME_LOSS * abs(recorded.loss):
        return _unknown(
            f"the loss was {recorded.loss:.6g} and is {ran.loss:.6g} when the step is run again: not from this batch "
            "and these weights (the machine, or a factory that builds another model)"
        )
    ratios = {
        layer: _ratio(recorded.layer_grad_norms[layer], norm)
        for layer, norm in ran.layer_grad_norms.items()
        if layer in recorded.layer_grad_norms
    }
    apart = [layer for layer in finding.layer_order if layer in ratios and _is_apart(ratios[layer])]
    if not apart:
        if math.isfinite(recorded.loss):
            return None
        return _unknown(f"the loss was {recorded.loss} and is {ran.loss:.6g} when the step is run again")
    away = "not from this batch and these weights: in the loop after the backward pass, or in the machine"
    # What goes wrong in a backward pass goes on to all layers before it: the last of them is where it began.
    layer = apart[-1]
    how = "not finite, and is when the step is run again"
    if math.isfinite(recorded.layer_grad_norms[layer]):
        how = f"x {ratios[layer]:.3g} of what comes again"
    if len(apart) > 1 and len(apart) == len(ratios):
        return _unknown(f"every layer's gradient norm was about {how}: {away}")
    return _layer(layer, f"its gradient norm was {how}, {away}")


def _weights(finding: Finding, normal: Normal) -> Verdict | None:
    other, same = finding.other_batch, finding.same_batch
    if other is not None:
        share = _share(finding, other, normal)
        if share is None or not share >= _MOST_OF_IT:
            return None
        why = f"the batch of step {other.step} has loss {other.measured.loss:.4g} on them (normal: {normal.loss:.4g})"
    elif same is not None:
        share = _share(finding, same, normal)
        if share is None or share >= _MOST_OF_IT:
            return None
        why = f"on those of step {same.step} the same batch has loss {same.measured.loss:.4g}"
    else:
        return None
    moved = _moved(finding)
    if moved is not None and same is not None:
        return _layer(moved, f"{_how_far(finding, moved, same)}; {why}")
    return Verdict(
        kind="weights",
        name="",
        line=f"neither: the weights of step {finding.weights_step} are bad on any batch: {why}",
    )


def _sample(finding: Finding, normal: Normal) -> Verdict | None:
    if len(finding.samples) < 2 or finding.replayed is None:
        return None
    top, ran = finding.samples[0], finding.replayed
    shares = []
    if normal.loss_score(ran.loss) > _SPIKE_SPREADS:
        shares.append((ran.loss - top.loss_without) / (ran.loss - normal.loss))
    norm, without = ran.grad_norm, top.grad_norm_without
    if norm is not None and without and normal.norm_score(norm) > _SPIKE_SPREADS:
        shares.append(math.log(norm / without) / math.log(norm / normal.grad_norm))
    if not shares or max(shares) < _MOST_OF_IT:
        return None
    why = f"without it the loss would be {top.loss_without:.4g} in place of {ran.loss:.4g} (normal: {normal.loss:.4g})"
    if without:
        why += f", the gradient norm {without:.4g} in place of {norm:.4g} ({normal.grad_norm:.4g})"
    return _of_sample(finding, top, why)


def _batch(finding: Finding, normal: Normal) -> Verdict | None:
    ran = finding.replayed
    scores = () if ran is None else (normal.loss_score(ran.loss), normal.norm_score(ran.grad_norm))
    if not any(score > _SPIKE_SPREADS for score in scores):  # NaN where nothing is known to be normal.
        return None
    line = "neither: the batch as a whole, no one sample of it"
    if finding.same_batch is not None:
        on = finding.same_batch
        line += f"; on the weights of step {on.step} it has loss {on.measured.loss:.4g}"
    return Verdict(kind="batch", name="", line=f"{line} (normal: {normal.loss:.4g})")


def _moved(finding: Finding) -> str | None:
    """The layer whose weights have moved so much further than any other's that it stands out."""
    order = sorted(finding.weight_changes, key=lambda layer: -finding.weight_changes[layer])
    changes = [finding.weight_changes[layer] for layer in order[:2]]
    return order[0] if len(changes) == 2 and changes[0] > _MOVED_RATIO * changes[1] else None


def _how_far(finding: Finding, layer: str, same: Elsewhere) -> str:
    change = finding.weight_changes[layer]
    return f"since step {same.step} its weights have moved by x {change:.3g} of their norm, no other's so far"


def _share(finding: Finding, elsewhere: Elsewhere, normal: Normal) -> float | None:
    """How far it is on the way from normal to this step's spike; None where this step has none."""
    ran, there = finding.replayed, elsewhere.measured
    if ran is None:
        return None
    if normal.loss_score(ran.loss) > _SPIKE_SPREADS:
        return (there.loss - normal.loss) / (ran.loss - normal.loss) if math.isfinite(there.loss) else math.inf
    if normal.norm_score(ran.grad_norm) > _SPIKE_SPREADS:
        return normal.norm_score(there.grad_norm) / normal.norm_score(ran.grad_norm)
    return None


def _ratio(recorded: float, again: float) -> float:
    if recorded == again:  # Both may be 0.
        return 1.0
    return recorded / again if again else math.inf


def _is_apart(ratio: float) -> bool:
    return not 1.0 / _APART_RATIO <= ratio <= _APART_RATIO


def _is_finite(measured: Measured) -> bool:
    return math.isfinite(measured.loss) and (measured.grad_norm is None or math.isfinite(measured.grad_norm))


def _who(finding: Finding, sample: Sample) -> str:
    named = f" (id {sample.id})" if sample.id is not None else ""
    return f"sample {sample.index + 1} of {len(finding.samples)}{named}"


def _of_sample(finding: Finding, sample: Sample, why: str) -> Verdict:
    name = sample.id if sample.id is not None else str(sample.index + 1)
    return Verdict(kind="sample", name=name, line=f"{_who(finding, sample)}: {why}")


def _layer(layer: str, why: str) -> Verdict:
    return Verdict(kind="layer", name=layer, line=f"layer {layer}: {why}")


def _unknown(why: str) -> Verdict:
    return Verdict(kind="unknown", name="", line=f"neither: {why}")
