"""The name table: which tensor of a file is which projection of which layer's FFN.

Names are compared as a whole. A *namespace* is the part of the name space that belongs to one FFN: whatever lies
in it must be known, so an extra scale, adapter or expert cannot be overlooked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

GATE, UP, DOWN, FUSED = "gate", "up", "down", "gate_up"


@dataclass(frozen=True)
class Rule:
    """How one kind of model names its FFN.

    pattern  of the whole name, with the groups root (the stack), space, layer and rest.
    leaves   the rest without ".weight" or ".bias" -> GATE, UP, DOWN or FUSED.
    outside  a pattern of the rests that share the namespace but belong to the layer, such as the norm after it.
    """

    pattern: re.Pattern[str]
    leaves: dict[str, str]
    outside: re.Pattern[str] = field(default_factory=lambda: re.compile(r"(?!)"))


@dataclass(frozen=True)
class Place:
    """Where a tensor belongs. role is None for a name that is in an FFN's namespace but not in the table.

    root     the stack's path with its final dot ("model.", "encoder.", "").
    space    the namespace as a prefix of the full name, with its final dot.
    leaf     the name within it, without ".weight" or ".bias"; kind is "weight" or "bias".
    """

    rule: Rule
    root: str
    space: str
    layer: int
    leaf: str
    role: str | None
    kind: str


def _rule(space: str, rest: str, outside: str | None = None, **leaves: str) -> Rule:
    named = {leaf.replace("__", "."): role for leaf, role in leaves.items()}
    whole = rf"(?P<space>(?P<root>(?:[^.]+\.)*){space}\.)(?P<rest>{rest})"
    extra = {} if outside is None else {"outside": re.compile(outside)}
    return Rule(re.compile(whole, re.DOTALL), named, **extra)


_N = r"(?P<layer>[0-9]+)"

HF_RULES = (
    # Llama, Mistral, Qwen, Gemma …; Phi-3, GLM (fused); GPT-2, StarCoder; GPT-NeoX, BLOOM, Falcon; GPT-J; Phi
    _rule(
        rf"(?:layers|h)\.{_N}\.mlp",
        r".+",
        gate_proj=GATE,
        up_proj=UP,
        down_proj=DOWN,
        gate_up_proj=FUSED,
        c_fc=UP,
        c_proj=DOWN,
        dense_h_to_4h=UP,
        dense_4h_to_h=DOWN,
        fc_in=UP,
        fc_out=DOWN,
        fc1=UP,
        fc2=DOWN,
    ),
    _rule(rf"layers\.{_N}", r"fc[12]\..+", fc1=UP, fc2=DOWN),  # OPT: directly in the layer
    _rule(  # BERT and its family, ViT; "attention.output.dense" is another name and not matched
        rf"layer\.{_N}",
        r"(?:intermediate|output)\..+",
        outside=r"output\.LayerNorm\.(?:weight|bias|gamma|beta)",
        intermediate__dense=UP,
        output__dense=DOWN,
    ),
    _rule(rf"layer\.{_N}\.ffn", r".+", lin1=UP, lin2=DOWN),  # DistilBERT
    _rule(rf"block\.{_N}\.layer\.[0-9]+\.DenseReluDense", r".+", wi=UP, wi_0=GATE, wi_1=UP, wo=DOWN),  # T5
    _rule(rf"blocks\.{_N}\.ffn", r".+", up_proj=UP, down_proj=DOWN),  # MPT
)
GGUF_RULES = (
    _rule(
        rf"blk\.{_N}",
        r"ffn.+",
        outside=r"ffn_norm\.(?:weight|bias)",
        ffn_gate=GATE,
        ffn_up=UP,
        ffn_down=DOWN,
    ),
)

# GPT-2 stores [in, out] and StarCoder [out, in] under these names.
EITHER_WAY = frozenset({"c_fc", "c_proj"})

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_EXPERT = re.compile(r"expert|(?<![A-Za-z])moe(?![A-Za-z])|ffn_gate_inp|_(?:exps|shexp|chexps)(?:\.|$)")


def place(name: str, rules: Iterable[Rule]) -> Place | None:
    """The place of the tensor called `name`, or None if it is not in any FFN's namespace."""
    for rule in rules:
        match = rule.pattern.fullmatch(name)
        if match is None or rule.outside.fullmatch(match["rest"]):
            continue
        leaf, _, kind = match["rest"].rpartition(".")
        role = rule.leaves.get(leaf) if kind in ("weight", "bias") else None
        number = match["layer"]
        if len(number) > 6 or str(int(number)) != number:  # "007" would be a second name of layer 7
            return Place(rule, match["root"], match["space"], -1, leaf, None, kind)
        return Place(rule, match["root"], match["space"], int(number), leaf, role, kind)
    return None


def strip_wrappers(name: str) -> str:
    """`name` without the parts that torch.compile, DDP and FSDP put in.

    `_orig_mod` and FSDP's parts go wherever they stand; `module` only from the front, for it may be a real name.
    """
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        del parts[0]
    return ".".join(parts)


def is_expert(name: str) -> bool:
    """Whether the name belongs to a mixture of experts (its experts, shared experts or GGUF's router)."""
    return _EXPERT.search(name) is not None
