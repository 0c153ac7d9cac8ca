"""The quick path of a swapped module: everything checked once, then only what can have changed since.

A call of a decoding model streams megabytes of weights through the caches, so by the next call every Python object that
it touches comes from far away: a thorough check that takes 10 us when repeated takes 60 us in use (measured on
SmolLM2, 2026-11). A `Quick` holds what one thorough check has found, and `holds` looks at as few objects as will show a
change: no hook registered anywhere since, the same children, types, attributes and parameters at the same addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..kernels import cpu
from ..kernels import torch as torch_ops


def memory(t: Tensor) -> tuple[Any, ...]:
    """Where a tensor lies and how: what a kernel that was given its address relies on."""
    return t.data_ptr(), t.dtype, t.shape, t.stride()


def _questions(p: Tensor) -> tuple[Any, ...]:
    """Methods whose answers together say that a parameter lies where and as it did. The dtype cannot change without the
    address; for contiguous ones the count stands for the shape (short answers: a tuple costs another cache miss)."""
    if p.is_contiguous():
        return p.data_ptr, p.numel, p.is_contiguous
    return p.data_ptr, p.size, p.stride


def preparable(x: Tensor) -> bool:
    """Whether calls like this one may be prepared at all."""
    return x.dim() > 0 and x.shape[-1] > 1 and not _grad_enabled()


# Aliases: a look-up in the large torch module is a cache miss of its own.
_grad_enabled = torch.is_grad_enabled
_autocast_enabled = torch.is_autocast_enabled
_Watched = tuple[dict[str, Any], str, Any]  # dict, key, the object that must be there


class Quick:
    """A kernel call prepared for one module and one dtype of x.

    hooks     the number of the next hook in the process; the other fields are as `cpu.holds` takes them:
    watched   attributes, children and parameters that must still be these.
    bare      children whose class must be the same and whose forward not be patched.
    calls     where each parameter lies, and how.
    limit     most tokens for which our kernels are by rule no slower than PyTorch's ops.
    """

    __slots__ = ("bare", "call", "calls", "dtype", "forward", "hooks", "kind", "limit", "sizes", "watched", "width")

    def __init__(
        self,
        call: Any,
        x: Tensor,
        weight: Tensor | None,
        watched: list[_Watched],
        bare: list[nn.Module] | None = None,
        module: Any = None,
        limit: int | None = None,
        questions: Sequence[tuple[Any, Any]] | None = None,
    ) -> None:
        """weight  the first one, by which the limit goes if none is given.
        questions  (method, answer) pairs to hold the parameters to; default: that each lies where and as it does."""
        self.call, self.dtype, self.width = call, x.dtype, x.shape[-1]
        self.kind = getattr(type(module), "_fanfold_original", None)
        self.forward = getattr(self.kind, "forward", None)
        self.limit = cpu.torch_limit(x.dtype, weight)[0] if limit is None else limit  # type: ignore[arg-type]
        places = {id(place): place for place, _, value in watched if isinstance(value, (nn.Module, Tensor))}
        if questions is None:
            parameters = [value for _, _, value in watched if isinstance(value, Tensor)]
            questions = [(f, f()) for p in parameters for f in _questions(p)]
        self.hooks = RemovableHandle.next_id
        self.sizes = tuple(x for place in places.values() for x in (place, len(place)))
        self.watched = tuple(x for triple in watched for x in triple)
        self.bare = tuple(x for m in bare or () for x in (m, type(m), m.__dict__))
        self.calls = tuple(x for pair in questions for x in pair)

    def fits(self, x: Any) -> bool:
        """Whether x and the surroundings are of the kind that was prepared for: plain, contiguous, no autograd."""
        # A negative view (of a conjugate) is never contiguous: its stride is 2. Hence no width of 1, see `preparable`.
        return (
            type(x) is Tensor
            and x.dtype is self.dtype
            and x.size(-1) == self.width
            and x.is_cpu
            and x.is_contiguous()
            and torch_ops.transform_active() is None
            and (x.data_ptr() != 0 or x.numel() == 0)
            and not _grad_enabled()
            and not _autocast_enabled("cpu")
        )

    def holds(self) -> bool:
        """Whether nothing has been put in since the thorough check."""
        # Every hook in the process, global ones included, takes its number from this counter.
        if RemovableHandle.next_id != self.hooks or (self.kind is not None and self.kind.forward is not self.forward):
            return False
        return cpu.holds(self.sizes, self.watched, self.bare, self.calls)
