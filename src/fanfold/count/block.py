"""The block around an FFN: attention with grouped queries, the FFN's share, and which way to widen it.

D d_model, F d_ff, S positions that a token attends to.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..spec import Spec
from . import ffn
from .settings import positive


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Attention with n_heads query heads and n_kv_heads key and value heads of head_dim each.

    bias  whether the four projections add biases. Raises ValueError unless n_heads is a multiple of n_kv_heads.
    Grouped queries: Ainslie 2023, arXiv:2305.13245.
    """

    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    bias: bool = False

    def __post_init__(self) -> None:
        for name in ("d_model", "n_heads", "n_kv_heads", "head_dim"):
            positive(name, getattr(self, name))
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads={self.n_heads} with n_kv_heads={self.n_kv_heads}: expected a multiple of it")

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """{projection: (rows, length of a row)}."""
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        return {"q": (q, self.d_model), "k": (kv, self.d_model), "v": (kv, self.d_model), "o": (self.d_model, q)}

    @property
    def n_biases(self) -> int:
        """Number of bias values."""
        return sum(rows for rows, _ in self.matrices.values()) if self.bias else 0

    @property
    def n_params(self) -> int:
        """D (2 n_heads + 2 n_kv_heads) head_dim, and the biases."""
        return sum(rows * length for rows, length in self.matrices.values()) + self.n_biases

    def score_flops_per_token(self, context: int) -> int:
        """4 S n_heads head_dim: queries times keys, and weights times values; over a text of S tokens S^2 of it."""
        return 4 * context * self.n_heads * self.head_dim

    def flops_per_token(self, context: int) -> int:
        """2 per weight of the projections, and the scores."""
        return 2 * (self.n_params - self.n_biases) + self.score_flops_per_token(context)

    def cache_bytes_per_position(self, width: int) -> int:
        """Bytes of keys and values that one position adds to the cache: 2 n_kv_heads head_dim width."""
        return 2 * self.n_kv_heads * self.head_dim * width


@dataclass(frozen=True, kw_only=True)
class Block:
    """A Transformer layer: attention and an FFN of the same d_model. Norms are O(D) and not counted."""

    ffn: Spec
    attention: Attention

    def __post_init__(self) -> None:
        if self.ffn.d_model != self.attention.d_model:
            raise ValueError(f"the FFN has d_model={self.ffn.d_model}, attention d_model={self.attention.d_model}")

    @property
    def n_params(self) -> int:
        """Weights and biases of both."""
        return self.ffn.n_params + self.attention.n_params

    def flops_per_token(self, context: int) -> int:
        """FLOPs of both for one token, forward."""
        return ffn.flops_per_token(self.ffn) + self.attention.flops_per_token(context)

    def equal_context(self) -> float:
        """The S at which the scores cost as many FLOPs as the FFN: 6 D F / (4 n_heads head_dim) gated."""
        return ffn.flops_per_token(self.ffn) / self.attention.score_flops_per_token(1)


@dataclass(frozen=True, kw_only=True)
class Widened:
    """A block made larger; all per layer and token, S positions attended to.

    d_model and d_ff are not rounded; heads are added with d_model, their size stays.
    """

    way: str
    d_model: float
    d_ff: float
    params: float
    flop_per_token: float
    score_flop_per_token: float
    cache_bytes_per_position: float
    residual_bytes_per_token: float
    saved_bytes_per_token: float

    def to_dict(self) -> dict[str, float | str]:
        """Plain values, units in the keys."""
        return dataclasses.asdict(self)


def widen(block: Block, factor: float, context: int, width: int = 2) -> list[Widened]:
    """The block as it is, and with `factor` times its parameters: by d_ff alone, by d_model alone, by both alike.

    by d_ff     F' = F + (factor - 1) * params / (n_matrices * D)
    by d_model  D' = D (-b + sqrt(b^2 + 4 a factor params)) / 2a, the projections of attention growing as D'^2 (a)
                and the FFN's matrices as D' F (b)
    by both     D' = D sqrt(factor), F' = F sqrt(factor)
    Biases are left out. residual_bytes is what an all-reduce adds up for each token, and what the stream of a
    pipeline carries; saved_bytes is kept for backward by the FFN with save="all".

    Raises ValueError unless factor is above 1.
    """
    if not factor > 1:
        raise ValueError(f"factor={factor!r}: expected a number above 1")
    spec, att = block.ffn, block.attention
    k, d, f = ffn.n_matrices(spec), spec.d_model, spec.d_ff
    a = float(att.n_params - att.n_biases)
    b = float(k * d * f)
    target = factor * (a + b)
    x = (-b + (b * b + 4 * a * target) ** 0.5) / (2 * a)
    both = factor**0.5
    ways = (
        ("as it is", 1.0, 1.0),
        ("wider d_ff", 1.0, (target - a) / b),
        ("wider d_model", x, 1.0),
        ("both", both, both),
    )
    return [_widened(block, way, dx, fx, context, width) for way, dx, fx in ways]


def _widened(block: Block, way: str, dx: float, fx: float, context: int, width: int) -> Widened:
    spec, att = block.ffn, block.attention
    params = (att.n_params - att.n_biases) * dx * dx + ffn.n_matrices(spec) * spec.d_model * spec.d_ff * dx * fx
    scores = att.score_flops_per_token(context) * dx
    n_d, n_f, n_mask = ffn.saved_tensors(spec, "all")
    saved = (n_d * spec.d_model * dx + n_f * spec.d_ff * fx) * width + n_mask * spec.d_ff * fx
    return Widened(
        way=way,
        d_model=spec.d_model * dx,
        d_ff=spec.d_ff * fx,
        params=params,
        flop_per_token=2 * params + scores,
        score_flop_per_token=scores,
        cache_bytes_per_position=att.cache_bytes_per_position(width) * dx,
        residual_bytes_per_token=spec.d_model * dx * width,
        saved_bytes_per_token=saved,
    )
