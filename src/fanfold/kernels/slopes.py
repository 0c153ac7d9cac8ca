"""The elementwise half of a training step: coefficients and the gradients through them.

T tokens, F d_ff. On the CPU in float32 and bfloat16 one pass of the compiled kernels; elsewhere PyTorch ops that write
into buffers, a tile of tokens at a time, so that the second op finds in the cache what the first one left there. No
autograd is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import activations
from ..spec import Spec
from . import cpu
from . import torch as torch_ops

_aten = torch.ops.aten
# Elements of a tile: the quickest of 2^14 … 2^22 for float32 and bfloat16, 2 MB of L2 cache (Xeon with AMX, 2026-12).
TILE = 1 << 18


class _Direct(NamedTuple):
    """An activation that PyTorch has as one op each way.

    act    (pre, out): out = act(pre).
    slope  (grad, at, out): out = grad * act'(pre); at is pre, or act(pre) if by_value. Every out may be an input.
    """

    act: Callable[[Tensor, Tensor], Tensor]
    slope: Callable[[Tensor, Tensor, Tensor], Tensor]
    by_value: bool = False


def _gelu(approximate: str) -> _Direct:
    return _Direct(
        lambda pre, out: _aten.gelu.out(pre, approximate=approximate, out=out),
        lambda grad, at, out: _aten.gelu_backward.grad_input(grad, at, approximate=approximate, grad_input=out),
    )


_DIRECT = {
    "silu": _Direct(
        lambda pre, out: _aten.silu.out(pre, out=out),
        lambda grad, at, out: _aten.silu_backward.grad_input(grad, at, grad_input=out),
    ),
    "gelu_erf": _gelu("none"),
    "gelu_tanh": _gelu("tanh"),
    "relu": _Direct(
        lambda pre, out: torch.clamp_min(pre, 0, out=out),
        lambda grad, at, out: _aten.threshold_backward.grad_input(grad, at, 0, grad_input=out),
    ),
    "sigmoid": _Direct(
        lambda pre, out: torch.sigmoid(pre, out=out),
        lambda grad, at, out: _aten.sigmoid_backward.grad_input(grad, at, grad_input=out),
        by_value=True,
    ),
    "tanh": _Direct(
        lambda pre, out: torch.tanh(pre, out=out),
        lambda grad, at, out: _aten.tanh_backward.grad_input(grad, at, grad_input=out),
        by_value=True,
    ),
    "identity": _Direct(lambda pre, out: out.copy_(pre), lambda grad, at, out: out.copy_(grad)),
}


def _direct(spec: Spec) -> _Direct | None:
    """The ops of a spec without clamps, offset or a slope of its own; None where PyTorch's autograd does each tile."""
    plain = spec.gate_limit is None and spec.up_limit is None and not spec.up_offset
    default = spec.params == activations.get(spec.activation).params
    return _DIRECT.get(spec.activation) if plain and default else None


def _rows(d_ff: int) -> int:
    return max(1, TILE // d_ff)


def _tiles(tokens: int, d_ff: int) -> Iterator[slice]:
    rows = _rows(d_ff)
    for begin in range(0, tokens, rows):
        yield slice(begin, begin + rows)


def _noise(mask: Tensor, dtype: torch.dtype, dropout: float) -> Tensor:
    return mask.to(dtype).div_(1 - dropout)


def _compiled(
    spec: Spec,
    gate: Tensor | None,
    up: Tensor | None,
    grad: Tensor | None,
    to_gate: Tensor | None,
    to_up: Tensor | None,
    coefficients: Tensor | None,
    mask: Tensor | None,
) -> bool:
    """What `gradients` says, in one pass over memory; False, and nothing done, where the kernels do not run."""
    matrices = (gate, up, grad, to_gate, to_up, coefficients, mask)
    given = [t for t in matrices if t is not None]
    dtype = given[0].dtype
    if torch.compiler.is_compiling() or torch_ops.transform_active() or dtype not in cpu._DTYPES or cpu.available():
        return False
    if not all(type(t) is Tensor and t.is_cpu and t.stride(1) == 1 for t in given):
        return False
    tokens, d_ff = given[0].shape
    where = [(0, 0) if t is None else (t.data_ptr(), t.stride(0)) for t in matrices]
    scale = 1.0 if mask is None else 1 / (1 - spec.dropout)
    isa, threads = cpu._ISA_IDS[cpu.isa()], torch.get_num_threads()
    cpu._cpu.middle(isa, threads, cpu._DTYPES[dtype], tokens, d_ff, *where, scale, *cpu._spec_args(spec))
    return True


def coefficients(spec: Spec, gate: Tensor | None, up: Tensor, out: Tensor, mask: Tensor | None) -> None:
    """out = act(gate) * up, or act(up) without a gate; with a mask [T, F] those dropped are 0, the others scaled.

    gate, up  [T, F] pre-activations; out  [T, F], which may be gate (up without a gate).
    """
    if _compiled(spec, gate, up, None, None, None, out, mask):
        return
    direct = _direct(spec)
    for tile in _tiles(*up.shape):
        g, u, m = None if gate is None else gate[tile], up[tile], out[tile]
        if direct is None:
            m.copy_(torch_ops.coefficients(spec, u, g))
        elif g is None:
            direct.act(u, m)
        else:
            direct.act(g, m).mul_(u)
        if mask is not None:
            m.mul_(_noise(mask[tile], m.dtype, spec.dropout))


def gradients(
    spec: Spec,
    gate: Tensor | None,
    up: Tensor | None,
    grad: Tensor,
    to_gate: Tensor | None,
    to_up: bool,
    coefficients: Tensor | None,
    mask: Tensor | None,
) -> None:
    """From the gradient of the coefficients those of gate and up, and the coefficients once more.

    gate, up  [T, F] pre-activations; up may be missing where to_gate and coefficients are not wanted and nothing of up
              is clamped.
    grad      [T, F]; holds up's gradient afterwards if to_up.
    to_gate   [T, F], where gate's gradient is written, or None; may be gate.
    coefficients  [T, F], where they are written, or None; may be up.
    mask      as in `coefficients`.
    """
    if _compiled(spec, gate, up, grad, to_gate, grad if to_up else None, coefficients, mask):
        return
    direct = _direct(spec)
    rows = min(len(grad), _rows(grad.shape[1]))
    # act(gate) waits where the coefficients will go, its gradient where gate's will, if these places are not in use yet
    value_at = coefficients if coefficients is not up and gate is not None else None
    content_at = to_gate if to_gate is not gate else None
    scratch = grad.new_empty((value_at is None) + (content_at is None), rows, grad.shape[1])
    for tile in _tiles(*grad.shape):
        g, u, d, dg, m = (None if t is None else t[tile] for t in (gate, up, grad, to_gate, coefficients))
        assert d is not None
        noise = None if mask is None else _noise(mask[tile], d.dtype, spec.dropout)
        if noise is not None:
            d.mul_(noise)
        if u is None:
            assert g is not None
            d.mul_(_activated(spec, g))
        elif direct is None:
            _by_autograd(spec, g, u, d, dg, to_up, m)
        elif g is None:
            _ungated(direct, u, d, m, scratch[0, : len(d)])
        else:
            value = scratch[0, : len(d)] if value_at is None else value_at[tile]
            content = scratch[-1, : len(d)] if content_at is None else content_at[tile]
            _gated(direct, g, u, d, dg, to_up, m, direct.act(g, value), content)
        if m is not None and noise is not None:
            m.mul_(noise)


def _gated(
    direct: _Direct,
    g: Tensor,
    u: Tensor,
    d: Tensor,
    dg: Tensor | None,
    to_up: bool,
    m: Tensor | None,
    value: Tensor,
    content: Tensor,
) -> None:
    """value is act(gate) and may be m; content is room for a product, and may be dg. dg may be g, m may be u."""
    if dg is not None:
        torch.mul(d, u, out=content)
        direct.slope(content, value if direct.by_value else g, dg)
    if to_up:
        d.mul_(value)
    if m is not None:
        torch.mul(value, u, out=m)


def _ungated(direct: _Direct, u: Tensor, d: Tensor, m: Tensor | None, scratch: Tensor) -> None:
    value = direct.act(u, scratch) if direct.by_value else None
    direct.slope(d, u if value is None else value, d)
    if m is not None:
        direct.act(u, m) if value is None else m.copy_(value)


def _activated(spec: Spec, g: Tensor) -> Tensor:
    clamped = g if spec.gate_limit is None else g.clamp(max=spec.gate_limit)
    return activations.get(spec.activation).torch(torch, clamped, spec.params)


def _by_autograd(
    spec: Spec, g: Tensor | None, u: Tensor, d: Tensor, dg: Tensor | None, to_up: bool, m: Tensor | None
) -> None:
    """Any spec, by the derivative that PyTorch has for its ops: of one tile, so that what it keeps stays small."""
    gate = None if g is None else g.detach().requires_grad_(dg is not None)
    up = u.detach().requires_grad_(to_up)
    with torch.enable_grad():
        value = torch_ops.coefficients(spec, up, gate)
    wanted = [t for t in (gate, up) if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(value, wanted, d))
    if m is not None:
        m.copy_(value.detach())
    if dg is not None:
        dg.copy_(next(found))
    if to_up:
        d.copy_(next(found))
