"""What is kept of each channel: the strongest triggers, the moments, the histogram; against float64 and sorting."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fanfold import Spec
from fanfold.memory import layers
from fanfold.memory.index.accumulate import (
    BINS,
    LOW,
    OCTAVES,
    TAIL,
    Accumulator,
    edges,
    histogram,
    is_exact,
    is_signed,
    threshold,
)
from fanfold.numerics import UNIT_ROUNDOFF, random_weights, relative_error
from fanfold.reference import coefficients


def _coefficients(sequences=37, tokens=5, channels=6, seed=0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    m = rng.normal(size=(sequences, tokens, channels)) * [1, 30, 1e-3, 1, 1, 1] + [0, 1e3, 0, 0, 0, 5]
    m[:, :, 3] = np.round(m[:, :, 3] * 2) / 2  # many equal values
    m[:, :, 4] = -np.abs(m[:, :, 4])  # never positive
    m[m > 3e3] = 0
    return m.astype(np.float32)


def _filled(m: np.ndarray, batch: int, top: int = 4, signed: bool = True, first: int = 0) -> Accumulator:
    out = Accumulator(m.shape[2], top, signed, torch.full((m.shape[2],), 0.5))
    ids = torch.arange(len(m)) * 3 + 1
    for at in range(0, len(m), batch):
        out.update(torch.from_numpy(m[at : at + batch]), ids[at : at + batch], first)
    return out


def _best(m: np.ndarray, top: int, sign: int) -> list[list[tuple[float, int, int]]]:
    """By sorting everything: (coefficient, sequence, position), the earlier sequence first among equals."""
    out = []
    for channel in range(m.shape[2]):
        value = sign * m[:, :, channel]
        found = [(float(v.max()), 3 * i + 1, int(v.argmax())) for i, v in enumerate(value)]
        out.append(sorted((f for f in found if f[0] > 0), key=lambda f: (-f[0], f[1]))[:top])
    return out


@pytest.mark.parametrize(("top", "batch"), [(4, 8), (1, 5), (50, 37), (7, 1)])
def test_top_is_what_sorting_gives(top, batch):
    m = _coefficients()
    kept = _filled(m, batch, top)
    for sign, end in kept.ends.items():
        for channel, best in enumerate(_best(m, top, sign)):
            n = len(best)
            got = list(
                zip(end.coefficient[channel].tolist(), end.sequence[channel].tolist(), end.position[channel].tolist())
            )
            assert got[:n] == best
            assert got[n:] == [(0.0, -1, 0)] * (top - n)


def test_positions_count_from_the_start_of_the_sequence():
    m = _coefficients()
    for sign, end in _filled(m, 8).ends.items():
        later = _filled(m, 8, first=2).ends[sign]
        kept = end.sequence >= 0
        assert torch.equal(later.position[kept], end.position[kept] + 2)


def test_only_signed_coefficients_have_two_ends():
    assert set(_filled(_coefficients(), 8, signed=False).ends) == {1}
    assert set(_filled(_coefficients(), 8).ends) == {1, -1}


@pytest.mark.parametrize("batch", [1, 7, 37])
def test_statistics_against_float64(batch):
    m = _coefficients()
    kept, flat = _filled(m, batch), m.reshape(-1, m.shape[2]).astype(np.float64)
    assert kept.tokens == len(flat)
    allowed = 64 * UNIT_ROUNDOFF["float32"]
    assert np.abs(kept.mean.numpy() - flat.mean(0)).max() <= allowed * np.abs(flat).max()
    # channel by channel: one has a mean 40 times its deviation, one is a thousandth of the others
    for channel in range(m.shape[2]):
        variance = float(kept.squares[channel]) / kept.tokens
        assert variance == pytest.approx(flat[:, channel].var(), rel=1e-4)
    assert kept.active.tolist() == (np.abs(flat) > 0.5).sum(0).tolist()
    own = kept.histogram.numpy()
    assert own.sum(1).tolist() == [len(flat)] * m.shape[2]
    assert own[:, OCTAVES].tolist() == (flat == 0).sum(0).tolist()
    assert own[:, OCTAVES + 1 :].sum(1).tolist() == (flat > 0).sum(0).tolist()


def test_histogram_bins_are_octaves():
    low = edges()
    assert (len(low), low[0], low[1], BINS) == (OCTAVES, 2.0**LOW, 2.0 ** (LOW + 1), 2 * OCTAVES + 1)
    values = [0.0, -0.0, 1e-42]  # zero, and what float32 holds only without its full precision
    assert histogram(torch.tensor([values]).t())[0].nonzero()[:, 0].tolist() == [OCTAVES]
    for i, edge in enumerate(low):
        for sign in (1.0, -1.0):
            inside = torch.tensor([[sign * edge], [sign * float(np.nextafter(np.float32(2 * edge), np.float32(0)))]])
            expected = OCTAVES + 1 + i if sign > 0 else OCTAVES - 1 - i
            assert histogram(inside)[0].nonzero()[:, 0].tolist() == [expected], (edge, sign)
    for value, expected in ((1e9, BINS - 1), (-1e9, 0), (1e-9, OCTAVES + 1), (-1e-9, OCTAVES - 1)):
        assert histogram(torch.tensor([[value]]))[0].nonzero()[:, 0].tolist() == [expected]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_refused(value):
    m = _coefficients()
    m[5, 2, 1] = value
    with pytest.raises(ValueError, match="sequence 16 gives coefficients that are not finite"):
        _filled(m, 8)


def test_arrays_restore_everything():
    m = _coefficients()
    half = _filled(m[:20], 5)
    again = Accumulator(m.shape[2], 4, True, torch.zeros(m.shape[2]))
    again.restore({name: a.tobytes() for name, a in half.arrays().items()})
    ids = torch.arange(20, 37) * 3 + 1
    for kept in (half, again):
        for at in range(0, 17, 5):
            kept.update(torch.from_numpy(m[20 + at : 25 + at]), ids[at : at + 5])
    for name, array in half.arrays().items():
        assert array.tobytes() == again.arrays()[name].tobytes(), name
    assert half.arrays()["tokens"] == [37 * 5]


@pytest.mark.parametrize(
    ("name", "signed", "exact"),
    [
        ("swiglu", True, False),
        ("reglu", True, True),
        ("bilinear", True, False),
        ("relu", False, True),
        ("relu2", False, True),
        ("gelu", False, False),
        ("silu", False, False),
        ("leaky_relu", False, False),
        ("tanh", True, False),
        ("elu", True, False),
    ],
)
def test_ends_and_zeros_by_activation(name, signed, exact):
    spec = Spec.parse(name, d_model=4, d_ff=8)
    assert (is_signed(spec), is_exact(spec)) == (signed, exact)


@pytest.mark.parametrize("name", ["swiglu", "gelu", "relu", "bilinear"])
def test_threshold_cuts_the_tail_and_no_more(name):
    weights = random_weights(
        Spec.parse(name, d_model=24, d_ff=40, down_bias=True), 3, lambda a: torch.tensor(a).float()
    )
    x = torch.randn(33, 24, generator=torch.Generator().manual_seed(2))
    computed = layers.coefficients(weights, x).coefficient
    found = threshold(weights, computed)
    if name == "relu":
        assert found == 0.0
        return
    m, down = coefficients(x, weights), weights.down.double().numpy()
    size = np.abs(m) * np.linalg.norm(down, axis=0)

    def tail(cut: float) -> float:
        return float(np.mean(np.linalg.norm((m * (size <= cut)) @ down.T, axis=1) / np.linalg.norm(m @ down.T, axis=1)))

    assert tail(found) <= TAIL
    assert tail(found + 2 * size.max() / 2**16) >= TAIL - 1e-4
    assert 0 < found < size.max()
    assert relative_error(np.array([threshold(weights, computed[:0])]), np.array([0.0])) == 0.0
