"""swap to packed formats: verified, small, reversible, and never a wrong number when it steps aside."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import pickle
import shutil
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import fanfold as ff
from families import FAMILIES, build, inputs, logits
from fanfold import formats, numerics
from fanfold.count import formats as stored
from fanfold.kernels import dispatch, packed
from fanfold.kernels.packed import FORMATS, PackedMatrix
from fanfold.models.packed_module import resident_bytes
from fanfold.models.packing import put_back
from fanfold.models.swapped import is_swapped

BY_NAME = {f.name: f for f in FAMILIES}
SOME = ("llama", "gpt2", "bert", "opt", "phi3", "bloom")
FLOAT = ("fp32", "bf16", "fp16")
FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def packed_linears(model: nn.Module) -> dict[str, nn.Module]:
    return {n: m for n, m in model.named_modules() if is_swapped(m) and hasattr(m._fanfold, "weight")}


def quiet_logits(model: nn.Module, batch: dict) -> torch.Tensor:
    with torch.no_grad():
        return logits(model, batch)


@pytest.mark.parametrize("family", SOME)
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_and_family(family: str, format: str) -> None:
    model = build(BY_NAME[family])
    batch = inputs(model)
    plain = copy.deepcopy(model)
    report = ff.swap(model, format=format, activations="float", backend="cpu")
    assert report.n_swapped == 2, str(report)
    after = quiet_logits(model, batch)
    for row in report.rows:
        assert row.status == "swapped"
        assert row.format == format
        assert row.ratio <= 1
        assert row.calls
        assert not row.stepped_aside
        assert set(row.activations.values()) <= {"float"}
        assert (row.format_error == 0) == (format == "fp32")
    # state_dict gives the dequantized weights: PyTorch with those is what the swapped model has to agree with.
    plain.load_state_dict(model.state_dict())
    assert numerics.compare(after, quiet_logits(copy.deepcopy(plain).double(), batch), quiet_logits(plain, batch)).ok
    with torch.no_grad():
        plain.get_submodule(ff.find(plain)[0].projections["down"]).weight[0].neg_()  # one row (or channel) wrong
    assert not numerics.compare(after, quiet_logits(plain.double(), batch), quiet_logits(plain.float(), batch)).ok
    if format in formats.INTEGER:
        ff.unswap(model)
        report = ff.swap(model, format=format)
        assert {kind for row in report.rows for kind in row.activations.values()} == {"int8"}
        assert all(row.status == "swapped" and row.ratio <= 1 for row in report.rows), str(report)
        assert all(row.quantization_error > row.format_error for row in report.rows)
        assert report.notes[0].startswith("not calibrated")
        assert not torch.equal(quiet_logits(model, batch), after)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("format", ["fp32", "bf16", "int8", "int4", "q4_1"])
def test_unswap_gives_back_what_the_format_holds(dtype, format) -> None:
    model = build(BY_NAME["gpt2"]).to(dtype)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    grads = {n: p.requires_grad for n, p in model.named_parameters()}
    ff.swap(model, format=format)
    held = model.state_dict()
    exact = format == "fp32" or (format == "bf16" and dtype is torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if exact else "ignore")
        notes = ff.unswap(model)
    assert (notes == []) == exact
    if not exact:
        assert (
            f"{'rounded to' if format == 'bf16' else 'dequantized from'} {format.replace('int4', 'int4_g32')}"
            in notes[0]
        )
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(v.dtype == before[k].dtype and torch.equal(v, held[k]) for k, v in after.items())
    assert all(torch.equal(v, before[k]) for k, v in after.items()) == exact
    assert {n: p.requires_grad for n, p in model.named_parameters()} == grads
    assert not packed_linears(model)


def test_keep_originals_gives_back_the_very_parameters() -> None:
    model = build(BY_NAME["llama"])
    before = dict(model.named_parameters())
    ff.swap(model, format="q4_0", keep_originals=True)
    assert ff.unswap(model) == []
    assert all(p is before[n] for n, p in model.named_parameters())


def wrong_kernels():
    """Names and functions that turn the right packed weights or outputs into wrong ones."""

    def negated(m: PackedMatrix) -> PackedMatrix:
        if m.format in FLOAT:
            w = m.dequantize().clone()
            w[-1].neg_()
            return PackedMatrix.pack(w, m.format)
        q = m.quantized()
        tables = {n: getattr(q, n).copy() for n in ("scale", "minimum") if getattr(q, n) is not None}
        for table in tables.values():
            table[-1] *= -1
        return PackedMatrix.pack(dataclasses.replace(q, **tables), activations=m.activations)

    def spec(**fields):
        return lambda w: ff.Weights.unchecked(dataclasses.replace(w.spec, **fields), **dict(w.items()))

    def part(name, make):
        return lambda w: ff.Weights.unchecked(w.spec, **{**dict(w.items()), name: make(getattr(w, name))})

    yield "llama", "gate and up exchanged", lambda w: ff.Weights.unchecked(w.spec, up=w.gate, gate=w.up, down=w.down)
    yield "llama", "another activation", spec(activation="gelu_sigmoid", activation_params=(), beta=None)
    yield "gpt2", "the nearest activation", spec(activation="gelu_erf", activation_params=())
    yield "gpt2", "a bias missing", part("down_bias", torch.zeros_like)
    yield "gpt2", "the first bias missing", part("up_bias", torch.zeros_like)
    yield "llama", "last row of up negated", part("up", negated)
    yield "llama", "last row of down negated", part("down", negated)
    yield "llama", "float activations for int8", None


@pytest.mark.parametrize("format", ["bf16", "int8", "q4_1", "int4_g64"])
@pytest.mark.parametrize(
    ("family", "name", "change"), list(wrong_kernels()), ids=lambda v: v if isinstance(v, str) else ""
)
def test_a_wrong_kernel_is_caught_and_put_back(monkeypatch, family, name, change, format) -> None:
    model = build(BY_NAME[family])
    before = {k: v.clone() for k, v in model.state_dict().items()}
    forward = packed.forward

    def other(w: ff.Weights) -> ff.Weights:
        if change is not None:
            return change(w)
        made = {n: v if n.endswith("bias") else PackedMatrix(v.format, v.shape, v.data, "float") for n, v in w.items()}
        return ff.Weights.unchecked(w.spec, **made)

    if change is None and format == "bf16":
        return
    monkeypatch.setattr(packed, "forward", lambda x, w: forward(x, other(w)))
    alive = []  # a bound kernel reads its weights where they are

    def prepare(x, w):
        alive.append(other(w))
        return packed.bind(x.dtype, alive[-1])

    monkeypatch.setattr(packed, "prepare", prepare)
    report = ff.swap(model, format=format)
    assert report.n_swapped == 0, name
    assert "verification failed" in report.rows[0].reason
    assert not any(map(is_swapped, model.modules()))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("format", ["bf16", "int8", "q4_1"])
def test_a_wrong_linear_is_caught(monkeypatch, format) -> None:
    """Of a pair, and of linears="all"."""
    linear = packed.linear
    for family, wrong in (
        ("bert", lambda x, m, b=None: torch.zeros_like(linear(x, m, b))),
        ("opt", lambda x, m, b=None: linear(x, m, None)),
        ("opt", lambda x, m, b=None: linear(x, m, b).roll(1, -1)),
    ):
        model = build(BY_NAME[family])
        monkeypatch.setattr(packed, "linear", wrong)
        monkeypatch.setattr(packed, "prepare_linear", lambda *_: None)
        report = ff.swap(model, format=format, linears="all")
        monkeypatch.undo()
        touched = [row for row in report.rows if row.kind == "pair" or family == "bert" or "lm_head" not in row.path]
        assert all("verification failed" in row.reason for row in touched), str(report)


def test_flips_at_a_rounding_edge_are_told_from_errors() -> None:
    """A truth with edges excuses a code on the other side of an edge, and nothing else."""
    from fanfold.models import emulate

    spec = ff.Spec(d_model=32, d_ff=64, activation="relu")
    rng = np.random.default_rng(0)
    up = np.zeros((64, 32), np.float32)
    up[np.arange(32), np.arange(32)] = 1.0
    down = rng.normal(size=(32, 64)).astype(np.float32)
    w = ff.Weights(
        spec, up=PackedMatrix.pack(up, "fp32"), down=PackedMatrix.pack(formats.quantize_matrix(down, "q8_0"))
    )
    x = np.zeros((1, 32), np.float32)
    x[0, :3] = 127.0, 40.5, 17.0  # scale 1: 40.5 lies at an edge
    truth = emulate.ffn(x, w)
    assert [e.token for e in truth.edges] == [0]
    other = truth.y + truth.edges[0].change
    assert np.array_equal(truth.settled(other), other)
    assert np.array_equal(truth.settled(truth.y), truth.y)
    wrong = truth.y + down[:, 2]  # 17 taken for 18: no edge
    assert not np.allclose(truth.settled(wrong), wrong)


def test_stubs_take_no_memory_and_matrices_are_as_small_as_the_format() -> None:
    model = nn.ModuleDict({str(i): Mlp(256, 640) for i in range(2)}).eval()
    fp32 = sum(p.nbytes for p in model.parameters())
    report = ff.swap(model, format="int4")
    assert report.n_swapped == 2
    for m in packed_linears(model).values():
        assert m.weight.shape == m._fanfold.stub.shape
        assert m.weight.untyped_storage().nbytes() == m.weight.element_size()
        assert m.weight.isnan().all()
    now = sum(map(resident_bytes, model.modules()))
    assert now <= 0.16 * fp32
    assert now == sum(row.bytes_after for row in report.rows)
    assert now == sum(stored.ffn_bytes(row.spec, "int4") for row in report.rows)


class Mlp(nn.Module):
    def __init__(self, d: int, f: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(d, f, False), nn.Linear(d, f, False), nn.Linear(f, d, False)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


RSS = """
import gc, json, sys
import torch
from torch import nn
sys.path[:0] = {paths}
import fanfold as ff
from test_swap_packed import Mlp

def rss():
    gc.collect()
    return int(open("/proc/self/statm").read().split()[1]) * 4096

ff.swap(Mlp(64, 128).eval(), format="int4")  # everything is imported, every pool is made
model = nn.ModuleList([Mlp(768, 2048) for _ in range(3)]).eval()
found = ff.find(model)
bytes = sum(p.nbytes for p in model.parameters())
before = rss()
report = ff.swap(model, format="int4", found=found)
print(json.dumps([report.n_swapped, bytes, before - rss()]))
"""


def test_resident_memory_really_falls() -> None:
    code = RSS.replace("{paths}", repr(sys.path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    n, n_bytes, freed = json.loads(done.stdout)
    assert n == 3
    assert freed >= (1 - 0.16) * n_bytes


# ---- stepping aside ----


@pytest.fixture(params=["int8", "bf16"])
def llama(request):
    model = build(BY_NAME["llama"])
    report = ff.swap(model, format=request.param)
    mlp = model.model.layers[0].mlp
    return model, mlp, report.rows[0]


def plain_twin(mlp) -> nn.Module:
    """The module with the dequantized weights, never swapped."""
    twin = type(mlp)._fanfold_original(build(BY_NAME["llama"]).config)
    twin.load_state_dict(mlp.state_dict())
    return twin.eval().requires_grad_(False)


def close(a: torch.Tensor, b: torch.Tensor, dtype: str = "float32") -> bool:
    return numerics.relative_error(a, b) < 64 * numerics.UNIT_ROUNDOFF[dtype]


def test_gradients_of_x_are_those_of_the_dequantized_weights(llama) -> None:
    _, mlp, row = llama
    x = torch.randn(2, 3, 32, requires_grad=True)
    y = mlp(x)
    (ours,) = torch.autograd.grad(y.square().sum(), x)
    z = plain_twin(mlp)(x)
    (theirs,) = torch.autograd.grad(z.square().sum(), x)
    assert close(y, z)
    assert close(ours, theirs)
    assert set(row.stepped_aside) == {"gradients are needed"}


def test_autocast_hooks_and_transforms(llama) -> None:
    _, mlp, row = llama
    x, twin = torch.randn(2, 3, 32), plain_twin(mlp)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(mlp(x), twin(x))
    with torch.no_grad(), pytest.warns(UserWarning, match="functorch transform"):
        assert close(torch.vmap(mlp)(x), twin(x))
    seen = []
    handle = mlp.up_proj.register_forward_hook(lambda m, a, y: seen.append(y))
    with torch.no_grad(), pytest.warns(UserWarning, match="up_proj has a hook"):
        y = mlp(x)
    handle.remove()
    with torch.no_grad():
        assert close(seen[0], mlp.up_proj(x))
        assert close(y, mlp(x), "float32" if row.format == "bf16" else "bfloat16")  # int8: codes of three calls
    assert mlp.up_proj._fanfold.calls


def test_an_adapter_counts(llama) -> None:
    _, mlp, _ = llama
    x = torch.randn(2, 3, 32)

    class Twice(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base

        def forward(self, x):
            return 2 * self.base(x)

    with torch.no_grad():
        before = mlp(x)
        mlp.down_proj = Twice(mlp.down_proj)
        with pytest.warns(UserWarning, match="down_proj was exchanged"):
            assert close(mlp(x), 2 * before, "float32" if mlp._fanfold.format == "bf16" else "bfloat16")


def test_a_weight_put_in_counts(llama) -> None:
    _, mlp, row = llama
    x = torch.randn(2, 3, 32)
    for _ in range(3):
        with torch.no_grad():
            mlp(x)
    assert mlp._fanfold.quick is not None
    new = torch.randn(mlp.up_proj.weight.shape)
    twin = plain_twin(mlp)
    twin.up_proj.weight.data = new
    for put in ("parameter", "data", "assign"):
        mlp.up_proj.weight = mlp.up_proj._fanfold.stub
        if put == "parameter":
            mlp.up_proj.weight = nn.Parameter(new.clone(), requires_grad=False)
        elif put == "assign":
            mlp.up_proj.load_state_dict({"weight": new.clone()}, assign=True)
        else:
            mlp.up_proj.weight.data = new.clone()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert close(mlp(x), twin(x), "float32" if row.format == "bf16" else "float16"), put
        assert "its weight was exchanged after the swap" in row.stepped_aside
    with pytest.warns(UserWarning, match="fanfold: gate_proj"):
        notes = ff.unswap(mlp)
    assert any("up_proj" in n and "exchanged" in n for n in notes)
    assert torch.equal(mlp.up_proj.weight, new)


def test_what_would_be_silently_wrong_is_refused(llama) -> None:
    from torch.nn.utils import parametrize, prune

    model, mlp, _ = llama
    x = torch.randn(1, 3, 32)
    with pytest.raises(RuntimeError, match="on the CPU, not on meta"):
        model.to("meta")
    mlp.gate_proj.weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match="can get no gradient"):
        mlp(x)
    with torch.no_grad():
        assert mlp(x).isfinite().all()
    mlp.gate_proj.weight.requires_grad_(False)
    prune.identity(mlp.up_proj, "weight")
    with torch.no_grad(), pytest.raises(RuntimeError, match="up_proj: its weight is computed"):
        mlp(x)
    other = model.model.layers[1].mlp
    parametrize.register_parametrization(other.up_proj, "weight", nn.Identity())
    with torch.no_grad(), pytest.raises(RuntimeError, match="unswap"):
        other(x)
    assert nn.functional.linear(x, mlp.down_proj.weight[:, :32]).isnan().all()


def test_own_code_that_reads_a_weight_runs_on_real_ones() -> None:
    model = build(BY_NAME["bloom"])
    report = ff.swap(model, format="q8_0")
    mlp = model.transformer.h[0].mlp
    x, r = torch.randn(1, 4, 32), torch.randn(1, 4, 32)
    mlp.pretraining_tp, mlp.slow_but_exact = 2, True
    with torch.no_grad(), pytest.warns(UserWarning, match="own code"):
        y = mlp(x, r)
    ff.unswap(model)
    with torch.no_grad():
        assert close(y, mlp(x, r))
    assert report.n_swapped == 2


def test_casts_keep_the_bytes(llama) -> None:
    model, mlp, _ = llama
    x = torch.randn(1, 3, 32)
    model.bfloat16()
    assert mlp.up_proj.weight.dtype == torch.bfloat16
    assert mlp.up_proj.weight.untyped_storage().nbytes() == 2
    with torch.no_grad():
        assert mlp(x.bfloat16()).dtype == torch.bfloat16
        assert mlp._fanfold.calls
    model.float()
    assert mlp.state_dict()["up_proj.weight"].dtype == torch.float32


# ---- files and copies ----


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "t5", "phi3"])
@pytest.mark.parametrize("format", ["int8", "int4", "fp16"])
def test_copies_are_independent(family, format) -> None:
    model = build(BY_NAME[family])
    ff.swap(model, format=format, linears="all")
    batch = inputs(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    expected = quiet_logits(model, batch)
    for twin in copies:
        linears = packed_linears(twin)
        assert len(linears) == len(packed_linears(model))
        for m in linears.values():
            assert m.weight.untyped_storage().nbytes() == m.weight.element_size()
            assert all(part.data.data_ptr() % 64 == 0 for part in m._fanfold.weight.parts)
        assert torch.equal(quiet_logits(twin, batch), expected)
        for m in linears.values():
            for part in m._fanfold.weight.parts:
                part.data.zero_()
        assert not torch.equal(quiet_logits(twin, batch), expected)
    assert torch.equal(quiet_logits(model, batch), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ff.unswap(copies[0])
    assert not packed_linears(copies[0])
    assert packed_linears(model)


def test_state_dicts_hold_numbers_and_load_back() -> None:
    model = build(BY_NAME["phi3"])
    keys = list(model.state_dict())
    ff.swap(model, format="int4")
    batch = inputs(model)
    before = quiet_logits(model, batch)
    state = model.state_dict()
    assert list(state) == keys
    assert all(v.isfinite().all() for v in state.values())
    model.load_state_dict(state)
    assert torch.equal(quiet_logits(model, batch), before)
    assert ff.find(model)[0].status == "identified"
    key = "model.layers.0.mlp.gate_up_proj.weight"
    with pytest.raises(RuntimeError, match="packed as int4_g32"):
        model.load_state_dict({**state, key: torch.ones_like(state[key])})
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**state, key: torch.ones(3, 3)})
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({k: v for k, v in state.items() if k != key})


def test_float_formats_take_a_state_dict() -> None:
    model = build(BY_NAME["llama"])
    ff.swap(model, format="bf16")
    mlp = model.model.layers[0].mlp
    x = torch.randn(1, 3, 32)
    with torch.no_grad():
        for _ in range(2):
            before = mlp(x)  # prepared
        state = {k: v * 2 if k == "down_proj.weight" else v for k, v in mlp.state_dict().items()}
        mlp.load_state_dict(state)
        assert torch.equal(mlp(x), 2 * before)
    with pytest.warns(UserWarning, match="rounded to bf16"):
        notes = ff.unswap(model)
    assert [n for n in notes if "changed after the swap" in n] == [n for n in notes if "layers.0.mlp.down_proj" in n]


def test_save_pretrained_writes_the_dequantized_weights(tmp_path) -> None:
    model = build(BY_NAME["gpt2"])
    ff.swap(model, format="int8", activations="float", linears="all")
    model.save_pretrained(tmp_path)
    batch = inputs(model)
    again = type(model).from_pretrained(tmp_path).eval()
    assert all(p.isfinite().all() for p in again.parameters())
    plain = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ff.unswap(plain)
    assert torch.equal(quiet_logits(again, batch), quiet_logits(plain, batch))


# ---- torch.compile ----


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "phi3"])
def test_a_packed_model_compiles_whole(family) -> None:
    torch._dynamo.reset()
    model = build(BY_NAME[family])
    batch = inputs(model)
    report = ff.swap(model, format="q8_0", linears="all")
    eager = copy.deepcopy(model)
    put_back({row.path: eager.get_submodule(row.path) for row in report.norms})  # compiled, norms run their own code
    expected = quiet_logits(eager, batch)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(**batch).logits, expected)
    x = torch.randn(1, 3, 32, requires_grad=True)
    mlp = model.get_submodule(ff.find(model)[0].path)
    if family in ("llama", "phi3"):
        y = torch.compile(mlp, backend="aot_eager", fullgraph=True)(x)
        (ours,) = torch.autograd.grad(y.sum(), x)
        (theirs,) = torch.autograd.grad(mlp(x).sum(), x)
        assert close(ours, theirs)


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles C++")
def test_inductors_own_cpp_takes_the_operators(tmp_path, monkeypatch) -> None:
    """cpp_wrapper writes an operator's text into C++ without escaping it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    packed, plain = (build(BY_NAME["llama"]) for _ in range(2))
    ff.swap(packed, format="int8", linears="all")
    ff.swap(plain)
    model = torch.nn.Sequential(
        packed.model.layers[0].mlp, plain.model.layers[0].mlp, packed.model.layers[0].self_attn.o_proj
    )
    x = torch.randn(2, 3, 32)
    with torch.no_grad():
        expected = model(x)
        assert torch.equal(torch.compile(model, fullgraph=True, options={"cpp_wrapper": True})(x), expected)


def test_compiled_decoding_with_a_static_cache() -> None:
    from transformers import StaticCache

    torch._dynamo.reset()
    model = build(BY_NAME["llama"])
    ff.swap(model, format="int8", linears="all")
    ids = inputs(model)["input_ids"][:1]

    def decode(forward):
        cache = StaticCache(config=model.config, max_cache_len=16)
        with torch.no_grad():
            out = model(ids, past_key_values=cache).logits[:, -1:]
            tokens = []
            for i in range(4):
                token = out.argmax(-1)
                tokens.append(int(token))
                place = torch.tensor([[ids.shape[1] + i]])
                out = forward(input_ids=token, past_key_values=cache, position_ids=place).logits
        return tokens, out

    eager, compiled = decode(model), decode(torch.compile(model, backend="aot_eager", fullgraph=True))
    assert eager[0] == compiled[0]
    assert close(eager[1], compiled[1], "bfloat16")  # an int8 code may fall to either side of its edge


# ---- arguments ----


def test_errors_of_named_formats() -> None:
    model = build(BY_NAME["llama"])
    with pytest.raises(ValueError, match="format='int3' is not known; known: None, fp32, bf16, fp16, int8, "):
        ff.swap(model, format="int3")
    with pytest.raises(ValueError, match="activations='int4' is not known; known: auto, int8, float"):
        ff.swap(model, format="int8", activations="int4")
    with pytest.raises(ValueError, match="linears='some' is not known; known: ffn, all"):
        ff.swap(model, linears="some")
    with pytest.raises(ValueError, match="does not run on the calibration inputs"):
        ff.swap(model, format="int8", calibration=torch.zeros(3, 5, 7, 9))
    with pytest.raises(ValueError, match="calibration is a str"):
        ff.swap(model, format="int8", calibration="text")
    report = ff.swap(model.half(), format="int8")
    assert report.n_swapped == 0
    assert "float16" in report.rows[0].reason
    with pytest.raises(dispatch.BackendError, match=r"cpu.*float16"):
        ff.swap(model, format="int8", backend="cpu")


def test_weights_that_no_format_holds_are_left() -> None:
    model = Mlp(32, 64).eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        model.up.weight[0, 0] = torch.inf
    (row,) = ff.swap(model, format="int4").rows
    assert row.status == "left"
    assert "finite" in row.reason
    assert torch.equal(model.gate.weight, before["gate.weight"])
    assert not any(map(is_swapped, model.modules()))


def test_backend_torch_computes_with_the_dequantized_weights() -> None:
    model = build(BY_NAME["llama"])
    report = ff.swap(model, format="q4_1", backend="torch")
    assert {row.backend for row in report.rows} == {"torch"}
    mlp, x = model.model.layers[0].mlp, torch.randn(1, 3, 32)
    with torch.no_grad():
        assert torch.equal(mlp(x), plain_twin(mlp)(x))


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
def test_checkpoint_gives_its_own_codes(tmp_path, family) -> None:
    from fanfold.quantize.job import quantize_checkpoint

    for i, seed in enumerate((0, 3)):
        build(BY_NAME[family], seed=seed).save_pretrained(tmp_path / str(seed))
        quantize_checkpoint(ff.load(tmp_path / str(seed)), tmp_path / f"q{i}", "q4_0", activations="float")
    model = build(BY_NAME[family])
    report = ff.swap(model, checkpoint=tmp_path / "q0")
    assert report.n_swapped == 2, str(report)
    given = ff.load(tmp_path / "q0")
    for i, row in enumerate(report.rows):
        assert row.format == "q4_0"
        assert set(row.activations.values()) == {"float"}  # as the folder says
        weights = row.states[-1].weights(model.get_submodule(row.path))
        for name, value in weights.items():
            if not name.endswith("bias"):
                assert torch.equal(value.data, getattr(given.ffns[i], name).data)
    report = ff.swap(build(BY_NAME[family]), checkpoint=tmp_path / "q1")
    assert report.n_swapped == 0
    assert "is not the model's: they differ by" in report.rows[0].reason
    with pytest.raises(ValueError, match="has 2 FFNs, the model 3"):
        ff.swap(nn.ModuleList([build(BY_NAME[family]), Mlp(32, 64)]), checkpoint=tmp_path / "q0")
    with pytest.raises(ValueError, match="format='int8', but"):
        ff.swap(build(BY_NAME[family]), format="int8", checkpoint=tmp_path / "q0")
