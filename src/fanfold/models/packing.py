"""Formats that own their weights: convert the linears' parameters, and put them back."""

from __future__ import annotations

import warnings
import weakref

import torch
from torch import nn

from ..nn import FORMATS
from .states import LinearState
from .swapped import uninstall


class Packer:
    """Converts linears to the format; parameters that were tied stay tied.

    keep  hold the originals for good; else until `release`, so that an FFN that fails its verification gets them back.
    """

    def __init__(self, format: str | None, keep: bool) -> None:
        self.format, self.keep = format, keep
        self._tied: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def pack(self, linear: nn.Module, state: LinearState) -> None:
        if self.format is None:
            return
        dtype = FORMATS[self.format]
        for name, parameter in linear._parameters.items():
            if parameter is None:
                continue
            # Weakly held: an original lives on only while another module still ties to it.
            original, packed = self._tied.get(id(parameter), (None, None))
            if original is None or original() is not parameter or packed is None:
                packed = nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
                self._tied[id(parameter)] = (weakref.ref(parameter), packed)
            state.originals[name] = (parameter.dtype, parameter.requires_grad, parameter)
            linear._parameters[name] = packed
            state.packed[name] = (packed, packed._version)

    def release(self, states: list[LinearState]) -> None:
        """Free the originals of FFNs that stay swapped, unless they are to be kept."""
        if self.keep:
            return
        for state in states:
            state.originals = {name: (dtype, grad, None) for name, (dtype, grad, _) in state.originals.items()}


class Unpacker:
    """Puts a linear's own parameters back; tied ones are tied again."""

    def __init__(self) -> None:
        self._tied: dict[tuple[int, str], tuple[nn.Parameter, nn.Parameter]] = {}

    def unpack(self, linear: nn.Module, state: LinearState) -> str:
        """-> what is not as it was before the swap, or ""."""
        note = ""
        for name, (dtype, requires_grad, kept) in state.originals.items():
            packed = linear._parameters[name]
            assert packed is not None
            made, version = state.packed.get(name, (packed, None))
            changed = packed is not made or (version is not None and packed._version != version)
            key = (id(packed), name)
            if key not in self._tied:
                own = nn.Parameter(packed.detach().to(dtype), requires_grad) if kept is None or changed else kept
                self._tied[key] = (packed, own)  # holding `packed` keeps its id from being used again
            if changed:
                note = f"the weights were changed after the swap; they are those, as {state.format} held them"
            elif kept is None and not (state.format and _holds(FORMATS[state.format], dtype)):
                note = f"the weights are now the ones rounded to {state.format}"
            linear._parameters[name] = self._tied[key][1]
        return note


def put_back(modules: dict[str, nn.Module]) -> list[str]:
    """Undo the swap of the modules, {path: module}. -> a note per module whose weights are not as they were, also given
    as a warning."""
    notes = []
    unpacker = Unpacker()
    for path, module in modules.items():
        note = unpacker.unpack(module, uninstall(module))
        if note:
            notes.append(f"{path}: {note}")
    if notes:
        warnings.warn(f"fanfold: {notes[0]}" + (f" (and {len(notes) - 1} more)" if notes[1:] else ""), stacklevel=3)
    return notes


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every value of `narrow` has an exact one in `wide`."""
    return wide == narrow or (wide == torch.float32 and narrow in (torch.bfloat16, torch.float16))
