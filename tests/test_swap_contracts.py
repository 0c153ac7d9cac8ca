"""What a swapped model must go on respecting: adapters, hooks, training, copies, files, dtypes, names."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

import fanfold as ff
from families import FAMILIES, build, inputs, logits
from fanfold import numerics
from fanfold.kernels import cpu, dispatch
from fanfold.models import swapped
from fanfold.models.swapped import is_swapped

LLAMA = next(f for f in FAMILIES if f.name == "llama")
BERT = next(f for f in FAMILIES if f.name == "bert")
T5 = next(f for f in FAMILIES if f.name == "t5")
GPT2 = next(f for f in FAMILIES if f.name == "gpt2")
BLOOM = next(f for f in FAMILIES if f.name == "bloom")


@pytest.fixture
def llama():
    model = build(LLAMA)
    return model, model.model.layers[0].mlp, ff.swap(model).rows[0]


def aside(row, mlp, words, x=None):
    """The next call must run the module's own code for this reason, and give the own code's result bit by bit."""
    x = torch.randn(1, 4, 32) if x is None else x
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = mlp(x)
        expected = mlp._fanfold_original.forward(mlp, x)
    assert torch.equal(y, expected)
    assert row.calls == 0
    assert any(words in reason for reason in row.stepped_aside), row.stepped_aside
    return [str(w.message) for w in caught]


class Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.b(self.a(x))


def test_an_adapter_put_in_after_the_swap_takes_effect(llama) -> None:
    _, mlp, row = llama
    x = torch.randn(1, 4, 32)
    with torch.no_grad():
        before = mlp(x)
    row.states[-1].calls = 0
    mlp.up_proj = Lora(mlp.up_proj)
    messages = aside(row, mlp, "exchanged", x)
    assert any("model.layers.0.mlp runs its own code: up_proj was exchanged" in m for m in messages)
    with torch.no_grad():
        assert not torch.allclose(mlp(x), before)
    mlp.up_proj = mlp.up_proj.base_layer
    with torch.no_grad():
        assert torch.equal(mlp(x), before)


@pytest.mark.parametrize("child", ["gate_proj", "down_proj", "act_fn"])
def test_a_hook_on_a_child_fires(llama, child) -> None:
    _, mlp, row = llama
    seen = []
    handle = getattr(mlp, child).register_forward_hook(lambda *a: seen.append(1))
    aside(row, mlp, "hook")
    assert len(seen) == 2
    handle.remove()
    with torch.no_grad():
        mlp(torch.randn(1, 4, 32))
    assert row.calls == 1


def test_hooks_on_the_ffn_itself_stay_on_the_fast_path(llama) -> None:
    _, mlp, row = llama
    seen = []
    mlp.register_forward_hook(lambda m, a, y: seen.append(y))
    with torch.no_grad():
        y = mlp(torch.randn(1, 4, 32))
    assert row.calls == 1
    assert seen[0] is y


def test_global_hooks(llama) -> None:
    _, mlp, row = llama
    handle = nn.modules.module.register_module_forward_hook(lambda *a: None)
    try:
        aside(row, mlp, "hooks on every module")
    finally:
        handle.remove()


def test_exchanged_activation_attribute_and_patch(llama) -> None:
    _, mlp, row = llama
    act = mlp.act_fn
    mlp.act_fn = nn.ReLU()
    aside(row, mlp, "act_fn was exchanged")
    mlp.act_fn = act
    old = mlp.down_proj.forward
    mlp.down_proj.forward = lambda x: 2 * old(x)
    aside(row, mlp, "is patched")
    del mlp.down_proj.forward
    nn.utils.parametrize.register_parametrization(mlp.gate_proj, "weight", nn.Identity())
    aside(row, mlp, "has become a Parametrized")


def test_a_changed_flag_is_noticed() -> None:
    model = build(BLOOM)
    row = ff.swap(model).rows[0]
    mlp = model.transformer.h[0].mlp
    mlp.pretraining_tp, mlp.slow_but_exact = 2, True
    x = torch.randn(1, 4, 32)
    with torch.no_grad():
        y = mlp(x, x)
        assert torch.equal(y, mlp._fanfold_original.forward(mlp, x, x))
    assert any("pretraining_tp" in r or "slow_but_exact" in r for r in row.stepped_aside)


def test_parameters_are_read_in_place(llama) -> None:
    _, mlp, _ = llama
    x = torch.randn(1, 4, 32)
    with torch.no_grad():
        before = mlp(x)
        mlp.down_proj.weight.mul_(2.0)
        assert torch.equal(mlp(x), 2 * before)
        mlp.down_proj.weight.data = mlp.down_proj.weight.data / 2
        assert torch.equal(mlp(x), before)
        mlp.load_state_dict({k: torch.zeros_like(v) for k, v in mlp.state_dict().items()})
        assert not mlp(x).any()


def test_gradients_are_not_cut_off_by_a_call_without_them() -> None:
    for family in (LLAMA, GPT2, next(f for f in FAMILIES if f.name == "phi3")):
        model = build(family)
        row = ff.swap(model, backend="cpu").rows[0]
        mlp = model.get_submodule(row.path)
        x = torch.randn(1, 4, 32)
        with torch.no_grad():
            mlp(x)
        mlp(x).sum().backward()
        assert all(p.grad is not None and p.grad.any() for p in mlp.parameters())


def test_training_keeps_count_and_place_of_dropout() -> None:
    for family in (T5, GPT2):
        model = build(family).train()
        plain = copy.deepcopy(model)
        report = ff.swap(model)
        batch = inputs(model)
        with torch.no_grad():
            torch.manual_seed(3)
            expected = logits(plain, batch)
            torch.manual_seed(3)
            assert torch.equal(logits(model, batch), expected)
        assert any("training mode" in r for row in report.rows for r in row.stepped_aside)


def test_training_without_dropout_runs_fast() -> None:
    model = build(LLAMA).train()
    report = ff.swap(model)
    with torch.no_grad():
        model(**inputs(model))
    assert all(row.calls == 1 for row in report.rows)


@pytest.mark.parametrize("family", [LLAMA, BERT], ids=["llama", "bert"])
def test_autocast_as_before(family) -> None:
    model = build(family)
    batch = inputs(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        before = logits(model, batch)
        ff.swap(model)
        assert torch.equal(logits(model, batch), before)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant) -> None:
    model = build(LLAMA).train()
    batch = inputs(model)

    def gradients(m):
        m.zero_grad()
        logits(m, batch).square().sum().backward()
        return [p.grad.clone().view(1, -1) for p in m.parameters()]

    truth = gradients(copy.deepcopy(model).double())
    expected = gradients(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    ff.swap(model)
    # Reentrant: the first forward runs without gradients, on our kernels; the recompute in the model's own code.
    results = [numerics.compare(*three) for three in zip(gradients(model), truth, expected)]
    assert all(r.ok for r in results), results


@pytest.mark.parametrize("family", [LLAMA, BERT, GPT2, T5], ids=lambda f: f.name)
@pytest.mark.parametrize("format", [None, "bf16"])
def test_copies_are_independent_and_swapped(family, format) -> None:
    model = build(family)
    ff.swap(model, format=format)
    batch = inputs(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    with torch.no_grad():
        expected = logits(model, batch)
        for twin in copies:
            assert torch.equal(logits(twin, batch), expected)
            assert sum(map(is_swapped, twin.modules())) == sum(map(is_swapped, model.modules()))
            for p in twin.parameters():
                p.zero_()
            assert not torch.equal(logits(twin, batch), expected)
        assert torch.equal(logits(model, batch), expected)
    ff.unswap(copies[0])
    assert not any(map(is_swapped, copies[0].modules()))
    assert any(map(is_swapped, model.modules()))


@pytest.mark.parametrize("family", [LLAMA, BERT, GPT2, T5], ids=lambda f: f.name)
def test_save_pretrained_gives_the_original_keys(family, tmp_path) -> None:
    model = build(family)
    batch = inputs(model)
    with torch.no_grad():
        before = logits(model, batch)
    model.save_pretrained(tmp_path / "plain")
    ff.swap(model)
    model.save_pretrained(tmp_path / "swapped")
    a, b = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("plain", "swapped"))
    assert a == b
    reloaded = type(model).from_pretrained(tmp_path / "swapped").eval()
    with torch.no_grad():
        assert torch.equal(logits(reloaded, batch), before)


def test_formats_free_restore_and_say_what_was_lost() -> None:
    model = build(LLAMA)
    weight = model.model.layers[0].mlp.up_proj.weight
    original = weight.detach().clone()
    report = ff.swap(model, format="bf16")
    stub = model.model.layers[0].mlp.up_proj.weight
    assert (stub.dtype, stub.shape, stub.requires_grad) == (original.dtype, original.shape, False)
    assert stub.isnan().all()  # whoever computes with it sees that it is not there
    assert {row.format for row in report.rows} == {"bf16"}
    # three matrices, each rounded once
    assert all(0 < row.format_error < 3 * numerics.UNIT_ROUNDOFF["bfloat16"] for row in report.rows)
    notes = ff.unswap(model)
    assert len(notes) == 6
    assert "rounded to bf16" in notes[0]
    back = model.model.layers[0].mlp.up_proj.weight
    assert back.requires_grad
    assert torch.equal(back, original.bfloat16().float())
    model = build(LLAMA).bfloat16()
    state = copy.deepcopy(model.state_dict())
    ff.swap(model, format="fp32")
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert ff.unswap(model) == []  # float32 holds bfloat16 exactly
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_packed_weights_with_hooks_autocast_and_gradients_of_x() -> None:
    model = build(LLAMA)
    mlp = model.model.layers[0].mlp
    row = ff.swap(model, format="bf16").rows[0]
    x = torch.randn(1, 4, 32)
    with torch.no_grad():
        y = mlp(x)
    assert y.dtype == torch.float32
    seen = []
    handle = mlp.down_proj.register_forward_hook(lambda *a: seen.append(1))
    with torch.no_grad(), pytest.warns(UserWarning, match="hook"):
        assert numerics.relative_error(mlp(x), y) < 1e-5
    assert seen
    handle.remove()
    leaf = x.clone().requires_grad_()
    mlp(leaf).sum().backward()
    assert leaf.grad.any()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert mlp(x).dtype == torch.bfloat16
    assert row.stepped_aside


def test_tied_parameters_stay_tied() -> None:
    model = build(LLAMA)
    first, second = (model.model.layers[i].mlp for i in (0, 1))
    second.up_proj.weight = first.up_proj.weight
    ff.swap(model, format="bf16")
    assert second.up_proj.weight is first.up_proj.weight
    ff.unswap(model)
    assert second.up_proj.weight is first.up_proj.weight


def test_errors() -> None:
    model = build(LLAMA)
    with pytest.raises(ValueError, match="format='int3' is not known; known: None, fp32, bf16"):
        ff.swap(model, format="int3")
    with pytest.raises(ValueError, match="backend='cuda' is not known; known: auto, cpu, torch"):
        ff.swap(model, backend="cuda")
    ff.swap(model)
    with pytest.raises(ValueError, match="already swapped: call unswap"):
        ff.swap(model)
    ff.unswap(model)
    with pytest.raises(dispatch.BackendError, match=r"cpu.*float16"):
        ff.swap(model.half(), backend="cpu")
    report = ff.swap(model)
    assert report.n_swapped == 0
    assert "float16" in report.rows[0].reason
    assert not any(map(is_swapped, model.modules()))


def test_named_backend_and_environment(monkeypatch) -> None:
    model = build(LLAMA)
    report = ff.swap(model, backend="torch")
    assert {row.backend for row in report.rows} == {"torch"}
    ff.unswap(model)
    monkeypatch.setenv("FANFOLD_BACKEND", "torch")
    report = ff.swap(model)
    assert report.n_swapped == 0 or {row.backend for row in report.rows} == {"torch"}
    ff.unswap(model)
    monkeypatch.setenv("FANFOLD_BACKEND", "fpga")
    with pytest.raises(dispatch.BackendError, match="FANFOLD_BACKEND='fpga' is not known"):
        ff.swap(model)


def test_a_kernel_that_is_wrong_is_caught_and_put_back(monkeypatch) -> None:
    """The verification must fail for each wrong kernel: zeros, one token repeated, another activation."""
    attempt, prepare, run_plan = cpu.attempt, cpu.prepare, cpu.run_plan
    outputs = {
        "zeros": lambda y: y if isinstance(y, bool | None) else torch.zeros_like(y),
        "first token everywhere": lambda y: (
            y if isinstance(y, bool | None) else y[..., :1, :].expand_as(y).contiguous()
        ),
    }
    weights = {
        "another activation": lambda w: next(m for n, m in numerics.mutants(w) if n.startswith("act")),
        "gate and up exchanged": lambda w: dict(numerics.mutants(w))["gate and up exchanged"],
    }
    alive = []  # a bound kernel reads its weights where they are
    for name in (*outputs, *weights):
        model = build(LLAMA)
        y_of, of = outputs.get(name, lambda y: y), weights.get(name, lambda w: w)
        monkeypatch.setattr(cpu, "attempt", lambda x, w, y_of=y_of, of=of: y_of(attempt(x, of(w))))
        # the second call takes the prepared path: it must be wrong and caught as well
        monkeypatch.setattr(cpu, "prepare", lambda x, w, of=of: prepare(x, alive.append(of(w)) or alive[-1]))
        monkeypatch.setattr(swapped, "_run_plan", lambda plan, x, y_of=y_of: y_of(run_plan(plan, x)))
        report = ff.swap(model)
        assert report.n_swapped == 0, name
        assert "verification failed" in report.rows[0].reason
        assert not any(map(is_swapped, model.modules()))
        monkeypatch.undo()


def test_report_prints_and_serialises() -> None:
    import json

    report = ff.swap(build(GPT2))
    text = str(report)
    assert "gelu_tanh 32->56 (bias on up+down)" in text
    assert "[in,out]" in text
    assert text.endswith("2 of 2 FFNs swapped")
    data = json.loads(json.dumps(report.to_dict()))
    assert data["n_swapped"] == 2
    assert ff.Spec.from_dict(data["rows"][0]["spec"]).activation == "gelu_tanh"


def test_zero_tokens_and_shapes(llama) -> None:
    _, mlp, row = llama
    with torch.no_grad():
        for shape in [(0, 32), (2, 0, 32), (32,), (1, 32), (2, 3, 5, 32)]:
            assert mlp(torch.randn(shape)).shape == shape
    assert row.calls == 5


def test_a_shared_ffn_counts_every_call() -> None:
    model = build(LLAMA)
    model.model.layers[1].mlp = model.model.layers[0].mlp
    report = ff.swap(model)
    assert len(report.rows) == 1
    with torch.no_grad():
        model(**inputs(model))
    assert report.rows[0].calls == 2


def test_generate_is_unchanged() -> None:
    model = build(LLAMA)
    batch = inputs(model)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    before = model.generate(**batch, **options)
    ff.swap(model)
    assert torch.equal(model.generate(**batch, **options), before)


def prune(mlp) -> None:
    """Half of the channels cut off, in place: the same address for the first rows."""
    for name in ("gate_proj", "up_proj"):
        weight = getattr(mlp, name).weight
        weight.data = weight.data[:28]
    mlp.down_proj.weight.data = mlp.down_proj.weight.data[:, :28]


def test_the_quick_path_sees_every_change() -> None:
    """Each change below comes after calls that have prepared the quick path; the next call must notice it."""
    x = torch.randn(1, 4, 32)
    changes = {
        "hook": lambda m: m.up_proj.register_forward_hook(lambda *a: None),
        "pre-hook": lambda m: m.up_proj.register_forward_pre_hook(lambda *a: None),
        "global hook": lambda m: nn.modules.module.register_module_forward_pre_hook(lambda *a: None),
        "child": lambda m: setattr(m, "act_fn", nn.ReLU()),
        "adapter": lambda m: setattr(m, "down_proj", Lora(m.down_proj)),
        "added child": lambda m: m.add_module("extra", nn.Identity()),
        "class": lambda m: setattr(m.up_proj, "__class__", type("Other", (nn.Linear,), {})),
        "patch": lambda m: setattr(m.up_proj, "forward", lambda x: torch.ones(*x.shape[:-1], 56)),
        "attribute": lambda m: setattr(m, "hidden_size", -1),
        "parameter": lambda m: setattr(m.up_proj, "weight", nn.Parameter(2 * m.up_proj.weight.detach())),
        "data": lambda m: setattr(m.up_proj.weight, "data", 2 * m.up_proj.weight.data),
        "in place": lambda m: m.up_proj.weight.data.mul_(2),
        "pruned": prune,
        "rows reversed": lambda m: setattr(m.up_proj.weight, "data", m.up_proj.weight.data.flip(0)),
        "bias": lambda m: setattr(m.up_proj, "bias", nn.Parameter(torch.ones(56))),
    }
    for name, change in changes.items():
        model = build(LLAMA)
        mlp = model.model.layers[0].mlp
        row = ff.swap(model).rows[0]
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(3):
                before = mlp(x)
            assert mlp._fanfold.quick is not None
            handle = change(mlp)
            calls = row.calls
            y = mlp(x)
            expected = mlp._fanfold_original.forward(mlp, x)
        assert numerics.relative_error(y, expected) < 64 * numerics.UNIT_ROUNDOFF["float32"], name
        if name in ("parameter", "data", "in place", "rows reversed"):
            assert row.calls == calls + 1
            assert (
                name == "rows reversed"
                or numerics.relative_error(y, 2 * before) < 64 * numerics.UNIT_ROUNDOFF["float32"]
            )
        else:
            assert row.calls == calls, name
        if "hook" in name:
            handle.remove()
            with torch.no_grad():
                mlp(x)
            assert row.calls == calls + 1


def test_the_choice_by_measurement() -> None:
    from fanfold.models.timing import ALWAYS, NEVER, Choice

    ahead, behind = (0.5, 1.0), (1.5, 1.1)
    choice = Choice({1: behind, 4: ahead, 16: ahead, 64: behind, 256: ahead})
    assert [choice.ours(t) for t in (0, 1, 2, 3, 8, 32, 33, 64, 128, 129, 9999)] == [
        False, False, False, True, True, True, False, False, False, True, True,
    ]  # fmt: skip
    assert choice.describe() == "cpu at 4–16, 256 tokens, else torch"
    assert choice.gain == pytest.approx((8 / 1.1**2) ** (1 / 5))
    assert ALWAYS.ours(7)
    assert not NEVER.ours(7)
    assert ALWAYS.describe() == "cpu"
    assert Choice({1: behind}).describe() == "torch"


def test_an_ffn_that_would_not_be_faster_is_left(monkeypatch) -> None:
    from fanfold.models import choose
    from fanfold.models.timing import Choice

    monkeypatch.setattr(choose, "worth_measuring", lambda n: True)
    # ahead at 1 token, behind at 8; the second one loses more by stepping aside than it gains
    for ratios, status in (({1: (0.5, 1.0), 8: (2.0, 1.0)}, "swapped"), ({1: (0.9, 1.0), 8: (2.0, 1.2)}, "left")):
        monkeypatch.setattr(choose, "measure", lambda *a, ratios=ratios: Choice(ratios))
        for family in (LLAMA, BERT):
            model = build(family)
            report = ff.swap(model)
            assert {row.status for row in report.rows} == {status}
            assert ("as fast or faster" in report.rows[0].reason) == (status == "left")
            assert any(map(is_swapped, model.modules())) == (status == "swapped")
            x = torch.randn(1, 30, 32)
            if status == "swapped" and family is LLAMA:
                mlp = model.get_submodule(report.rows[0].path)
                with torch.no_grad():
                    for _ in range(2):
                        assert torch.equal(mlp(x), mlp._fanfold_original.forward(mlp, x))
                        mlp(x[:, :1])
                assert report.rows[0].calls == 2
                assert report.rows[0].stepped_aside == {"PyTorch is faster": 2}


@pytest.mark.parametrize("family", [LLAMA, BERT, GPT2], ids=lambda f: f.name)
def test_a_swapped_model_compiles_whole(family) -> None:
    torch._dynamo.reset()
    model = build(family)
    batch = inputs(model)
    with torch.no_grad():
        truth = logits(copy.deepcopy(model).double(), batch)
        before = logits(model, batch)
        ff.swap(model)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert numerics.compare(compiled(**batch).logits, truth, before).ok
        mlp = model.get_submodule(ff.find(model)[0].projections["up"])
        mlp.weight.zero_()  # read in place: the compiled model sees it
        assert not numerics.compare(compiled(**batch).logits, truth, before).ok
