"""Which activation a model's FFN has, according to its config.json or GGUF architecture.

Precedence: the caller's `activation=`; a value fixed by the model's code; the field of config.json that this
model type reads; the default that this model type has when the field is absent. A model type that is not in the
table is refused: many write `hidden_act` and compute something else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .. import activations
from .errors import CheckpointError, show

_HINT = 'pass activation=, for example ff.load(path, activation="silu")'


@dataclass(frozen=True, kw_only=True)
class Family:
    """What config.json means for one model type.

    field    the key that names the activation; None if the code fixes it to `default`.
    default  the activation when the key is absent.
    gated    whether the FFN has a gate.
    conv1d   whether c_fc and c_proj are stored [in, out].
    d_model, d_ff  the keys that state the widths (and no others: falcon's code, say, ignores intermediate_size).
             A width that the code computes (4 * d_model) is not stated: the file's is used.
    """

    default: str
    field: str | None = "hidden_act"
    gated: bool = False
    conv1d: bool = False
    d_model: tuple[str, ...] = ("hidden_size",)
    d_ff: tuple[str, ...] = ("intermediate_size",)


_SILU = Family(default="silu", gated=True)
_ERF = Family(default="gelu_erf")
_GPT = Family(default="gelu_tanh", field="activation_function", d_model=("n_embd",), d_ff=("n_inner",))
_GEMMA = Family(default="gelu_tanh", field="hidden_activation", gated=True)
# relu or gated-gelu, and so on: the value says whether there is a gate, see _t5
_T5 = Family(default="relu", field="feed_forward_proj", d_model=("d_model",), d_ff=("d_ff",))

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3", "glm", "glm4", "olmo", "olmo2", "granite"), _SILU),
    **dict.fromkeys(("cohere", "cohere2", "stablelm", "smollm3", "seed_oss", "ministral"), _SILU),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), _GEMMA),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "electra", "vit", "deit", "gpt_neox"), _ERF),
    **dict.fromkeys(("starcoder2", "phi"), Family(default="gelu_tanh")),
    **dict.fromkeys(("nemotron", "arcee"), Family(default="relu2")),
    **dict.fromkeys(("gptj", "codegen", "gpt_bigcode"), _GPT),
    "gpt2": replace(_GPT, conv1d=True),
    "gpt_neo": Family(default="gelu_tanh", field="activation_function"),
    "opt": Family(default="relu", field="activation_function", d_ff=("ffn_dim",)),
    "bloom": Family(default="gelu_tanh", field=None, d_model=("hidden_size", "n_embed"), d_ff=()),
    "mpt": Family(default="gelu_erf", field=None, d_model=("d_model",), d_ff=()),
    "falcon": Family(default="gelu_erf", field="activation", d_ff=("ffn_hidden_size",)),
    "distilbert": Family(default="gelu_erf", field="activation", d_model=("dim",), d_ff=("hidden_dim",)),
    "t5": _T5,
    **dict.fromkeys(("mt5", "umt5"), replace(_T5, default="gated-gelu")),
}
T5_TYPES = ("t5", "mt5", "umt5")


# general.architecture -> (activation, gated, ffn_up is fused [gate;up]). GGUF does not record the activation, so
# only architectures whose models all have the same one are listed (not gptneox: GPT-NeoX-20B and Pythia differ).
# GELU is named as the original models have it; llama.cpp itself evaluates every GELU by the tanh form.
ARCHITECTURES: dict[str, tuple[str, bool, bool]] = {
    **dict.fromkeys(
        ("llama", "qwen", "qwen2", "qwen2vl", "qwen3", "mistral3", "baichuan", "xverse"), ("silu", True, False)
    ),
    **dict.fromkeys(("internlm2", "orion", "minicpm", "command-r", "cohere2", "olmo", "olmo2"), ("silu", True, False)),
    **dict.fromkeys(("granite", "stablelm", "exaone", "smollm3", "seed_oss", "ernie4_5"), ("silu", True, False)),
    **dict.fromkeys(("phi3", "glm4", "chatglm"), ("silu", True, True)),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma-embedding"), ("gelu_tanh", True, False)),
    **dict.fromkeys(("gpt2", "gptj", "phi2", "starcoder", "starcoder2", "bloom"), ("gelu_tanh", False, False)),
    **dict.fromkeys(("bert", "falcon", "mpt"), ("gelu_erf", False, False)),
    **dict.fromkeys(("nemotron", "arcee"), ("relu2", False, False)),
}
_T5_ARCHITECTURES = ("t5", "t5encoder")  # version 1.0 is relu, 1.1 gated with gelu_tanh: told apart by the gate


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The activation of a checkpoint's FFNs, whether they must have a gate (None: the file says), and why.

    fields  further fields of Spec that the caller's variant fixes (swiglu_oai).
    """

    activation: str
    gated: bool | None
    reason: str
    fields: Mapping[str, float] = field(default_factory=dict)


def choose(given: str | None, config: Mapping[str, Any] | None, where: str) -> Choice:
    """The activation that `config` (config.json's content, None if there is no such file) means.

    given  the caller's `activation=`, or None.
    where  the file that errors name.
    Raises CheckpointError if nothing decides it.
    """
    if given is not None:
        return from_caller(given)
    if config is None:
        raise CheckpointError(f"{where}: there is no config.json to name the activation: {_HINT}")
    kind = config.get("model_type")
    if kind is None:
        raise CheckpointError(f"{where}: has no model_type, so the activation is not known: {_HINT}")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        known = ", ".join(FAMILIES)
        raise CheckpointError(f"{where}: model_type {show(kind)} is not in the table ({known}): {_HINT}")
    return _from_family(kind, family, config, where)


def _from_family(kind: str, family: Family, config: Mapping[str, Any], where: str) -> Choice:
    if family.field is None:
        reason = f"fixed by the code of model_type {kind!r}"
        return Choice(activation=family.default, gated=family.gated, reason=reason)
    value = config.get(family.field)
    key = family.field
    if kind == "gemma" and value is None:
        legacy = config.get("hidden_act")
        if legacy in (None, "gelu"):
            said = "" if legacy is None else " although the file says hidden_act='gelu', a legacy value"
            reason = f"Gemma means the tanh form{said}; hidden_activation would decide it"
            return Choice(activation="gelu_tanh", gated=True, reason=reason)
        key, value = "hidden_act", legacy
    if value is None:
        reason = f"{where} has no {key}; the default of model_type {kind!r}"
        value = family.default
    else:
        reason = f"{key}={show(value)} in {where}"
    if not isinstance(value, str):
        raise CheckpointError(f"{where}: {key}={show(value)}, expected a string: {_HINT}")
    if kind in T5_TYPES:
        return _t5(value, reason, where)
    return Choice(activation=_known(value, f"{where}: {key}"), gated=family.gated, reason=reason)


def _t5(value: str, reason: str, where: str) -> Choice:
    gated = value.startswith("gated-")
    name = value.removeprefix("gated-")
    if value == "gated-gelu":  # transformers replaces it by gelu_new, and only in the gated form
        return Choice(activation="gelu_tanh", gated=True, reason=f"{reason}, which T5 computes in the tanh form")
    return Choice(activation=_known(name, f"{where}: feed_forward_proj"), gated=gated, reason=reason)


def _known(name: str, where: str) -> str:
    try:
        return activations.get(name).name
    except ValueError as error:
        raise CheckpointError(f"{where}: {error} To overrule the file, {_HINT}") from None


def choose_gguf(given: str | None, metadata: Mapping[str, Any], has_gate: bool, where: str) -> tuple[Choice, bool]:
    """(the activation, whether ffn_up is the fused [gate;up]) of a GGUF file with that metadata.

    has_gate  whether the file has ffn_gate tensors (it tells T5 1.1 from 1.0).
    Raises CheckpointError if the architecture does not decide it.
    """
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise CheckpointError(f"{where}: general.architecture is {show(arch)}, expected a string")
    activation, gated, fused = ARCHITECTURES.get(arch, (None, None, False))
    if arch in _T5_ARCHITECTURES:
        activation, gated = ("gelu_tanh", True) if has_gate else ("relu", False)
    if given is not None:
        return from_caller(given), fused
    if activation is None:
        known = ", ".join((*ARCHITECTURES, *_T5_ARCHITECTURES))
        raise CheckpointError(f"{where}: architecture {show(arch)} is not in the table ({known}): {_HINT}")
    return Choice(activation=activation, gated=gated, reason=f"architecture {arch!r} in {where}"), fused


def from_caller(given: str) -> Choice:
    """The Choice of the caller's `activation=`: an activation's name, or a gated variant's such as "swiglu"."""
    reason = f"activation={given!r} was passed"
    if isinstance(given, str) and given in activations.GATED:
        activation, extra = activations.GATED[given]
        return Choice(activation=activation, gated=True, reason=reason, fields=extra)
    try:
        return Choice(activation=activations.get(given).name, gated=None, reason=reason)
    except (ValueError, TypeError):
        known = ", ".join((*activations.ACTIVATIONS, *activations.GATED))
        raise CheckpointError(f"activation={show(given)} is not known; known: {known}") from None


# What an unknown model type's widths are checked by, if present.
UNKNOWN = Family(default="")
LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def stated(config: Mapping[str, Any], keys: Iterable[str], where: str) -> dict[str, int | list[int]]:
    """{key: value} of those `keys` that the config states (null is not stating).

    A value is a positive int, or a list with one for each layer. Raises CheckpointError for anything else.
    """
    found: dict[str, int | list[int]] = {}
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        items = value if isinstance(value, list) else [value]
        if not items or not all(type(v) is int and v > 0 for v in items):
            raise CheckpointError(
                f"{where}: {key}={show(value)}, expected a positive int, or a list with one per layer"
            )
        found[key] = value
    return found
