"""`swap(model, train=True)`: a model of others trains with our derivative, its parameters where they were."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import fanfold as ff
from fanfold import numerics
from fanfold.count import ffn as counted
from fanfold.kernels import blocks, train

F32 = numerics.UNIT_ROUNDOFF["float32"]


@pytest.fixture(scope="module")
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batches(steps: int):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 97, (4, 20), generator=generator) for _ in range(steps)]


def tune(model: nn.Module, steps: int = 8, autocast: bool = False) -> list[float]:
    """The losses of a short fine-tune."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    losses = []
    for ids in batches(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("save", counted.SAVES)
def test_a_fine_tune_gives_the_loss_curve_of_the_model_as_it_was(llama, save, monkeypatch):
    cut = {"all": (32, 32, 1), "preact": (32, 16, 2), "input": (16, 32, 3), "tiles": (8, 8, 2)}
    for name in ("BLOCKS", "WIDENED"):
        monkeypatch.setattr(train, name, {save: blocks.Block(*sizes) for save, sizes in cut.items()})
    monkeypatch.setattr(blocks, "_ALIGNED", 1)
    plain, ours = copy.deepcopy(llama), copy.deepcopy(llama)
    parameters = dict(ours.named_parameters())
    report = ff.swap(ours, train=True, save=save)
    assert [row.save for row in report.rows] == [save] * 2
    assert all(row.gradient_ratio <= 1 for row in report.rows)
    assert all(ours.get_parameter(n) is p for n, p in parameters.items())  # the optimizer's own
    expected, found = tune(plain), tune(ours)
    assert len(set(expected)) == 8
    assert max(abs(a - b) / a for a, b in zip(expected, found)) <= 64 * F32
    assert [row.calls for row in report.rows] == [8, 8]
    assert not any(row.stepped_aside for row in report.rows)
    assert "gradient error/allowed" in str(report)
    assert ff.unswap(ours) == []
    for (name, a), b in zip(plain.named_parameters(), ours.parameters()):
        assert numerics.relative_error(b, a) < 1e-4, name


def test_a_wrong_derivative_is_seen(llama, monkeypatch):
    """The loss curve, and the verification, tell a derivative that forgets a part."""
    plain, ours = copy.deepcopy(llama), copy.deepcopy(llama)
    ff.swap(ours, train=True)
    inner = train._backward

    def half(*args):
        found = inner(*args)
        return {**found, "down": found["down"].flip(0)} if "down" in found else found

    monkeypatch.setattr(train, "_backward", half)
    assert max(abs(a - b) / a for a, b in zip(tune(plain), tune(ours))) > 10 * 64 * F32
    again = copy.deepcopy(llama)
    report = ff.swap(again, train=True)
    assert [row.status for row in report.rows] == ["left"] * 2
    assert "the gradient of down failed" in report.rows[0].reason
    assert type(again.model.layers[0].mlp) is type(llama.model.layers[0].mlp)
    assert report.rows[0].save is None


def test_autocast_checkpointing_and_frozen_parts(llama):
    plain, ours = copy.deepcopy(llama), copy.deepcopy(llama)
    report = ff.swap(ours, train=True, save="preact")
    for model in (plain, ours):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for name, p in model.named_parameters():
            p.requires_grad_("down_proj" in name or "norm" in name)
    expected, found = tune(plain, 4, autocast=True), tune(ours, 4, autocast=True)
    assert max(abs(a - b) / a for a, b in zip(expected, found)) <= 2 * numerics.UNIT_ROUNDOFF["bfloat16"]
    assert [row.calls for row in report.rows] == [8, 8]  # once more in backward
    assert not any(row.stepped_aside for row in report.rows)


def test_adapters_step_aside_and_count(llama):
    class Lora(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base_layer = base
            self.a = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
            self.b = nn.Parameter(torch.randn(base.out_features, 2) * 0.1)

        def forward(self, x):
            return self.base_layer(x) + x @ self.a.t() @ self.b.t()

    plain, ours = copy.deepcopy(llama), copy.deepcopy(llama)
    report = ff.swap(ours, train=True)
    for model in (plain, ours):
        torch.manual_seed(3)
        mlp = model.model.layers[0].mlp
        mlp.up_proj = Lora(mlp.up_proj)
    with pytest.warns(UserWarning, match="up_proj was exchanged"):
        found = tune(ours, 3)
    assert max(abs(a - b) / a for a, b in zip(tune(plain, 3), found)) <= 64 * F32
    assert report.rows[0].calls == 0
    assert report.rows[1].calls == 3


def test_inference_copies_and_compilers(llama):
    ours = copy.deepcopy(llama)
    ff.swap(ours, train=True, save="input")
    ids = batches(1)[0]
    with torch.no_grad():
        assert numerics.relative_error(ours(ids).logits, llama(ids).logits) < 1e3 * F32
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(ours(ids).logits, llama(ids).logits)
    twin = pickle.loads(pickle.dumps(ours))
    assert tune(twin, 2) == tune(copy.deepcopy(ours), 2)
    mlp = ours.model.layers[1].mlp
    x = torch.randn(7, 32, requires_grad=True)
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    for call in (compiled, mlp):
        (found,) = torch.autograd.grad(call(x).square().sum(), x)
        (expected,) = torch.autograd.grad(llama.model.layers[1].mlp(x).square().sum(), x)
        assert numerics.relative_error(found, expected) < 64 * F32


@pytest.mark.filterwarnings("ignore:fanfold. .* runs its own code. x is torch.float64")  # in inference
def test_other_models_and_dtypes():
    """A fused and a transposed layout, biases, a written-out FFN, a dtype that no kernel of ours reads."""
    from transformers import GPT2Config, GPT2LMHeadModel, Phi3Config, Phi3ForCausalLM

    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(
        GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
                   attn_pdrop=0.0)
    )  # fmt: skip
    phi3 = Phi3ForCausalLM(
        Phi3Config(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                   num_key_value_heads=4, pad_token_id=0, resid_pdrop=0.0)
    )  # fmt: skip
    for model in (gpt2, phi3, copy.deepcopy(phi3).double()):
        ours = copy.deepcopy(model)
        report = ff.swap(ours, train=True, save="input")
        assert [row.status for row in report.rows] == ["swapped"] * 2, str(report)
        dtype = next(model.parameters()).dtype
        expected, found = tune(copy.deepcopy(model), 3), tune(ours, 3)
        assert max(abs(a - b) / a for a, b in zip(expected, found)) <= 64 * F32
        assert [row.calls for row in report.rows] == [3, 3], (dtype, report.rows[0].stepped_aside)


def test_what_train_does_not_go_with(llama):
    for options, message in (
        ({"format": "int8"}, "packed weights are for inference"),
        ({"backend": "cpu"}, "use backend 'auto' or 'torch'"),
        ({"save": "disk"}, r"save='disk' is not known; known: all, preact, input, tiles"),
    ):
        with pytest.raises(ValueError, match=message):
            ff.swap(copy.deepcopy(llama), train=True, **options)
