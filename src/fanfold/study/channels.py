"""What the channels of a trained model do on validation text: dead ones, zeros, gates. T tokens, D d_model, F d_ff."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import torch as torch_ops
from ..nn import FeedForward

SILENT = 0.01  # of the layer's median channel


class _Layer:
    """Running sums over tokens, in float64."""

    def __init__(self, ffn: FeedForward) -> None:
        self.ffn, f = ffn, ffn.spec.d_ff
        self.tokens = 0
        self.largest, self.zeros, self.size = (torch.zeros(f, dtype=torch.float64) for _ in range(3))
        self.on = torch.zeros(f, dtype=torch.float64)
        self.participation = 0.0

    def add(self, x_TD: Tensor) -> None:
        ffn, spec = self.ffn, self.ffn.spec
        up = ffn.up_proj(x_TD)
        gate = ffn.gate_proj(x_TD) if spec.gated else None
        m_TF = torch_ops.coefficients(spec, up, gate).double()
        size_TF = m_TF.abs() * ffn.down_proj.weight.detach().double().norm(dim=0)
        self.tokens += len(x_TD)
        self.largest = torch.maximum(self.largest, size_TF.amax(0))
        self.zeros += (m_TF == 0).sum(0)
        self.size += m_TF.abs().sum(0)
        self.on += ((up if gate is None else gate) > 0).sum(0)
        squares = size_TF.square()
        share = squares.sum(1).square() / squares.square().sum(1).clamp_min(1e-300)
        self.participation += float(share.sum())

    def summary(self) -> dict[str, Any]:
        n = max(self.tokens, 1)
        median = float(self.largest.median())
        return {
            "channels": len(self.zeros),
            "dead": int((self.zeros == self.tokens).sum()),
            "silent": int((self.largest < SILENT * median).sum()),
            "zero_share": float(self.zeros.mean() / n),
            "positive_share": float(self.on.mean() / n),
            "mean_coefficient_size": float(self.size.mean() / n),
            "participation": self.participation / n / len(self.zeros),
        }


@torch.no_grad()
def measure(model: nn.Module, ids: Tensor, batch: int) -> list[dict[str, Any]]:
    """For each FFN of the model, over the tokens `ids` [n, S]:

    dead      channels whose coefficient is exactly zero for every token;  silent  those whose largest contribution
              |m|·‖v‖ is below a hundredth of the median channel's.
    zero_share, positive_share   of coefficients that are exactly zero; of pre-activations (the gate's, if there is
              one) above zero.
    mean_coefficient_size   mean |m|;  participation  (Σ s)² / Σ s² of the squared contributions s, over channels: 1 if
              all take an equal part.
    """
    layers = [_Layer(m) for m in model.modules() if isinstance(m, FeedForward)]

    def hook(layer: _Layer) -> Any:
        return lambda _module, inputs: layer.add(inputs[0].reshape(-1, inputs[0].shape[-1]))

    handles = [layer.ffn.register_forward_pre_hook(hook(layer)) for layer in layers]
    training = model.training
    model.eval()
    try:
        for some in ids.split(batch):
            model(some)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return [layer.summary() for layer in layers]
