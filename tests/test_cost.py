"""Cost: figures and their formulas, floors, all-reduce, blocks, whole models, plans, sweeps, the probe."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fanfold as ff
from fanfold import Spec
from fanfold.count import config, ffn, hardware, models, plan, probe, sweep
from fanfold.count import settings as conditions
from fanfold.count.block import Attention, Block, widen
from fanfold.count.collective import all_reduce
from fanfold.count.hardware import Link, Links

LLAMA = Spec.parse("swiglu", d_model=4096, d_ff=11008)
H200 = hardware.get("h200")
BLOCK = Block(ffn=LLAMA, attention=Attention(d_model=4096, n_heads=32, n_kv_heads=8, head_dim=128))


def evaluated(figure: ff.count.figures.Figure) -> float:
    names = {"ceil": math.ceil, "log2": math.log2, "max": max, "min": min}
    return eval(figure.formula, {"__builtins__": {}}, {**names, **figure.numbers})  # our own constant formulas


# --- figures ---


@pytest.mark.parametrize(
    ("what", "kwargs"),
    [
        (LLAMA, {"hardware": "h200"}),
        (LLAMA, {"hardware": "h200", "tp": 8, "tokens": 512, "format": "int4"}),
        (LLAMA, {"hardware": "mi300x", "tp": 16, "tokens": 3, "format": "fp8"}),
        (LLAMA, {"hardware": "m2-ultra", "format": "fp32"}),
        (Spec(d_model=5, d_ff=33, activation="relu", up_bias=True, down_bias=True), {"format": "q4_1", "tokens": 7}),
        (BLOCK, {"hardware": "h200", "tp": 4, "tokens": 9, "context": 1000, "sequences": 3}),
        ("llama-3-70b", {"hardware": "b200", "tp": 8, "tokens": 64}),
        ("mixtral-8x7b", {"hardware": "h100-sxm-80gb", "tokens": 5}),
        ("t5-base", {}),
        ("deepseek-v3-671b", {"hardware": "h200"}),
        ("palm-540b", {}),
    ],
)
def test_every_figure_is_what_its_formula_gives(what, kwargs):
    """The formula that --why prints, evaluated with the numbers it prints, is the figure. Kills any unstated term."""
    found = ff.cost(what, **kwargs)
    for name, figures in found.sections.items():
        for key, figure in figures.items():
            if figure.value is None:
                assert figure.note, key
                continue
            assert evaluated(figure) == pytest.approx(figure.value, rel=1e-12), f"{name} {key}: {figure.why()}"
    assert len(found.why()) == sum(len(f) for f in found.sections.values())


def test_why_puts_the_numbers_in():
    lines = ff.cost(LLAMA, hardware="h200").why()
    assert any("= 2 * 3 * 4096 * 11008 * 1 = 270532608 FLOP" in line for line in lines)
    assert any("moved_bytes / bytes_per_s = 270548992 / 4800000000000 = 5.63644e-05 s" in line for line in lines)


UNITS = ("_params", "_flop", "_bytes", "_s", "_tokens", "_byte", "_per_device")


def test_keys_carry_units():
    document = ff.cost("llama-3-8b", hardware="h200", tp=8).to_dict()
    assert json.loads(json.dumps(document)) == document
    for section in ("ffn", "attention", "head", "model"):
        for key in document[section]:
            shares = key.startswith("ffn_share_of_")
            assert shares or key in ("params", "params_tied") or key.endswith(UNITS), key


def test_an_unknown_figure_names_the_known():
    with pytest.raises(KeyError, match=r"there is no figure 'flops'; there are: gate_params, up_params"):
        ff.cost(LLAMA)["flops"]


# --- FFN ---


def test_llama():
    found = ff.cost(LLAMA, tokens=1, format="bf16", hardware="h200")
    assert found["params"] == 135_266_304
    assert found["forward_flop"] == 270_532_608
    assert found["backward_flop"] == 541_065_216
    assert found["weight_bytes"] == 270_532_608
    assert found.bytes_by_format["int4_g128"] == 135_266_304 * 4.25 / 8
    assert found.bound == "memory"
    moved = 270_532_608 + 2 * 4096 * 2
    assert found["floor_s"] == moved / 4.8e12
    assert found["compute_s"] == 270_532_608 / 989e12
    assert found["tokens_per_s"] == 1 / found["floor_s"]
    assert found.saved_bytes == {s: ffn.saved_bytes(LLAMA, 1, s) for s in ffn.KEEPERS}
    assert "135,266,304" in str(found)


def test_the_ridge_is_where_both_times_are_equal():
    """At the ridge, and not a token away, decode turns from memory- to compute-bound."""
    ridge = ff.cost(LLAMA, hardware="h200")["ridge_tokens"]
    assert 200 < ridge < 215  # 206 FLOP per byte, a bit more for the activations
    below, above = (ff.cost(LLAMA, tokens=t, hardware="h200") for t in (math.floor(ridge), math.ceil(ridge)))
    assert (below.bound, above.bound) == ("memory", "compute")
    # a format half as wide halves it, an FFN twice as wide does not move it by much
    half = ff.cost(LLAMA, hardware="h200", format="int8", compute="bf16")["ridge_tokens"]
    assert half == pytest.approx(ridge / 2, rel=0.01)


@pytest.mark.parametrize(
    ("device", "flop_per_byte"),
    [("a100-sxm-80gb", 153), ("h100-sxm-80gb", 295), ("h100-pcie-80gb", 378), ("h200", 206), ("b200", 281),
     ("l40s", 419), ("mi300x", 247), ("tpu-v5e", 240), ("tpu-v5p", 166), ("tpu-v6e", 560), ("rtx-4090", 164),
     ("rtx-5090", 117)],
)  # fmt: skip
def test_ridges_of_devices(device, flop_per_byte):
    found = hardware.get(device)
    assert round(found.peak_flops["bf16"] / found.bytes_per_s) == flop_per_byte


def test_an_unknown_peak_leaves_the_compute_time_out():
    found = ff.cost(LLAMA, hardware="h200", format="fp32")
    assert found["compute_s"] is None
    assert found["ridge_tokens"] is None
    assert found.bound == "unknown"
    assert found["floor_s"] == found["memory_s"] > 0
    assert "peak of h200-sxm in fp32 is not known" in found.figure("compute_s").note
    assert ff.cost(LLAMA, hardware="a100-sxm-80gb", format="fp8")["compute_s"] > 0  # multiplies in bf16


def test_without_hardware_there_are_counts_and_no_times():
    found = ff.cost(LLAMA)
    assert found.bound == "unknown"
    assert not [key for key in found.whole if key.endswith("_s")]


widths = st.integers(1, 3000)


@settings(deadline=None, max_examples=50)
@given(widths, widths, st.integers(1, 500), st.sampled_from(["bf16", "int8", "int4", "q4_0"]), st.booleans())
def test_costs_grow(d_model, d_ff, tokens, format, gated):
    """More channels or tokens never cost less; the floor is never below either of its two times."""
    spec = Spec(d_model=d_model, d_ff=d_ff, activation="silu", gated=gated)
    wider = Spec(d_model=d_model, d_ff=d_ff + 1, activation="silu", gated=gated)
    one, more, later = (
        ff.cost(s, tokens=t, format=format, hardware="h200")
        for s, t in ((spec, tokens), (wider, tokens), (spec, tokens + 1))
    )
    for key in ("forward_flop", "backward_flop", "weight_bytes", "moved_bytes", "floor_s", "saved_all_bytes"):
        assert one[key] <= more[key], key
        assert one[key] <= later[key], key
    assert one["floor_s"] == max(one["memory_s"], one["compute_s"])


# --- all-reduce ---


def test_all_reduce_of_one_node_by_hand():
    """8 devices: base + 14 steps + 7/4 n bytes; d_model 8192, one token, bf16."""
    links = H200.links
    assert links is not None
    found = all_reduce(16384, 8, links)
    assert found.intra_bytes == 2 * 7 / 8 * 16384
    assert found.inter_bytes == 0
    assert found.seconds == pytest.approx(6.8e-6 + 14 * 0.6e-6 + 28672 / 450e9)
    # measured on 8 H200: 46 µs for 1 MiB, 3.9 ms for 1 GiB (275 GB/s with the switch adding): the model is near both
    assert all_reduce(1 << 20, 8, links).seconds < 46e-6
    assert all_reduce(1 << 30, 8, links).seconds == pytest.approx((1 << 30) / 264.9e9, rel=0.1)


def test_all_reduce_between_nodes():
    links = Links(
        devices_per_node=4, intra=Link(bytes_per_s=100.0, step_s=1.0), inter=Link(bytes_per_s=10.0, step_s=5.0),
        base_s=3.0, source="",
    )  # fmt: skip
    found = all_reduce(1000, 16, links)
    assert (found.per_node, found.nodes) == (4, 4)
    assert found.intra_bytes == 1500
    assert found.inter_bytes == 2 * 3 / 4 * 1000 / 4
    assert found.seconds == 3 + 2 * 3 * 1 + 2 * 2 * 5 + 15 + 37.5
    assert all_reduce(1000, 1, links).seconds == 0
    with pytest.raises(ValueError, match="6 devices do not fill nodes of 4: expected at most 4, or a multiple of it"):
        all_reduce(1000, 6, links)


def test_ranks_on_given_nodes():
    """8 ranks on 4 nodes are pairs: 2 steps within the node, 4 between nodes; on one node the table's own."""
    links = H200.links
    assert links is not None
    on = {n: ff.cost(LLAMA, hardware="h200", tp=8, nodes=n).figure("all_reduce_s").value for n in (1, 2, 4, 8)}
    n = 4096 * 2
    pairs = links.base_s + 2 * links.intra.step_s + 4 * links.inter.step_s
    pairs += n / links.intra.bytes_per_s + 2 * 3 / 4 * n / 2 / links.inter.bytes_per_s
    assert on[4] == pytest.approx(pairs)
    assert on[1] == ff.cost(LLAMA, hardware="h200", tp=8)["all_reduce_s"]
    assert on[1] < on[2] < on[4] < on[8]
    with pytest.raises(ValueError, match="16 devices on 1 nodes of 8: expected at least 2 nodes"):
        ff.cost(LLAMA, hardware="h200", tp=16, nodes=1)
    with pytest.raises(ValueError, match="8 devices on 3 nodes: expected a number of nodes that divides 8"):
        ff.cost(LLAMA, hardware="h200", tp=8, nodes=3)
    with pytest.raises(ValueError, match="nodes=2: the links are not known"):
        ff.cost(LLAMA, tp=8, nodes=2)
    with pytest.raises(ValueError, match="nodes=0: expected a positive int"):
        ff.cost(LLAMA, hardware="h200", tp=8, nodes=0)


def test_tensor_parallel_ffn():
    one, eight = (ff.cost(LLAMA, hardware="h200", tp=tp) for tp in (1, 8))
    assert eight["device_weight_bytes"] * 8 == one["weight_bytes"]
    assert eight["all_reduce_bytes"] == 4096 * 2  # one collective per forward, of the output
    assert eight["step_s"] == eight["floor_s"] + eight["all_reduce_s"]
    assert eight["tokens_per_s_per_device"] == eight["tokens_per_s"] / 8
    assert eight["floor_s"] == pytest.approx(one["floor_s"] / 8, rel=0.001)
    assert one["step_s"] == one["floor_s"]


def test_tp_that_does_not_fit():
    with pytest.raises(ValueError, match="d_ff=11008 cannot be split over 3 ranks"):
        ff.cost(LLAMA, tp=3)
    with pytest.raises(ValueError, match="in groups of 128"):
        ff.cost(LLAMA, tp=4, format="int4", group=128)
    with pytest.raises(ValueError, match=r"32 heads cannot be split over 43 ranks: use tp in \[1, 2, 4, 8, 16, 32\]"):
        ff.cost(BLOCK, tp=43)
    without = ff.cost(LLAMA, tp=8, hardware="epyc-9654-genoa")
    assert without["all_reduce_s"] is None
    assert without["step_s"] is None
    assert "not in the table" in without.figure("all_reduce_s").note


# --- blocks ---


def test_block():
    att = BLOCK.attention
    assert att.n_params == 2 * 4096 * 4096 + 2 * 4096 * 1024
    found = ff.cost(BLOCK, tokens=3, context=500, hardware="h200")
    assert found["params"] == LLAMA.n_params + att.n_params
    assert found.figure("score_flop", "attention").value == 3 * 4 * 500 * 4096  # S^2 d_model over a text of S tokens
    assert found.figure("cache_bytes", "attention").value == 3 * 500 * 2 * 1024 * 2
    assert found["floor_s"] == sum(found.figure("floor_s", s).value for s in ("ffn", "attention"))
    share = LLAMA.n_params / (LLAMA.n_params + att.n_params)
    assert found["ffn_share_of_params"] == share
    equal = found["equal_context_tokens"]
    assert 4 * equal * 4096 == ffn.flops_per_token(LLAMA)
    with pytest.raises(ValueError, match="n_heads=6 with n_kv_heads=4: expected a multiple of it"):
        Attention(d_model=8, n_heads=6, n_kv_heads=4, head_dim=2)
    with pytest.raises(ValueError, match="the FFN has d_model=4096, attention d_model=8"):
        Block(ffn=LLAMA, attention=Attention(d_model=8, n_heads=2, n_kv_heads=2, head_dim=4))


@given(st.floats(1.01, 8), st.integers(0, 100_000))
def test_widening_spends_the_same(factor, context):
    """By d_ff, by d_model and by both: equal parameters; only d_model makes scores, cache and residual grow."""
    now, by_ff, by_model, both = widen(BLOCK, factor, context)
    for way in (by_ff, by_model, both):
        assert way.params == pytest.approx(factor * now.params)
    assert by_ff.cache_bytes_per_position == now.cache_bytes_per_position
    assert by_ff.score_flop_per_token == now.score_flop_per_token
    assert by_model.residual_bytes_per_token > both.residual_bytes_per_token > by_ff.residual_bytes_per_token
    assert by_model.flop_per_token >= by_ff.flop_per_token * (1 - 1e-12)
    assert by_ff.saved_bytes_per_token > by_model.saved_bytes_per_token
    assert now.params == BLOCK.n_params


# --- whole models ---


@pytest.mark.parametrize(("name", "billions"), [("palm-8b", "8.63"), ("palm-62b", "62.50"), ("palm-540b", "540.35")])
def test_palm(name, billions):
    """The paper's three counts, exactly: d_ff = 4d with a gate, one key and value head, a tied vocabulary of 256k."""
    assert f"{ff.cost(name)['params'] / 1e9:.2f}" == billions


@pytest.mark.parametrize(
    ("name", "key", "billions"),
    [("llama-2-7b", "params", 6.74), ("llama-3-70b", "params", 70.55), ("mixtral-8x7b", "params", 46.70),
     ("mixtral-8x7b", "active_params", 12.88), ("gpt-2-124m", "params_tied", 0.1236),
     ("t5-base", "params_tied", 0.2229),
     ("llama-3.1-405b", "params", 405.85)],
)  # fmt: skip
def test_known_totals(name, key, billions):
    assert ff.cost(name)[key] / 1e9 == pytest.approx(billions, rel=1e-3)


def test_model_sums():
    found = ff.cost("llama-3-8b", hardware="h200", tokens=4, tp=8)
    parts = {s: found.figure("floor_s", s).value for s in ("ffn", "attention", "head")}
    assert found["floor_s"] == pytest.approx(32 * (parts["ffn"] + parts["attention"]) + parts["head"])
    assert found["all_reduce_s"] == pytest.approx(64 * found.figure("all_reduce_s", "ffn").value)
    assert found["weight_bytes"] == 2 * found["params"]
    assert found["step_s"] == found["floor_s"] + found["all_reduce_s"]


def test_experts_that_are_read():
    """One token reads experts_per_token experts; many tokens read all; FLOPs are those of the experts used."""
    one, many = (ff.cost("mixtral-8x7b", tokens=t, hardware="h200") for t in (1, 4096))
    weights = one.figure("weight_bytes", "ffn").value
    assert one.figure("read_weight_bytes", "ffn").value == pytest.approx(2 * weights)
    assert many.figure("read_weight_bytes", "ffn").value == pytest.approx(8 * weights)
    assert one.figure("forward_flop", "ffn").value == 2 * 6 * 4096 * 14336
    assert any("shared experts" in note for note in one.notes)


def test_every_model_of_the_table_has_a_cost():
    for name in models.table():
        found = ff.cost(name, hardware="h200")
        assert found["floor_s"] > 0, name
        assert found["ffn_params"] > 0, name


def _config(tmp_path, **values):
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path / "config.json"


LLAMA_CONFIG = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip


def test_config(tmp_path):
    found = ff.cost(_config(tmp_path, **LLAMA_CONFIG))
    assert found["params"] == ff.cost("llama-2-7b")["params"]
    assert found.spec == LLAMA
    assert ff.cost(str(tmp_path))["params"] == found["params"]
    tied = ff.cost(_config(tmp_path, **{**LLAMA_CONFIG, "tie_word_embeddings": True}))
    assert found["params"] - tied["params"] == 32000 * 4096


@pytest.mark.parametrize(
    ("changes", "spec", "params_of_attention"),
    [
        ({"intermediate_size": 5504, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4},
         Spec.parse("swiglu", d_model=2048, d_ff=5504), 2 * 2048 * 2048 + 2 * 2048 * 512),  # never rounded to 5632
        ({"mlp_bias": True},
         Spec.parse("swiglu", d_model=4096, d_ff=11008, up_bias=True, gate_bias=True, down_bias=True),
         4 * 4096 * 4096),
        ({"attention_bias": True}, LLAMA, 4 * 4096 * 4096 + 4 * 4096),
        ({"model_type": "gemma", "hidden_act": "gelu", "head_dim": 256},
         Spec.parse("geglu_tanh", d_model=4096, d_ff=11008), 4 * 4096 * 8192),
    ],
)  # fmt: skip
def test_configs_say_what_they_mean(tmp_path, changes, spec, params_of_attention):
    found = config.read(_config(tmp_path, **{**LLAMA_CONFIG, **changes}))
    assert found.ffn == spec
    assert found.attention is not None
    assert found.attention.n_params == params_of_attention


def test_configs_of_other_families(tmp_path):
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_inner": None}
    found = config.read(_config(tmp_path, **gpt2))
    assert found.ffn == Spec(d_model=768, d_ff=3072, activation="gelu_tanh", up_bias=True, down_bias=True)
    moe = {**LLAMA_CONFIG, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    assert (found := config.read(_config(tmp_path, **moe))).n_experts == 8
    assert found.experts_per_token == 2
    falcon = {**LLAMA_CONFIG, "model_type": "falcon", "multi_query": True, "ffn_hidden_size": None}
    falcon.pop("intermediate_size")
    found = config.read(_config(tmp_path, **falcon))
    assert found.attention is not None
    assert (found.attention.n_kv_heads, found.ffn.d_ff) == (1, 16384)
    nested = {"model_type": "llava", "text_config": LLAMA_CONFIG}
    assert config.read(_config(tmp_path, **nested)).ffn == LLAMA
    latent = {**LLAMA_CONFIG, "kv_lora_rank": 512}
    assert config.read(_config(tmp_path, **latent)).attention is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"), ("[]", "holds list, expected an object"), ("{}", "states none of hidden_size"),
        (json.dumps({**LLAMA_CONFIG, "hidden_size": -1}), "hidden_size=-1, expected a positive int"),
        (json.dumps({**LLAMA_CONFIG, "model_type": "nope"}), "name the FFN's variant"),
        (json.dumps({**LLAMA_CONFIG, "num_attention_heads": 33}), "is not a multiple of 33 heads"),
        (json.dumps({**LLAMA_CONFIG, "intermediate_size": [8, 9]}), "differ by layer"),
        ("[" * 100_000, "is not JSON"),
    ],
)  # fmt: skip
def test_bad_configs(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        ff.cost(tmp_path)
    assert "\n" not in str(caught.value)


def test_variant_of_an_unknown_model_type(tmp_path):
    path = _config(tmp_path, **{**LLAMA_CONFIG, "model_type": "nope"})
    assert ff.cost(path, variant="geglu").spec == Spec.parse("geglu", d_model=4096, d_ff=11008)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"tokens": 0}, "tokens=0: expected a positive int"),
        ({"tokens": True}, "tokens=True: expected a positive int"),
        ({"tp": -1}, "tp=-1: expected a positive int"),
        ({"context": -1}, "context=-1: expected an int of at least 0"),
        ({"sequences": 2}, "sequences=2 with tokens=1: expected no more sequences than tokens"),
        ({"format": "int3"}, "format 'int3' is not known; known: fp32"),
        ({"format": None}, "format None is not known; known: fp32"),
        ({"hardware": "h900"}, "hardware 'h900' is not known; known: this, a100-sxm-40gb"),
        ({"hardware": ""}, "hardware '' is not known; known: this"),
        ({"dtype": "int8"}, "activation dtype 'int8' is not known; known: fp32, bf16, fp16"),
        ({"compute": "fp4"}, "compute dtype 'fp4' is not known; known: fp32, bf16"),
    ],
)
def test_bad_settings(kwargs, message):
    with pytest.raises(ValueError, match=message) as caught:
        ff.cost(LLAMA, **kwargs)
    assert "\n" not in str(caught.value)


def test_bad_thing():
    with pytest.raises(ValueError, match="12 is int: expected a Spec, a Block, a Model, a name or a path"):
        ff.cost(12)


# --- plans and sweeps ---


def test_plan():
    s = conditions.settings(hardware="h200")
    model = models.get("llama-3-70b")
    made = plan.plan(model, s, devices=(8, 64, 4096), targets_s=(1e-6, 0.02, 0.05))
    assert made.at(1e-6, 8) is None
    best = made.at(0.02, 64)
    assert best is not None
    assert best.step_s <= 0.02
    assert best.replicas * best.tp == 64
    # nothing else that was tried does better: over all tp and tokens that meet the target
    for tp in made.ranks:
        for tokens in (1, 8, 64, 128, 192, 256):
            found = ff.cost(model, tokens=tokens, hardware="h200", tp=tp)
            memory = found["weight_bytes"] / tp + 80 * found.figure("cache_bytes", "attention").value / min(tp, 8)
            if found["step_s"] <= 0.02 and memory <= 141e9 and tp <= 64:
                assert 64 // tp * tokens / found["step_s"] <= best.tokens_per_s * (1 + 1e-12)
    assert made.at(0.02, 4096).tokens_per_s == pytest.approx(64 * best.tokens_per_s)
    assert any("tp=1: 141.8 GB do not fit" in note for note in made.notes)


def test_plan_has_no_more_ranks_than_devices():
    """50 µs for this FFN take 16 ranks: 8 devices cannot."""
    spec = models.get("llama-3-70b").ffn
    made = plan.plan(spec, conditions.settings(hardware="h200"), devices=(8, 64), targets_s=(5e-5,))
    assert made.at(5e-5, 8) is None
    assert made.at(5e-5, 64).tp == 16


def test_plan_needs_links():
    with pytest.raises(ValueError, match="a plan needs a device"):
        plan.plan(LLAMA, conditions.settings())
    with pytest.raises(ValueError, match="those of tpu-v4 are not in the table: give intra_GBps"):
        plan.plan(LLAMA, conditions.settings(hardware="tpu-v4"))


def test_default_targets_each_change_something():
    made = plan.plan(LLAMA, conditions.settings(hardware="h200"), devices=(8, 4096))
    answers = [[(p.tp, p.tokens) if (p := made.at(t, n)) else None for n in made.devices] for t in made.targets]
    assert len(answers) >= 2
    assert all(a != b for a, b in itertools.pairwise(answers))


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("tokens=1,8,64", (1, 8, 64)), ("tokens=1:8", (1, 2, 4, 8)), ("tokens=1:5", (1, 2, 4, 5)),
        ("d_ff=8:32:8", (8, 16, 24, 32)), ("d_ff=7", (7,)), ("tokens=3,1,3", (1, 3)),
    ],
)  # fmt: skip
def test_sweep_values(text, values):
    assert sweep.parse(text) == (text.partition("=")[0], values)


@pytest.mark.parametrize(
    "text", ["tokens", "tokens=", "tokens=a", "tokens=0:4", "tokens=4:1", "tokens=1:2:3:4", "d_model=4", "tokens=1:2,3",
             "d_ff=1:100000:1", "d_ff=1:9:0", ""],
)  # fmt: skip
def test_bad_sweeps(text):
    with pytest.raises(ValueError, match="sweep"):
        sweep.parse(text)


def test_sweep_is_the_cost_at_each_value():
    s = conditions.settings(hardware="h200")
    found = sweep.sweep(LLAMA, s, "tokens", (1, 300))
    assert [c["floor_s"] for c in found.costs] == [
        ff.cost(LLAMA, tokens=t, hardware="h200")["floor_s"] for t in (1, 300)
    ]
    wider = sweep.sweep(models.get("llama-2-7b"), s, "d_ff", (100, 11008))
    assert wider.costs[1]["params"] == ff.cost("llama-2-7b")["params"]
    assert [row["d_ff"] for row in wider.to_dict()["rows"]] == [100, 11008]


# --- hardware ---


def test_the_table_of_devices():
    table = hardware.table()
    assert len(table) == 25
    assert table["h200-sxm"].bytes_per_s == 4.8e12
    assert table["h200-sxm"].memory_bytes == 141e9
    assert hardware.get("NVIDIA H200 SXM") is table["h200-sxm"] is hardware.get("H200")
    assert hardware.get("4090").slug == "rtx-4090"
    assert table["mi300x"].cores == 304
    assert table["epyc-9654-genoa"].verified == "no"
    assert any("not all seen in a source (all)" in n for n in ff.cost(LLAMA, hardware="epyc-9654-genoa").notes)


def test_rate_of_a_working_set():
    """Between two sizes the rate of the smaller holds; beyond the largest, the last."""
    device = hardware.Hardware(
        slug="x", name="x", kind="CPU", peak_flops={}, bytes_per_s=10.0, memory_bytes=None, cores=1, links=None,
        source="", verified="yes", read_rates=((100.0, 50.0), (1000.0, 10.0)),
    )  # fmt: skip
    assert [device.rate(n) for n in (1, 100, 101, 1000, 1e9)] == [50, 50, 50, 10, 10]


def test_a_model_is_read_at_the_rate_of_all_its_layers():
    """One layer fits the cache, 30 do not: alone it is read fast, in the model at the memory's rate."""
    device = hardware.Hardware(
        slug="x", name="x", kind="CPU", peak_flops={"bf16": 1e15}, bytes_per_s=1e9, memory_bytes=None, cores=1,
        links=None, source="", verified="yes", read_rates=((1e6, 9e9), (1e8, 1e9)),
    )  # fmt: skip
    model = models.get("smollm2-135m")
    assert ff.cost(model.ffn, hardware=device)["memory_s"] == pytest.approx(ff.cost(model.ffn)["moved_bytes"] / 9e9)
    found = ff.cost(model, hardware=device)
    assert found["memory_s"] == pytest.approx(found["moved_bytes"] / 1e9)


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """A probe that measures at once and counts how often."""
    calls = []

    def measure():
        calls.append(1)
        rates = ((1000, 50.0 * len(calls)), (10**9, 20.0 / len(calls)))
        return probe.Probe("cpu", 2, 1e9, rates, {"fp32": 1e9 * len(calls)}, "2026-01-01", "2", "fp32 measured")

    monkeypatch.setattr(probe, "_measure", measure)
    monkeypatch.setattr(probe, "_known", {})
    monkeypatch.setenv("FANFOLD_CACHE", str(tmp_path / "cache"))
    return calls


def test_probe_is_measured_once_and_cached(fake, tmp_path, monkeypatch):
    first = hardware.get("this")
    assert hardware.get("this") == first
    assert len(fake) == 1
    monkeypatch.setattr(probe, "_known", {})  # another process
    assert hardware.get("this") == first
    assert len(fake) == 1
    (file,) = (tmp_path / "cache").iterdir()  # and no temporary file beside it
    assert json.loads(file.read_text())["version"] == 1
    assert ff.cost(LLAMA, hardware="this")["floor_s"] > 0


def test_probing_again_keeps_the_larger_figures(fake):
    probe.probe()
    found = probe.probe(again=True)
    assert len(fake) == 2
    assert found.read_bytes_per_s == ((1000, 100.0), (10**9, 20.0))
    assert found.flops == {"fp32": 2e9}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 0}', '{"version": 1, "probe": {}}', "null"])
def test_a_damaged_cache_is_measured_anew(fake, text):
    probe.cache_dir().mkdir()
    probe.cache_file().write_text(text)
    assert probe.probe().threads == 2
    assert len(fake) == 1


def test_a_cache_that_cannot_be_written_is_done_without(fake, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FANFOLD_CACHE", str(tmp_path / "file" / "sub"))
    probe.probe()
    probe.probe()
    assert len(fake) == 1


def test_the_probe_itself(monkeypatch):
    """A short run of the real one: figures above 0, small working sets read no slower."""
    monkeypatch.setattr(probe, "_SECONDS", 0.01)
    monkeypatch.setattr(probe, "_SIZES", (1 << 20, 4 << 20))
    found = probe._measure()
    (small, fast), (large, slow) = found.read_bytes_per_s
    assert (small, large) == (1 << 20, 4 << 20)
    assert fast >= slow > 1e8
    assert found.flops["fp32"] > 1e8
    assert set(found.flops) == {"fp32", "bf16", "fp16", "int8", "fp8"}
