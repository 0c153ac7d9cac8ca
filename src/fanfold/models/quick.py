"""The quick path of a swapped module: everything checked once, then only what can have changed since.

A call of a decoding model streams megabytes of weights through the caches, so by the next call every Python object that
it touches comes from far away: a thorough check that takes 10 us when repeated takes 60 us in use (measured on
SmolLM2, 2026-11). A `Quick` holds what one thorough check has found, and `cpu.run_plan` looks at as few objects as will
show a change: no hook registered anywhere since, the same children, types, attributes and parameters where they were.

Linears that are given one and the same x one after the other (attention's q, k and v) are computed together by the
first of them, for a few tokens; each then makes its own checks and takes what is there for it, if x is that very tensor
and nobody has written to x, to the matrix or to its bias meanwhile.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
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
    return x.dim() > 0 and x.shape[-1] > 1 and not torch.is_grad_enabled()


_Watched = tuple[dict[str, Any], str, Any]  # dict, key, the object that must be there
NO_LIMIT = 1 << 62
# What may differ now and be as it was at the next call: (callable, answer) pairs.
_SURROUNDINGS = (
    *(torch.is_grad_enabled, False, functools.partial(torch.is_autocast_enabled, "cpu"), False),
    *torch_ops.NO_TRANSFORM,
)


class Quick:
    """A kernel call prepared for one module and one dtype of x.

    plan  what `cpu.run_plan` looks at, in the order of csrc/quick.cpp:
        the kernel with its weights bound, the type and dtype of x, its inputs and outputs per token;
        most tokens, or what says of a number of tokens whether our kernels are the better choice;
        surroundings  (callable, answer, …)
        sizes         (dict, length, …)
        watched       (dict, key, value, …): attributes, children and parameters that must still be these
        bare          (module, type, its dict, …): children of the same class, their forward not patched
        attributes    (object, name, value, …)
        calls         (callable, answer, …): where each parameter lies, and how
        places        (address, the 8 bytes there, …) that nobody may have written to
        letters       [] or [x, its address, its version, y, the tensors read for it, their versions]: what an earlier
                      product of x has left for this one
        besides       [(kernel, outputs, letters, the tensors it reads), …] to be computed in the same pass.
    """

    __slots__ = ("__weakref__", "plan")

    def __init__(
        self,
        kernel: Any,
        x: Tensor,
        outputs: int,
        watched: list[_Watched],
        bare: list[nn.Module] | None = None,
        module: Any = None,
        limit: int | Callable[[int], bool] = NO_LIMIT,
        questions: Sequence[tuple[Any, Any]] | None = None,
        places: Sequence[tuple[int, int] | None] = (),
    ) -> None:
        """questions  (method, answer) pairs to hold the parameters to; default: that each lies where and as it does.
        places     of stubs."""
        dicts = {id(place): place for place, _, value in watched if isinstance(value, (nn.Module, Tensor))}
        if module is not None:
            dicts[id(module._modules)] = module._modules  # also where it has no children yet
        if questions is None:
            parameters = [value for _, _, value in watched if isinstance(value, Tensor)]
            questions = [(f, f()) for p in parameters for f in _questions(p)]
        # Every hook in the process, global ones included, takes its number from this counter.
        attributes = [RemovableHandle, "next_id", RemovableHandle.next_id]
        kind = getattr(type(module), "_fanfold_original", None)
        if kind is not None:
            attributes += [kind, "forward", kind.forward]
        for below in {type(m) for m in bare or ()}:  # a patch of a class is one of all its instances
            own = getattr(below, "_fanfold_original", below)
            attributes += [own, "forward", own.forward]
        watched = [*watched, (forward_ad.__dict__, "_current_level", forward_ad._current_level)]
        self.plan = (
            *(kernel, Tensor, x.dtype, x.shape[-1], outputs, limit, torch.get_num_threads, torch.empty_like),
            _SURROUNDINGS,
            tuple(item for one in dicts.values() for item in (one, len(one))),
            tuple(item for triple in watched for item in triple),
            tuple(item for m in bare or () for item in (m, type(m), m.__dict__)),
            tuple(attributes),
            tuple(item for pair in questions for item in pair),
            tuple(item for pair in places if pair is not None for item in pair),
            *([], []),
        )


_KERNEL, _OUTPUTS, _LETTERS, _BESIDES = 0, 4, -2, -1  # in a plan
_newest: tuple[weakref.ref[Tensor], weakref.ref[Quick]] | None = None


def join(quick: Quick, x: Tensor, tensors: tuple[Tensor, ...]) -> None:
    """Have the product that was prepared just before this one compute this one as well, if it was of the same x.

    tensors  what the kernel reads: kept, as the other's next call may come after this module has gone.
    """
    global _newest
    first = _newest[1]() if _newest is not None and _newest[0]() is x else None
    if first is not None and cpu.fit_together(first.plan[_KERNEL], quick.plan[_KERNEL]):
        others = first.plan[_BESIDES]
        if len(others) < cpu.MOST_BESIDE:
            others.append((quick.plan[_KERNEL], quick.plan[_OUTPUTS], quick.plan[_LETTERS], tensors))
            return
    _newest = (weakref.ref(x), weakref.ref(quick))
