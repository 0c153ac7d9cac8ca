"""The describe floor and the reference: activations, Spec, Layout, Weights, float64 forward, errors of each."""

from __future__ import annotations

import dataclasses
import json
import math

import mpmath as mp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fanfold as ff
from fanfold import activations, layout, numerics, reference
from fanfold.activations import ACTIVATIONS
from fanfold.layout import Layout

mp.mp.dps = 40
ALL = sorted(ACTIVATIONS)


def _mp_sigmoid(x: mp.mpf) -> mp.mpf:
    return 1 / (1 + mp.exp(-x))


# The formulas again, in 40 digits: written from the papers, not from the table.
EXACT = {
    "relu": lambda x, p: x if x > 0 else mp.mpf(0),
    "relu2": lambda x, p: x * x if x > 0 else mp.mpf(0),
    "gelu_erf": lambda x, p: x * mp.erfc(-x / mp.sqrt(2)) / 2,
    "gelu_tanh": lambda x, p: x * (1 + mp.tanh(mp.sqrt(2 / mp.pi) * (x + mp.mpf(0.044715) * x**3))) / 2,
    "gelu_sigmoid": lambda x, p: x * _mp_sigmoid(mp.mpf(1.702) * x),
    "silu": lambda x, p: x * _mp_sigmoid(p["beta"] * x),
    "sigmoid": lambda x, p: _mp_sigmoid(x),
    "tanh": lambda x, p: mp.tanh(x),
    "identity": lambda x, p: x,
    "softplus": lambda x, p: mp.log1p(mp.exp(x)),
    "elu": lambda x, p: x if x > 0 else p["alpha"] * mp.expm1(x),
    "mish": lambda x, p: x * mp.tanh(mp.log1p(mp.exp(x))),
    "leaky_relu": lambda x, p: x if x > 0 else mp.mpf(p["slope"]) * x,
    "xielu": lambda x, p: (
        p["beta"] * x + (p["alpha_p"] * x * x if x > 0 else p["alpha_n"] * (mp.expm1(min(x, mp.mpf(p["eps"]))) - x))
    ),
}
# no kink (0, xielu's eps) among them; both the middle and the tails
POINTS = np.concatenate([np.linspace(-9.7, 9.7, 98), [-37.0, -12.0, 12.0, 37.0]]) + 1e-3


def _exact(name: str, x: np.ndarray, params: dict[str, float], derivative: bool = False) -> np.ndarray:
    mp.mp.dps = 40
    f = lambda v: EXACT[name](v, params)  # noqa: E731
    return np.array([float(mp.diff(f, mp.mpf(v)) if derivative else f(mp.mpf(v))) for v in x])[:, None]


def test_exact_covers_the_table():
    assert set(EXACT) == set(ACTIVATIONS)


@pytest.mark.parametrize("name", ALL)
def test_activation_and_derivative_against_40_digits(name):
    """NumPy form and derivative are within the rule next to torch's own in float64; every other activation is not."""
    act, params = ACTIVATIONS[name], dict(ACTIVATIONS[name].params)
    x = torch.tensor(POINTS, dtype=torch.float64, requires_grad=True)
    y = act.torch(torch, x, params)
    (slope,) = torch.autograd.grad(y.sum() + 0 * x.sum(), x)
    truth, dtruth = _exact(name, POINTS, params), _exact(name, POINTS, params, derivative=True)
    assert numerics.compare(act.numpy(POINTS, params)[:, None], truth, y[:, None]).ok
    assert numerics.compare(act.derivative(POINTS, params)[:, None], dtruth, slope[:, None]).ok
    for other in set(ALL) - {name}:
        wrong = ACTIVATIONS[other]
        assert not numerics.compare(wrong.numpy(POINTS, wrong.params)[:, None], truth, y[:, None]).ok, other


@pytest.mark.parametrize("name", ALL)
def test_activation_torch_form(name):
    """The torch form in float64 is nearer to the NumPy form than one rounding to float32 would bring it."""
    act, params = ACTIVATIONS[name], dict(ACTIVATIONS[name].params)
    x = torch.tensor(POINTS, dtype=torch.float32)
    truth = act.numpy(x.double().numpy(), params)[:, None]
    rounded = act.torch(torch, x.double(), params).float()[:, None]
    assert numerics.compare(act.torch(torch, x.double(), params)[:, None], truth, rounded).ok


@pytest.mark.parametrize("name", ALL)
def test_activation_tails(name):
    act = ACTIVATIONS[name]
    x = np.array([-1e4, -700.0, -40.0, -6.0, 0.0, 6.0, 40.0, 700.0, 1e4])
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        y, slope = act.numpy(x, act.params), act.derivative(x, act.params)
    assert np.isfinite(y).all()
    assert np.isfinite(slope).all()
    assert act.zero_preserving == (y[4] == 0.0)


def test_gelu_does_not_cancel_to_zero():
    y = activations.get("gelu_erf").numpy(np.array([-6.0]), {})[0]
    assert numerics.ulp_error(y, -3.0 * math.erfc(6 / math.sqrt(2))) <= 1
    assert y != 0.0
    assert activations.get("gelu_tanh").numpy(np.array([-6.0]), {})[0] != 0.0


def test_gelu_variants_differ_by_the_known_amounts():
    """max |erf - tanh| = 4.732e-4 near 2.70, max |erf - sigmoid| = 2.033e-2: what a tolerance has to separate."""
    x = np.linspace(-6, 6, 120_001)
    erf, tanh, sigmoid = (activations.get(n).numpy(x, {}) for n in ("gelu_erf", "gelu_tanh", "gelu_sigmoid"))
    assert f"{np.abs(erf - tanh).max():.3e}" == "4.732e-04"
    assert f"{abs(x[np.abs(erf - tanh).argmax()]):.1f}" == "2.7"
    assert f"{np.abs(erf - sigmoid).max():.3e}" == "2.033e-02"


def test_names_and_aliases_are_unique_and_resolve():
    names = [n for a in ACTIVATIONS.values() for n in (a.name, *a.aliases)]
    assert len(names) == len(set(names))
    for act in ACTIVATIONS.values():
        assert all(activations.get(n) is act for n in (act.name, *act.aliases))


def test_unknown_activation_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"activation 'gelou' is not known; known: relu, relu2, gelu_erf"):
        activations.get("gelou")
    with pytest.raises(ValueError, match=r"names a gated FFN: use Spec\.parse"):
        activations.get("swiglu")


def _transformers_names() -> list[str]:
    from transformers.activations import ACT2FN

    return sorted(ACT2FN)


@pytest.mark.parametrize("name", _transformers_names())
def test_transformers_names_mean_the_same_function(name):
    """Each name of transformers' table that we accept computes what transformers computes; the others are refused."""
    from transformers.activations import ACT2FN

    if name not in activations._BY_NAME:
        assert name in {"gelu_10", "hardswish", "laplace", "prelu", "relu6", "sqrtsoftplus"}
        return
    theirs = ACT2FN[name].to(torch.float32)
    act, params = activations.get(name), dict(activations.get(name).params)
    if name == "xielu":  # stored through softplus, in bfloat16: the effective values are what we take
        params["alpha_p"] = float(torch.nn.functional.softplus(theirs.alpha_p.detach().double()))
        params["alpha_n"] = params["beta"] + float(torch.nn.functional.softplus(theirs.alpha_n.detach().double()))
    x = torch.tensor(POINTS, dtype=torch.float32)
    with torch.no_grad():
        y = theirs(x)[:, None]
    truth = act.numpy(x.double().numpy(), params)[:, None]
    assert numerics.compare(y, truth, act.torch(torch, x, params)[:, None]).ok
    for other in {"gelu_erf", "gelu_tanh", "gelu_sigmoid", "relu"} - {act.name}:
        wrong = ACTIVATIONS[other]
        wrong_truth = wrong.numpy(x.double().numpy(), {})[:, None]
        assert not numerics.compare(y, wrong_truth, wrong.torch(torch, x, {})[:, None]).ok, other


# --- Spec ---

finite = st.floats(min_value=0.125, max_value=64, width=32)


@st.composite
def specs(draw) -> ff.Spec:
    gated = draw(st.booleans())
    act = ACTIVATIONS[draw(st.sampled_from(ALL))]
    chosen = draw(st.lists(st.sampled_from(sorted(act.params) or [""]), unique=True))
    more = {}
    if gated:
        more = {
            "gate_bias": draw(st.booleans()),
            "gate_limit": draw(st.none() | finite),
            "up_limit": draw(st.none() | finite),
            "up_offset": draw(st.just(0.0) | finite),
        }
    return ff.Spec(
        d_model=draw(st.integers(1, 1 << 40)),
        d_ff=draw(st.integers(1, 1 << 40)),
        activation=act.name,
        gated=gated,
        up_bias=draw(st.booleans()),
        down_bias=draw(st.booleans()),
        activation_params=tuple((name, draw(finite)) for name in chosen if name),
        dropout=draw(st.floats(0, 0.875)),
        **more,
    )


@given(specs())
def test_spec_round_trip(spec):
    again = ff.Spec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec
    assert hash(again) == hash(spec)
    assert spec.describe() == again.describe()


def test_spec_is_frozen_and_keyword_only():
    spec = ff.Spec(d_model=4, d_ff=8, activation="gelu")
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.d_ff = 9
    with pytest.raises(TypeError):
        ff.Spec(4, 8, "gelu")
    assert spec.activation == "gelu_erf"


def test_spec_counts_parameters():
    assert ff.Spec.parse("swiglu", d_model=4096, d_ff=11008).n_params == 135_266_304
    biased = ff.Spec(d_model=4, d_ff=6, activation="relu", gated=True, up_bias=True, gate_bias=True, down_bias=True)
    assert biased.n_params == 3 * 24 + 6 + 6 + 4


BASE = {"d_model": 4, "d_ff": 8, "activation": "silu"}
SPEC_ERRORS = [
    ({"d_model": 0}, r"d_model=0: expected a positive int"),
    ({"d_ff": -1}, r"d_ff=-1: expected a positive int"),
    ({"d_ff": 8.0}, r"d_ff=8\.0: expected a positive int"),
    ({"d_ff": True}, r"d_ff=True: expected a positive int"),
    ({"gated": 1}, r"gated=1: expected True or False"),
    ({"up_bias": None}, r"up_bias=None: expected True or False"),
    ({"activation": "swishy"}, r"activation 'swishy' is not known; known: relu, .*xielu"),
    ({"activation": "geglu"}, r"names a gated FFN: use Spec\.parse"),
    ({"gate_bias": True}, r"gate_bias=True needs gated=True"),
    ({"gate_limit": 7.0}, r"gate_limit=7\.0 needs gated=True"),
    ({"up_limit": 7.0}, r"up_limit=7\.0 needs gated=True"),
    ({"up_offset": 1.0}, r"up_offset=1\.0 needs gated=True"),
    ({"gated": True, "gate_limit": -7.0}, r"gate_limit=-7\.0: expected a positive number or None"),
    ({"gated": True, "up_limit": math.inf}, r"up_limit=inf: expected a positive number or None"),
    ({"gated": True, "up_offset": math.nan}, r"up_offset=nan: expected a finite number"),
    ({"dropout": 1.0}, r"dropout=1\.0: expected 0 <= dropout < 1"),
    ({"dropout": "0.1"}, r"dropout='0\.1': expected 0 <= dropout < 1"),
    ({"beta": 1.0, "activation_params": (("beta", 2.0),)}, r"beta=1\.0 and activation_params beta=2\.0 disagree"),
    ({"activation": "relu", "beta": 1.0}, r"activation 'relu' has no parameter beta; it has: none"),
    ({"activation_params": (("slope", 1.0),)}, r"activation 'silu' has no parameter slope; it has: beta"),
    ({"beta": math.inf}, r"activation parameter beta=inf: expected a finite number"),
]


@pytest.mark.parametrize(("change", "sentence"), SPEC_ERRORS)
def test_spec_errors(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        ff.Spec(**(BASE | change))


def test_spec_from_dict_errors():
    with pytest.raises(ValueError, match=r"unknown key d_hidden; known: d_model, d_ff, activation"):
        ff.Spec.from_dict(BASE | {"d_hidden": 1})
    with pytest.raises(ValueError, match=r"missing key d_model, activation"):
        ff.Spec.from_dict({"d_ff": 1})


@pytest.mark.parametrize(
    ("name", "activation"),
    [("swiglu", "silu"), ("geglu", "gelu_erf"), ("geglu_tanh", "gelu_tanh"), ("reglu", "relu"), ("glu", "sigmoid")]
    + [("bilinear", "identity")],
)
def test_parse_gated(name, activation):
    spec = ff.Spec.parse(name, d_model=4, d_ff=8)
    assert spec == ff.Spec(d_model=4, d_ff=8, activation=activation, gated=True)


def test_parse_others():
    assert ff.Spec.parse("quick_gelu", d_model=4, d_ff=8) == ff.Spec(d_model=4, d_ff=8, activation="gelu_sigmoid")
    oai = ff.Spec.parse("swiglu_oai", d_model=4, d_ff=8)
    assert (oai.beta, oai.gate_limit, oai.up_limit, oai.up_offset) == (1.702, 7.0, 7.0, 1.0)
    with pytest.raises(ValueError, match=r"FFN variant 'swigloo' is not known; known: swiglu, .*relu"):
        ff.Spec.parse("swigloo", d_model=4, d_ff=8)
    with pytest.raises(ValueError, match=r"'swiglu_oai' fixes beta; use Spec\(activation='silu'"):
        ff.Spec.parse("swiglu_oai", d_model=4, d_ff=8, beta=1.0)
    with pytest.raises(ValueError, match=r"d_ff=0: expected a positive int"):
        ff.Spec.parse("relu", d_model=4, d_ff=0)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_pad_exact_is_what_padding_does(name, gated, offset):
    if offset and not gated:
        return
    spec = ff.Spec(d_model=5, d_ff=6, activation=name, gated=gated, up_offset=offset)
    wide = dataclasses.replace(spec, d_ff=8)
    weights = numerics.random_weights(wide)
    for key in ("gate", "up"):
        if getattr(weights, key) is not None:
            getattr(weights, key)[6:] = 0
    m = reference.coefficients(np.random.default_rng(0).normal(size=(3, 5)), weights)
    assert spec.pad_exact == (not m[:, 6:].any())


# --- Layout ---


def test_layout_the_activated_half():
    """Halves (1,2) and (10,20): silu of the first half times the second is 42.54; of the second, 50.00."""
    fused = np.array([[1.0], [2.0], [10.0], [20.0]])

    def ffn(order: str) -> float:
        gate, up = Layout(order=order).split(fused)
        spec = ff.Spec(d_model=1, d_ff=2, activation="silu", gated=True)
        return float(reference.forward([[1.0]], ff.Weights(spec, gate=gate, up=up, down=np.ones((1, 2))))[0, 0])

    assert f"{ffn(layout.GATE_UP):.2f}" == "42.54"
    assert f"{ffn(layout.UP_GATE):.2f}" == "50.00"


@pytest.mark.parametrize("order", layout.FUSED)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", [(6, 4), (4, 4)])
@pytest.mark.parametrize("make", [np.asarray, torch.as_tensor])
def test_layout_split(order, transposed, size, make):
    f, d = size
    gate, up = np.arange(f * d).reshape(f, d) + 1.0, -np.arange(f * d).reshape(f, d) - 1.0
    first, second = (gate, up) if order in (layout.GATE_UP, layout.GATE_UP_INTERLEAVED) else (up, gate)
    if "interleaved" in order:
        fused, bias = np.stack([first, second], 1).reshape(2 * f, d), np.stack([first[:, 0], second[:, 0]], 1).ravel()
    else:
        fused, bias = np.concatenate([first, second]), np.concatenate([first[:, 0], second[:, 0]])
    where = Layout(order=order, transposed=transposed)
    stored = make(np.ascontiguousarray(fused.T) if transposed else fused)
    got_gate, got_up = where.split(stored)
    wanted = (gate.T, up.T) if transposed else (gate, up)
    assert np.array_equal(np.asarray(got_gate), wanted[0])
    assert np.array_equal(np.asarray(got_up), wanted[1])
    got_gate, got_up = where.split(make(bias))
    assert np.array_equal(np.asarray(got_gate), gate[:, 0])
    assert np.array_equal(np.asarray(got_up), up[:, 0])
    stored[...] = 0  # a view, not a copy
    assert not np.asarray(where.split(stored)[0]).any()


def test_layout_errors():
    with pytest.raises(ValueError, match=r"layout order 'w13' is not known; known: separate, \[gate;up\]"):
        Layout(order="w13")
    with pytest.raises(ValueError, match=r"layout 'separate' has no fused matrix to split"):
        Layout().split(np.ones((4, 2)))
    with pytest.raises(ValueError, match=r"even number of rows, got shape \(5, 2\)"):
        Layout(order=layout.GATE_UP).split(np.ones((5, 2)))
    assert Layout(order=layout.GATE_UP, transposed=True).describe() == "[gate;up], [in,out]"


# --- Weights ---


def _weights(**changes) -> ff.Weights:
    spec = ff.Spec(d_model=4, d_ff=6, activation="silu", gated=True, down_bias=True)
    arrays = {"up": np.ones((6, 4)), "gate": np.ones((6, 4)), "down": np.ones((4, 6)), "down_bias": np.ones(4)}
    return ff.Weights(spec, **(arrays | changes))


WEIGHT_ERRORS = [
    ({"gate": None}, r"gate is missing, but the spec has one: gated silu 4->6 \(bias on down\)"),
    ({"down_bias": None}, r"down_bias is missing, but the spec has one"),
    ({"up_bias": np.ones(6)}, r"up_bias is given, but the spec has none"),
    ({"down": np.ones((6, 4))}, r"down has shape \(6, 4\), expected \(4, 6\) for d_model=4, d_ff=6"),
    ({"up": np.ones((6, 4), dtype=int)}, r"up has dtype int64, expected a float dtype"),
    ({"up": torch.ones((6, 4), dtype=torch.int8)}, r"up has dtype torch\.int8, expected a float dtype"),
]


@pytest.mark.parametrize(("change", "sentence"), WEIGHT_ERRORS)
def test_weights_errors(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        _weights(**change)


def test_weights_hold_what_they_are_given():
    up = torch.ones(4, 6, dtype=torch.bfloat16).T
    weights = _weights(up=up)
    assert weights.up is up
    assert dict(weights.items()).keys() == {"gate", "up", "down", "down_bias"}
    assert weights.nbytes == 24 * 2 + 24 * 8 * 2 + 4 * 8
    assert "gated silu 4->6" in repr(weights)
    assert weights.replace(up=np.zeros((6, 4))).up.sum() == 0
