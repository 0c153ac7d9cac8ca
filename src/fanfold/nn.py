"""`FeedForward`: the FFN as a PyTorch module, with Llama's parameter names."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn

from . import formats
from .count import ffn as counted
from .count import formats as stored
from .kernels import dispatch, op, op_text, packed, packed_op, train
from .kernels import torch as torch_ops
from .kernels.packed import PackedMatrix
from .models.linears import pristine
from .spec import Spec
from .weights import PROJECTIONS, Weights

_BIASES = ("gate_bias", "up_bias", "down_bias")
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class FeedForward(nn.Module):
    """A feed-forward network.

    y = down_proj(act(gate_proj(x)) * up_proj(x)), or down_proj(act(up_proj(x))) without a gate.

    spec     what it computes; `dropout` acts on the coefficients, in training.
    backend  "auto" or a name, as in `fanfold.ffn`.
    save     what forward keeps for backward in training, least first: "tiles" (x; backward computes an eighth of the
             channels of 2048 tokens at a time, forward 384 tokens: no [tokens, d_ff] tensor exists), "input" (x; twice
             as much at a time), "preact" (x, gate, up), "all" (the coefficients too, so that nothing is multiplied
             again). `fanfold.cost(spec, tokens=…).saved_bytes` tells
             the bytes. Gradients are the same to rounding, with dropout too. The cpu backend, if named, keeps x alone;
             torch.compile keeps what it finds best under "all" and "preact", and x alone under the others.
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
        if save not in counted.SAVES:
            raise ValueError(f"save={save!r} is not known; known: {', '.join(counted.SAVES)}")
        self.spec, self.backend, self.save = spec, backend, save
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        if spec.gated:
            self.gate_proj = nn.Linear(spec.d_model, spec.d_ff, bias=spec.gate_bias, **options)
        self.up_proj = nn.Linear(spec.d_model, spec.d_ff, bias=spec.up_bias, **options)
        self.down_proj = nn.Linear(spec.d_ff, spec.d_model, bias=spec.down_bias, **options)

    @classmethod
    def from_weights(
        cls, weights: Weights, format: str | None = None, backend: str = "auto", save: str = "all"
    ) -> FeedForward | PackedFeedForward:
        """A module that holds `weights` (torch tensors without a copy where the dtype stays; NumPy arrays copied).

        weights  arrays, or packed matrices (`kernels.packed`): those give a `PackedFeedForward`.
        format   None keeps what is given; "fp32", "bf16", "fp16" convert; a format of integer codes ("int8", "int4",
                 "q4_0", …) rounds to nearest and gives a `PackedFeedForward`: `fanfold.quantize` has better ways.
        Raises ValueError on another name, or packed weights of another format.
        """
        if format is not None and format not in FORMATS and format not in (*formats.INTEGER, *stored.ALIASES):
            raise ValueError(f"format={format!r} is not known; known: None, {', '.join([*packed.FORMATS, 'int4'])}")
        if packed.is_packed(weights) or (format is not None and format not in FORMATS):
            return PackedFeedForward(_packed(weights, format), backend)
        module = cls(weights.spec, backend=backend, save=save, device="meta")
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
        if dropping and backend == "cpu":
            raise dispatch.BackendError("backend 'cpu' cannot run this call: dropout is active (training mode)")
        weights = self.weights()
        if backend != "cpu" and (dropping or dispatch.needs_grad(x, weights)):
            if not torch.compiler.is_compiling():
                return train.ffn(x, weights, self.save, self.training)
            if dropping or self.save in ("all", "preact"):
                return torch_ops.forward(x, weights, self.training)  # in the open, for the compiler to fuse and choose
            return self._operator(x, weights, backend)
        if backend == "torch" or (backend == "auto" and torch_ops.autocast_on(x)):
            return torch_ops.forward(x, weights)
        return self._operator(x, weights, backend)

    def _operator(self, x: Tensor, weights: Weights, backend: str) -> Tensor:
        """`fanfold.ffn`, in autocast's dtype where that is on."""
        if torch_ops.autocast_on(x):
            dtype = torch.get_autocast_dtype(x.device.type)
            weights = Weights.unchecked(weights.spec, **{n: v.to(dtype) for n, v in weights.items()})
            x = x.to(dtype)
        return op.ffn(x, weights, backend)

    def _composed(self, x: Tensor) -> Tensor:
        """The same function through the projections' own calls: hooks fire, adapters count."""
        up = self.up_proj(x)
        gate = self.gate_proj(x) if self.spec.gated else None
        m = torch_ops.coefficients(self.spec, up, gate)
        return self.down_proj(nn.functional.dropout(m, self.spec.dropout, self.training))

    def extra_repr(self) -> str:
        return f"{self.spec.describe()}, backend={self.backend!r}, save={self.save!r}"


class PackedFeedForward(nn.Module):
    """A feed-forward network on packed matrices, for inference.

    weights  of `kernels.packed.PackedMatrix`, biases float32 (others are converted).
    x  [..., d_model] float32 or bfloat16  ->  [..., d_model], x's dtype.

    Buffers are `up_packed`, `down_packed`, `gate_packed` (the packed bytes) and the biases; state_dict holds them, and
    load_state_dict takes those of a module of the same formats alone. Casts leave them as they are; .to() another
    device raises. A gradient of x runs PyTorch's ops on the dequantized weights.
    Raises ValueError if the weights are not packed, BackendError when a named backend cannot run a call.
    """

    def __init__(self, weights: Weights, backend: str = "auto") -> None:
        super().__init__()
        if not packed.is_packed(weights):
            raise ValueError(f"weights are {weights.up.dtype} arrays, expected packed matrices: see from_weights")
        dispatch.resolve(backend)
        self.spec, self.backend = weights.spec, backend
        self.kinds: dict[str, tuple[str, tuple[int, ...], str]] = {}
        for name, value in weights.items():
            if isinstance(value, PackedMatrix):
                self.kinds[name] = (value.format, tuple(value.shape), value.activations)
                self.register_buffer(f"{name}_packed", value.data)
            else:
                bias = value if isinstance(value, Tensor) else torch.tensor(value)
                self.register_buffer(name, bias.detach().to("cpu", torch.float32).contiguous())
        self._weights: Weights | None = None
        self._description = packed_op.describe_ffn(self.weights())

    def weights(self) -> Weights:
        """The packed matrices and biases: the same memory, not a copy."""
        if self._weights is None:
            values: dict[str, Any] = {name: self._matrix(name) for name in self.kinds}
            values |= {name: getattr(self, name) for name in _BIASES if self._has(name)}
            self._weights = Weights(self.spec, **values)
        return self._weights

    def _has(self, name: str) -> bool:
        return self._buffers.get(name) is not None

    def _matrix(self, name: str) -> PackedMatrix:
        format, shape, activations = self.kinds[name]
        made = PackedMatrix(format, (shape[0], shape[1]), getattr(self, f"{name}_packed"), activations)
        setattr(self, f"{name}_packed", made.data)  # a copy where the bytes did not begin on a line of the cache
        return made

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.spec.d_model:
            raise ValueError(f"x has shape {tuple(x.shape)}, expected (…, {self.spec.d_model})")
        if torch.compiler.is_compiling():
            return self._traced(x)
        return op.ffn(x, self.weights(), "torch" if torch_ops.autocast_on(x) else self.backend)

    def _traced(self, x: Tensor) -> Tensor:
        b = self._buffers
        opaque = not (torch.is_grad_enabled() and x.requires_grad) and not torch_ops.forward_mode()
        if opaque and dispatch.resolve(self.backend) != "torch":
            data = (b.get("gate_packed"), b["up_packed"], b["down_packed"])
            biases = (b.get("gate_bias"), b.get("up_bias"), b.get("down_bias"))
            return torch.ops.fanfold.packed_ffn(x, *data, *biases, self._description)
        wide: dict[str, Any] = {}
        for name in self.kinds:
            text = packed_op.describe_kind(self.kinds[name])
            wide[name] = torch.ops.fanfold.packed_weight(b[f"{name}_packed"], text, x.dtype)
        wide |= {name: getattr(self, name).to(x.dtype) for name in _BIASES if self._has(name)}
        return torch_ops.forward(x, Weights.unchecked(self.spec, **wide))

    def _apply(self, fn: Any, recurse: bool = True) -> PackedFeedForward:
        if not fn(torch.zeros((), dtype=torch.float32)).is_cpu:
            raise RuntimeError("a PackedFeedForward runs on the CPU: its bytes are packed for it")
        kept = {name: self._buffers[name] for name in _BIASES if self._has(name)}
        super()._apply(fn, recurse)
        self._buffers.update(kept)  # the kernels read float32 biases, whatever the model is cast to
        self._weights = None
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._weights = None  # assign=True gives other buffers

    def get_extra_state(self) -> Tensor:
        """What the bytes are, as JSON in a tensor (which every file format takes): load_state_dict holds it against
        its own."""
        text = json.dumps({"layout": packed.LAYOUT_VERSION, "weights": op_text.read(self._description)})
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        theirs, own = (bytes(t.tolist()).decode() for t in (state, self.get_extra_state()))
        if json.loads(theirs) != json.loads(own):
            raise ValueError(f"the state_dict is of {theirs}, this module of {own}: expected the same")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_weights": None}

    def extra_repr(self) -> str:
        kinds = ", ".join(f"{name} {format}" for name, (format, *_) in self.kinds.items())
        return f"{self.spec.describe()}, {kinds}, backend={self.backend!r}"


def _packed(weights: Weights, format: str | None) -> Weights:
    """`weights` with packed matrices and float32 biases. Raises ValueError if they are packed in another format."""
    name = format and stored.ALIASES.get(format, format)
    out: dict[str, Any] = {}
    for part, value in weights.items():
        if part not in PROJECTIONS:
            out[part] = value
        elif isinstance(value, PackedMatrix):
            if name not in (None, value.format):
                raise ValueError(f"format={format!r}, but {part} is packed in {value.format}: expected None or that")
            out[part] = value
        else:
            plain = value.detach().cpu().float().numpy() if isinstance(value, Tensor) else value
            out[part] = PackedMatrix.pack(formats.quantize_matrix(plain, name or ""))
    return Weights(weights.spec, **out)
