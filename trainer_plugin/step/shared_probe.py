"""The probe of several ranks: what one process measures, measured of all of them together, in one collective a step.

Each rank adds its own part of every gradient, so that a sharded one is whole and one that several ranks hold alike
counts once. In the same vector ride the losses, what is not finite on which rank, how far the first rank lets the
gradient go, and whether it has something to say. Nothing here reads the host, but for a huge norm on a CPU.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor, nn

from trainer_plugin.ranks import Ranks, is_sharded, local
from trainer_plugin.step.norms import scale_all, tensor_norms
from trainer_plugin.step.probe import LEAST_NORM, Limits, Probe, is_finite, layer_of, packed, values_of
from trainer_plugin.step.row import ABSENT, GRADIENT_FLAG, HUGE_NORM, LOSS_FLAG, Row, Withhold

# So many elements tell whether two ranks have the same parameter.
_COMPARED_NUMEL = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """What this rank tells the others beside its gradients.

    `talks`: the first rank may have something to say at the boundary; it may too where the loss is above `heed_loss` or
    the norm above `heed_norm`. `stop_asked`: this rank was asked to stop. `tokens` and `samples` are those of the step
    on this rank, `tokens` None where not known. `readings` are its squares of the layers' readings, as many on all.
    """

    talks: bool = False
    stop_asked: bool = False
    heed_loss: float = math.inf
    heed_norm: float = math.inf
    tokens: int | None = None
    samples: int = 0
    readings: Tensor | None = None


class SharedProbe(Probe):
    """Measures and clips the gradients of one model that several ranks train.

    `layers` are those of all ranks; one that is not here has no parameters. `shares` is what a parameter's square
    counts for on this rank: one over the number of ranks that hold the same part of it. `overflow` is the last step's:
    1.0 if a gradient of any rank was not finite. `reductions` counts the collectives.

    Raises:
        ValueError: ranks have different parameters by one name.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, *, torchs_clip: bool = False) -> None:
        super().__init__(model, torchs_clip=torchs_clip)
        self._ranks = ranks
        everyone = ranks.gather({name: _mark_of(parameter) for name, parameter in self.parameters.items()})
        for name, mine in everyone[ranks.rank].items():
            strangers = [rank for rank, theirs in enumerate(everyone) if theirs.get(name, mine) != mine]
            if strangers:
                raise ValueError(
                    f"parameter {name} is another one on rank {strangers[0]} than on rank {ranks.rank}: give the parts "
                    "of a model names of their own, and let all ranks begin with the same weights"
                )
        holders = {name: sum(name in theirs for theirs in everyone) for name in self.parameters}
        self.shares = {name: _parts(parameter) / holders[name] for name, parameter in self.parameters.items()}
        names = dict.fromkeys(layer_of(name) for theirs in everyone for name in theirs)
        self.layers = {layer: self.layers.get(layer, []) for layer in names}
        self.overflow = torch.zeros((), device=self.device)
        self.reductions = 0
        self._numbers = {layer: number for number, layer in enumerate(names)}
        self._places_cache: tuple[tuple[str, ...], Tensor, Tensor] | None = None

    @torch.no_grad()
    def measure(
        self,
        loss: Tensor | None,
        limits: Limits,
        *,
        scale: Tensor | None = None,
        beside: Sequence[Tensor] = (),
        again: bool = False,
        told: Told | None = None,
    ) -> tuple[Row, Tensor]:
        """As of one process, but of all ranks: loss, norms and the first rank's limits are the same on each.

        The loss is the mean over the ranks that have one, weighted by tokens where all of these tell them, NaN where
        none has. What the ranks have read of layers goes with the row behind what is `beside`: the roots of the sums.
        """
        told = told or Told()
        named = {name: local(p.grad) for name, p in self.parameters.items() if p.grad is not None}
        gradients = [values_of(gradient) for gradient in named.values()]
        measured = [values_of(held.coalesce()) if held.is_sparse else held for held in named.values()]
        device = gradients[0].device if gradients else self.device
        loss = None if loss is None else loss.detach().double().reshape(()).to(device)
        norms, places, shares = _norms(measured, device), *self._places_of(tuple(named), device)
        own = norms.double().square()
        squares = torch.zeros(len(self.layers), device=device, dtype=torch.float64)
        parts = [
            self._losses(loss, told, device),
            self._words(limits, told, device),
            self._flags(loss, own.sum()),
            squares.index_add(0, places, own * shares),
            squares.index_add(0, places, torch.ones_like(own)),
            squares[:0] if told.readings is None else told.readings.to(device).double(),
        ]
        vector = torch.cat(parts)
        self._ranks.add_up(vector)
        self.reductions += 1
        losses, words, flags, squares, counts, readings = torch.split(vector, [len(part) for part in parts])

        mean, total = _mean(losses), squares.sum().sqrt()
        talks, stop_asked, heed_loss, heed_norm, *limit_values = words.unbind()
        max_norm, surge_above, surge_clip, spike_loss, spike_norm, weight = limit_values
        finite = torch.isfinite(total) & (torch.isfinite(mean) | (losses[1] == 0))
        self.overflow = (~torch.isfinite(total)).float()
        limit = torch.where(total > surge_above, surge_clip, max_norm)
        clip = torch.clamp((total + 1e-6).reciprocal() * limit, max=1.0)
        coefficient = torch.where(finite, clip * weight, 1.0).float()
        if not (self._torchs_clip and self._torch_can_clip()):
            scale_all(gradients, coefficient)
        elif limits.max_norm < math.inf and not any(held.is_sparse for held in named.values()):
            nn.utils.clip_grad_norm_(self.parameters.values(), limits.max_norm)
        withhold = torch.where(finite, 0.0, float(Withhold.NONFINITE))
        if not again:
            known = finite & torch.isfinite(mean)
            spike = self._is_spike(mean, total, known, spike_loss=spike_loss, spike_norm=spike_norm)
            withhold = torch.where(spike, float(Withhold.SPIKE), withhold)
        # A norm beyond float32's squares is exact here on a CPU, and infinite elsewhere.
        withhold = torch.where(finite & (total > HUGE_NORM), float(Withhold.HUGE), withhold)
        heard = (talks > 0) | (withhold > 0) | (mean > heed_loss) | (total > heed_norm)
        scale = torch.ones_like(total) if scale is None else scale.reshape(()).to(device)
        row = Row(
            packed(
                [mean, total, coefficient, scale, withhold],
                torch.where(counts > 0, squares.sqrt(), ABSENT),
                torch.stack([heard.double(), stop_asked, losses[1], losses[3], losses[5]]),
                flags,
                *beside,
                readings.sqrt(),  # Squares of small moments are beyond float32.
            ),
            tuple(self.layers),
            (tuple(named), norms),
            ranks=self._ranks.size,
        )
        return row, (withhold > 0).float()

    @torch.no_grad()
    def nonfinite_weights(self) -> list[str]:
        """As of one process, of what this rank holds."""
        held = {**self.parameters, **self._finite_buffers}
        return [name for name, tensor in held.items() if not is_finite(local(tensor))]

    def _torch_can_clip(self) -> bool:
        """Whether these gradients are all alike: torch refuses sharded ones beside whole ones, or on several meshes."""
        held = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        return len({getattr(gradient, "device_mesh", None) for gradient in held}) <= 1

    def _losses(self, loss: Tensor | None, told: Told, device: torch.device) -> Tensor:
        """`[loss, losses, loss x tokens, tokens, losses with tokens, samples]` of this rank."""
        if loss is None:
            return _on(device, [0.0, 0.0, 0.0, 0.0, 0.0, told.samples])
        tokens = told.tokens or 0
        rest = _on(device, [tokens, told.tokens is not None, told.samples])
        return torch.cat([torch.stack([loss, torch.ones_like(loss), loss * tokens]), rest])

    def _words(self, limits: Limits, told: Told, device: torch.device) -> Tensor:
        """What the first rank says, and whether this one was asked to stop."""
        words = [told.talks, told.stop_asked, told.heed_loss, told.heed_norm, *astuple(limits)]
        return _on(device, words if self._ranks.first else [0.0, told.stop_asked, *[0.0] * (len(words) - 2)])

    def _flags(self, loss: Tensor | None, square: Tensor) -> Tensor:
        """What is not finite on this rank, in its place among all ranks."""
        flag = GRADIENT_FLAG * (~torch.isfinite(square)).double()
        if loss is not None:
            flag = flag + LOSS_FLAG * (~torch.isfinite(loss)).double()
        flags = torch.zeros(self._ranks.size, device=square.device, dtype=torch.float64)
        flags[self._ranks.rank] = flag
        return flags

    def _places_of(self, names: tuple[str, ...], device: torch.device) -> tuple[Tensor, Tensor]:
        """For each gradient that is there the number of its layer, and its share."""
        if self._places_cache is None or self._places_cache[0] != names:
            places = torch.tensor([self._numbers[layer_of(name)] for name in names], dtype=torch.int64)
            self._places_cache = names, places.to(device), _on(device, [self.shares[name] for name in names])
        return self._places_cache[1:]


def _mean(losses: Tensor) -> Tensor:
    plain, known, by_tokens, tokens, with_tokens, _ = losses.unbind()
    return torch.where((with_tokens == known) & (tokens > 0), by_tokens / tokens, plain / known)


def _norms(tensors: list[Tensor], device: torch.device) -> Tensor:
    """The norm of each, exact on a CPU however huge or small it is."""
    if not tensors:
        return torch.zeros(0, device=device)
    norms = torch.stack([norm.to(device) for norm in tensor_norms(tensors)])
    if device.type == "cpu" and not LEAST_NORM < float(torch.linalg.vector_norm(norms)) < math.inf:
        norms = torch.stack([torch.linalg.vector_norm(tensor.double()) for tensor in tensors])
    return norms


def _mark_of(parameter: nn.Parameter) -> tuple[object, ...]:
    """What tells a parameter from another one of its name on another rank; a sharded one is known by its mesh."""
    if is_sharded(parameter):
        return tuple(parameter.shape), str(parameter.placements)  # type: ignore[attr-defined]
    flat = parameter.detach().flatten()
    some = flat[:: max(1, flat.numel() // _COMPARED_NUMEL)][:_COMPARED_NUMEL]
    return tuple(parameter.shape), str(some.tolist())  # As text: there a NaN is like another.


@torch.no_grad()
def _parts(parameter: nn.Parameter) -> int:
    """In how many different parts a parameter lies on the ranks that hold it."""
    if not is_sharded(parameter):
        return 1
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return math.prod(mesh.size(place) for place, one in enumerate(placements) if not one.is_replicate())


def _on(device: torch.device, numbers: Sequence[float]) -> Tensor:
    """Plain numbers as float64 on a device, which is not waited for."""
    pinned = device.type == "cuda"
    return torch.tensor(numbers, dtype=torch.float64, pin_memory=pinned).to(device, non_blocking=True)
