"""Identification on modules made to deceive: the names lie, the shapes fit, the code decides."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fanfold as ff
from fanfold.models.find import FindError


class Two(nn.Module):
    """Gated FFN whose code is given: compute(a, b) of the two linears' outputs -> coefficients."""

    def __init__(self, compute, d: int = 24, f: int = 40, bias: bool = False, after=lambda y: y) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(d, f, bias=bias)
        self.up_proj = nn.Linear(d, f, bias=bias)
        self.down_proj = nn.Linear(f, d, bias=bias)
        self.compute, self.after = compute, after

    def forward(self, x):
        return self.after(self.down_proj(self.compute(self.gate_proj(x), self.up_proj(x))))


class Fused(nn.Module):
    def __init__(self, compute, d: int = 24, f: int = 40, bias: bool = True) -> None:
        super().__init__()
        self.wi = nn.Linear(d, 2 * f, bias=bias)
        self.wo = nn.Linear(f, d, bias=bias)
        self.compute = compute

    def forward(self, x):
        return self.wo(self.compute(self.wi(x)))


class Plain(nn.Module):
    def __init__(self, act, d: int = 24, f: int = 40, after=lambda self, y: y) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(d, f), nn.Linear(f, d)
        self.act, self.after = act, after

    def forward(self, x):
        return self.after(self, self.fc2(self.act(self.fc1(x))))


def one(module: nn.Module):
    (found,) = ff.find(module)
    return found


def halves(y):
    return y.chunk(2, dim=-1)


def oai(gate, up):
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


@pytest.mark.parametrize(
    ("compute", "spec", "gate"),
    [
        (lambda a, b: F.silu(a) * b, {"activation": "silu"}, "gate_proj"),
        (lambda a, b: F.silu(b) * a, {"activation": "silu"}, "up_proj"),  # the name `gate` lies
        (lambda a, b: F.gelu(a) * b, {"activation": "gelu_erf"}, "gate_proj"),
        (lambda a, b: F.gelu(b, approximate="tanh") * a, {"activation": "gelu_tanh"}, "up_proj"),
        (lambda a, b: torch.sigmoid(a) * b, {"activation": "sigmoid"}, "gate_proj"),
        (lambda a, b: a * b, {"activation": "identity"}, "gate_proj"),
        (oai, {"activation": "silu", "beta": 1.702, "gate_limit": 7.0, "up_limit": 7.0, "up_offset": 1.0}, "gate_proj"),
        (
            lambda a, b: F.silu(a.clamp(max=10)) * b.clamp(-10, 10),
            {"activation": "silu", "gate_limit": 10.0, "up_limit": 10.0},
            "gate_proj",
        ),
    ],
)
@pytest.mark.parametrize("shape", [(24, 40), (24, 24), (40, 24)])
def test_the_gate_is_what_is_activated(compute, spec, gate, shape) -> None:
    d, f = shape
    found = one(Two(compute, d, f, bias=True))
    biases = {"up_bias": True, "gate_bias": True, "down_bias": True}
    assert found.spec == ff.Spec(d_model=d, d_ff=f, gated=True, **biases, **spec), found.reason
    assert found.projections["gate"] == gate
    assert found.projections["down"] == "down_proj"


@pytest.mark.parametrize(
    ("compute", "order"),
    [
        (lambda y: F.silu(halves(y)[0]) * halves(y)[1], "[gate;up]"),
        (lambda y: F.silu(halves(y)[1]) * halves(y)[0], "[up;gate]"),
        (lambda y: F.silu(y[..., ::2]) * y[..., 1::2], "interleaved gate,up"),
        (lambda y: F.silu(y[..., 1::2]) * y[..., ::2], "interleaved up,gate"),
    ],
)
def test_fused_orders(compute, order) -> None:
    module = Fused(compute).eval()
    found = one(module)
    assert found.layout.order == order
    report = ff.swap(module)
    assert report.n_swapped == 1, str(report)
    assert report.rows[0].ratio <= 1


@pytest.mark.parametrize("name", [n for n in ff.activations.ACTIVATIONS if n != "xielu"])
def test_every_activation_is_told_from_the_others(name) -> None:
    act = ff.activations.get(name)
    found = one(Plain(lambda x: act.torch(torch, x, act.params)))
    assert found.spec.activation == name, found.reason
    assert found.evidence.error <= found.evidence.allowed < found.evidence.runner_up_error


def test_xielu_is_found_with_its_own_parameters() -> None:
    from transformers.activations import XIELUActivation

    act = XIELUActivation(alpha_p_init=0.7, alpha_n_init=0.9, dtype=torch.float32)
    found = one(Plain(act))
    assert found.spec.activation == "xielu", found.reason
    assert found.spec.params["alpha_p"] == pytest.approx(0.7)
    assert found.spec.params["alpha_n"] == pytest.approx(0.9)
    assert one(Plain(nn.LeakyReLU(0.2))).spec.params["slope"] == 0.2


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Two(lambda a, b: F.silu(a) * b.clamp(-5, 5)), "no description matches"),
        (Two(lambda a, b: F.silu(a) * b * 1.001), "scaled"),  # identified, with its factor
        (Plain(lambda x: F.gelu(x) + 1e-4 * torch.sin(x)), "no description matches"),
        (Plain(lambda x: F.silu(x).detach() + 0 * x), "input gradients differ"),
        (Plain(F.gelu, after=lambda self, y: (y, None)), "returns a tuple"),
        (Plain(F.gelu, after=lambda self, y: F.layer_norm(y, (24,))), "no description matches"),
        (Plain(lambda x: F.gelu(F.layer_norm(x, (40,)))), "no description matches"),
    ],
)
def test_what_is_not_described_is_left_with_the_reason(module, words) -> None:
    found = one(module)
    assert words in found.reason, found.reason
    if words == "scaled":
        assert found.scale == pytest.approx(1.001, rel=1e-6)
        return
    assert found.status == "unidentified"
    report = ff.swap(module)
    assert report.n_swapped == 0
    assert report.rows[0].reason == found.reason


@pytest.mark.parametrize("output", range(0, 300, 37))
def test_one_output_of_many_that_is_not_the_ffn_s(output) -> None:
    """Most descriptions are compared in some outputs only, but never the one that is the answer."""

    def after(y):
        return torch.cat([y[..., :output], y[..., output : output + 1] * 1.01, y[..., output + 1 :]], dim=-1)

    exact = Two(lambda a, b: F.silu(a) * b, d=300, f=500)
    assert one(exact).spec is not None
    found = one(Two(lambda a, b: F.silu(a) * b, d=300, f=500, after=after))
    assert found.spec is None
    assert "no description matches" in found.reason


def test_a_gradient_that_is_wrong_for_zeros_alone() -> None:
    """The tokens whose gradients are compared hold zeros."""

    def twice(self, y):
        return y + (y - y.detach()) * (y.detach() == 0)  # where y is 0, its gradient counts twice

    for after, right in ((lambda self, y: y, True), (twice, False)):
        module = Plain(F.gelu, after=after)
        module.fc1, module.fc2 = nn.Linear(24, 40, bias=False), nn.Linear(40, 24, bias=False)
        assert (one(module).spec is not None) is right


def test_nearest_candidates_are_named() -> None:
    reason = one(Plain(lambda x: F.gelu(x) + 1e-4 * torch.sin(x))).reason
    assert "gelu_erf" in reason
    assert "allowed" in reason


def test_a_bias_that_the_code_drops_is_seen() -> None:
    class Dropped(Plain):
        def forward(self, x):
            return F.linear(self.act(self.fc1(x)), self.fc2.weight)

    module = Dropped(F.gelu).eval()
    nn.init.zeros_(module.fc2.bias)  # invisible in the outputs as they are
    found = one(module)
    assert found.spec.down_bias is False
    assert "does not use it" in found.reason


def test_scaled_output_is_swapped_with_its_factor() -> None:
    module = Two(lambda a, b: F.silu(a) * b, after=lambda y: 0.8 * y).eval()
    x = torch.randn(3, 24)
    with torch.no_grad():
        before = module(x)
        assert ff.swap(module).n_swapped == 1
        assert ff.numerics.compare(module(x), before.double(), before).rms < 1e-6


def test_linears_that_are_registered_down_first() -> None:
    class Reversed(nn.Module):
        def __init__(self, d=24, f=24) -> None:
            super().__init__()
            self.wo, self.w3, self.w1 = nn.Linear(f, d), nn.Linear(d, f), nn.Linear(d, f)

        def forward(self, x):
            return self.wo(F.silu(self.w1(x)) * self.w3(x))

    found = one(Reversed())
    assert found.projections == {"gate": "w1", "up": "w3", "down": "wo"}


def test_a_linear_subclass_with_its_own_forward() -> None:
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    module = Plain(F.relu)
    module.fc1 = Doubled(24, 40)
    assert one(module).status == "unidentified"


def test_a_residual_as_second_argument() -> None:
    class Residual(Plain):
        def forward(self, x, residual):
            return residual + self.fc2(F.gelu(self.fc1(x)))

    module = Residual(F.gelu).eval()
    assert one(module).residual
    x, r = torch.randn(2, 5, 24), torch.randn(2, 5, 24)
    with torch.no_grad():
        before = module(x, r)
        report = ff.swap(module)
        after = module(x, r)
    assert report.rows[0].calls == 1
    assert ff.numerics.relative_error(after, before) < 1e-6


def test_an_inline_ffn_needs_inputs_and_takes_them() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mix = nn.LayerNorm(24), nn.Bilinear(24, 24, 24)
            self.fc1, self.fc2 = nn.Linear(24, 40), nn.Linear(40, 24)

        def forward(self, x):
            return x + self.fc2(F.gelu(self.fc1(self.norm(x + self.mix(x, x)))))

    layer = Layer().eval()
    found = one(layer)
    assert found.status == "unidentified"
    assert "pass inputs=" in found.reason
    x = torch.randn(2, 3, 24)
    (found,) = ff.find(layer, inputs=x)
    assert found.kind == "pair"
    assert found.spec.activation == "gelu_erf"
    with torch.no_grad():
        before = layer(x)
        report = ff.swap(layer, inputs=(x,))
        after = layer(x)
    assert report.n_swapped == 1
    assert report.rows[0].calls == 2
    assert ff.numerics.relative_error(after, before) < 1e-6


def test_attention_is_not_an_ffn() -> None:
    class Attention(nn.Module):
        def __init__(self, d=24, inner=40) -> None:
            super().__init__()
            self.q, self.v, self.o = nn.Linear(d, inner), nn.Linear(d, inner), nn.Linear(inner, d)

        def forward(self, x):
            q, v = self.q(x), self.v(x)
            return self.o(torch.softmax(q @ v.transpose(-1, -2), -1) @ v)

    with pytest.raises(FindError, match=r"no FFN found in Attention.*looked at"):
        ff.find(Attention())


def test_nothing_found_lists_what_was_looked_at() -> None:
    with pytest.raises(FindError, match=r"no linear layers at all"):
        ff.find(nn.Embedding(3, 4))
    with pytest.raises(FindError, match=r"Sequential\): 0 4->5"):
        ff.swap(nn.Sequential(nn.Linear(4, 5)))


def test_experts_in_3d_parameters_are_reported() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(4, 24, 80))
            self.down_proj = nn.Parameter(torch.zeros(4, 40, 24))

    found = one(Experts())
    assert found.status == "unidentified"
    assert "experts" in found.reason


def test_half_precision_modules_are_told_apart_in_float32() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert one(Plain(nn.GELU(approximate="tanh")).to(dtype)).spec.activation == "gelu_tanh"


def test_meta_and_patched_modules_are_left() -> None:
    with torch.device("meta"):
        meta = Plain(F.gelu)
    assert "meta device" in one(meta).reason
    patched = Plain(F.gelu)
    patched.fc1.forward = lambda x: x
    assert "patched" in one(patched).reason


def test_find_works_without_gradients_and_keeps_modes() -> None:
    module = Plain(F.gelu).train()
    with torch.inference_mode():
        assert one(module).status == "identified"
    assert module.training
    assert module.fc1.weight.requires_grad
