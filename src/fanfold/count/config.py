"""A whole model from its config.json: what the file states, and what its model type means by that."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..checkpoints.config import EXPERT_KEYS, FAMILIES, LAYER_KEYS, UNKNOWN, choose, stated
from ..checkpoints.errors import CheckpointError
from ..spec import Spec
from .block import Attention
from .models import Model

_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_HEAD_DIM = ("head_dim", "d_kv")
_VOCAB = ("vocab_size",)
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k")
_EXPERT_WIDTH = ("moe_intermediate_size",)
_RATIO = 4  # model types whose code, not the config, says d_ff: all of these have 4 d_model
# model type -> FFN variant, for mixtures of experts: the checkpoint reader's table has dense models only
_MIXTURES: dict[str, str] = {
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "phimoe"), "swiglu"),
    "gpt_oss": "swiglu_oai",
}
# model types whose FFN has biases; where a key of the config says so, the key decides
_BIASED = frozenset(
    ("gpt2", "gptj", "gpt_neo", "gpt_neox", "gpt_bigcode", "codegen", "opt", "bloom", "phi", "starcoder2", "gpt_oss")
) | frozenset(("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "vit", "deit"))
_BIAS_KEYS = ("mlp_bias", "use_bias", "enable_bias")
_MAX_BYTES = 16 << 20


def read(path: str | os.PathLike[str], variant: str | None = None) -> Model:
    """The model that a config.json, or the folder that holds one, describes.

    variant  the FFN's variant ("swiglu", "gelu", …) for model types that are not known; it wins over the file.
    Widths are taken as stated and never rounded. Raises ValueError, naming the file and the key, if it does not
    describe a Transformer.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise ValueError(f"{str(path)!r} is no config.json and no folder with one")
    if file.stat().st_size > _MAX_BYTES:
        raise ValueError(f"{str(file)!r} has {file.stat().st_size} bytes: a config.json has at most {_MAX_BYTES}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(file)!r} is not JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{str(file)!r} holds {type(config).__name__}, expected an object")
    name = file.parent.name or file.name
    return model(config, str(file), name, variant)


def model(config: Mapping[str, Any], where: str, name: str, variant: str | None = None) -> Model:
    """The model that `config` describes; `where` is the file that errors name. Raises ValueError."""
    inner = config.get("text_config")
    if isinstance(inner, Mapping) and "model_type" in inner:
        config = inner
    kind = config.get("model_type")
    family = FAMILIES.get(kind, UNKNOWN) if isinstance(kind, str) else UNKNOWN
    d_model = _need(config, (*family.d_model, "hidden_size", "n_embd", "d_model"), where)
    n_layers = _need(config, LAYER_KEYS, where)
    n_experts = _one(config, EXPERT_KEYS, where) or 0
    width_keys = (*(_EXPERT_WIDTH if n_experts else ()), *family.d_ff, "intermediate_size", "n_inner")
    d_ff = _one(config, width_keys, where) or _RATIO * d_model
    return Model(
        name=name,
        ffn=_spec(config, kind, d_model, d_ff, variant, where),
        attention=_attention(config, kind, d_model, where),
        n_layers=n_layers,
        vocab=_need(config, _VOCAB, where),
        n_ffns=n_layers * (2 if _stacks(config, kind) else 1),
        n_attentions=n_layers * (3 if _stacks(config, kind) else 1),
        n_experts=n_experts,
        experts_per_token=min(_one(config, _PER_TOKEN, where) or 1, n_experts),
        tied=config["tie_word_embeddings"] if isinstance(config.get("tie_word_embeddings"), bool) else None,
        note=f"config.json of model_type {kind}",
        source=where,
    )


def _spec(config: Mapping[str, Any], kind: Any, d_model: int, d_ff: int, variant: str | None, where: str) -> Spec:
    variant = variant or (_MIXTURES.get(kind) if isinstance(kind, str) else None)
    if variant is None:
        try:
            choice = choose(None, config, where)
        except CheckpointError as error:
            text = str(error).split(": pass activation=")[0]
            raise ValueError(f"{text}: name the FFN's variant (swiglu, gelu, …) with variant=") from None
        spec = Spec(activation=choice.activation, gated=bool(choice.gated), d_model=d_model, d_ff=d_ff)
    else:
        spec = Spec.parse(variant, d_model=d_model, d_ff=d_ff)
    said = [config[k] for k in _BIAS_KEYS if isinstance(config.get(k), bool)]
    bias = said[0] if said else kind in _BIASED
    fields = {**spec.to_dict(), "up_bias": bias, "down_bias": bias, "gate_bias": bias and spec.gated}
    return Spec.from_dict(fields)


def _attention(config: Mapping[str, Any], kind: Any, d_model: int, where: str) -> Attention | None:
    if config.get("kv_lora_rank") is not None:
        return None  # multi-head latent attention
    heads = _need(config, _HEADS, where)
    kv = _one(config, _KV_HEADS, where)
    if kv is None or (kind == "falcon" and not config.get("new_decoder_architecture")):
        kv = 1 if config.get("multi_query") is True else heads
    head_dim = _one(config, _HEAD_DIM, where)
    if head_dim is None:
        if d_model % heads:
            raise ValueError(
                f"{where}: d_model={d_model} is not a multiple of {heads} heads, and no head_dim is stated"
            )
        head_dim = d_model // heads
    bias = config.get("attention_bias")
    return Attention(
        d_model=d_model, n_heads=heads, n_kv_heads=kv, head_dim=head_dim, bias=bias if isinstance(bias, bool) else False
    )  # fmt: skip


def _stacks(config: Mapping[str, Any], kind: Any) -> bool:
    return kind in ("t5", "mt5", "umt5") or config.get("is_encoder_decoder") is True


def _one(config: Mapping[str, Any], keys: Iterable[str], where: str) -> int | None:
    """The value of the first of `keys` that is stated; a list, one per layer, has to be of equal values."""
    for value in stated(config, dict.fromkeys(keys), where).values():
        values = set(value) if isinstance(value, list) else {value}
        if len(values) > 1:
            raise ValueError(f"{where}: {sorted(values)} differ by layer; a whole model is counted with equal layers")
        return values.pop()
    return None


def _need(config: Mapping[str, Any], keys: Iterable[str], where: str) -> int:
    wanted = list(dict.fromkeys(keys))
    found = _one(config, wanted, where)
    if found is None:
        raise ValueError(f"{where}: states none of {', '.join(wanted)}")
    return found
