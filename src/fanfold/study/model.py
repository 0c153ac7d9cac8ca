"""The language model of a study: pre-norm RMSNorm, RoPE, causal attention, our FFN, embeddings tied with the head.

B batch, S sequence, D d_model, H heads, K width of a head, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from ..nn import FeedForward
from ..spec import Spec
from .budget import Planned
from .settings import Setup

BASE = 10000.0  # of RoPE: Su 2021, arXiv:2104.09864


class CausalAttention(nn.Module):
    """Multi-head attention with rotary positions, each token on itself and those before.  x [B, S, D] -> [B, S, D]."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))

    def forward(self, x: Tensor, angles_SK: tuple[Tensor, Tensor]) -> Tensor:
        b, s, d = x.shape

        def heads(projection: nn.Linear) -> Tensor:
            return projection(x).view(b, s, self.n_heads, d // self.n_heads).transpose(1, 2)

        q, k = (_rotated(heads(p), *angles_SK) for p in (self.q_proj, self.k_proj))
        y = nn.functional.scaled_dot_product_attention(q, k, heads(self.v_proj), is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, s, d))


def _rotated(x_BHSK: Tensor, cos_SK: Tensor, sin_SK: Tensor) -> Tensor:
    first, second = x_BHSK.chunk(2, -1)
    return x_BHSK * cos_SK + torch.cat([-second, first], -1) * sin_SK


def angles(sequence: int, width: int) -> tuple[Tensor, Tensor]:
    """(cos, sin) [S, K] of the rotary positions."""
    rates = BASE ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    turn = torch.outer(torch.arange(sequence, dtype=torch.float64), rates).repeat(1, 2)
    return turn.cos().float(), turn.sin().float()


class Block(nn.Module):
    """x + attention(norm x), then x + FFN(norm x); without a spec, attention alone."""

    def __init__(self, setup: Setup, spec: Spec | None) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(setup.d_model)
        self.attention = CausalAttention(setup.d_model, setup.n_heads)
        if spec is not None:
            self.ffn_norm = nn.RMSNorm(setup.d_model)
            self.ffn = FeedForward(spec)
        self.has_ffn = spec is not None

    def forward(self, x: Tensor, angles_SK: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles_SK)
        return x + self.ffn(self.ffn_norm(x)) if self.has_ffn else x


class LanguageModel(nn.Module):
    """Token ids [B, S] -> logits [B, S, V]."""

    cos: Tensor
    sin: Tensor

    def __init__(self, setup: Setup, planned: Planned) -> None:
        super().__init__()
        self.embedding = nn.Embedding(setup.vocabulary, setup.d_model)
        self.blocks = nn.ModuleList(Block(setup, planned.spec) for _ in range(planned.n_layers))
        self.norm = nn.RMSNorm(setup.d_model)
        cos, sin = angles(setup.sequence, setup.d_model // setup.n_heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        around = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, around)
        return nn.functional.linear(self.norm(x), self.embedding.weight)


def initialize(model: nn.Module, setup: Setup, seed: int) -> None:
    """Weights drawn from a generator of their own for each name: two variants with a parameter of the same name and
    shape begin with the same numbers. Matrices have std 1/sqrt(inputs), those that write to the residual that over
    sqrt(2 n_layers of the setup), the embedding 1/sqrt(D): its logits then have unit variance."""
    writes = math.sqrt(2 * setup.n_layers)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() < 2:
                p.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            std = p.shape[-1] ** -0.5 / (writes if ".o_proj." in name or ".down_proj." in name else 1.0)
            p.normal_(0.0, std, generator=torch.Generator().manual_seed(number(seed, name)))


def number(*parts: object) -> int:
    """A 63-bit number that depends on all parts: seeds that have nothing to do with each other."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1
