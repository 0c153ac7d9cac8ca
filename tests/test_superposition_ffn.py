"""What an FFN's wider space gives, and the measures of real FFNs, in a small form."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fanfold import activations
from fanfold.memory.anatomy import anatomy
from fanfold.spec import Spec
from fanfold.superposition import classes, gains, gram, product, readout, real, separability, small
from fanfold.superposition.small import Channels


def directions(n: int, d: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


# Gram statistics. --------------------------------------------------------------------------------------------------


def by_hand(v: np.ndarray) -> dict[str, float]:
    """The same numbers from the whole matrix of cosines, in NumPy."""
    unit = v / np.linalg.norm(v, axis=1, keepdims=True)
    cos = unit @ unit.T
    n = len(v)
    off = cos[~np.eye(n, dtype=bool)].reshape(n, n - 1)
    share = np.linalg.svd(unit, compute_uv=False) ** 2 / n
    share = share[share > 1e-12]
    d = (v**2).sum(1) / ((unit @ v.T) ** 2).sum(1)
    return {
        "mean_square_cosine": (off**2).mean(),
        "interference": (off**2).sum(1).mean(),
        "nearest": np.abs(off).max(1).mean(),
        "nearest_largest": np.abs(off).max(),
        "effective_rank": np.exp(-(share * np.log(share)).sum()),
        "features_per_dimension": 1 / d.mean(),
    }


@pytest.mark.parametrize(("n", "d"), [(40, 12), (12, 40), (300, 7), (2, 1)])
def test_gram_by_hand(n, d):
    v = directions(n, d) * torch.linspace(0.5, 3, n)[:, None]
    found = gram.gram(v)
    for name, value in by_hand(v.double().numpy()).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-4), name


def test_gram_of_known_sets():
    basis = gram.gram(torch.eye(6) * 3)
    assert basis.interference == pytest.approx(0, abs=1e-12)
    assert basis.effective_rank == pytest.approx(6)
    assert basis.features_per_dimension == pytest.approx(1)
    twice = gram.gram(torch.cat([torch.eye(5), -torch.eye(5)]))
    assert twice.interference == pytest.approx(gram.welch(10, 5)) == pytest.approx(1)  # a tight frame
    assert twice.features_per_dimension == pytest.approx(2)
    assert twice.nearest == pytest.approx(1)
    chance = gram.random(400, 50)
    assert chance.mean_square_cosine == pytest.approx(1 / 50, rel=0.02)
    assert chance.features_per_dimension == pytest.approx(1 + 400 / 50, rel=0.03)
    crowded = gram.gram(directions(400, 50) + 1.0)  # a direction in common
    assert crowded.interference > 5 * chance.interference
    assert gram.gram(torch.cat([torch.eye(4), torch.zeros(2, 4)])).n == 4
    with pytest.raises(ValueError, match="1 vectors that are not 0: expected two or more"):
        gram.gram(torch.eye(3)[:1])


def test_nearest_neighbours_of_many_are_sampled(monkeypatch):
    whole = gram.gram(directions(500, 20))
    monkeypatch.setattr(gram, "_ROWS", 200)
    part = gram.gram(directions(500, 20))
    assert part.nearest == pytest.approx(whole.nearest, rel=0.03)
    assert part.interference == whole.interference


# Classes. ----------------------------------------------------------------------------------------------------------


def test_each_class_by_construction():
    e = torch.eye(4)
    tilt = 0.2 * e[3]
    up = torch.stack([e[0], -e[0], e[0] + tilt, -e[0], e[1], e[1], e[0], -e[0]])
    gate = torch.stack([e[0] + tilt, e[0], e[1], e[2], e[0], e[2], -e[0], -e[0]])
    down = e[0].repeat(8, 1).T * 2.5
    found = classes.classify(classes.cosines(up, down, gate)).tolist()
    names = [classes.CLASSES[i] for i in found]
    assert names == [*classes.CLASSES, "enrichment", "depletion"]
    assert classes.counts(torch.tensor(found))["enrichment"] == 2
    # ungated: one key, so no conditions
    assert [classes.CLASSES[i] for i in classes.classify(classes.cosines(up, down))] == [
        *("enrichment", "depletion", "enrichment", "depletion"),
        *("orthogonal output", "orthogonal output", "enrichment", "depletion"),
    ]


def test_the_signs_mean_what_the_names_say():
    """For x along the value, an enrichment channel of SwiGLU writes more of it and a depletion channel takes away."""
    act = activations.get("silu")
    for a, g, kind in ((1, 1, 0), (-1, 1, 1), (1, -1, 0), (-1, -1, 1)):
        cos = {"up, value": torch.tensor([0.9 * a]), "gate, value": torch.tensor([0.9 * g])}
        assert classes.classify(cos).tolist() == [kind]
        x = 3.0 * g  # where the gate is open
        wrote = float(act.numpy(np.array(g * x), act.params) * a * x)
        assert np.sign(wrote * x) == (1 if kind == 0 else -1)


def test_threshold():
    cos = {"up, value": torch.tensor([0.4, -0.6])}
    assert classes.classify(cos, 0.5).tolist() == [5, 1]
    assert classes.classify(cos, 0.3).tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"threshold=1.5: expected a cosine between 0 and 1"):
        classes.classify(cos, 1.5)


# Whole models. -----------------------------------------------------------------------------------------------------


def tiny_llama():
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=88, num_hidden_layers=2, num_attention_heads=4, vocab_size=60
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.post_attention_layernorm.weight.uniform_(0.2, 3.0)
    return model


def test_a_real_layer_is_read_through_its_norm():
    model = tiny_llama()
    found = real.measure(anatomy(model), threshold=0.3)
    assert [r["norm"] for r in found["layers"]] == [f"model.layers.{i}.post_attention_layernorm" for i in (0, 1)]
    for i, row in enumerate(found["layers"]):
        block = model.model.layers[i]
        gain, up, down = (
            t.detach().double().numpy()
            for t in (block.post_attention_layernorm.weight, block.mlp.up_proj.weight, block.mlp.down_proj.weight)
        )
        assert row["up"]["interference"] == pytest.approx(by_hand(up * gain)["interference"], rel=1e-3)
        assert row["up"]["interference"] != pytest.approx(by_hand(up)["interference"], rel=1e-3)
        assert row["value"]["nearest"] == pytest.approx(by_hand(down.T)["nearest"], rel=1e-3)
        cos = ((up * gain) * down.T).sum(1) / np.linalg.norm(up * gain, axis=1) / np.linalg.norm(down, axis=0)
        assert row["channels"]["cosines"]["up, value"]["mean"] == pytest.approx(cos.mean(), abs=1e-5)
        assert sum(row["channels"]["classes"].values()) == row["d_ff"] == 88
    assert real.measure(anatomy(model), layers=[1])["layers"][0]["layer"] == 1
    with pytest.raises(ValueError, match="layer 7 does not exist"):
        real.measure(anatomy(model), layers=[7])


def test_a_norm_after_the_ffn_is_not_folded():
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=60
    )
    model = transformers.BertModel(config).eval()
    with torch.no_grad():
        model.encoder.layer[0].attention.output.LayerNorm.weight.uniform_(0.2, 3.0)
    looked = anatomy(model)
    assert gains.seen_by_residual(looked) == [None]
    row = real.measure(looked)["layers"][0]
    up = model.encoder.layer[0].intermediate.dense.weight.detach().double().numpy()
    assert row["up"]["interference"] == pytest.approx(by_hand(up)["interference"], rel=1e-3)
    assert "gate" not in row


def test_layer_norm_takes_the_mean_off_the_keys():
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=60, n_positions=32)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        model.transformer.h[0].ln_2.weight.uniform_(0.2, 3.0)
        model.transformer.h[0].mlp.c_fc.weight += 0.5
    row = real.measure(anatomy(model))["layers"][0]
    assert row["norm"] == "transformer.h.0.ln_2"
    key = (
        model.transformer.h[0].mlp.c_fc.weight.detach().double().numpy().T
        * model.transformer.h[0].ln_2.weight.detach().double().numpy()
    )
    key = key - key.mean(1, keepdims=True)
    assert row["up"]["interference"] == pytest.approx(by_hand(key)["interference"], rel=1e-3)


# Small FFNs. -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gated", [False, True])
def test_channels_are_an_ffn(gated):
    """Batched channels with a read-out are `reference.forward` with a single output."""
    from fanfold import reference
    from fanfold.weights import Weights

    channels = Channels(3, [5, 2], "silu", gated, [0, 1])
    x = directions(7, 3).expand(2, -1, -1)
    with torch.no_grad():
        found = channels.coefficients(x)
    assert found[1, :, 2:].abs().max() == 0  # the narrower model has two channels
    keys, bias = channels.keys_MPFD.detach(), channels.bias_MPF.detach()
    for i, width in enumerate((5, 2)):
        spec = Spec(d_model=3, d_ff=width, activation="silu", gated=gated, up_bias=True, gate_bias=gated)
        more = {"gate": keys[i, 1, :width], "gate_bias": bias[i, 1, :width]} if gated else {}
        weights = Weights(spec, up=keys[i, 0, :width], up_bias=bias[i, 0, :width], down=torch.zeros(3, width), **more)
        np.testing.assert_allclose(found[i, :, :width], reference.coefficients(x[i], weights), rtol=1e-4, atol=1e-6)


def test_read_out_is_least_squares():
    x, y = directions(50, 4)[None], directions(50, 2, 1)[None]
    found = small.read_out(x, y)[0].numpy()
    design = np.concatenate([x[0].numpy(), np.ones((50, 1))], 1)
    np.testing.assert_allclose(found, np.linalg.lstsq(design, y[0].numpy(), rcond=None)[0], atol=1e-5)
    assert small.r_squared(x[0], x[0].double()).tolist() == [1.0] * 4


def test_without_its_activation_an_ffn_is_a_linear_model_exactly():
    for task, found in separability.merged(ratio=4, steps=100).items():
        assert found["max_difference"] < 16 * 2.0**-52 * 8, task  # rounding of a few float64 sums
        assert found["error"] >= found["linear_error"] * (1 - 1e-9), task
    for task, share in separability.linear().items():
        assert abs(share - 0.5) < 0.04, task  # no linear read-out tells the classes apart


def test_an_activation_separates_what_no_linear_read_out_does():
    rows = separability.experiment(["relu", "identity"], ratios=(1, 8), seeds=1, steps=250)
    at = {(r["task"], r["activation"], r["gated"], r["d_ff"], r["trained"]): r["accuracy"] for r in rows}
    linear = separability.linear()
    for task in separability.TASKS:
        for trained in (False, True):
            assert at[task, "identity", False, 64, trained] == pytest.approx(linear[task], abs=0.005)
            assert at[task, "relu", False, 64, trained] > 0.9
        assert at[task, "relu", False, 8, False] < at[task, "relu", False, 64, False]  # width is room
        assert at[task, "relu", False, 8, True] > at[task, "relu", False, 8, False] + 0.1
    # a bilinear channel is a product: it does the shells and XOR, not a parity of four
    assert at["concentric shells", "identity", True, 8, True] > 0.95
    assert at["XOR of superposed features", "identity", True, 8, True] > 0.9
    assert at["parity of 4 bits", "identity", True, 64, True] < 0.6


def test_two_gated_channels_write_a_product_exactly():
    a, b = np.random.default_rng(0).standard_normal((2, 1000)) * 5
    for name in ("silu", "gelu_erf", "gelu_tanh", "gelu_sigmoid", "relu", "identity"):
        factor = 2 if name == "identity" else 1  # identity(a) - identity(-a) is 2a
        np.testing.assert_allclose(product.pair_product(a, b, name), factor * a * b, rtol=1e-12, atol=1e-12)
    assert np.abs(product.pair_product(a, b, "elu") - a * b).max() > 0.1


def test_one_gated_channel_stands_for_several_ungated_ones():
    gated = product.errors(0.0, 1.0, "silu", True, widths=(1,), seeds=3, steps=400)
    ungated = product.errors(0.0, 1.0, "relu", False, widths=(1, 2, 8), seeds=3, steps=400)
    assert gated[0] < 0.15
    assert ungated[0] > 2 * gated[0]
    assert ungated[2] < ungated[0]
    assert product.channels_needed((1, 2, 8), ungated, gated[0]) in (8, None)
    assert product.channels_needed((1, 2), (0.5, 0.2), 0.2) == 2
    assert product.channels_needed((1, 2), (0.5, 0.2), 0.1) is None


# Read-outs. --------------------------------------------------------------------------------------------------------


def test_lasso_meets_its_optimality_conditions():
    x, y = directions(200, 6), directions(200, 3, 1)
    y[:, 0] += 3 * x[:, 2]
    price = 0.1
    w, c = readout.lasso(x, y, price, steps=2000)
    spread = x.double().std(0, correction=0)
    z = (x.double() - x.double().mean(0)) / spread
    slope = z.T @ (y.double() - x.double() @ w.T - c) / 200
    limit = price * y.double().std(0, correction=0)
    inside = (w.T * spread[:, None]) == 0
    assert (slope.abs() <= limit + 1e-6).all()
    assert torch.allclose(slope.abs()[~inside], limit.expand_as(slope)[~inside], atol=1e-6)
    assert 0 < int(inside.sum()) < 18
    assert (y.double() - x.double() @ w.T - c).mean(0).abs().max() < 1e-9


def test_a_linear_read_out_of_the_residual_cannot_beat_its_rank_and_an_ffn_does():
    rows = readout.experiment(6, ratios=(1, 8), features=(24,), steps=250)
    at = {(r["kind"], r["ratio"], r["trained"]): r for r in rows}
    before = at["residual", 0, False]["explained"]
    assert 5 < before < 6.05  # Σ R² of a projection of rank 6
    assert at["relu", 8, True]["explained"] > 1.4 * before
    assert at["swiglu", 8, True]["explained"] > 1.15 * before
    assert at["relu", 1, False]["explained"] < before  # as few channels as dimensions lose what the activation cuts
    for kind in ("relu", "silu"):
        assert at[kind, 8, True]["parameters"] == at["swiglu", 8, True]["parameters"] == 2 * 6 * 48
    with pytest.raises(ValueError, match="2/3 of the channels is not whole"):
        readout.experiment(8, ratios=(1,))
