"""Hooks that copy what flows through a model in one run: inputs and outputs of FFNs, states at blocks' entry and exit.

B batch, T tokens, D d_model.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..models.find import Found
from ..models.inputs import placed
from ..models.observe import batch

Key = tuple[str, int]  # path of a module, which of its calls in the run


class Taps:
    """Copies from one run of a model, by (path, number of the call).

    x, y           what an FFN reads and gives [..., D], float32; y without a residual that the module adds itself.
    dtype          of y as the model computed it;  largest  the largest |element| of the tensor that y was rounded in.
    before, after  the states [B, T, D] at a block's entry and exit.
    order          (FFN's key, key of the block around it), in order of execution.
    """

    def __init__(self, model: nn.Module, places: Iterable[tuple[Found, str]]) -> None:
        self.model = model
        self.places = list(places)
        self.x: dict[Key, Tensor] = {}
        self.y: dict[Key, Tensor] = {}
        self.dtype: dict[Key, torch.dtype] = {}
        self.largest: dict[Key, float] = {}
        self.before: dict[Key, Tensor] = {}
        self.after: dict[Key, Tensor] = {}
        self.order: list[tuple[Key, Key]] = []
        self._entered: Counter[str] = Counter()
        self._left: Counter[str] = Counter()
        self._read: Counter[str] = Counter()
        self._wrote: Counter[str] = Counter()

    @contextlib.contextmanager
    def placed(self) -> Iterator[Taps]:
        """The hooks are in the model while this lasts; they come after hooks that are there already."""
        handles: list[Any] = []
        try:
            for block, width in {block: found.spec.d_model for found, block in self.places if found.spec}.items():
                module = self.model.get_submodule(block)
                # the entry first of all, so that a block that is itself an FFN is entered before it is read
                handles.append(
                    module.register_forward_pre_hook(self._entry(block, width), with_kwargs=True, prepend=True)
                )
                handles.append(module.register_forward_hook(self._exit(block, width)))
            for found, block in self.places:
                handles += self._tap(found, block)
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _tap(self, found: Found, block: str) -> list[Any]:
        first = found.path if found.kind == "module" else next(p for r, p in found.projections.items() if r != "down")
        last = found.path if found.kind == "module" else found.projections["down"]

        def read(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            key = (found.path, self._read[found.path])
            self._read[found.path] += 1
            self.order.append((key, (block, self._entered[block] - 1)))
            self.x[key] = copied(args[0] if args else next(iter(kwargs.values())))

        def wrote(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor) -> None:
            key = (found.path, self._wrote[found.path])
            self._wrote[found.path] += 1
            self.dtype[key], self.largest[key] = y.dtype, float(y.abs().max()) if y.numel() else 0.0
            self.y[key] = copied(y)
            if found.residual:
                self.y[key] -= copied((*args, *kwargs.values())[1])

        return [
            self.model.get_submodule(first).register_forward_pre_hook(read, with_kwargs=True),
            self.model.get_submodule(last).register_forward_hook(wrote, with_kwargs=True),
        ]

    def _entry(self, block: str, width: int) -> Any:
        def entry(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            state = state_in((*args, *kwargs.values()), width)
            if state is not None:
                self.before[(block, self._entered[block])] = copied(state)
            self._entered[block] += 1

        return entry

    def _exit(self, block: str, width: int) -> Any:
        def leave(_module: nn.Module, _args: Any, out: Any) -> None:
            state = state_in(out, width)
            if state is not None:
                self.after[(block, self._left[block])] = copied(state)
            self._left[block] += 1

        return leave


def copied(t: Tensor) -> Tensor:
    """A float32 copy on the CPU, its memory its own."""
    return t.detach().to("cpu", torch.float32, copy=True)


def state_in(value: Any, width: int) -> Tensor | None:
    """The first float tensor [.., width] of a block's arguments or outputs."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() and value.dim() >= 2 and value.shape[-1] == width else None
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return next((s for s in (state_in(v, width) for v in values) if s is not None), None)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; every module's mode is put back."""
    modes = [(m, m.training) for m in model.modules()]
    try:
        for m, _ in modes:
            m.training = False
        with torch.no_grad():
            yield
    finally:
        for m, mode in modes:
            m.training = mode


def run(model: nn.Module, inputs: Any) -> Any:
    """What the model returns for `inputs` (see `models.observe.batch`); no cache is made unless asked for."""
    args, kwargs = batch(dict(inputs) if isinstance(inputs, Mapping) else inputs)
    if "use_cache" in inspect.signature(model.forward).parameters:
        kwargs.setdefault("use_cache", False)
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    return model(*(placed(v, like) for v in args), **{k: placed(v, like) for k, v in kwargs.items()})


def logits_of(out: Any) -> Tensor | None:
    """A score per token of the vocabulary and position, [B, T, V], or None."""
    logits = out if isinstance(out, Tensor) else getattr(out, "logits", None)
    return logits if isinstance(logits, Tensor) and logits.dim() == 3 else None
