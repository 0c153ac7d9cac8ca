"""`FeedForward`: the FFN as a PyTorch module, with Llama's parameter names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .kernels import dispatch, op
from .kernels import torch as torch_ops
from .models.linears import pristine
from .spec import Spec
from .weights import Weights

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class FeedForward(nn.Module):
    """A feed-forward network.

    y = down_proj(act(gate_proj(x)) * up_proj(x)), or down_proj(act(up_proj(x))) without a gate.

    spec     what it computes; `dropout` acts on the coefficients, in training.
    backend  "auto" or a name, as in `fanfold.ffn`.
    save     what forward keeps for backward: "all" (what autograd keeps of PyTorch's ops). With the cpu backend
             named, forward keeps x alone and backward recomputes.
    x  [..., d_model]  ->  [..., d_model], x's dtype (autocast's under autocast).

    Parameters are `gate_proj.weight`, `up_proj.weight` [d_ff, d_model] and `down_proj.weight` [d_model, d_ff] (and
    `.bias`), so a Llama MLP's state_dict loads with strict=True. A projection that carries an adapter, a hook or a
    parametrization is called as a module, so that it takes effect.
    Raises ValueError on an unknown `save`, BackendError when a named backend cannot run a call.
    """

    def __init__(
        self,
        spec: Spec,
        backend: str = "auto",
        save: str = "all",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(spec, Spec):
            kind = type(spec).__name__
            raise ValueError(f"spec is a {kind}, expected a Spec: Spec.parse('swiglu', d_model=…, d_ff=…)")
        dispatch.resolve(backend)
        if save != "all":
            raise ValueError(f"save={save!r} is not known; known: all")
        self.spec, self.backend, self.save = spec, backend, save
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        if spec.gated:
            self.gate_proj = nn.Linear(spec.d_model, spec.d_ff, bias=spec.gate_bias, **options)
        self.up_proj = nn.Linear(spec.d_model, spec.d_ff, bias=spec.up_bias, **options)
        self.down_proj = nn.Linear(spec.d_ff, spec.d_model, bias=spec.down_bias, **options)

    @classmethod
    def from_weights(cls, weights: Weights, format: str | None = None, backend: str = "auto") -> FeedForward:
        """A module that holds `weights` (torch tensors without a copy where the dtype stays; NumPy arrays copied).

        format  None keeps the dtype given; "fp32", "bf16", "fp16" convert.  Raises ValueError on another name.
        """
        if format is not None and format not in FORMATS:
            raise ValueError(f"format={format!r} is not known; known: None, {', '.join(FORMATS)}")
        module = cls(weights.spec, backend=backend, device="meta")
        state = {}
        for name, value in weights.items():
            tensor = value if isinstance(value, Tensor) else torch.tensor(value)
            tensor = tensor.detach().to(FORMATS[format]) if format else tensor.detach()
            projection, _, kind = name.partition("_")
            state[f"{projection}_proj.{kind or 'weight'}"] = tensor
        module.load_state_dict(state, strict=True, assign=True)
        return module

    def weights(self) -> Weights:
        """The parameters as Weights: the same memory, not a copy."""
        gate = self.gate_proj if self.spec.gated else None
        return Weights.unchecked(
            self.spec,
            up=self.up_proj.weight,
            down=self.down_proj.weight,
            gate=None if gate is None else gate.weight,
            up_bias=self.up_proj.bias,
            gate_bias=None if gate is None else gate.bias,
            down_bias=self.down_proj.bias,
        )

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.spec.d_model:
            raise ValueError(f"x has shape {tuple(x.shape)}, expected (…, {self.spec.d_model})")
        if not all(type(module) is nn.Linear and pristine(module) for module in self.children()):
            return self._composed(x)
        backend = dispatch.resolve(self.backend)
        dropping = self.training and self.spec.dropout > 0
        if backend == "torch" or dropping:
            if dropping and backend == "cpu":
                raise dispatch.BackendError("backend 'cpu' cannot run this call: dropout is active (training mode)")
            return torch_ops.forward(x, self.weights(), training=self.training)
        weights = self.weights()
        if torch_ops.autocast_on(x):
            if backend == "auto":
                return torch_ops.forward(x, weights)
            dtype = torch.get_autocast_dtype(x.device.type)
            weights = Weights.unchecked(weights.spec, **{n: v.to(dtype) for n, v in weights.items()})
            return op.ffn(x.to(dtype), weights, backend)
        if torch.compiler.is_compiling() and backend == "auto" and dispatch.needs_grad(x, weights):
            return torch_ops.forward(x, weights)  # in the open, so that the compiler can fuse its backward
        return op.ffn(x, weights, backend)

    def _composed(self, x: Tensor) -> Tensor:
        """The same function through the projections' own calls: hooks fire, adapters count."""
        up = self.up_proj(x)
        gate = self.gate_proj(x) if self.spec.gated else None
        m = torch_ops.coefficients(self.spec, up, gate)
        return self.down_proj(nn.functional.dropout(m, self.spec.dropout, self.training))

    def extra_repr(self) -> str:
        return f"{self.spec.describe()}, backend={self.backend!r}"
