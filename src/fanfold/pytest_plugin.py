"""pytest fixtures for anybody who writes an FFN backend. Installed with the package; imports torch only when used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .numerics import Comparison
    from .spec import Spec
    from .weights import Weights

    Forward = Callable[[Any, Weights], Any]


def _probes(spec: Spec, dtype: Any, tokens: int, seed: int) -> Iterator[tuple[str, Any, Weights]]:
    """(name, x, weights): inputs on which a right and a wrong FFN part.

    "plain"  pre-activations of std 1 centred on 0.
    "wide"   only with clamps: of std the largest limit, so that one in three passes it.
    "tail"   pre-activations around -4, where activations differ by a good part of themselves: gelu_erf and gelu_tanh
            differ by 40 % there, but by less than one bfloat16 rounding of a typical output elsewhere.
    """
    import numpy as np
    import torch

    from . import numerics

    rng = np.random.default_rng(seed + 1)
    limit = max(spec.gate_limit or 0.0, spec.up_limit or 0.0)
    plain = rng.normal(size=(tokens, spec.d_model))
    weights = numerics.random_weights(spec, seed, lambda a: torch.tensor(a).to(dtype))
    yield "plain", torch.tensor(plain).to(dtype), weights
    if limit:
        yield "wide", torch.tensor(plain * limit).to(dtype), weights
    activated = "gate" if spec.gated else "up"
    along = np.full(spec.d_model, spec.d_model**-0.5)
    # x . row = -4 + noise of std about 0.1: every channel sits in the tail
    rows = 0.1 * getattr(weights, activated).double().numpy() + along
    tail = 0.5 * rng.normal(size=(tokens, spec.d_model))
    tail += (-4.0 - tail @ along)[:, None] * along
    changes = {activated: torch.tensor(rows).to(dtype)}
    for bias in (f"{activated}_bias", "down_bias"):
        if getattr(spec, bias):
            changes[bias] = getattr(weights, bias) * 2.0**-14  # outputs are near 1e-4 here: biases would drown them
    yield "tail", torch.tensor(tail).to(dtype), weights.replace(**changes)


def _battery(
    forward: Forward, spec: Spec, dtype: Any = "float32", tokens: int = 7, seed: int = 0
) -> dict[str, Comparison]:
    import torch

    from . import numerics, reference
    from .kernels import torch as eager

    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    found: dict[str, Comparison] = {}
    survivors: set[str] | None = None
    for probe, x, weights in _probes(spec, dtype, tokens, seed):
        truth, torch_y = reference.forward(x, weights), eager.forward(x, weights)
        y = forward(x, weights)
        assert y.dtype == torch_y.dtype, f"{spec.describe()}: the result is {y.dtype}, expected {torch_y.dtype}"
        found[probe] = numerics.compare(y, truth, torch_y)
        assert found[probe].ok, f"{spec.describe()}, {dtype}, probe {probe}: {found[probe]}"
        wrong = {name: forward(x, mutant) for name, mutant in numerics.mutants(weights)}
        wrong.update(numerics.output_mutants(y))
        passed = {name for name, wrong_y in wrong.items() if numerics.compare(wrong_y, truth, torch_y).ok}
        survivors = passed if survivors is None else survivors & passed
    # a mutant has to be rejected by one of the probes; without tokens there is nothing to tell apart
    assert not survivors or not tokens, f"{spec.describe()}, {dtype}: mutants not rejected: {sorted(survivors)}"
    return found


@pytest.fixture
def ffn_battery() -> Callable[..., dict[str, Comparison]]:
    """`battery(forward, spec, dtype="float32", tokens=7, seed=0)`: hold a backend to the tolerance rule.

    forward(x, weights) -> y  takes x [tokens, d_model] and Weights of torch tensors in `dtype`.
    Checked on two or three probes: the result is within `numerics.compare`'s rule of the float64 reference, next to
    PyTorch eager in the same dtype; and every mutant (`numerics.mutants`, run through `forward`;
    `numerics.output_mutants`) is rejected on one of them. Returns the Comparison of each probe.
    Fails with the name of the mutant that was not rejected.
    """
    return _battery
