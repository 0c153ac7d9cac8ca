"""What `parallel.apply` cuts and what it leaves, with the reason: no processes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import fanfold as ff
from fanfold import Spec
from fanfold.parallel.items import prepare


@pytest.fixture
def packed():
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
                         num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32)  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    ff.swap(model, format="int8", linears="ffn", verify=False)
    return model


class Adapter(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.extra = base, nn.Linear(32, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.extra(x)


def mlp(model, i: int) -> nn.Module:
    return model.model.layers[i].mlp


def split(model, **options):
    items, left = prepare(model, 2, options.get("found"), None)
    return [i.path for i in items], {one.path: one.reason for one in left}


def test_all_of_them(packed):
    paths = [f"model.layers.{i}.mlp" for i in range(3)]
    assert split(packed) == (paths, {})
    assert split(packed, found=ff.find(packed)) == (paths, {})  # given again they are not two


@pytest.mark.parametrize(
    ("put", "why"),
    [
        (lambda m: m.register_forward_hook(lambda *_: None), "it has a hook"),
        (lambda m: m.register_forward_pre_hook(lambda *_: None), "it has a hook"),
        (lambda m: m.gate_proj.register_forward_hook(lambda *_: None), "gate_proj has a hook"),
        (lambda m: setattr(m, "up_proj", Adapter(m.up_proj)), "up_proj was exchanged"),
        (lambda m: setattr(m, "act_fn", nn.GELU()), "act_fn was exchanged"),
        (lambda m: m.__dict__.update(forward=lambda x: 2 * type(m).forward(m, x)), "its forward is patched"),
    ],
    ids=["hook", "pre-hook", "hook below", "adapter", "activation", "patched"],
)
def test_what_was_put_on_a_packed_ffn_is_not_lost(packed, put, why):
    """Its part would run without it: the FFN stays whole, and the report says why."""
    put(mlp(packed, 1))
    items, left = split(packed)
    assert items == ["model.layers.0.mlp", "model.layers.2.mlp"]
    assert list(left) == ["model.layers.1.mlp"]
    assert why in left["model.layers.1.mlp"]


def test_the_modules_of_our_own(packed):
    float_one = ff.nn.FeedForward(Spec.parse("swiglu", d_model=32, d_ff=48))
    packed_one = ff.nn.PackedFeedForward(ff.quantize(float_one.weights(), "int8"))
    both = nn.ModuleDict({"plain": float_one, "packed": packed_one, "model": packed})
    assert set(split(both)[0]) == {"plain", "packed", *(f"model.model.layers.{i}.mlp" for i in range(3))}
    packed_one.register_forward_hook(lambda *_: None)
    assert list(split(both)[1]) == ["packed"]
