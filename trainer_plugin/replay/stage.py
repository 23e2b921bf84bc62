"""The stage: the model that a factory has built, on which recorded steps are run again."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from trainer_plugin.checkpoints.plain import plain_copy
from trainer_plugin.checkpoints.rng import set_rng_state
from trainer_plugin.checkpoints.snapshot import Snapshot
from trainer_plugin.replay.factory import Built, told
from trainer_plugin.replay.material import Begin
from trainer_plugin.step.probe import Limits, Probe, plain_name

_MOST_NAMED = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """A step run again: its loss and gradient norms as the guard measures them, and the loss of each sample.

    A sample has its share of the step's loss: batches count the same, and so do the samples of one.
    """

    loss: float
    grad_norm: float | None
    layer_grad_norms: dict[str, float]
    sample_losses: list[float] = field(default_factory=list)
    sample_shares: list[float] = field(default_factory=list)


class Stage:
    """Runs steps on the weights of a snapshot. Nothing of the scene is changed: each run loads them anew.

    Raises:
        ValueError: the model is not the one of the snapshot; the line says where.
    """

    def __init__(self, built: Built, snapshot: Snapshot, name: str) -> None:
        self.model = built.model
        self._loss_fn = built.loss_fn
        self._name = name
        with self._as_the_factorys("gives a model that cannot be looked at"):
            self._probe = Probe(built.model)
            problems = _mismatches(built.model, snapshot)
        if problems:
            more = f"; and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
            raise ValueError(f"factory {name} does not fit the scene: {'; '.join(problems[:_MOST_NAMED])}{more}")

    def fits(self, snapshot: Snapshot) -> bool:
        """Whether the weights of another snapshot can be put on too."""
        return not _mismatches(self.model, snapshot)

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers, as the recorded steps name them."""
        return tuple(self._probe.layers)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that are trained."""
        return [parameter for parameter in self._probe.parameters.values() if parameter.requires_grad]

    def run(self, begin: Begin, weights: Snapshot) -> Ran:
        """Forward and backward pass of a step, as it was.

        Raises:
            ValueError: the loss function fails on it, or gives no loss of each sample.
        """
        losses: list[Tensor] = []
        samples: list[float] = []
        shares: list[float] = []
        with self.prepared(weights):
            for number in range(len(begin.batches)):
                each = self.forward(begin, number)
                self.backward(each, begin)
                losses.append(each.detach().float().mean())
                samples += each.tolist()
                shares += [1.0 / len(begin.batches) / len(each)] * len(each)
            row, _ = self._probe.measure(torch.stack(losses).mean(), Limits())
        values = row.read()
        return Ran(
            loss=values.loss,
            grad_norm=values.grad_norm,
            layer_grad_norms=values.layer_grad_norms,
            sample_losses=samples,
            sample_shares=shares,
        )

    def batch_sizes(self, begin: Begin, weights: Snapshot) -> list[int]:
        """How many samples each batch has."""
        with self.prepared(weights):
            return [len(self.forward(begin, number)) for number in range(len(begin.batches))]

    def forward(self, begin: Begin, number: int) -> Tensor:
        """The loss of each sample of one batch, shape [B], with its graph."""
        with self._as_the_factorys("loss_fn failed on the scene's batch"):
            set_rng_state(begin.rng[number])
            losses = self._loss_fn(self.model, plain_copy(begin.batches[number]))
        if not isinstance(losses, Tensor) or losses.dim() != 1 or not losses.numel() or losses.is_complex():
            found = f"shape {list(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            found += f" of {losses.dtype}" if isinstance(losses, Tensor) and losses.is_complex() else ""
            raise ValueError(
                f"factory {self._name}: loss_fn must give the loss of each sample, shape [B], found {found}"
            )
        if not losses.requires_grad:
            raise ValueError(f"factory {self._name}: the losses hang on no parameter: was it built under no_grad?")
        return losses

    def backward(self, losses: Tensor, begin: Begin) -> None:
        """The backward pass of one batch of a step."""
        with self._as_the_factorys("the backward pass of its loss_fn failed"):
            (losses.mean() / len(begin.batches)).backward()  # type: ignore[no-untyped-call]

    @contextmanager
    def _as_the_factorys(self, what: str) -> Iterator[None]:
        """What the user's own code raises in here, told in one line as a ValueError."""
        try:
            yield
        except (Exception, SystemExit) as error:
            raise ValueError(f"factory {self._name}: {what}: {told(error)}") from error

    @contextmanager
    def prepared(self, weights: Snapshot) -> Iterator[None]:
        """The model with these weights and without gradients."""
        here = {plain_name(name): name for name in self.model.state_dict()}
        plain = {plain_name(name): value for name, value in weights.plain.get("model", {}).items()}
        state = {here.get(name, name): value for name, value in {**model_tensors(weights), **plain}.items()}
        with self._as_the_factorys("its model does not take the scene's state"):
            self.model.load_state_dict(state)
        self.model.zero_grad(set_to_none=True)
        yield
        self.model.zero_grad(set_to_none=True)


def model_tensors(snapshot: Snapshot) -> dict[str, Tensor]:
    """The model's part of a snapshot, by the names that it has when it is not under torch.compile."""
    return {
        plain_name(name.removeprefix("model/")): tensor
        for name, tensor in snapshot.tensors.items()
        if name.startswith("model/")
    }


def _mismatches(model: nn.Module, snapshot: Snapshot) -> list[str]:
    here = {plain_name(name): value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    there = model_tensors(snapshot)
    problems = [f"{name} is missing in its model" for name in sorted(there.keys() - here.keys())]
    problems += [f"{name} is missing in the scene" for name in sorted(here.keys() - there.keys())]
    for name in sorted(here.keys() & there.keys()):
        ours, theirs = (f"{list(tensor.shape)} {tensor.dtype}" for tensor in (here[name], there[name]))
        if here[name].is_meta:
            problems.append(f"{name} is on the meta device in its model")
        elif ours != theirs:
            problems.append(f"{name} is {theirs} in the scene, {ours} in its model")
    return problems
