"""One call of `swap`: its options, and what a run of the model before it has shown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import dispatch
from .find import Found
from .inputs import default_inputs
from .linears import is_linear
from .observe import Seen, Watched, observe
from .packing import Packer, integer, release_memory
from .report import SwapReport, SwapRow
from .swapped import is_swapped

Owner = tuple[str, nn.Module, str]  # path, module, name of a parameter
# torch's own modules that read the weights of linears below them
_READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


class Job:
    """The options of one swap.

    before  what a run of the model as it was has shown; None where none was needed or possible.
    inputs  {path: [T, n_in]}: what its linears read, if activations are to be chosen by that.
    """

    def __init__(
        self,
        model: nn.Module,
        format: str | None,
        backend: str,
        verify: bool,
        activations: str,
        linears: str,
        keep: bool,
        given: Any,
        save: str | None = None,
    ) -> None:
        self.model, self.format, self.backend, self.verify = model, format, backend, verify
        self.activations, self.linears, self.given = activations, linears, given
        self.save = save  # of FFNs in training; None: not asked for
        self.packer = Packer(format, keep, backend) if format else None
        self.inputs: dict[str, Tensor] = {}
        self.before: Seen | None = None
        self.prepacked = False  # whether the FFNs come packed, with activations chosen
        self._tried: Any = None  # what the model was run with
        self._held = _holders(model)

    def look(self, found: list[Found]) -> None:
        """Run the model as it is, if that is of use. Raises ValueError if it does not run on the calibration inputs."""
        if self.format is None and self.linears == "ffn":
            return
        self._tried = self.given if self.given is not None else default_inputs(self.model)
        if self._tried is None:
            return
        watched = {path: self._watched(self.model.get_submodule(path), None) for path in other_linears(self.model, ())}
        for item in found:
            module = self.model.get_submodule(item.path) if item.kind == "module" else None
            for path in item.projections.values() if item.spec else ():
                watched[path] = self._watched(self.model.get_submodule(path), module)
        if self.linears != "all":
            paths = [p for f in found if f.spec for p in f.projections.values()]
            watched = {path: watched[path] for path in paths}
        keep = self.given is not None and integer(self.format) and self.activations == "auto"
        self.before = observe(self.model, self._tried, watched if keep else (), watched)
        if self.before.error and self.given is not None:
            raise ValueError(f"the model does not run on the calibration inputs: {self.before.error}")
        self.inputs = self.before.inputs

    def _watched(self, linear: Any, ffn: nn.Module | None) -> Watched:
        weight = linear._parameters.get("weight")
        by = [module for _, module, _ in self._held.get(id(weight), [])] or [linear]
        return Watched(weight if weight is not None else linear.weight, by if ffn is None else [*by, ffn])

    def reader(self, path: str) -> str | None:
        """Why a linear's weight cannot be a stub: other code than its own forward computes with it. None if it can, as
        far as a run of the model has shown."""
        parts = path.split(".")
        for end in range(len(parts)):
            above = self.model.get_submodule(".".join(parts[:end]))
            if isinstance(above, _READERS):
                return f"torch's {type(above).__name__} reads its weight by itself"
        user = self.before.users.get(path) if self.before is not None else None
        return user and f"the model's own code computes with its weight by itself ({user}), so it cannot be packed"

    def unseen(self, path: str) -> str | None:
        """Why it is not known whether other code uses a linear's weight, or None."""
        if self.before is None:
            return (
                "whether other code uses its weight was not tried, without inputs to run the model with: pass inputs="
            )
        if self.before.error:
            return f"whether other code uses its weight was not tried: the model does not run ({self.before.error})"
        return None if path in self.before.reached else "a run of the model does not reach it"

    def owner(self, linear: Any) -> Owner | None:
        """Who goes on holding a linear's weight because it is no linear itself: a tied embedding; or None."""
        places = self._held.get(id(linear._parameters.get("weight")), [])
        return next((place for place in places if place[1] is not linear and not is_linear(place[1])), None)

    def sample(self, path: str) -> Tensor | None:
        """A few of the model's own inputs of a linear, to verify with."""
        rows = self.inputs.get(path)
        return None if rows is None else rows[torch.isfinite(rows).all(1)][:16]

    def compare(self, report: SwapReport) -> list[SwapRow]:
        """Run the swapped model; fill in what changed. -> the rows to put back, if NaN has come up."""
        self.inputs.clear()
        report.calibrated = self.given is not None and integer(self.format) and self.activations == "auto"
        if self.before is None or self.before.error:
            return []
        after = observe(self.model, self._tried)
        if after.error or (self.before.finite and not after.finite):
            said = after.error or "NaN came up where there was none before"
            report.notes.append(f"the swapped model does not run as before, so it was put back: {said}")
            return [row for row in report.rows if row.status == "swapped"]
        if self.given is not None and self.before.argmax is not None and after.argmax is not None:
            report.argmax_changes = int((self.before.argmax != after.argmax).sum())
            report.argmax_tokens = self.before.argmax.numel()
        return []

    def finish(self, report: SwapReport) -> None:
        """Give memory back, and say what was not measured."""
        if self.packer is not None:
            release_memory()
        chosen = self.prepacked or self.activations != "auto" or dispatch.resolve(self.backend) == "torch"
        if integer(self.format) and not chosen and not report.calibrated:
            report.notes.append(
                "not calibrated: activations are int8 everywhere; calibration=… measures which layers stand that"
            )


def other_linears(model: nn.Module, taken: Iterable[str]) -> dict[str, nn.Module]:
    """{path: linear} of those that no swapped FFN holds, in tree order."""
    used = {id(model.get_submodule(path)) for path in taken}
    found = ((path, m) for path, m in model.named_modules() if is_linear(m) and not is_swapped(m))
    return {path: m for path, m in found if id(m) not in used}


def _holders(model: nn.Module) -> dict[int, list[Owner]]:
    """{id of a parameter: every (path, module, name) that holds it}."""
    out: dict[int, list[Owner]] = {}
    for path, module in model.named_modules():
        for name, p in module._parameters.items():
            if p is not None:
                out.setdefault(id(p), []).append((path, module, name))
    return out
