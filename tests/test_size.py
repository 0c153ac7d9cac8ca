"""Sizing: the published rules, the rules kept and broken, the recommendation, released models explained."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fanfold as ff
from fanfold import Spec
from fanfold.count import explain, ffn, formats, hardware, like, models, rules, sizing
from fanfold.count.settings import check_split


def broken(d_ff: int, d_model: int = 4096, **kwargs) -> set[str]:
    spec = Spec.parse("swiglu", d_model=d_model, d_ff=d_ff)
    return {r.name for r in rules.rules(spec, sizing.constraints(**kwargs)) if not r.kept}


# --- published rules ---


@pytest.mark.parametrize(
    ("d_model", "multiplier", "multiple_of", "d_ff"),
    [
        (4096, None, 256, 11008), (5120, None, 256, 13824), (6656, None, 256, 17920), (8192, None, 256, 22016),
        (8192, 1.3, 4096, 28672), (4096, 1.3, 1024, 14336), (16384, 1.2, 4096, 53248), (2048, 1.5, 256, 8192),
        (3072, 1.0, 256, 8192),
    ],
)  # fmt: skip
def test_llama_rule(d_model, multiplier, multiple_of, d_ff):
    """Every LLaMA-family width. Kills rounding to nearest (13568 for 5120, 21760 for 8192) and a missing multiplier."""
    assert like.like("llama", d_model, multiplier, multiple_of).d_ff == d_ff


def test_llama_rule_truncates_after_each_step():
    """int() twice: 1.3 * 10922 = 14198.6 -> 14198, and a multiple_of of 1 shows it."""
    assert like.like("llama", 4096, 1.3, 1).d_ff == 14198
    assert like.like("llama", 8192, 1.3, 1).d_ff == 28398
    assert like.like("llama", 4096, None, 1).d_ff == 10922
    steps = like.like("llama", 8192, 1.3, 4096).steps
    assert steps == ("int(2 * (4 * 8192) / 3) = 21845", "int(1.3 * 21845) = 28398", "4096 * ceil(28398 / 4096) = 28672")


def test_llama_70b_trap():
    """sku_list prints multiple_of 256 for Llama-2-70B, which gives 28416; the released width is 28672."""
    assert like.like("llama", 8192, 1.3, 256).d_ff == 28416
    assert like.like("llama2-70b", 8192).d_ff == 28672


@pytest.mark.parametrize(
    ("rule", "d_model", "d_ff", "variant"),
    [
        ("llama3", 4096, 14336, "swiglu"), ("llama3", 8192, 28672, "swiglu"), ("llama3", 16384, 53248, "swiglu"),
        ("llama3", 2048, 8192, "swiglu"), ("llama3", 3072, 8192, "swiglu"), ("palm", 18432, 73728, "swiglu"),
        ("gpt2", 768, 3072, "gelu_tanh"), ("bert", 1024, 4096, "gelu_erf"), ("transformer", 512, 2048, "relu"),
        ("shazeer", 768, 2048, "swiglu"), ("shazeer", 1000, 2666, "swiglu"),
    ],
)  # fmt: skip
def test_other_rules(rule, d_model, d_ff, variant):
    found = like.like(rule, d_model)
    assert (found.d_ff, found.variant) == (d_ff, variant)


def test_rules_agree_with_the_models_of_the_table():
    for name, rule in (
        ("llama-7b", "llama"), ("llama-13b", "llama"), ("llama-33b", "llama"), ("llama-65b", "llama"),
        ("llama-2-70b", "llama2-70b"), ("llama-3-8b", "llama3"), ("llama-3-70b", "llama3"),
        ("llama-3.1-405b", "llama3"), ("llama-3.2-1b", "llama3"), ("llama-3.2-3b", "llama3"), ("palm-540b", "palm"),
        ("gpt-2-xl", "gpt2"),
    ):  # fmt: skip
        spec = models.get(name).ffn
        assert like.like(rule, spec.d_model).d_ff == spec.d_ff, name


def test_make_divisible_has_both_branches():
    assert like.make_divisible(285, 256) == 512  # 256 would lose over 10 %
    assert like.make_divisible(280, 256) == 256
    assert like.make_divisible(3, 256) == 256


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("lama", 4096), "rule 'lama' is not known; known: llama, llama2-70b, llama3, palm, gpt2"),
        (("palm", 4096, 1.3), "the rule 'palm' has no multiplier"),
        (("llama", 0), "d_model=0: expected a positive int"),
        (("llama", 4096, None, 0), "multiple_of=0: expected a positive int"),
        (("llama", 4096, -1.0), "multiplier=-1.0: expected a positive number"),
    ],
)
def test_rules_refuse(args, message):
    with pytest.raises(ValueError, match=message):
        like.like(*args)


# --- rules kept and broken, by name ---


def test_matrix_unit():
    assert "matrix_unit" not in broken(11008)
    assert "matrix_unit" in broken(10922)  # 2 * 5461: on H100 31 % slower than 10944
    assert "matrix_unit" not in broken(10944)
    assert "matrix_unit" in broken(10912)  # 32 * 341
    costs = {f: sum(r.cost for r in rules.rules(Spec.parse("swiglu", d_model=4096, d_ff=f), sizing.constraints())
                    if r.name == "matrix_unit") for f in (10944, 10912, 10922)}  # fmt: skip
    assert costs[10944] == 0 < costs[10912] < 5 < 25 < costs[10922]


def test_matrix_unit_of_devices():
    assert sizing.constraints(device="h200").unit == 64
    assert sizing.constraints(device="h200", format="fp8").unit == 128
    assert sizing.constraints(device="h200", format="int4").unit == 64  # int4 codes meet bf16 activations
    assert sizing.constraints(device="a100-sxm-80gb", format="fp8").unit == 64  # no fp8 there
    assert sizing.constraints(device="tpu-v5e").unit == 128
    assert sizing.constraints(device="epyc-9654-genoa").unit == 32


@pytest.mark.parametrize("length", [896, 1408, 2688, 4544, 5504, 13696, 14464])
def test_k_quants_break(length):
    assert "k_quant_256" in broken(length)


@pytest.mark.parametrize("length", [11008, 13824, 14336, 18944])
def test_k_quants_keep(length):
    assert "k_quant_256" not in broken(length)


@pytest.mark.parametrize(
    ("d_ff", "tp", "group", "wrong"),
    [
        (29568, 1, 128, set()), (29568, 2, 128, {"group"}), (29568, 4, 128, {"group"}), (29568, 8, 128, {"group"}),
        (29696, 8, 128, set()), (18944, 4, 128, set()), (18944, 8, 128, {"group"}), (640, 2, 128, {"group"}),
        (640, 2, 64, set()), (11008, 3, 32, {"tp", "group"}), (11008, 8, 32, set()), (10, 4, 32, {"tp", "group"}),
    ],
)  # fmt: skip
def test_groups_are_not_cut(d_ff, tp, group, wrong):
    """29568/128 = 231; tp 2, 4 and 8 leave 64, 96 and 112. 640 over 2 ranks: 320 is 2.5 groups."""
    assert broken(d_ff, tp=tp, format="int4", group=group) & {"tp", "group"} == wrong


def test_refusal_names_the_numbers_and_the_ways_out():
    with pytest.raises(ValueError, match=r"d_ff=11008 cannot be split over 3 ranks: 11008/3 is not whole\. Use tp in"):
        check_split(11008, 3)
    with pytest.raises(
        ValueError, match=r"d_ff=11008 cannot .* 3 ranks in groups of 32: .*pad to 11040 \(adds 0.29 %\)"
    ):
        check_split(11008, 3, 32)
    with pytest.raises(ValueError, match=r"640.* 2 ranks in groups of 128: 640/2 = 320 channels, which is 2.5 groups"):
        check_split(640, 2, 128)
    with pytest.raises(ValueError, match=r"pad to 29696 \(adds 0.43 %\)"):
        check_split(29568, 8, 128)
    with pytest.raises(ValueError, match=r"d_ff=10 .*pad to 12 "):
        check_split(10, 4)
    check_split(18944, 4, 128)


def test_fp8_unit():
    assert "fp8_16" in broken(10920)
    assert "fp8_16" not in broken(10928)
    hard = [
        r for r in rules.rules(Spec.parse("swiglu", d_model=64, d_ff=24), sizing.constraints(format="fp8")) if r.hard
    ]
    assert [(r.name, r.kept) for r in hard] == [("fp8_16", False)]


def test_tiles_and_waves():
    """8192 x 14336 in tiles of 128 x 256 is 3584 of them; 109 on 108 cores take two waves."""
    a100 = hardware.get("a100-sxm-80gb")
    p = rules.product("up", 8192, 14336, a100)
    assert (p.tiles, p.waves) == (3584, 34)
    assert p.tile_share == 1
    one = rules.product("up", 128, 109 * 256, a100)
    assert (one.tiles, one.waves) == (109, 2)
    assert one.wave_share == pytest.approx(109 / 216)
    part = rules.product("up", 129, 257, a100)
    assert part.tiles == 4
    assert part.tile_share == pytest.approx(129 * 257 / (4 * 128 * 256))
    assert "wave" in broken(11264, tp=8, device="h200")
    assert not rules.products(Spec.parse("swiglu", d_model=64, d_ff=64), sizing.constraints(device="tpu-v4"))


# --- size ---


def test_classic_budget():
    found = ff.size(4096)
    assert f"{found.budget.exact:.2f}" == "10922.67"
    assert found.recommended.d_ff == 11008
    by_width = {c.d_ff: c for c in found.candidates}
    assert {10922, 10923, 11008} <= set(by_width)
    assert by_width[11008].deviation == pytest.approx(11008 / (8 / 3 * 4096) - 1)
    assert not by_width[11008].broken
    assert by_width[10922].broken == ["matrix_unit", "fp8_16", "k_quant_256", "power_of_two"]
    assert "10923, breaks matrix_unit" in found.reason
    assert "breaks" in found.round_width


def test_budgets_are_inverses_of_costs():
    ungated = Spec(d_model=768, d_ff=3072, activation="gelu")
    assert ff.size(768, budget=ungated).budget.exact == 2048
    assert ff.size(4096, params=135_266_304).budget.exact == 11008
    assert ff.size(4096, flop_per_token=270_532_608).budget.exact == 11008
    for name in formats.FORMATS:
        spec = Spec.parse("swiglu", d_model=4096, d_ff=11008)
        n_bytes = formats.ffn_bytes(spec, name)
        assert ff.size(4096, n_bytes=n_bytes, format=name).budget.exact == pytest.approx(11008)


def test_like_is_listed_even_where_it_is_not_the_best():
    found = ff.size(5120, like="llama")
    assert found.like is not None
    assert found.like.d_ff == 13824 == found.budget.exact
    assert 13824 in [c.d_ff for c in found.candidates]
    assert ff.size(1000, like="shazeer", tp=8).recommended.d_ff % 8 == 0


def test_planner_rounds_to_the_least_common_multiple():
    """d_model 768: 2048 suits; 1000: 2666.67 does not. Of tp * group and multiple_of together."""
    assert ff.size(768, tp=8, format="int4").recommended.d_ff == 2048
    found = ff.size(1000, tp=6, format="int4", multiple_of=100)
    assert found.constraints.step == math.lcm(6 * 32, 100)
    assert found.recommended.d_ff % 4800 == 0
    assert ff.size(1000, format="int4").notes == [
        "d_model=1000 is no multiple of 32: rows of gate and up end in part of a group",
        "d_model=1000 is no multiple of 256: gate and up cannot be k-quants, whatever d_ff is",
    ]
    assert not ff.size(4096, format="int4").notes
    assert "d_model = 896, are 3.5 super-blocks: no k-quants" in "".join(explain.explain("qwen2-0.5b").sentences())


variants = st.sampled_from(["swiglu", "geglu", "gelu", "relu"])


@settings(deadline=None, max_examples=60)
@given(
    d_model=st.integers(1, 20_000),
    variant=variants,
    tp=st.integers(1, 16),
    format=st.sampled_from(["bf16", "fp8", "int4", "int8_g128", "q8_0"]),
    multiple_of=st.sampled_from([None, 1, 7, 64, 100]),
    device=st.sampled_from([None, "h200", "tpu-v5e", "epyc-9654-genoa"]),
)
def test_never_recommends_what_breaks_a_hard_constraint(d_model, variant, tp, format, multiple_of, device):
    kwargs = {"variant": variant, "tp": tp, "format": format, "multiple_of": multiple_of, "hardware": device}
    if ffn.classic_width(Spec.parse(variant, d_model=d_model, d_ff=1)) < tp:
        with pytest.raises(ValueError, match="at least one channel for each"):
            ff.size(d_model, **kwargs)
        return
    found = ff.size(d_model, **kwargs)
    d_ff = found.recommended.d_ff
    group = formats.get(format).group or 1
    assert d_ff > 0
    assert d_ff % (tp * group) == 0
    assert d_ff % (multiple_of or 1) == 0
    assert format != "fp8" or d_ff // tp % 16 == 0
    assert found.recommended.usable
    assert found.recommended == found.candidates[0]
    usable = [c.score for c in found.candidates if c.usable]
    assert usable == sorted(usable, reverse=True)


@given(st.integers(1, 5000), st.integers(1, 20_000), variants, st.booleans())
@settings(deadline=None, max_examples=60)
def test_equal_budget_is_within_one_step(d_model, d_ff, variant, bias):
    """Asked for what an FFN costs, size has that FFN among its candidates, unconstrained."""
    spec = Spec.parse(variant, d_model=d_model, d_ff=d_ff, up_bias=bias, down_bias=bias)
    spec = Spec.from_dict({**spec.to_dict(), "gate_bias": bias and spec.gated})
    found = ff.size(d_model, variant=variant, bias=bias, budget=spec)
    assert abs(found.budget.exact - d_ff) < 1e-6 * d_ff
    assert d_ff in [c.d_ff for c in found.candidates]
    assert min(abs(c.deviation) for c in found.candidates) < 1e-9


@given(st.integers(64, 4096), st.integers(2, 4))
@settings(deadline=None, max_examples=30)
def test_scale(d_model, k):
    """d_model times k: the exact width times k."""
    assert ff.size(k * d_model).budget.exact == pytest.approx(k * ff.size(d_model).budget.exact)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"d_model": 0}, "d_model=0: expected a positive int"),
        ({"d_model": -4096}, "d_model=-4096: expected a positive int"),
        ({"d_model": 4096, "tp": 0}, "tp=0: expected a positive int"),
        ({"d_model": 4096, "tp": 20000}, "at least one channel for each of tp=20000 ranks"),
        ({"d_model": 4096, "hardware": "h900"}, "hardware 'h900' is not known; known: this, a100-sxm-40gb"),
        ({"d_model": 4096, "hardware": "a100"}, "hardware 'a100' names 3 devices: a100-sxm-40gb, a100-sxm-80gb"),
        ({"d_model": 4096, "format": "int5"}, "format 'int5' is not known; known: fp32"),
        ({"d_model": 4096, "variant": "swigloo"}, "FFN variant 'swigloo' is not known; known: swiglu"),
        ({"d_model": 4096, "params": 1e6, "flop_per_token": 5.0}, "params and flop_per_token were given: expected one"),
        ({"d_model": 4096, "params": float("nan")}, "params=nan: expected a positive number"),
        ({"d_model": 4096, "params": 10}, "that is d_ff=0.000813802"),
        ({"d_model": 4096, "multiplier": 1.3}, "belongs to a published rule"),
        ({"d_model": 4096, "like": "lama"}, "rule 'lama' is not known"),
        ({"d_model": 4096, "tokens": 0}, "tokens=0: expected a positive int"),
        ({"d_model": 4096, "limit": 0}, "limit=0: expected a positive int"),
    ],
)
def test_bad_input(kwargs, message):
    with pytest.raises(ValueError, match=message) as caught:
        ff.size(**kwargs)
    assert "\n" not in str(caught.value)


# --- released models ---


def test_the_table_has_206_models_with_their_sources():
    table = models.table()
    assert len(table) == 206
    assert sum(m.verified for m in table.values()) == 182
    assert all(m.source for m in table.values())
    assert all(key == m.slug for key, m in table.items())


@pytest.mark.parametrize("name", list(models.table()))
def test_every_model_is_explained(name):
    found = explain.explain(name)
    m = models.table()[name]
    text = "\n".join(found.sentences())
    assert f"d_ff = {m.ffn.d_ff} " in text  # never rounded
    assert found.ratio == m.ffn.d_ff / m.ffn.d_model
    assert {r.name for r in found.rules} == {"matrix_unit", "fp8_16", "k_quant_256", "power_of_two"}
    assert m.source in text
    assert found.to_dict()["d_ff_over_d_model"] == found.ratio


def test_explanation_of_llama_2_7b():
    found = explain.explain("Llama 2 7B")
    text = "\n".join(found.sentences())
    assert found.ratio == 2.6875
    assert "10922.67: this is +0.78 % off" in text
    assert "d_ff = 16512" in text
    assert "the LLaMA rule with no multiplier, multiple_of 256" in text
    assert found.ranks_by_group[128] == (1, 2, 43)


def test_widths_of_the_table():
    """d_ff is per branch and per expert: Qwen-7B's config prints 22016, twice its width."""
    assert models.get("qwen1-7b").ffn.d_ff == 11008
    assert models.get("modernbert-base").ffn.d_ff == 1152
    assert models.get("qwen2-72b").ffn.d_ff == 29568
    assert models.get("gpt-oss-20b").ffn.activation == "silu"
    assert models.get("gpt-oss-20b").ffn.gate_limit == 7.0
    ratios = [m.ffn.d_ff / m.ffn.d_model for m in models.table().values() if not m.n_experts]
    assert max(ratios) == 64  # T5-11B


def test_unknown_model_names_the_nearest():
    with pytest.raises(ValueError, match=r"model 'lama-2-7b' is not among the 206 .*nearest: llama-2-7b"):
        models.get("lama-2-7b")
    assert models.get("opt-1.3b") is not models.get("opt-13b")  # punctuation within a number counts
