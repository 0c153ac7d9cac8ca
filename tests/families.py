"""Tiny random models of the families that `swap` must handle, with inputs and what `find` must say of each."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from torch import nn

logging.getLogger("transformers").setLevel(logging.ERROR)

D, F, LAYERS, VOCAB = 32, 56, 2, 64


@dataclass(frozen=True)
class Family:
    """build() -> model; spec fields and layout that every FFN of it must have; whether biases exist."""

    name: str
    build: Callable[[], nn.Module]
    activation: str
    gated: bool = False
    biases: tuple[str, ...] = ()
    kind: str = "module"
    order: str = "separate"
    transposed: bool = False
    d_ff: int = F
    count: int = LAYERS


def _common(**extra: Any) -> dict[str, Any]:
    base = {
        "hidden_size": D,
        "intermediate_size": F,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    return base | extra


def _lm(cls: str, config: str, **extra: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(tf, cls)(getattr(tf, config)(**_common(**extra)))


def _gpt(cls: str, config: str, **extra: Any) -> Callable[[], nn.Module]:
    sizes = {"n_embd": D, "n_inner": F, "n_layer": LAYERS, "n_head": 4, "vocab_size": VOCAB, "n_positions": 64}
    return lambda: getattr(tf, cls)(getattr(tf, config)(**sizes, **extra))


def _t5(**extra: Any) -> Callable[[], nn.Module]:
    sizes = {"d_model": D, "d_ff": F, "num_layers": LAYERS, "num_heads": 4, "d_kv": 8, "vocab_size": VOCAB}
    return lambda: tf.T5ForConditionalGeneration(tf.T5Config(**sizes, **extra))


def _opt() -> nn.Module:
    config = tf.OPTConfig(
        hidden_size=D,
        word_embed_proj_dim=D,
        ffn_dim=F,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        vocab_size=VOCAB,
        max_position_embeddings=64,
    )
    return tf.OPTForCausalLM(config)


def _vit() -> nn.Module:
    config = tf.ViTConfig(
        hidden_size=D,
        intermediate_size=F,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        image_size=16,
        patch_size=8,
    )
    return tf.ViTForImageClassification(config)


def _distilbert() -> nn.Module:
    config = tf.DistilBertConfig(
        dim=D, hidden_dim=F, n_layers=LAYERS, n_heads=4, vocab_size=VOCAB, max_position_embeddings=64
    )
    return tf.DistilBertForMaskedLM(config)


_KV = {"num_key_value_heads": 2}
_BOTH = ("up", "down")
_H4 = {"hidden_size": D, "num_attention_heads": 4, "vocab_size": VOCAB}

FAMILIES = [
    Family("llama", _lm("LlamaForCausalLM", "LlamaConfig", **_KV), "silu", True),
    Family(
        "llama_bias", _lm("LlamaForCausalLM", "LlamaConfig", mlp_bias=True, **_KV), "silu", True, ("gate", "up", "down")
    ),
    Family("mistral", _lm("MistralForCausalLM", "MistralConfig", **_KV), "silu", True),
    Family("qwen2", _lm("Qwen2ForCausalLM", "Qwen2Config", **_KV), "silu", True),
    Family("qwen3", _lm("Qwen3ForCausalLM", "Qwen3Config", head_dim=8, **_KV), "silu", True),
    Family("gemma", _lm("GemmaForCausalLM", "GemmaConfig", head_dim=16, **_KV), "gelu_tanh", True),
    Family("gemma2", _lm("Gemma2ForCausalLM", "Gemma2Config", head_dim=8, **_KV), "gelu_tanh", True),
    Family("gemma3", _lm("Gemma3ForCausalLM", "Gemma3TextConfig", head_dim=8, **_KV), "gelu_tanh", True),
    Family("phi3", _lm("Phi3ForCausalLM", "Phi3Config", **_KV), "silu", True, order="[gate;up]"),
    Family("gpt2", _gpt("GPT2LMHeadModel", "GPT2Config"), "gelu_tanh", False, _BOTH, transposed=True),
    Family("gpt_neox", _lm("GPTNeoXForCausalLM", "GPTNeoXConfig"), "gelu_erf", False, _BOTH),
    Family("gptj", _gpt("GPTJForCausalLM", "GPTJConfig", rotary_dim=4), "gelu_tanh", False, _BOTH),
    Family("opt", _opt, "relu", False, _BOTH, kind="pair"),
    Family(
        "bloom",
        lambda: tf.BloomForCausalLM(tf.BloomConfig(hidden_size=D, n_layer=LAYERS, n_head=4, vocab_size=VOCAB)),
        "gelu_tanh",
        False,
        _BOTH,
        d_ff=4 * D,
    ),
    Family(
        "falcon",
        lambda: tf.FalconForCausalLM(tf.FalconConfig(num_hidden_layers=LAYERS, **_H4)),
        "gelu_erf",
        False,
        d_ff=4 * D,
    ),
    Family("bert", _lm("BertForMaskedLM", "BertConfig"), "gelu_erf", False, _BOTH, kind="pair"),
    Family("roberta", _lm("RobertaForMaskedLM", "RobertaConfig"), "gelu_erf", False, _BOTH, kind="pair"),
    Family("distilbert", _distilbert, "gelu_erf", False, _BOTH),
    Family("t5", _t5(), "relu", count=2 * LAYERS),
    Family("t5_v1_1", _t5(feed_forward_proj="gated-gelu"), "gelu_tanh", True, count=2 * LAYERS),
    Family("vit", _vit, "gelu_erf", False, _BOTH),
]


def build(family: Family, seed: int = 0) -> nn.Module:
    """The model in eval mode with every parameter random: transformers starts biases at 0, where a lost one is
    invisible, and weights at std 0.02, where an FFN hardly shows in the logits."""
    torch.manual_seed(seed)
    model = family.build()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1 and "bias" in name:
                p.normal_(std=0.3)
            elif p.dim() == 2 and "embed" not in name and "wte" not in name and "shared" not in name:
                fan_in = (
                    p.shape[0]
                    if type(model.get_submodule(name.rpartition(".")[0])).__name__ == "Conv1D"
                    else p.shape[1]
                )
                p.normal_(std=fan_in**-0.5)
    return model.eval()


def inputs(model: nn.Module, tokens: int = 9) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    config: Any = model.config
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    out: dict[str, Any] = {"input_ids": torch.randint(3, VOCAB, (2, tokens), generator=generator)}
    if config.is_encoder_decoder:
        out["decoder_input_ids"] = torch.randint(3, VOCAB, (2, 7), generator=generator)
    return out


def logits(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    return model(**batch).logits
