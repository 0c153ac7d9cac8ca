"""RMS norms: the kernel against float64, what is taken for one, and what a swapped one does when something changes."""

from __future__ import annotations

import copy
import io
import itertools
import warnings

import pytest
import torch
from torch import Tensor, nn

import fanfold as ff
from families import FAMILIES, build, inputs, logits
from fanfold import numerics
from fanfold.kernels import cpu, dispatch
from fanfold.models import norms, swapped_norm
from fanfold.models.norms import RmsNorm
from fanfold.models.quick import Quick
from fanfold.models.swapped import is_swapped
from fanfold.show import outcome

BY_NAME = {f.name: f for f in FAMILIES}
DTYPES = (torch.float32, torch.bfloat16)


class Rms(nn.Module):
    """Llama's: normalised in float32, rounded, times the weight. Its eps has a name that nobody expects."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(width))
        self.some_number = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.some_number)).to(x.dtype)


class Offset(Rms):
    """Gemma's: times weight + 1, all of it in float32."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.some_number)
        return (y * (1 + self.weight.float())).to(x.dtype)


def truth(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    return RmsNorm(x.shape[-1], eps, bool(offset)).exact(x, weight)


def in_torch(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """PyTorch's operators in x's dtype, as Llama runs them."""
    wide = x.float()
    return (weight + offset) * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


# --- the kernel ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=cpu.isas())
def isa(request, monkeypatch):
    monkeypatch.setenv("FANFOLD_ISA", request.param)
    return request.param


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_kernel_is_right_and_mutants_are_not(isa, dtype, offset) -> None:
    for width, tokens in itertools.product((4, 15, 16, 17, 64, 65, 576, 4100), (1, 2, 33)):
        x = (torch.randn(tokens, width) + 0.5).to(dtype)
        weight = (1 + 0.3 * torch.randn(width)).to(dtype)
        x[:, -1], weight[-1] = 5.0, 2.0
        x[0] *= 1e-3  # beside eps
        y = cpu.rms_norm(x, weight, 1e-5, offset)
        exact, beside = truth(x, weight, 1e-5, offset), in_torch(x, weight, 1e-5, offset)
        found = numerics.compare(y, exact, beside)
        assert found, (width, tokens, found)
        wrong = {
            "eps": cpu.rms_norm(x, weight, 1e-6, offset),
            "offset": cpu.rms_norm(x, weight, 1e-5, 1.0 - offset),
            "weight": cpu.rms_norm(x, weight.flip(0), 1e-5, offset),
            "mean": cpu.rms_norm((x - x.float().mean(-1, keepdim=True)).to(dtype), weight, 1e-5, offset),
            "last": torch.cat([y[:, :-1], -y[:, -1:]], 1),
        }
        for name, other in wrong.items():
            assert not numerics.compare(other, exact, beside), (name, width, tokens)


def test_strides_shapes_and_threads(isa) -> None:
    weight = 1 + 0.3 * torch.randn(70)
    whole = torch.randn(600, 3, 80)
    x = whole[:, ::2, 5:75]
    y = cpu.rms_norm(x, weight, 1e-6)
    assert y.shape == x.shape
    assert torch.equal(y, cpu.rms_norm(x.contiguous(), weight, 1e-6))
    assert torch.equal(y[7, 1], cpu.rms_norm(x[7, 1], weight, 1e-6))
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(cpu.rms_norm(x, weight, 1e-6), y)
    finally:
        torch.set_num_threads(before)
    assert cpu.rms_norm(x[:0], weight, 1e-6).shape == (0, 2, 70)
    one = torch.tensor([[3.0], [-2.0]])
    assert torch.equal(cpu.rms_norm(one, torch.tensor([2.0]), 0.0), torch.tensor([[2.0], [-2.0]]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strange_numbers_give_what_pytorch_gives(isa, dtype) -> None:
    weight = (1 + 0.3 * torch.randn(33)).to(dtype)
    x = torch.randn(7, 33).to(dtype)
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf, 1e30, 1e-40, 0.0)):
        x[row, 3] = value
    x[5] = 0.0
    y, expected = cpu.rms_norm(x, weight, 0.0), in_torch(x, weight, 0.0)
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.isinf(), expected.isinf())
    assert y[0].isnan().all()
    assert y[5].isnan().all()
    assert bool((y[3] == 0).all())  # its squares are infinite in float32, there as here
    assert numerics.compare(y[[4, 6]], truth(x[[4, 6]], weight, 0.0), expected[[4, 6]])


def test_what_cannot_run_says_why() -> None:
    x, weight = torch.randn(2, 8), torch.ones(8)
    for bad_x, bad_weight, why in (
        (x[:, :7], weight, r"expected \(…, 8\)"),
        (x.bfloat16(), weight, "expected one dtype"),
        (x.double(), weight.double(), "float64"),
        (x, torch.ones(16)[::2], "stride 2"),
        (x, torch.ones(2, 8), r"expected \[width\]"),
    ):
        with pytest.raises(ValueError, match=why):
            cpu.rms_norm(bad_x, bad_weight, 1e-5)


# --- what is taken for one -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_norms_are_identified(dtype) -> None:
    for width, eps in ((2, 1e-5), (33, 1e-12), (64, 0.0), (576, 1e-2), (64, 3.7)):
        for kind, offset in ((Rms, False), (Offset, True)):
            assert norms.rms_norm(kind(width, eps).to(dtype)) == RmsNorm(width, eps, offset), (width, eps, kind)
    assert norms.rms_norm(nn.RMSNorm(20, eps=1e-4)) == RmsNorm(20, 1e-4)
    assert norms.rms_norm(nn.RMSNorm(20)) == RmsNorm(20, torch.finfo(torch.float32).eps)


def test_an_eps_that_the_module_does_not_hold_is_measured() -> None:
    class Hidden(Rms):
        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 3.3e-5)

    found = norms.rms_norm(Hidden(40))
    assert found is not None
    assert abs(found.eps - 3.3e-5) < 1e-6 * 3.3e-5


class AbsoluteEps(Rms):
    def forward(self, x):
        return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + self.some_number)


class Scaled(Rms):
    def forward(self, x):
        return super().forward(x) * 1.001


class Residual(Rms):
    def forward(self, x):
        return super().forward(x) + 0.01 * x


class Sum(Rms):
    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().sum(-1, keepdim=True) + self.some_number)


class Clamped(Rms):
    def forward(self, x):
        return super().forward(x.clamp(-20, 20))


class Partial(Rms):
    def forward(self, x):
        scale = torch.rsqrt(x[..., : x.shape[-1] // 2].square().mean(-1, keepdim=True) + self.some_number)
        return self.weight * x * scale


class Training(Rms):
    def forward(self, x):
        return super().forward(x) * (1.01 if self.training else 1.0)


class Across(Rms):
    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean() + self.some_number)


class Squared(Rms):
    def forward(self, x):
        return super().forward(x) * self.weight


class Floor(Rms):
    """eps is the least that is divided by: with a small one only inputs of its own size tell."""

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True).clamp_min(self.some_number / 100))


@pytest.mark.parametrize(
    "other",
    [AbsoluteEps, Scaled, Residual, Sum, Clamped, Partial, Training, Across, Squared, Floor],
    ids=lambda c: c.__name__,
)
def test_what_is_nearly_one_is_none(other) -> None:
    module = other(48, 1e-5)
    assert norms.may_be_rms(module)
    assert norms.rms_norm(module) is None


def test_other_modules_are_none() -> None:
    affine = nn.LayerNorm(16, bias=False)
    assert norms.may_be_rms(affine)
    assert norms.rms_norm(affine) is None
    assert norms.rms_norm(nn.PReLU(16)) is None
    with_child = Rms(16)
    with_child.adapter = nn.Linear(16, 16)
    for module in (
        nn.LayerNorm(16),
        nn.BatchNorm1d(16),
        nn.Linear(16, 16),
        nn.Embedding(16, 16),
        nn.PReLU(),
        nn.GELU(),
        with_child,
    ):
        assert not norms.may_be_rms(module), module


# --- a swapped norm ------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A norm before an FFN, of any kind of norm."""

    def __init__(self, norm: nn.Module, width: int = 48) -> None:
        super().__init__()
        self.norm = norm
        self.mlp = nn.Sequential(nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def swapped(kind: type = Rms, **options) -> tuple[Block, ff.models.report.SwapReport]:
    model = Block(kind(48)).eval()
    report = ff.swap(model, linears="all", inputs=(torch.randn(1, 3, 48),), **options)
    return model, report


def calls(model: Block) -> int:
    return model.norm._fanfold.calls  # type: ignore[union-attr, return-value]


@pytest.mark.parametrize("format", [None, "int8"])
@pytest.mark.parametrize("family", ["llama", "t5", "phi3"])
def test_a_model_swaps_and_comes_back_bit_for_bit(family, format) -> None:
    model = build(BY_NAME[family])
    batch, plain = inputs(model), copy.deepcopy(model)
    report = ff.swap(model, format=format, linears="all", keep_originals=True)
    assert report.norms
    assert report.n_norms_swapped == len(report.norms)
    with torch.no_grad():
        for _ in range(3):
            after = logits(model, batch)
    assert all(row.calls and not row.stepped_aside for row in report.norms)
    if format is None:
        with torch.no_grad():
            before, exact = logits(plain, batch), logits(copy.deepcopy(plain).double(), batch)
        assert numerics.compare(after, exact, before)
    for row in report.norms:
        assert row.to_dict()["norm"] == {"width": row.norm.width, "eps": row.norm.eps, "unit_offset": False}
    ff.unswap(model)
    assert not any(is_swapped(m) for m in model.modules())
    with torch.no_grad():
        assert torch.equal(logits(model, batch), logits(plain, batch))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [Rms, Offset])
def test_calls_run_on_our_kernel(kind, dtype) -> None:
    model = Block(kind(48)).eval().to(dtype)
    report = ff.swap(model, linears="all", format="bf16" if dtype is torch.bfloat16 else None)
    (row,) = report.norms
    assert (row.status, row.norm) == ("swapped", RmsNorm(48, 1e-5, kind is Offset))
    assert "weight + 1" in row.what or kind is Rms
    norm = model.norm
    for x in (torch.randn(1, 1, 48), torch.randn(2, 30, 48), torch.randn(5, 96)[:, ::2], torch.randn(48)):
        x = x.to(dtype)
        for _ in range(3):  # at first with every check, then by the plan
            with torch.no_grad():
                y = norm(x)
            exact = truth(x, norm.weight, 1e-5, float(kind is Offset))
            beside = norm._fanfold_original.forward(norm, x).detach()
            assert numerics.compare(y.reshape(-1, 48), exact.reshape(-1, 48), beside.reshape(-1, 48))
            assert y.dtype is dtype
    assert row.calls == 12
    assert not row.stepped_aside


def prepared(model: Block, x: Tensor) -> None:
    with torch.no_grad():
        model.norm(x)
        assert isinstance(model.norm._fanfold.quick, Quick)
        model.norm(x)


def test_the_weight_is_read_in_place() -> None:
    model, _ = swapped()
    x = torch.randn(1, 4, 48)
    prepared(model, x)
    with torch.no_grad():
        before = model.norm(x)
        model.norm.weight.mul_(2)
        assert torch.equal(model.norm(x), before * 2)
        model.norm.weight = nn.Parameter(torch.zeros(48))
        assert not model.norm(x).any()
    assert calls(model) == 5


def patched(norm):
    norm.forward = lambda x: x


def other_eps(norm):
    norm.some_number = 0.5


def dtyped(norm):
    norm.weight = nn.Parameter(norm.weight.detach().bfloat16())


def childed(norm):
    norm.adapter = nn.Linear(1, 1)


@pytest.mark.parametrize("change", [patched, other_eps, dtyped, childed], ids=lambda c: c.__name__)
@pytest.mark.parametrize("ready", [False, True])
def test_a_change_is_seen_and_its_own_code_runs(change, ready) -> None:
    model, _ = swapped()
    plain = copy.deepcopy(model)
    ff.unswap(plain)
    x = torch.randn(1, 4, 48)
    if ready:
        prepared(model, x)
    change(model.norm), change(plain.norm)
    before = calls(model)
    with torch.no_grad(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert torch.equal(model.norm(x), plain.norm(x))
    assert calls(model) == before
    assert change is patched or (len(said) == 1 and "own code" in str(said[0].message))


@pytest.mark.parametrize("ready", [False, True])
def test_gradients_autocast_and_other_arguments(ready) -> None:
    model, report = swapped()
    (row,) = report.norms
    plain = copy.deepcopy(model)
    ff.unswap(plain)
    x = torch.randn(1, 4, 48)
    if ready:
        prepared(model, x)
    before = row.calls
    y = model.norm(x)
    y.sum().backward()
    plain.norm(x).sum().backward()
    assert torch.equal(model.norm.weight.grad, plain.norm.weight.grad)
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(model.norm(x), plain.norm(x))
        assert torch.equal(model.norm(x=x), plain.norm(x))
        assert row.calls == before
        assert set(row.stepped_aside) == {"gradients are needed", "autocast is on", "called with 0 arguments and ['x']"}
        with pytest.raises(TypeError):
            model.norm(x, 1)
        with torch.inference_mode():
            model.norm(x)
    assert row.calls == before + 1
    wide = x.double()  # a dtype that the kernel does not know, and that the module does
    with torch.no_grad():
        assert torch.equal(model.norm(wide), plain.norm(wide))
    assert torch.equal(torch.func.vmap(model.norm)(x), torch.func.vmap(plain.norm)(x))
    along = torch.randn_like(x)
    with torch.no_grad():  # forward-mode derivatives pass through
        ours, expected = (torch.func.jvp(m.norm, (x,), (along,)) for m in (model, plain))
    assert torch.equal(ours[1], expected[1])
    assert expected[1].any()


def test_another_dtype_is_not_the_one_that_was_identified() -> None:
    model, report = swapped()
    plain = copy.deepcopy(model)
    ff.unswap(plain)
    x = torch.randn(1, 40, 48).bfloat16()
    with torch.no_grad(), pytest.warns(UserWarning, match="when it was identified"):
        assert torch.equal(model.norm.bfloat16()(x), plain.norm.bfloat16()(x))
    assert report.norms[0].calls == 0


class Idle(nn.Module):
    """A gated FFN that holds a norm and does not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(48, 96), nn.Linear(48, 96), nn.Linear(96, 48)
        self.norm = Rms(48)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def test_norms_inside_a_swapped_ffn_are_not_touched() -> None:
    model = nn.Sequential(Rms(48), Idle()).eval()
    report = ff.swap(model, linears="all", backend="cpu")
    assert (report.n_swapped, [row.path for row in report.norms]) == (1, ["0"])
    with torch.no_grad():
        model(torch.randn(1, 3, 48))
    assert all(row.calls == 1 and not row.stepped_aside for row in report.rows)
    assert outcome.headline(report.to_dict()) == "1 of 1 FFNs identified and swapped, 1 of 1 norms"


def test_hooks_fire_around_it() -> None:
    model, _ = swapped()
    x, seen = torch.randn(1, 4, 48), []
    prepared(model, x)
    handle = model.norm.register_forward_hook(lambda m, args, y: seen.append(y) or y * 2)
    with torch.no_grad():
        doubled = model.norm(x)
        handle.remove()
        assert torch.equal(doubled, model.norm(x) * 2)
    assert len(seen) == 1


def test_copies_and_pickles_are_swapped_and_their_own() -> None:
    model, _ = swapped()
    x = torch.randn(1, 4, 48)
    prepared(model, x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        with torch.no_grad():
            expected = model.norm(x)
            twin.norm.weight.mul_(4)
            assert torch.equal(model.norm(x), expected)
            for _ in range(3):
                assert torch.equal(twin.norm(x), expected * 4)
        assert is_swapped(twin.norm)
        assert not twin.norm._fanfold.aside
        twin.norm.some_number = 0.5
        with torch.no_grad(), pytest.warns(UserWarning, match="some_number"):
            twin.norm(x)


def test_a_compiled_model_runs_the_norms_own_code() -> None:
    model, report = swapped(format="int8")
    x = torch.randn(1, 4, 48)
    with torch.no_grad():
        expected = model(x)
        before = report.norms[0].calls
        y = torch.compile(model, backend="eager", fullgraph=True)(x)
    assert torch.allclose(y, expected, rtol=0, atol=float(expected.abs().max()) * 2**-6)  # int8 codes may turn
    assert report.norms[0].calls == before


def test_backends_and_what_is_left(monkeypatch) -> None:
    _, report = swapped(backend="torch")
    assert (report.norms[0].status, report.norms[0].reason[:13]) == ("left", "backend torch")
    model = Block(Rms(48)).eval()
    model.norm.forward = lambda x: Rms.forward(model.norm, x)
    report = ff.swap(model, linears="all")
    assert "patched" in report.norms[0].reason
    model = Block(Rms(48)).half().eval()
    (row,) = ff.swap(model, linears="all", backend="torch").norms
    assert row.status == "left"
    _, report = swapped()
    assert report.n_norms_swapped == 1
    assert not ff.swap(Block(Rms(48)).eval()).norms  # linears="ffn"
    assert not ff.swap(Block(nn.LayerNorm(48)).eval(), linears="all").norms


class Gated(Rms):
    """Mamba2's: a norm alone, as long as nobody gives it a gate."""

    def forward(self, x, gate=None):
        return super().forward(x if gate is None else x * nn.functional.silu(gate))


def test_one_that_takes_more_is_left() -> None:
    model, report = swapped(Gated)
    assert report.norms[0].reason == "its code takes gate as well"
    assert not is_swapped(model.norm)
    assert "1 norm left as found: its code takes gate" in "\n".join(outcome.reasons(report.to_dict()))


class EpsOfDtype(Rms):
    def forward(self, x: Tensor) -> Tensor:
        return in_torch(x, self.weight, torch.finfo(x.dtype).eps)


def test_an_eps_that_depends_on_the_dtype_is_left() -> None:
    model = Block(EpsOfDtype(48)).eval().bfloat16()
    assert norms.rms_norm(model.norm) == RmsNorm(48, torch.finfo(torch.float32).eps)  # identified in float32
    (row,) = ff.swap(model, linears="all", format="bf16").norms
    assert (row.status, row.reason[:43]) == ("left", "its own output is not what the description ")
    assert not is_swapped(model.norm)


def test_weights_without_memory_are_no_candidates() -> None:
    assert not norms.may_be_rms(Rms(8).to("meta"))


def test_a_named_backend_runs_or_raises() -> None:
    model, _ = swapped(backend="cpu")
    with torch.no_grad():
        model.norm(torch.randn(1, 2, 48))
        with pytest.raises(dispatch.BackendError, match="one dtype"):
            model.norm(torch.randn(1, 2, 48).bfloat16())


def test_a_wrong_kernel_is_put_back(monkeypatch) -> None:
    right = cpu.rms_norm
    monkeypatch.setattr(cpu, "rms_norm", lambda x, w, eps, offset=0.0: right(x, w, eps * 4, offset))
    model, report = swapped()
    (row,) = report.norms
    assert row.status == "left"
    assert "verification failed" in row.reason
    assert not is_swapped(model.norm)


def test_a_verification_on_its_own_code_is_none(monkeypatch) -> None:
    monkeypatch.setattr(swapped_norm.NormState, "objection", lambda *_: "torch.compile")
    model, report = swapped()
    (row,) = report.norms
    assert (row.status, row.reason) == ("left", "our kernel would not run it: torch.compile")
    assert not is_swapped(model.norm)
