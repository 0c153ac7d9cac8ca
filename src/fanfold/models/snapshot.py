"""What a module tree looked like when it was identified, and whether it still does.

The kernels replace the *code* of a module; the code may read anything that hangs on it: its attributes and those of its
children (a slope, a flag, an activation function), parameters beside the linears', the training flag of a dropout. If
any of that changes, the module's own code has to run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_SCALARS = (int, float, str, bool)
# Torch's own entries in a module's __dict__, and what says nothing about its function.
_COMPILER = ("_compiled_call_impl", "_is_torch_compile")
_INTERNAL = {*nn.Module().__dict__, *_COMPILER, "training", "_fanfold", "_is_hf_initialized"}


def attributes(module: nn.Module) -> dict[str, Any]:
    """The instance's own entries, private ones too: functions, flags, widths."""
    return {k: v for k, v in module.__dict__.items() if k not in _INTERNAL}


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and type(a) in _SCALARS and a == b)


# Tensors of up to so many numbers are compared number by number: no way to write to them goes unseen.
_COMPARED = 4096


class Constant:
    """A parameter or buffer beside the linears', which the module's code reads: an activation's slope, a mask."""

    def __init__(self, name: str, module: nn.Module, tensor: Tensor) -> None:
        self.name, self.module, self.tensor = name, module, tensor
        self.value = tensor.detach().clone() if tensor.numel() <= _COMPARED else None
        self._mark: tuple[Any, ...] | None = mark(tensor)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mark": None, "same": not self.changed()}  # a copy counts its writes anew

    def __setstate__(self, state: dict[str, Any]) -> None:
        same = state.pop("same")
        self.__dict__.update(state)
        self._mark = mark(self.tensor) if same else None

    def now(self) -> Tensor | None:
        """What the module holds under this name today."""
        own = self.module._parameters.get(self.name)
        return self.module._buffers.get(self.name) if own is None else own

    def changed(self) -> bool:
        now = self.now()
        value = self.value
        if now is None:
            return True
        if value is None or now.device != value.device:
            return now is not self.tensor or mark(now) != self._mark
        return now.dtype != value.dtype or now.shape != value.shape or not torch.equal(now, value)


def version(t: Tensor) -> int | None:
    """How often a tensor was written to; None where that is not counted."""
    return None if t.is_inference() else t._version


def mark(t: Tensor) -> tuple[Any, ...]:
    """What changes when it is written to, as far as PyTorch counts that, or given other memory."""
    return version(t), t.data_ptr()


class Snapshot:
    """The tree below `root`: modules, classes, attributes, and tensors other than those of the linears `known`."""

    def __init__(self, root: nn.Module, known: list[nn.Module]) -> None:
        self.nodes = [(name, m, type(m), dict(m._modules), attributes(m)) for name, m in root.named_modules()]
        others = [m for _, m, *_ in self.nodes if m not in known]
        tensors = [(name, m, t) for m in others for name, t in (*m._parameters.items(), *m._buffers.items())]
        self.constants = [Constant(name, m, t) for name, m, t in tensors if t is not None]
        self.forwards: list[Any] | None = self._forwards()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "forwards": None}  # functions of classes; taken anew in the copy

    def _forwards(self) -> list[Any]:
        return [getattr(kind, "_fanfold_original", kind).forward for _, _, kind, *_ in self.nodes]

    def change(self) -> str | None:
        """What is no longer as it was, or None."""
        if self.forwards is None:
            self.forwards = self._forwards()
        for (name, m, kind, children, own), forward in zip(self.nodes, self.forwards):
            if type(m) is not kind:
                return f"{name or 'the module'} has become a {type(m).__name__}"
            if len(m._modules) != len(children):
                return f"the children of {name or 'the module'} have changed"
            for child, value in children.items():
                if m._modules.get(child) is not value:
                    return f"{child} was exchanged (an adapter?)"
            if name and (m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks):
                return f"{name} has a hook"
            if getattr(kind, "_fanfold_original", kind).forward is not forward or "forward" in m.__dict__:
                return f"the forward of {name or 'the module'} is patched"
            now = attributes(m)
            if now.keys() != own.keys() or not all(_same(now[k], v) for k, v in own.items()):
                changed = next(k for k in {**now, **own} if k not in now or k not in own or not _same(now[k], own[k]))
                return f"attribute {changed} of {name or 'the module'} has changed"
        for constant in self.constants:
            if constant.changed():
                return f"{constant.name}, which its code reads, has changed"
        return None

    def learning(self) -> list[str]:
        """Parameters beside the linears' that want a gradient: our derivative knows of none."""
        held = ((c.name, c.now()) for c in self.constants)
        return [name for name, tensor in held if tensor is not None and tensor.requires_grad]

    def dropping(self) -> bool:
        """Whether any module of the tree is in training mode."""
        return any(m.training for _, m, *_ in self.nodes)

    def watched(self, dropout: bool) -> list[tuple[dict[str, Any], str, Any]]:
        """The same as (dict, key, value) for `Quick`; with dropout also that the modules below stay in eval mode."""
        out: list[tuple[dict[str, Any], str, Any]] = []
        for name, m, _, children, _ in self.nodes:
            out += [(m._modules, child, value) for child, value in children.items()]
            out += [(m.__dict__, key, value) for key, value in attributes(m).items()]
            if dropout and name:
                out.append((m.__dict__, "training", False))
        return out
