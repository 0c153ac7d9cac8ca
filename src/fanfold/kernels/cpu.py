"""The `cpu` backend: the C++ kernels on torch CPU tensors, float32 and bfloat16, weights read in place.

T tokens, D d_model, F d_ff. No autograd: the result never requires grad (`dispatch` decides who may call).
"""

from __future__ import annotations

import functools
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

_ISA_IDS: dict[str, int] = _cpu.isas() if _cpu else {}  # numbers of the C++ core; higher is better
_ISAS: tuple[str, ...] = tuple(sorted(_ISA_IDS, key=_ISA_IDS.__getitem__))
_ACTS: dict[str, int] = {name: i for i, name in enumerate(_cpu.activation_names())} if _cpu else {}
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
MOST_BESIDE: int = _cpu.MOST_BESIDE if _cpu else 0  # products that one call computes beside its own
_PLAIN = (Tensor, torch.nn.Parameter)  # subclasses may mean anything by their memory
# torch's question whether the CPU has a unit for bfloat16 products -> (where that is our instruction set too, or None:
# always; tokens up to which we keep up with it)
_BFLOAT16_UNITS = {"_is_amx_tile_supported": (None, 6), "_is_avx512_bf16_supported": ("avx512bf16", 16)}
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
    y = attempt(x, weights)
    if isinstance(y, str):
        raise ValueError(f"the cpu backend cannot run this call: {y}")
    return y


def attempt(x: Tensor, weights: Weights) -> Tensor | str:
    """`forward`, or the reason of `why_not` instead of an exception: the quick way to try."""
    plan = _plan(x, weights)
    if isinstance(plan, str):
        return plan
    isa_id, args = plan
    d = args[0]
    rows, stride, tokens = _rows(x, d)
    y = (
        torch.empty_like(x) if rows is x else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    )  # the former is quicker
    code = _DTYPES[x.dtype]
    bound = _cpu.bind_ffn(isa_id, code, code, *args)
    bound.run(torch.get_num_threads(), rows.data_ptr(), stride, y.data_ptr(), d, tokens)
    return y


def search_scales(
    w: Any, group: int, weight: Any, codes_are: tuple[int, int, int, bool, float], steps: Any, again: int,
    codes: Any, scale: Any, minimum: Any,
) -> None:  # fmt: skip
    """`formats.quantize_matrix` by the C++ core, into codes [N, K], scale and minimum (or None) [N, G].

    w [N, K] float32, weight [K] and the results: contiguous NumPy arrays.  codes_are  (lowest, highest, what is added,
    whether scales have signs, the first scale's divisor). A first scale or minimum that cannot be stored is infinite.
    The same bits from every instruction set.
    """
    low, high, added, signed, plain = codes_are
    _cpu.fit(
        _ISA_IDS[isa()], torch.get_num_threads(), w.ctypes.data, w.shape[1], *w.shape, group, weight.ctypes.data,
        low, high, added, signed, scale.dtype.itemsize == 2, plain, steps.tolist(), again,
        codes.ctypes.data, scale.ctypes.data, 0 if minimum is None else minimum.ctypes.data,
    )  # fmt: skip


def prepare(x: Tensor, weights: Weights) -> Any | None:
    """`forward` with these weights' memory bound, for `run_plan` with a contiguous x of the same dtype; None if it
    cannot run.

    The caller keeps the weights alive and where they are. FANFOLD_ISA is read now.
    """
    plan = _plan(x, weights)
    if isinstance(plan, str):
        return None
    isa_id, args = plan
    code = _DTYPES[x.dtype]
    return _cpu.bind_ffn(isa_id, code, code, *args)


def prepare_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any | None:
    """`linear` bound in the same way."""
    plan = _linear_plan(x, weight, bias)
    return None if isinstance(plan, str) else _bind_linear(plan, _DTYPES[x.dtype], weight, bias)


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
    n_out, n_in = weight.shape
    rows, stride, tokens = _rows(x, n_in)
    y = torch.empty((*x.shape[:-1], n_out), dtype=x.dtype, device=x.device)
    bound = _bind_linear(plan, _DTYPES[x.dtype], weight, bias)
    bound.run(torch.get_num_threads(), rows.data_ptr(), stride, y.data_ptr(), n_out, tokens)
    return y


def norm_why_not(x: Any, weight: Any) -> str | None:
    """None if `rms_norm` can run, else the reason."""
    plan = _norm_plan(x, weight)
    return plan if isinstance(plan, str) else None


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * (weight + offset).  x  [..., D], weight  [D], of one dtype  ->  [..., D].

    Computed in float32, rounded once. Raises ValueError with the reason where `norm_why_not` gives one.
    """
    bound = prepare_norm(x, weight, eps, offset)
    if isinstance(bound, str):
        raise ValueError(f"the cpu backend cannot run this call: {bound}")
    d = weight.shape[0]
    rows, stride, tokens = _rows(x, d)
    y = torch.empty(x.shape, dtype=x.dtype)
    bound.run(torch.get_num_threads(), rows.data_ptr(), stride, y.data_ptr(), d, tokens)
    return y


def prepare_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Any | str:
    """`rms_norm` bound as by `prepare`, or the reason of `norm_why_not`."""
    plan = _norm_plan(x, weight)
    if isinstance(plan, str):
        return plan
    return _cpu.bind_norm(plan, _DTYPES[x.dtype], weight.shape[0], weight.data_ptr(), offset, eps)


def _norm_plan(x: Any, weight: Any) -> str | int:
    if _missing is not None:
        return _missing
    try:
        isa_id = _ISA_IDS[isa()]
    except ValueError as error:
        return str(error)
    reason = _plain("weight", weight)
    if reason is None and (weight.dim() != 1 or weight.shape[0] < 1):
        return f"weight has shape {tuple(weight.shape)}, expected [width]"
    if reason is None and weight.stride(0) != 1 and weight.shape[0] != 1:
        return f"weight has stride {weight.stride(0)}, expected a contiguous one"
    reason = reason or _input(x, weight.shape[0])
    if reason is None and x.dtype != weight.dtype:
        return f"x is {x.dtype}, weight is {weight.dtype}: expected one dtype"
    return isa_id if reason is None else reason


def _bind_linear(plan: tuple[int, bool, int], code: int, weight: Tensor, bias: Tensor | None) -> Any:
    isa_id, transposed, w_stride = plan
    n_out, n_in = weight.shape
    w_code = _DTYPES[weight.dtype]
    return _cpu.bind_linear(
        isa_id, code, code, n_in, n_out, weight.data_ptr(), w_stride, w_code, transposed, _pointer(bias)
    )  # fmt: skip


def run_plan(plan: tuple[Any, ...], x: Any) -> Tensor | bool | None:
    """y by the plan of a `models.quick.Quick`; None if x or what surrounds the call is not what was prepared for; False
    if what the plan relies on is gone; True if all is well, but PyTorch's ops are the better choice."""
    return _cpu.attempt(plan, x)


def repeat(ready: dict[Any, Any], x: Tensor, tensors: tuple[Tensor | None, ...], description: str) -> Tensor | None:
    """y by the entry of `packed_op._ready` for these tensors; None if there is none or x is of another kind."""
    return _cpu.repeat(ready, x, tensors, description) if _cpu else None


def remember(
    description: str,
    x: Tensor,
    kernels: list[Any],
    outputs: list[int],
    together: bool,
    matrices: int,
    parts: list[tuple[int, int]],
) -> None:
    """Have `graph_op`'s operator make further calls like this one in C.

    kernels   one, or of products of x, each with its outputs; together: whether one pass may compute them.
    matrices  how many of parts (address, elements) are matrices and not biases.
    """
    _cpu.remember_graph_op(description, _DTYPES[x.dtype], x.shape[-1], kernels, outputs, together, matrices, parts)


def compiled_calls() -> int:
    """How many calls of that operator C has made."""
    return _cpu.graph_op_calls() if _cpu else 0


def fit_together(a: Any, b: Any) -> bool:
    """Whether two prepared products of one x can be computed in one pass."""
    return isinstance(a, _cpu.BoundPacked) and isinstance(b, _cpu.BoundPacked) and _cpu.fit_together(a, b)


def _rows(x: Tensor, width: int) -> tuple[Tensor, int, int]:
    """x as [T, width] rows with unit stride inside, their stride, T. x itself if it is contiguous, of any shape."""
    if x.is_contiguous():
        return x, width, x.numel() // width
    x = x.reshape(-1, width)  # a view where there is one, else a copy
    if width > 1 and x.stride(1) != 1:
        x = x.contiguous()
    return x.view(-1, width), x.stride(0), x.shape[0]  # never the given object: `forward` asks `rows is x`


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
    if value.numel() and value.data_ptr() == 0:
        return f"{name} has no memory (its storage was freed, or it is a wrapper)"
    if value.is_neg():
        return f"{name} is a negative view (of a conjugate); resolve_neg() makes it plain"
    return None


def _input(x: Any, width: int) -> str | None:
    reason = None if type(x) is Tensor and _readable(x, x.dtype) and x.dtype in _DTYPES else _plain("x", x)
    if reason is None and (x.dim() < 1 or x.shape[-1] != width):
        return f"x has shape {tuple(x.shape)}, expected (…, {width})"
    return reason


def _readable(value: Any, dtype: torch.dtype) -> bool:
    """The quick form of `_plain(...) is None`, with the dtype given."""
    return (
        type(value) in _PLAIN
        and value.dtype is dtype
        and value.is_cpu
        and value.layout is torch.strided
        and not value.is_neg()
        and (value.data_ptr() != 0 or value.numel() == 0)
    )


def _orientations(strides: tuple[int, ...], n: int, k: int) -> tuple[bool, bool]:
    """(readable as rows, readable as a transposed matrix) of [n, k]. A side of length 1 fits whatever its stride."""
    return strides[1] == 1 or k == 1, strides[0] == 1 or n == 1


def _strides(name: str, matrix: Tensor) -> str:
    return (
        f"{name} has strides {tuple(matrix.stride())}, expected one of them to be 1 (row-major, or a transposed view); "
        f"{name}.contiguous() has it"
    )


def _unreadable(weights: Weights) -> str | None:
    """Why the kernels cannot read the weights' memory, apart from the matrices' strides."""
    reason = _plain("up", weights.up)
    if reason is not None:
        return reason
    dtype = weights.up.dtype
    for name, value in weights.items():
        reason = _plain(name, value)
        if reason is not None:
            return reason
        if value.dtype != dtype:
            return f"{name} is {value.dtype}, up is {dtype}: expected one dtype for all weights"
        if value.dim() == 1 and value.stride(0) != 1 and value.shape[0] != 1:
            return f"{name} has stride {value.stride(0)}, expected a contiguous bias"
    return None


def _plan(x: Any, weights: Weights) -> str | tuple[int, tuple[Any, ...]]:
    """The kernel's arguments for the weights, or the reason why it cannot run. On the path of every call: quick."""
    if _missing is not None:
        return _missing
    try:
        isa_id = _ISA_IDS[isa()]
    except ValueError as error:
        return str(error)
    spec, gate, up, down = weights.spec, weights.gate, weights.up, weights.down
    d, f = spec.d_model, spec.d_ff
    reason = _input(x, d)
    if reason is not None:
        return reason
    dtype: Any = getattr(up, "dtype", None)
    code = _DTYPES.get(dtype)
    gate_bias, up_bias, down_bias = weights.gate_bias, weights.up_bias, weights.down_bias
    if not (
        code is not None
        and _readable(up, dtype)
        and _readable(down, dtype)
        and (gate is None or _readable(gate, dtype))
        and (gate_bias is None or (_readable(gate_bias, dtype) and gate_bias.is_contiguous()))
        and (up_bias is None or (_readable(up_bias, dtype) and up_bias.is_contiguous()))
        and (down_bias is None or (_readable(down_bias, dtype) and down_bias.is_contiguous()))
    ):
        reason = _unreadable(weights)
        if reason is not None:
            return reason
    if (
        up.shape != (f, d)
        or down.shape != (d, f)
        or (gate is None) == spec.gated
        or (gate is not None and gate.shape != (f, d))
        or any(b is not None and b.shape != (n,) for b, n in ((gate_bias, f), (up_bias, f), (down_bias, d)))
    ):
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in weights.items())
        return f"the weights do not have the shapes of their spec ({spec.describe()}): {shapes}"
    up_strides, down_strides = up.stride(), down.stride()
    up_row, up_col = _orientations(up_strides, f, d)
    if not (up_row or up_col):
        return _strides("up", up)
    down_row, down_col = _orientations(down_strides, d, f)
    if not (down_row or down_col):
        return _strides("down", down)
    gate_at = gate_stride = 0
    if gate is not None:
        gate_strides = gate.stride()
        gate_row, gate_col = _orientations(gate_strides, f, d)
        if not (gate_row or gate_col):
            return _strides("gate", gate)
        up_row, up_col = up_row and gate_row, up_col and gate_col
        if not (up_row or up_col):
            return "one of gate and up is row-major and the other transposed: expected the same for both"
        gate_at, gate_stride = gate.data_ptr(), gate_strides[0 if up_row else 1]
    return isa_id, (
        d, f,
        gate_at, gate_stride, 0 if gate_bias is None else gate_bias.data_ptr(),
        up.data_ptr(), up_strides[0 if up_row else 1], 0 if up_bias is None else up_bias.data_ptr(),
        down.data_ptr(), down_strides[0 if down_row else 1], 0 if down_bias is None else down_bias.data_ptr(),
        code, not up_row, not down_row, *_spec_args(spec),
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
    row, col = _orientations(weight.stride(), *weight.shape)
    if not (row or col):
        return _strides("weight", weight)
    return isa_id, not row, weight.stride(0 if row else 1)


@functools.cache
def _torch_bfloat16_limit() -> int:
    """Most tokens for which our bfloat16 products keep up with PyTorch's, which use the CPU's bfloat16 unit.

    Measured with AMX at 576x1536 and 2048x5632: 1.2 x PyTorch's speed at 6 tokens, 0.9 x at 8, 0.4 x at 64. Where the
    core ranks its instruction sets so that bfloat16's is not the best, the unit is slower than float32's, which we use.
    """
    for name, (of, limit) in _BFLOAT16_UNITS.items():
        if getattr(torch.cpu, name, lambda: False)() and of in (None, *_ISAS[-1:]):
            return limit
    return 1 << 62


def torch_limit(x_dtype: torch.dtype, weight: Tensor) -> tuple[int, str]:
    """(most tokens for which our kernels are no slower than PyTorch's ops by rule, what holds beyond)."""
    if x_dtype is torch.bfloat16 and weight.dtype is torch.bfloat16:
        return _torch_bfloat16_limit(), "bfloat16, for which this CPU has a unit of its own"
    if x_dtype is weight.dtype and weight.stride(1) != 1 and weight.shape[1] != 1:
        return 16, "transposed weights"
    return 1 << 62, ""


def slower_than_torch(x: Tensor, weight: Tensor) -> str | None:
    """Why `auto` should rather take PyTorch's ops for x [..., n_in] and weight [n_out, n_in], or None."""
    limit, what = torch_limit(x.dtype, weight)
    if x.numel() // weight.shape[1] > limit:
        return f"PyTorch is faster: more than {limit} tokens with {what}"
    return None
