"""The budget: which width, or depth, gives each variant the same parameters or FLOPs, by exact counts.

D d_model, F d_ff, L blocks, V vocabulary, S tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..count import ffn
from ..count.block import Attention
from ..spec import Spec
from .settings import ATTENTION_ONLY, Setup, Variant

MOST = 1 << 20  # d_ff and blocks that are looked at


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A variant with its sizes.

    spec       None: no FFN.  n_layers  blocks.  params  of the whole model.
    flops      forward, for each token of a sequence, with causal attention counted as it is masked: S / 2 on average.
    deviation  of what is held equal, relative to the reference.
    """

    variant: Variant
    spec: Spec | None
    n_layers: int
    params: int
    flops: int
    deviation: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "variant": self.variant.name,
            "spec": None if self.spec is None else self.spec.to_dict(),
            "n_layers": self.n_layers,
            "params": self.params,
            "flops_per_token": self.flops,
            "deviation": self.deviation,
        }


def params(setup: Setup, spec: Spec | None, n_layers: int) -> int:
    """V D + L (attention + FFN + a norm for each) + D: embeddings are tied with the head."""
    d = setup.d_model
    block = _attention(setup).n_params + d + (0 if spec is None else spec.n_params + d)
    return setup.vocabulary * d + n_layers * block + d


def flops(setup: Setup, spec: Spec | None, n_layers: int) -> int:
    """2 per weight used, and the scores of S / 2 positions on average; forward, one token."""
    block = _attention(setup).flops_per_token(setup.sequence // 2) + (0 if spec is None else ffn.flops_per_token(spec))
    return n_layers * block + 2 * setup.vocabulary * setup.d_model


def _attention(setup: Setup) -> Attention:
    head = setup.d_model // setup.n_heads
    return Attention(d_model=setup.d_model, n_heads=setup.n_heads, n_kv_heads=setup.n_heads, head_dim=head)


def plan(setup: Setup, variants: Sequence[Variant]) -> list[Planned]:
    """The sizes of each variant: d_ff such that its budget is nearest to the reference's, an ungated FFN of
    `setup.d_ff` without biases in `setup.n_layers` blocks. A variant without FFN gets blocks instead.

    Raises ValueError where the budget cannot be met: no d_ff from 1 on comes within a tenth of it.
    """
    count = flops if setup.budget == "flops" else params
    reference = Variant.parse("relu").spec(setup.d_model, setup.d_ff)
    target = count(setup, reference, setup.n_layers)
    return [_planned(setup, variant, count, target) for variant in variants]


def _planned(setup: Setup, variant: Variant, count: Callable[..., int], target: int) -> Planned:
    n_layers, spec = variant.layers or setup.n_layers, None
    if variant.ffn == ATTENTION_ONLY:
        if variant.layers is None:
            n_layers = _nearest(lambda n: count(setup, None, n), target)
    elif variant.d_ff is not None:
        spec = variant.spec(setup.d_model, variant.d_ff)
    else:
        width = _nearest(lambda f: count(setup, variant.spec(setup.d_model, f), n_layers), target)
        spec = variant.spec(setup.d_model, width)
    deviation = count(setup, spec, n_layers) / target - 1
    free = variant.d_ff is None or variant.layers is None
    if abs(deviation) > 0.1 and free and not (variant.ffn == ATTENTION_ONLY and variant.layers is not None):
        raise ValueError(
            f"variant {variant.name!r} misses the budget of {target:,} {setup.budget} by {100 * deviation:+.1f} % at "
            f"best ({n_layers} blocks): set other layers or d_ff, or a larger model"
        )
    return Planned(
        variant=variant,
        spec=spec,
        n_layers=n_layers,
        params=params(setup, spec, n_layers),
        flops=flops(setup, spec, n_layers),
        deviation=deviation,
    )


def _nearest(count: Callable[[int], int], target: int) -> int:
    """The n from 1 to MOST whose count, which rises with n, is nearest to the target."""
    low, high = 1, MOST
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if count(middle) < target else (low, middle)
    return min((n for n in (low - 1, low) if n >= 1), key=lambda n: (abs(count(n) - target), n))


def spread(planned: Iterable[Planned]) -> float:
    """The largest relative distance of a budget from the reference's."""
    return max((abs(p.deviation) for p in planned), default=0.0)
