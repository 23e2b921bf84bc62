"""Proof of a restore: the loss of one stored batch, taken when a state is saved and taken again when it is back.

Taking it changes nothing: random generators, training modes and buffers are put back, and no gradient is made.
"""

import logging
import math
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer_plugin.checkpoints.plain import encode_plain, plain_copy
from trainer_plugin.checkpoints.rng import rng_state, set_rng_state
from trainer_plugin.ranks import Ranks

_log = logging.getLogger(__name__)
LossFn = Callable[[nn.Module, Any], Tensor]
# C25: an intact state gives its loss again to this, relative.
_TOLERANCE = 1e-6


class ProofError(ValueError):
    """A restored state does not give the loss that it gave when it was saved."""


class Proof:
    """Proves the restores of one model; without a `loss_fn`, nothing. `outcomes` counts them by what came out.

    A loss is held against one taken by the same torch on the same kind of machine, in the same `era`: a new one begins
    where a state had to be taken up unproven, for then it is `loss_fn` or the machine that has changed. Of several
    ranks all prove a state together, or none does: the model may need them all.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn | None, ranks: Ranks | None = None) -> None:
        self._ranks = ranks or Ranks()
        self._model = model
        self._loss_fn = loss_fn
        self._batch: Any = None
        self._repeats = False
        self._era = 0
        self.outcomes = {"equal": 0, "different": 0}

    def offer(self, batch: Any) -> None:  # noqa: ANN401 - whatever `data` yields
        """Keep a copy of the first batch there is; later ones are not looked at."""
        if self._batch is not None or self._loss_fn is None:
            return
        try:
            encode_plain({"batch": batch})
        except ValueError as error:
            self._give_up(f"the batch cannot be stored: {error}")
            return
        self._batch = plain_copy(batch)

    def take(self) -> dict[str, Any] | None:
        """Batch and loss of the model as it is, as plain values; None where there is nothing to prove it by."""
        loss = self._loss_of(self._batch)
        if not self._all(loss is not None and math.isfinite(loss)) or loss is None:
            return None
        if not self._repeats:  # Asked once: what does not even agree with itself proves nothing.
            again, self._repeats = self._loss_of(self._batch), True
            if again is None or _differ(loss, again):
                self._give_up(f"for one batch it gives {loss}, and then {again}")
                return None
        return {"batch": self._batch, "loss": loss, "machine": self._machine(), "era": self._era}

    def check(self, taken: dict[str, Any] | None, *, unproven: bool = False) -> None:
        """Hold the restored model against what was taken of it; with `unproven`, believe it and begin a new era.

        Raises:
            ProofError: its loss is another.
        """
        if not self._all(self._loss_fn is not None and taken is not None) or taken is None:
            return
        if unproven:
            self._era = taken["era"] + 1
            return
        if self._batch is None:  # A job that goes on keeps the run's batch, and its era.
            self._batch, self._era = plain_copy(taken["batch"]), taken["era"]
        if not self._all(taken["machine"] == self._machine() and taken["era"] == self._era):
            _log.info("a restore is not proven: the loss of its probe batch was taken on %s", taken["machine"])
            return
        loss = self._loss_of(taken["batch"])
        if loss is None:
            return
        if _differ(loss, taken["loss"]):
            self.outcomes["different"] += 1
            raise ProofError(f"the probe batch has loss {loss:.9g}, and had {taken['loss']:.9g} when it was saved")
        self.outcomes["equal"] += 1

    def _loss_of(self, batch: Any) -> float | None:  # noqa: ANN401
        """None where there is no batch, or no loss to be had of it."""
        if not self._all(self._loss_fn is not None and batch is not None) or self._loss_fn is None:
            return None
        try:
            with _undisturbed(self._model):
                return float(self._loss_fn(self._model, plain_copy(batch)).double().mean())
        except Exception as error:  # noqa: BLE001 - somebody else's code, and no step may fail by it
            self._give_up(f"{type(error).__name__}: {error}")
            return None

    def _all(self, fact: bool) -> bool:  # noqa: FBT001 - what is asked of every rank
        return all(self._ranks.gather(fact))

    def _give_up(self, why: str) -> None:
        self._loss_fn = None
        _log.warning("loss_fn is not used any more, restores prove themselves by hash and finiteness: %s", why)

    def _machine(self) -> str:
        """What a loss may depend on in its last digits."""
        device = next((parameter.device for parameter in self._model.parameters()), torch.device("cpu"))
        if device.type == "cuda":
            return f"torch {torch.__version__}, {torch.cuda.get_device_name(device)}"
        return (
            f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
        )


def _differ(first: float, second: float) -> bool:
    """Whether two losses are further apart than rounding; a NaN is like no other."""
    return not abs(first - second) <= _TOLERANCE * abs(second)


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, fixed random numbers, eager code, no gradients; afterwards everything is as it was."""
    generators = rng_state()
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        for module, _ in modes:
            module.training = False  # Not by `eval()`, which some models make do more.
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002 - the generator that training code draws from
        torch.manual_seed(0)
        with torch.no_grad(), _eager():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for module, name, buffer, content in buffers:
            setattr(module, name, buffer)
            if not torch.equal(buffer, content):  # Untouched ones stay so: a graph may hold them.
                with torch.no_grad():
                    buffer.copy_(content)
        set_rng_state(generators)


def _eager() -> AbstractContextManager[object]:
    """Compiling for one batch takes longer than the batch. The compiler is not loaded where nobody uses it."""
    used = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if used else nullcontext()
