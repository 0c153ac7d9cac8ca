"""Set the choice between our kernels and a module's own code on swapped FFNs, one measurement per kind."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .linears import matrix
from .packing import put_back
from .report import SwapRow
from .swapped import LinearState, SwappedFFN, SwappedLinear, reset
from .timing import ALWAYS, Choice, measure, worth_measuring


def choose_by_measurement(model: nn.Module, rows: list[SwapRow]) -> None:
    """Time each kind of swapped module once and set the choice on all of its kind; update the rows.

    An FFN for which our kernels are never ahead is put back and reported as left.
    """
    swapped = [row for row in rows if row.status == "swapped"]
    kinds: dict[Any, list[Any]] = {}
    for row in swapped:
        for state in row.states:
            module = model.get_submodule(state.path)
            kinds.setdefault(_kind(module), []).append(module)
    for modules in kinds.values():
        if worth_measuring(sum(p.numel() for p in modules[0].parameters())):
            choice = _measured(modules)
            for module in modules:
                module._fanfold.choice = choice
    for row in swapped:
        choices = [state.choice for state in row.states if state.choice is not None]
        if not choices:
            continue
        if not any(any(c.ahead.values()) for c in choices):
            put_back([model.get_submodule(state.path) for state in row.states])
            row.status, row.backend = "left", None
            row.reason = f"PyTorch is faster at every token count timed ({', '.join(map(str, choices[0].ahead))})"
        else:
            row.backend = "; ".join(dict.fromkeys(c.describe() for c in choices))
        reset(row.states)


def _kind(module: Any) -> Any:
    """What decides the speed of a swapped module: its class, the widths, the dtype, the orientation."""
    state: LinearState = module._fanfold
    shapes = tuple((tuple(p.shape), p.stride(), p.dtype) for p in module.parameters())
    return type(module), getattr(state, "spec", None), shapes


def _measured(modules: list[Any]) -> Choice:
    first = modules[0]
    if isinstance(first, SwappedFFN):
        width = first._fanfold.spec.d_model  # type: ignore[attr-defined]
        residual = first._fanfold.residual  # type: ignore[attr-defined]
    else:
        assert isinstance(first, SwappedLinear)
        width, residual = matrix(first).shape[1], False
    modes = {m: m.training for module in modules for m in module.modules()}
    try:
        for module in modules:
            module.eval()
            module._fanfold.choice = ALWAYS

        def arguments(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (x, x) if residual else (x,)

        own = [lambda x, m=m: m._fanfold_original.forward(m, *arguments(x)) for m in modules]
        ours = [lambda x, m=m: m(*arguments(x)) for m in modules]
        return measure(own, ours, width, next(first.parameters()))  # type: ignore[attr-defined]
    finally:
        for m, mode in modes.items():
            m.training = mode
