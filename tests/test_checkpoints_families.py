"""Every family of the tables: a tiny transformers model saved, loaded, and compared with its own FFN modules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fanfold import Weights, activations, numerics, reference
from fanfold.checkpoints import load
from fanfold.checkpoints.config import FAMILIES

transformers = pytest.importorskip("transformers")

D, F, LAYERS = 12, 20, 2
HIDDEN = {"hidden_size": D, "intermediate_size": F, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
LLAMA = {**HIDDEN, "num_key_value_heads": 2, "head_dim": 6, "pad_token_id": 0}
GPT = {"n_embd": D, "n_layer": LAYERS, "n_head": 2}
T5 = {"d_model": D, "d_ff": F, "d_kv": 6, "num_layers": LAYERS, "num_decoder_layers": LAYERS + 1, "num_heads": 2}
IMAGE = {"image_size": 8, "patch_size": 4}


@dataclass(frozen=True)
class Case:
    """One family: how to build it, where its FFNs are in memory, and what must be found in the file."""

    config: dict[str, Any]
    layers: str  # path of the list of layers
    ffn: str  # path of the FFN in a layer, "" for the layer itself
    parts: dict[str, str]  # projection -> path in the FFN
    activation: str
    run: Callable[[Any, Any], Any] | None = None  # (FFN, x) -> y without residual, if not just a call
    auto: str = "AutoModelForCausalLM"
    kind: str = ""  # model_type, if it is not the case's name


GATED = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
FUSED = {"gate_up": "gate_up_proj", "down": "down_proj"}
CONV = {"up": "c_fc", "down": "c_proj"}
FC = {"up": "fc1", "down": "fc2"}
H4 = {"up": "dense_h_to_4h", "down": "dense_4h_to_h"}
IN_OUT = {"up": "fc_in", "down": "fc_out"}
BERT = {"up": "intermediate.dense", "down": "output.dense"}

_llama = functools.partial(Case, LLAMA, "model.layers", "mlp", GATED)
_bert = functools.partial(
    Case,
    HIDDEN,
    ffn="",
    parts=BERT,
    activation="gelu_erf",
    run=lambda layer, x: layer.output.dense(layer.intermediate(x)),
    auto="AutoModelForMaskedLM",
)


def _residual(ffn: Any, x: Any) -> Any:
    return ffn(x, torch.zeros_like(x))


CASES: dict[str, Case] = {
    **{
        name: _llama(activation="silu")
        for name in ("llama", "mistral", "qwen2", "qwen3", "olmo", "olmo2", "granite", "cohere", "cohere2")
    },
    **{name: _llama(activation="silu") for name in ("stablelm", "smollm3", "seed_oss", "ministral")},
    **{name: _llama(activation="gelu_tanh") for name in ("gemma", "gemma2", "gemma3_text")},
    **{
        name: Case(LLAMA, "model.layers", "mlp", {"up": "up_proj", "down": "down_proj"}, "relu2")
        for name in ("nemotron", "arcee")
    },
    **{name: Case(LLAMA, "model.layers", "mlp", FUSED, "silu") for name in ("phi3", "glm", "glm4")},
    "phi": Case(LLAMA, "model.layers", "mlp", FC, "gelu_tanh"),
    "starcoder2": Case(LLAMA, "model.layers", "mlp", CONV, "gelu_tanh"),
    "llama_bias": _llama(activation="gelu_sigmoid", kind="llama"),
    "gpt2": Case({**GPT, "n_inner": F}, "transformer.h", "mlp", CONV, "gelu_tanh"),
    "gpt2_base": Case({**GPT, "n_inner": F}, "h", "mlp", CONV, "gelu_tanh", kind="gpt2", auto="AutoModel"),
    "gpt2_square": Case({**GPT, "n_inner": D}, "transformer.h", "mlp", CONV, "gelu_tanh", kind="gpt2"),
    "gpt_bigcode": Case({**GPT, "n_inner": F}, "transformer.h", "mlp", CONV, "gelu_tanh"),
    "gpt_neo": Case(
        {**HIDDEN, "num_layers": LAYERS, "num_heads": 2, "attention_types": [[["global"], LAYERS]]},
        "transformer.h",
        "mlp",
        CONV,
        "gelu_tanh",
    ),
    "gptj": Case({**GPT, "n_inner": F, "rotary_dim": 4}, "transformer.h", "mlp", IN_OUT, "gelu_tanh"),
    "codegen": Case({**GPT, "n_head": 4, "n_inner": F, "rotary_dim": 2}, "transformer.h", "mlp", IN_OUT, "gelu_tanh"),
    "gpt_neox": Case(HIDDEN, "gpt_neox.layers", "mlp", H4, "gelu_erf"),
    "falcon": Case({**HIDDEN, "ffn_hidden_size": F + 4, "bias": True}, "transformer.h", "mlp", H4, "gelu_erf"),
    "falcon_plain": Case(
        {"hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": 2},
        "transformer.h",
        "mlp",
        H4,
        "gelu_erf",
        kind="falcon",
    ),
    "bloom": Case({"hidden_size": D, **GPT}, "transformer.h", "mlp", H4, "gelu_tanh", run=_residual),
    "mpt": Case(
        {"d_model": D, "n_heads": 2, "n_layers": LAYERS},
        "transformer.blocks",
        "ffn",
        {"up": "up_proj", "down": "down_proj"},
        "gelu_erf",
        run=_residual,
    ),
    **{
        name: Case(
            {**HIDDEN, "ffn_dim": F, "word_embed_proj_dim": D, **extra},
            "model.decoder.layers",
            "",
            FC,
            act,
            run=lambda layer, x: layer.fc2(layer.activation_fn(layer.fc1(x))),
            kind="opt",
        )
        for name, act, extra in (
            ("opt", "relu", {}),
            ("opt_gelu", "gelu_erf", {"activation_function": "gelu", "enable_bias": False}),  # Galactica
        )
    },
    "bert": _bert(layers="bert.encoder.layer"),
    "bert_base": _bert(layers="encoder.layer", kind="bert", auto="AutoModel"),
    **{name: _bert(layers="roberta.encoder.layer") for name in ("roberta", "xlm-roberta", "camembert")},
    "electra": _bert(layers="electra.encoder.layer"),
    "distilbert": Case(
        {"dim": D, "hidden_dim": F, "n_layers": LAYERS, "n_heads": 2},
        "distilbert.transformer.layer",
        "ffn",
        {"up": "lin1", "down": "lin2"},
        "gelu_erf",
        auto="AutoModelForMaskedLM",
    ),
    **{
        name: Case({**HIDDEN, **IMAGE}, f"{name}.layers", "mlp", FC, "gelu_erf", auto="AutoModelForImageClassification")
        for name in ("vit", "deit")
    },
    **{
        name: Case(
            {**T5, "feed_forward_proj": proj},
            "block",
            "layer.-1.DenseReluDense",
            {"up": "wi", "down": "wo"} if "gated" not in proj else {"gate": "wi_0", "up": "wi_1", "down": "wo"},
            act,
            auto="AutoModelForSeq2SeqLM",
            kind=kind,
        )
        for name, kind, proj, act in (
            ("t5", "t5", "relu", "relu"),
            ("t5_1_1", "t5", "gated-gelu", "gelu_tanh"),
            ("t5_silu", "t5", "gated-silu", "silu"),
            ("t5_gelu", "t5", "gelu", "gelu_erf"),
            ("mt5", "mt5", "gated-gelu", "gelu_tanh"),
            ("umt5", "umt5", "gated-gelu", "gelu_tanh"),
        )
    },
}
_EXTRA = {"llama_bias": {"mlp_bias": True, "hidden_act": "quick_gelu"}, "gpt2_square": {"n_inner": D}}


def _at(module: Any, path: str) -> Any:
    for part in path.split(".") if path else ():
        module = module[int(part)] if part.lstrip("-").isdigit() else getattr(module, part)
    return module


@functools.cache
def _model(name: str) -> Any:
    case = CASES[name]
    fields = {"vocab_size": 30, "bos_token_id": 0, "eos_token_id": 1, **case.config, **_EXTRA.get(name, {})}
    config = transformers.AutoConfig.for_model(case.kind or name, **fields)
    config.architectures = [] if name == "deit" else None
    torch.manual_seed(0)
    model = getattr(transformers, case.auto).from_config(config).eval()
    with torch.no_grad():  # large enough that the activations differ, and no bias is zero
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model


def _ffns(name: str) -> dict[int | str, Any]:
    """layer -> the FFN module, in memory."""
    case, model = CASES[name], _model(name)
    if case.auto == "AutoModelForSeq2SeqLM":
        stacks = {f"{s}.": getattr(model, s) for s in ("encoder", "decoder")}
        return {f"{s}{i}": _at(b, case.ffn) for s, m in stacks.items() for i, b in enumerate(_at(m, case.layers))}
    return {i: _at(layer, case.ffn) for i, layer in enumerate(_at(model, case.layers))}


def _expected(case: Case, ffn: Any) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for projection, path in case.parts.items():
        linear = attrgetter(path)(ffn)
        weight = linear.weight.T if type(linear).__name__ == "Conv1D" else linear.weight
        for end, value in (("", weight), ("_bias", linear.bias)):
            if value is None:
                continue
            if projection == "gate_up":
                out[f"gate{end}"], out[f"up{end}"] = value.detach().chunk(2)
            else:
                out[projection + end] = value.detach()
    return out


@pytest.mark.parametrize("name", CASES)
def test_family_is_bit_equal_and_computes_the_same(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    _model(name).save_pretrained(tmp_path)
    checkpoint = load(tmp_path)
    ffns = _ffns(name)
    assert set(checkpoint.ffns) == set(ffns)
    assert any(case.activation in note for note in checkpoint.notes)
    for layer, ffn in ffns.items():
        weights, expected = checkpoint.ffns[layer], _expected(case, ffn)
        assert weights.spec == checkpoint.spec(layer)
        assert (weights.spec.activation, weights.spec.gated) == (case.activation, "gate" in expected)
        assert set(dict(weights.items())) == set(expected)
        assert all(torch.equal(value, expected[key]) for key, value in weights.items())
        assert checkpoint.layouts[layer].transposed == (type(_at(ffn, case.parts["down"])).__name__ == "Conv1D")
        assert checkpoint.layouts[layer].order == ("[gate;up]" if "gate_up" in case.parts else "separate")
    _same_function(case, ffn, weights)


def _same_function(case: Case, ffn: Any, weights: Weights) -> None:
    """The module's own output obeys the tolerance rule against the weights read; every mutant's does not."""
    x = torch.randn(7, weights.spec.d_model, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        y = (case.run or (lambda f, x: f(x)))(ffn, x)
    truth = reference.forward(x, weights)
    eager = _torch(x, weights)
    assert numerics.compare(y, truth, eager)
    for label, wrong in numerics.mutants(weights):
        assert not numerics.compare(reference.forward(x, wrong), truth, eager), label


def _torch(x: Any, weights: Weights) -> Any:
    w = dict(weights.items())
    act = activations.get(weights.spec.activation)
    up = torch.nn.functional.linear(x, w["up"], w.get("up_bias"))
    if weights.spec.gated:
        gate = torch.nn.functional.linear(x, w["gate"], w.get("gate_bias"))
        inner = act.torch(torch, gate, weights.spec.params) * up
    else:
        inner = act.torch(torch, up, weights.spec.params)
    return torch.nn.functional.linear(inner, w["down"], w.get("down_bias"))


def test_every_row_of_the_table_has_a_case() -> None:
    assert {case.kind or name for name, case in CASES.items()} == set(FAMILIES)


def test_views_and_writes(tmp_path: Path) -> None:
    """Matrices are views of the mapping, and writing into them leaves the file alone."""
    _model("gpt2").save_pretrained(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    checkpoint = load(tmp_path)
    first, again = checkpoint.ffns[0], checkpoint.ffns[0]
    assert first.up.data_ptr() == again.up.data_ptr()
    assert first.up.stride() == (1, F)
    first.up.zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert load_file(tmp_path / "model.safetensors")["transformer.h.0.mlp.c_fc.weight"].abs().sum() > 0
