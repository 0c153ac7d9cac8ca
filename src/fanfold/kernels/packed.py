"""Matrices packed in the kernels' reading order, and the `cpu` backend on them: float32 to int4.

The layout (version 1), N outputs and K inputs of a matrix, in columns of 16 outputs (a last, partly filled column is
padded with zeros), each read from its first byte to its last:
  fp32, fp16  [K][16];  bf16  [K/2][16][2], K padded to 2
  int8        [K/4][16][4] of code + 128, K padded to 4; before the columns float32 scales, one an output
  grouped     blocks of `block` inputs: [groups][16] float16 scales, then minima, padded to 64 bytes; then codes as
              above, or for 4 bits [K/8][16][4] bytes, K padded to 8: the low half is input k, the high half k + 4.
So a 64-byte line holds the next 1 … 8 inputs of 16 outputs, as one vector or one row of a matrix unit's tile.
T tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import formats
from ..count import formats as stored
from ..weights import Weights
from . import cpu

LAYOUT_VERSION = 1
LANES = 16  # outputs of a column
ALIGN = 64
_LARGE = 4 << 20  # bytes from which the system is asked for large pages
_FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_IDS = {
    name: i
    for i, name in enumerate(
        ("fp32", "bf16", "fp16", "int8", "int8_g32", "int8_g64", "int8_g128",
         "int4_g32", "int4_g64", "int4_g128", "q8_0", "q4_0", "q4_1")
    )
}  # fmt: skip  # ids of the C++ core
FORMATS = tuple(_IDS)
ACTIVATIONS = ("int8", "float")  # what meets integer codes: activations quantized to int8, or as they are


class PackedMatrix:
    """One matrix [n_out, n_in] in the kernels' reading order.

    format       a name of `FORMATS`.
    data         uint8 [bytes], 64-byte aligned: the layout of this module's docstring.
    activations  "int8": what it multiplies is quantized per token and group; "float": it is not, as for float formats.
    Raises ValueError if the bytes are not as many as the format takes.
    """

    __slots__ = ("activations", "data", "format", "shape")

    def __init__(self, format: str, shape: tuple[int, int], data: Tensor, activations: str | None = None) -> None:
        self.format = _known(format)
        self.shape = torch.Size(shape)
        expected = packed_bytes(self.format, *self.shape)
        if data.dtype != torch.uint8 or tuple(data.shape) != (expected,):
            raise ValueError(f"data is {data.dtype} {tuple(data.shape)}, expected torch.uint8 ({expected},)")
        if not data.is_contiguous() or data.data_ptr() % ALIGN:
            data = aligned(expected).copy_(data)
        self.data = data
        integer = self.format not in _FLOATS
        self.activations = activations or ("int8" if integer else "float")
        if self.activations not in ACTIVATIONS or (self.activations == "int8" and not integer):
            raise ValueError(f"activations={activations!r}: expected 'float'" + (" or 'int8'" if integer else ""))

    @classmethod
    def pack(cls, matrix: Any, format: str | None = None, activations: str | None = None) -> PackedMatrix:
        """Pack `matrix`: a `formats.Quantized`, or a float tensor or array [n_out, n_in] with a float `format`."""
        if isinstance(matrix, formats.Quantized):
            if format not in (None, matrix.format):
                raise ValueError(f"format={format!r}, but the matrix is in {matrix.format}")
            return cls(matrix.format, matrix.shape, _pack_codes(matrix), activations)
        if format not in _FLOATS:
            raise ValueError(f"format={format!r}: a float matrix packs to {', '.join(_FLOATS)}; see fanfold.quantize")
        tensor = matrix.detach() if isinstance(matrix, Tensor) else torch.from_numpy(np.ascontiguousarray(matrix))
        return cls(format, (tensor.shape[0], tensor.shape[1]), _pack_floats(tensor, format), activations)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.data.numel()

    def quantized(self) -> formats.Quantized:
        """The codes, scales and minima, exactly as they were packed. Raises ValueError for a float format."""
        if self.format in _FLOATS:
            raise ValueError(f"format {self.format} has no codes: dequantize() gives the weights")
        with torch._C._DisableFuncTorch():  # inside of a transform a view of plain bytes has no memory
            return _unpack_codes(self)

    def dequantize(self) -> Tensor:
        """The weights [n_out, n_in]: float formats in their own dtype, bit by bit; integer formats in float32."""
        if self.format in _FLOATS:
            return _unpack_floats(self)
        return torch.from_numpy(self.quantized().dequantize())

    def __repr__(self) -> str:
        return f"PackedMatrix({self.format}, {tuple(self.shape)}, {self.nbytes} bytes, activations={self.activations})"

    # What `Weights` asks of an array.
    def is_floating_point(self) -> bool:
        return True

    @property
    def dtype(self) -> str:
        return self.format


def _known(format: str) -> str:
    name = stored.ALIASES.get(format, format)
    if name not in _IDS:
        raise ValueError(f"format {format!r} cannot be packed; known: {', '.join([*_IDS, 'int4'])}")
    return name


def aligned(n_bytes: int) -> Tensor:
    """An uninitialised uint8 tensor [n_bytes] that begins on a 64-byte line."""
    whole = torch.empty(n_bytes + ALIGN, dtype=torch.uint8)
    begin = -whole.data_ptr() % ALIGN
    if n_bytes >= _LARGE and cpu._cpu is not None:
        cpu._cpu.use_large_pages(whole.data_ptr(), n_bytes)  # 7–15 % of decode's time (2048x5632, 2026-11)
    return whole[begin : begin + n_bytes]


def block_inputs(format: str) -> int:
    """Inputs of a block of a grouped format: as many as give its header whole 64-byte lines."""
    f = stored.get(format)
    return max(64, f.group) if f.group_bytes == 4 else 2 * f.group


def _blocks(format: str, k: int) -> list[tuple[int, int, int, int, int]]:
    """(first input, inputs, groups, header bytes, code bytes) of each block of a column of a grouped format."""
    f = stored.get(format)
    out, unit = [], 32 // f.code_bits
    for k0 in range(0, k, block_inputs(format)):
        n = min(block_inputs(format), k - k0)
        groups = -(-n // f.group)
        header = -(-groups * f.group_bytes * LANES // ALIGN) * ALIGN
        out.append((k0, n, groups, header, -(-n // unit) * unit * LANES * f.code_bits // 8))
    return out


def packed_bytes(format: str, n: int, k: int) -> int:
    """Bytes of an [n, k] matrix as packed: what `count.formats` says, plus the padding."""
    columns = -(-n // LANES)
    if format in _FLOATS:
        unit = 2 if format == "bf16" else 1
        return columns * LANES * -(-k // unit) * unit * _FLOATS[format].itemsize
    if not stored.get(format).group:
        return columns * LANES * (4 + -(-k // 4) * 4)
    return columns * sum(header + codes for *_, header, codes in _blocks(format, k))


def _columns(t: Tensor, unit: int) -> Tensor:
    """[N, K] -> [columns, K/unit, 16, unit], padded with zeros."""
    n, k = t.shape
    columns, units = -(-n // LANES), -(-k // unit)
    if (n, k) != (columns * LANES, units * unit):
        padded = t.new_zeros(columns * LANES, units * unit)
        padded[:n, :k] = t
        t = padded
    return t.reshape(columns, LANES, units, unit).permute(0, 2, 1, 3)


def _rows(columns: Tensor, n: int, k: int) -> Tensor:
    """The inverse of `_columns`."""
    c, units, _, unit = columns.shape
    return columns.permute(0, 2, 1, 3).reshape(c * LANES, units * unit)[:n, :k].contiguous()


def _pack_floats(t: Tensor, format: str) -> Tensor:
    dtype = _FLOATS[format]
    columns = _columns(t.to(dtype), 2 if format == "bf16" else 1)
    data = aligned(columns.numel() * dtype.itemsize)
    data.view(dtype).view(columns.shape).copy_(columns)
    return data


def _unpack_floats(m: PackedMatrix) -> Tensor:
    n, k = m.shape
    unit = 2 if m.format == "bf16" else 1
    columns = m.data.view(_FLOATS[m.format]).view(-(-n // LANES), -(-k // unit), LANES, unit)
    return _rows(columns, n, k)


def _pack_codes(q: formats.Quantized) -> Tensor:
    n, k = q.shape
    f = stored.get(q.format)
    columns = -(-n // LANES)
    codes = torch.from_numpy(np.ascontiguousarray(q.codes)).view(torch.uint8)
    if f.code_bits == 8:
        codes = codes ^ 0x80  # code + 128
    data = aligned(packed_bytes(q.format, n, k)).zero_()
    if not f.group:
        scales = data[: 4 * LANES * columns].view(torch.float32)
        scales[:n] = torch.from_numpy(q.scale[:, 0].copy())
        body = _columns(codes, 4)
        data[4 * LANES * columns :].view(body.shape).copy_(body)
        return data
    tables = [t for t in (q.scale, q.minimum) if t is not None]
    out, at = data.view(columns, -1), 0
    for k0, width, groups, header, n_bytes in _blocks(q.format, k):
        first, size = k0 // f.group, groups * 2 * LANES
        for i, table in enumerate(tables):
            part = torch.from_numpy(np.ascontiguousarray(table[:, first : first + groups]))
            place = out[:, at + i * size : at + (i + 1) * size]
            place.copy_(_columns(part, 1).contiguous().view(torch.uint8).view(columns, size))
        out[:, at + header : at + header + n_bytes] = _code_bytes(codes[:, k0 : k0 + width], f.code_bits)
        at += header + n_bytes
    return data


def _code_bytes(codes: Tensor, bits: int) -> Tensor:
    if bits == 8:
        body = _columns(codes, 4)
    else:
        both = _columns(codes, 8)
        body = both[..., :4] | (both[..., 4:] << 4)
    return body.reshape(body.shape[0], -1)


def _unpack_codes(m: PackedMatrix) -> formats.Quantized:
    n, k = m.shape
    f = stored.get(m.format)
    columns = -(-n // LANES)
    dtype = formats.code_dtype(m.format)
    if not f.group:
        scale = m.data[: 4 * LANES * columns].view(torch.float32)[:n, None].numpy().copy()
        codes = _rows(m.data[4 * LANES * columns :].view(columns, -1, LANES, 4), n, k) ^ 0x80
        return formats.Quantized(format=m.format, codes=codes.numpy().view(dtype), scale=scale)
    data, at = m.data.view(columns, -1), 0
    all_codes = torch.empty(n, k, dtype=torch.uint8)
    tables = [np.empty((n, formats.n_groups(m.format, k)), np.float16) for _ in range(f.group_bytes // 2)]
    for k0, width, groups, header, n_bytes in _blocks(m.format, k):
        first, size = k0 // f.group, groups * 2 * LANES
        for i, table in enumerate(tables):
            part = data[:, at + i * size : at + (i + 1) * size].contiguous().view(torch.float16)
            table[:, first : first + groups] = _rows(part.view(columns, groups, LANES, 1), n, groups).numpy()
        body = data[:, at + header : at + header + n_bytes].contiguous().view(columns, -1, LANES, 4)
        if f.code_bits == 4:
            body = torch.cat([body & 15, body >> 4], dim=-1)
        all_codes[:, k0 : k0 + width] = _rows(body, n, width)
        at += header + n_bytes
    if f.code_bits == 8:
        all_codes ^= 0x80
    minimum = tables[1] if len(tables) > 1 else None
    return formats.Quantized(format=m.format, codes=all_codes.numpy().view(dtype), scale=tables[0], minimum=minimum)


# ---- running them ----


def is_packed(weights: Weights) -> bool:
    """Whether the matrices are packed ones."""
    return type(weights.up) is PackedMatrix


def why_not(x: Any, weights: Weights) -> str | None:
    """None if `forward` can run, else the reason."""
    reason = cpu.available() or cpu._input(x, weights.spec.d_model)
    if reason is not None:
        return reason
    for name, value in weights.items():
        if name.endswith("bias"):
            if type(value) not in (Tensor, torch.nn.Parameter) or value.dtype != torch.float32:
                found = getattr(value, "dtype", type(value))
                return f"{name} is {found}, expected torch.float32 beside packed matrices"
            if not value.is_contiguous() or not value.is_cpu:
                return f"{name} is not contiguous CPU memory"
        elif type(value) is not PackedMatrix:
            return f"{name} is not packed, but another matrix is"
    if weights.gate is not None and (weights.gate.format, weights.gate.activations) != (
        weights.up.format,
        weights.up.activations,
    ):
        return f"gate is {weights.gate.format}, up is {weights.up.format}: expected one format and activations for both"
    return None


def forward(x: Tensor, weights: Weights) -> Tensor:
    """y = down(act(gate x) * (up x)) with packed matrices.

    x  [..., d_model] float32 or bfloat16  ->  [..., d_model], x's dtype, contiguous. Biases float32.
    Sums accumulate in float32. Integer formats with activations "int8": x and the coefficients are quantized per token
    and group (the matrix's own groups, 256 where a row has one scale) and integer sums are exact; with many tokens
    those of groups of 32 may meet the CPU's bfloat16 unit instead, and so may a bfloat16 x: `arithmetic` tells. A call
    with coefficients or an x that are not finite runs with activations as they are.
    With relu and relu2 a lone token skips the channels whose coefficient is exactly zero (float formats; were a value
    of such a channel infinite, PyTorch's product would be NaN).
    Bit-equal for the same input, instruction set, format and token count. Not differentiable.
    Raises ValueError with the reason.
    """
    reason = why_not(x, weights)
    if reason is not None:
        raise ValueError(f"the cpu backend cannot run this call: {reason}")
    rows, stride, tokens = cpu._rows(x, x.shape[-1])
    y = torch.empty(x.shape, dtype=x.dtype)
    threads = torch.get_num_threads()
    bind(x.dtype, weights).run(threads, rows.data_ptr(), stride, y.data_ptr(), x.shape[-1], tokens)
    return y


def linear(x: Tensor, matrix: PackedMatrix, bias: Tensor | None = None) -> Tensor:
    """y = matrix x + bias under the same rules.  x  [..., n_in]  ->  [..., n_out]."""
    reason = linear_why_not(x, matrix, bias)
    if reason is not None:
        raise ValueError(f"the cpu backend cannot run this call: {reason}")
    n_out, n_in = matrix.shape
    rows, stride, tokens = cpu._rows(x, n_in)
    y = torch.empty((*x.shape[:-1], n_out), dtype=x.dtype)
    threads = torch.get_num_threads()
    bind_linear(x.dtype, matrix, bias).run(threads, rows.data_ptr(), stride, y.data_ptr(), n_out, tokens)
    return y


def linear_why_not(x: Any, matrix: PackedMatrix, bias: Any = None) -> str | None:
    """None if `linear` can run, else the reason."""
    reason = cpu.available() or cpu._input(x, matrix.shape[1])
    if reason is None and bias is not None and (bias.dtype != torch.float32 or not bias.is_contiguous()):
        return f"bias is {bias.dtype}, expected contiguous torch.float32 beside a packed matrix"
    if reason is None and bias is not None and (bias.shape != (matrix.shape[0],) or not bias.is_cpu):
        return f"bias has shape {tuple(bias.shape)} on {bias.device}, expected ({matrix.shape[0]},) on cpu"
    return reason


def bind(dtype: torch.dtype, weights: Weights) -> Any:
    """The C++ call with these weights bound, for x and y of `dtype`: .run(threads, x, stride, y, stride, tokens).

    The caller keeps the weights alive and has asked `why_not`. FANFOLD_ISA is read now.
    """
    code = cpu._DTYPES[dtype]
    parts = [_part(getattr(weights, p), getattr(weights, f"{p}_bias")) for p in ("gate", "up", "down")]
    return cpu._cpu.bind_packed(cpu._ISA_IDS[cpu.isa()], code, *parts, *cpu._spec_args(weights.spec))


def bind_linear(dtype: torch.dtype, matrix: PackedMatrix, bias: Tensor | None) -> Any:
    """`bind` for one matrix."""
    code = cpu._DTYPES[dtype]
    return cpu._cpu.bind_packed_linear(cpu._ISA_IDS[cpu.isa()], code, _part(matrix, bias))


def arithmetic(dtype: torch.dtype, matrix: PackedMatrix, tokens: int) -> str:
    """How `matrix` multiplies `tokens` tokens of `dtype` on the instruction set in use: "fp32", "bf16" or "int8".

    "bf16": x is rounded to bfloat16 and so are the weights (exact for "bf16" and for the codes of "int8"); sums in
    float32. Only where x is bfloat16, or would be rounded to 8 bits otherwise.
    "int8": as `formats.quantize_activations`.
    """
    return cpu._cpu.products(cpu._ISA_IDS[cpu.isa()], cpu._DTYPES[dtype], _part(matrix, None), tokens)


def _part(matrix: PackedMatrix | None, bias: Tensor | None) -> tuple[int, int, int, int, int, bool]:
    """(data, format, n, k, bias, activations are int8)."""
    if matrix is None:
        return 0, 0, 0, 0, 0, False
    n, k = matrix.shape
    return matrix.data.data_ptr(), _IDS[matrix.format], n, k, cpu._pointer(bias), matrix.activations == "int8"


def prepare(x: Tensor, weights: Weights) -> Any | None:
    """`forward` with these weights bound, for `cpu.run_plan` with a contiguous x of the same dtype; None if it
    cannot run."""
    return None if why_not(x, weights) is not None else bind(x.dtype, weights)


def prepare_linear(x: Tensor, matrix: PackedMatrix, bias: Tensor | None) -> Any | None:
    """`linear` bound in the same way."""
    return None if linear_why_not(x, matrix, bias) is not None else bind_linear(x.dtype, matrix, bias)
