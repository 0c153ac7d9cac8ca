"""From named tensors to FFNs: grouped by layer, checked against each other and the config, read on demand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..layout import GATE_UP, SEPARATE, Layout
from ..spec import Spec
from ..weights import Weights
from . import packed
from .config import Choice, stated
from .errors import CheckpointError, show, some
from .names import DOWN, EITHER_WAY, FUSED, GATE, UP, Place, Rule, is_expert, place, strip_wrappers
from .tensors import BLOCKS, FLOATS, TensorRef

# D d_model, F d_ff
Key = tuple[str, int]  # (root of the stack, layer)
_MAX_NAME = 1000


@dataclass
class Group:
    """The tensors of one FFN, by (role, kind): ("up", "weight"), ("down", "bias"), …"""

    place: Place
    parts: dict[tuple[str, str], TensorRef] = field(default_factory=dict)
    leaves: dict[str, str] = field(default_factory=dict)  # role -> its name in the file

    @property
    def has_gate(self) -> bool:
        return (GATE, "weight") in self.parts or (FUSED, "weight") in self.parts


def group(path: Path, refs: Mapping[str, TensorRef], rules: Iterable[Rule]) -> tuple[dict[Key, Group], list[str]]:
    """(the FFNs' tensors in order of stack and layer, notes). Raises CheckpointError.

    Every tensor in an FFN's namespace is used, or the file is refused; so is a mixture of experts.
    """
    groups: dict[Key, Group] = {}
    rules, n_other, n_wrapped = tuple(rules), 0, 0
    plain = _stripped(path, refs)
    experts = [name for name in refs if is_expert(name)]
    if experts:
        raise CheckpointError(f"{path}: is a mixture of experts ({some(experts)}), which is not read")
    for name, ref in plain.items():
        n_wrapped += name != ref.name
        at = place(name, rules)
        if at is None:
            n_other += 1
        else:
            _put(path, groups, at, ref)
    if not groups:
        names = f" ({some(refs)})" if refs else ""
        raise CheckpointError(f"{path}: none of its {len(refs)} tensors{names} has the name of an FFN's in the table")
    notes = [f"{n_other} of {len(refs)} tensors are not part of an FFN"]
    if n_wrapped:
        notes.append(f"wrapper names (_orig_mod, module, …) were removed from {n_wrapped} tensors' names")
    return dict(sorted(groups.items(), key=lambda item: item[0])), notes


def _stripped(path: Path, refs: Mapping[str, TensorRef]) -> dict[str, TensorRef]:
    plain: dict[str, TensorRef] = {}
    for name, ref in refs.items():
        if len(name) > _MAX_NAME:
            raise CheckpointError(f"{path}: a tensor's name has {len(name)} characters, expected at most {_MAX_NAME}")
        short = strip_wrappers(name)
        if short in plain:
            raise CheckpointError(
                f"{path}: tensors {show(plain[short].name)} and {show(name)} are the same without wrappers"
            )
        plain[short] = ref
    return plain


def _put(path: Path, groups: dict[Key, Group], at: Place, ref: TensorRef) -> None:
    where = f"{ref.file.path}: tensor {show(ref.name)}"
    if at.role is None:
        known = ", ".join(at.rule.leaves)
        raise CheckpointError(
            f"{where} lies in an FFN but is not a weight or bias of its projections (known there: {known}): "
            "quantized, adapted or changed FFNs are not read"
        )
    mine = groups.setdefault((at.root, at.layer), Group(at))
    if (mine.place.space, mine.place.rule) != (at.space, at.rule):
        raise CheckpointError(f"{where}: layer {at.layer} has another FFN at {show(mine.place.space)}; expected one")
    other = mine.parts.get((at.role, at.kind))
    if other is not None:
        raise CheckpointError(f"{where} and {show(other.name)} are both the {at.role} {at.kind} of layer {at.layer}")
    if ref.format not in FLOATS and ref.format not in BLOCKS:
        raise CheckpointError(f"{where} has format {ref.format}, expected one of {', '.join((*FLOATS, *BLOCKS))}")
    mine.parts[(at.role, at.kind)] = ref
    mine.leaves[at.role] = at.leaf


@dataclass(frozen=True)
class FFN:
    """One checked FFN: what it is, how it lies in the file, and where its tensors are."""

    spec: Spec
    layout: Layout
    parts: Mapping[tuple[str, str], TensorRef]

    def read(self) -> Weights:
        """The FFN's Weights; see `Checkpoint.ffns`."""
        arrays: dict[str, torch.Tensor] = {}
        for (role, kind), ref in self.parts.items():
            array = ref.read()
            end = "" if kind == "weight" else "_bias"
            if role == FUSED:
                arrays[f"gate{end}"], arrays[f"up{end}"] = self.layout.split(array)
            else:
                arrays[f"{role}{end}"] = array.t() if self.layout.transposed and kind == "weight" else array
        return Weights(self.spec, **arrays)

    def read_packed(self) -> Weights:
        """The FFN's matrices as `PackedMatrix` in the file's own formats, biases float32; see `load`."""
        arrays: dict[str, Any] = {}
        for (role, kind), ref in self.parts.items():
            if kind == "bias":
                array = ref.read().float().contiguous()
                split = self.layout.split(array) if role == FUSED else ()
                arrays |= {f"gate_{kind}": split[0], f"up_{kind}": split[1]} if split else {f"{role}_{kind}": array}
            elif role == FUSED:
                arrays["gate"], arrays["up"] = packed.halves(ref, self.layout)
            else:
                arrays[role] = packed.whole(ref, self.layout)
        return Weights(self.spec, **arrays)


def build(mine: Group, choice: Choice, gated: bool, fused: bool, conv1d: bool | None, widths: Mapping[str, int]) -> FFN:
    """The FFN of one layer. Raises CheckpointError if a projection is missing or a shape is not as expected.

    gated   whether it must have a gate.        fused   whether `up` is the fused [gate;up] (GGUF).
    conv1d  whether c_fc and c_proj are [in, out]; None if nothing says so.
    widths  "d_model" and "d_ff" as far as the config states them.
    """
    parts = {(FUSED if fused and role == UP else role, kind): ref for (role, kind), ref in mine.parts.items()}
    _check_present(mine, parts, gated)
    transposed = _transposed(mine, parts, conv1d)
    d_model, d_ff = _check_shapes(parts, transposed, widths)
    has = {role: (role, "bias") in parts or (role != DOWN and (FUSED, "bias") in parts) for role in (GATE, UP, DOWN)}
    spec = Spec(
        d_model=d_model,
        d_ff=d_ff,
        activation=choice.activation,
        gated=gated,
        up_bias=has[UP],
        gate_bias=gated and has[GATE],
        down_bias=has[DOWN],
        **dict(choice.fields),  # pyright: ignore[reportArgumentType]
    )
    order = GATE_UP if (FUSED, "weight") in parts else SEPARATE
    return FFN(spec, Layout(order=order, transposed=transposed), parts)


def _check_present(mine: Group, parts: Mapping[tuple[str, str], TensorRef], gated: bool) -> None:
    file, at = next(iter(parts.values())).file.path, mine.place
    roles = {role for role, kind in parts if kind == "weight"}
    if FUSED in roles and roles & {GATE, UP}:
        raise CheckpointError(f"{file}: layer {at.layer} has {show(at.space)} both fused and separate gate and up")
    needed = [DOWN, *([FUSED] if FUSED in roles else [GATE, UP] if gated else [UP])]
    # A bias without its weight needs the weight as well.
    for role in [*needed, *(role for role, _ in parts)]:
        if role not in roles:
            leaves = [mine.leaves[role]] if role in mine.leaves else [k for k, v in at.rule.leaves.items() if v == role]
            names = " or ".join(show(f"{at.space}{leaf}.weight") for leaf in leaves)
            raise CheckpointError(f"{file}: layer {at.layer} has no {role} projection; expected {names}")
    if not gated and roles & {GATE, FUSED}:
        raise CheckpointError(
            f"{file}: layer {at.layer} has a gate ({show(at.space)}), expected none for this activation"
        )


def _transposed(mine: Group, parts: Mapping[tuple[str, str], TensorRef], conv1d: bool | None) -> bool:
    if not EITHER_WAY & set(mine.leaves.values()):
        return False
    if conv1d is not None:
        return conv1d
    # Nothing says which way round: a bias is as long as the output, unless the matrix is square.
    for role in (UP, DOWN):
        weight, bias = parts[(role, "weight")], parts.get((role, "bias"))
        if bias is not None and len(bias.shape) == 1 and len(weight.shape) == 2 and weight.shape[0] != weight.shape[1]:
            return weight.shape[1] == bias.shape[0]
    ref = parts[(UP, "weight")]
    raise CheckpointError(
        f"{ref.file.path}: tensor {show(ref.name)} {list(ref.shape)} may be [in,out] (GPT-2) or [out,in] (StarCoder): "
        "a config.json with a model_type must say which"
    )


def _check_shapes(
    parts: Mapping[tuple[str, str], TensorRef], transposed: bool, widths: Mapping[str, int]
) -> tuple[int, int]:
    """(d_model, d_ff) after checking every shape against the config's widths, or else those of `down`."""
    down = parts[(DOWN, "weight")]
    if len(down.shape) != 2 or 0 in down.shape:
        found = list(down.shape)
        raise CheckpointError(
            f"{down.file.path}: tensor {show(down.name)} has shape {found}, expected two sizes above 0"
        )
    shape = tuple(reversed(down.shape)) if transposed else down.shape
    d_model, d_ff = widths.get("d_model", shape[0]), widths.get("d_ff", shape[1])
    expected = {DOWN: (d_model, d_ff), UP: (d_ff, d_model), GATE: (d_ff, d_model), FUSED: (2 * d_ff, d_model)}
    stated = [f"{name}={value}" for name, value in widths.items()]
    source = f" (config: {', '.join(stated)})" if stated else f" (from {show(down.name)} {list(down.shape)})"
    for (role, kind), ref in sorted(parts.items(), key=lambda item: item[0][0] != DOWN):  # so that down is named first
        shape = expected[role] if kind == "weight" else expected[role][:1]
        if transposed and kind == "weight":
            shape = shape[::-1]
        if ref.shape != shape:
            raise CheckpointError(
                f"{ref.file.path}: tensor {show(ref.name)} has shape {list(ref.shape)}, expected {list(shape)}{source}"
            )
    return d_model, d_ff


class Widths:
    """What a config states about d_model and d_ff, by layer. Raises CheckpointError if two of its keys disagree."""

    def __init__(
        self, config: Mapping[str, Any], where: str, d_model_keys: Iterable[str], d_ff_keys: Iterable[str]
    ) -> None:
        self._where = where
        self._stated = {"d_model": stated(config, d_model_keys, where), "d_ff": stated(config, d_ff_keys, where)}

    def of(self, layer: int) -> dict[str, int]:
        """{"d_model": …, "d_ff": …} of one layer, as far as stated."""
        found: dict[str, int] = {}
        for name, by_key in self._stated.items():
            for key, value in by_key.items():
                if isinstance(value, list) and layer >= len(value):
                    raise CheckpointError(f"{self._where}: {key} has {len(value)} values, but there is a layer {layer}")
                width = value[layer] if isinstance(value, list) else value
                if found.setdefault(name, width) != width:
                    raise CheckpointError(
                        f"{self._where}: {', '.join(f'{k}={show(v)}' for k, v in by_key.items())} disagree"
                    )
        return found


def has_gate(groups: Mapping[Key, Group], root: str) -> bool:
    """Whether any layer of the stack has a gate: then each must."""
    return any(mine.has_gate for (at, _), mine in groups.items() if at == root)


def check_d_model(path: Path, ffns: Mapping[Key, FFN]) -> None:
    """Raise CheckpointError unless all layers of a stack have the same d_model (d_ff may differ)."""
    first: dict[str, tuple[int, int]] = {}
    for (root, layer), ffn in ffns.items():
        at, d_model = first.setdefault(root, (layer, ffn.spec.d_model))
        if ffn.spec.d_model != d_model:
            down = show(ffn.parts[(DOWN, "weight")].name)
            raise CheckpointError(
                f"{path}: tensor {down} gives layer {layer} d_model={ffn.spec.d_model}, "
                f"expected {d_model} as in layer {at}"
            )


def layer_fault(groups: Mapping[Key, Group], root: str, said: str, count: int) -> str | None:
    """One sentence if the layers of the stack are not 0 … count - 1; `said` is where the count was stated."""
    layers = sorted(layer for at, layer in groups if at == root)
    if len(layers) == count and layers[-1] == count - 1:
        return None
    return f"layers {layers[0]} to {layers[-1]} of the stack {show(root)} give {len(layers)} FFNs, but {said}"
