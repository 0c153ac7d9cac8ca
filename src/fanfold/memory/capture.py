"""`capture`: one run of a model, with copies of what its FFNs read and gave and of the residual around them.

B batch, T tokens, D d_model, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .anatomy import Anatomy
from .layers import Coefficients, coefficients
from .taps import Taps, copied, evaluating, logits_of, run

__all__ = ["Captured", "Coefficients", "capture", "coefficients"]


@dataclasses.dataclass
class Captured:
    """Float32 CPU copies from one run; the keys are `Layer.index`.

    x, y           what the FFN reads and gives [B, T, D] (y without a residual that its module adds).
    before, after  the residual at the entry and exit of the block around it [B, T, D], where the block has one.
    embedded       the residual before the first block;  final  the state that the final norm reads, both [B, T, D];
                   None where the layers do not lead straight to the model's head.
    logits         [B, T, V], or None.
    dtype          of y as the model computed it;  largest  the largest |element| of the tensor that y was rounded in.
    """

    x: dict[int, Tensor]
    y: dict[int, Tensor]
    before: dict[int, Tensor]
    after: dict[int, Tensor]
    embedded: Tensor | None
    final: Tensor | None
    logits: Tensor | None
    dtype: dict[int, torch.dtype]
    largest: dict[int, float]


def capture(model: nn.Module, anatomy: Anatomy, inputs: Any, layers: Iterable[int] | None = None) -> Captured:
    """Run `model` once, in eval mode and without gradients, and copy what flows through the FFNs.

    inputs  a dict of keyword arguments, token ids [T] or [B, T] (list, array or tensor), or a tuple of arguments.
    layers  which `Layer.index` to copy; default all.
    -> Captured. The model's own hooks fire; ours come after them and are removed even if the run fails. Kernels of
    `ff.swap` stay on. Raises ValueError for a layer that does not exist or that these inputs do not reach.
    """
    wanted = anatomy.choose(layers)
    ends = [layer for layer in (*anatomy.stream[:1], *anatomy.stream[-1:]) if layer not in wanted]
    taps = Taps(model, {layer.path: (layer.found, layer.block) for layer in (*wanted, *ends)}.values())
    with evaluating(model), taps.placed():
        logits = logits_of(run(model, inputs))
    out = Captured({}, {}, {}, {}, None, None, None if logits is None else copied(logits), {}, {})
    for layer in (*wanted, *ends):
        key, around = (layer.path, layer.call), (layer.block, layer.block_call)
        if key not in taps.y:
            raise ValueError(f"layer {layer.index} ({layer.path}) is not reached in a run on these inputs")
        before, after = taps.before.get(around), taps.after.get(around)
        if layer in anatomy.stream[:1]:
            out.embedded = before
        if layer in anatomy.stream[-1:]:
            out.final = after
        if layer not in wanted:
            continue
        i, like = layer.index, taps.y[key] if before is None else before
        # some code reads [B·T, D]: the same tokens in the same order
        out.x[i], out.y[i] = (
            t.reshape(like.shape) if t.numel() == like.numel() else t for t in (taps.x[key], taps.y[key])
        )
        out.dtype[i], out.largest[i] = taps.dtype[key], taps.largest[key]
        if before is not None and after is not None:
            out.before[i], out.after[i] = before, after
    return out
