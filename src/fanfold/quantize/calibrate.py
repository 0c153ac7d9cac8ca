"""What each FFN of a model reads on calibration text, one after another, with the FFNs before it already quantized.

One pass of the model over all calibration tokens: when it reaches an FFN, that FFN is quantized on what it is about to
read, gets the quantized weights, and the pass goes on with them. T tokens, D d_model, F d_ff.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints import Checkpoint
from ..layout import Layout
from ..models.find import Found, find
from ..models.linears import matrix
from ..spec import Spec
from ..weights import Weights
from .ffn import to_float32

Visit = Callable[[int, Tensor], Weights]  # (position of the layer, inputs [T, D]) -> the weights to go on with


class CalibrationError(ValueError):
    """The model and the file do not fit together, or the model cannot be run; the message says why."""


class _DoneError(Exception):
    """Every FFN has been visited: the rest of the pass is not needed."""


def walk(
    model: nn.Module,
    inputs: dict[str, Any],
    checkpoint: Checkpoint,
    visit: Visit,
    sites: Sequence[Found] | None = None,
) -> None:
    """Run `model` once on `inputs`, and call `visit` for each layer of the checkpoint as the pass reaches it.

    The model's FFN weights are overwritten with those that `visit` returns. Each FFN of the model is first held
    against the checkpoint: the same description by experiment (`sites`, if `match` was called before), the same
    weights. Raises CalibrationError.
    """
    sites = match(model, checkpoint) if sites is None else sites
    layers = list(checkpoint.ffns)
    visited: set[int] = set()

    def hook(position: int) -> Any:
        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            if position in visited or not args:
                return
            visited.add(position)
            site = sites[position]
            _check_weights(model, site, checkpoint.ffns[layers[position]], layers[position])
            x = args[0].detach().reshape(-1, args[0].shape[-1])
            put(model, site, visit(position, x.float().clone()))
            if len(visited) == len(sites):
                raise _DoneError

        return before

    handles = [
        model.get_submodule(path).register_forward_pre_hook(hook(position))
        for position, site in enumerate(sites)
        for role, path in site.projections.items()
        if role != "down"
    ]
    try:
        with torch.no_grad():
            model(**inputs)
    except _DoneError:
        pass
    finally:
        for handle in handles:
            handle.remove()
    left = [sites[i].path for i in range(len(sites)) if i not in visited]
    if left:
        raise CalibrationError(f"the calibration text does not reach {len(left)} FFNs, the first is {left[0]}")


def match(model: nn.Module, checkpoint: Checkpoint) -> Sequence[Found]:
    """The model's FFNs in the order of the checkpoint's layers. Raises CalibrationError if they do not correspond."""
    found = find(model)
    unknown = [f for f in found if f.status != "identified"]
    if unknown:
        raise CalibrationError(
            f"{len(unknown)} of {len(found)} FFNs of the model were not identified; {unknown[0].path}: "
            f"{unknown[0].reason}"
        )
    layers = list(checkpoint.ffns)
    if len(found) != len(layers):
        raise CalibrationError(f"the model has {len(found)} FFNs, the file {len(layers)}")
    for site, layer in zip(found, layers, strict=True):
        ours, theirs = _plain(checkpoint.spec(layer)), _plain(site.spec)
        if ours != theirs:
            computes = site.spec.describe() if site.spec else "?"
            raise CalibrationError(
                f"layer {layer}: by the file {checkpoint.spec(layer).describe()}, but {site.path} of the model "
                f"computes {computes}: pass the right activation to fanfold.load"
            )
    return found


def _plain(spec: Spec | None) -> Any:
    return None if spec is None else {**spec.to_dict(), "dropout": 0.0}


def _arrays(model: nn.Module, site: Found) -> dict[str, Tensor]:
    """The model's own FFN by the names of `Weights`, matrices as [n_out, n_in]: views of its parameters."""
    assert site.layout is not None
    order = Layout(order=site.layout.order)
    out: dict[str, Tensor] = {}
    for role, path in site.projections.items():
        linear: Any = model.get_submodule(path)
        for end, array in (("", matrix(linear)), ("_bias", linear.bias)):
            if array is None:
                continue
            if role == "gate_up":
                out[f"gate{end}"], out[f"up{end}"] = order.split(array.detach())
            else:
                out[f"{role}{end}"] = array.detach()
    return out


def _check_weights(model: nn.Module, site: Found, weights: Weights, layer: Any) -> None:
    for name, tensor in _arrays(model, site).items():
        if not torch.equal(to_float32(getattr(weights, name)), tensor.float()):
            raise CalibrationError(f"layer {layer}: {name} of {site.path} in the model is not the one in the file")


def put(model: nn.Module, site: Found, weights: Weights) -> None:
    """Overwrite the model's FFN at `site` with `weights`, dequantized."""
    for name, tensor in _arrays(model, site).items():
        tensor.copy_(to_float32(getattr(weights, name)))
