"""One run of a model with every module watched: what each read and gave, in order, and how blocks were called."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from ..models.find import Found


@dataclasses.dataclass
class Event:
    """One call of a module that maps one tensor to one: copies of both in the dtype of the model."""

    path: str
    module: nn.Module
    x: Tensor
    y: Tensor


def outside(root: nn.Module, founds: list[Found], prefix: str = "") -> dict[str, nn.Module]:
    """Modules below `root` (at path `prefix`) but not inside an FFN: a swapped one would step aside for a hook."""
    inner = tuple(f"{f.path}." for f in founds if f.kind == "module" and f.path)
    named = {(f"{prefix}.{n}" if prefix and n else prefix or n): m for n, m in root.named_modules()}
    whole = any(f.kind == "module" and not f.path for f in founds)
    return {} if whole else {path: m for path, m in named.items() if not f"{path}".startswith(inner)}


@contextlib.contextmanager
def events(modules: dict[str, nn.Module]) -> Iterator[list[Event]]:
    """Every call of `modules` from one tensor to one, while this lasts, in the order in which they end."""
    seen: list[Event] = []
    handles: list[Any] = []

    def watch(path: str) -> None:
        given: list[Tensor | None] = []

        def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
            given.append(None if x is None else x.detach().clone())

        def leave(module: nn.Module, _args: Any, out: Any) -> None:
            x = given.pop()
            if x is not None and isinstance(out, Tensor):
                seen.append(Event(path, module, x, out.detach().clone()))

        handles.append(modules[path].register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(modules[path].register_forward_hook(leave))

    try:
        for path in modules:
            watch(path)
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def calls(model: nn.Module, paths: set[str]) -> Iterator[dict[tuple[str, int], tuple[tuple[Any, ...], dict[str, Any]]]]:
    """{(path, which call): (args, kwargs)} of the modules at `paths`, copied before they run, while this lasts."""
    seen: dict[tuple[str, int], tuple[tuple[Any, ...], dict[str, Any]]] = {}
    count: Counter[str] = Counter()
    handles: list[Any] = []

    def recorder(path: str) -> Callable[..., None]:
        def record(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen[(path, count[path])] = (duplicated(args), duplicated(kwargs))
            count[path] += 1

        return record

    try:
        handles += [
            model.get_submodule(path).register_forward_pre_hook(recorder(path), with_kwargs=True) for path in paths
        ]
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def duplicated(value: Any) -> Any:
    """The same arguments with tensors of their own, so that code that writes in place writes elsewhere."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (tuple, list):
        return type(value)(duplicated(v) for v in value)
    return {k: duplicated(v) for k, v in value.items()} if type(value) is dict else value


@contextlib.contextmanager
def added(module: nn.Module, change: Tensor) -> Iterator[list[Tensor]]:
    """The output of `module` with `change` added, while this lasts; -> what was really added, after rounding."""
    real: list[Tensor] = []

    def add(_module: nn.Module, _args: Any, y: Tensor) -> Tensor:
        changed = y + change.reshape(y.shape).to(y)
        real.append((changed.float() - y.float()).detach())
        return changed

    handle = module.register_forward_hook(add)
    try:
        yield real
    finally:
        handle.remove()
