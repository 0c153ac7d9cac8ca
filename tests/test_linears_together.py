"""q, k and v of one x are computed in one pass: each as alone, and never for another x, weight or hook."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn

import fanfold as ff
from families import FAMILIES, build
from fanfold import numerics
from fanfold.kernels import cpu, packed
from fanfold.kernels.packed import FORMATS, PackedMatrix

LLAMA = next(f for f in FAMILIES if f.name == "llama")
NAMES = ("q_proj", "k_proj", "v_proj")


def swapped(format: str = "int8", dtype: torch.dtype = torch.float32, **options) -> nn.Module:
    model = build(LLAMA).to(dtype)
    ff.swap(model, format=format, linears="all", **options)
    return model.model.layers[0].self_attn


def heads(attention: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return [getattr(attention, name)(x) for name in NAMES]


def alone(attention: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Each from a copy of x of its own, which none shares."""
    return [getattr(attention, name)(x.clone()) for name in NAMES]


def close(y: torch.Tensor, expected: torch.Tensor) -> bool:
    return numerics.relative_error(y, expected) < 64 * numerics.UNIT_ROUNDOFF["float32"]


def plan(module: nn.Module) -> tuple:
    return module._fanfold.quick.plan


def besides(module: nn.Module) -> list:
    return plan(module)[-1]


def letters(attention: nn.Module) -> list[int]:
    return [len(plan(getattr(attention, name))[-2]) for name in NAMES]


@pytest.fixture
def attention():
    """After two rounds, the second of which was computed by q alone."""
    made = swapped()
    x = torch.randn(1, 3, 32)
    with torch.no_grad():
        heads(made, x)
        heads(made, x)
        assert len(besides(made.q_proj)) == 2
        yield made


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_is_what_it_is_alone(format: str, dtype: torch.dtype) -> None:
    made = swapped(format, dtype)
    with torch.no_grad():
        for tokens in (1, 3, 16):
            x = torch.randn(2, 1, 32).to(dtype) if tokens == 3 else torch.randn(1, tokens, 32).to(dtype)
            heads(made, x)
            calls = [getattr(made, name)._fanfold.calls for name in NAMES]
            together = heads(made, x)
            for y, expected in zip(together, alone(made, x)):
                assert torch.equal(y, expected)
                assert y.shape == expected.shape
                assert y.dtype == dtype
            assert [getattr(made, name)._fanfold.calls for name in NAMES] == [c + 2 for c in calls]
    if len({getattr(made, name)._fanfold.weight.parts[0].activations for name in NAMES}) == 1:
        assert len(besides(made.q_proj)) == 2  # `alone` left two letters unread, which the next pass would notice


def test_the_pass_is_one(attention, monkeypatch) -> None:
    x = torch.randn(1, 3, 32)
    q = attention.q_proj(x)
    assert letters(attention) == [0, 6, 6]
    k, v = (plan(getattr(attention, name))[-2][3] for name in NAMES[1:])
    assert attention.k_proj(x) is k
    assert attention.v_proj(x) is v
    assert letters(attention) == [0, 0, 0]
    assert not {q.data_ptr()} & {k.data_ptr(), v.data_ptr()}
    many = torch.randn(1, 17, 32)
    attention.q_proj(many)
    assert letters(attention) == [0, 0, 0]  # a pass of its own for each


def test_a_bias_of_each() -> None:
    torch.manual_seed(0)
    model = build(next(f for f in FAMILIES if f.name == "opt"))
    ff.swap(model, format="int8", linears="all")
    attention = model.model.decoder.layers[0].self_attn
    for name in NAMES:
        getattr(attention, name).bias.data.normal_()
    x = torch.randn(1, 2, 32)
    with torch.no_grad():
        heads(attention, x)
        assert len(besides(attention.q_proj)) == 2
        for y, expected in zip(heads(attention, x), alone(attention, x)):
            assert torch.equal(y, expected)


@pytest.mark.parametrize("change", ["in place", "another", "view", "data"])
def test_another_x_is_computed(attention, change: str) -> None:
    x = torch.randn(1, 3, 32)
    attention.q_proj(x)
    if change == "in place":
        x.mul_(2)
    elif change == "another":
        x = x * 3
    elif change == "view":
        x = x[:, :2]
    else:
        x.data = x * 3
    for name in NAMES[1:]:
        assert torch.equal(getattr(attention, name)(x), getattr(attention, name)(x.clone()))


def test_what_nobody_fetches_is_not_computed_again(attention) -> None:
    x = torch.randn(1, 3, 32)
    attention.q_proj(x)
    attention.k_proj(x)
    attention.q_proj(x)
    assert letters(attention) == [0, 6, 0]
    assert len(besides(attention.q_proj)) == 1
    assert torch.equal(attention.v_proj(x), attention.v_proj(x.clone()))


def test_the_others_make_their_own_checks(attention) -> None:
    x = torch.randn(1, 3, 32)
    changes = {
        "weight": lambda m: setattr(m, "weight", nn.Parameter(torch.ones(m.weight.shape))),
        "hook": lambda m: m.register_forward_hook(lambda m, a, y: 2 * y),
        "bias": lambda m: setattr(m, "bias", nn.Parameter(torch.ones(m.weight.shape[0]))),
    }
    for name, change in changes.items():
        made = copy.deepcopy(attention)
        heads(made, x)
        before = heads(made, x)
        made.q_proj(x)
        change(made.k_proj)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that it runs its own code
            y = made.k_proj(x)
        ones = x.sum(-1, keepdim=True).expand(before[1].shape)
        expected = {"weight": ones, "hook": 2 * before[1], "bias": before[1] + 1}[name]
        assert close(y, expected), name
        assert not close(y, before[1]), name


@pytest.mark.parametrize("what", ["matrix", "bias"])
def test_weights_written_to_meanwhile_count(what: str) -> None:
    """After q has computed for k, k's weights are written to in place: nothing has moved, and y is another one."""
    model = build(next(f for f in FAMILIES if f.name == "opt"))
    ff.swap(model, format="fp32", linears="all")
    attention = model.model.decoder.layers[0].self_attn
    x = torch.randn(1, 2, 32)
    with torch.no_grad():
        for _ in range(2):
            before = heads(attention, x)[1]
        attention.q_proj(x)
        assert letters(attention) == [0, 6, 6]
        k = attention.k_proj
        if what == "bias":
            k.bias.add_(1)
        else:
            k.load_state_dict({**k.state_dict(), "weight": 2 * k.state_dict()["weight"]})
        expected = before + 1 if what == "bias" else 2 * (before - k.bias) + k.bias
        assert close(k(x), expected)
        assert not close(before, expected)


def test_a_copy_has_its_own(attention) -> None:
    x = torch.randn(1, 3, 32)
    attention.q_proj(x)
    made = copy.deepcopy(attention)
    made.k_proj._fanfold.weight.parts[0].data.zero_()
    made.k_proj(x)
    assert torch.equal(attention.k_proj(x), attention.k_proj(x.clone()))
    assert letters(attention) == [0, 0, 6]


def test_no_letters_where_writes_are_not_counted(attention) -> None:
    with torch.inference_mode():
        x = torch.randn(1, 3, 32)
        expected = heads(attention, x)
        q = attention.q_proj(x)
        assert letters(attention) == [0, 0, 0]
        assert torch.equal(q, expected[0])
        x.mul_(2)
        assert torch.equal(attention.k_proj(x), attention.k_proj(x.clone()))


def test_a_matrix_stays_while_it_may_be_read(attention) -> None:
    """k is put back and its bytes let go of; q's next pass still computes it, once."""
    x = torch.randn(1, 3, 32)
    expected = heads(attention, x)[0]
    data = weakref.ref(attention.k_proj._fanfold.weight.parts[0].data)
    attention.k_proj = nn.Linear(32, 32)
    gc.collect()
    assert data() is not None
    for _ in range(2):
        assert torch.equal(attention.q_proj(x), expected)
        attention.v_proj(x)
    gc.collect()
    assert data() is None


def test_a_model_let_go_of_leaves_nothing() -> None:
    model = build(LLAMA)
    ff.swap(model, format="int8", linears="all")
    with torch.no_grad():
        for _ in range(3):
            heads(model.model.layers[0].self_attn, torch.randn(1, 3, 32))
    seen = weakref.ref(model.model.layers[0].self_attn.q_proj)
    del model
    gc.collect()
    assert seen() is None


def test_infinite_inputs(attention) -> None:
    x = torch.randn(1, 3, 32)
    x[0, 1, 5] = torch.inf
    for y, expected in zip(heads(attention, x), alone(attention, x)):
        assert torch.equal(y.nan_to_num(), expected.nan_to_num())
        assert torch.equal(y.isfinite(), expected.isfinite())


def test_threads_at_once(attention) -> None:
    wrong = []

    def work(seed: int) -> None:
        with torch.no_grad():
            x = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(seed))
            expected = alone(attention, x)
            for _ in range(200):
                wrong.extend(not torch.equal(y, e) for y, e in zip(heads(attention, x), expected))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 3 * 200 * 3
    assert not any(wrong)


@pytest.mark.parametrize("other", ["format", "inputs", "activations", "ffn"])
def test_only_like_products_go_together(other: str) -> None:
    generator = torch.Generator().manual_seed(0)

    def bound(format: str = "int8", k: int = 32, activations: str = "int8"):
        m = PackedMatrix.pack(ff.formats.quantize_matrix(torch.randn(16, k, generator=generator).numpy(), format))
        m.activations = activations
        return packed.bind_linear(torch.float32, m, None), m

    first, _kept = bound()
    same, _also = bound()
    assert cpu.fit_together(first, same)
    if other == "ffn":
        up, down = (PackedMatrix.pack(torch.randn(32, 32, generator=generator), "fp32") for _ in range(2))
        spec = ff.Spec(d_model=32, d_ff=32, activation="relu")
        assert not cpu.fit_together(first, packed.bind(torch.float32, ff.Weights(spec, up=up, down=down)))
        return
    differing, _too = bound(
        **{"format": {"format": "int8_g32"}, "inputs": {"k": 48}, "activations": {"activations": "float"}}[other]
    )
    assert not cpu.fit_together(first, differing)
