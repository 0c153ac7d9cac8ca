"""The quick path of a swapped module: everything checked once, then only what can have changed since.

A call of a decoding model streams megabytes of weights through the caches, so by the next call every Python object that
it touches comes from far away: a thorough check that takes 10 us when repeated takes 60 us in use (measured on
SmolLM2, 2026-11). A `Quick` holds what one thorough check has found, and `holds` looks at as few objects as will show a
change: no hook registered anywhere since, the same children, types, attributes and parameters at the same addresses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..kernels import cpu

_Watched = tuple[dict[str, Any], str, Any]  # dict, key, the object that must be there


class Quick:
    """A kernel call prepared for one module and one dtype of x.

    watched   (dict, key, value): attributes, children and parameters that must still be these.
    bare      (module, type, instance dict): children whose class must be the same and whose forward not be patched.
    pointers  (parameter, address); sizes  (dict of children or parameters, how many).
    limit     most tokens for which our kernels are by rule no slower than PyTorch's ops.
    """

    __slots__ = ("bare", "call", "dtype", "hooks", "limit", "pointers", "sizes", "watched", "width")

    def __init__(
        self, call: Any, x: Tensor, weight: Tensor, watched: list[_Watched], bare: list[nn.Module] | None = None
    ) -> None:
        self.call, self.dtype, self.width = call, x.dtype, x.shape[-1]
        self.limit, _ = cpu.torch_limit(x.dtype, weight)
        places = {id(place): place for place, _, value in watched if isinstance(value, (nn.Module, Tensor))}
        self.sizes = tuple((place, len(place)) for place in places.values())
        self.hooks = RemovableHandle.next_id
        self.watched = tuple(watched)
        self.bare = tuple((m, type(m), m.__dict__) for m in bare or ())
        parameters = [value for _, _, value in watched if isinstance(value, Tensor)]
        self.pointers = tuple((p, p.data_ptr()) for p in parameters)

    def fits(self, x: Any) -> bool:
        """Whether x and the surroundings are of the kind that was prepared for: plain, contiguous, no autograd."""
        return (
            type(x) is Tensor
            and x.dtype is self.dtype
            and x.shape[-1:] == (self.width,)
            and x.is_cpu
            and not torch.is_grad_enabled()
            and x.is_contiguous()
            and not x.is_neg()
            and not torch.is_autocast_enabled("cpu")
        )

    def holds(self) -> bool:
        """Whether nothing has been put in since the thorough check."""
        # Every hook in the process, global ones included, takes its number from this counter.
        if RemovableHandle.next_id != self.hooks:
            return False
        for place, size in self.sizes:
            if len(place) != size:
                return False
        for place, key, value in self.watched:
            if place.get(key) is not value:
                return False
        for module, kind, own in self.bare:
            if type(module) is not kind or "forward" in own:
                return False
        return all(parameter.data_ptr() == address for parameter, address in self.pointers)
