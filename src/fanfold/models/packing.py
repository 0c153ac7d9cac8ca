"""Named formats: pack the matrices of linears, one at a time, and put them back."""

from __future__ import annotations

import ctypes
import warnings
import weakref
from typing import Any

import torch
from torch import nn

from .. import formats
from ..kernels import packed
from ..kernels.packed import PackedMatrix
from ..layout import SEPARATE
from .linears import matrix
from .packed_state import PackedLinearState
from .packed_weight import Opened, PackedWeight, pack, parameter
from .states import LinearState
from .stubs import make_stub
from .swapped import PackedLinear, install, uninstall


class Packer:
    """Packs linears into a format; ones that share a parameter go on sharing it.

    keep  hold the originals for good; else until `release`, so that what fails its verification gets them back.
    """

    def __init__(self, format: str, keep: bool, backend: str) -> None:
        self.format, self.keep, self.backend = format, keep, backend
        self._tied: dict[tuple[int, str], tuple[weakref.ref[nn.Parameter], PackedWeight, nn.Parameter]] = {}

    def pack(
        self, linear: Any, path: str, order: str = SEPARATE, given: tuple[PackedMatrix, ...] | None = None
    ) -> PackedLinearState:
        """Give `linear` a packed weight and its class.

        order  how gate and up lie in it, if it computes both.
        given  its parts, where they are packed already.
        """
        original: nn.Parameter = linear._parameters["weight"]
        key = (id(original), order)
        ref, weight, stub = self._tied.get(key, (None, None, None))
        # weakly held: an original lives on only while another module still ties to it
        if ref is None or ref() is not original or weight is None or stub is None:
            whole = matrix(linear).detach()
            opened = tuple(map(Opened, given or ())) or tuple(
                pack(part, self.format) for part in PackedWeight.split(whole, order)
            )
            weight = PackedWeight(tuple(o.matrix for o in opened), order)
            weight.opened = opened
            stub = make_stub(original.shape, original.dtype)
            self._tied[key] = (weakref.ref(original), weight, stub)
        state = PackedLinearState(path, self.backend, weight, stub, original)
        install(linear, PackedLinear, state)
        linear._parameters["weight"] = stub
        return state

    def release(self, states: list[LinearState]) -> None:
        """Free the originals of what stays swapped, unless they are to be kept."""
        for state in states:
            if isinstance(state, PackedLinearState):
                state.weight.close()
                state.kept = state.kept if self.keep else None


class Unpacker:
    """Puts a linear's own parameter back; tied ones are tied again."""

    def __init__(self) -> None:
        self._tied: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def unpack(self, linear: nn.Module, state: LinearState) -> str:
        """-> what is not as it was before the swap, or ""."""
        if not isinstance(state, PackedLinearState):
            return ""
        if not state.holds(linear):
            if linear._parameters.get("weight") is state.stub:  # written to all at once: give it memory of its own
                state.stub.data = state.stub.data.contiguous()
            return "its weight was exchanged after the swap; it stays as it is now"
        if id(state.stub) not in self._tied:  # holding the stub keeps its id from being used again
            self._tied[id(state.stub)] = (state.stub, self._original(linear, state))
        own = self._tied[id(state.stub)][1]
        linear._parameters["weight"] = own
        if state.reloaded:
            return f"the weights were changed after the swap; they are those, as {state.format} held them"
        if own is state.kept or state.tied() is own or _exact(state):
            return ""
        done = "rounded to" if state.format in packed._FLOATS else "dequantized from"
        return f"the weights are now the ones {done} {state.format}"

    def _original(self, linear: nn.Module, state: PackedLinearState) -> nn.Parameter:
        if not state.reloaded:
            found = state.kept if state.kept is not None else state.tied()
            if found is not None:
                return found
        return parameter(state.weight.matrix(state.dtype), linear, state.requires_grad)


def _exact(state: PackedLinearState) -> bool:
    """Whether the format holds every value of the original's dtype."""
    wide = packed._FLOATS.get(state.format or "")
    return wide is not None and (
        wide == state.dtype or (wide == torch.float32 and state.dtype in (torch.bfloat16, torch.float16))
    )


def put_back(modules: dict[str, nn.Module]) -> list[str]:
    """Undo the swap of the modules, {path: module}. -> a note per module whose weights are not as they were, also given
    as a warning. Raises RuntimeError, with nothing undone, if one of them has got another class meanwhile."""
    notes = []
    for path, module in modules.items():
        cls = type(module)
        if "_fanfold_original" not in cls.__dict__:
            raise RuntimeError(
                f"{path} has become a {cls.__name__} since the swap: undo that first "
                "(torch.nn.utils.parametrize.remove_parametrizations)"
            )
    unpacker = Unpacker()
    for path, module in modules.items():
        state = uninstall(module)
        note = unpacker.unpack(module, state)
        state.forget()  # a report may go on holding the state; it must not hold the memory
        if note:
            notes.append(f"{path}: {note}")
    if notes:
        warnings.warn(f"fanfold: {notes[0]}" + (f" (and {len(notes) - 1} more)" if notes[1:] else ""), stacklevel=3)
    return notes


def release_memory() -> None:
    """Give what the originals took back to the system: glibc keeps freed blocks that are not at the heap's end."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def integer(format: str | None) -> bool:
    """Whether a format's weights are integer codes, so that activations may be quantized as well."""
    return format in formats.INTEGER
