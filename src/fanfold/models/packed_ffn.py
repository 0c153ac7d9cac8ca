"""What an FFN over packed linears remembers, and how each call is computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import cpu, dispatch, packed, packed_op
from ..kernels import torch as torch_ops
from ..layout import SEPARATE, Layout
from ..weights import Weights
from . import stubs
from .packed_module import real_weights, stub_used
from .packed_state import EXCHANGED, watch_bias
from .quick import Quick, preparable
from .states import GRADIENTS, FFNState


class PackedFFNState(FFNState):
    """An FFN whose linears are packed: one call of the kernels on their packed matrices."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._description = ""

    def describe(self) -> None:
        """Take down what torch.compile's operator must know; again after a change of `activations`."""
        self._description = packed_op.describe_ffn(self._made(self._biases()))

    def weights(self, module: nn.Module) -> Weights | str:
        if not all(linear._fanfold.holds(linear) for linear in self.linears.values()):
            return EXCHANGED
        key = tuple(linear._fanfold.bias_mark(linear) for linear in self.linears.values())
        if self._weights is None or key != self._key or self._copies_biases:
            try:
                weights = self._made(self._biases())
            except ValueError as error:
                return f"its weights have changed: {error}"
            self._key, self._weights = key, weights
        return self._weights

    def _matrices(self) -> dict[str, packed.PackedMatrix]:
        out = {"down": self.linears["down"]._fanfold.weight.parts[0]}
        if self.layout.order != SEPARATE:
            out["gate"], out["up"] = self.linears["gate_up"]._fanfold.weight.parts
            return out
        for role in ("gate", "up") if self.spec.gated else ("up",):
            out[role] = self.linears[role]._fanfold.weight.parts[0]
        return out

    def _made(self, biases: dict[str, Tensor | None]) -> Weights:
        return Weights(self.spec, **self._matrices(), **biases)

    def _biases(self) -> dict[str, Tensor | None]:
        """The linears' biases as the kernels read them, for the projections of the spec."""
        found = {role: linear._fanfold.bias(linear) for role, linear in self.linears.items()}
        out: dict[str, Tensor | None] = {}
        if self.spec.down_bias or not self.idle_bias:
            out["down_bias"] = found["down"]
        if self.layout.order != SEPARATE:
            fused = found["gate_up"]
            if fused is not None:
                gate, up = Layout(order=self.layout.order).split(fused)
                out["gate_bias"], out["up_bias"] = gate.contiguous(), up.contiguous()
            return out
        return out | {f"{role}_bias": found[role] for role in found if role != "down"}

    def own_code(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's code over its packed linears; once more on real weights if it computes with one itself."""
        y = super().own_code(module, args, kwargs)
        blind = torch.compiler.is_compiling() or torch_ops.transform_active() is not None
        if not blind and stub_used(y, (*args, *kwargs.values())):
            with real_weights(list(self.linears.values())):
                return super().own_code(module, args, kwargs)
        return y

    def compute(self, module: Any, x: Tensor) -> Tensor | str:
        weights = self.weights(module)
        if isinstance(weights, str):
            return weights
        named = dispatch.resolve(self.backend)
        if torch.is_grad_enabled():
            refused = self._gradient_refused()
            if refused is not None:
                raise RuntimeError(refused)
            if dispatch.needs_grad(x, weights):
                return GRADIENTS
        if named == "torch":
            return torch_ops.forward(x, weights)
        reason = packed.why_not(x, weights)
        if reason is not None:
            if named == "cpu":
                raise dispatch.BackendError(f"backend 'cpu' cannot run {self.path}: {reason}")
            return reason
        y = packed.forward(x, weights)
        self.calls += 1
        dispatch.record("cpu")
        self.prepare(module, x, weights)
        return y

    def _gradient_refused(self) -> str | None:
        reasons = [linear._fanfold.gradient_refused() for linear in self.linears.values()]
        return next((reason for reason in reasons if reason is not None), None)

    def traced(self, module: Any, x: Tensor) -> Tensor | str:
        """`compute` while torch.compile is tracing. Whether the stubs are in place is for `objection` to see."""
        refused = self._gradient_refused()
        if refused is not None:
            return torch.ops.fanfold.packed_refusal(x, self.spec.d_model, refused)
        if torch.is_grad_enabled() and (
            x.requires_grad or any(p._fanfold.requires_grad_now(p) for p in self.linears.values())
        ):
            return GRADIENTS
        if dispatch.resolve(self.backend) == "torch" or x.dtype not in cpu._DTYPES:
            return "backend torch"
        if not all(p._fanfold.stands(p) for p in self.linears.values()):
            return EXCHANGED
        biases = {role: p.bias.float() for role, p in self.linears.items() if p.bias is not None}
        if not self.spec.down_bias:
            biases.pop("down", None)
        if "gate_up" in biases:
            gate, up = Layout(order=self.layout.order).split(biases.pop("gate_up"))
            biases |= {"gate": gate.contiguous(), "up": up.contiguous()}
        data = {role: matrix.data for role, matrix in self._matrices().items()}
        return torch.ops.fanfold.packed_ffn(
            x,
            data.get("gate"),
            data["up"],
            data["down"],
            biases.get("gate"),
            biases.get("up"),
            biases.get("down"),
            self._description,
        )

    def prepare(self, module: nn.Module, x: Tensor, weights: Weights) -> None:
        """Bind the kernel for further calls like this one, which has passed every check."""
        if not preparable(x) or self.snapshot is None or self.snapshot.constants:
            return
        if self._copies_biases:
            return
        kernel = packed.prepare(x, weights)
        watched = self.snapshot.watched(self.dropout)
        questions: list[Any] = []
        places = [stubs.place(linear._fanfold.stub) for linear in self.linears.values()]
        for role, linear in self.linears.items():
            bias = weights.up_bias if role == "gate_up" else getattr(weights, f"{role}_bias")
            stub = linear._fanfold.stub
            questions += [*watch_bias(linear, bias), (stub.data_ptr, stub.data_ptr())]
            watched += [(linear._parameters, key, p) for key, p in linear._parameters.items()]
        if kernel is None:
            return
        below = [m for name, m, *_ in self.snapshot.nodes if name]
        self.quick = Quick(kernel, x, self.spec.d_model, watched, below, module, questions=questions, places=places)
