"""Who is timed on a shape: our kernels in a format, PyTorch eager, PyTorch compiled; each with weights of its own.

T tokens, D d_model, F d_ff. Every contender holds several distinct layers, so that a decoding step can be made to read
its weights from memory, as in a whole model.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .. import formats, numerics, reference
from ..count import formats as stored
from ..kernels import packed
from ..kernels import torch as plain_torch
from ..spec import Spec
from ..weights import Weights, to_float64
from . import roofs

COLD_BYTES = 256 << 20  # of all layers together: beyond the caches
MOST_LAYERS = 16
COMPILED_LAYERS = 2  # each is compiled for itself
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_CHANNELS = 1024  # taken at a time where float64 is computed: bounds its memory; whole groups of every format

Array = np.ndarray[Any, Any]
Run = Callable[[int], torch.Tensor]  # layer -> y


def layer_count(layer_bytes: float, cold: bool, most: int = MOST_LAYERS) -> int:
    """Distinct layers that exceed COLD_BYTES together, at most `most`; 1 where weights may stay in the caches."""
    return max(1, min(math.ceil(COLD_BYTES / layer_bytes), most)) if cold else 1


def gaussian(spec: Spec, seed: int = 0) -> Weights:
    """float32 Gaussian matrices: variance 1 of the pre-activations for an x of variance 1. No biases."""
    rng = np.random.default_rng(seed)

    def make(rows: int, columns: int) -> Array:
        w = rng.standard_normal((rows, columns), np.float32)
        w /= np.float32(math.sqrt(columns))
        return w

    shapes = stored.matrices(spec)
    return Weights(spec, **{name: make(*shape) for name, shape in shapes.items()})


class Contender:
    """One way to compute the FFN, with `layers` distinct copies of the weights in memory.

    name        what it is called;  format  how it stores weights;  arithmetic  the roof that it is held against.
    dtype       of x and y;  layer_bytes  bytes of one layer's weights.
    """

    arithmetic: str
    ours = False

    def __init__(self, name: str, format: str, dtype: torch.dtype, layer_bytes: int) -> None:
        self.name, self.format, self.dtype, self.layer_bytes = name, format, dtype, layer_bytes
        self.arithmetic = roofs.arithmetic(format)
        self.layers: list[Weights] = []

    def ready(self, x: torch.Tensor) -> Run:
        """The call, bound to x [T, D] of its dtype. Raises ValueError with the reason where it cannot run."""
        raise NotImplementedError


class Ours(Contender):
    """Our kernels on packed matrices."""

    ours = True

    def __init__(self, base: Weights, format: str, cold: bool) -> None:
        first = pack(base, format)
        n_bytes = sum(m.nbytes for _, m in first.items())
        super().__init__(format, first.up.format, torch.bfloat16 if format == "bf16" else torch.float32, n_bytes)
        self.layers = _copies(first, layer_count(n_bytes, cold))

    def ready(self, x: torch.Tensor) -> Run:
        return bound(self.layers, x)


class Eager(Contender):
    """PyTorch's own operations: three linears (two without a gate) and the activation."""

    def __init__(self, base: Weights, format: str, cold: bool, most: int = MOST_LAYERS) -> None:
        dtype = DTYPES[format]
        n_bytes = base.spec.n_params * dtype.itemsize
        super().__init__(f"torch {format}", format, dtype, n_bytes)
        self.layers = _copies(as_torch(base, dtype), layer_count(n_bytes, cold, most))

    def ready(self, x: torch.Tensor) -> Run:
        return lambda layer: plain_torch.forward(x, self.layers[layer])


class Compiled(Eager):
    """torch.compile by inductor with frozen weights, a graph for each layer and number of tokens."""

    def __init__(self, base: Weights, format: str, cold: bool) -> None:
        super().__init__(base, format, cold, COMPILED_LAYERS)
        self.name = f"compiled {format}"

    def ready(self, x: torch.Tensor) -> Run:
        calls = [self._compile(weights) for weights in self.layers]
        for call in calls:
            call(x)
        return lambda layer: calls[layer](x)

    @staticmethod
    def _compile(weights: Weights) -> Callable[[torch.Tensor], torch.Tensor]:
        module = _Module(weights)

        def block(x: torch.Tensor) -> torch.Tensor:
            return module(x)

        # a code object of its own: the guards of other layers are then not asked
        code = block.__code__.replace(co_name=f"block_{id(module)}")
        own = types.FunctionType(code, block.__globals__, code.co_name, None, block.__closure__)
        return torch.compile(own, dynamic=False, options={"freezing": True})


class _Module(torch.nn.Module):
    """The block as a module with parameters, which is what inductor freezes."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.spec = weights.spec
        for name, value in weights.items():
            setattr(self, name, torch.nn.Parameter(value, requires_grad=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = torch.nn.functional.linear(x, self.up)
        gate = torch.nn.functional.linear(x, self.gate) if self.spec.gated else None
        return torch.nn.functional.linear(plain_torch.coefficients(self.spec, up, gate), self.down)


# ---- ours ----


def pack_matrix(matrix: Any, format: str) -> packed.PackedMatrix:
    """A float32 matrix [n_out, n_in] in the kernels' order; integer formats by plain rounding."""
    if stored.get(format).name in formats.INTEGER:
        return packed.PackedMatrix.pack(formats.quantize_matrix(matrix, format, scales="plain"))
    return packed.PackedMatrix.pack(matrix, format)


def pack(base: Weights, format: str) -> Weights:
    """One layer of float32 matrices, packed."""
    return base.replace(**{name: pack_matrix(value, format) for name, value in base.items()})


def bound(layers: list[Weights], x: torch.Tensor) -> Run:
    """The C++ calls of packed layers, bound to x [T, D] and to one y that is written over."""
    reason = packed.why_not(x, layers[0])
    if reason is not None:
        raise ValueError(f"our kernels cannot run this: {reason}")
    y = torch.empty_like(x)
    d = x.shape[-1]
    calls = [packed.bind(x.dtype, weights).run for weights in layers]
    arguments = (torch.get_num_threads(), x.data_ptr(), d, y.data_ptr(), d, x.numel() // d)

    def run(layer: int, _alive: Any = (x, layers)) -> torch.Tensor:
        calls[layer](*arguments)
        return y

    return run


def _copies(first: Weights, count: int) -> list[Weights]:
    """`count` layers in memory of their own. Values may be the same: caches go by address."""

    def again(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.clone()
        return packed.PackedMatrix(value.format, tuple(value.shape), value.data.clone(), value.activations)

    return [first, *(first.replace(**{n: again(v) for n, v in first.items()}) for _ in range(count - 1))]


def as_torch(base: Weights, dtype: torch.dtype) -> Weights:
    """Arrays or packed matrices as plain tensors of `dtype`."""
    made = {}
    for name, value in base.items():
        value = value.dequantize() if isinstance(value, packed.PackedMatrix) else torch.as_tensor(value)
        made[name] = value.to(dtype)
    return base.replace(**made)


# ---- the check ----


class Answers:
    """What some tokens must give, in float64 on a contender's weights as they are stored.

    ideal    y of exact arithmetic [rows, D].
    rounded  for integer formats: y of exact arithmetic on activations as the kernels round them; else None.
    """

    def __init__(self, contender: Ours, x: torch.Tensor, rows: Sequence[int]) -> None:
        """x [T, D] in the contender's dtype; rows  the tokens that are going to be compared."""
        self._place = {row: i for i, row in enumerate(rows)}
        few, form = x[list(rows)], contender.format
        weights = _unpacked(contender.layers[0])
        self.ideal = _in_parts(few, weights, reference.coefficients)
        self.rounded = None
        if form in formats.INTEGER:
            coefficients = functools.partial(_rounded_coefficients, format=form)
            self.rounded = _in_parts(_rounded(to_float64(few), form), weights, coefficients)

    def places(self, rows: Sequence[int]) -> list[int]:
        """Where the tokens `rows` lie in `ideal` and `rounded`."""
        return [self._place[row] for row in rows]


def check(contender: Ours, answers: Answers, x: torch.Tensor, rows: Sequence[int]) -> numerics.Comparison:
    """Hold y of some tokens to their answers.

    Float formats: the error may be at most twice that of PyTorch eager in x's dtype. Integer formats: at most twice the
    error that rounding the activations costs in exact arithmetic.
    x [T, D], rows  the tokens that are compared (all are computed).
    """
    places = answers.places(rows)
    with torch.inference_mode():
        y = contender.ready(x)(0)[list(rows)].clone()
        if answers.rounded is not None:
            return numerics.compare(y, answers.ideal[places], answers.rounded[places], "float32")
        theirs = plain_torch.forward(x, as_torch(contender.layers[0], x.dtype))[list(rows)]
    return numerics.compare(y, answers.ideal[places], theirs)


def _unpacked(weights: Weights) -> Weights:
    return weights.replace(
        **{n: w.dequantize() if isinstance(w, packed.PackedMatrix) else w for n, w in weights.items()}
    )


def _in_parts(x: Any, weights: Weights, coefficients: Callable[[Any, Weights], Array]) -> Array:
    """y in float64, a part of the channels at a time: y is the sum over channels of coefficient * value."""
    spec = weights.spec
    y = np.zeros((len(x), spec.d_model))
    for start in range(0, spec.d_ff, _CHANNELS):
        some = slice(start, start + _CHANNELS)
        down = weights.down[:, some]
        part = Spec.from_dict({**spec.to_dict(), "d_ff": down.shape[1]})
        inward = {name: w[some] for name, w in weights.items() if name != "down"}
        y += coefficients(x, Weights(part, down=down, **inward)) @ to_float64(down).T
    return y


def _rounded(x: Array, format: str) -> Array:
    """Activations as the kernels' integer codes hold them, in float64."""
    codes, scale = formats.quantize_activations(x.astype(np.float32), format)
    spread = np.arange(x.shape[1]) // formats.activation_group(format)
    return codes.astype(np.float64) * scale.astype(np.float64)[:, spread]


def _rounded_coefficients(x: Array, weights: Weights, format: str) -> Array:
    return _rounded(reference.coefficients(x, weights), format)
