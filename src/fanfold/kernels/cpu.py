"""The `cpu` backend: the C++ kernels on torch CPU tensors, float32 and bfloat16, weights read in place.

T tokens, D d_model, F d_ff. No autograd: the result never requires grad (`dispatch` decides who may call).
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch  # before _cpu: the kernels then run on the OpenMP runtime that torch has loaded, in its thread pool
from torch import Tensor

from .. import activations
from ..spec import Spec
from ..weights import Weights

_cpu: Any
_missing: str | None = None
try:
    from . import _cpu  # type: ignore[attr-defined, no-redef]
except ImportError as error:
    _cpu = None
    _missing = f"the compiled kernels cannot be imported ({error}); reinstall with: pip install fanfold"

_ISA_IDS = {"scalar": 0, "avx2": 1, "avx512": 2}  # ids of the C++ core
_ISAS: tuple[str, ...] = tuple(_cpu.isas()) if _cpu else ()
_ACTS: dict[str, int] = {name: i for i, name in enumerate(_cpu.activation_names())} if _cpu else {}
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_PLAIN = (Tensor, torch.nn.Parameter)  # subclasses may mean anything by their memory
_specs: dict[int, tuple[Spec, tuple[Any, ...]]] = {}  # id(spec) -> (spec, kept alive; its arguments): no hashing


def available() -> str | None:
    """None if the kernels can run on this machine, else the reason."""
    if _missing is not None:
        return _missing
    try:
        isa()
    except ValueError as error:
        return str(error)
    return None


def isas() -> tuple[str, ...]:
    """Instruction sets that this CPU has, best last."""
    return _ISAS


def isa() -> str:
    """The instruction set in use: the best one, or what FANFOLD_ISA names.

    Raises ValueError if FANFOLD_ISA names one that this CPU (or build) does not have.
    """
    name = os.environ.get("FANFOLD_ISA")
    if not name:
        return _ISAS[-1]
    if name not in _ISAS:
        raise ValueError(f"FANFOLD_ISA={name!r} is not available; available here: {', '.join(_ISAS)}")
    return name


def why_not(x: Any, weights: Weights) -> str | None:
    """None if this backend can run, else the reason."""
    plan = _plan(x, weights)
    return plan if isinstance(plan, str) else None


def forward(x: Tensor, weights: Weights) -> Tensor:
    """y = down(act(gate x) * (up x)) by the C++ kernels.

    x  [..., D] float32 or bfloat16, any strides  ->  [..., D], x's dtype, contiguous. Weights float32 or bfloat16,
    in any combination with x; each matrix row-major or transposed (a Conv1D's weight.t()), read in place.
    Sums accumulate in float32 and the coefficients stay in float32; error <= 2 x torch eager in x's dtype.
    Bit-equal for the same input and instruction set, whatever the thread count. Not differentiable.
    Raises ValueError with the reason where `why_not` gives one.
    """
    plan = _plan(x, weights)
    if isinstance(plan, str):
        raise ValueError(f"the cpu backend cannot run this call: {plan}")
    isa_id, args = plan
    d = weights.spec.d_model
    rows, stride, tokens = _rows(x, d)
    y = torch.empty(x.shape, dtype=x.dtype)
    code = _DTYPES[x.dtype]
    _cpu.ffn(
        isa_id, torch.get_num_threads(), rows.data_ptr(), code, stride, y.data_ptr(), code, d, tokens, *args
    )  # fmt: skip
    return y


def linear_why_not(x: Any, weight: Any, bias: Any = None) -> str | None:
    """None if `linear` can run, else the reason."""
    plan = _linear_plan(x, weight, bias)
    return plan if isinstance(plan, str) else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = weight x + bias by the same kernels, under the same rules as `forward`.

    x  [..., n_in]; weight  [n_out, n_in], row-major or transposed; bias  [n_out]  ->  [..., n_out], x's dtype.
    Raises ValueError with the reason where `linear_why_not` gives one.
    """
    plan = _linear_plan(x, weight, bias)
    if isinstance(plan, str):
        raise ValueError(f"the cpu backend cannot run this call: {plan}")
    isa_id, transposed, w_stride = plan
    n_out, n_in = weight.shape
    rows, stride, tokens = _rows(x, n_in)
    y = torch.empty((*x.shape[:-1], n_out), dtype=x.dtype)
    code = _DTYPES[x.dtype]
    _cpu.linear(
        isa_id, torch.get_num_threads(), rows.data_ptr(), code, stride, y.data_ptr(), code, n_out, tokens, n_in, n_out,
        weight.data_ptr(), w_stride, _DTYPES[weight.dtype], transposed, _pointer(bias),
    )  # fmt: skip
    return y


def _rows(x: Tensor, width: int) -> tuple[Tensor, int, int]:
    """x as [T, width] rows with unit stride inside (a copy only if there is no such view), their stride, T."""
    if not x.is_contiguous():
        x = x.reshape(-1, width)
        if width > 1 and x.stride(1) != 1:
            x = x.contiguous()
        return x, x.stride(0), x.shape[0]
    return x, width, x.numel() // width


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _plain(name: str, value: Any) -> str | None:
    """Why `value` is not memory that the kernels can read, or None."""
    if type(value) not in _PLAIN:
        kind = type(value).__name__
        return f"{name} is a {kind}, not a plain torch tensor" if isinstance(value, Tensor) else (
            f"{name} is {kind}, not a torch tensor"
        )  # fmt: skip
    if not value.is_cpu:
        return f"{name} is on {value.device}, not on the CPU"
    if value.dtype not in _DTYPES:
        return f"{name} is {value.dtype}, expected torch.float32 or torch.bfloat16"
    if value.layout is not torch.strided:
        return f"{name} has layout {value.layout}, expected torch.strided"
    if value.is_neg():
        return f"{name} is a negative view (of a conjugate); resolve_neg() makes it plain"
    return None


def _input(x: Any, width: int) -> str | None:
    reason = _plain("x", x)
    if reason is None and (x.dim() < 1 or x.shape[-1] != width):
        return f"x has shape {tuple(x.shape)}, expected (…, {width})"
    return reason


def _orientations(matrix: Tensor) -> tuple[bool, bool]:
    """(readable as rows, readable as a transposed matrix). A side of length 1 fits whatever its stride."""
    n, k = matrix.shape
    s0, s1 = matrix.stride()
    return s1 == 1 or k == 1, s0 == 1 or n == 1


def _strides(name: str, matrix: Tensor) -> str:
    return (
        f"{name} has strides {tuple(matrix.stride())}, expected one of them to be 1 (row-major, or a transposed view); "
        f"{name}.contiguous() has it"
    )


def _plan(x: Any, weights: Weights) -> str | tuple[int, tuple[Any, ...]]:
    """The kernel's arguments for the weights, or the reason why it cannot run."""
    if _missing is not None:
        return _missing
    try:
        isa_id = _ISA_IDS[isa()]
    except ValueError as error:
        return str(error)
    spec, gate, up, down = weights.spec, weights.gate, weights.up, weights.down
    reason = _input(x, spec.d_model) or _plain("up", up)
    if reason is not None:
        return reason
    dtype = up.dtype
    for name in ("gate", "down", "gate_bias", "up_bias", "down_bias"):
        value = getattr(weights, name)
        if value is None:
            continue
        reason = _plain(name, value)
        if reason is not None:
            return reason
        if value.dtype != dtype:
            return f"{name} is {value.dtype}, up is {dtype}: expected one dtype for all weights"
        if value.dim() == 1 and value.stride(0) != 1 and value.shape[0] != 1:
            return f"{name} has stride {value.stride(0)}, expected a contiguous bias"
    up_row, up_col = _orientations(up)
    if not (up_row or up_col):
        return _strides("up", up)
    down_row, down_col = _orientations(down)
    if not (down_row or down_col):
        return _strides("down", down)
    gate_stride = 0
    if gate is not None:
        gate_row, gate_col = _orientations(gate)
        if not (gate_row or gate_col):
            return _strides("gate", gate)
        up_row, up_col = up_row and gate_row, up_col and gate_col
        if not (up_row or up_col):
            return "one of gate and up is row-major and the other transposed: expected the same for both"
        gate_stride = gate.stride(0 if up_row else 1)
    act, params, gate_limit, up_limit, up_offset = _spec_args(spec)
    return isa_id, (
        spec.d_model, spec.d_ff,
        _pointer(gate), gate_stride, _pointer(weights.gate_bias),
        up.data_ptr(), up.stride(0 if up_row else 1), _pointer(weights.up_bias),
        down.data_ptr(), down.stride(0 if down_row else 1), _pointer(weights.down_bias),
        _DTYPES[dtype], not up_row, not down_row, act, params, gate_limit, up_limit, up_offset,
    )  # fmt: skip


def _spec_args(spec: Spec) -> tuple[Any, ...]:
    found = _specs.get(id(spec))
    if found is not None and found[0] is spec:
        return found[1]
    values = tuple(spec.params[name] for name in activations.get(spec.activation).params)
    args = (
        _ACTS[spec.activation],
        values + (0.0,) * (4 - len(values)),
        math.inf if spec.gate_limit is None else spec.gate_limit,
        math.inf if spec.up_limit is None else spec.up_limit,
        spec.up_offset,
    )
    if len(_specs) >= 1024:
        _specs.clear()
    _specs[id(spec)] = (spec, args)
    return args


def _linear_plan(x: Any, weight: Any, bias: Any) -> str | tuple[int, bool, int]:
    if _missing is not None:
        return _missing
    try:
        isa_id = _ISA_IDS[isa()]
    except ValueError as error:
        return str(error)
    reason = _plain("weight", weight)
    if reason is None and weight.dim() != 2:
        return f"weight has shape {tuple(weight.shape)}, expected [n_out, n_in]"
    if reason is None and 0 in weight.shape:
        return f"weight has shape {tuple(weight.shape)}: nothing to compute"
    reason = reason or _input(x, weight.shape[1])
    if reason is None and bias is not None:
        reason = _plain("bias", bias)
        if reason is None and bias.dtype != weight.dtype:
            return f"bias is {bias.dtype}, weight is {weight.dtype}: expected one dtype"
        if reason is None and tuple(bias.shape) != (weight.shape[0],):
            return f"bias has shape {tuple(bias.shape)}, expected ({weight.shape[0]},)"
        if reason is None and bias.stride(0) != 1 and bias.shape[0] != 1:
            return f"bias has stride {bias.stride(0)}, expected a contiguous bias"
    if reason is not None:
        return reason
    row, col = _orientations(weight)
    if not (row or col):
        return _strides("weight", weight)
    return isa_id, not row, weight.stride(0 if row else 1)


def slower_than_torch(x: Tensor, weights: Weights) -> str | None:
    """Why `auto` should rather take PyTorch's ops for this call, or None."""
    return None
