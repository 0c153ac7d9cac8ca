"""`memory.read`: parts that add up to the model's own logits, held against the model in float64, and what it says."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fanfold as ff
from families import FAMILIES, VOCAB, Family, build
from fanfold.memory import Reading, survive
from fanfold.memory.selective import selective
from fanfold.memory.vocabulary import _bytes
from fanfold.numerics import compare
from fanfold.show import models as packaged

BY_NAME = {family.name: family for family in FAMILIES}
DIRECT = [f for f in FAMILIES if f.name not in ("bert", "roberta", "distilbert", "vit", "t5", "t5_v1_1")]
IDS = [7, 3, 11, 60, 3]


def varied(family: Family) -> nn.Module:
    model = build(family)
    torch.manual_seed(8)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1 and "bias" not in name:
                p.add_(torch.randn(p.shape) * 0.3)  # gains of norms that differ
    return model


@pytest.fixture(scope="module")
def readings() -> dict[str, tuple[nn.Module, Reading]]:
    out = {}
    for family in FAMILIES:
        if family.name != "vit":
            model = varied(family)
            out[family.name] = (model, ff.memory.read(model, None, IDS))
    return out


def uncapped(reading: Reading, z: Tensor) -> np.ndarray:
    cap = reading.anatomy.head.softcap
    return (z.double() if cap is None else cap * torch.atanh(z.double() / cap)).numpy()


class Parts:
    """The parts of every token's logit at some positions [places, V]."""

    def __init__(self, reading: Reading, places: tuple[int, ...]) -> None:
        rows = [[reading.shares(at, t, centred=False) for t in range(VOCAB)] for at in places]
        self.embedding, self.constant = (
            np.array([[getattr(s, name) for s in row] for row in rows]) for name in ("embedding", "constant")
        )
        self.attention, self.ffn, self.bias = (
            np.array([[[getattr(layer, name) for layer in s.layers] for s in row] for row in rows])
            for name in ("attention", "ffn", "bias")
        )
        where = [(at, t) for at in places for t in range(VOCAB)]
        channels = [r.effects(where, centred=False).numpy().reshape(len(places), VOCAB, -1) for r in reading.layers]
        self.channels, self.last = sum(c.sum(-1) for c in channels), channels[-1][..., 0]
        self.by_block = self.embedding + self.constant + (self.attention + self.ffn).sum(-1)
        self.by_channel = self.by_block - self.ffn.sum(-1) + self.channels + self.bias.sum(-1)
        assert self.by_block[0, 3] == pytest.approx(rows[0][3].sum, rel=1e-12)

    def wrong(self) -> dict[str, np.ndarray]:
        """Sums with a part left out, or those of another token."""
        right = self.by_channel
        out = {
            "embedding": right - self.embedding,
            "attention": right - self.attention[..., 0],
            "one channel": right - self.last,
            "another token": np.roll(right, 1, axis=1),
        }
        named = (("down's bias", self.bias[..., 0]), ("the norm's bias", self.constant))
        return out | {name: right - part for name, part in named if part.any()}


@pytest.mark.parametrize("family", DIRECT, ids=lambda f: f.name)
def test_all_parts_add_up_to_the_logit_of_every_token(family: Family, readings) -> None:
    """Embedding, attention, FFN channels, biases: the model's float32 error is the measure, float64 the truth."""
    model, reading = readings[family.name]
    places = (0, len(IDS) - 1)
    with torch.no_grad():
        double = copy.deepcopy(model).double()
        truth, beside = (
            uncapped(reading, m(input_ids=torch.tensor([IDS])).logits[0, list(places)]) for m in (double, model)
        )
    parts = Parts(reading, places)
    assert compare(parts.by_block, truth, beside, dtype=torch.float32)
    assert compare(parts.by_channel, truth, beside, dtype=torch.float32)
    for name, wrong in parts.wrong().items():
        assert not compare(wrong, truth, beside, dtype=torch.float32), name


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_centred_effects_are_differences_of_logits(name: str, readings) -> None:
    """Σ of centred parts is the logit less the mean; a difference of two tokens is the same either way."""
    _, reading = readings[name]
    z = uncapped(reading, reading.captured.logits[0, 2])
    for t in (0, 5):
        shares = reading.shares(2, t)
        assert shares.logit == pytest.approx(z[t] - z.mean(), abs=1e-12)
        assert abs(shares.remainder) < 64 * 2**-24 * np.abs(z).max()
    layer = reading.layers[1]
    raw = layer.effect(5, 2, centred=False) - layer.effect(0, 2, centred=False)
    assert torch.allclose(raw, layer.effect(5, 2) - layer.effect(0, 2), atol=1e-12)
    every = torch.stack([layer.effect(t, 2) for t in range(VOCAB)])
    assert every.mean(0).abs().max() < 1e-9 < every.abs().max()


@pytest.mark.parametrize(("name", "module"), [("llama", "self_attn"), ("gptj", "attn"), ("gemma2", None)])
def test_the_attention_share_is_what_attention_gave(name: str, module: str | None, readings) -> None:
    """The rest of a block, against the output of the attention module itself (Gemma 2: of the norm behind it)."""
    model, reading = readings[name]
    gave: list[Tensor] = []
    block = model.get_submodule(reading.anatomy.layers[1].block)
    watched = block.get_submodule(module or "post_attention_layernorm")
    handle = watched.register_forward_hook(lambda _m, _a, y: gave.append(y[0] if isinstance(y, tuple) else y))
    with torch.no_grad():
        model(input_ids=torch.tensor([IDS]))
    handle.remove()
    toward = reading.readout.direction(reading.captured.final[0, 3], 9)
    share = reading.shares(3, 9).layers[1]
    assert share.attention == pytest.approx(float(gave[0][0, 3].double() @ toward), rel=1e-4, abs=1e-5)
    assert share.ffn != pytest.approx(share.attention, rel=1e-2)


def test_an_effect_is_the_coefficient_times_the_value_read_by_the_head(readings) -> None:
    """By hand for a Llama: m_i · Σ_d v_id · gain_d · s · e_td."""
    model, reading = readings["llama"]
    h = reading.captured.final[0, 4].double()
    s = 1 / torch.sqrt(h.square().mean() + model.config.rms_norm_eps)
    e = model.lm_head.weight[9].double() * model.model.norm.weight.double() * s
    for i in (0, 1):
        down = model.model.layers[i].mlp.down_proj.weight.double()
        m = reading.layers[i].coefficient[4].double()
        by_hand = (m * (down.t() @ e)).detach()
        assert torch.allclose(reading.layers[i].effect(9, 4, centred=False), by_hand, rtol=1e-5, atol=1e-9)
        assert torch.allclose(reading.layers[i].size[4].double(), m.abs() * down.norm(dim=0).detach(), rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "bert"])
def test_values_at_both_ends(name: str, readings) -> None:
    """Promoted and suppressed tokens are the ends of E · v through the norms' gains, ranked in float64 here."""
    model, reading = readings[name]
    layer = reading.anatomy.layers[1]
    v = layer.weights().down[:, 6].double()
    post, final = reading.anatomy.post_norm(layer), reading.anatomy.head.norm
    v = v if post is None else post.gain * v
    if final is not None:
        v = final.gain * (v - v.mean() if final.kind == "layer" else v)
    scores = reading.anatomy.unembedding().double() @ v * reading.anatomy.head.logit_scale
    scores = (scores - scores.mean()).detach()
    tokens = reading.value(1, 6, top=4)
    assert tokens.promoted_ids == scores.topk(4).indices.tolist()
    assert tokens.suppressed_ids == scores.topk(4, largest=False).indices.tolist()
    assert [s for _, s in tokens.promoted] == pytest.approx(scores.topk(4).values.tolist(), rel=1e-4)
    assert tokens.promoted[0][0] == f"<{tokens.promoted_ids[0]}>"
    assert model is layer.model
    many = reading.values({0: [1], 1: [6, 2]}, top=4)
    assert many[(1, 6)].promoted_ids == tokens.promoted_ids
    assert len(many) == 3


def test_blocks_of_values_give_what_single_ones_give(readings, monkeypatch) -> None:
    _, reading = readings["gpt2"]
    whole = reading.values({0: list(range(20))}, top=3)
    monkeypatch.setattr("fanfold.memory.effects._SCORES", 3 * VOCAB)
    parts = reading.values({0: list(range(20))}, top=3)
    assert parts.keys() == whole.keys()
    for key, tokens in parts.items():
        assert (tokens.promoted_ids, tokens.suppressed_ids) == (whole[key].promoted_ids, whole[key].suppressed_ids)
        scores = [[s for _, s in (*one.promoted, *one.suppressed)] for one in (tokens, whole[key])]
        assert scores[0] == pytest.approx(scores[1], rel=1e-4)
    assert reading.values({}, top=3) == {}
    assert reading.read_vectors(torch.empty(0, 32), 3) == []


def test_channels_in_order(readings) -> None:
    _, reading = readings["llama"]
    by_effect = reading.channels(-1, top=7)
    assert [abs(c.effect) for c in by_effect] == sorted((abs(c.effect) for c in by_effect), reverse=True)
    token = reading.explained(-1)
    every = torch.stack([r.effect(token, -1) for r in reading.layers]).abs()
    assert abs(by_effect[0].effect) == float(every.max())
    assert by_effect[0].layer * every.shape[1] + by_effect[0].channel == int(every.argmax())
    by_size = reading.channels(2, layer=1, top=5, by="size")
    assert [c.channel for c in by_size] == reading.layers[1].size[2].topk(5).indices.tolist()
    c = by_size[0]
    assert c.gate * c.content == pytest.approx(c.coefficient, rel=1e-6)
    assert c.size == pytest.approx(abs(c.coefficient) * float(reading.layers[1].value_norm[c.channel]), rel=1e-6)
    share = reading.top_share(1, 2, k=5)
    assert share == pytest.approx(sum(c.size for c in by_size) / float(reading.layers[1].size[2].sum()), rel=1e-5)
    assert reading.top_share(1, 2, k=10**6) == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
def test_post_ln_models_have_sizes_and_no_effects(name: str, readings) -> None:
    _, reading = readings[name]
    assert all(rule.holds for rule in reading.sum_rule)
    with pytest.raises(ValueError, match="normalises the sum of its output and the residual again"):
        reading.shares(0)
    with pytest.raises(ValueError, match="no direct effects"):
        reading.layers[0].effect(3, 0)
    with pytest.raises(ValueError, match="no direct effects"):
        reading.channels(0, by="effect")
    channels = reading.channels(0, top=3)
    assert all(c.effect is None for c in channels)
    assert channels[0].size == max(float(r.size[0].max()) for r in reading.layers)
    document = reading.to_dict()
    assert document["effects"] is False
    assert "normalises the sum" in document["effects_why_not"]
    assert document["positions"][0]["layers"][0]["ffn"] is None
    assert document["positions"][0]["predictions"]  # its head for masked tokens gives some


def test_a_prompt_of_two_texts_is_read_by_the_encoder(readings) -> None:
    _, reading = readings["t5"]
    assert [r.layer.index for r in reading.layers] == [0, 1]
    assert reading.layers[0].x.shape == (len(IDS), 32)
    with pytest.raises(ValueError, match="the prompt is read by the encoder"):
        reading.shares()
    with pytest.raises(ValueError, match=r"layer 3 .* is the decoder's"):
        ff.memory.read(reading.anatomy.model, None, IDS, layers=[3], anatomy=reading.anatomy)
    assert reading.predictions() == []


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2", "bert"])
def test_reading_with_kernels_and_packed_formats(name: str) -> None:
    """The same reading, within the rule, with the kernels on; a coarse format says what it allows."""
    model = varied(BY_NAME[name])
    before = ff.memory.read(model, None, IDS)
    ff.swap(model, backend="cpu")
    on = ff.memory.read(model, None, IDS)
    assert all(rule.holds for rule in on.sum_rule)
    assert torch.allclose(on.layers[1].coefficient, before.layers[1].coefficient, atol=1e-5)
    assert json.dumps(on.to_dict())
    ff.unswap(model)
    ff.swap(model, format="int8", linears="all")
    packed = ff.memory.read(model, None, IDS)
    assert all(rule.holds for rule in packed.sum_rule)
    assert {rule.arithmetic for rule in packed.sum_rule} == {"int8 on int8 activations"}
    assert (packed.effects_why_not is None) == (before.effects_why_not is None)
    if packed.effects_why_not is None:
        shares = packed.shares(-1)
        assert abs(shares.remainder) < 0.1 * abs(packed.captured.logits[0, -1]).max()
        assert any("coarser format" in note for note in packed.notes)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_reading_a_model_in_bfloat16(name: str) -> None:
    model = varied(BY_NAME[name]).bfloat16()
    reading = ff.memory.read(model, None, IDS)
    assert all(rule.holds for rule in reading.sum_rule)
    z = reading.captured.logits[0, -1]
    for t in (1, 9):
        assert abs(reading.shares(-1, t, centred=False).remainder) <= 4 * 2**-8 * float(z.abs().max())


def test_what_is_given(readings) -> None:
    model, reading = readings["llama"]
    anatomy = reading.anatomy
    one = ff.memory.read(model, None, torch.tensor([[4]]), anatomy=anatomy)
    assert one.layers[0].x.shape == (1, 32)
    assert one.to_dict()["positions"][0]["position"] == 0
    assert ff.memory.read(model, None, np.array([4, 5]), layers=[1], anatomy=anatomy).layers[0].layer.index == 1
    for prompt, words in [
        ([], "no tokens"),
        ("text", "no tokenizer"),
        ([[1, 2], [3, 4]], r"shape \(2, 2\)"),
        ([0] * 65, "65 tokens, the model reads up to 64"),
        ([1.5], "float32"),
    ]:
        with pytest.raises(ValueError, match=words):
            ff.memory.read(model, None, prompt, anatomy=anatomy)
    for call, words in [
        (lambda: reading.shares(5), "position 5 does not exist: the prompt has 5 tokens, 0 to 4"),
        (lambda: reading.shares(0, 64), "ids 0 to 63"),
        (lambda: reading.shares(0, " Paris"), "no tokenizer"),
        (lambda: reading.value(0, 56), "channels 0 to 55"),
        (lambda: reading.layer(2), "layers: 0, 1"),
        (lambda: reading.channels(by="weight"), "known: effect, size"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(ValueError, match="reads pixel_values"):
        ff.memory.read(build(BY_NAME["vit"]), None, [1, 2])


def test_a_reading_keeps_what_was(readings) -> None:
    """Tensors of a reading are its own: training on does not change them, nor they the model."""
    model = copy.deepcopy(readings["llama"][0])
    reading = ff.memory.read(model, None, IDS)
    kept = [t.clone() for r in reading.layers for t in (r.x, r.y, r.gate, r.content, r.coefficient, r.value_norm)]
    state = {name: t.clone() for name, t in model.state_dict().items()}
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    now = [t for r in reading.layers for t in (r.x, r.y, r.gate, r.content, r.coefficient, r.value_norm)]
    assert all(torch.equal(a, b) for a, b in zip(kept, now))
    model.load_state_dict(state)
    for t in now:
        t.zero_()
    assert all(torch.equal(state[name], t) for name, t in model.state_dict().items())


def test_the_document_is_small_and_plain(readings) -> None:
    for name, (_, reading) in readings.items():
        document = reading.to_dict(top=3)
        text = json.dumps(document, allow_nan=False)
        assert json.loads(text) == document, name
        used = {
            f"{r['layer']}:{c['channel']}" for p in document["positions"] for r in p["layers"] for c in r["channels"]
        }
        assert set(document["values"]) == used, name
        assert len(document["heat"]) == len(IDS)
        assert all(len(row) == len(reading.layers) for row in document["heat"])
    _, reading = readings["llama"]
    document = reading.to_dict(top=3, positions=[-1], values=False)
    assert document["values"] == {}
    (position,) = document["positions"]
    assert position["position"] == 4
    parts = [
        position["embedding"],
        position["constant"],
        *(r[k] for r in position["layers"] for k in ("attention", "ffn")),
    ]
    assert math.fsum(parts) == pytest.approx(position["total"], rel=1e-2, abs=1e-3)
    assert position["layers"][-1]["rank"] == 1  # the last state says what the model says
    assert position["layers"][-1]["top_after"][0] == position["predictions"][0]["text"] == position["token"]["text"]
    assert position["layers"][-1]["top_after"][1] == position["predictions"][0]["p"]


def test_selective_response_by_hand() -> None:
    """Two orthogonal values and a small third: every figure can be done on paper."""
    down = torch.tensor([[3.0, 0, 0, 0], [0, 4.0, 0, 0], [0, 0, 1.0, 5.0]])
    m = torch.tensor([[1.0, -1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 2.0]])
    s = selective(3, m, down, top=2)
    assert s.nonzero == pytest.approx(4 / 8)
    # token 0: sizes 0 1 3 4, norms of the smallest's sums 0 1 sqrt(10) sqrt(26); 0.2 sqrt(26) = 1.02: two are dropped
    # token 1: nothing is dropped but the zeros, one channel is left
    assert s.above_cett == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert s.threshold == pytest.approx((3 + 10) / 2)
    assert s.participation == pytest.approx((26**2 / (1 + 81 + 256) + 1) / 2)
    assert s.top_share == pytest.approx((7 / 8 + 1) / 2)
    assert s.top_norm == pytest.approx((5 / 26**0.5 + 1) / 2)
    assert selective(0, torch.zeros(1, 4), down).above_cett == 0.0
    with pytest.raises(ValueError, match="no tokens"):
        selective(0, m[:0], down)


def test_pieces_of_characters_are_told_apart() -> None:
    """A byte-level vocabulary's parts of a character stand as bytes, whole ones and other vocabularies' as they are."""
    assert _bytes("Ġæ") == " \\xe6"
    assert _bytes("¥") == "\\xa5"
    assert _bytes("é") == "\\xe9"
    assert _bytes("<0xE6>▁") == "<0xE6>▁"


def test_relu_is_exactly_zero_where_it_is(readings) -> None:
    _, reading = readings["opt"]
    s = reading.selective(0)
    assert s.nonzero == float((reading.layers[0].content > 0).float().mean())
    assert 0.2 < s.nonzero < 0.8
    assert readings["llama"][1].selective(0).nonzero == 1.0


class Words:
    """A tokenizer of numbers: "3 14" is [3, 14]."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [1] if text == "a" else [int(w) for w in text.split()]}

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(str(i) for i in ids)


def test_what_survives_of_a_model(readings) -> None:
    """Everything kept is the model itself; the figures against a copy whose down reads the kept coefficients alone."""
    model, reading = readings["llama"]
    text = "3 14 15 9 26 5 35 8 9 7 9 3 23 8 46 26 43 38 32 7 9"
    kept = survive(model, Words(), [text, "4", "60 2"], keep=(1.0, 0.25), anatomy=reading.anatomy)
    assert [k.keep for k in kept] == [1.0, 1.0, 0.25]
    assert (kept[0].agreement, kept[0].positions) == (1.0, 21)
    assert kept[1].perplexity == pytest.approx(kept[0].perplexity, rel=1e-5)
    twin = copy.deepcopy(model)
    for block in twin.model.layers:
        norm = block.mlp.down_proj.weight.detach().norm(dim=0)

        def only(_m: nn.Module, args: tuple[Tensor, ...], norm: Tensor = norm) -> Tensor:
            size = args[0].abs() * norm
            return args[0] * (size >= size.topk(14, dim=-1).values[..., -1:])

        block.mlp.down_proj.register_forward_pre_hook(only)
    losses, same = [], []
    for ids in ([int(w) for w in text.split()], [60, 2]):
        with torch.no_grad():
            a, b = (m(input_ids=torch.tensor([ids])).logits[0, :-1] for m in (model, twin))
        losses.append(nn.functional.cross_entropy(b, torch.tensor(ids[1:]), reduction="none"))
        same.append(a.argmax(-1) == b.argmax(-1))
    assert kept[2].perplexity == pytest.approx(float(torch.cat(losses).mean().exp()), rel=1e-4)
    assert kept[2].agreement == pytest.approx(float(torch.cat(same).float().mean()))
    assert kept[2].agreement < 1.0
    bert, other = readings["bert"]
    with pytest.raises(ValueError, match="reads later tokens too"):
        survive(bert, Words(), [text], anatomy=other.anatomy)
    with pytest.raises(ValueError, match="fewer than two tokens"):
        survive(model, Words(), ["4"], anatomy=reading.anatomy)
    with pytest.raises(ValueError, match=r"keep=0: expected fractions"):
        survive(model, Words(), [text], keep=[0], anatomy=reading.anatomy)


@pytest.fixture(scope="module")
def smollm2() -> tuple[packaged.Loaded, Reading]:
    loaded = packaged.load("smollm2")
    return loaded, ff.memory.read(loaded.model, loaded.tokenizer, "The capital of France is")


def test_smollm2(smollm2) -> None:
    _, reading = smollm2
    assert reading.tokens == ["The", " capital", " of", " France", " is"]
    assert len(reading.sum_rule) == 30
    assert all(rule.holds for rule in reading.sum_rule)
    assert reading.predictions(-1, 1)[0].text == " Paris"
    shares = reading.shares(-1, " Paris")
    scale = float(reading.captured.logits[0, -1].abs().max())
    assert abs(shares.remainder) < 64 * 2**-24 * scale
    for token in (" the", " London", 0):
        parts = reading.shares(2, token, centred=False)
        channels = sum(float(r.effect(token, 2, centred=False).sum()) for r in reading.layers)
        attention = sum(row.attention for row in parts.layers)
        whole = parts.embedding + parts.constant + attention + channels
        assert whole == pytest.approx(parts.logit, abs=64 * 2**-24 * scale)
    document = reading.to_dict(top=8)
    assert len(json.dumps(document)) < 1e6
    with pytest.raises(ValueError, match=r"' Paris!' is 2 tokens \(' Paris', '!'\)"):
        reading.shares(-1, " Paris!")


def test_smollm2_what_survives(smollm2) -> None:
    """Fewer channels, less of the model: a text of words, kept whole, by half and by a tenth."""
    loaded, reading = smollm2
    text = "The sun rises in the east and sets in the west. Water boils at one hundred degrees, and freezes at zero."
    kept = survive(loaded.model, loaded.tokenizer, [text], keep=(0.5, 0.1), anatomy=reading.anatomy)
    assert max(kept[0].perplexity, kept[1].perplexity) < kept[2].perplexity  # of a short text, half may do better
    assert kept[1].agreement > 0.8 >= kept[2].agreement


def test_minilm() -> None:
    loaded = packaged.load("minilm")
    reading = ff.memory.read(loaded.model, loaded.tokenizer, "The capital of France is Paris.")
    assert reading.tokens[:3] == ["[CLS]", " the", " capital"]
    assert len(reading.sum_rule) == 6
    assert all(rule.holds for rule in reading.sum_rule)
    assert "input embedding" in reading.anatomy.head_note
    assert "LayerNorm normalises the sum" in reading.effects_why_not
    document = reading.to_dict(top=4)
    assert not document["effects"]
    assert document["positions"][1]["layers"][0]["update_tokens"]
