"""The toy models of superposition against closed forms, in a small form; the full study is in studies/superposition."""

from __future__ import annotations

import numpy as np
import pytest

import fanfold as ff
from fanfold.superposition import closed, geometry, measures, phase, toy
from fanfold.superposition.samples import Samples

train = ff.superposition.train


def samples_of(p: float, n: int = 2, signed: bool = False, batch: int = 4096, rounds: int = 8):
    import torch

    source = Samples(n, torch.tensor([p]), [3], batch, signed)
    drawn = torch.cat([source.draw()[0, 0] for _ in range(rounds)]).double().numpy()
    weight = np.ones(len(drawn)) if source.weight is None else np.tile(source.weight[0].double().numpy(), rounds)
    return drawn, weight


@pytest.mark.parametrize("n", [2, 3, 7])
@pytest.mark.parametrize("signed", [False, True])
def test_samples_have_the_moments_they_should(n, signed):
    p = 0.3
    x, w = samples_of(p, n, signed)
    mean = lambda v: float((v * w).mean())  # noqa: E731
    assert abs(mean((x[:, 0] != 0).astype(float)) - p) < 0.01
    assert abs(mean(x[:, 1]) - (0.0 if signed else p / 2)) < 0.01
    assert abs(mean(x[:, 1] ** 2) - p / 3) < 0.01
    assert abs(mean((x[:, 0] * x[:, 1] != 0).astype(float)) - p * p) < 0.01  # independent
    assert (x.min() < -0.9) == signed


@pytest.mark.parametrize("p", [0.2, 0.55, 0.9])
def test_closed_forms_by_simulation(p):
    """Each loss is what the fixed weights cost on random samples that the closed forms know nothing of."""
    rng = np.random.default_rng(0)
    x = rng.random((400_000, 2)) * (rng.random((400_000, 2)) < p)
    r = 0.7

    def loss(w, b):
        out = np.maximum(np.outer(x @ w, w) + b, 0)
        return float((np.square(x - out) * [1, r]).sum(1).mean())

    assert loss(np.array([1.0, 0]), np.array([0, p / 2])) == pytest.approx(closed.loss_ignoring_extra(p, r), rel=0.01)
    assert loss(np.array([0, 1.0]), np.array([p / 2, 0])) == pytest.approx(closed.loss_ignoring_first(p, r), rel=0.01)
    assert loss(np.array([1.0, -1.0]), np.zeros(2)) == pytest.approx(closed.loss_antipodal(p, r), rel=0.01)


def test_closed_boundaries_are_where_the_losses_cross():
    for p in (0.1, 0.3, 0.5):
        lower, upper = closed.boundaries(p)
        assert closed.loss_antipodal(p, lower) == pytest.approx(closed.loss_ignoring_extra(p, lower))
        assert closed.loss_antipodal(p, upper) == pytest.approx(closed.loss_ignoring_first(p, upper))
        assert closed.phase(p, [lower * 0.99, lower * 1.01, upper * 0.99, upper * 1.01]).tolist() == [0, 2, 2, 1]
    p, r = closed.TRIPLE_POINT
    losses = [f(p, r) for f in (closed.loss_ignoring_extra, closed.loss_ignoring_first, closed.loss_antipodal)]
    assert np.ptp([losses[0], losses[2]]) < 1e-12
    assert closed.boundaries(p) == pytest.approx((1.0, 1.0))
    assert np.isnan(closed.boundaries(0.9)[0])


def test_phase_diagram_has_its_boundary_where_the_closed_form_puts_it():
    found = phase.diagram(2, 1, np.geomspace(0.8, 0.05, 6), np.geomspace(0.1, 10, 8), seeds=4, steps=400, batch=48)
    share, points = found.agreement(margin=1.15)
    assert points >= 35
    assert share >= 0.97
    assert set(np.unique(found.phase)) == {0, 1, 2}
    p, r = np.meshgrid(found.density, found.importance, indexing="ij")
    ratio = found.trained.loss.reshape(p.shape) / closed.best_loss(p, r)
    assert ratio.max() < 1.03  # free weights do at least as well as the fixed ones, but for noise
    assert ratio.min() > 0.85
    wrong = closed.phase(np.minimum(2 * p, 0.99), r)  # a boundary at half the density is told from the right one
    assert (found.phase == wrong).mean() < 0.9


def test_dense_features_get_a_dimension_each_like_the_linear_model():
    """With no sparsity the m most important features stand alone, and the loss is the linear model's."""
    importance = 0.7 ** np.arange(12)
    for activation in ("relu", "identity"):
        found = train(12, 4, 0.0, 0.7, activation=activation, seeds=1, steps=800, batch=256)
        norms = found.norms()[0]
        assert np.abs(norms[:4] - 1).max() < 0.05, activation
        assert norms[4:].max() < 0.25, activation
        assert found.dimensionality()[0, :4] == pytest.approx(1, abs=0.05)
        assert found.loss[0] == pytest.approx(closed.loss_linear(1.0, importance, 4), rel=0.05)
        assert found.dimensions_per_feature()[0] == pytest.approx(1, abs=0.05)


def test_the_linear_baseline_never_superposes_and_relu_does():
    linear = train(12, 4, 0.97, 0.9, activation="identity", seeds=1, steps=800, batch=256)
    bent = train(12, 4, 0.97, 0.9, seeds=1, steps=800, batch=256)
    assert (linear.norms()[0] > 0.5).sum() == 4
    assert linear.interference()[0][linear.norms()[0] > 0.5].max() < 0.1
    assert (bent.norms()[0] > 0.5).sum() >= 7
    assert bent.loss[0] < 0.5 * linear.loss[0]


def test_pentagon():
    found = train(5, 2, [0.95, 0.8], seeds=4, steps=800, batch=128)
    for w, b in zip(found.weights, found.bias):
        parts = geometry.parts(w)
        assert [p.name for p in parts] == ["pentagon"]
        assert parts[0].dimensionality == pytest.approx(0.4, abs=0.005)
        assert b.max() < 0


def test_sparsity_takes_the_dimensions_per_feature_from_one_to_a_half():
    density = np.array([1.0, 0.45, 0.35, 0.28, 0.05])
    found = train(48, 6, 1 - density, seeds=1, steps=1200, batch=256)
    star = found.dimensions_per_feature()
    assert star[0] == pytest.approx(1, abs=0.03)
    assert (np.abs(star[1:4] - 0.5) < 0.04).sum() >= 2  # the plateau
    assert star[4] < 0.3
    assert (np.diff(star) < 0.02).all()
    d = found.dimensionality()[2]
    assert (np.abs(d - 0.5) < 0.0125).sum() >= 10  # antipodal pairs
    assert d.sum() == pytest.approx(6, abs=0.3)  # the dimensions are all given away


def test_absolute_value_in_asymmetric_superposition():
    """|x| of 3 features from 6 coefficients: two of them each, one for either sign; then fewer than that."""
    found = train(3, 6, 0.5, hidden="abs", seeds=4, steps=800, batch=128)
    assert found.loss[0] < 1e-3
    w, out = found.weights[0], found.out[0]
    assert out.shape == (3, 6)
    signs = np.sign(w) * (np.abs(w) > 0.3 * np.abs(w).max())
    for i in range(3):
        assert {-1, 1} <= set(signs[:, i])
    assert measures.served(w, out).sum(1).tolist() == [1] * 6
    # four coefficients for six half-lines, rare ones: each serves two features, one read strongly and written weakly
    tight = train(3, 4, 0.99, hidden="abs", seeds=16, steps=900, batch=64)
    w, out = tight.weights[0], tight.out[0]
    assert tight.loss[0] < 0.05 * 3 * closed.mean_square_left(0.01)
    assert measures.served(w, out).sum(1).tolist() == [2] * 4
    assert measures.asymmetry(w, out) == (4, 4)
    assert (out.min(0) < -0.5).all()  # each holds down the feature that it would disturb


def test_asymmetry_of_known_weights():
    """Elhage et al.'s motif: read 2 and -1/2, written 1/2 and 2."""
    read = np.array([[2.0, -0.5, 0.0], [0.0, 1.0, 1.0], [0.01, 0.0, 0.0]])
    written = np.array([[0.5, 2.0, -3.0], [0.0, 0.9, 1.0], [0.1, 0.0, 0.0]]).T
    assert measures.served(read, written).tolist() == [[True, True, False], [False, True, True], [False] * 3]
    assert measures.asymmetry(read, written) == (1, 2)
    rng = np.random.default_rng(0)
    opposite, pairs = measures.asymmetry(rng.standard_normal((60, 80)), rng.standard_normal((80, 60)))
    assert opposite / pairs == pytest.approx(2 / 3, abs=0.04)


def test_hidden_relu_is_worse_than_linear_and_shapes():
    tied = train(6, 3, [0.5, 0.9], hidden="relu", seeds=3, steps=300, batch=128)
    assert tied.weights.shape == (2, 3, 6)
    assert tied.out is None
    assert tied.losses.shape == (2, 3)
    free = train(6, 3, [0.5, 0.9], seeds=3, steps=300, batch=128)
    assert (tied.loss >= free.loss * 0.98).all()


def test_any_activation():
    found = train(6, 2, 0.95, activation="silu", seeds=1, steps=150, batch=128)
    assert found.loss[0] < 0.8 * closed.loss_linear(0.05, np.ones(6), 0)


def test_the_best_seed_is_kept_and_seeds_do_not_disturb_each_other():
    many = train(8, 2, [0.5, 0.95], 0.9, seeds=4, steps=200, batch=128)
    assert np.array_equal(many.loss, many.losses.min(1))
    again = train(8, 2, [0.5, 0.95], 0.9, seeds=4, steps=200, batch=128)
    assert np.array_equal(many.weights, again.weights)
    best = int(many.seed[1])
    alone = train(8, 2, 0.95, 0.9, seeds=[best], steps=200, batch=128)
    assert alone.seed.tolist() == [best]
    np.testing.assert_allclose(alone.weights[0], many.weights[1], atol=2e-3)
    assert len(set(np.round(many.losses[1], 9))) == 4  # the seeds do differ


def test_points_beyond_the_batch_limit_are_trained_in_pieces(monkeypatch):
    whole = train(6, 2, [0.2, 0.5, 0.9], seeds=2, steps=60, batch=64)
    monkeypatch.setattr(toy, "_AT_ONCE", 2 * 64 * 6)
    seen = []
    pieces = train(6, 2, [0.2, 0.5, 0.9], seeds=2, steps=60, batch=64, progress=lambda d, t: seen.append((d, t)))
    np.testing.assert_allclose(pieces.weights, whole.weights, atol=1e-4)
    assert seen[-1] == (180, 180)
    assert [d for d, _ in seen] == list(range(1, 181))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sparsity": 1.0}, r"sparsity=\[1.0\]: expected a number or list in \[0, 1\)"),
        ({"sparsity": [0.1, -0.2]}, "expected a number or list in"),
        ({"n": 0}, "n=0: expected a positive int"),
        ({"importance": [1, 2]}, r"importance has shape \(2,\), expected a number, \(4,\) or \(1, 4\)"),
        ({"importance": [1, 2, 3, -1]}, "expected finite positive numbers"),
        ({"hidden": "gelu"}, "hidden='gelu': expected None, 'relu' or 'abs'"),
        ({"activation": "sawp"}, "activation 'sawp' is not known"),
        ({"seeds": 0}, "seeds is empty"),
    ],
)
def test_refusals(change, said):
    with pytest.raises(ValueError, match=said):
        train(**{"n": 4, "m": 2, "sparsity": 0.5, "steps": 1, **change})


def test_measures_of_known_frames():
    for shape, d in zip(geometry.SHAPES, (1, 1 / 2, 2 / 3, 3 / 4, 2 / 5, 3 / 8)):
        w = shape.vertices
        assert measures.dimensionality(w) == pytest.approx(d)
        assert measures.interference(w) == pytest.approx(1 / d - 1)
        assert measures.dimensionality(3 * w) == pytest.approx(d)  # a common length is of no account
        assert measures.dimensions_per_feature(w) == pytest.approx(shape.rank / shape.k)
        assert closed.tight_frame_dimensionality(shape.k, shape.rank) == pytest.approx(d)
    flat = geometry.square_antiprism(np.sqrt((2 * np.sqrt(2) - 1) / 7))  # the largest smallest distance
    assert measures.dimensionality(flat).mean() == pytest.approx(0.3664, abs=1e-4)
    nothing = np.zeros((2, 3))
    assert measures.dimensionality(nothing).tolist() == [0, 0, 0]
    assert measures.dimensions_per_feature(nothing) == np.inf
    by_hand = np.array([[3.0, 1.0], [0.0, 2.0]])  # W_1·W_2 = 3: unequal, not orthogonal
    assert measures.interference(by_hand) == pytest.approx([1.0, 9 / 5])
    assert measures.dimensionality(by_hand) == pytest.approx([9 / 10, 5 / (5 + 9 / 5)])


@pytest.mark.parametrize("shape", geometry.SHAPES, ids=lambda s: s.name)
def test_geometry_is_recognised_turned_scaled_and_perturbed(shape):
    rng = np.random.default_rng(1)
    turn = np.linalg.qr(rng.standard_normal((7, 7)))[0]
    w = turn[:, : shape.rank] @ shape.vertices[:, rng.permutation(shape.k)] * 1.3
    noise = rng.standard_normal(w.shape) * 0.01
    assert geometry.recognise(w + noise) == (shape.rank, shape.name)
    elsewhere = turn[:, shape.rank :] @ np.eye(7 - shape.rank)[:, :2]  # two more features, orthogonal to it
    every = geometry.parts(np.concatenate([w, elsewhere, np.zeros((7, 1))], axis=1))
    assert [p.name for p in every] == sorted([shape.name, "alone", "alone"], key=lambda n: n == "alone")
    assert {i for p in every for i in p.features} == set(range(shape.k + 2))


def test_shapes_that_are_not_on_the_list_are_not_named():
    angle = 2 * np.pi * np.arange(6) / 6
    hexagon = np.stack([np.cos(angle), np.sin(angle)])
    assert geometry.recognise(hexagon) == (2, "6 in 2")
    bipyramid = np.zeros((3, 5))  # triangle and antipodal pair: two parts, not one of five
    bipyramid[:2, :3] = geometry._polygon(3)
    bipyramid[2, 3:] = [1, -1]
    assert [p.name for p in geometry.parts(bipyramid)] == ["triangle", "antipodal pair"]
    cube = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)]).T / np.sqrt(3)
    assert geometry.recognise(cube) == (3, "8 in 3")  # D is 3/8 as well: the cosines tell
    assert geometry.line_of(0.405) == "pentagon"
    assert geometry.line_of(0.45) is None
