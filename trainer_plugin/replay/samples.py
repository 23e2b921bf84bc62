"""Leave one out: what loss and gradient norm of a step would have been without each of its samples."""

import math
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from trainer_plugin.checkpoints.snapshot import Snapshot
from trainer_plugin.replay.material import Begin
from trainer_plugin.replay.normal import Normal
from trainer_plugin.replay.stage import Ran, Stage

# Each costs one backward pass of its whole batch: beyond, only those with the highest loss.
MOST_GRADIENTS = 256


class Sample(msgspec.Struct, kw_only=True):
    """One sample: its place in the step (from 0 on), its loss, and loss and gradient norm of the step without it.

    `adds` is by how many of the run's own deviations it raises the two together; infinite where the step is finite
    without it alone. `grad_norm_without` is None where no gradient was taken.
    """

    index: int
    id: str | None
    loss: float
    loss_without: float
    grad_norm_without: float | None = None
    adds: float = 0.0


def leave_one_out(
    stage: Stage,
    begin: Begin,
    weights: Snapshot,
    *,
    ran: Ran,
    normal: Normal,
    ids: tuple[str, ...],
    tell: Callable[[str], None] = lambda _: None,
) -> list[Sample]:
    """Every sample of a step, the one that adds most first.

    The samples stay in their batch, with the same random numbers: what is left out is their share of loss and gradient.
    Where samples see each other (batch norm), what they do to each other is not.
    """
    losses = ran.sample_losses
    known = ids if len(ids) == len(losses) else (None,) * len(losses)
    samples = [
        Sample(index=index, id=known[index], loss=losses[index], loss_without=without)
        for index, without in enumerate(_losses_without(losses, ran.sample_shares))
    ]
    if len(samples) > 1:
        _add_norms(stage, begin, weights, samples=samples, shares=ran.sample_shares, tell=tell)
    for sample in samples:
        sample.adds = _added(sample, ran, normal)
    return sorted(samples, key=lambda one: (-one.adds, -_finite_or(one.loss, math.inf), one.index))


def _losses_without(losses: list[float], shares: list[float]) -> list[float]:
    """The mean of the others, by their shares."""
    parts = [loss * share for loss, share in zip(losses, shares, strict=True)]
    finite = math.fsum(part for part in parts if math.isfinite(part))
    odd = sum(not math.isfinite(part) for part in parts)
    found = []
    for part, share in zip(parts, shares, strict=True):
        is_odd = not math.isfinite(part)
        others_are_finite = odd == int(is_odd) and share < 1.0
        found.append((finite - (0.0 if is_odd else part)) / (1.0 - share) if others_are_finite else math.nan)
    return found


def _add_norms(
    stage: Stage,
    begin: Begin,
    weights: Snapshot,
    *,
    samples: list[Sample],
    shares: list[float],
    tell: Callable[[str], None],
) -> None:
    total = _gradient(stage, begin, weights)
    if not all(bool(torch.isfinite(part).all()) for part in total):
        _find_odd(stage, begin, weights, samples, tell)
        return
    chosen = sorted(samples, key=lambda one: -one.loss)[:MOST_GRADIENTS]
    wanted, first = {sample.index for sample in chosen}, 0
    with stage.prepared(weights):
        for number in range(len(begin.batches)):
            losses = stage.forward(begin, number)
            for index in (index for index in range(first, first + len(losses)) if index in wanted):
                tell(f"sample {index + 1} of {len(samples)}")
                part = _parts(losses[index - first] * shares[index], stage)
                samples[index].grad_norm_without = _norm(total, part) / (1.0 - shares[index])
            first += len(losses)


def _find_odd(
    stage: Stage, begin: Begin, weights: Snapshot, samples: list[Sample], tell: Callable[[str], None]
) -> None:
    """Which sample it is that makes the gradient NaN, each run alone: in one batch, 0 x NaN would accuse them all."""
    sizes = stage.batch_sizes(begin, weights)
    places = [(number, place) for number, size in enumerate(sizes) for place in range(size)]
    odd: list[int] = []
    for index, (number, place) in enumerate(places[:MOST_GRADIENTS]):
        tell(f"sample {index + 1} of {len(samples)}")
        norm = _norm_of(stage, begin, weights, {number: [place]}, sizes)
        if norm is None:
            return
        if not math.isfinite(norm):
            odd.append(index)
    if len(odd) == 1 < len(samples) <= MOST_GRADIENTS:
        rest = {
            number: [place for place in range(size) if (number, place) != places[odd[0]]]
            for number, size in enumerate(sizes)
        }
        samples[odd[0]].grad_norm_without = _norm_of(stage, begin, weights, rest, sizes)


def _norm_of(
    stage: Stage, begin: Begin, weights: Snapshot, chosen: dict[int, list[int]], sizes: list[int]
) -> float | None:
    """The gradient norm of some places of some batches; None where these cannot be taken apart."""
    kept = [number for number, places in chosen.items() if places]
    some = Begin(
        rng=[begin.rng[number] for number in kept],
        batches=[_chosen(begin.batches[number], chosen[number], sizes[number]) for number in kept],
    )
    try:
        ran = stage.run(some, weights)
    except ValueError:
        return None
    return ran.grad_norm if len(ran.sample_losses) == sum(map(len, chosen.values())) else None


def _chosen(batch: Any, places: list[int], size: int) -> Any:  # noqa: ANN401 - any tree of plain values
    """Some samples of a batch: of everything in it that has one entry for each sample."""
    if isinstance(batch, Tensor):
        return batch[places] if batch.dim() and len(batch) == size else batch
    if isinstance(batch, dict):
        return {key: _chosen(value, places, size) for key, value in batch.items()}
    if isinstance(batch, list) and len(batch) == size and not any(isinstance(one, Tensor) for one in batch):
        return [batch[place] for place in places]
    return type(batch)(_chosen(value, places, size) for value in batch) if isinstance(batch, list | tuple) else batch


def _gradient(stage: Stage, begin: Begin, weights: Snapshot) -> list[Tensor]:
    with stage.prepared(weights):
        for number in range(len(begin.batches)):
            stage.backward(stage.forward(begin, number), begin)
        return [_dense(p, p.grad) for p in stage.parameters]


def _parts(loss: Tensor, stage: Stage) -> list[Tensor]:
    found = torch.autograd.grad(loss, stage.parameters, retain_graph=True, allow_unused=True)
    return [_dense(parameter, gradient) for parameter, gradient in zip(stage.parameters, found, strict=True)]


def _dense(parameter: Tensor, gradient: Tensor | None) -> Tensor:
    """A copy of a gradient; an embedding's may be sparse."""
    if gradient is None:
        return torch.zeros_like(parameter)
    return gradient.detach().to_dense() if gradient.is_sparse else gradient.detach().clone()


def _norm(gradients: list[Tensor], without: list[Tensor] | None = None) -> float:
    """The norm of a gradient, without a part of it; in float64, for the part may be nearly all."""
    squares = 0.0
    for place, gradient in enumerate(gradients):
        difference = gradient.double() if without is None else gradient.double() - without[place].double()
        squares += float(difference.square().sum())
    return math.sqrt(squares)


def _added(sample: Sample, ran: Ran, normal: Normal) -> float:
    if not math.isfinite(ran.loss):
        return math.inf if math.isfinite(sample.loss_without) else 0.0
    norm, without = ran.grad_norm, sample.grad_norm_without
    added = (ran.loss - sample.loss_without) / normal.loss_scale if math.isfinite(sample.loss_without) else 0.0
    if norm is None or without is None:
        return added
    if not math.isfinite(norm):
        return math.inf if math.isfinite(without) else 0.0
    if norm > 0.0 and without > 0.0:
        added += (math.log(norm) - math.log(without)) / normal.grad_norm_log_scale
    return added


def _finite_or(value: float, other: float) -> float:
    return value if math.isfinite(value) else other
