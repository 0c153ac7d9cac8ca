"""A Hugging Face folder or file: its tensors, its config.json and the table of model types, put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import assemble
from .assemble import FFN, Group, Key
from .config import (
    EXPERT_KEYS,
    FAMILIES,
    LAYER_KEYS,
    T5_TYPES,
    UNKNOWN,
    Choice,
    Family,
    choose,
    stated,
)
from .errors import CheckpointError, some
from .folder import Found
from .names import HF_RULES


def open_hf(found: Found, activation: str | None) -> tuple[dict[Key, FFN], dict[str, Any], list[str]]:
    """(the FFNs by stack and layer, config, notes). Raises CheckpointError."""
    config, where = found.config or {}, str(found.named_by)
    for key in EXPERT_KEYS:
        if type(config.get(key)) is int and config[key] > 0:
            raise CheckpointError(f"{where}: {key}={config[key]}: is a mixture of experts, which is not read")
    groups, notes = assemble.group(found.path, found.refs, HF_RULES)
    choice = choose(activation, found.config, where)
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    notes = [f"activation {choice.activation}: {choice.reason}", *found.notes, *notes]
    roots = list(dict.fromkeys(root for root, _ in groups))
    if activation is not None and len(roots) > 1:  # a language and a vision tower may differ in it
        notes.append(f"the activation passed is taken for all {len(roots)} stacks: {some(roots)}")
    widths = assemble.Widths(config, where, (family or UNKNOWN).d_model, (family or UNKNOWN).d_ff)
    conv1d = family.conv1d if family else None
    ffns = {
        key: assemble.build(
            mine, choice, _is_gated(key, groups, choice, family, kind), False, conv1d, widths.of(key[1])
        )
        for key, mine in groups.items()
    }
    assemble.check_d_model(found.path, ffns)
    fault = _layer_fault(groups, config, kind, where)
    if fault and family and found.is_whole:
        raise CheckpointError(f"{found.path}: {fault}")
    return ffns, config, [*notes, fault] if fault else notes


def _is_gated(key: Key, groups: Mapping[Key, Group], choice: Choice, family: Family | None, kind: Any) -> bool:
    if choice.gated is not None:
        return choice.gated
    if family is not None and kind not in T5_TYPES:
        return family.gated
    return assemble.has_gate(groups, key[0])


def _layer_fault(groups: Mapping[Key, Group], config: Mapping[str, Any], kind: Any, where: str) -> str | None:
    """How the layers found differ from the number that the config states; None if they agree."""
    counts = stated(config, LAYER_KEYS, where)
    for root in dict.fromkeys(root for root, _ in groups):
        wanted = dict(counts)
        if kind in T5_TYPES and root.endswith("decoder."):
            wanted = stated(config, ("num_decoder_layers",), where) or wanted
        for key, count in wanted.items():
            fault = isinstance(count, int) and assemble.layer_fault(groups, root, f"{key}={count}", count)
            if fault:
                return fault
    return None
