"""A byte-level GPT small enough for two cores: pre-LN blocks, causal attention, tied embeddings."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256


class Attention(nn.Module):
    """Causal self-attention of `heads` heads over [B, T, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] to [B, T, width]; a position sees itself and what is before it."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed: Tensor = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class MLP(nn.Module):
    """Two linear layers with a GELU between them, four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] to [B, T, width], each position by itself."""
        out: Tensor = self.down(functional.gelu(self.up(x)))
        return out


class Block(nn.Module):
    """Attention and MLP, each behind a layer norm and added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] to [B, T, width]."""
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT(nn.Module):
    """The model; 0.44 million parameters as it stands. Its initial weights come from torch's global generator.

    Args:
        width: size of the residual stream.
        layers: number of blocks.
        heads: attention heads in a block; they share `width` evenly.
        context: longest input, T.
    """

    def __init__(self, *, width: int = 128, layers: int = 2, heads: int = 4, context: int = 64) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, width)
        self.wpe = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                # What is added to the residual stream starts smaller, so that depth does not raise its variance.
                added = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if added else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [B, T] to the logits of each next token, [B, T, 256]."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.ln_f(x), self.wte.weight)


def sample_losses(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of each row's predictions (nats a token): token ids [B, T + 1] to [B]."""
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(dim=1)


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of all predictions (nats a token): token ids [B, T + 1] to a scalar."""
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def held_out_loss(model: nn.Module, batches: Sequence[Tensor]) -> float:
    """Mean loss over fixed batches (nats a token); the model's mode and every random generator stay as they are."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            summed = sum(float(sample_losses(model, tokens).sum(dtype=torch.float64)) for tokens in batches)
    finally:
        model.train(was_training)
    return summed / sum(len(tokens) for tokens in batches)
