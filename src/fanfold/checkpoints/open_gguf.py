"""A GGUF file: its tensors, its metadata and the table of architectures, put together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import assemble
from .assemble import FFN, Group, Key
from .config import choose_gguf, stated
from .errors import CheckpointError
from .gguf import read_header
from .names import GGUF_RULES
from .tensors import BLOCKS

_STACKS = {"enc.": "encoder.", "dec.": "decoder."}


def open_gguf(
    path: Path, activation: str | None, packed: bool = False
) -> tuple[dict[Key, FFN], dict[str, Any], list[str]]:
    """(the FFNs by stack and layer, metadata, notes). Raises CheckpointError.

    packed  whether the FFNs will be read packed: then blocks keep their codes, and the notes say so.
    """
    metadata, refs = read_header(path)
    arch = metadata.get("general.architecture")
    _refuse(path, metadata, "split.count", 1, "is one part of several: merge them")
    _refuse(path, metadata, f"{arch}.expert_count", 0, "is a mixture of experts, which is not read")
    groups, notes = assemble.group(path, refs, GGUF_RULES)
    groups = {(_STACKS.get(root, root), layer): mine for (root, layer), mine in groups.items()}
    gate_anywhere = any(mine.has_gate for mine in groups.values())
    choice, fused = choose_gguf(activation, metadata, gate_anywhere, str(path))
    widths = assemble.Widths(metadata, str(path), (f"{arch}.embedding_length",), (f"{arch}.feed_forward_length",))
    ffns: dict[Key, FFN] = {}
    for key, mine in groups.items():
        gated = choice.gated if choice.gated is not None else fused or assemble.has_gate(groups, key[0])
        ffns[key] = assemble.build(mine, choice, gated, fused, None, widths.of(key[1]))
    assemble.check_d_model(path, ffns)
    _check_layers(path, groups, metadata, arch)
    formats = {ref.format for ffn in ffns.values() for ref in ffn.parts.values()} & set(BLOCKS)
    if formats:
        fate = "keep their own codes" if packed else "are decoded to float32"
        notes.append(f"{', '.join(sorted(formats))} tensors {fate}")
    return ffns, metadata, [f"activation {choice.activation}: {choice.reason}", *notes]


def _refuse(path: Path, metadata: Mapping[str, Any], key: str, most: int, reason: str) -> None:
    value = metadata.get(key)
    if type(value) is int and value > most:
        raise CheckpointError(f"{path}: {key}={value}: {reason}")


def _check_layers(path: Path, groups: Mapping[Key, Group], metadata: Mapping[str, Any], arch: Any) -> None:
    """Raise CheckpointError if a stack has not as many layers as the metadata says."""
    for root in dict.fromkeys(root for root, _ in groups):
        decoder = stated(metadata, (f"{arch}.decoder_block_count",), str(path)) if root == "decoder." else {}
        for key, count in (decoder or stated(metadata, (f"{arch}.block_count",), str(path))).items():
            fault = isinstance(count, int) and assemble.layer_fault(groups, root, f"{key}={count}", count)
            if fault:
                raise CheckpointError(f"{path}: {fault}")
