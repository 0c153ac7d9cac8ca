"""The gain of the norm in front of each FFN: what multiplies the residual before a key reads it.

norm(h) = gain ∘ (h - mean(h)) · s(h), so a key k reads the residual in the direction gain ∘ k (less its mean, for
LayerNorm). Only that direction can be compared with a value, which is written to the residual itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..memory.anatomy import Anatomy
from ..memory.taps import run
from ..models.inputs import default_inputs
from ..models.linears import quiet
from ..models.norms import recognise


def seen_by_residual(anatomy: Anatomy, inputs: Any = None) -> list[tuple[Tensor, bool, str] | None]:
    """For each layer (gain [d_model] float32, whether the mean is taken off, path of the norm), or None.

    None where the FFN reads the state that its output is added to (a norm after the FFN, as in BERT), or where what it
    reads is not the output of a norm that is recognised by experiment: its keys are then taken as they are.
    """
    model = anatomy.model
    given = inputs if inputs is not None else default_inputs(model)
    if given is None:
        return [None] * len(anatomy.layers)
    made: dict[int, tuple[str, Tensor]] = {}  # the tensors are held, so that an id stays theirs
    read: dict[str, tuple[str, Tensor]] = {}
    width = anatomy.d_model

    def after(path: str) -> Any:
        def hook(_module: nn.Module, _args: Any, out: Any) -> None:
            if isinstance(out, Tensor) and out.shape[-1] == width:
                made[id(out)] = (path, out)

        return hook

    def before(path: str) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else next(iter(kwargs.values()))
            if id(x) in made and path not in read:
                read[path] = made[id(x)]

        return hook

    with torch.no_grad(), quiet(model):
        handles: list[Any] = []
        try:
            for path, module in model.named_modules():
                weight = getattr(module, "weight", None)
                if isinstance(weight, Tensor) and weight.dim() == 1:
                    handles.append(module.register_forward_hook(after(path)))
            for layer in anatomy.layers:
                place = model.get_submodule(_first(layer.found))
                handles.append(place.register_forward_pre_hook(before(layer.path), with_kwargs=True))
            run(model, given)
        finally:
            for handle in handles:
                handle.remove()
        out: list[tuple[Tensor, bool, str] | None] = []
        for layer in anatomy.layers:
            seen = read.get(layer.path)
            norm = None
            if seen is not None and layer.write != "not additive":
                norm = recognise(model.get_submodule(seen[0]), width, seen[1].float().cpu())
            out.append(None if norm is None or seen is None else (norm.gain.float(), norm.kind == "layer", seen[0]))
    return out


def _first(found: Any) -> str:
    """Path of the module whose first argument is what the FFN reads."""
    return found.path if found.kind == "module" else next(p for r, p in found.projections.items() if r != "down")
