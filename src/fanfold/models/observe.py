"""One run of a model: what its linears read, which of them it reaches, and whether its code uses a weight by itself.

A packed linear's parameter is a stub. Code that asks it for its dtype is well served; code that computes with it, past
the linear's own forward (F.linear(x, self.router.weight), torch's attention), is not: such a linear stays as it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .inputs import placed
from .linears import matrix, quiet

EVEN, LARGEST = 192, 64  # tokens kept of what a linear reads: evenly spread, and those with the largest values
# What code may ask of a parameter without computing with it: methods and attributes.
_ASKED = {
    *("size", "stride", "dim", "ndimension", "numel", "nelement", "data_ptr", "element_size", "get_device"),
    *("is_floating_point", "is_complex", "is_contiguous", "is_inference", "is_neg", "is_conj", "storage_offset"),
    *("__len__", "__hash__", "__repr__", "requires_grad_"),
}
_READ = {
    *("dtype", "device", "shape", "ndim", "layout", "requires_grad", "is_leaf", "is_cpu", "is_cuda", "is_meta"),
    *("is_mps", "is_xla", "is_quantized", "is_sparse", "is_nested", "itemsize", "nbytes", "names", "grad", "grad_fn"),
    *("_version", "_backward_hooks", "_base"),
}


@dataclasses.dataclass
class Seen:
    """What one run showed.

    inputs    {path: [T, n_in] float32}: tokens that each asked linear has read.
    argmax    next-token predictions [tokens] of a causal language model, else None.
    finite    whether the outputs are free of NaN.
    reached   paths of the watched linears that were called.
    users     {path: function} of the watched linears whose weight other code than their own computed with.
    error     why the run failed, or "".
    """

    inputs: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    argmax: Tensor | None = None
    finite: bool = True
    reached: set[str] = dataclasses.field(default_factory=set)
    users: dict[str, str] = dataclasses.field(default_factory=dict)
    error: str = ""


def batch(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of a call from what a user gives as calibration.

    given  a dict of keyword arguments; token ids as a list, an array or an integer tensor, [tokens] or [batch, tokens];
           a float tensor; or a tuple of positional arguments.  Raises ValueError for anything else.
    """
    if isinstance(given, dict):
        return (), dict(given)
    if isinstance(given, tuple):
        return given, {}
    if isinstance(given, Sequence) and not isinstance(given, str):
        given = torch.tensor(given)
    elif not isinstance(given, Tensor) and hasattr(given, "__array__"):
        given = torch.as_tensor(given)
    if not isinstance(given, Tensor):
        kind = type(given).__name__
        raise ValueError(
            f"calibration is a {kind}, expected token ids, a tensor, a tuple, or a dict for model(**batch)"
        )
    if given.is_floating_point():
        return (given,), {}
    return (), {"input_ids": given[None] if given.dim() == 1 else given}


@dataclasses.dataclass
class Watched:
    """A linear to watch: its weight, and the modules whose forward may compute with it."""

    weight: Tensor
    by: list[nn.Module]


def observe(model: nn.Module, given: Any, paths: Iterable[str] = (), watched: dict[str, Watched] | None = None) -> Seen:
    """Run `model` once, in eval mode, without its hooks and without gradients.

    paths    linears whose inputs are wanted.
    watched  {path: Watched}: say which are reached, and whose weights other code computes with.
    """
    seen = Seen()
    args, kwargs = batch(given)
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    with torch.no_grad(), quiet(model), contextlib.ExitStack() as stack:
        keep = _Keeper(seen.inputs)
        for path in paths:
            linear = model.get_submodule(path)
            linear.register_forward_pre_hook(keep.hook(path, matrix(linear).shape[1]), with_kwargs=True)
        if watched:
            stack.enter_context(_Watch(model, watched, seen))
        try:
            out = model(*(placed(v, like) for v in args), **{k: placed(v, like) for k, v in kwargs.items()})
        except Exception as failure:  # somebody else's code: whatever it raises is what we report
            text = str(failure).splitlines()[0] if str(failure) else ""
            seen.error = f"{type(failure).__name__}: {text}"
            return seen
    tensors = list(_tensors(out))
    seen.finite = not any(bool(t.isnan().any()) for t in tensors)
    logits = getattr(out, "logits", None)
    if _is_causal(model) and isinstance(logits, Tensor) and logits.dim() == 3:
        seen.argmax = logits.argmax(-1).reshape(-1)
    return seen


def _is_causal(model: nn.Module) -> bool:
    names = [cls.__name__ for cls in type(model).__mro__]
    return any(n.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for n in names)


def _tensors(out: Any) -> Iterable[Tensor]:
    if isinstance(out, Tensor):
        if out.is_floating_point():
            yield out
    elif isinstance(out, (list, tuple)):
        for value in out:
            yield from _tensors(value)
    elif isinstance(out, dict):
        yield from _tensors(list(out.values()))


class _Keeper:
    """Keeps some tokens of what linears read; the same tensor read by several is kept once."""

    def __init__(self, inputs: dict[str, Tensor]) -> None:
        self.inputs = inputs
        self._last: tuple[Any, Tensor] | None = None

    def hook(self, path: str, width: int) -> Any:
        def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else next(iter(kwargs.values()), None)
            if not isinstance(x, Tensor) or x.dim() < 1 or x.shape[-1] != width or not x.numel():
                return
            if self._last is None or self._last[0] is not x:
                self._last = (x, _some(x.detach().reshape(-1, width).float()))
            rows = self._last[1]
            before = self.inputs.get(path)
            self.inputs[path] = rows if before is None else _some(torch.cat([before, rows]))

        return keep


def _some(x_TK: Tensor) -> Tensor:
    """At most EVEN + LARGEST tokens: outliers decide, so those with the largest values are always among them."""
    if len(x_TK) <= EVEN + LARGEST:
        return x_TK.clone()
    top = x_TK.abs().amax(1).topk(LARGEST).indices
    even = torch.linspace(0, len(x_TK) - 1, EVEN).long()
    return x_TK[torch.unique(torch.cat([top, even]))]


class _Watch(TorchFunctionMode):
    """Notes every function that is given a watched weight, apart from questions about its shape and kind, unless a
    module that may use it is running."""

    def __init__(self, model: nn.Module, watched: dict[str, Watched], seen: Seen) -> None:
        super().__init__()
        self.seen = seen
        self.paths: dict[int, list[str]] = {}
        self.allowed: dict[int, set[nn.Module]] = {}
        self.running: list[nn.Module] = []
        names = {model.get_submodule(path): path for path in watched}
        for path, w in watched.items():
            self.paths.setdefault(id(w.weight), []).append(path)
            self.allowed.setdefault(id(w.weight), set()).update(w.by)
        for module in {m for w in watched.values() for m in w.by}:
            module.register_forward_pre_hook(self._enter(names.get(module)), prepend=True)
            module.register_forward_hook(self._leave)

    def _enter(self, path: str | None) -> Any:
        def enter(module: nn.Module, _: Any) -> None:
            self.running.append(module)
            if path is not None:
                self.seen.reached.add(path)

        return enter

    def _leave(self, *_: Any) -> None:
        self.running.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _only_asks(func):
            for value in (*args, *(kwargs or {}).values()):
                paths = self.paths.get(id(value))
                if paths and self.allowed[id(value)].isdisjoint(self.running):
                    self.seen.users.update(dict.fromkeys(paths, _name(func)))
        return func(*args, **(kwargs or {}))


def _only_asks(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name in _ASKED or (name == "__get__" and getattr(func.__self__, "__name__", "") in _READ)


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return getattr(func.__self__, "__name__", name) if name == "__get__" else name
