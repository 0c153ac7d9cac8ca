"""Packed matrices as PyTorch operators: what torch.compile sees of them. Not differentiable.

The tensors are the packed bytes; what they hold (format, shape, activations, spec) travels as one JSON string, so that
a call is a pure function of its arguments. T tokens, N outputs, K inputs.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..spec import Spec
from ..weights import Weights
from . import cpu, dispatch, op_text, packed
from .packed import PackedMatrix

_library = torch.library.Library("fanfold", "FRAGMENT")
_library.define("packed_linear(Tensor x, Tensor data, Tensor? bias, str description) -> Tensor")
_library.define(
    "packed_tied_linear(Tensor x, Tensor data, Tensor table, Tensor column, Tensor? bias, str seen, str description) "
    "-> Tensor"
)
_library.define(
    "packed_ffn(Tensor x, Tensor? gate, Tensor up, Tensor down, Tensor? gate_bias, Tensor? up_bias, Tensor? down_bias, "
    "str description) -> Tensor"
)
_library.define("packed_weight(Tensor data, str description, ScalarType dtype) -> Tensor")

_library.define("packed_refusal(Tensor x, int outputs, str reason) -> Tensor")

# Increase it when `graph_op` makes something else of a graph: Inductor keeps what it compiled on disk, by the operators
# and their texts, and would take out what an earlier pass has made of them.
GRAPHS = 2

_Kind = tuple[str, tuple[int, int], str]  # format, shape, activations

# {(description, address of the first matrix): (kernel, dtype of x, inputs, outputs, addresses and sizes of the tensors,
# their dtypes, torch.get_num_threads, torch.empty_like)} of calls that were made with contiguous x: a bound kernel is a
# function of the addresses and sizes, and these are compared, so that nothing in it can grow stale.
_ready: dict[tuple[str, int], tuple[Any, ...]] = {}
_MOST_READY = 4096


def _keep(kernel: Any, x: Tensor, outputs: int, tensors: tuple[Tensor | None, ...], description: str) -> None:
    """Have `cpu.repeat` make further calls like this one."""
    if "FANFOLD_ISA" in os.environ or not x.is_contiguous() or x.shape[-1] < 2:
        return
    first = next(t for t in tensors if t is not None)
    places = tuple(n for t in tensors for n in ((0, 0) if t is None else (t.data_ptr(), t.numel())))
    types = tuple(None if t is None else t.dtype for t in tensors)
    if len(_ready) >= _MOST_READY:
        _ready.clear()
    _ready[description, first.data_ptr()] = (
        kernel, x.dtype, x.shape[-1], outputs, places, types, torch.get_num_threads, torch.empty_like
    )  # fmt: skip


def watch(matrix: Tensor, place: int, word: int) -> None:
    """Have the operators refuse these bytes once the 8 bytes at `place`, which stay readable for good, are no longer
    `word`: they are the number of what stands in for the matrix in its module."""
    if cpu._cpu and matrix.numel():
        cpu._cpu.watch_matrix(matrix.data_ptr(), place, word)
        weakref.finalize(matrix, cpu._cpu.unwatch_matrix, matrix.data_ptr(), place).atexit = False


def _refuse_written(*matrices: Tensor | None) -> None:
    for matrix in matrices:
        if cpu._cpu and matrix is not None and cpu._cpu.is_written(matrix.data_ptr()):
            raise RuntimeError(
                "somebody has written to a weight that is packed, which compiled code cannot take over: call "
                "fanfold.unswap(model), write to it, and swap again"
            )


def describe(matrix: PackedMatrix) -> str:
    """The description of one matrix for `fanfold::packed_linear` and `packed_weight`."""
    return describe_kind((matrix.format, tuple(matrix.shape), matrix.activations))


def describe_kind(kind: tuple[str, tuple[int, ...], str]) -> str:
    """The same from (format, shape, activations)."""
    format, (n, k), activations = kind
    return f"['{format}', {n}, {k}, '{activations}', {GRAPHS}]"  # by hand: torch.compile does not trace json


def describe_ffn(weights: Weights) -> str:
    """The description of an FFN for `fanfold::packed_ffn`."""
    named = ((name, getattr(weights, name)) for name in ("gate", "up", "down"))
    parts = ", ".join([f"'{name}': {describe(m)}" for name, m in named if m is not None])
    return f"{{'spec': {op_text.from_json(weights.spec.to_json())}, 'matrices': {{{parts}}}}}"


@functools.lru_cache(maxsize=4096)
def _kind(description: str) -> _Kind:
    return _read_kind(op_text.read(description))


def _read_kind(read: list[Any]) -> _Kind:
    format, n, k, activations, *_ = read  # a program that was exported earlier may have no number
    return format, (n, k), activations


@functools.lru_cache(maxsize=1024)
def _ffn_kind(description: str) -> tuple[Spec, dict[str, _Kind]]:
    read = op_text.read(description)
    return Spec.from_dict(read["spec"]), {name: _read_kind(kind) for name, kind in read["matrices"].items()}


def _matrix(data: Tensor, kind: _Kind) -> PackedMatrix:
    format, shape, activations = kind
    return PackedMatrix(format, shape, data, activations)


def _check_sizes(kind: _Kind, n_bytes: int, bias: int, n_bias: int) -> None:
    format, (n, k), _ = kind
    expected = packed.packed_bytes(format, n, k)
    if n_bytes != expected or (bias and n_bias != n):
        raise ValueError(f"{n_bytes} bytes and {n_bias} biases given for {format} [{n}, {k}]: expected {expected}, {n}")


# As in `_ready`, for x of any kind.
@functools.lru_cache(maxsize=4096)
def _bound_linear(isa: str, dtype: torch.dtype, data: int, n_bytes: int, bias: int, n_bias: int, kind: _Kind) -> Any:
    format, (n, k), activations = kind
    _check_sizes(kind, n_bytes, bias, n_bias)
    part = (data, packed._IDS[format], n, k, bias, activations == "int8")
    return cpu._cpu.bind_packed_linear(cpu._ISA_IDS[isa], cpu._DTYPES[dtype], part)


def linear(x: Tensor, data: Tensor, bias: Tensor | None, description: str) -> Tensor:
    """`packed.linear` on the bytes `data`.  x  [..., K]  ->  [..., N]. Raises ValueError where that does, RuntimeError
    if somebody has written to what stands in for it (`watch`)."""
    _refuse_written(data)
    again = cpu.repeat(_ready, x, (data, bias), description)
    if again is not None:
        dispatch.record("cpu")
        return again
    kind = _kind(description)
    kernel = bind_linear(x, data, bias, description)
    if kernel is None:
        return packed.linear(x, _matrix(data, kind), bias)
    dispatch.record("cpu")
    n, k = kind[1]
    rows, stride, tokens = cpu._rows(x, k)
    y = x.new_empty((*x.shape[:-1], n))
    kernel.run(torch.get_num_threads(), rows.data_ptr(), stride, y.data_ptr(), n, tokens)
    _keep(kernel, x, n, (data, bias), description)
    return y


def bind_linear(x: Tensor, data: Tensor, bias: Tensor | None, description: str) -> Any | None:
    """The kernel of `linear` for x and these tensors; None where they need `packed.linear` to look at them."""
    at, kind = data.data_ptr(), _kind(description)
    if at % packed.ALIGN or x.dtype not in cpu._DTYPES or x.shape[-1] != kind[1][1] or not _plain_bias(bias):
        return None
    place, n_bias = (0, 0) if bias is None else (bias.data_ptr(), bias.numel())
    return _bound_linear(cpu.isa(), x.dtype, at, data.numel(), place, n_bias, kind)


def seen(table: Tensor) -> str:
    """Where a table lies and how often it was written to, as text for `tied_linear`."""
    return f"{table.data_ptr()} {'uncounted' if table.is_inference() else table._version}"


def tied_linear(
    x: Tensor, data: Tensor, table: Tensor, column: Tensor, bias: Tensor | None, known: str, description: str
) -> Tensor:
    """`linear` of a matrix that is also a table [N, K] of the model, as long as that is as it was when it was packed:
    `seen` the same, with the same first `column` [N]. Else with the table itself."""
    if seen(table) == known and torch.equal(table.detach().select(1, 0), column):
        return linear(x, data, bias, description)
    return torch.nn.functional.linear(x, table.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _plain_bias(bias: Tensor | None) -> bool:
    return bias is None or (bias.dtype is torch.float32 and bias.is_contiguous() and bias.is_cpu)


@functools.lru_cache(maxsize=1024)
def _bound_ffn(isa: str, dtype: torch.dtype, places: tuple[int, ...], sizes: tuple[int, ...], description: str) -> Any:
    spec, kinds = _ffn_kind(description)
    parts = []
    for i, (name, data, bias) in enumerate(zip(("gate", "up", "down"), places[:3], places[3:])):
        if name in kinds:
            _check_sizes(kinds[name], sizes[i], bias, sizes[i + 3])
            format, (n, k), activations = kinds[name]
            parts.append((data, packed._IDS[format], n, k, bias, activations == "int8"))
        else:
            parts.append(packed._part(None, None))
    return cpu._cpu.bind_packed(cpu._ISA_IDS[isa], cpu._DTYPES[dtype], *parts, *cpu._spec_args(spec))


def ffn(
    x: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    description: str,
) -> Tensor:
    """`packed.forward` on bytes.  x  [..., d_model]  ->  [..., d_model]. Raises ValueError where that does, and as
    `linear` does."""
    _refuse_written(gate, up, down)
    tensors = (gate, up, down, gate_bias, up_bias, down_bias)
    again = cpu.repeat(_ready, x, tensors, description)
    if again is not None:
        dispatch.record("cpu")
        return again
    kernel = bind_ffn(x, tensors, description)
    if kernel is None:
        return packed.forward(x, _weights(gate, up, down, gate_bias, up_bias, down_bias, description))
    dispatch.record("cpu")
    d = x.shape[-1]
    rows, stride, tokens = cpu._rows(x, d)
    y = x.new_empty(x.shape)
    kernel.run(torch.get_num_threads(), rows.data_ptr(), stride, y.data_ptr(), d, tokens)
    _keep(kernel, x, d, tensors, description)
    return y


def bind_ffn(x: Tensor, tensors: tuple[Tensor | None, ...], description: str) -> Any | None:
    """The kernel of `ffn` for x and its six tensors; None where they need `packed.forward` to look at them."""
    places = tuple(cpu._pointer(t) for t in tensors)
    plain = x.dtype in cpu._DTYPES and x.shape[-1] == _ffn_kind(description)[0].d_model
    if any(p % packed.ALIGN for p in places[:3]) or not plain or not all(map(_plain_bias, tensors[3:])):
        return None
    sizes = tuple(0 if t is None else t.numel() for t in tensors)
    return _bound_ffn(cpu.isa(), x.dtype, places, sizes, description)


def _weights(
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    description: str,
) -> Weights:
    spec, kinds = _ffn_kind(description)
    return Weights.unchecked(
        spec,
        gate=None if gate is None else _matrix(gate, kinds["gate"]),
        up=_matrix(up, kinds["up"]),
        down=_matrix(down, kinds["down"]),
        gate_bias=gate_bias,
        up_bias=up_bias,
        down_bias=down_bias,
    )


def weight(data: Tensor, description: str, dtype: torch.dtype) -> Tensor:
    """The dequantized weights [N, K] as `dtype`. Raises RuntimeError as `linear` does."""
    _refuse_written(data)
    made = _matrix(data, _kind(description)).dequantize()
    return made.clone() if made.dtype is dtype and made.data_ptr() == data.data_ptr() else made.to(dtype)


def call_ffn(x: Tensor, weights: Weights, description: str) -> Tensor:
    """The operator on Weights of PackedMatrix."""
    w = weights
    gate = None if w.gate is None else w.gate.data
    return torch.ops.fanfold.packed_ffn(
        x, gate, w.up.data, w.down.data, w.gate_bias, w.up_bias, w.down_bias, description
    )  # fmt: skip


def refuse(x: Tensor, outputs: int, reason: str) -> Tensor:
    """Raises RuntimeError: what stands in compiled code for an error that code alone would raise, as an exception while
    torch.compile is tracing would make it trace something else."""
    raise RuntimeError(reason)


_library.impl("packed_refusal", refuse, "CPU")
_library.impl("packed_linear", linear, "CPU")
_library.impl("packed_tied_linear", tied_linear, "CPU")
_library.impl("packed_ffn", ffn, "CPU")
_library.impl("packed_weight", weight, "CPU")


when_traced: list[Callable[[], None]] = []  # called when torch.compile meets a product or an FFN


def _traced() -> None:
    for call in when_traced:
        call()


@torch.library.register_fake("fanfold::packed_linear")
def _(x, data, bias, description):
    _traced()
    (n, _), *_ = _kind(description)[1:]
    return x.new_empty((*x.shape[:-1], n))


@torch.library.register_fake("fanfold::packed_tied_linear")
def _(x, data, table, column, bias, known, description):
    return x.new_empty((*x.shape[:-1], table.shape[0]))


@torch.library.register_fake("fanfold::packed_ffn")
def _(x, gate, up, down, gate_bias, up_bias, down_bias, description):
    _traced()
    return x.new_empty(x.shape)


@torch.library.register_fake("fanfold::packed_refusal")
def _(x, outputs, reason):
    return x.new_empty((*x.shape[:-1], outputs))


@torch.library.register_fake("fanfold::packed_weight")
def _(data, description, dtype):
    return data.new_empty(_kind(description)[1], dtype=dtype)
