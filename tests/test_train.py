"""Training with every `save`: gradients against float64, what is kept, dropout, and what must not be disturbed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fanfold as ff
from fanfold import Spec, Weights, numerics, reference
from fanfold.count import ffn as counted
from fanfold.kernels import blocks, dispatch, slopes, train, widening
from fanfold.kernels import torch as torch_ops
from fanfold.show.peak import Peak

SAVES = counted.SAVES
F32 = numerics.UNIT_ROUNDOFF["float32"]
FULL = {"up_bias": True, "down_bias": True}
OAI = Spec.parse("swiglu_oai", d_model=24, d_ff=40, gate_bias=True, **FULL)
SWIGLU = Spec.parse("swiglu", d_model=24, d_ff=40, gate_bias=True, **FULL)
GELU = Spec(d_model=16, d_ff=16, activation="gelu_erf", **FULL)
# Tokens of what the rule judges. A row of a weight's gradient is as wrong as the largest tokens' coefficients: of 37
# tokens one row in thousands is beyond the rule by luck, another with each order of rounding; of 149 none in 9,812
# comparisons (eleven seeds).
JUDGED = 149
SPECS = [
    *(Spec(d_model=24, d_ff=40, activation=a, **FULL) for a in ff.activations.ACTIVATIONS),
    *(Spec(d_model=24, d_ff=40, activation=a, gated=True, gate_bias=True, **FULL) for a in ff.activations.ACTIVATIONS),
    OAI,
    Spec(d_model=24, d_ff=40, activation="silu", beta=1.7, gated=True),
    Spec(d_model=24, d_ff=40, activation="relu", gated=True, up_limit=1.0, up_offset=1.0),
    Spec.parse("swiglu", d_model=17, d_ff=17),
    Spec(d_model=33, d_ff=7, activation="leaky_relu", activation_params=(("slope", 0.3),)),
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks, the last one not whole, and several tiles in each, without many tokens."""
    cut = {"all": (32, 32, 2), "preact": (24, 16, 3), "input": (16, 16, 1), "tiles": (3, 5, 6)}
    for name in ("BLOCKS", "WIDENED"):
        monkeypatch.setattr(train, name, {save: blocks.Block(*sizes) for save, sizes in cut.items()})
    monkeypatch.setattr(blocks, "_ALIGNED", 1)
    monkeypatch.setattr(slopes, "TILE", 300)


@pytest.fixture(params=[False, True], ids=["as_they_are", "widened"])
def widened(request, monkeypatch):
    """Products of 16 bits as they are, and in float32, whichever this machine would choose."""
    monkeypatch.setattr(widening, "_slow", lambda dtype: request.param)
    return request.param


def make(spec: Spec, dtype=torch.float32, seed: int = 0, trained=counted.TRAINED) -> Weights:
    weights = numerics.random_weights(spec, seed, lambda a: torch.tensor(a, dtype=dtype))
    for name, tensor in weights.items():
        tensor.requires_grad_(name in trained)
    return weights


def rows(spec: Spec, tokens: int = 37, dtype=torch.float32, scale: float = 1.0):
    """x and the gradient of y, every token of its own size."""
    generator = torch.Generator().manual_seed(tokens)
    size = torch.linspace(0.5, 1.5, tokens)[:, None]
    x, grad = (torch.randn(tokens, spec.d_model, generator=generator) * size for _ in range(2))
    return (x * scale).to(dtype).requires_grad_(), grad.flip(0).to(dtype)


def step(forward, x, weights: Weights, grad_y) -> dict[str, torch.Tensor]:
    """{"y": …, "x": gradient of x, name: gradient of each weight}; only of what needs one."""
    named = {"x": x, **dict(weights.items())}
    wanted = {name: t for name, t in named.items() if t.requires_grad}
    y = forward(x, weights)
    return {"y": y.detach(), **dict(zip(wanted, torch.autograd.grad(y, list(wanted.values()), grad_y)))}


def lean(save: str, training: bool = False):
    return lambda x, w: train.ffn(x, w, save, training)


def judged(ours, truth, eager) -> dict[str, numerics.Comparison]:
    def flat(t):
        return t.reshape(1, -1) if t.ndim == 1 else t

    return {n: numerics.compare(flat(g), flat(truth[n]), flat(eager[n])) for n, g in ours.items()}


def close(a, b, times: float = 32) -> bool:
    """To rounding, each entry: the gradients of two of our own ways, or of PyTorch's ops in the same dtype."""

    def near(n):
        return numerics.relative_error(a[n], b[n]) <= times * numerics.UNIT_ROUNDOFF[numerics.dtype_name(b[n])]

    return a.keys() == b.keys() and all(map(near, b))


# ---- gradients ----


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.describe())
def test_gradients_against_float64(spec, widened):
    """y, x's gradient (every row of it) and each weight's, in every dtype, by the one rule."""
    scale = 3.0 if spec.gate_limit or spec.up_limit else 1.0  # beyond the clamps
    for dtype in (torch.bfloat16, torch.float16) if widened else (torch.float32, torch.bfloat16):
        w = make(spec, dtype)
        x, grad_y = rows(spec, JUDGED, dtype, scale)
        truth = {"y": reference.forward(x, w), **reference.backward(x, w, grad_y)}
        eager = step(torch_ops.forward, x, w, grad_y)
        for save in SAVES:
            for name, result in judged(step(lean(save), x, w, grad_y), truth, eager).items():
                assert result.ok, (save, dtype, name, result)


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("spec", [SWIGLU, OAI, GELU], ids=["swiglu", "oai", "gelu"])
def test_wrong_gradients_fail(spec, save):
    """The rule rejects what a wrong description, a lost block or a wrong row gives, for x and for the weights apart."""
    w = make(spec)
    x, grad_y = rows(spec, JUDGED, scale=3.0 if spec is OAI else 1.0)
    truth, eager = reference.backward(x, w, grad_y), step(torch_ops.forward, x, w, grad_y)
    ours = step(lean(save), x, w, grad_y)
    del ours["y"]
    assert all(r.ok for r in judged(ours, truth, eager).values())
    for name, wrong in numerics.mutants(w):
        leaves = wrong.replace(**{n: t.detach().requires_grad_() for n, t in wrong.items()})
        found = step(lean(save), x, leaves, grad_y)
        if name != "down_bias missing":  # no gradient depends on its value
            assert not judged({"x": found["x"]}, truth, eager)["x"].ok or name == "last row of down negated", name
            assert not all(r.ok for r in judged({n: found[n] for n in ours if n in found}, truth, eager).values()), name
    for name, wrong_x in numerics.output_mutants(ours["x"]):
        assert not numerics.compare(wrong_x, truth["x"], eager["x"]).ok, name
    lost = step(lean(save), x, w, torch.cat([grad_y[:-1], torch.zeros_like(grad_y[-1:])]))
    assert not any(r.ok for n, r in judged({n: lost[n] for n in ours}, truth, eager).items())
    if spec.gated:
        exchanged = {**ours, "gate": ours["up"], "up": ours["gate"]}
        results = judged(exchanged, truth, eager)
        assert not results["gate"].ok
        assert not results["up"].ok


def test_sums_in_16_bits_stay_exact_over_many_blocks(widened):
    """400 blocks: a sum that went on in bfloat16 would lose its last additions."""
    spec = Spec.parse("swiglu", d_model=8, d_ff=12, **FULL)
    w = make(spec, torch.bfloat16)
    x, grad_y = rows(spec, 1200, torch.bfloat16)
    x = (x.detach().abs() + 0.5).requires_grad_()
    grad_y = grad_y.abs()
    truth = reference.backward(x, w, grad_y)
    eager = step(torch_ops.forward, x, w, grad_y)
    ours = step(lean("tiles"), x, w, grad_y)
    del ours["y"]
    assert all(r.ok for r in judged(ours, truth, eager).values())
    assert all(g.dtype == torch.bfloat16 for g in ours.values())
    naive = torch.zeros_like(ours["down_bias"])
    for part in grad_y.split(3):
        naive += part.sum(0)
    assert numerics.relative_error(naive, truth["down_bias"]) > 4 * numerics.relative_error(
        ours["down_bias"], truth["down_bias"]
    )


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize(
    "spec",
    [
        Spec.parse("swiglu", d_model=2, d_ff=3, up_bias=True),
        Spec(d_model=3, d_ff=2, activation="gelu_tanh", down_bias=True, dropout=0.4),
        Spec.parse("swiglu_oai", d_model=2, d_ff=2, gate_bias=True, dropout=0.3),
    ],
    ids=lambda s: s.describe(),
)
def test_gradcheck_and_the_second_derivative(spec, save):
    w = make(spec, torch.float64)
    names, tensors = zip(*w.items())
    x = torch.linspace(-1.5, 2, 4 * spec.d_model, dtype=torch.float64).view(4, -1).requires_grad_()

    def f(x, *tensors):
        torch.manual_seed(3)
        return train.ffn(x, w.replace(**dict(zip(names, tensors))), save, training=True)

    assert torch.autograd.gradcheck(f, (x, *tensors))
    assert torch.autograd.gradgradcheck(f, (x, *tensors))


def test_a_second_derivative_without_x_says_what_to_do():
    w = make(SWIGLU, trained=())
    x, grad_y = rows(SWIGLU)
    for save in SAVES:
        (found,) = torch.autograd.grad(train.ffn(x, w, save), x, grad_y, create_graph=save in ("input", "tiles"))
        if save in ("input", "tiles"):
            assert torch.autograd.grad(found.square().sum(), x)[0].any()
            continue
        with pytest.raises(RuntimeError, match="use save='input'"):
            torch.autograd.grad(train.ffn(x, w, save), x, grad_y, create_graph=True)


# ---- what is kept ----


def kept_bytes(forward, x, weights: Weights) -> int:
    """Bytes kept for backward, each storage once, parameters left out."""
    own = {t.untyped_storage().data_ptr() for _, t in weights.items()}
    kept: dict[int, int] = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        forward(x, weights)
    return sum(n for place, n in kept.items() if place not in own)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.describe())
def test_bytes_kept_are_those_predicted(spec):
    for save, (dtype, name) in itertools.product(SAVES, ((torch.float32, "fp32"), (torch.bfloat16, "bf16"))):
        x, _ = rows(spec, 64, dtype)
        assert kept_bytes(lean(save), x, make(spec, dtype)) == ff.cost(spec, tokens=64, dtype=name).saved_bytes[save]


@pytest.mark.parametrize("save", SAVES)
def test_bytes_kept_with_dropout(save):
    """The mask under "all", elsewhere the generator's state; nothing of it in eval mode."""
    for kind in ("swiglu", "relu"):
        spec = Spec.parse(kind, d_model=24, d_ff=40, dropout=0.1)
        x, _ = rows(spec, 64)
        expected = counted.saved_bytes(spec, 64, save, "fp32")
        state = 0 if save == "all" else torch.get_rng_state().nbytes
        assert kept_bytes(lean(save, True), x, make(spec)) == expected + state
        still = Spec.parse(kind, d_model=24, d_ff=40)
        assert kept_bytes(lean(save), x, make(spec)) == counted.saved_bytes(still, 64, save, "fp32")


def subsets(spec: Spec):
    parts = ["x", *(name for name, _ in make(spec).items())]
    for n in range(1, len(parts) + 1):
        yield from itertools.combinations(parts, n)


@pytest.mark.parametrize(
    ("kind", "save"),
    [("swiglu", "all"), ("swiglu", "preact"), ("swiglu", "input"), ("swiglu_oai", "preact"), ("relu", "all"),
     ("gelu", "all"), ("gelu", "preact"), ("gelu", "tiles")],
)  # fmt: skip
def test_frozen_parts_cost_nothing(kind, save):
    """Every subset of what may need a gradient: the right gradients, the bytes predicted, and the FLOPs needed."""
    from torch.utils.flop_counter import FlopCounterMode

    gate = {} if kind in ("gelu", "relu") else {"gate_bias": True}
    spec = Spec.parse(kind, d_model=8, d_ff=12, **gate, **FULL)
    full, grad_y = rows(spec, 20)
    whole = step(torch_ops.forward, full, make(spec), grad_y)
    product = 2 * 20 * 8 * 12
    for trained in subsets(spec):
        w = make(spec, trained=trained)
        x = full.detach().requires_grad_("x" in trained)
        found = step(lean(save), x, w, grad_y)
        assert set(found) == {"y", *trained}
        assert close(found, {n: whole[n] for n in found}), trained
        assert kept_bytes(lean(save), x, w) == counted.saved_bytes(spec, 20, save, "fp32", trained), trained
        y = train.ffn(x, w, save)
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(y, [t for t in (x, *(t for _, t in w.items())) if t.requires_grad], grad_y)
        inward = bool({"x", "up", "gate", "up_bias", "gate_bias"} & set(trained))
        needed = inward + len({"gate", "up", "down"} & set(trained)) + (1 + spec.gated) * ("x" in trained)
        if save in ("input", "tiles") and (inward or "down" in trained):
            needed += 1 + spec.gated
        assert counter.get_total_flops() == needed * product, trained


@pytest.mark.parametrize(
    ("kind", "save", "trained", "expected"),
    [
        ("swiglu", "all", "x up down gate", "x gate up coefficients"),
        ("swiglu", "all", "x", "gate up"),
        ("swiglu", "all", "gate", "x gate up"),
        ("swiglu", "all", "up", "x gate"),
        ("swiglu", "all", "down", "coefficients"),
        ("swiglu", "preact", "down", "coefficients"),
        ("swiglu", "preact", "up down", "x gate up"),
        ("swiglu", "preact", "up_bias", "gate"),
        ("swiglu_oai", "preact", "up_bias", "gate up"),
        ("swiglu", "input", "x", "x"),
        ("swiglu", "tiles", "down_bias", ""),
        ("swiglu", "all", "down_bias", ""),
        ("gelu", "all", "x up down", "x up coefficients"),
        ("gelu", "all", "x up", "x up"),
        ("relu", "all", "x up down", "x coefficients"),
        ("relu", "preact", "x up down", "x up"),
        ("relu2", "all", "x up down", "x up coefficients"),
    ],
)
def test_what_is_kept_for_what(kind, save, trained, expected):
    """Set down by hand, from the formulas of the gradients."""
    assert " ".join(counted.kept(Spec.parse(kind, d_model=8, d_ff=12), save, trained.split())) == expected


def test_the_peak_is_what_the_setting_promises(monkeypatch):
    """Forward and backward of 2048 tokens in the blocks of real use, counted op by op."""
    monkeypatch.undo()
    spec = Spec.parse("swiglu", d_model=96, d_ff=768)
    w = make(spec)
    x, grad_y = rows(spec, 2048)
    wide = 2048 * 768 * 4

    def peak(forward):
        with Peak() as counted:
            step(forward, x, w, grad_y)
        assert counted.now == 0
        return counted

    eager = peak(torch_ops.forward)
    found = {save: peak(lean(save)) for save in SAVES}
    assert eager.largest == found["all"].largest == found["preact"].largest == wide
    assert eager.peak > found["all"].peak > found["preact"].peak > found["input"].peak > found["tiles"].peak
    returned = (2 * 2048 * 96 + 3 * 96 * 768) * 4  # y, and the gradients of x and of the parameters: every way has them
    assert found["input"].peak - returned <= 0.25 * (eager.peak - returned)
    for save in ("input", "tiles"):
        assert found[save].largest <= max(wide // 2, 2048 * 96 * 4) < wide, save  # no [T, d_ff] tensor


# ---- dropout ----


@pytest.mark.parametrize("kind", ["swiglu", "relu", "swiglu_oai"])
def test_dropout_is_torchs_own_with_every_save(kind):
    """The same mask as PyTorch's dropout draws, in forward and in backward; the generator is left in the same state."""
    spec = Spec.parse(kind, d_model=24, d_ff=40, dropout=0.3, **FULL)
    w = make(spec)
    x, grad_y = rows(spec)

    def run(forward):
        torch.manual_seed(5)
        found = step(forward, x, w, grad_y)
        return found, torch.rand(2)

    def eager(x, w):
        return torch_ops.forward(x, w, training=True)

    truth, after = run(eager)
    for save in SAVES:
        f = lean(save, True)
        for again in (f, lambda x, w, f=f: checkpoint(f, x, w, use_reentrant=False)):
            found, then = run(again)
            assert close(found, truth), save
            assert torch.equal(then, after)
        torch.manual_seed(5)
        with torch.no_grad():
            assert torch.equal(f(x, w), found["y"])
        assert torch.equal(torch.rand(2), after)
    torch.manual_seed(6)
    assert not close(step(lean("input", True), x, w, grad_y), truth)
    torch.manual_seed(5)
    assert not close(step(lean("input"), x, w, grad_y), truth)


# ---- what must not be disturbed ----


@pytest.mark.parametrize("save", SAVES)
def test_no_tokens_one_token_and_any_shape(save):
    for dtype, spec in itertools.product((torch.float32, torch.bfloat16), (SWIGLU, GELU)):
        w = make(spec, dtype)
        junk = [torch.full((spec.d_ff, spec.d_model), float("nan"), dtype=dtype) for _ in range(8)]
        del junk  # so that memory nobody wrote to would show
        for shape in ((0,), (2, 0)):
            x = torch.empty(*shape, spec.d_model, dtype=dtype, requires_grad=True)
            found = step(lean(save), x, w, torch.empty_like(x))
            assert found["y"].shape == found["x"].shape == x.shape
            for name, t in w.items():
                assert found[name].shape == t.shape
                assert found[name].dtype == dtype
                assert not found[name].any()
        for shape in ((), (1,), (3, 5), (2, 1, 9)):
            x = torch.randn(*shape, spec.d_model, dtype=dtype, requires_grad=True)
            grad_y = torch.randn_like(x)
            found, eager = (step(f, x, w, grad_y) for f in (lean(save), torch_ops.forward))
            assert found["x"].shape == found["y"].shape == x.shape
            assert close(found, eager)  # not by the rule: the error of PyTorch's few roundings of one token is chance


@pytest.mark.parametrize("save", SAVES)
def test_strides_and_untouched_inputs(save):
    w = make(SWIGLU)
    x, grad_y = rows(SWIGLU, 36)
    truth = step(lean(save), x, w, grad_y)
    strided = x.detach().t().contiguous().t().requires_grad_()
    every_other = torch.stack([x.detach(), x.detach()], 1)[:, 0].requires_grad_()
    wide = torch.cat([grad_y, grad_y], 1)[:, :24]
    for other, grad in ((strided, grad_y), (every_other, wide), (x, grad_y.t().contiguous().t())):
        assert close(step(lean(save), other, w, grad), truth)
    turned = w.replace(down=w.down.detach().t().contiguous().t().requires_grad_())  # as a Conv1D's
    assert close(step(lean(save), x, turned, grad_y), truth)
    summed = step(lean(save), x, w, torch.ones(1).expand(36, 24))
    assert close(summed, step(torch_ops.forward, x, w, torch.ones(36, 24)))
    before = {n: t.detach().clone() for n, t in (("x", x), *w.items())}
    given = grad_y.clone()
    y = train.ffn(x, w, save)
    first = torch.autograd.grad(y, x, grad_y, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(y, x, grad_y)[0], first)  # nothing kept was written over
    assert torch.equal(given, grad_y)
    for name, t in (("x", x), *w.items()):
        assert torch.equal(t, before[name]), name
    y = train.ffn(x, w, save)
    with torch.no_grad():
        w.down.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("save", SAVES)
def test_transforms_see_plain_ops(save):
    """functorch, forward mode and jit tracing work: through PyTorch's ops."""
    w = make(SWIGLU)
    x, grad_y = rows(SWIGLU, 6)
    plain = {n: t.detach() for n, t in w.items()}

    def f(x, **tensors):
        return train.ffn(x, w.replace(**(tensors or plain)), save)

    (expected,) = torch.autograd.grad(f(x), x, torch.ones(6, 24))
    rounding = 32 * F32
    assert numerics.relative_error(torch.func.grad(lambda x: f(x).sum())(x.detach()), expected) < rounding
    assert numerics.relative_error(torch.vmap(f)(x.detach().view(3, 2, 24)).view(6, 24), f(x)) < rounding
    per_token = torch.vmap(torch.func.grad(lambda p, x: f(x, **p).sum()), (None, 0))(plain, x.detach())
    assert numerics.relative_error(per_token["up"].sum(0), step(lean(save), x, w, torch.ones(6, 24))["up"]) < rounding
    _, tangent = torch.func.jvp(f, (x.detach(),), (grad_y,))
    with torch.autograd.forward_ad.dual_level():
        dual = f(torch.autograd.forward_ad.make_dual(x.detach(), grad_y))
        assert numerics.relative_error(torch.autograd.forward_ad.unpack_dual(dual).tangent, tangent) < rounding
    traced = torch.jit.trace(f, (x.detach(),), check_trace=False)
    assert numerics.relative_error(traced(x[:2].detach()), f(x[:2])) < rounding


def test_wrong_dtypes_and_backends_are_named():
    w = make(SWIGLU)
    x, _ = rows(SWIGLU, dtype=torch.bfloat16)
    with pytest.raises(dispatch.BackendError, match=r"x is torch\.bfloat16, the weights torch\.float32"):
        train.ffn(x, w)
    train.ffn(x.float(), w)
    assert dispatch.last_backend() == "torch"


def test_tiles_see_every_token():
    """The elementwise half alone: several tiles with a rest, in place where that is allowed."""
    for spec in (SWIGLU, OAI, GELU):
        gate, up, grad = (torch.randn(37, spec.d_ff, dtype=torch.float64) for _ in range(3))
        mask = torch.rand(37, spec.d_ff) > 0.5
        pre = (gate, up) if spec.gated else (None, up)
        leaves = [None if t is None else t.clone().requires_grad_() for t in pre]
        m = torch_ops.coefficients(spec, leaves[1], leaves[0]) * mask / (1 - spec.dropout)
        expected = torch.autograd.grad(m, [t for t in leaves if t is not None], grad)
        own_gate, own_up, own = (t.clone() for t in (gate, up, grad))
        slopes.gradients(spec, own_gate if spec.gated else None, own_up, own, own_gate if spec.gated else None, True,
                         own_up, mask)  # fmt: skip
        found = (own_gate, own) if spec.gated else (own,)
        assert all(np.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(found, expected))
        assert np.allclose(own_up, m.detach(), rtol=1e-12, atol=1e-12)


class Products(TorchDispatchMode):
    """The dtypes of what is multiplied."""

    def __init__(self):
        super().__init__()
        self.dtypes: set[torch.dtype] = set()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.count += 1
            self.dtypes |= {a.dtype for a in args if isinstance(a, torch.Tensor)}
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("save", SAVES)
def test_products_are_in_the_dtype_that_is_fast(save, widened):
    """All of them, forward and backward; what is kept and what comes out are in the dtype of x."""
    spec = Spec.parse("swiglu_oai", d_model=12, d_ff=20, gate_bias=True, **FULL)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        w = make(spec, dtype)
        x, grad_y = rows(spec, 40, dtype)
        with Products() as found:
            results = step(lean(save), x, w, grad_y)
        half = dtype in (torch.bfloat16, torch.float16)
        assert found.dtypes == {torch.float32 if half and widened else dtype}
        assert found.count >= 9
        assert {r.dtype for r in results.values()} == {dtype}


def test_what_is_fast_is_measured(monkeypatch):
    """A product of 16 bits is widened where float32's take well less time, of the least times of both."""
    took: dict[torch.dtype, list[float]] = {}
    asked: list[torch.dtype] = []

    def seconds(left, right):
        assert left.dtype == right.dtype
        asked.append(left.dtype)
        times = took[left.dtype]
        return times.pop(0) if len(times) > 1 else times[0]

    monkeypatch.setattr(widening, "_seconds", seconds)
    for half, full, expected in (
        ([1.0], [1.0], False),
        ([1.2], [1.0], False),
        ([1.5], [1.0], True),
        ([300.0], [1.0], True),
        ([9.0, 9.0, 1.0], [1.0], False),  # the first calls were disturbed
        ([1.5], [9.0, 9.0, 1.0], True),
        ([0.25], [1.0], False),
    ):
        took.update({torch.bfloat16: list(half), torch.float32: list(full)})
        assert widening._slow.__wrapped__(torch.bfloat16) is expected, (half, full)
    asked.clear()
    took.update({torch.bfloat16: [300.0], torch.float32: [1.0]})
    widening._slow.__wrapped__(torch.bfloat16)
    assert len(asked) == 6  # what is clear is not measured for long
    cpu, elsewhere = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(widening, "_slow", lambda dtype: True)
    assert widening.dtype_of_products(torch.bfloat16, cpu) is torch.float32
    assert widening.dtype_of_products(torch.bfloat16, elsewhere) is torch.bfloat16
    assert widening.dtype_of_products(torch.float64, cpu) is torch.float64


def test_the_parts_of_real_use_keep_to_the_rule_in_16_bits(monkeypatch):
    """Six parts of gate's and up's: x's gradient is rounded twelve times, PyTorch's three."""
    monkeypatch.undo()
    monkeypatch.setattr(widening, "_slow", lambda dtype: False)
    spec = Spec.parse("swiglu", d_model=48, d_ff=1024)
    assert train.BLOCKS["tiles"].width(spec.d_ff) == 192
    w = make(spec, torch.bfloat16)
    x, grad_y = rows(spec, 256, torch.bfloat16)
    truth, eager = reference.backward(x, w, grad_y)["x"], step(torch_ops.forward, x, w, grad_y)["x"]
    found = step(lean("tiles"), x, w, grad_y)["x"]
    assert numerics.compare(found, truth, eager).ok
    assert numerics.relative_error(found, truth) < 2 * numerics.relative_error(eager, truth)


def test_blocks_and_their_widths(monkeypatch):
    monkeypatch.undo()
    assert [(s.start, s.stop) for s in blocks._blocks(7, 3)] == [(0, 3), (3, 6), (6, 7)]
    assert list(blocks._blocks(0, 3)) == []
    half, eighth = blocks.Block(1, 1, 2), blocks.Block(1, 1, 8)
    assert [b.width(n) for b in (half, eighth) for n in (40, 256, 3420, 5632)] == [
        40,
        128,
        1728,
        2816,
        40,
        64,
        448,
        704,
    ]
    wide = blocks.Block(1, 1, 4, 1024)
    assert [wide.width(n) for n in (40, 1000, 2048, 3420, 5632)] == [40, 1000, 1024, 1024, 1408]
