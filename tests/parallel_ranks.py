"""Ranks for test_parallel.py: one process imports everything, then forks the ranks, and each runs every check.

python parallel_ranks.py FOLDER     writes FOLDER/results.json: {"check, tp": [a message per rank, "" if it passed]}
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import itertools
import json
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo  # once, before the ranks are forked
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module
from transformers import BertConfig, BertModel, OPTConfig, OPTModel

import fanfold as ff
from fanfold import numerics, parallel
from fanfold.kernels import dispatch
from fanfold.models.swap import swap
from fanfold.parallel.packed_linear import ParallelPackedLinear
from fanfold.parallel.sharded import ParallelPacked

WORLD = 4
BIASED = {"up_bias": True, "gate_bias": True, "down_bias": True}
CHECKS: dict[str, tuple] = {}


def check(*sizes):
    """Register a check(mesh, rank, folder) for these numbers of ranks."""

    def register(function):
        CHECKS[function.__name__] = (function, sizes)
        return function

    return register


def spec_of(kind, d_model, d_ff):
    if kind == "clamped":
        return ff.Spec(
            d_model=d_model, d_ff=d_ff, activation="silu", beta=1.702, gated=True, gate_limit=2.0, up_limit=1.5,
            up_offset=1.0, **BIASED,
        )  # fmt: skip
    if kind == "gelu_tanh":
        return ff.Spec(d_model=d_model, d_ff=d_ff, activation="gelu_tanh", up_bias=True, down_bias=True)
    if kind == "sigmoid":
        return ff.Spec(d_model=d_model, d_ff=d_ff, activation="sigmoid", down_bias=True)
    return ff.Spec.parse(kind, d_model=d_model, d_ff=d_ff)


SPECS = [
    spec_of("clamped", 24, 97),
    spec_of("swiglu", 20, 20),
    spec_of("gelu_tanh", 33, 128),
    spec_of("sigmoid", 16, 50),
]


def pair(spec, seed=0, dtype=torch.float32, **options):
    """(a module, its twin on one device)."""
    weights = numerics.random_weights(spec, seed=seed, make=lambda a: torch.tensor(a).to(dtype))
    one = ff.nn.FeedForward.from_weights(weights, **options)
    return copy.deepcopy(one), one


def tokens(shape, seed=1, dtype=torch.float32):
    return torch.tensor(np.random.default_rng(seed).normal(size=shape)).to(dtype)


def within_rule(y, truth, single, what=""):
    compared = numerics.compare(y, truth, single)
    assert compared.ok, f"{what}: {compared}"


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def gathered(t, mesh, dim):
    """A plain part put together, where DTensor cannot."""
    parts = [None] * mesh.size()
    dist.all_gather_object(parts, t, group=mesh.get_group())
    return torch.cat(parts, dim)


NAMES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def gradients(module):
    """{name in Weights: gradient of the whole} of a FeedForward."""
    out = {}
    for name, p in module.named_parameters():
        projection, kind = name.split(".")
        out[NAMES[projection] + ("" if kind == "weight" else "_bias")] = whole(p.grad)
    return out


def judged(module, one, x, y, g):
    """Hold a forward and backward of `module` to the rule. x, y, g: all tokens, plain; y and gradients are there."""
    weights = one.weights()
    single = x.detach().clone().requires_grad_()
    z = one(single)
    z.backward(g)
    within_rule(y.detach(), ff.reference.forward(x, weights), z.detach(), "y")
    truth = ff.reference.backward(x, weights, g)
    torch_grads = {"x": single.grad, **gradients(one)}
    mine = {"x": x.grad, **gradients(module)}
    assert mine.keys() == truth.keys()
    for name, t in truth.items():
        within_rule(mine[name], t, torch_grads[name], name)
        assert not numerics.compare(2 * mine[name], t, torch_grads[name]).ok, f"{name}: the rule lets twice it pass"
    one.zero_grad()


# ---- the module ----


@check(2, 3, 4)
def forward_and_gradients(mesh, rank, folder):
    for spec in SPECS:
        module, one = pair(spec)
        assert parallel.apply(module, mesh) is module
        (row,) = parallel.report(module)
        assert (row.status, row.tp) == ("cut", mesh.size())
        assert all("DTensor" in said for said in row.parameters.values()), row
        x = tokens((2, 5, spec.d_model)).requires_grad_()
        g = tokens((2, 5, spec.d_model), seed=2)
        with CommDebugMode() as counted:
            y = module(x)
        assert counted.get_total_counts() == 1, counted.get_comm_counts()  # one all-reduce
        with CommDebugMode() as counted:
            y.backward(g)
        assert counted.get_total_counts() == 1, counted.get_comm_counts()  # that of x's gradient
        judged(module, one, x, y, g)
        # the kernels, where no gradient is needed
        with torch.no_grad():
            y = module(x)
            within_rule(y, ff.reference.forward(x, one.weights()), one(x), "kernels")
            assert dispatch.last_backend() in ("cpu", "torch")
            named = ff.nn.FeedForward.from_weights(one.weights(), backend="cpu")
            parallel.apply(named, mesh, backend="cpu")
            within_rule(named(x), ff.reference.forward(x, one.weights()), one(x), "cpu")
            assert dispatch.last_backend() == "cpu"
            for name, wrong in numerics.mutants(one.weights()):
                bad = ff.reference.forward(x, wrong)
                assert not numerics.compare(bad, ff.reference.forward(x, one.weights()), one(x)).ok, name


@check(2)
def what_training_keeps(mesh, rank, folder):
    """save="tiles": x alone is kept, gradients are the same."""
    module, one = pair(SPECS[0], save="tiles")
    parallel.apply(module, mesh)
    x, g = tokens((2, 5, 24)).requires_grad_(), tokens((2, 5, 24), seed=2)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        y = module(x)
    own = module.up_proj.weight.to_local().shape[0]
    assert not any(shape[-1] == own and len(shape) > 1 and shape[0] in (2, 10) for shape in kept), kept
    y.backward(g)
    judged(module, one, x, y, g)


@check(2, 3)
def half_precision(mesh, rank, folder):
    """bfloat16: a partial sum is rounded on each rank, which costs a rounding a rank: PyTorch's own way is judged."""
    spec = spec_of("swiglu", 48, 98)
    module, one = pair(spec, dtype=torch.bfloat16)
    parallel.apply(module, mesh)
    x = tokens((40, 48), dtype=torch.bfloat16)
    with torch.no_grad():
        truth, y = ff.reference.forward(x, one.weights()), module(x)
        p = parallel.plan(spec, mesh.size())
        single = sum(
            ff.nn.FeedForward.from_weights(parallel.shard(one.weights(), p, r))(x).double() for r in range(p.tp)
        ).bfloat16()
    within_rule(y, truth, single)


@check(4)
def plain_parameters_where_dtensor_cannot(mesh, rank, folder):
    """d_ff=5 over 4 ranks: torch.chunk would leave a rank empty, so 2, 1, 1, 1 and plain parameters."""
    spec = spec_of("clamped", 6, 5)
    module, one = pair(spec)
    parallel.apply(module, mesh)
    assert "plain" in parallel.report(module)[0].parameters["up_proj.weight"]
    x, g = tokens((3, 6)).requires_grad_(), tokens((3, 6), seed=2)
    module(x).backward(g)
    truth = ff.reference.backward(x, one.weights(), g)
    for name, dim in (("gate", 0), ("up", 0), ("down", 1)):
        mine = gathered(getattr(module, f"{name}_proj").weight.grad, mesh, dim)
        assert numerics.relative_error(mine, truth[name]) < 1e-6, name
    assert numerics.relative_error(whole(module.down_proj.bias.grad), truth["down_bias"]) < 1e-6


@check(2, 3, 4)
def sequence_parallel(mesh, rank, folder):
    n = mesh.size()
    for spec, count in itertools.product(SPECS[:2], (8, 3, 0)):
        module, one = pair(spec)
        parallel.apply(module, mesh, sequence_parallel=True)
        x, g = tokens((2, count, spec.d_model)), tokens((2, count, spec.d_model), seed=2)

        def mine(t):
            parts = [*t.chunk(n, 1), *[t[:, :0]] * n]
            return parts[rank].contiguous() if t.shape[1] else t

        local = mine(x).clone().requires_grad_()
        given = DTensor.from_local(local, mesh, [Shard(1)], shape=x.shape, stride=x.stride())
        # its bookkeeping cannot view a DTensor without tokens
        with CommDebugMode() if count else contextlib.nullcontext() as counted:
            y = module(given)
        if counted is not None:
            kinds = {str(k).split(".")[-1]: v for k, v in counted.get_comm_counts().items()}
            assert sum(kinds.values()) == 2, kinds  # all-gather, reduce-scatter
        assert y.placements == (Shard(1),)
        assert y.shape == x.shape
        assert y.to_local().shape == local.shape
        spread = DTensor.from_local(mine(g), mesh, [Shard(1)], shape=x.shape, stride=x.stride())
        y.backward(spread)
        x.grad = DTensor.from_local(local.grad, mesh, [Shard(1)], shape=x.shape, stride=x.stride()).full_tensor()
        if count:
            judged(module, one, x, y.full_tensor(), g)
        else:
            assert all(not v.any() for v in gradients(module).values())
        if count % n == 0:  # plain tensors: as many tokens on each rank
            y = module(mine(x))
            assert type(y) is torch.Tensor
            if count:
                within_rule(
                    y.detach(), mine(torch.tensor(ff.reference.forward(x, one.weights()))), mine(one(x).detach())
                )


@check(2, 3)
def zero_tokens(mesh, rank, folder):
    spec = SPECS[0]
    module, _ = pair(spec)
    parallel.apply(module, mesh)
    for shape in ((0, spec.d_model), (2, 0, spec.d_model)):
        x = torch.zeros(shape, requires_grad=True)
        y = module(x)
        assert y.shape == shape
        y.sum().backward()
        assert x.grad.shape == shape
    assert all(not v.any() for v in gradients(module).values())


@check(2, 3)
def dropout(mesh, rank, folder):
    """The masks of one device, from equal random streams, which stay equal: also for a dropout that comes after."""
    spec = dataclasses.replace(SPECS[0], dropout=0.4)
    module, one = pair(spec)
    module.train(), one.train()
    parallel.apply(module, mesh)
    x, g = tokens((7, spec.d_model)), tokens((7, spec.d_model), seed=2)

    def run(m):
        torch.manual_seed(5)
        y = nn.functional.dropout(m(x), 0.5)
        y.backward(g)
        return y.detach(), gradients(m), torch.rand(3)

    (y, grads, after), (z, single, expected) = run(module), run(one)
    assert torch.equal(after, expected)
    assert torch.equal(y == 0, z == 0)
    assert numerics.relative_error(y, z) < 1e-6
    for name, grad in grads.items():
        assert numerics.relative_error(grad, single[name]) < 1e-6, name
    module.zero_grad()
    module.eval(), one.eval()
    with torch.no_grad():
        assert numerics.relative_error(module(x), one(x)) < 1e-6


# ---- somebody's modules ----


class Fused(nn.Module):
    """Phi-3's: one matrix [gate;up]; or pairs. A dropout on coefficients, a residual or else a scale."""

    def __init__(self, d, f, how="halves", bias=True, p=0.0):
        super().__init__()
        self.gate_up_proj = nn.Linear(d, 2 * f, bias=bias)
        self.down_proj = nn.Linear(f, d, bias=bias)
        self.how, self.drop = how, nn.Dropout(p)

    def forward(self, x, residual=None):
        both = self.gate_up_proj(x)
        if self.how == "pairs":
            gate, up = both[..., ::2], both[..., 1::2]
        else:
            gate, up = both.chunk(2, -1)
        y = self.down_proj(self.drop(nn.functional.silu(gate) * up))
        return 0.5 * y if residual is None else y + residual


class Conv1D(nn.Module):
    """GPT-2's linear: weight [in, out]."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf) / nx**0.5)
        self.bias = nn.Parameter(torch.randn(nf) * 0.3)

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class GPT2MLP(nn.Module):
    def __init__(self, d, f):
        super().__init__()
        self.c_fc, self.c_proj, self.act = Conv1D(f, d), Conv1D(d, f), nn.GELU(approximate="tanh")

    def forward(self, x):
        return self.c_proj(self.act(self.c_fc(x)))


class OPTLayer(nn.Module):
    """The linears lie beside attention: the layer's code connects them."""

    def __init__(self, d, f):
        super().__init__()
        self.attention = nn.Linear(d, d)
        self.fc1, self.fc2, self.norm = nn.Linear(d, f), nn.Linear(f, d), nn.LayerNorm(d)

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.fc2(torch.relu(self.fc1(self.norm(x))))


def foreign(name):
    torch.manual_seed(3)
    made = {
        "halves": lambda: Fused(12, 38),
        "pairs": lambda: Fused(12, 38, "pairs", p=0.3),
        "plain pairs": lambda: Fused(12, 37, "pairs", bias=False),
        "gpt2": lambda: GPT2MLP(12, 50),
        "opt": lambda: nn.Sequential(OPTLayer(12, 50), OPTLayer(12, 49)),
        "square": lambda: GPT2MLP(16, 16),
    }[name]()
    return made.eval()


@check(2, 3)
def foreign_modules(mesh, rank, folder):
    for name in ("halves", "pairs", "plain pairs", "gpt2", "opt", "square"):
        model, one = foreign(name), foreign(name)
        d = 16 if name == "square" else 12
        x, res, g = tokens((2, 6, d)), tokens((2, 6, d), seed=4), tokens((2, 6, d), seed=2)
        more = (res,) if name == "pairs" else ()
        kwargs = {"inputs": (x,)} if name == "opt" else {}
        parallel.apply(model, mesh, **kwargs)
        assert all(row.status == "cut" for row in parallel.report(model)), parallel.report(model)
        with torch.no_grad():
            assert numerics.relative_error(model(x, *more), one(x, *more)) < 1e-6, name
        for mode in ("kernels", "own code"):
            for m in (model, one):
                m.zero_grad()
            if mode == "own code":
                next(c for c in model.modules() if isinstance(c, (nn.Linear, Conv1D))).register_forward_hook(
                    lambda *_: None
                )
            xs = [x.clone().requires_grad_() for _ in range(2)]
            ys = [m(v, *more) for m, v in zip((model, one), xs)]
            assert numerics.relative_error(ys[0].detach(), ys[1].detach()) < 1e-6, (name, mode)
            for y in ys:
                y.backward(g)
            assert numerics.relative_error(xs[0].grad, xs[1].grad) < 1e-5, (name, mode)
            for (path, p), q in zip(model.named_parameters(), one.parameters()):
                grad = whole(p.grad)
                if "gate_up" in path:
                    # halves lie as [2, F, …], pairs as [F, 2, …]: the same numbers in the same order
                    assert grad.dim() == q.dim() + 1
                assert numerics.relative_error(grad.reshape(q.shape), q.grad) < 1e-5, (name, mode, path)


@check(2, 3)
def dropout_in_foreign_code(mesh, rank, folder):
    """nn.Dropout on coefficients, in a module's own code: the masks of one device."""
    model, one = foreign("pairs"), foreign("pairs")
    parallel.apply(model, mesh)
    model.train(), one.train()
    x, res = tokens((2, 6, 12)), tokens((2, 6, 12), seed=4)
    out = []
    for m in (model, one):
        torch.manual_seed(11)
        out.append((m(x, res).detach(), torch.rand(2)))
    assert torch.equal(out[0][1], out[1][1])
    assert numerics.relative_error(out[0][0], out[1][0]) < 1e-6


class Llama(nn.Module):
    """Two layers with SwiGLU FFNs between norms."""

    class MLP(nn.Module):
        def __init__(self, d, f):
            super().__init__()
            self.gate_proj, self.up_proj = (nn.Linear(d, f, bias=False) for _ in range(2))
            self.down_proj = nn.Linear(f, d, bias=False)

        def forward(self, x):
            return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

    def __init__(self, d=32, f=96):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(d), "mlp": self.MLP(d, f)}) for _ in range(2))
        self.head = nn.Linear(d, 7)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["mlp"](layer["norm"](x))
        return self.head(x)


def llama(**widths):
    torch.manual_seed(9)
    return Llama(**widths)


@check(2, 3)
def swapped_models(mesh, rank, folder):
    x = tokens((2, 6, 32))
    one = llama().eval()
    for format in (None, "bf16", "int8_g32", "int4", "q8_0"):
        model = llama().eval()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            swap(model, format=format, backend="cpu", verify=False)
        with torch.no_grad():
            before = model(x)
            parallel.apply(model, mesh, backend="cpu")
            y = model(x)
        assert dispatch.last_backend() == "cpu"
        rows = parallel.report(model)
        assert [row.status for row in rows] == ["cut", "cut"]
        if format is None:
            assert "DTensor" in next(iter(rows[0].parameters.values()))
            assert numerics.relative_error(y, one(x)) < 1e-6
            continue
        packed = model.layers[0]["mlp"]
        assert isinstance(packed, ParallelPacked)
        assert packed.spec.d_ff == 96 // mesh.size() or mesh.size() == 2
        # groups of the activations lie alike in parts and whole: the same integers, sums of floats in another order
        bound = 1e-2 if format == "bf16" else 1e-5
        assert numerics.relative_error(y, before) < bound, (format, numerics.relative_error(y, before))


# ---- packed linears that a layer's own code connects ----


def connected(kind, d_ff):
    """(a random model of transformers, its inputs, its FFNs' paths and the linears in each)."""
    torch.manual_seed(13)
    sizes = {"vocab_size": 50, "num_hidden_layers": 2, "max_position_embeddings": 32, "hidden_size": 32}
    if kind == "bert":
        model = BertModel(BertConfig(**sizes, num_attention_heads=2, intermediate_size=d_ff))
        places = [(f"encoder.layer.{i}", "intermediate.dense", "output.dense") for i in range(2)]
    else:
        model = OPTModel(OPTConfig(**sizes, num_attention_heads=2, ffn_dim=d_ff, word_embed_proj_dim=32))
        places = [(f"decoder.layers.{i}", "fc1", "fc2") for i in range(2)]
    for name, p in model.named_parameters():  # they begin as zeros
        if name.endswith("bias"):
            nn.init.normal_(p, std=0.3)
    ids = torch.tensor(np.random.default_rng(1).integers(0, 50, (2, 9)))
    return model.eval(), {"input_ids": ids}, places


def packed_pair(kind, d_ff, format, **options):
    """(the model swapped, its twin, its exact twin in float64, inputs, places)."""
    model, inputs, places = connected(kind, d_ff)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = swap(model, format=format, verify=False, inputs=inputs, **options).ffns
        assert [row.status for row in rows] == ["swapped"] * 2, rows
        exact = copy.deepcopy(model)
        ff.unswap(exact)
    return model, copy.deepcopy(model), exact.double(), inputs, places


def hidden(model, inputs):
    return model(**inputs).last_hidden_state.detach()


FORMATS = {None: 97, "fp32": 97, "bf16": 97, "fp16": 98, "int8": 97, "int8_g32": 167, "int4_g64": 320, "q8_0": 160,
           "q4_0": 167, "q4_1": 160}  # fmt: skip


@check(2, 3)
def connected_linears(mesh, rank, folder):
    """BERT and OPT: one all-reduce an FFN, the numbers of one device, every projection and bias in its place."""
    for kind, (format, d_ff) in itertools.product(("bert", "opt"), FORMATS.items()):
        what = (kind, format)
        model, one, exact, inputs, places = packed_pair(kind, d_ff, format)
        before = sorted(model.state_dict())
        assert parallel.apply(model, mesh, inputs=inputs) is model
        with torch.no_grad():
            single, truth = hidden(one, inputs), hidden(exact, inputs)
            with CommDebugMode() as counted:
                within_rule(hidden(model, inputs), truth, single, what)  # it is to be seen: PyTorch's ops run
            assert counted.get_total_counts() == 2, (what, counted.get_comm_counts())  # an all-reduce each
            y = hidden(model, inputs)
            within_rule(y, truth, single, what)
            assert format is None or dispatch.last_backend() == "cpu"
            rows = parallel.report(model)
            assert [(row.path, row.status, row.tp) for row in rows] == [(p, "cut", mesh.size()) for p, *_ in places]
            start, stop = rows[0].channels
            assert (start, stop) == parallel.plan(rows[0].spec, mesh.size(), format or "fp32").ranges[rank]
            if format is None:
                assert sorted(model.state_dict()) == before
                continue
            for path, first, last in places:
                up, down = (model.get_submodule(f"{path}.{name}") for name in (first, last))
                assert isinstance(up, ParallelPackedLinear)
                assert (up.kinds[0][1], down.kinds[0][1]) == ((stop - start, 32), (32, stop - start))
                assert up.bias.shape == (stop - start,)
                twin = one.get_submodule(f"{path}.{first}")._fanfold.weight.parts[0]
                assert torch.equal(up.weight().parts[0].data, parallel.slices.cut(twin, 0, start, stop).data)
                twin = one.get_submodule(f"{path}.{last}")._fanfold.weight.parts[0]
                assert torch.equal(down.weight().parts[0].data, parallel.slices.cut(twin, 1, start, stop).data)
            assert "packed" in rows[1].parameters["down"], rows
            assert ff.unswap(model) == []  # there is no whole to put back
            assert torch.equal(hidden(model, inputs), y)
            first, last = (model.get_submodule(f"{places[1][0]}.{name}") for name in places[1][1:])
            for broken, factor in ((last, mesh.size()), (last, 0), (first, 0)):  # a rank's bias each, none; up's none
                kept = broken.bias.clone()
                broken.bias.mul_(factor)
                assert not numerics.compare(hidden(model, inputs), truth, single).ok, what
                broken.bias.copy_(kept)
            if rank == 0:
                first.packed.zero_()  # a rank that adds nothing
            assert not numerics.compare(hidden(model, inputs), truth, single).ok, what


@check(2, 3)
def connected_linears_refused(mesh, rank, folder):
    """With the numbers, and nothing changed."""
    model, one, _, inputs, places = packed_pair("opt", 65, "q8_0")
    with torch.no_grad():
        before = hidden(model, inputs)
        if mesh.size() == 3:  # 2 groups and a channel: one rank each
            parallel.apply(model, mesh)
            assert parallel.report(model)[0].channels == ((0, 32), (32, 64), (64, 65))[rank]
            with pytest.raises(parallel.ParallelError, match="rank 0 of 3: its FFNs are cut already"):
                parallel.apply(model, mesh)
        model, *_ = packed_pair("bert", 32, "q8_0")
        whole_module = model.encoder.layer[0].output.dense
        n = mesh.size()
        with pytest.raises(
            parallel.ParallelError,
            match=rf"rank 0 of {n}: d_ff=32 cannot be split over {n} ranks in groups of 32: it has 1 groups. Use tp",
        ):
            parallel.apply(model, mesh)
        assert model.encoder.layer[0].output.dense is whole_module
        with pytest.raises(parallel.ParallelError, match=r"its down is no part of this module"):
            parallel.apply(model.encoder.layer[0].intermediate, mesh)
        one.decoder.layers[0].fc1.register_forward_hook(lambda *_: None)
        places = [path for path, *_ in places]
        parallel.apply(one, mesh) if n == 2 else None
        if n == 2:
            rows = {row.path: (row.status, row.reason) for row in parallel.report(one)}
            said = "decoder.layers.0.fc1 is hooked, or holds a foreign tensor"
            assert rows == {places[0]: ("left", said), places[1]: ("cut", "")}
            assert numerics.relative_error(hidden(one, inputs), before) < 1e-5
        # layer by layer, as PyTorch's own styles are applied
        model, one, _, inputs, places = packed_pair("bert", 167, "int4_g32")
        parallelize_module(model, mesh, {"encoder.layer.*": parallel.FFNParallel()})
        for path, first, _ in places:
            layer = model.get_submodule(path)
            assert [(row.path, row.status) for row in parallel.report(layer)] == [("", "cut")]
            assert isinstance(layer.get_submodule(first), ParallelPackedLinear)
        assert numerics.relative_error(hidden(model, inputs), hidden(one, inputs)) < 1e-5
        # ranks with other codes
        other, *_ = packed_pair("opt", 96, "int8")
        if rank:
            other.decoder.layers[1].fc2._fanfold.weight.parts[0].data[100] ^= 1
        with pytest.raises(parallel.ParallelError, match=r"the ranks disagree on weights"):
            parallel.apply(other, mesh)


@check(2, 3)
def connected_linears_with_cut_tokens(mesh, rank, folder):
    """Sequence parallelism, float and packed: each rank gives and gets its tokens; gradients of x; torch.compile."""
    n = mesh.size()
    for format in (None, "int8_g32", "bf16"):
        x, g = tokens((2, 2 * n, 32)), tokens((2, 2 * n, 32), seed=2)
        models = []
        for _ in range(2):
            torch.manual_seed(3)
            models.append(nn.Sequential(OPTLayer(32, 97)).eval())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                swap(models[-1], format=format, verify=False, inputs=(x,))
        model, one = models
        parallel.apply(model, mesh, sequence_parallel=True, inputs=(x,))
        own = slice(2 * rank, 2 * rank + 2)
        with torch.no_grad(), CommDebugMode() as counted:
            model(x[:, own].contiguous())
        kinds = {str(k).split(".")[-1]: v for k, v in counted.get_comm_counts().items()}
        assert sum(kinds.values()) == 2, kinds  # all-gather, reduce-scatter
        with torch.no_grad():
            y = model(x[:, own].contiguous())
            assert numerics.relative_error(y, one(x)[:, own]) < 1e-5, format
            fast = torch.compile(model, backend="aot_eager", fullgraph=format is not None)
            assert numerics.relative_error(fast(x[:, own].contiguous()), y) < 1e-5, format
        xs = [x[:, own].clone().requires_grad_(), x.clone().requires_grad_()]
        for m, v, w in zip((model, one), xs, (g[:, own], g)):
            for p in m.parameters():
                p.requires_grad_(False)
            m(v).backward(w)
        assert numerics.relative_error(xs[0].grad, xs[1].grad[:, own]) < 1e-5, format
        if format is None:
            continue
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model[0].fc2.packed.zero_()
        model.load_state_dict(state)
        with torch.no_grad():
            assert torch.equal(model(x[:, own].contiguous()), y)
        model.bfloat16()
        assert model[0].fc1.bias.dtype == torch.float32
        with torch.no_grad():
            z = model(x[:, own].bfloat16().contiguous())
        assert numerics.relative_error(z.float(), y) < 3e-2
        with pytest.raises(RuntimeError, match=r"runs on the CPU"):
            model.to("meta")
        named = copy.deepcopy(one)
        parallel.apply(named, mesh, backend="cpu")
        with torch.no_grad():
            assert numerics.relative_error(named(x), one(x)) < 1e-5
        assert dispatch.last_backend() == "cpu"
        with pytest.raises(dispatch.BackendError, match=r"cannot run 0: packed weights are for inference"):
            named(x.clone().requires_grad_())


class GatedLayer(nn.Module):
    """A gated FFN beside attention; its gate and up apart, in halves or in pairs of one matrix, or GPT-2's linears."""

    def __init__(self, d, f, how):
        super().__init__()
        self.attention, self.norm, self.how = nn.Linear(d, d), nn.LayerNorm(d), how
        if how == "apart":
            self.gate_proj, self.up_proj, self.down_proj = nn.Linear(d, f), nn.Linear(d, f), nn.Linear(f, d)
        elif how == "conv1d":
            self.c_fc, self.c_proj = Conv1D(f, d), Conv1D(d, f)
        else:
            self.gate_up_proj, self.down_proj = nn.Linear(d, 2 * f), nn.Linear(f, d)

    def forward(self, x):
        x = x + self.attention(x)
        h = self.norm(x)
        if self.how == "conv1d":
            return x + self.c_proj(nn.functional.gelu(self.c_fc(h), approximate="tanh"))
        if self.how == "apart":
            gate, up = self.gate_proj(h), self.up_proj(h)
        else:
            both = self.gate_up_proj(h)
            gate, up = (both[..., ::2], both[..., 1::2]) if self.how == "pairs" else both.chunk(2, -1)
        return x + self.down_proj(nn.functional.silu(gate) * up)


@check(2, 3)
def connected_linears_of_other_kinds(mesh, rank, folder):
    """Gated: apart, fused in halves, in pairs; [in, out]; one module shared by two places."""
    x = tokens((2, 6, 32))
    for how, format in itertools.product(("apart", "halves", "pairs", "conv1d"), ("fp32", "int8_g32", "q4_1")):
        torch.manual_seed(3)
        model = nn.Sequential(GatedLayer(32, 97, how), GatedLayer(32, 98, how)).eval()
        model.append(model[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows = swap(model, format=format, verify=False, inputs=(x,)).ffns
            assert [(row.kind, row.status) for row in rows] == [("pair", "swapped")] * 2, (how, rows)
            one, exact = copy.deepcopy(model), copy.deepcopy(model)
            ff.unswap(exact)
        parallel.apply(model, mesh)
        assert [row.status for row in parallel.report(model)] == ["cut"] * 2
        with torch.no_grad():
            truth, single = exact.double()(x.double()), one(x)
            y = model(x)
            assert dispatch.last_backend() == "cpu"
            within_rule(y, truth, single, (how, format))
            if format == "q4_1":
                torch._dynamo.reset()  # it counts how often it compiled the same code, and stops
                fast = torch.compile(model, backend="aot_eager", fullgraph=True)
                within_rule(fast(x), truth, single, (how, format, "compiled"))
            for linear in (m for m in model[1].modules() if isinstance(m, ParallelPackedLinear)):
                linear.bias.mul_(-1)
                assert not numerics.compare(model(x), truth, single).ok, (how, format)
                linear.bias.mul_(-1)


@check(2)
def packed_modules(mesh, rank, folder):
    spec = ff.Spec.parse("swiglu", d_model=64, d_ff=160, **BIASED)
    weights = numerics.random_weights(spec, make=lambda a: torch.tensor(a).float())
    for format in ("q4_0", "int8", "fp32"):
        quantized = ff.quantize(weights, format) if format != "fp32" else None
        one = ff.nn.FeedForward.from_weights(quantized or weights, format=None if quantized else "int4_g32")
        model = nn.Sequential(copy.deepcopy(one))
        parallel.apply(model, mesh)
        x = tokens((3, 64))
        with torch.no_grad():
            y, z = model(x), one(x)
        error = numerics.relative_error(y, z)
        # int8 has groups of 256 activations, which the cut moves
        assert error < (2e-2 if format == "int8" else 1e-5), (format, error)
        root = parallel.apply(copy.deepcopy(one), mesh)
        assert torch.equal(root(x), y)
        assert root.state_dict().keys() == {f"{n}" for n in model[0].state_dict()}


@check(2)
def compiled(mesh, rank, folder):
    spec = SPECS[0]
    for sequence in (False, True):
        module, one = pair(spec)
        parallel.apply(module, mesh, sequence_parallel=sequence)
        fast = torch.compile(module, backend="aot_eager", fullgraph=True)
        x, g = tokens((2, 6, spec.d_model)), tokens((2, 6, spec.d_model), seed=2)
        own = slice(3 * rank, 3 * rank + 3) if sequence else slice(None)
        local = x[:, own].clone().requires_grad_()
        y = fast(local)
        y.backward(g[:, own].contiguous())
        within_rule(y.detach(), ff.reference.forward(x, one.weights())[:, own], one(x).detach()[:, own], "y")
        truth = ff.reference.backward(x, one.weights(), g)
        for name, grad in gradients(module).items():
            assert numerics.relative_error(grad, truth[name]) < 1e-6, name
        with torch.no_grad():
            within_rule(fast(local), ff.reference.forward(x, one.weights())[:, own], one(x)[:, own], "no gradient")


@check(4)
def fsdp(mesh, rank, folder):
    """A 2-D mesh: FFNs cut over tp, all parameters over dp; each dp rank has its own tokens, one has none."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for d_ff, empty in ((96, False), (97, True)):
        model, one = llama(f=d_ff), llama(f=d_ff)
        parallel.apply(model, both["tp"])
        for layer in model.layers:
            fully_shard(layer["mlp"], mesh=both["dp"])
        fully_shard(model, mesh=both["dp"])
        x = tokens((4, 5, 32))
        dp = both["dp"].get_local_rank()
        mine = x[:0] if empty and dp else x if empty else x[2 * dp : 2 * dp + 2]
        model(mine).sum().backward()
        one(x).sum().backward()
        for (name, p), q in zip(model.named_parameters(), one.named_parameters()):
            grad = p.grad
            assert grad.device_mesh.ndim == 2 or "mlp" not in name, name
            # FSDP averages over dp
            assert numerics.relative_error(2 * grad.full_tensor(), q[1].grad) < 1e-5, (name, d_ff)
        cut = [p for name, p in model.named_parameters() if "mlp" in name]  # PyTorch clips tensors of one mesh together
        norm = torch.nn.utils.clip_grad_norm_(cut, 1.0).full_tensor()
        expected = torch.nn.utils.get_total_norm([p.grad for n, p in one.named_parameters() if "mlp" in n]) / 2
        assert abs(norm / expected - 1) < 1e-5, (norm, expected)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(mine)


@check(4)
def styles_and_checkpoints(mesh, rank, folder):
    """parallelize_module; a distributed checkpoint saved at tp=4 is loaded at 2, 3 and 1, bit by bit."""
    model = llama(f=97)
    parallelize_module(model, mesh, {"layers.*.mlp": parallel.FFNParallel()})
    fused = nn.ModuleDict({"model": model, "fused": foreign("halves")})
    parallel.apply(fused["fused"], mesh)
    place = f"{folder}/dcp"
    dcp.save(fused.state_dict(), checkpoint_id=place)
    wanted = {name: whole(t).clone() for name, t in fused.state_dict().items()}
    for tp in (2, 3):
        smaller = DeviceMesh("cpu", list(range(tp)))
        if rank >= tp:
            continue
        other = nn.ModuleDict({"model": Llama(f=97), "fused": Fused(12, 38)})
        for p in other.parameters():
            nn.init.zeros_(p)
        # experiments need weights that say something
        other["fused"].load_state_dict(foreign("halves").state_dict())
        other["model"].load_state_dict(llama(f=97).state_dict())
        parallelize_module(other["model"], smaller, {"layers.*.mlp": parallel.FFNParallel()})
        parallel.apply(other["fused"], smaller)
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
        state = other.state_dict()
        dcp.load(state, checkpoint_id=place, process_group=smaller.get_group())
        for name, t in state.items():
            assert torch.equal(whole(t), wanted[name]), (tp, name)
    if rank == 0:
        alone = {name: torch.zeros_like(t) for name, t in wanted.items()}
        dcp.load(alone, checkpoint_id=place, no_dist=True)
        assert all(torch.equal(alone[name], wanted[name]) for name in wanted)
        assert torch.equal(alone["model.layers.0.mlp.up_proj.weight"], llama(f=97).layers[0]["mlp"].up_proj.weight)


@check(2, 3, 4)
def parts_read_from_a_file(mesh, rank, folder):
    """Each rank loads its own part; no rank has the whole."""
    n = mesh.size()
    place = Path(folder) / f"parts{n}"
    spec = ff.Spec.parse("swiglu", d_model=32, d_ff=97, **BIASED)
    weights = numerics.random_weights(spec, make=lambda a: torch.tensor(a).float())
    if rank == 0:
        place.mkdir()
        tensors = {
            f"model.layers.0.mlp.{name.partition('_')[0]}_proj.{name.partition('_')[2] or 'weight'}": v
            for name, v in weights.items()
        }
        save_file(tensors, place / "model.safetensors")
        said = {"model_type": "llama", "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 97}
        (place / "config.json").write_text(json.dumps({**said, "mlp_bias": True, "num_hidden_layers": 1}))
    dist.barrier(group=mesh.get_group())
    one = ff.nn.FeedForward.from_weights(weights)
    x, g = tokens((2, 5, 32)).requires_grad_(), tokens((2, 5, 32), seed=2)
    for as_packed in (False, True):
        loaded = ff.load(place, packed=as_packed, rank=rank, tp=n)
        module = parallel.from_part(loaded.ffns[0], loaded.plans[0], mesh)
        if as_packed:
            with torch.no_grad():
                within_rule(module(x), ff.reference.forward(x, weights), one(x), "packed")
            continue
        y = module(x)
        y.backward(g)
        judged(module, one, x, y, g)
        assert torch.equal(whole(module.up_proj.weight), weights.up)
    other = ff.load(place, rank=rank, tp=n + 1)
    with pytest.raises(
        parallel.ParallelError, match=rf"rank 0 of {n}: the plan is for {n + 1} ranks, the mesh has {n}"
    ):
        parallel.from_part(other.ffns[0], other.plans[0], mesh)


# ---- faults ----


@check(2, 3, 4)
def disagreements(mesh, rank, folder):
    said = []

    def refused(make):
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            try:
                make()
            except ValueError as error:
                said.append(str(error))
                return
        raise AssertionError("not refused")

    last = rank == mesh.size() - 1
    refused(lambda: parallel.apply(pair(spec_of("swiglu", 8, 16 + last))[0], mesh))
    refused(lambda: parallel.apply(pair(spec_of("swiglu", 8, 16), seed=int(last))[0], mesh))
    refused(lambda: parallel.apply(pair(SPECS[0])[0], mesh, sequence_parallel=last))
    refused(lambda: parallel.apply(pair(spec_of("swiglu", 8, mesh.size() - 1))[0], mesh))
    refused(lambda: parallel.apply(nn.Linear(3, 4) if last else pair(SPECS[0])[0], mesh))
    refused(lambda: parallel.agree("loading", mesh.get_group(), {"file": "a" if last else "b"}))
    refused(lambda: parallel.apply(pair(SPECS[0])[0], "tp"))
    everyone = [None] * mesh.size()
    dist.all_gather_object(everyone, said, group=mesh.get_group())
    assert all(other == said for other in everyone), everyone
    n = mesh.size()
    ranks = "rank 0" if n == 2 else f"ranks {', '.join(map(str, range(n - 1)))}"
    assert f'disagree on the spec of (root): "gated silu 8->16, separate" on {ranks}; ' in said[0], said[0]
    assert f'"gated silu 8->17, separate" on rank {n - 1}. Give every rank the same' in said[0]
    assert "disagree on weights" in said[1]
    assert "disagree on sequence_parallel: false" in said[2]
    assert f"rank 0 of {n}: d_ff={n - 1} cannot be split over {n} ranks: it has {n - 1} channels" in said[3]
    assert f"rank {n - 1} of {n}: no FFN found in Linear" in said[4]
    assert said[5].startswith('loading: the ranks disagree on file: "b" on')
    assert "mesh is a str, expected a DeviceMesh" in said[6]


@check(4)
def meshes_that_do_not_fit(mesh, rank, folder):
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module, _ = pair(SPECS[0])
    with pytest.raises(ValueError, match=r"mesh has 2 dimensions \(2 x 2\), FFNs are cut over one: pass mesh\['tp'\]"):
        parallel.apply(module, both)
    parallel.apply(module, mesh)
    with pytest.raises(ValueError, match="cut already"):
        parallel.apply(module, mesh)


def one_dies(rank, size, folder):
    """The last rank ends before its third forward; the others say so, alike, within the timeout."""
    return _lost(rank, size, f"{folder}/dies{size}", lambda: os._exit(7))


def one_is_silent(rank, size, folder):
    """The last rank never comes to its third forward."""
    return _lost(rank, size, f"{folder}/silent{size}", lambda: time.sleep(8))


def _lost(rank, size, store, fail):
    start(rank, size, store, 3)
    mesh = init_device_mesh("cpu", (size,))
    module, _ = pair(SPECS[0])
    parallel.apply(module, mesh)
    x = tokens((4, SPECS[0].d_model))
    begin = time.monotonic()
    try:
        for i in range(1000):
            if i == 2 and rank == size - 1:
                fail()
                return None
            module(x)
    except parallel.ParallelError as error:
        return {"said": str(error), "seconds": time.monotonic() - begin}
    return {"said": "nothing", "seconds": 0.0}


# ---- running them ----


def start(rank, size, store, seconds):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=seconds)
    )


def every_check(rank, folder, only):
    start(rank, WORLD, f"{folder}/store", 300)  # torch.compile on a busy machine
    meshes = {n: DeviceMesh("cpu", list(range(n))) for n in (2, 3, 4)}
    out = {}
    for name, (function, sizes) in CHECKS.items():
        if only and name not in only:
            continue
        for n in sizes:
            said, begin = "", time.monotonic()
            if rank < n:
                try:
                    function(meshes[n], rank, folder)
                except Exception:
                    said = traceback.format_exc()
            elif name == "styles_and_checkpoints":
                raise AssertionError("it makes meshes: every rank must take part")
            dist.barrier()
            out[f"{name}, {n}"] = said
            print(f"{name}, {n}: {time.monotonic() - begin:.1f} s", said[-2000:], file=sys.stderr, flush=True) if (
                rank == 0 or said
            ) else None
    return out


def forked(work, size, folder, *args):
    """work(rank, …) in `size` forked processes -> their results; None of one that died."""
    places = [Path(folder) / f"{work.__name__}-{size}-{rank}.json" for rank in range(size)]
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                places[rank].write_text(json.dumps(work(rank, *args)))
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    return [json.loads(place.read_text()) if place.exists() else None for place in places]


def main():
    folder, only = sys.argv[1], sys.argv[2:]
    results = {}
    ranks = forked(every_check, WORLD, folder, folder, only)
    for name, (_, sizes) in CHECKS.items():
        for n in sizes:
            key = f"{name}, {n}"
            results[key] = ["the rank died" if r is None else r.get(key, "not run") for r in ranks[:n]]
    for size in (2, 3, 4):
        if not only or "one_dies" in only:
            results[f"one_dies, {size}"] = forked(one_dies, size, folder, size, folder)
    if not only or "one_is_silent" in only:
        results["one_is_silent, 3"] = forked(one_is_silent, 3, folder, 3, folder)
    (Path(folder) / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
