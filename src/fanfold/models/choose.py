"""Set the choice between our kernels and a module's own code on swapped FFNs, one measurement per kind."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from .linears import matrix, quiet
from .packing import put_back
from .report import SwapRow
from .states import LinearState, reset
from .swapped import SwappedFFN, SwappedLinear
from .timing import ALWAYS, NEVER, Choice, measure, worth_measuring

_LEAST_GAIN = 1.03  # below it the swap is not worth its keep, and within the noise of the timing


def choose_by_measurement(model: nn.Module, rows: list[SwapRow]) -> None:
    """Time each kind of swapped module once and set the choice on all of its kind; update the rows.

    What our kernels do not make faster on the whole is put back; an FFN of which nothing remains is reported as left.
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
        _settle(model, row)


def _settle(model: nn.Module, row: SwapRow) -> None:
    """Put back what the swap would not make faster on the whole; say in the row what runs where."""
    measured = [state for state in row.states if state.choice is not None]
    if not measured:
        return
    losers = [s for s in measured if s.choice is not None and s.choice.gain < _LEAST_GAIN and s.trains is None]
    put_back({state.path: model.get_submodule(state.path) for state in losers})
    said = dict.fromkeys("torch" if s in losers else s.choice.describe() for s in measured if s.choice is not None)
    row.states = [state for state in row.states if state not in losers]
    row.backend = "; ".join(said)
    reset(row.states)
    if not row.states:
        choice = measured[0].choice
        assert choice is not None
        counts = ", ".join(f"{tokens}: {min(pair):.2f}" for tokens, pair in choice.ratios.items())
        row.status, row.backend = "left", None
        row.reason = (
            f"PyTorch is as fast or faster on the whole: {choice.gain:.2f} x its speed where {_LEAST_GAIN} is "
            f"the least that a swap is worth (our time over its, by tokens: {counts})"
        )


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
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(quiet(module))

        def arguments(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (x, x) if residual else (x,)

        def as_chosen(m: Any, choice: Choice) -> Any:
            def call(x: torch.Tensor) -> Any:
                m._fanfold.choice = choice
                return m(*arguments(x))

            return call

        own = [lambda x, m=m: m._fanfold_original.forward(m, *arguments(x)) for m in modules]
        sides = [own, [as_chosen(m, ALWAYS) for m in modules], [as_chosen(m, NEVER) for m in modules]]
        return measure(sides, width, next(first.parameters()))  # type: ignore[attr-defined]
