"""nn.FeedForward and ff.ffn: names, backends, autograd, torch.compile, autocast, copies."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn

import fanfold as ff
from fanfold import numerics, reference
from fanfold.kernels import dispatch

SWIGLU = ff.Spec.parse("swiglu", d_model=24, d_ff=40)
GELU = ff.Spec(d_model=24, d_ff=40, activation="gelu_erf", up_bias=True, down_bias=True)
OAI = ff.Spec.parse("swiglu_oai", d_model=24, d_ff=24, gate_bias=True, up_bias=True, down_bias=True)


def module(spec: ff.Spec, backend: str = "auto", dtype=torch.float32, seed: int = 0) -> ff.nn.FeedForward:
    weights = numerics.random_weights(spec, seed, lambda a: torch.tensor(a, dtype=dtype))
    return ff.nn.FeedForward.from_weights(weights, backend=backend)


def test_a_llama_mlp_loads_strictly() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    for bias in (False, True):
        theirs = LlamaMLP(LlamaConfig(hidden_size=24, intermediate_size=40, num_attention_heads=4, mlp_bias=bias))
        spec = ff.Spec.parse("swiglu", d_model=24, d_ff=40, gate_bias=bias, up_bias=bias, down_bias=bias)
        ours = ff.nn.FeedForward(spec)
        ours.load_state_dict(theirs.state_dict(), strict=True)
        assert list(ours.state_dict()) == list(theirs.state_dict())
        x = torch.randn(5, 24)
        with torch.no_grad():
            truth = reference.forward(x, ours.weights())
            assert numerics.compare(ours(x), truth, theirs(x)).ok
            theirs.load_state_dict(ours.state_dict(), strict=True)


@pytest.mark.parametrize("backend", ["auto", "cpu", "torch"])
@pytest.mark.parametrize("spec", [SWIGLU, GELU, OAI], ids=["swiglu", "gelu", "oai"])
def test_gradients_against_the_reference(spec, backend) -> None:
    m = module(spec, backend)
    x = torch.randn(2, 3, 24, requires_grad=True)
    grad_y = torch.linspace(-1, 2, x.numel()).view(x.shape)
    m(x).backward(grad_y)
    truth = reference.backward(x, m.weights(), grad_y)
    twin = module(spec, "torch")
    x2 = x.detach().clone().requires_grad_()
    twin(x2).backward(grad_y)
    grads = {"x": (x.grad, x2.grad)}
    for name, value in m.weights().items():
        grads[name] = (value.grad, getattr(twin.weights(), name).grad)
    for name, (ours, theirs) in grads.items():
        shape = (1, -1) if ours.dim() == 1 else ours.shape
        assert numerics.compare(ours.view(shape), truth[name].reshape(shape), theirs.view(shape)).ok, name
    # a wrong gradient must fail: x's rows exchanged
    assert not numerics.compare(x.grad.flip(1), truth["x"], x2.grad).ok


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_zero_tokens_give_zero_gradients(backend) -> None:
    m = module(GELU, backend)
    junk = torch.full((4096,), float("nan"))
    del junk  # so that an uninitialised gradient would likely show
    x = torch.empty(0, 24, requires_grad=True)
    y = m(x)
    assert y.shape == (0, 24)
    y.sum().backward()
    assert x.grad.shape == (0, 24)
    assert all(p.grad is not None and not p.grad.any() for p in m.parameters())


def test_frozen_parameters_get_no_gradient() -> None:
    m = module(GELU, "cpu")
    m.up_proj.weight.requires_grad_(False)
    m(torch.randn(3, 24)).sum().backward()
    assert m.up_proj.weight.grad is None
    assert m.down_proj.weight.grad is not None
    inputs_before = torch.randn(3, 24)
    x = inputs_before.clone().requires_grad_()
    m(x).sum().backward()
    assert torch.equal(x.detach(), inputs_before)


def test_used_twice_in_one_graph() -> None:
    """Both uses' gradients are there. Against float64: two FFNs in a row can make 25 roundings of one, eager's too."""
    x = torch.randn(3, 24)
    grads = {}
    for backend, dtype in (("cpu", torch.float32), ("torch", torch.float32), ("torch", torch.float64)):
        m = module(SWIGLU, backend).to(dtype)
        m(m(x.to(dtype))).square().sum().backward()
        grads[backend, dtype] = {name: p.grad for name, p in m.weights().items()}
    for name, truth in grads["torch", torch.float64].items():
        for backend in ("cpu", "torch"):
            error = numerics.relative_error(grads[backend, torch.float32][name], truth)
            assert error < 64 * numerics.UNIT_ROUNDOFF["float32"], (backend, name)


@pytest.mark.parametrize("backend", ["auto", "cpu", "torch"])
@pytest.mark.parametrize("train", [False, True])
def test_compile_without_breaks_and_at_most_two_compiles(backend, train) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    m = module(SWIGLU, backend).requires_grad_(train)
    compiled = torch.compile(m, fullgraph=True, backend=counter)
    for tokens in range(1, 65):
        x = torch.randn(tokens, 24)
        y = compiled(x)
        assert numerics.relative_error(y, m(x)) < 16 * numerics.UNIT_ROUNDOFF["float32"]
        if train:
            m.zero_grad()
            y.square().sum().backward()
            ours = m.down_proj.weight.grad.clone()
            m.zero_grad()
            m(x).square().sum().backward()
            assert numerics.relative_error(ours, m.down_proj.weight.grad) < 64 * numerics.UNIT_ROUNDOFF["float32"]
    assert counter.frame_count <= 2


def test_compile_with_inductor() -> None:
    torch._dynamo.reset()
    m = module(GELU).requires_grad_(False)
    compiled = torch.compile(m, fullgraph=True)
    x = torch.randn(7, 24)
    assert numerics.relative_error(compiled(x), m(x)) < 16 * numerics.UNIT_ROUNDOFF["float32"]
    assert list(compiled.state_dict()) == [f"_orig_mod.{k}" for k in m.state_dict()]


def test_the_operator_passes_torchs_own_checks() -> None:
    from fanfold.kernels import op

    for spec in (SWIGLU, GELU):
        w = module(spec).weights()
        tensors = [getattr(w, n) for n in op._NAMES]
        x = torch.randn(3, 24, requires_grad=True)
        torch.library.opcheck(torch.ops.fanfold.ffn.default, (x, *tensors, spec.to_json(), "cpu"))


@pytest.mark.parametrize("backend", ["auto", "cpu", "torch"])
def test_autocast(backend) -> None:
    m = module(GELU, backend)
    x = torch.randn(5, 24, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = m(x)
        plain = nn.functional.linear(
            nn.functional.gelu(nn.functional.linear(x, m.up_proj.weight, m.up_proj.bias)),
            m.down_proj.weight,
            m.down_proj.bias,
        )
    assert y.dtype == plain.dtype == torch.bfloat16
    assert numerics.compare(y, reference.forward(x, m.weights()), plain).ok
    y.float().sum().backward()
    assert x.grad.dtype == torch.float32
    assert m.up_proj.weight.grad.dtype == torch.float32


def test_dropout_is_in_training_only_and_on_the_coefficients() -> None:
    spec = ff.Spec(d_model=24, d_ff=40, activation="relu", up_bias=True, dropout=0.5)
    m = module(spec)
    x = torch.randn(200, 24)
    m.eval()
    assert torch.equal(m(x), m(x))
    m.train()
    with torch.no_grad():
        torch.manual_seed(0)
        y = m(x)
        torch.manual_seed(0)
        coefficients = torch.relu(m.up_proj(x))
        expected = m.down_proj(nn.functional.dropout(coefficients, 0.5, True))
    assert numerics.relative_error(y, expected) < 16 * numerics.UNIT_ROUNDOFF["float32"]
    cpu = module(spec, "cpu")
    with pytest.raises(dispatch.BackendError, match="dropout is active"):
        cpu(x)


def test_deepcopy_pickle_meta() -> None:
    m = module(OAI)
    x = torch.randn(3, 24)
    for twin in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert torch.equal(twin(x), m(x))
        assert twin.spec == m.spec
    meta = ff.nn.FeedForward(SWIGLU, device="meta")
    assert meta(torch.empty(2, 3, 24, device="meta")).shape == (2, 3, 24)
    loaded = ff.nn.FeedForward(SWIGLU, device="meta")
    loaded.load_state_dict(module(SWIGLU).state_dict(), assign=True)
    assert torch.equal(loaded(x), module(SWIGLU)(x))


def test_adapters_and_hooks_take_effect() -> None:
    m = module(SWIGLU, "cpu")
    x = torch.randn(3, 24)
    with torch.no_grad():
        y = m(x)
        seen = []
        handle = m.gate_proj.register_forward_hook(lambda mod, a, out: seen.append(out))
        assert numerics.relative_error(m(x), y) < 16 * numerics.UNIT_ROUNDOFF["float32"]
        assert len(seen) == 1
        handle.remove()
        m.down_proj = nn.Sequential(m.down_proj, nn.Identity())
        m.down_proj.register_forward_hook(lambda mod, a, out: 2 * out)
        assert numerics.relative_error(m(x), 2 * y) < 16 * numerics.UNIT_ROUNDOFF["float32"]


def test_errors() -> None:
    with pytest.raises(ValueError, match="save='disk' is not known"):
        ff.nn.FeedForward(SWIGLU, save="disk")
    with pytest.raises(ValueError, match="backend='gpu' is not known; known: auto, cpu, torch"):
        ff.nn.FeedForward(SWIGLU, backend="gpu")
    with pytest.raises(ValueError, match="format='q9' is not known"):
        ff.nn.FeedForward.from_weights(module(SWIGLU).weights(), format="q9")
    for backend in ("auto", "cpu", "torch"):
        with pytest.raises(ValueError, match=r"x has shape \(3, 23\), expected \(…, 24\)"):
            module(SWIGLU, backend)(torch.randn(3, 23))
    with pytest.raises(dispatch.BackendError, match="cannot run this call"):
        module(SWIGLU, "cpu", torch.float16)(torch.randn(3, 24).half())


def test_formats_of_from_weights() -> None:
    weights = numerics.random_weights(SWIGLU)
    m = ff.nn.FeedForward.from_weights(weights, format="bf16")
    assert m.up_proj.weight.dtype == torch.bfloat16
    tensors = numerics.random_weights(SWIGLU, 0, torch.tensor)
    assert ff.nn.FeedForward.from_weights(tensors).up_proj.weight.data_ptr() == tensors.up.data_ptr()


def test_explain_and_last_backend(monkeypatch) -> None:
    for backend, dtype in itertools.product(("auto", "cpu", "torch"), (torch.float32, torch.float16)):
        w = module(SWIGLU, dtype=dtype).requires_grad_(False).weights()
        x = torch.randn(3, 24, dtype=dtype)
        rows = {c.backend: c for c in ff.explain(x, w, backend)}
        assert set(rows) == {"cpu", "torch"}
        assert all(c.reason for c in rows.values())
        runs = [name for name, c in rows.items() if c.runs]
        if dtype == torch.float16 and backend == "cpu":
            assert runs == []
            continue
        ff.ffn(x, w, backend)
        assert runs == [dispatch.last_backend()]
    w = module(SWIGLU).requires_grad_(False).weights()
    x = torch.randn(3, 24)
    monkeypatch.setenv("FANFOLD_BACKEND", "torch")
    ff.ffn(x, w)
    assert dispatch.last_backend() == "torch"
    trained = module(SWIGLU).weights()
    monkeypatch.delenv("FANFOLD_BACKEND")
    assert "gradients" in next(c.reason for c in ff.explain(x, trained) if c.backend == "cpu")


def test_ffn_takes_numpy_nowhere_silently() -> None:
    with pytest.raises(dispatch.BackendError, match=r"not torch tensors|not a torch tensor"):
        ff.ffn(torch.randn(3, 24), numerics.random_weights(SWIGLU))


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spec", [SWIGLU, GELU, OAI], ids=["swiglu", "gelu", "oai"])
def test_the_battery(ffn_battery, backend, dtype, spec) -> None:
    ffn_battery(lambda x, w: ff.ffn(x, w, backend), spec, dtype=dtype)


# ---- packed ----

PACKED = ("int8", "int4", "q4_0", "q4_1", "int8_g64")


def packed_module(format: str, spec: ff.Spec = SWIGLU, backend: str = "auto"):
    weights = numerics.random_weights(spec, 0, lambda a: torch.tensor(a, dtype=torch.float32))
    return ff.nn.FeedForward.from_weights(weights, format=format, backend=backend)


def _dequantized(weights: ff.Weights) -> ff.Weights:
    from fanfold.kernels import torch as torch_ops

    return torch_ops.dequantized(weights, torch.float32)


@pytest.mark.parametrize("format", PACKED)
@pytest.mark.parametrize("spec", [SWIGLU, GELU, OAI], ids=["swiglu", "gelu", "oai"])
def test_a_packed_module_computes_with_its_weights(format, spec) -> None:
    m = packed_module(format, spec)
    x = torch.randn(2, 24, 24) * torch.tensor([1.0, 30.0])[:, None, None]  # large ones, for clamps
    wide = _dequantized(m.weights())
    int8 = numerics.relative_error(m(x), reference.forward(x, wide))
    assert dispatch.last_backend() == "cpu"
    assert 0 < int8 < numerics.relative_error(torch.zeros_like(x), reference.forward(x, wide)) / 10
    for matrix in (m.weights().gate, m.weights().up, m.weights().down):
        if matrix is not None:
            matrix.activations = "float"
    twin = ff.nn.FeedForward.from_weights(m.weights())
    y, plain = twin(x), ff.ffn(x, wide, "torch")
    assert numerics.compare(y, reference.forward(x, wide), plain).ok
    for name, wrong in numerics.mutants(wide):
        assert not numerics.compare(ff.ffn(x, wrong, "torch"), reference.forward(x, wide), plain).ok, name
    assert torch.equal(ff.ffn(x, m.weights(), "torch"), plain)
    assert dispatch.last_backend() == "torch"


def test_a_packed_module_and_its_state(tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    m = packed_module("q4_1", GELU)
    x = torch.randn(3, 24)
    y = m(x)
    save_file(m.state_dict(), tmp_path / "ffn.safetensors")
    other = ff.nn.FeedForward.from_weights(numerics.random_weights(GELU, 7), format="q4_1")
    assert not torch.equal(other(x), y)
    for assign in (False, True):
        other.load_state_dict(load_file(tmp_path / "ffn.safetensors"), assign=assign)
        assert torch.equal(other(x), y)
        assert all(t.data_ptr() % 64 == 0 for n, t in other.named_buffers() if n.endswith("packed"))
    for twin in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert torch.equal(twin(x), y)
        twin.up_packed.zero_()
        assert not torch.equal(twin(x), y)
    assert torch.equal(m(x), y)
    m.bfloat16()
    assert m(x.bfloat16()).dtype == torch.bfloat16
    assert torch.equal(m(x), y)
    with pytest.raises(RuntimeError, match="runs on the CPU"):
        m.to("meta")
    with pytest.raises(ValueError, match="expected the same"):
        packed_module("q4_0", GELU).load_state_dict(m.state_dict(), strict=False, assign=True)
    with pytest.raises((ValueError, RuntimeError), match=r"expected the same|size mismatch"):
        packed_module("int8", GELU).load_state_dict(m.state_dict())


def test_a_packed_module_under_autograd_autocast_and_compile() -> None:
    torch._dynamo.reset()
    m = packed_module("int8")
    x = torch.randn(3, 24, requires_grad=True)
    (ours,) = torch.autograd.grad(m(x).sum(), x)
    (theirs,) = torch.autograd.grad(ff.ffn(x, _dequantized(m.weights()), "torch").sum(), x)
    assert numerics.relative_error(ours, theirs) < 16 * numerics.UNIT_ROUNDOFF["float32"]
    compiled = torch.compile(m, backend="aot_eager", fullgraph=True)
    (again,) = torch.autograd.grad(compiled(x).sum(), x)
    assert numerics.relative_error(again, theirs) < 16 * numerics.UNIT_ROUNDOFF["float32"]
    with torch.no_grad():
        assert torch.equal(compiled(x), m(x))
        assert torch.equal(torch.compile(lambda x: ff.ffn(x, m.weights()), backend="aot_eager")(x), m(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert m(x).dtype == torch.bfloat16
    with pytest.raises(dispatch.BackendError, match="packed weights are for inference"):
        packed_module("int8", backend="cpu")(x)


def test_explain_of_packed_weights() -> None:
    w = packed_module("q4_0").weights()
    x = torch.randn(3, 24)
    rows = {c.backend: c for c in ff.explain(x, w)}
    assert rows["cpu"].runs
    assert not rows["torch"].runs
    rows = {c.backend: c for c in ff.explain(x.half(), w)}
    assert "float16" in rows["cpu"].reason
    assert rows["torch"].runs
    with pytest.raises(dispatch.BackendError, match="float16"):
        ff.ffn(x.half(), w, "cpu")
    with pytest.raises(ValueError, match="expected None or that"):
        ff.nn.FeedForward.from_weights(w, format="int8")


def test_the_packed_operators_pass_torchs_own_checks() -> None:
    from fanfold.kernels import packed_op

    for spec in (SWIGLU, GELU):
        w = packed_module("int4", spec).weights()
        x = torch.randn(3, 24)
        data = [None if m is None else m.data for m in (w.gate, w.up, w.down)]
        args = (x, *data, w.gate_bias, w.up_bias, w.down_bias, packed_op.describe_ffn(w))
        torch.library.opcheck(torch.ops.fanfold.packed_ffn.default, args)
        text = packed_op.describe(w.up)
        torch.library.opcheck(torch.ops.fanfold.packed_linear.default, (x, w.up.data, w.up_bias, text))
        torch.library.opcheck(torch.ops.fanfold.packed_weight.default, (w.up.data, text, torch.float32))
        with pytest.raises(ValueError, match="expected"):
            torch.ops.fanfold.packed_linear(x, w.up.data[:64], None, text)
        with pytest.raises(ValueError, match="expected"):
            torch.ops.fanfold.packed_linear(x[:, :8], w.up.data, None, text)
