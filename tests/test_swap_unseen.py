"""Changes of a swapped model that PyTorch itself does not count, or that a copy or a compiler could lose: all count."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import transformers
from torch import nn

import fanfold as ff
from fanfold.numerics import UNIT_ROUNDOFF

pytestmark = pytest.mark.filterwarnings("ignore:fanfold")

D, F = 32, 80
# What int8 activations or our order of sums may differ by from the same weights in PyTorch; a lost change is far more.
NEAR = {None: 64 * UNIT_ROUNDOFF["float32"], "bf16": 64 * UNIT_ROUNDOFF["float32"], "int8": 0.1}


class Curve(nn.Module):
    """xIELU (arXiv:2411.13010) as models have it: two parameters that learn, two constants."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.tensor([0.2]))
        self.alpha_n = nn.Parameter(torch.tensor([-1.0]))
        self.register_buffer("beta", torch.tensor(0.5))
        self.register_buffer("eps", torch.tensor(-1e-6))

    def forward(self, x):
        above = nn.functional.softplus(self.alpha_p)
        below = self.beta + nn.functional.softplus(self.alpha_n)
        negative = (torch.expm1(torch.min(x, self.eps)) - x) * below + self.beta * x
        return torch.where(x > 0, above * x * x + self.beta * x, negative)


class Mlp(nn.Module):
    def __init__(self, act: nn.Module, bias: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(D, F, bias=bias), nn.Linear(F, D, bias=bias), act

    def forward(self, x):
        return self.down(self.act(self.up(x)))


def swapped(format, act=nn.SiLU, warm=2, **kwargs):
    model = Mlp(act(), **kwargs).eval()
    report = ff.swap(model, format=format)
    assert [row.status for row in report.rows] == ["swapped"]
    with torch.no_grad():
        for _ in range(warm):
            model(torch.randn(3, D))
    return model, report.rows[0]


def error(y, expected) -> float:
    return float((y.double() - expected.double()).norm() / expected.double().norm())


def right(model, format, of=None) -> None:
    """`of` gives what the model gives without our code, on the weights that it shows."""
    plain = copy.deepcopy(model)
    ff.unswap(plain)
    x = torch.randn(5, D)
    with torch.no_grad():
        assert error((model if of is None else of)(x), plain(x)) < NEAR[format]


CHANGES = {
    "another parameter": lambda act: setattr(act, "alpha_p", nn.Parameter(torch.tensor([3.0]))),
    "another buffer": lambda act: setattr(act, "beta", torch.tensor(2.0)),
    "other memory": lambda act: setattr(act.alpha_p, "data", torch.tensor([3.0])),
    "written past the count": lambda act: act.alpha_p.data.fill_(3.0),
    "another dtype": lambda act: act.to(torch.bfloat16),
    "loaded": lambda act: act.load_state_dict({**act.state_dict(), "alpha_p": torch.tensor([3.0])}, assign=True),
}


@pytest.mark.parametrize("warm", [0, 2])
@pytest.mark.parametrize("format", [None, "int8"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_parameter_of_the_activation_changes(change, format, warm) -> None:
    model, row = swapped(format, Curve, warm)
    calls = model._fanfold.calls
    CHANGES[change](model.act)
    right(model, format)
    assert model._fanfold.calls == calls
    assert any("which its code reads, has changed" in reason for reason in row.stepped_aside)


@pytest.mark.parametrize("format", [None, "int8"])
def test_a_copy_knows_what_has_changed(format) -> None:
    model, _ = swapped(format, Curve)
    same = copy.deepcopy(model)
    with torch.no_grad():
        same(torch.randn(2, D))
    assert same._fanfold.calls == model._fanfold.calls + 1  # by our kernels: nothing has changed
    with torch.no_grad():
        model.act.alpha_p.fill_(3.0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        right(model, format, of=twin)


def test_what_the_activation_learns_gets_its_gradient() -> None:
    model = Mlp(Curve())
    x = torch.randn(4, D)
    model(x).sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    (row,) = ff.swap(model, train=True).rows
    assert row.status == "left"
    assert row.reason.startswith("alpha_p, alpha_n learn, too")
    ff.swap(model)
    for linear in (model.up, model.down):
        linear.weight.requires_grad_(False)
    model.zero_grad()
    model(x).sum().backward()
    for name in ("act.alpha_p", "act.alpha_n"):
        grad = dict(model.named_parameters())[name].grad
        assert error(grad, expected[name]) < NEAR[None]


@pytest.mark.parametrize("format", ["bf16", "int8"])
def test_a_copy_keeps_weights_put_in_as_data(format) -> None:
    model, _ = swapped(format)
    model.up.weight.data = torch.randn(F, D)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twins = (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False))
    for twin in twins:
        assert torch.equal(twin.up.weight, model.up.weight)
        assert torch.equal(twin.state_dict()["up.weight"], model.up.weight)
        right(model, format, of=twin)


@pytest.mark.parametrize("format", ["bf16", "int8"])
def test_a_narrow_bias_written_past_the_count(format) -> None:
    model = Mlp(nn.SiLU(), bias=True).to(torch.bfloat16).eval()
    ff.swap(model, format=format)
    x = torch.randn(3, D, dtype=torch.bfloat16)
    with torch.no_grad():
        for _ in range(3):
            before = model(x)
        model.down.bias.data.add_(8.0)
        model.up.bias.data.mul_(2.0)
        after = model(x)
        assert not torch.equal(before, after)
        fresh = copy.deepcopy(model)  # nothing remembered
        assert torch.equal(fresh(x), after)
        assert torch.equal(model(x), after)
    assert error(after, before + 8.0) < 0.1


@pytest.mark.parametrize("when", ["before the first call", "later"])
@pytest.mark.parametrize("format", [None, "int8"])
def test_compiled_code_sees_them_too(format, when) -> None:
    model, _ = swapped(format, Curve)
    x = torch.randn(5, D)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        if when == "later":
            compiled(x)
        model.act.alpha_p.fill_(3.0)
        right(model, format, of=compiled)
        model.up.weight.data = torch.randn(F, D)
        right(model, format, of=compiled)


@pytest.mark.parametrize("counted", [True, False])
def test_a_head_follows_its_table(counted) -> None:
    shape = {"hidden_size": D, "intermediate_size": F, "num_hidden_layers": 1, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads)).eval()
    ff.swap(model, format="int8", linears="all")
    ids = torch.arange(9)[None] + 3
    torch._dynamo.reset()
    compiled = torch.compile(lambda i: model(i, use_cache=False).logits, backend="aot_eager")
    with torch.no_grad():
        first = compiled(ids)
        for _ in range(3):
            assert error(first, model(ids, use_cache=False).logits) < NEAR["bf16"]
        table = model.get_input_embeddings().weight
        if counted:
            table.copy_(torch.randn_like(table))
        else:
            table.data[5:20] = torch.randn(15, D)
        plain = copy.deepcopy(model)
        ff.unswap(plain)
        second = model(ids).logits
        assert error(second, plain(ids).logits) < NEAR["int8"]
        assert error(second, first) > 0.5
        assert error(compiled(ids), second) < NEAR["bf16"]
        assert model.lm_head._fanfold.aside["the table that its weight is tied to has changed"] == 1


@pytest.mark.parametrize("format", ["bf16", "int8"])
def test_exported_and_functional_calls_do_not_compute_with_the_stub(format) -> None:
    model, _ = swapped(format)
    x = torch.randn(5, D)
    with torch.no_grad():
        y = model(x)
        for strict in (False, True):
            program = torch.export.export(model, (x,), strict=strict)
            assert any("fanfold" in str(node.target) for node in program.graph.nodes)
            assert error(program.module()(x), y) < NEAR["bf16"]
        detached = {name: p.detach() for name, p in model.named_parameters()}
        assert error(torch.func.functional_call(model, detached, (x,)), y) < NEAR["bf16"]


@pytest.mark.parametrize("format", [None, "int8"])
def test_whole_numbers_are_refused_as_by_pytorch(format) -> None:
    model = nn.Sequential(Mlp(nn.SiLU()), nn.Linear(D, 7)).eval()
    ff.swap(model, format=format, linears="all")
    for dtype in (torch.int64, torch.uint8):
        with pytest.raises(RuntimeError, match=r"must have the same dtype|expected a floating-point tensor"):
            model[1](torch.ones(2, D, dtype=dtype))


@pytest.mark.parametrize("format", [None, "int8"])
def test_a_class_patched_after_the_first_calls(format, monkeypatch) -> None:
    class Act(nn.SiLU):
        pass

    model, row = swapped(format, Act)
    monkeypatch.setattr(Act, "forward", lambda self, x: x * 3)
    x = torch.randn(2, D)
    with torch.no_grad():
        assert error(model(x), model.down(model.up(x) * 3)) < NEAR["bf16"]
    assert "the forward of act is patched" in row.stepped_aside


@pytest.mark.parametrize("format", ["fp16", "int8_g32", "q4_1"])
def test_weights_too_small_for_a_format_are_left(format) -> None:
    model = Mlp(nn.SiLU())
    with torch.no_grad():
        model.down.weight.mul_(1e-9)
    (row,) = ff.swap(model, format=format).rows
    assert row.status == "left"
    assert row.reason == f"{format} does not hold its weights: rounding them changes 100% of y"
    right(model, "bf16")
