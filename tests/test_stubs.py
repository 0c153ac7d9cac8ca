"""What stands in for a packed weight: who writes to it, computes it or derives it is obeyed or refused."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import fanfold as ff
from fanfold import numerics
from fanfold.kernels import cpu, packed, packed_op
from fanfold.models import stubs

FORMATS = ("fp32", "bf16", "int8", "int4_g32", "q4_1")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.first(x))


def build(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model().eval()


def data(seed: int = 1) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(2, 5, 32)


def swapped(format: str = "fp32") -> Model:
    model = build()
    ff.swap(model, format=format, linears="all", inputs=data())
    return model


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return numerics.relative_error(a, b) < 64 * numerics.UNIT_ROUNDOFF["float32"]


def by_numpy(weight: torch.Tensor) -> None:
    weight.detach().numpy()[:] = 0


WRITES = {
    "zero_": lambda weight: weight.zero_(),
    "fill_": lambda weight: weight.fill_(0.25),
    "data.zero_": lambda weight: weight.data.zero_(),
    "init": lambda weight: nn.init.zeros_(weight),
    "numpy": by_numpy,
}


@pytest.mark.parametrize("where", ["first", "mlp.0", "mlp.2"])
@pytest.mark.parametrize("write", WRITES)
@torch.no_grad()
def test_writes_to_a_weight_count(where: str, write: str) -> None:
    for called in (False, True):
        model, plain, x = swapped(), build(), data()
        if called:
            model(x), model(x)
            assert model.first._fanfold.quick is not None
            assert model.mlp._fanfold.quick is not None
        for one in (model, plain):
            WRITES[write](one.get_submodule(where).weight)
        assert not close(plain(x), build()(x))
        with pytest.warns(UserWarning, match=f"{where} runs its own code: its weight was exchanged"):
            y = model(x)
        assert close(y, plain(x))
        assert torch.equal(model.state_dict()[f"{where}.weight"], plain.state_dict()[f"{where}.weight"])
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for twin in twins:
                assert close(twin(x), plain(x))
            ff.unswap(model)
        assert close(model(x), plain(x))


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
@pytest.mark.parametrize("where", ["first", "mlp.0", "mlp.2"])
@torch.no_grad()
def test_compiled_code_refuses_what_was_written_to(where: str, backend: str) -> None:
    torch._dynamo.reset()
    model, x = swapped(), data()
    compiled = torch.compile(model, backend=backend)
    compiled(x)
    before = cpu.compiled_calls()
    y = compiled(x)
    assert backend == "aot_eager" or cpu.compiled_calls() > before
    assert torch.equal(y, model(x))
    model.get_submodule(where).weight.data.zero_()
    with pytest.raises(RuntimeError, match=r"written to a weight that is packed.*unswap"):
        compiled(x)
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="written to a weight that is packed"):
        torch.compile(model, backend=backend)(x)


@torch.no_grad()
def test_copies_and_files_are_watched_as_well() -> None:
    x = data()
    file = io.BytesIO()
    torch.save(swapped(), file)
    file.seek(0)
    casted = swapped().double().float()
    for model in (copy.deepcopy(swapped()), torch.load(file, weights_only=False), casted):
        model(x), model(x)
        assert model.first._fanfold.quick is not None
        model.first.weight.data.zero_()
        plain = build()
        plain.first.weight.zero_()
        with pytest.warns(UserWarning, match="its weight was exchanged"):
            assert close(model(x), plain(x))


@torch.no_grad()
def test_whose_bytes_are_watched() -> None:
    """Until they go; and not those of another matrix that later lies there."""
    model = swapped()
    matrix = model.first._fanfold.weight.parts[0].data
    at = matrix.data_ptr()
    assert not cpu._cpu.is_written(at)
    model.first.weight.data.zero_()
    assert cpu._cpu.is_written(at)
    packed_op.watch(matrix, *stubs.place(stubs.make_stub(torch.Size([3, 2]), torch.float32)))
    assert not cpu._cpu.is_written(at)
    model.first.weight.data.fill_(1)
    del model, matrix
    gc.collect()
    assert not cpu._cpu.is_written(at)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 5), (1, 1), (0, 4), (4, 0)])
def test_stubs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = [stubs.make_stub(torch.Size(shape), dtype) for _ in range(3)]
    for stub in made:
        assert stub.shape == shape
        assert stub.dtype is dtype
        assert stub.isnan().all()
        assert stub.untyped_storage().nbytes() == dtype.itemsize
    before = [stubs.mark(stub) for stub in made]
    if 0 not in shape:
        assert len({stub.data_ptr() for stub in made}) == 3
        made[1].data.zero_()
        assert [stubs.mark(stub) == then for stub, then in zip(made, before)] == [True, False, True]
        assert made[0].isnan().all()
        assert made[2].isnan().all()
    stubs.retype(made[0], torch.float16)
    assert made[0].dtype is torch.float16
    assert made[0].shape == shape
    assert stubs.place(torch.zeros(3)) is None


def test_more_stubs_than_a_chunk_has_places() -> None:
    made = [stubs.make_stub(torch.Size([2, 2]), torch.float32) for _ in range(stubs._PER_CHUNK + 1)]
    assert len({stub.data_ptr() for stub in made}) == len(made)
    assert all(stubs.place(stub) is not None for stub in (made[0], made[-1]))
    made[-1].data.zero_()
    assert made[0].isnan().all()


@pytest.mark.parametrize("where", ["first", "mlp.0", "mlp.2"])
@torch.no_grad()
def test_a_computed_bias_counts(where: str) -> None:
    class Twice(nn.Module):
        def forward(self, bias: torch.Tensor) -> torch.Tensor:
            return 2 * bias

    def parametrized(linear: nn.Module) -> None:
        parametrize.register_parametrization(linear, "bias", Twice())

    for change in (lambda linear: prune.l1_unstructured(linear, "bias", 0.5), parametrized):
        for called in (False, True):
            model, plain, x = swapped(), build(), data()
            if called:
                model(x), model(x)
            for one in (model, plain):
                change(one.get_submodule(where))
            assert not close(plain(x), build()(x))
            with pytest.warns(UserWarning, match=f"{where} runs its own code: its bias is computed"):
                assert close(model(x), plain(x))
            torch._dynamo.reset()
            assert close(torch.compile(model)(x), plain(x))
            if change is not parametrized:
                ff.unswap(model)
                assert close(model(x), plain(x))
                continue
            with pytest.raises(RuntimeError, match=f"{where} has become a .*remove_parametrizations"):
                ff.unswap(model)
            assert close(model(x), plain(x))
            for one in (model, plain):
                parametrize.remove_parametrizations(one.get_submodule(where), "bias")
            ff.unswap(model)
            assert type(model.get_submodule(where)) is nn.Linear
            assert close(model(x), plain(x))


@pytest.mark.parametrize("where", ["first", "mlp.0", "mlp.2"])
def test_compiled_code_refuses_gradients_of_packed_weights(where: str) -> None:
    model, x = swapped("int8"), data()
    model.requires_grad_(False)  # biases that want a gradient have the FFN's own code run
    model.get_submodule(where).weight.requires_grad_(True)
    for call in (model, torch.compile(model)):
        torch._dynamo.reset()
        with pytest.raises(RuntimeError, match=f"{where}: its weight is packed as int8 and can get no gradient"):
            call(x)
        with torch.no_grad():
            assert call(x).isfinite().all()


@pytest.mark.parametrize("format", [None, *FORMATS])
@pytest.mark.parametrize("grad", [False, True])
def test_forward_mode_derivatives(format: str | None, grad: bool) -> None:
    """no_grad does not switch them off, and an operator without a rule for them has a derivative of zero."""
    model, x, along = swapped(format), data(), data(2)  # type: ignore[arg-type]
    plain = build()
    plain.load_state_dict(model.state_dict())

    def derivative(f):
        return lambda x: torch.func.jvp(f, (x,), (along,))[1]

    torch._dynamo.reset()
    with torch.set_grad_enabled(grad), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(model)
        before = compiled(x)
        expected = derivative(plain)(x)
        assert close(derivative(model)(x), expected)
        assert close(torch.compile(derivative(model))(x), expected)
        assert torch.equal(compiled(x), before)  # what was compiled before is not what runs inside of a transform


@pytest.mark.parametrize("format", [None, "fp32", "int8"])
@torch.no_grad()
def test_forward_mode_derivatives_of_functions_and_modules(format: str | None) -> None:
    spec = ff.Spec(d_model=32, d_ff=48, activation="silu", gated=True)
    torch.manual_seed(3)
    weights = ff.Weights(spec, gate=torch.randn(48, 32), up=torch.randn(48, 32), down=torch.randn(32, 48))
    if format is None:
        module: nn.Module = ff.nn.FeedForward.from_weights(weights)
        exact = weights
    else:
        matrices = {name: packed.PackedMatrix.pack(m, "fp32") for name, m in weights.items()}
        weights = ff.Weights(spec, **matrices) if format == "fp32" else ff.quantize(weights, format)
        module = ff.nn.PackedFeedForward(weights)
        exact = ff.Weights(spec, **{name: m.dequantize() for name, m in weights.items()})
    x, along = data(), data(2)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(
            nn.functional.silu(nn.functional.linear(x, exact.gate)) * nn.functional.linear(x, exact.up), exact.down
        )

    expected = torch.func.jvp(plain, (x,), (along,))[1]
    for f in (module, lambda x: ff.ffn(x, weights)):
        for how in (lambda f: f, torch.compile):
            torch._dynamo.reset()
            derivative = how(lambda x: torch.func.jvp(f, (x,), (along,))[1])  # noqa: B023
            assert close(derivative(x), expected)


@torch.no_grad()
def test_tied_linears_are_cast_together() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Tanh(), nn.Linear(32, 32, bias=False))
    model[2].weight = model[0].weight
    x = data()
    ff.swap(model, format="fp32", linears="all", inputs=x)
    twin = copy.deepcopy(model)
    for one in (model, twin):
        one.bfloat16()
        assert one[0].weight is one[2].weight
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            y = one(x.bfloat16())
        assert y.isfinite().all()
        assert all(linear._fanfold.holds(linear) for linear in (one[0], one[2]))
        assert all(linear._fanfold.dtype is torch.bfloat16 for linear in (one[0], one[2]))
        assert one[0].weight.untyped_storage().nbytes() == 2


@pytest.mark.filterwarnings("ignore:fanfold")
@pytest.mark.parametrize("size", [1, 40])
@torch.no_grad()
def test_a_bias_of_another_size_is_not_read_past_its_end(size: int) -> None:
    model, plain, x = swapped(), build(), data()
    matrix = model.first._fanfold.weight.parts[0]
    for bias in (torch.ones(size), torch.ones(32, device="meta")):
        with pytest.raises(ValueError, match="bias has shape"):
            packed.linear(x, matrix, bias)
    for called in (False, True):
        if called:
            ff.unswap(model)
            model = swapped()
            model(x), model(x)
        for one in (model, plain):
            one.first.bias = nn.Parameter(torch.ones(size))
        if size == 1:  # PyTorch broadcasts it
            assert close(model(x), plain(x))
        else:
            with pytest.raises(RuntimeError, match=r"size of tensor|must match"):
                model(x)


def _child(questions, answers) -> None:
    model, x = questions.get()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        y = model(x)
        model.first.weight.zero_()
        warnings.simplefilter("ignore")
        answers.put((y.tolist(), model(x).tolist()))


@torch.no_grad()
def test_models_that_processes_share() -> None:
    model, plain, x = swapped(), build(), data()
    y = model(x)
    plain.first.weight.zero_()
    context = torch.multiprocessing.get_context("spawn")
    questions, answers = context.Queue(), context.Queue()
    process = context.Process(target=_child, args=(questions, answers))
    process.start()
    questions.put((model, x))
    theirs, zeroed = answers.get(timeout=120)
    process.join()
    assert torch.equal(torch.tensor(theirs), y)
    assert close(torch.tensor(zeroed), plain(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(model(x), y)
        assert torch.equal(model(x), y)
    model.first.weight.data.zero_()
    with pytest.warns(UserWarning, match="its weight was exchanged"):
        assert close(model(x), plain(x))


@torch.no_grad()
def test_who_writes_nan_gets_nan() -> None:
    for write in (lambda w: w.fill_(torch.nan), lambda w: w.copy_(w.clone())):
        model, x = swapped(), data()
        model(x)
        try:
            write(model.first.weight)
        except RuntimeError:  # PyTorch refuses it
            continue
        model.first._fanfold.quick = None
        with pytest.warns(UserWarning, match="its weight was exchanged"):
            assert model(x).isnan().all()
