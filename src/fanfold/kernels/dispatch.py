"""Which backend computes an FFN: a named one runs or raises, `auto` picks and says what it picked.

Backends: `cpu` (our C++ kernels) and `torch` (plain PyTorch ops). FANFOLD_BACKEND replaces `auto` everywhere.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..weights import Weights
from . import cpu, packed
from . import torch as torch_ops

BACKENDS: dict[str, ModuleType] = {"cpu": cpu, "torch": torch_ops}

_last: str | None = None
_compiled_calls = 0  # those that C had made of its own accord when `_last` was taken down


class BackendError(ValueError):
    """A backend was named that cannot run this call; the message says why."""


@dataclass(frozen=True)
class Candidate:
    """One backend's answer in `explain`: whether it would run this call under the chosen setting, and why (not)."""

    backend: str
    runs: bool
    reason: str


def backends() -> dict[str, str | None]:
    """{name: None if usable on this machine, else the reason}."""
    return {"cpu": cpu.available(), "torch": None}


def resolve(backend: str) -> str:
    """`backend` checked against the known names, `auto` replaced by FANFOLD_BACKEND if that is set."""
    origin = "backend"
    if backend == "auto":
        backend = os.environ.get("FANFOLD_BACKEND") or "auto"
        origin = "FANFOLD_BACKEND"
    if backend != "auto" and backend not in BACKENDS:
        raise BackendError(f"{origin}={backend!r} is not known; known: auto, {', '.join(BACKENDS)}")
    return backend


def cpu_why_not(x: Any, weights: Weights) -> str | None:
    """None if the cpu backend can run weights in place or packed ones, else the reason."""
    return packed.why_not(x, weights) if packed.is_packed(weights) else cpu.why_not(x, weights)


def _cpu_attempt(x: Tensor, weights: Weights) -> Tensor | str:
    if packed.is_packed(weights):
        return packed.why_not(x, weights) or packed.forward(x, weights)
    return cpu.attempt(x, weights)


def _cpu_forward(x: Tensor, weights: Weights) -> Tensor:
    return packed.forward(x, weights) if packed.is_packed(weights) else cpu.forward(x, weights)


def needs_grad(x: Tensor, weights: Weights) -> bool:
    """Whether autograd would record this call."""
    if not torch.is_grad_enabled():
        return False
    return any(getattr(t, "requires_grad", False) for t in (x, *(value for _, value in weights.items())))


def _auto_objection(x: Tensor, weights: Weights) -> str | None:
    """Why `auto` would not take the cpu backend although it could run."""
    if needs_grad(x, weights):
        return "gradients are needed: PyTorch's own ops keep what backward needs, the cpu kernel would recompute it"
    return None if packed.is_packed(weights) else cpu.slower_than_torch(x, weights.up)


def choose(x: Tensor, weights: Weights, backend: str = "auto") -> tuple[str, str]:
    """(name of the backend that runs this call, reason). Raises BackendError if the named one cannot."""
    backend = resolve(backend)
    seen = torch_ops.transform_active()
    if backend != "auto":
        reason = (seen or cpu_why_not(x, weights)) if backend == "cpu" else torch_ops.why_not(x, weights)
        if reason is not None:
            raise BackendError(f"backend {backend!r} cannot run this call: {reason}")
        return backend, "named"
    reason = seen or cpu_why_not(x, weights) or _auto_objection(x, weights)
    if reason is None:
        return "cpu", "first choice on a CPU"
    fallback = torch_ops.why_not(x, weights)
    if fallback is not None:
        raise BackendError(f"no backend can run this call: cpu: {reason}; torch: {fallback}")
    return "torch", f"cpu: {reason}"


def run(x: Tensor, weights: Weights, backend: str) -> Tensor:
    """Choose a backend, record it, compute. No autograd through the cpu backend: that is `op.ffn`'s part."""
    backend = resolve(backend)
    if backend == "cpu" or (backend == "auto" and _auto_objection(x, weights) is None):
        y = attempt(x, weights)
        if not isinstance(y, str):
            return y
    name, _ = choose(x, weights, backend)
    record(name)
    return _cpu_forward(x, weights) if name == "cpu" else torch_ops.forward(x, weights)


def attempt(x: Tensor, weights: Weights) -> Tensor | str:
    """The cpu backend's result, or the reason why it cannot run this call."""
    y = torch_ops.transform_active() or _cpu_attempt(x, weights)
    if not isinstance(y, str):
        record("cpu")
    return y


def run_seen(x: Tensor, weights: Weights, backend: str) -> Tensor:
    """`run` inside our own operator: PyTorch's transforms have already seen the call."""
    if backend == "cpu" or (backend == "auto" and _auto_objection(x, weights) is None):
        y = _cpu_attempt(x, weights)
        if not isinstance(y, str):
            record("cpu")
            return y
        if backend == "cpu":
            raise BackendError(f"backend 'cpu' cannot run this call: {y}")
    record("torch")
    return torch_ops.forward(x, weights)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias on the cpu backend, which the caller has found able to run it."""
    record("cpu")
    return cpu.linear(x, weight, bias)


def record(name: str) -> None:
    """Say that a call ran on backend `name`."""
    global _last, _compiled_calls
    _last = name
    if name != "cpu":
        _compiled_calls = cpu.compiled_calls()


def last_backend() -> str | None:
    """The backend that the newest call in this process ran on (None before the first)."""
    return _last if cpu.compiled_calls() == _compiled_calls else "cpu"


def explain(x: Any, weights: Weights, backend: str = "auto") -> list[Candidate]:
    """Every backend with whether it would run `ffn(x, weights, backend)`, and why or why not. Computes nothing."""
    try:
        chosen, why = choose(x, weights, backend)
    except BackendError as error:
        chosen, why = None, str(error)
    out = []
    for name, module in BACKENDS.items():
        reason = cpu_why_not(x, weights) if name == "cpu" else module.why_not(x, weights)
        if name == chosen:
            out.append(Candidate(name, True, why))
        elif reason is not None:
            out.append(Candidate(name, False, reason))
        elif name == "cpu" and resolve(backend) == "auto":
            out.append(Candidate(name, False, _auto_objection(x, weights) or why))
        else:
            out.append(Candidate(name, False, f"could run; {chosen} comes first"))
    return out
