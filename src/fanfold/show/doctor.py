"""`fanfold doctor`: what is installed, what this machine can do, and a second's proof that the kernels are right."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from typing import Any

from . import machine, output
from .output import number, table

PACKAGES = ("fanfold", "torch", "transformers", "accelerate", "numpy", "safetensors", "gguf", "typer", "rich")
# (d_model, d_ff): multiples of the vector lengths, a part of one left over, and no multiple at all
_SIZES = ((64, 160), (32, 88), (65, 131))
_TOKENS = (1, 40)  # decode and prefill take different paths through the kernels


def doctor() -> dict[str, Any]:
    """Everything the verb reports, as plain values; "ok" is whether the self-test passed."""
    import torch

    from ..kernels import cpu, dispatch

    tests = list(_self_test())
    free = machine.available_memory()
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "processor": machine.processor(),
        "system": platform.platform(),
        "available_memory": free,
        "isa": {"found": _isas(), "used": cpu.isa() if _isas() else None},
        "threads": torch.get_num_threads(),
        "openmp_runtimes": machine.openmp_runtimes(),
        "environment": {k: os.environ[k] for k in sorted(os.environ) if k.startswith("FANFOLD_")},
        "backends": {name: reason or "usable" for name, reason in dispatch.backends().items()},
        "self_test": tests,
        "ok": all(t["ok"] for t in tests),
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _isas() -> list[str]:
    """Instruction sets that this build holds and this processor has, widest first."""
    try:
        from ..kernels import _cpu  # type: ignore[attr-defined]
    except ImportError:
        return []
    return list(_cpu.isas())


def _self_test() -> Iterator[dict[str, Any]]:
    """A small FFN on every usable backend, instruction set and dtype, held to the tolerance rule."""
    from ..kernels import dispatch

    for name, reason in dispatch.backends().items():
        if reason is not None:
            continue
        for isa in _isas() if name == "cpu" else [None]:
            for dtype in ("float32", "bfloat16"):
                yield _one_test(name, isa, dtype)


def _one_test(backend: str, isa: str | None, dtype: str) -> dict[str, Any]:
    result: dict[str, Any] = {"backend": backend, "isa": isa, "dtype": dtype}
    kept = os.environ.get("FANFOLD_ISA")
    if isa is not None:
        os.environ["FANFOLD_ISA"] = isa
    try:
        ratio = max(_ratio(backend, dtype, size, tokens) for size in _SIZES for tokens in _TOKENS)
        return result | {"ok": ratio <= 1, "ratio": ratio, "reason": ""}
    except Exception as error:  # a broken build may fail in any way; the doctor has to say so, not to die of it
        return result | {"ok": False, "ratio": None, "reason": f"{type(error).__name__}: {error}"}
    finally:
        if kept is None:
            os.environ.pop("FANFOLD_ISA", None)
        else:
            os.environ["FANFOLD_ISA"] = kept


def _ratio(backend: str, dtype: str, size: tuple[int, int], tokens: int) -> float:
    """Error of the backend as a share of what the rule allows."""
    import torch

    from .. import numerics, reference
    from ..kernels import dispatch
    from ..kernels import torch as eager
    from ..spec import Spec

    target = getattr(torch, dtype)
    spec = Spec(d_model=size[0], d_ff=size[1], activation="silu", gated=True)
    weights = numerics.random_weights(spec, make=lambda a: torch.tensor(a).to(target))
    x = torch.randn(tokens, spec.d_model, generator=torch.Generator().manual_seed(0)).to(target)
    with torch.no_grad():
        y, torch_y = dispatch.run(x, weights, backend), eager.forward(x, weights)
    return numerics.compare(y, reference.forward(x, weights), torch_y).ratio


def show(found: dict[str, Any]) -> None:
    """Print the doctor's findings for people."""
    runtimes = found["openmp_runtimes"]
    rows = [[name, version] for name, version in found["versions"].items()]
    rows += [
        ["processor", found["processor"]],
        ["system", found["system"]],
        [
            "available memory",
            "unknown" if found["available_memory"] is None else output.size(found["available_memory"]),
        ],
        ["instruction sets", ", ".join(found["isa"]["found"]) or "none: the C++ core is not built"],
        ["used", str(found["isa"]["used"])],
        ["threads", str(found["threads"])],
        ["OpenMP runtimes", "\n".join(runtimes) or "none seen"],
        *([name, value] for name, value in found["environment"].items()),
        *([f"backend {name}", state] for name, state in found["backends"].items()),
    ]
    table("", ["fanfold doctor", ""], rows, numbers=False)
    if len(runtimes) > 1:
        print("More than one OpenMP runtime is loaded: their thread pools spin against each other and slow both down.")
    tests = [
        [t["backend"], t["isa"] or "-", t["dtype"], "ok" if t["ok"] else "FAILED", _ratio_text(t)]
        for t in found["self_test"]
    ]
    table("self-test", ["backend", "isa", "dtype", "", "error / allowed"], tests, numbers=False)


def _ratio_text(test: dict[str, Any]) -> str:
    return test["reason"] if test["ratio"] is None else number(test["ratio"])
