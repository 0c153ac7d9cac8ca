"""Which activations meet packed integer codes: int8, or float where int8 would cost too much."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..kernels import dispatch
from .packed_ffn import PackedFFNState
from .packing import integer
from .report import SwapRow
from .states import LinearState

CHOICES = ("auto", "int8", "float")
# gate and up are one product over the same activations
_TOGETHER = {"gate": "first", "up": "first", "gate_up": "first"}


def choose_activations(
    row: SwapRow,
    linears: dict[str, Any],
    paths: dict[str, str],
    activations: str,
    inputs: dict[str, Tensor],
    given: bool = False,
) -> None:
    """Set the activations of the packed linears {role: module} and say in the row what and why.

    activations  "int8", "float", or "auto": by `quantize.guard` on `inputs` {path: [T, n_in]}; without any int8, or
                 what packed weights that were `given` say themselves.
    """
    if not integer(row.format):
        return
    groups: dict[str, list[str]] = {}
    for role in linears:
        groups.setdefault(_TOGETHER.get(role, role), []).append(role)
    for roles in groups.values():
        if given and activations == "auto" and not any(paths[r] in inputs for r in roles):
            row.activations |= {role: linears[role]._fanfold.weight.parts[0].activations for role in roles}
            continue
        if dispatch.resolve(linears[roles[0]]._fanfold.backend) == "torch":
            kind, why = "float", "" if activations != "int8" else "PyTorch's ops have no int8 activations"
        else:
            kind, why = _chosen([linears[r] for r in roles], [paths[r] for r in roles], activations, inputs)
        for role in roles:
            weight = linears[role]._fanfold.weight
            for part in weight.parts:
                if not (weight.decided and part.activations == "float"):  # tied: float is right for both
                    part.activations = kind
            weight.decided = True
            weight.describe()
            row.activations[role] = weight.parts[0].activations
            if why:
                row.guard[role] = why


def _chosen(linears: list[Any], paths: list[str], activations: str, inputs: dict[str, Tensor]) -> tuple[str, str]:
    if activations != "auto":
        return activations, ""
    x = next((inputs[p] for p in paths if p in inputs), None)
    if x is None:
        return "int8", ""
    from ..quantize.guard import decide_together

    decision = decide_together([part for m in linears for part in m._fanfold.weight.open()], x)
    return decision.activations, decision.reason


def describe_again(states: list[LinearState]) -> None:
    """After every choice is made: what torch.compile's operators are told."""
    for state in states:
        if isinstance(state, PackedFFNState):
            state.describe()
        elif hasattr(state, "weight"):
            state.weight.describe()  # type: ignore[attr-defined]
