"""What `memory.anatomy` says of a model against what the model does, and that `memory.capture` copies and leaves alone.

Keys, values and coefficients are held against the tensors that the model's own linears read and give; the way to the
logits against the model in float64.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import fanfold as ff
from families import FAMILIES, D, Family, build, inputs, logits
from fanfold.memory import Anatomy, Layer, capture, coefficients
from fanfold.memory.sums import sum_rule
from fanfold.numerics import UNIT_ROUNDOFF, compare, relative_error
from fanfold.weights import Weights

BY_NAME = {family.name: family for family in FAMILIES}
NORMED = ("gemma2", "gemma3")
POST_LN = ("bert", "roberta", "distilbert")
DIRECT = [f for f in FAMILIES if f.name not in (*POST_LN, "vit")]


class Fused(nn.Module):
    """A gated FFN on one matrix, its rows cut in some order, its output times a constant."""

    def __init__(self, order: str, d_ff: int, scale: float = 1.0) -> None:
        super().__init__()
        self.order, self.scale = order, scale
        self.both, self.down = nn.Linear(D, 2 * d_ff), nn.Linear(d_ff, D)

    def forward(self, x: Tensor) -> Tensor:
        y = self.both(x)
        first, second = y.chunk(2, -1) if self.order == "halves" else (y[..., ::2], y[..., 1::2])
        return self.down(torch.sigmoid(second) * first) * self.scale


class Block(nn.Module):
    """x + mix(x), then + 0.5 · FFN: no attention, but earlier tokens count."""

    def __init__(self, ffn: nn.Module) -> None:
        super().__init__()
        self.norm, self.ffn, self.mix = nn.LayerNorm(D), ffn, nn.Parameter(torch.randn(D) * 0.3)

    def forward(self, h: Tensor) -> Tensor:
        h = h + h.cumsum(1) * self.mix
        return h + 0.5 * self.ffn(self.norm(h))


class Made(nn.Module):
    """A language model of one's own: a plain module that transformers knows nothing of."""

    def __init__(self, *ffns: nn.Module, vocabulary: int = 48) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, D)
        self.stack = nn.Sequential(*(Block(ffn) for ffn in ffns))
        self.last, self.score = nn.LayerNorm(D), nn.Linear(D, vocabulary)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.score(self.last(self.stack(self.table(input_ids)))) / 3.0


def made(d_ff: int = 24) -> Made:
    torch.manual_seed(3)
    return Made(Fused("halves", d_ff), Fused("rows", d_ff, scale=0.7), Fused("rows", d_ff)).eval()


IDS = torch.randint(0, 48, (2, 7), generator=torch.Generator().manual_seed(4))


def hooks(model: nn.Module) -> list[Any]:
    names = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
    return [(path, name, list(getattr(m, name))) for path, m in model.named_modules() for name in names]


def inside(model: nn.Module, layer: Layer, batch: Any) -> dict[str, Tensor]:
    """What the layer's own linears give and read in a run: outputs by role, and "m", what down reads; and "last"."""
    seen: dict[str, Tensor] = {}
    handles = []
    for role, path in layer.found.projections.items():
        linear = model.get_submodule(path)
        if role == "down":
            handles.append(linear.register_forward_pre_hook(lambda _m, args: seen.__setitem__("m", args[0])))
            handles.append(linear.register_forward_hook(lambda _m, _a, y: seen.__setitem__("last", y)))
        else:
            handles.append(linear.register_forward_hook(lambda _m, _a, y, role=role: seen.__setitem__(role, y)))
    with torch.no_grad():
        model(**batch) if isinstance(batch, dict) else model(batch)
    for handle in handles:
        handle.remove()
    return seen


def roundings(weights: Weights) -> float:
    """Sums of d_model float32 products: what two ways of adding them may differ by, relative."""
    return 2 * UNIT_ROUNDOFF["float32"] * weights.spec.d_model


def oriented(weights: Weights, x: Tensor, own: dict[str, Tensor]) -> bool:
    """Whether keys give the pre-activations that the module computed, and coefficients what its down has read."""
    parts = [own[r] for r in ("gate_up", "gate", "up") if r in own]
    rows = [r for r in (weights.gate, weights.up) if r is not None]
    biases = [b for b, r in ((weights.gate_bias, weights.gate), (weights.up_bias, weights.up)) if r is not None]
    keys = [nn.functional.linear(x, r, b) for r, b in zip(rows, biases)]
    if "gate_up" in own:  # every pre-activation of the fused matrix is that of one key, in whatever order
        keys, parts = [torch.cat(keys, -1).sort(-1).values], [parts[0].sort(-1).values]
    m = coefficients(weights, x).coefficient
    pairs = [*zip(keys, parts), (m, own["m"])]
    return all(relative_error(a.flatten(0, -2), b.flatten(0, -2)) <= roundings(weights) for a, b in pairs)


def writes(model: nn.Module, layer: Layer, weights: Weights, channel: int) -> bool:
    """Whether a channel's value is what down gives for the one-hot coefficient, less what it gives for zeros."""
    down: Any = model.get_submodule(layer.found.projections["down"])
    one = torch.zeros(2, weights.spec.d_ff)
    one[0, channel] = 1.0
    with torch.no_grad():
        y = down(one) * layer.found.scale
    bias = torch.zeros(weights.spec.d_model) if weights.down_bias is None else weights.down_bias
    tight = roundings(weights) * float(y.abs().max())
    return bool((y[0] - y[1] - weights.down[:, channel]).abs().max() <= tight and (y[1] - bias).abs().max() <= tight)


def wrong(weights: Weights) -> dict[str, Weights]:
    """The same with what is easily confused confused, for the keys."""
    out = {"neighbouring key": weights.replace(up=weights.up.roll(1, 0))}
    if weights.gate is not None:
        biases = {"gate_bias": weights.up_bias, "up_bias": weights.gate_bias}
        out["gate and up exchanged"] = weights.replace(gate=weights.up, up=weights.gate, **biases)
    for name in ("gate_bias", "up_bias"):
        if getattr(weights, name) is not None:
            out[f"{name} dropped"] = weights.replace(**{name: torch.zeros_like(getattr(weights, name))})
    if weights.spec.d_model == weights.spec.d_ff:
        out["row for column"] = weights.replace(up=weights.up.t())
    return out


@pytest.fixture(scope="module")
def models() -> dict[str, tuple[nn.Module, Anatomy]]:
    out = {}
    for family in FAMILIES:
        model = build(family)
        torch.manual_seed(8)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.dim() == 1 and "bias" not in name:
                    p.add_(torch.randn(p.shape) * 0.3)  # gains of norms that differ
        out[family.name] = (model, ff.memory.anatomy(model))
    return out


def check_orientation(model: nn.Module, anatomy: Anatomy, batch: Any) -> None:
    captured = capture(model, anatomy, batch)
    for layer in anatomy.layers:
        weights, own = layer.weights(), inside(model, layer, batch)
        x = captured.x[layer.index]
        assert oriented(weights, x, own)
        for name, mutant in wrong(weights).items():
            assert not oriented(mutant, x, own), name
        for channel in (0, weights.spec.d_ff - 1):
            assert writes(model, layer, weights, channel)
            assert not writes(model, layer, weights.replace(down=weights.down.roll(1, 1)), channel)
        if weights.down_bias is not None:
            assert not writes(model, layer, weights.replace(down_bias=torch.zeros_like(weights.down_bias)), 0)
        if weights.spec.d_ff == weights.spec.d_model:
            assert not writes(model, layer, weights.replace(down=weights.down.t()), 0)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_keys_and_values_are_those_the_model_computes_with(family: Family, models) -> None:
    model, anatomy = models[family.name]
    assert len(anatomy.layers) == family.count
    check_orientation(model, anatomy, inputs(model))


@pytest.mark.parametrize("d_ff", [24, D], ids=["narrow", "square"])
def test_keys_and_values_of_fused_and_interleaved_matrices(d_ff: int) -> None:
    model = made(d_ff)
    anatomy = ff.memory.anatomy(model, {"input_ids": IDS})
    orders = [layer.found.layout.order for layer in anatomy.layers]
    assert orders == ["[up;gate]", "interleaved up,gate", "interleaved up,gate"]
    assert anatomy.layers[1].found.scale == pytest.approx(0.7)
    check_orientation(model, anatomy, IDS)


def held(layer: Layer, weights: Weights, captured: Any) -> Any:
    i = layer.index
    x, y = (t[i].flatten(0, -2) for t in (captured.x, captured.y))
    m = coefficients(weights, x).coefficient
    return sum_rule(layer, weights, x, y, m, captured.dtype[i], captured.largest[i])


def mutants(weights: Weights) -> dict[str, Weights]:
    values = {"neighbouring value": weights.replace(down=weights.down.roll(1, 1))}
    if weights.down_bias is not None:
        values["down bias dropped"] = weights.replace(down_bias=torch.zeros_like(weights.down_bias))
    return values | wrong(weights)


def check_sums(model: nn.Module, anatomy: Anatomy, batch: Any) -> None:
    captured = capture(model, anatomy, batch)
    for layer in anatomy.layers:
        weights = layer.weights()
        rule = held(layer, weights, captured)
        assert rule.holds, (layer.path, rule)
        for name, mutant in mutants(weights).items():
            assert not held(layer, mutant, captured).holds, (layer.path, name)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_the_sum_over_channels_is_what_the_layer_gave(family: Family, models) -> None:
    model, anatomy = models[family.name]
    check_sums(model, anatomy, inputs(model))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_with_the_kernels_on(family: Family, models) -> None:
    """Swapped in place: the same anatomy, sums of what the kernels gave, and the kernels ran throughout."""
    model, before = copy.deepcopy(models[family.name][0]), models[family.name][1]
    rows = ff.swap(model, backend="cpu").rows
    after = ff.memory.anatomy(model)
    assert [(a.path, a.write, a.spec) for a in after.layers] == [(b.path, b.write, b.spec) for b in before.layers]
    assert (after.effects_why_not, after.final_norm) == (before.effects_why_not, before.final_norm)
    for row in rows:
        for state in row.states:
            state.calls, state.aside = 0, type(state.aside)()
    check_sums(model, after, inputs(model))
    assert all(state.calls == 1 and not state.aside for row in rows for state in row.states)
    for a, b in zip(after.layers, before.layers):
        for (name, mine), (_, plain) in zip(a.weights().items(), b.weights().items()):
            assert torch.equal(mine, plain), name


@pytest.mark.parametrize("name", ["llama_bias", "phi3", "gpt2", "bert", "bloom", "t5_v1_1"])
@pytest.mark.parametrize("format", ["bf16", "int8", "int4_g32"])
def test_with_packed_weights(name: str, format: str, models) -> None:
    """Weights are those that the packed format holds, and the sum rule allows what its arithmetic rounds, no more."""
    model = copy.deepcopy(models[name][0])
    ff.swap(model, format=format)
    anatomy = ff.memory.anatomy(model)
    captured = capture(model, anatomy, inputs(model))
    for layer in anatomy.layers:
        weights = layer.weights()
        rule = held(layer, weights, captured)
        assert rule.holds, (layer.path, rule)
        assert rule.allowed < 0.1
        assert not held(layer, weights.replace(down=weights.down.roll(1, 1)), captured).holds
        if weights.gate is not None:
            exchanged = wrong(weights)["gate and up exchanged"]
            assert not held(layer, exchanged, captured).holds
        linear = model.get_submodule(layer.found.projections["down"])
        assert torch.equal(weights.down, linear._fanfold.weight.matrix(torch.float32))


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "bloom"])
def test_models_in_bfloat16(name: str) -> None:
    """The allowance follows bfloat16's roundings, and still tells a wrong channel."""
    model = build(BY_NAME[name]).bfloat16()
    anatomy = ff.memory.anatomy(model)
    assert anatomy.effects_why_not is None
    captured = capture(model, anatomy, inputs(model))
    for layer in anatomy.layers:
        weights = layer.weights()
        rule = held(layer, weights, captured)
        assert rule.holds
        assert rule.allowed < 0.2
        assert not held(layer, weights.replace(down=weights.down.roll(1, 1)), captured).holds


def test_how_each_family_writes_and_is_read(models) -> None:
    for name, (model, anatomy) in models.items():
        ways = {layer.write for layer in anatomy.layers}
        assert ways == {"normed" if name in NORMED else "not additive" if name in POST_LN else "additive"}, name
        if name in NORMED:
            assert anatomy.layers[0].post_norm == "model.layers.0.post_feedforward_layernorm"
        assert (anatomy.effects_why_not is None) == (name not in (*POST_LN, "vit")), name
        assert all(layer.direct for layer in anatomy.stream) == (anatomy.effects_why_not is None)
        if name not in (*POST_LN, "vit"):
            layer_norm = name in ("gpt2", "gpt_neox", "gptj", "opt", "bloom", "falcon")
            assert anatomy.norm_kind == ("layer" if layer_norm else "rms"), name
            assert torch.equal(anatomy.unembedding(), model.get_output_embeddings().weight)
    assert "output.LayerNorm normalises the sum" in models["bert"][1].effects_why_not
    assert models["gemma2"][1].head.softcap == pytest.approx(30.0)
    assert [layer.index for layer in models["t5"][1].stream] == [2, 3]  # the decoder's
    assert models["t5"][1].head.input_scale == pytest.approx(D**-0.5)
    assert models["vit"][1].unembedding() is None


def test_an_encoder_without_a_head_is_read_by_its_embedding() -> None:
    model = tf.BertModel(
        tf.BertConfig(hidden_size=D, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4, vocab_size=50)
    ).eval()
    anatomy = ff.memory.anatomy(model)
    assert torch.equal(anatomy.unembedding(), model.embeddings.word_embeddings.weight)
    assert "no head" in anatomy.head_note
    assert anatomy.effects_why_not.startswith("layer 0 does not add to the residual: encoder.layer.0.output.LayerNorm")


@pytest.mark.parametrize(
    ("cls", "config", "extra", "expected"),
    [
        ("Granite", {"residual_multiplier": 0.22, "logits_scaling": 8.0}, {"num_key_value_heads": 2}, (0.22, 0.125)),
        ("Cohere", {"logit_scale": 0.0625}, {"num_key_value_heads": 2}, (1.0, 0.0625)),
        ("Olmo2", {}, {"num_key_value_heads": 2}, (1.0, 1.0)),
        ("Phi", {}, {}, (1.0, 1.0)),
    ],
)
def test_factors_on_the_way_to_the_logits(cls, config, extra, expected) -> None:
    sizes = {"hidden_size": D, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings = getattr(tf, f"{cls}Config")(**sizes, **config, **extra, vocab_size=50, pad_token_id=0)
    model = getattr(tf, f"{cls}ForCausalLM")(settings).eval()
    anatomy = ff.memory.anatomy(model)
    assert anatomy.effects_why_not is None
    assert (anatomy.layers[0].factor, anatomy.head.logit_scale) == pytest.approx(expected)
    assert {layer.write for layer in anatomy.layers} == {"normed" if cls == "Olmo2" else "additive"}


def test_layers_that_share_their_weights_are_layers_of_their_own() -> None:
    config = tf.AlbertConfig(
        vocab_size=64, embedding_size=D, hidden_size=D, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4
    )
    model = tf.AlbertForMaskedLM(config).eval()
    for name, p in model.named_parameters():
        p.data += 0.3 * torch.randn(p.shape) * ("bias" in name)  # they begin at 0, where a lost one is invisible
    anatomy = ff.memory.anatomy(model)
    assert [(layer.index, layer.call) for layer in anatomy.layers] == [(0, 0), (1, 1), (2, 2)]
    captured = capture(model, anatomy, [[5, 6, 7]])
    assert not torch.equal(captured.x[0], captured.x[1])
    check_sums(model, anatomy, {"input_ids": torch.tensor([[5, 6, 7]])})


def test_a_head_of_another_width_reads_no_values() -> None:
    config = tf.OPTConfig(
        hidden_size=D, word_embed_proj_dim=16, ffn_dim=40, num_hidden_layers=1, num_attention_heads=4, vocab_size=64,
        do_layer_norm_before=False,
    )  # fmt: skip
    anatomy = ff.memory.anatomy(tf.OPTForCausalLM(config).eval())
    assert anatomy.unembedding() is None
    assert "16 dimensions, its layers write 32" in anatomy.head_note


@pytest.mark.parametrize("family", DIRECT, ids=lambda f: f.name)
def test_the_last_state_leads_to_the_logits(family: Family, models) -> None:
    """E · norm(h), as anatomy describes it, against the model in float64; wrong descriptions fail."""
    model, anatomy = models[family.name]
    batch = inputs(model)
    captured = capture(model, anatomy, batch)
    with torch.no_grad():
        truth = logits(copy.deepcopy(model).double(), batch)
    head, norm = anatomy.head, anatomy.head.norm
    assert norm is not None
    assert captured.final is not None
    e, h = anatomy.unembedding().double(), captured.final.double()
    bias = 0 if anatomy.head_bias is None else anatomy.head_bias.double()

    def ours(gain: Tensor, shift: Any, centre: bool, s: Tensor) -> Tensor:
        n = gain * (h - h.mean(-1, keepdim=True) if centre else h) * s + (0 if shift is None else shift)
        z = (n * head.input_scale @ e.T + bias) * head.logit_scale
        return z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)

    centre, s = norm.kind == "layer", norm.scale(h)
    right = ours(norm.gain, norm.bias, centre, s)
    assert compare(right, truth, captured.logits, dtype=torch.float32)
    assert not compare(ours(norm.gain, norm.bias, not centre, s), truth, captured.logits)
    assert not compare(ours(norm.gain, norm.bias, centre, s.roll(1, 1)), truth, captured.logits)
    assert not compare(ours(norm.gain.roll(1), norm.bias, centre, s), truth, captured.logits)


def test_captured_tensors_are_copies(models) -> None:
    model, anatomy = models["gpt2"]
    batch = inputs(model)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    first = capture(model, anatomy, batch)
    for t in (first.embedded, first.final, first.logits, *first.x.values(), *first.y.values(), *first.after.values()):
        assert t.dtype == torch.float32
        t.fill_(7.0)
    second = capture(model, anatomy, batch)
    assert all(torch.equal(state[name], t) for name, t in model.state_dict().items())
    assert not any(bool((t == 7).all()) for t in (second.final, second.logits, second.x[0], second.y[1]))
    assert torch.equal(second.before[1], second.after[0])
    assert second.before[1].data_ptr() != second.after[0].data_ptr()
    with torch.no_grad():
        kept = second.x[0].clone()
        model.transformer.h[0].mlp.c_fc.weight.mul_(2.0)
        assert torch.equal(second.x[0], kept)
        model.transformer.h[0].mlp.c_fc.weight.div_(2.0)


def test_the_model_is_left_as_it_was(models) -> None:
    model = copy.deepcopy(models["llama"][0]).train()
    calls: list[int] = []
    model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    before, state = hooks(model), {n: t.clone() for n, t in model.state_dict().items()}
    anatomy = ff.memory.anatomy(model)
    assert not calls  # an experiment's runs are not the user's
    captured = capture(model, anatomy, [1, 2, 3], layers=[1])
    assert calls == [1]
    assert list(captured.x) == [1]
    assert captured.x[1].shape == (1, 3, D)
    assert hooks(model) == before
    assert all(m.training for m in model.modules())
    assert all(torch.equal(state[n], t) for n, t in model.state_dict().items())
    assert all(not t.requires_grad for t in captured.y.values())


def test_hooks_go_when_the_run_fails(models) -> None:
    model = copy.deepcopy(models["llama"][0])
    anatomy = ff.memory.anatomy(model)
    before = hooks(model)
    with pytest.raises(IndexError):
        capture(model, anatomy, [1, 2, 10**6])
    assert hooks(model) == before
    with pytest.raises(ValueError, match="layer 5 does not exist: the model has layers 0 to 1"):
        capture(model, anatomy, [1], layers=[5])


def test_one_of_each_kind_is_experimented_on_and_all_are_checked(monkeypatch) -> None:
    """A layer whose code is alike and whose function is not is caught by its own output."""
    model = made()
    model.stack[2].ffn.order = "halves"
    anatomy = ff.memory.anatomy(model, {"input_ids": IDS})
    assert [layer.found.layout.order for layer in anatomy.layers] == ["[up;gate]", "interleaved up,gate", "[up;gate]"]
    counted = copy.copy(model.stack[1].ffn)
    number = type("Numbered", (Fused,), {"forward": lambda self, x: Fused.forward(self, x) * (1 + self.n % 2)})
    for block, n in zip(model.stack, (0, 0, 1)):
        block.ffn.__class__, block.ffn.n, block.ffn.order, block.ffn.scale = number, n, "rows", counted.scale
    anatomy = ff.memory.anatomy(model, {"input_ids": IDS})
    assert [round(layer.found.scale, 3) for layer in anatomy.layers] == [0.7, 0.7, 1.4]


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="pass inputs="):
        ff.memory.anatomy(made())
    with pytest.raises(ff.find.__globals__["FindError"], match="no FFN found"):
        ff.memory.anatomy(nn.Linear(3, 4))


def test_gate_content_and_coefficient() -> None:
    """gate · content is the coefficient, clamps and offset of gpt-oss included; without a gate there is none."""
    clamped = {"activation": "silu", "beta": 1.702, "gate_limit": 0.5, "up_limit": 0.4, "up_offset": 1.0}
    for spec in (
        ff.Spec(d_model=6, d_ff=5, gated=True, up_bias=True, gate_bias=True, **clamped),
        ff.Spec(d_model=6, d_ff=5, gated=True, activation="gelu_tanh"),
        ff.Spec(d_model=5, d_ff=5, activation="relu", up_bias=True),
    ):
        weights = ff.numerics.random_weights(spec, make=lambda a: torch.tensor(a, dtype=torch.float32))
        for shape in ((0, spec.d_model), (3, spec.d_model), (2, 3, spec.d_model)):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(2)) * 3
            c = coefficients(weights, x)
            truth = ff.reference.coefficients(x, weights)
            np.testing.assert_allclose(c.coefficient, truth, rtol=1e-5, atol=1e-5)
            if not spec.gated:
                assert c.gate is None
                pre = x @ weights.up.T + weights.up_bias
                np.testing.assert_allclose(c.content, pre, rtol=1e-5, atol=1e-5)
                continue
            assert torch.equal(c.gate * c.content, c.coefficient)
            up = x @ weights.up.T + (0 if weights.up_bias is None else weights.up_bias)
            expected = up if spec.up_limit is None else up.clamp(-0.4, 0.4) + 1.0
            np.testing.assert_allclose(c.content, expected, rtol=1e-5, atol=1e-5)
