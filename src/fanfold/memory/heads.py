"""From the last state to the logits: the head, the final norm, and what is done to the logits after, by experiment.

B batch, T tokens, D d_model, V vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import packed
from ..models import emulate
from ..models.laboratory import ALLOWED, relative
from ..models.linears import is_linear
from ..models.norms import Norm, no_norm, recognise
from ..models.packed_state import PackedLinearState
from ..numerics import UNIT_ROUNDOFF, dtype_name
from ..weights import to_float64
from .layers import plain_matrix
from .taps import copied
from .trace import Event


@dataclasses.dataclass
class Head:
    """logits = capped(logit_scale * (E @ norm(h) * input_scale + bias)), capped(z) = softcap * tanh(z / softcap).

    path       of the head, or of the input embedding where there is no head; None if there is neither.
    is_head    whether it gives logits;  note  what it is, in words, where it does not.
    norm       the final norm, norm_path its path;  why_not  why the formula does not hold for the model, or "".
    error      of the formula against what the head gave, relative.
    """

    path: str | None
    is_head: bool
    note: str = ""
    norm_path: str | None = None
    norm: Norm | None = dataclasses.field(repr=False, default=None)
    input_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    error: float = 0.0
    why_not: str = ""


def look_at_head(
    seen: list[Event],
    blocks: set[str],
    logits: Tensor | None,
    final: Tensor | None,
    ids: Any,
    width: int,
    run: Callable,
) -> Head:
    """The head of a model from the events of one run.

    logits, final  what the run gave [B, T, V], and the state that left the last block [B, T, D].
    ids     the token ids it was given;  run  runs it again and gives the logits.
    """
    inside = tuple(f"{block}." for block in blocks)
    outer = [e for e in seen if e.path not in blocks and not e.path.startswith(inside)]
    if logits is None:
        return _without(outer, ids, width)
    heads = [e for e in outer if is_linear(e.module) and e.y.shape == logits.shape]
    if not heads:
        head = _without(outer, ids, width)
        head.why_not = "no linear layer gives its logits"
        return head
    event = heads[-1]
    head = Head(event.path, True)
    if event.x.shape[-1] != width:
        head.why_not = f"its head reads {event.x.shape[-1]} dimensions, its layers write {width}"
        head.path, head.note = None, f"{head.why_not}: values cannot be read as tokens"
    elif final is None or final.shape != event.x.shape:
        head.why_not = "the state that leaves the last block is not what leads to its head"
    else:
        head.why_not = (
            _look_at_norm(head, event, outer, final)
            or _look_at_cap(head, event, logits, run)
            or _check(head, event, final)
        )
    return head


def _without(outer: list[Event], ids: Any, width: int) -> Head:
    for e in outer:
        if isinstance(e.module, nn.Embedding) and isinstance(ids, Tensor) and torch.equal(e.x, ids.to(e.x)):
            if e.module.embedding_dim != width:
                why = f"its embedding has {e.module.embedding_dim} dimensions, its layers write {width}"
                return Head(
                    None, False, f"no head, and {why}: values cannot be read as tokens", why_not="it has no head"
                )
            note = f"the model has no head: values are read against its input embedding, {e.path}"
            return Head(e.path, False, note, why_not="it has no head that gives logits")
    note = "the model has neither a head that gives a logit per token nor a token embedding"
    return Head(None, False, note, why_not="it has no head that gives a logit per token")


def _look_at_norm(head: Head, event: Event, outer: list[Event], final: Tensor) -> str:
    """Fill in the norm between the last state and the head; -> why it could not be, or ""."""
    for e in outer:
        if e.module is event.module or not e.x.shape == e.y.shape == final.shape or not torch.equal(copied(e.x), final):
            continue
        scale = _ratio(event.x, e.y)
        norm = recognise(e.module, final.shape[-1], final) if scale is not None else None
        if norm is not None and scale is not None:
            head.norm_path, head.norm, head.input_scale = e.path, norm, scale
            return ""
    scale = _ratio(event.x, final.to(event.x))
    if scale is not None:
        head.norm, head.input_scale = no_norm(final.shape[-1]), scale
        return ""
    return f"between its last block and its head {event.path} lies more than one norm"


def _ratio(a: Tensor, b: Tensor) -> float | None:
    """The constant c with a = c · b, to rounding; or None."""
    a, b = a.double(), b.double()
    c = float((a * b).sum() / b.square().sum().clamp_min(1e-300))
    c = 1.0 if torch.equal(a, b) else c
    return c if c and relative(a, c * b) <= _allowed(a) else None


def _look_at_cap(head: Head, event: Event, logits: Tensor, run: Callable[[], Tensor | None]) -> str:
    """Fill in what is done to the head's output, by putting a wide range of numbers in its place."""
    if torch.equal(event.y, logits):
        return ""
    wide = torch.linspace(-300.0, 300.0, event.y.shape[-1], dtype=torch.float64).expand(event.y.shape).to(event.y)
    with _replaced(event.module, wide):
        got = run()
    if got is None or got.shape != wide.shape:
        return "its logits are not a function of its head's output"
    z, got = wide.double(), got.double()
    scale = _ratio(got, z)
    if scale is not None:
        head.logit_scale = scale
        return ""
    cap = float(got.abs().max())
    near = (got.abs() < 0.5 * cap) & (z != 0)
    inner = torch.atanh(got[near] / cap) * cap / z[near]
    if inner.numel():
        head.logit_scale, head.softcap = float(inner.median()), cap
        if relative(got, cap * torch.tanh(head.logit_scale * z / cap)) <= _allowed(logits) * 4:
            return ""
        head.logit_scale, head.softcap = 1.0, None
    return "what is done to its head's output is neither a factor nor a soft cap"


@contextlib.contextmanager
def _replaced(module: nn.Module, y: Tensor) -> Any:
    handle = module.register_forward_hook(lambda *_: y.clone())
    try:
        yield
    finally:
        handle.remove()


def _check(head: Head, event: Event, final: Tensor) -> str:
    """Hold E @ norm(h) against what the head really gave."""
    assert head.norm is not None
    module: Any = event.module
    e_VD = plain_matrix(module).double()
    z = nn.functional.linear(head.norm.apply(final) * head.input_scale, e_VD)
    if module.bias is not None:
        z = z + module.bias.detach().cpu().double()
    head.error = relative(event.y.cpu(), z)
    if head.error <= _allowed(event.y) + _rounding(module, event.x):
        return ""
    return f"its logits are not its head times the norm of the last state: relative error {head.error:.1e}"


def _rounding(module: Any, x: Tensor) -> float:
    """What rounding of activations changes in the outputs of a packed head, relative."""
    state = module.__dict__.get("_fanfold")
    if not isinstance(state, PackedLinearState) or not state.holds(module):
        return 0.0
    (part,) = state.weight.parts
    flat = to_float64(x.flatten(0, -2))
    if part.activations == "int8" and packed.arithmetic(x.dtype, part, len(flat)) == "bf16":
        return 4 * UNIT_ROUNDOFF["bfloat16"]
    rounded = emulate.linear(flat, part, None)
    return relative(torch.from_numpy(rounded.y), torch.from_numpy(rounded.exact))


def _allowed(t: Tensor) -> float:
    """64 roundings in float32, and the four of the model's own dtype: norm, product, scale, result."""
    return ALLOWED + 4 * UNIT_ROUNDOFF[dtype_name(t)]
