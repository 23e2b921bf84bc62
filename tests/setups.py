"""The set-ups in which people train on one process, as a table, and a loop that runs one, guarded or not."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer, SparseAdam
from training import Job

from trainer_plugin.demo import gpt
from trainer_plugin.step.probe import layer_of, plain_name

NO_CHECKPOINTS = {"checkpoints": {"every": 1000}}


class Branch(nn.Module):
    """A block of a model that is left out where `used` is not set."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.used = True

    def forward(self, x: Tensor) -> Tensor:
        """Through the block, or past it."""
        return self.block(x) if self.used else x


class Words(nn.Module):
    """An embedding whose gradients are sparse, and a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(gpt.VOCABULARY, 8, sparse=True)
        self.head = nn.Linear(8, gpt.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids to the logits of each next token."""
        return self.head(self.embedding(tokens % 4))  # So few that each occurs several times in a batch.


class Lines(nn.Module):
    """So many layers of one weight, each with the same gradient."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(layers))

    def forward(self, slope: float) -> torch.Tensor:
        """A loss with this gradient for each weight."""
        return slope * sum(layer.weight for layer in self.layers).sum()


def small() -> gpt.GPT:
    """A transformer of 3,000 weights; its embedding is tied to its head."""
    return gpt.GPT(width=8, layers=1, heads=2, context=4)


def branching() -> gpt.GPT:
    """One whose block is in use at every second step."""
    model = small()
    model.blocks[0] = Branch(model.blocks[0])
    return model


def frozen() -> gpt.GPT:
    """One whose block and positions are not trained, for now."""
    model = small()
    for part in (model.wpe, model.blocks[0]):
        part.requires_grad_(requires_grad=False)
    return model


def one(kind: type[Optimizer], model: nn.Module, **options) -> list[Optimizer]:
    """One optimizer for all."""
    return [kind(model.parameters(), **{"lr": 0.01, **options})]


adamw = partial(one, AdamW)


def sgd_job(model: nn.Module, **options) -> Job:
    """A job on SGD that draws no data."""
    return Job(model=model, optimizer=SGD(model.parameters(), lr=1e-3, **options))


def groups(model: nn.Module) -> list[Optimizer]:
    """Matrices with decay, the rest without it and at another rate."""
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    rest = [weight for weight in model.parameters() if weight.dim() != 2]
    return [AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 0.02}], fused=True)]


def muon(model: nn.Module, kind: type[Optimizer] = Muon) -> list[Optimizer]:
    """One optimizer for the matrices of the blocks, AdamW for the rest."""
    inner = [weight for weight in model.blocks.parameters() if weight.dim() == 2]
    rest = [weight for weight in model.parameters() if all(weight is not other for other in inner)]
    return [kind(inner, lr=0.01), AdamW(rest, lr=0.01)]


def sparse_adam(model: nn.Module) -> list[Optimizer]:
    """SparseAdam for the embedding, AdamW for the head."""
    return [SparseAdam(model.embedding.parameters(), lr=0.01), AdamW(model.head.parameters(), lr=0.01)]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One way to train. `unscaled` is how many of the optimizers the loop unscales itself.

    `clip` is None for sparse gradients, which torch's own clip refuses.
    """

    model: Callable[[], nn.Module] = small
    optimizers: Callable[[nn.Module], list[Optimizer]] = adamw
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    scaled: bool = False
    unscaled: int = 0
    micro_batches: int = 1
    tokens: int | None = None
    thaw_at: int | None = None
    set_to_none: bool = True
    compiled: bool = False
    clip: float | None = 0.3
    steps: int = 20


FP16 = {"autocast": torch.float16, "scaled": True}
KINDS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}
SETUPS = {
    **{
        f"{kind.__name__}-{name}": Setup(optimizers=partial(one, kind, **options, **choice))
        for kind, options in ((AdamW, {}), (Adam, {"amsgrad": True}), (SGD, {"momentum": 0.9, "weight_decay": 0.1}))
        for name, choice in KINDS.items()
    },
    "plain-sgd": Setup(optimizers=partial(one, SGD)),
    "tensor-rate": Setup(optimizers=lambda model: one(AdamW, model, lr=torch.tensor(0.01), fused=True)),
    "groups": Setup(optimizers=groups),
    "muon": Setup(optimizers=muon),
    "muon-bf16-autocast": Setup(optimizers=muon, autocast=torch.bfloat16, steps=200),
    "bf16-autocast": Setup(autocast=torch.bfloat16, optimizers=partial(one, AdamW, fused=True)),
    "bf16-weights": Setup(dtype=torch.bfloat16, optimizers=partial(one, AdamW, foreach=True)),
    "bf16-weights-branch": Setup(dtype=torch.bfloat16, model=branching, steps=200),
    "bf16-weights-accumulated": Setup(dtype=torch.bfloat16, micro_batches=4),
    "fp16-weights": Setup(dtype=torch.float16, optimizers=partial(one, SGD, momentum=0.9)),
    "float64": Setup(dtype=torch.float64, optimizers=partial(one, SGD, foreach=True, momentum=0.9)),
    "float64-groups-kept": Setup(dtype=torch.float64, optimizers=groups, set_to_none=False, steps=200),
    "scaler-fused": Setup(optimizers=partial(one, AdamW, fused=True), **FP16),
    "scaler-foreach": Setup(optimizers=partial(one, Adam, foreach=True), **FP16),
    "scaler-loop": Setup(optimizers=partial(one, SGD, foreach=False), **FP16),
    "scaler-unscaled-fused": Setup(optimizers=partial(one, SGD, fused=True), unscaled=1, steps=200, **FP16),
    "scaler-unscaled": Setup(unscaled=1, micro_batches=4, **FP16),
    "scaler-unscaled-one-of-two": Setup(optimizers=partial(muon, kind=SGD), unscaled=1, **FP16),
    "accumulated": Setup(micro_batches=4),
    "accumulated-tokens": Setup(micro_batches=4, tokens=8, optimizers=partial(one, Adam, foreach=False)),
    "accumulated-kept": Setup(micro_batches=4, set_to_none=False),
    "branch": Setup(model=branching),
    "branch-fused": Setup(model=branching, optimizers=partial(one, SGD, fused=True, momentum=0.9)),
    "branch-kept": Setup(model=branching, set_to_none=False),
    "frozen": Setup(model=frozen),
    "thawed": Setup(model=frozen, thaw_at=3, set_to_none=False),
    "sparse": Setup(model=Words, optimizers=sparse_adam, clip=None),
    "sparse-sgd": Setup(model=Words, optimizers=partial(one, SGD), clip=None),
    "sparse-accumulated": Setup(model=Words, optimizers=partial(one, SGD), clip=None, micro_batches=4, steps=200),
    "unclipped": Setup(clip=None),
    "scaler-unclipped": Setup(clip=None, optimizers=partial(one, SGD, momentum=0.9), **FP16),
    "compiled": Setup(compiled=True),
}  # fmt: skip


class Loop:
    """Training in a set-up. Without a guard it is a plain loop with torch's own clip.

    While `measuring`, `norms` is what the last step's true gradients were just before the clip, in float64: the
    layers', and "" for all.
    """

    def __init__(self, setup: Setup) -> None:
        torch.manual_seed(3)
        self.setup = setup
        self.model = setup.model().to(setup.dtype)
        self.optimizers = setup.optimizers(self.model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=30) if setup.scaled else None
        if setup.compiled:
            self.model = torch.compile(self.model, backend="aot_eager")
        self.guard = None
        self.measuring = False
        self.norms: dict[str, float] = {}

    def step(self, number: int, damage: Callable[[Tensor], object] | None = None) -> None:
        """One step on the batches of `number`; `damage` is done to one gradient right after the backward pass."""
        setup, guard, scaler = self.setup, self.guard, self.scaler
        self._prepare(number)
        for part in range(setup.micro_batches):
            generator = torch.Generator().manual_seed(number * setup.micro_batches + part)
            tokens = torch.randint(gpt.VOCABULARY, (2, 5), generator=generator)
            with torch.autocast("cpu", setup.autocast, enabled=setup.autocast is not None):
                loss = gpt.loss(self.model, tokens)
            share = loss / setup.micro_batches
            (share if scaler is None else scaler.scale(share)).backward()
            if guard is not None and setup.micro_batches > 1:
                guard.micro_step(loss, tokens=setup.tokens)
        if damage is not None:
            gradient = next(weight.grad for weight in self.model.parameters() if weight.grad is not None)
            damage(gradient._values() if gradient.is_sparse else gradient)
        for optimizer in self.optimizers[: setup.unscaled]:
            scaler.unscale_(optimizer)
        if self.measuring:
            self._measure()
        if guard is not None:
            guard.before_optimizer(loss if setup.micro_batches == 1 else None)
        else:
            self._clip()
        for optimizer in self.optimizers:
            optimizer.step() if scaler is None else scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=setup.set_to_none)
        if scaler is not None:
            scaler.update()
        if guard is not None:
            guard.end_step()

    def state(self) -> dict[str, Tensor]:
        """Copies of weights, moments and step counts."""
        state = dict(self.model.state_dict())
        for number, optimizer in enumerate(self.optimizers):
            for key, tensors in optimizer.state_dict()["state"].items():
                state |= {f"{number}/{key}/{name}": torch.as_tensor(value) for name, value in tensors.items()}
        return {name: tensor.clone() for name, tensor in state.items()}

    def _prepare(self, number: int) -> None:
        for module in self.model.modules():
            if isinstance(module, Branch):
                module.used = number % 2 == 0
        if number == self.setup.thaw_at:
            self.model.requires_grad_()

    def _clip(self) -> None:
        if self.setup.clip is None:
            return  # What scales the loss unscales by itself in `step`.
        if self.scaler is not None:
            for optimizer in self.optimizers[self.setup.unscaled :]:
                self.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.setup.clip)

    def _measure(self) -> None:
        unscaled = {
            id(weight)
            for optimizer in self.optimizers[: self.setup.unscaled]
            for group in optimizer.param_groups
            for weight in group["params"]
        }
        squares: dict[str, float] = {}
        for name, weight in self.model.named_parameters():
            if weight.grad is not None:
                scale = self.scaler.get_scale() if self.scaler is not None and id(weight) not in unscaled else 1.0
                square = (weight.grad.double().to_dense() / scale).square().sum().item()
                for key in (layer_of(plain_name(name)), ""):
                    squares[key] = squares.get(key, 0.0) + square
        self.norms = {key: square**0.5 for key, square in squares.items()}
