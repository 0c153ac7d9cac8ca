"""The scripts under bench/ that compare us with others: the candidates of a peer comparison, whole models."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import fanfold as ff
from fanfold import Spec, Weights, formats, reference
from fanfold.formats import fit
from fanfold.kernels import cpu, packed

needs_kernels = pytest.mark.skipif(
    cpu.available() is not None or not hasattr(cpu._cpu, "bind_packed"), reason="no packed kernels here"
)


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "bench"))
    sys.modules.pop(name, None)
    return importlib.import_module(name)


# --- peers ---

D, F = 48, 136  # no whole group of 128, no whole column of 16


@pytest.fixture
def peers(monkeypatch):
    return {p.name: p for p in script("peer", monkeypatch).make()}


def layers(ffn: str, count: int = 2) -> list[dict[str, np.ndarray]]:
    """As a harness makes them: distinct layers, each a dict of float32 arrays."""
    rng = np.random.default_rng(0)
    shapes = {"gate": (F, D), "up": (F, D), "down": (D, F)}
    if ffn == "gelu":
        del shapes["gate"]
    made = {n: rng.standard_normal(s, np.float32) / np.float32(s[1] ** 0.5) for n, s in shapes.items()}
    return [{n: np.roll(w, i, axis=0) for n, w in made.items()} for i in range(count)]


def truth(x, layer, ffn):
    spec = Spec.parse({"swiglu": "swiglu", "gelu": "gelu_erf"}[ffn], d_model=D, d_ff=F)
    return reference.forward(x, Weights(spec, **layer))


def test_one_peer_for_every_format_in_its_class(peers):
    assert {p.format for p in peers.values()} == set(packed.FORMATS)
    classes = {"fanfold-fp32": ("fp32", "fp32"), "fanfold-bf16": ("bf16", "bf16"), "fanfold-bf16-x32": ("bf16", "bf16"),
               "fanfold-int8": ("int8", "int8"), "fanfold-q8_0": ("int8", "int8"), "fanfold-int4_g32": ("int4", "int8"),
               "fanfold-q4_0": ("int4", "int8")}  # fmt: skip
    assert {n: (peers[n].group, peers[n].arith) for n in classes} == classes
    for p in peers.values():
        for name in ("default", "max_layers", "chain", "threads"):
            assert hasattr(p, name), name
    assert "no-such" in peers["fanfold-fp32"].unavailable("no-such")


@pytest.mark.parametrize("name", ["fanfold-fp32", "fanfold-bf16", "fanfold-int8", "fanfold-int4_g128", "fanfold-q8_0"])
def test_bits_are_those_in_memory(peers, name, monkeypatch):
    peer = peers[name]
    spec = Spec.parse("swiglu", d_model=D, d_ff=F)
    weights = peer._pack(layers("swiglu")[0], "swiglu")
    assert peer.bits(D, F) == 8 * sum(m.nbytes for _, m in weights.items()) / spec.n_params


@needs_kernels
@pytest.mark.parametrize("ffn", ["swiglu", "gelu"])
def test_peers_compute_each_layer(peers, ffn):
    threads = torch.get_num_threads()
    x = np.random.default_rng(1).standard_normal((33, D), np.float32)
    both = layers(ffn)
    wanted = [truth(x, layer, ffn) for layer in both]
    try:
        for peer in peers.values():
            assert peer.unavailable(ffn) is None
            peer.threads = 1
            run = peer.build(both, ffn)
            # the right layer is the nearest one, by far: what a format rounds is less than what layers differ by
            for tokens in (1, 33):
                native = peer.prepare(x[:tokens])
                assert native.dtype == peer.dtype
                got = [peer.fetch(run(native, i)) for i in (0, 1)]
                for i in (0, 1):
                    assert got[i].dtype == np.float32
                    own, other = (np.linalg.norm(got[i] - wanted[j][:tokens]) for j in (i, 1 - i))
                    assert own * 4 < other, (peer.name, tokens)
    finally:
        torch.set_num_threads(threads)


@needs_kernels
def test_a_peers_output_stays_in_its_own_memory(peers):
    peer = peers["fanfold-fp32"]
    run = peer.build(layers("swiglu"), "swiglu")
    one, many = peer.prepare(np.ones((1, D), np.float32)), peer.prepare(np.ones((5, D), np.float32))
    assert run(one, 0).data_ptr() == run(one, 1).data_ptr() != run(many, 0).data_ptr()
    kept = peer.fetch(run(one, 0))
    before = kept.copy()
    run(one, 1)
    np.testing.assert_array_equal(kept, before)  # what was fetched is not written over


# --- whole models ---


@pytest.fixture
def whole(monkeypatch):
    pytest.importorskip("transformers")
    return script("whole_model", monkeypatch)


def variant(whole, name, bits=16.0, base=None, passes=(), told=()):
    return whole.Variant(name, lambda model: model, bits, base, passes=list(passes), told=list(told))


def test_variants_that_fit_take_turns_together_and_others_each_beside_the_baseline(whole):
    made = [variant(whole, "torch fp32", 32), variant(whole, "torch bf16"), variant(whole, "a", 8),
            variant(whole, "torch bf16, compiled", 0, "torch bf16")]  # fmt: skip

    def names(budget):
        return [[v.name for v in group] for group in whole.batches(made, 1000, budget)]

    assert names(1e6) == [["torch bf16", "torch bf16, compiled", "torch fp32", "a"]]
    apart = [["torch bf16", "torch bf16, compiled", "torch fp32"], ["torch bf16", "a"]]
    assert names(8000 + 2000 + 4000 + 999) == apart  # a needs 1000 more
    assert names(8000 + 2000 + 4000 + 1000) != apart
    assert names(0) == [["torch bf16", "torch bf16, compiled"], ["torch bf16", "torch fp32"], ["torch bf16", "a"]]


def test_rates_and_ratios(whole):
    group = [
        variant(whole, "torch fp32", passes=[{"prefill": 2.0, "decode": 1.0}] * 2, told=[1, 2, 3]),
        variant(whole, "torch bf16", passes=[{"prefill": 1.0, "decode": 0.5}] * 2, told=[1, 9, 3]),
        variant(whole, "fanfold int4", passes=[{"prefill": 0.5, "decode": 0.125}] * 2, told=[1, 2, 3]),
    ]
    found = {row["variant"]: row for row in whole.rows(group, prompt=10, new=5)}
    ours = found["fanfold int4"]
    assert ours["tokens_per_s"]["prefill"]["median"] == 20.0
    assert ours["tokens_per_s"]["decode"]["median"] == 32.0  # 4 tokens: the first belongs to prefill
    assert ours["times"] == {
        "torch fp32": {"prefill": 4.0, "decode": 8.0},
        "torch bf16": {"prefill": 2.0, "decode": 4.0},
    }
    assert (ours["same_tokens_as_fp32"], found["torch bf16"]["same_tokens_as_fp32"]) == (3, 2)


def test_stamps_part_prefill_from_decode(whole, monkeypatch):
    model = whole.random_llama(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
                               num_key_value_heads=1, vocab_size=50)  # fmt: skip
    ticks = iter(range(100))
    monkeypatch.setattr(whole.time, "perf_counter", lambda: float(next(ticks)))
    seconds, told = whole.generate(model, torch.zeros(1, 3, dtype=torch.long), 4, {})
    assert len(told) == 4
    assert seconds == {"prefill": 1.0, "decode": 3.0}


def test_the_bound_has_neither_ffns_nor_linears(whole):
    model = whole.random_llama(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                               num_key_value_heads=1, vocab_size=50)  # fmt: skip
    made, _ = whole.variants(["int8"], False, True, bound=True)
    bare = made[-1].make(model)
    assert not any(isinstance(m, torch.nn.Linear) for m in bare.modules())
    assert type(bare.model.layers[1].mlp) is type(bare.lm_head) is whole.Zeros
    with torch.no_grad():
        logits = bare(torch.zeros(1, 3, dtype=torch.long)).logits
    assert logits.shape == (1, 3, 50)
    assert not logits.any()
    assert any(isinstance(m, torch.nn.Linear) for m in model.modules())  # the model itself is not changed


def test_a_variant_that_cannot_be_made_or_run_is_left_out_with_its_reason(whole, monkeypatch):
    def fails(model):
        raise RuntimeError("no such kernel\nmore")

    group = [variant(whole, "a"), whole.Variant("b", fails, 8), variant(whole, "b, compiled", 0, "b")]
    left_out: list[str] = []
    ready = whole.build(group, object(), left_out)
    assert [v.name for v in ready] == ["a"]
    assert left_out == ["b: no such kernel"]
    monkeypatch.setattr(whole, "generate", lambda *a: fails(None))
    assert whole.measure(ready, None, 2, 2, left_out) == []
    assert left_out[1:] == ["a: no such kernel"]


@pytest.mark.parametrize(
    ("args", "said"),
    [(["--formats", "int3"], "format 'int3' is not known"), (["--new", "1"], "--new 1: expected at least 2"),
     (["--repeats", "0"], "--repeats 0: expected at least 1")],
)  # fmt: skip
def test_wrong_arguments_exit_2(whole, capsys, args, said):
    with pytest.raises(SystemExit) as stop:
        whole.parse(args)
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_a_tiny_model_from_end_to_end(whole, monkeypatch, tmp_path, capsys):
    """With a swap that says what it was asked for: its own tests are elsewhere."""
    asked = []

    def swap(model, *, format, linears):
        asked.append((format, linears))
        status = "swapped" if format == "bf16" else "left"
        return argparse.Namespace(rows=[argparse.Namespace(status=status, reason="a reason")])

    monkeypatch.setattr(ff, "swap", swap)
    monkeypatch.setattr(whole, "_torchao_missing", lambda: "torchao is not here")
    path = tmp_path / "whole.json"
    args = ["--models", "tiny", "--formats", "bf16,int4", "--prompt", "5", "--new", "4", "--repeats", "2"]
    assert whole.main([*args, "--json", str(path)]) == 0
    assert asked == [("bf16", "all"), ("int4", "all")]
    out = capsys.readouterr().out
    assert "left out: torchao int8: torchao is not here" in out
    assert "left out: fanfold int4: nothing was swapped: a reason" in out
    (found,) = json.loads(path.read_text())["models"]
    (group,) = found["batches"]
    assert [row["variant"] for row in group] == ["torch bf16", "torch fp32", "fanfold bf16"]
    assert group[2]["note"] == "1 of 1 modules swapped"
    assert all(0 < row["ffn_share"] < 1 for row in group)
    assert group[2]["same_tokens_as_fp32"] == 4


# --- rounding ---


@needs_kernels
def test_rounding_compares_and_measures(monkeypatch, capsys):
    rounding = script("rounding", monkeypatch)
    assert rounding.main(["--shape", "40x70", "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    assert all(format in out for format in formats.INTEGER)
    inner = fit._in_numpy

    def other(*args):
        q = inner(*args)
        return dataclasses.replace(q, scale=np.nextafter(q.scale, q.scale.dtype.type(1)))

    monkeypatch.setattr(fit, "_in_numpy", other)
    with pytest.raises(ValueError, match="different codes or scales"):
        rounding.main(["--shape", "40x70", "--rounds", "1", "--format", "q4_1"])


def test_rounding_refuses_what_it_cannot_read(monkeypatch, capsys):
    rounding = script("rounding", monkeypatch)
    for words in (["--shape", "40"], ["--shape", "0x4"], ["--format", "fp32"]):
        with pytest.raises(SystemExit):
            rounding.main(words)
        assert "error:" in capsys.readouterr().err
