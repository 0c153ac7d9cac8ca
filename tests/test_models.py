"""find, swap and unswap on a tiny random model of every family: identity, logits, gradients, reversal."""

from __future__ import annotations

import copy

import pytest
import torch

import fanfold as ff
from families import FAMILIES, F, Family, build, inputs, logits
from fanfold import numerics

pytestmark = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)


def _expected(family: Family) -> ff.Spec:
    biases = {f"{p}_bias": True for p in family.biases}
    return ff.Spec(d_model=32, d_ff=family.d_ff, activation=family.activation, gated=family.gated, **biases)


def test_find_identifies_every_ffn(family: Family) -> None:
    model = build(family)
    before = copy.deepcopy(model.state_dict())
    found = ff.find(model)
    assert [f.reason for f in found if f.status != "identified"] == []
    assert len(found) == family.count
    for item in found:
        assert item.spec == _expected(family)
        assert item.layout == ff.layout.Layout(order=family.order, transposed=family.transposed)
        assert item.kind == family.kind
        assert item.residual == (family.name == "bloom")
        assert item.evidence.runner_up_error > 20 * item.evidence.allowed
    after = model.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_swapped_logits_keep_the_tolerance_rule(family: Family, dtype: torch.dtype) -> None:
    model = build(family).to(dtype)
    truth_model = copy.deepcopy(model).double()
    batch = inputs(model)
    with torch.no_grad():
        truth = logits(truth_model, batch)
        before = logits(model, batch)
        report = ff.swap(model, backend="cpu")
        after = logits(model, batch)
    assert report.n_swapped == family.count, str(report)
    assert all(row.calls > 0 and not row.stepped_aside for row in report.rows), report.to_dict()
    assert all(row.ratio is not None and row.ratio <= 1 for row in report.rows)
    result = numerics.compare(after, truth, before)
    assert result.ok, result
    if dtype == torch.float32:
        # The comparison must tell: a swap that forgot half of one FFN's channels would fail it.
        with torch.no_grad():
            down = model.get_submodule(ff.find(model)[0].projections["down"]).weight
            (down[F // 2 :] if family.transposed else down[:, F // 2 :]).zero_()
            assert not numerics.compare(logits(model, batch), truth, before).ok


def test_gradients_before_and_after(family: Family) -> None:
    model = build(family)
    batch = inputs(model)

    def gradients(m: torch.nn.Module) -> dict[str, torch.Tensor]:
        m.zero_grad()
        y = logits(m, batch)
        weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
        (y * weight).sum().backward()
        return {n: p.grad.clone() for n, p in m.named_parameters() if p.grad is not None}

    truth = gradients(copy.deepcopy(model).double())
    before = gradients(model)
    report = ff.swap(model)
    after = gradients(model)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[n], before[n]) for n in before)  # auto leaves autograd to the model's own code
    assert all(set(row.stepped_aside) == {"gradients are needed"} for row in report.rows)
    ff.unswap(model)
    if family.kind == "pair":
        return
    ff.swap(model, backend="cpu")
    forced = gradients(model)
    assert forced.keys() == before.keys()
    for name, grad in forced.items():
        assert numerics.compare(_rows(grad), _rows(truth[name]), _rows(before[name])).ratio < 4, name


def _rows(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(1, -1)


def test_unswap_is_bit_identical(family: Family) -> None:
    model = build(family)
    batch = inputs(model)
    classes = {n: type(m) for n, m in model.named_modules()}
    state = {k: (v.data_ptr(), v.clone()) for k, v in model.state_dict().items()}
    with torch.no_grad():
        before = logits(model, batch)
        ff.swap(model)
        assert list(model.state_dict()) == list(state)
        assert ff.unswap(model) == []
        assert torch.equal(logits(model, batch), before)
    assert {n: type(m) for n, m in model.named_modules()} == classes
    for key, value in model.state_dict().items():
        pointer, old = state[key]
        assert value.data_ptr() == pointer
        assert torch.equal(value, old)
    assert not any("_fanfold" in m.__dict__ for m in model.modules())


def test_format_bf16_and_back(family: Family) -> None:
    model = build(family)
    batch = inputs(model)
    with torch.no_grad():
        before = logits(model, batch)
        report = ff.swap(model, format="bf16", keep_originals=True)
        assert report.n_swapped == family.count, str(report)
        after = logits(model, batch)
        assert all(row.calls > 0 and row.format_error for row in report.rows)
        assert numerics.relative_error(after, before) < 0.1
        assert not torch.equal(after, before)
        assert ff.unswap(model) == []
        assert torch.equal(logits(model, batch), before)
