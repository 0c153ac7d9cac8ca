"""Modules and uses made to turn a swap silently wrong: each must be refused, stepped aside from, or right."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

import fanfold as ff
from fanfold import numerics
from fanfold.kernels import dispatch
from fanfold.models.find import FindError
from fanfold.models.swapped import is_swapped

CLOSE = 64 * numerics.UNIT_ROUNDOFF["float32"]


class M(nn.Module):
    """down(act(up(x))), with a place for mischief before and after."""

    def __init__(self, d: int = 24, f: int = 40) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(d, f), nn.GELU(), nn.Linear(f, d)

    def before(self, x):
        return x

    def after(self, x, y):
        return y

    def forward(self, x):
        return self.after(x, self.down(self.act(self.up(self.before(x)))))


class Adapter(M):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(24, 4)), nn.Parameter(torch.zeros(4, 24))

    def after(self, x, y):
        return y + x @ self.a @ self.b


class LayerScale(M):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(24))

    def after(self, x, y):
        return y * self.gamma


class BufferScale(M):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(1.0))

    def after(self, x, y):
        return y * self.scale


class LoraLinear(nn.Linear):
    def __init__(self, d: int = 24, f: int = 40) -> None:
        super().__init__(d, f)
        self.a, self.b = nn.Parameter(torch.randn(d, 4)), nn.Parameter(torch.zeros(4, f))

    def forward(self, x):
        return super().forward(x) + x @ self.a @ self.b


class WithLora(M):
    def __init__(self) -> None:
        super().__init__()
        self.up = LoraLinear()


class BatchMix(M):
    def after(self, x, y):
        return y + y.roll(1, 0) if y.dim() == 3 and y.shape[0] > 1 else y


class LongBranch(M):
    def after(self, x, y):
        return 0.5 * y if x.shape[-2] > 64 else y


class Masks(M):
    def after(self, x, y):
        return y * (x[..., :1] != 0)


class NanToNum(M):
    def before(self, x):
        return torch.nan_to_num(x)


class InPlace(M):
    def after(self, x, y):
        return x.copy_(y)


class Counts(M):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def after(self, x, y):
        self.seen += 1
        return y


class FarClamp(M):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Identity()

    def forward(self, x):
        return self.down(F.relu(self.up(x)).clamp(max=200.0))


class LearnedSlope(M):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.PReLU(init=0.01)


@pytest.mark.parametrize(
    "kind",
    [
        Adapter,
        LayerScale,
        BufferScale,
        WithLora,
        BatchMix,
        LongBranch,
        Masks,
        NanToNum,
        InPlace,
        Counts,
        FarClamp,
        LearnedSlope,
    ],
)
def test_what_the_experiment_must_see(kind) -> None:
    module = kind().eval()
    try:
        report = ff.swap(module)
    except FindError:  # it mixes tokens: no FFN at all
        return
    assert report.n_swapped == 0, str(report)
    assert report.rows[0].reason
    assert not is_swapped(module)


def _set(path: str, value):
    def change(m: nn.Module) -> None:
        owner, _, name = path.rpartition(".")
        setattr(m.get_submodule(owner), name, value)

    return change


class Deep(M):
    """An activation two levels down, with a dropout, and attributes that the code reads."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Sequential(nn.LeakyReLU(0.2))
        self.drop = nn.Dropout(0.5)
        self._private = torch.relu
        self.width = 1000

    def after(self, x, y):
        return self.drop(y)


CHANGES = {
    "slope of a grandchild": lambda m: setattr(m.act[0], "negative_slope", 0.5),
    "grandchild exchanged": lambda m: m.act.__setitem__(0, nn.ReLU()),
    "hook on a grandchild": lambda m: m.act[0].register_forward_hook(lambda mod, a, y: 2 * y),
    "dropout of an eval model": lambda m: m.drop.train(),
    "private attribute": _set("_private", torch.tanh),
    "class patched": None,
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_below_the_module_are_noticed(name, monkeypatch) -> None:
    module = Deep().eval()
    report = ff.swap(module)
    assert report.n_swapped == 1, str(report)
    x = torch.randn(1, 5, 24)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            module(x)
        assert report.rows[0].calls == 3
        if name == "class patched":
            monkeypatch.setattr(Deep, "forward", lambda self, x: 7 * x)
        else:
            CHANGES[name](module)
        torch.manual_seed(1)
        y = module(x)
        torch.manual_seed(1)
        assert torch.equal(y, module._fanfold_original.forward(module, x))
    assert report.rows[0].calls == 3


def test_an_attribute_that_did_not_change_survives_pickling() -> None:
    import pickle

    module = pickle.loads(pickle.dumps(_swapped(M())))
    x = torch.randn(1, 5, 24)
    with torch.no_grad():
        module(x)
    assert module._fanfold.calls == 1


def _swapped(module: nn.Module) -> nn.Module:
    module.eval()
    assert ff.swap(module).n_swapped == 1
    return module


def _pair():
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Bilinear(24, 24, 24)
            self.fc1, self.fc2 = nn.Linear(24, 40), nn.Linear(40, 24)

        def forward(self, x):
            return self.fc2(F.gelu(self.fc1(x + self.mix(x, x))))

    layer = Layer().eval()
    assert ff.swap(layer, inputs=torch.randn(1, 3, 24)).n_swapped == 1
    return layer


def test_pruning_and_weight_norm_of_a_swapped_linear() -> None:
    from torch.nn.utils import parametrizations, prune

    x = torch.randn(1, 3, 24)
    for change in (
        lambda m: prune.l1_unstructured(m.fc1, "weight", 0.5),
        lambda m: parametrizations.weight_norm(m.fc1),
    ):
        layer = _pair()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            layer(x)
            change(layer)
            for _ in range(3):
                torch.empty(10000).fill_(1e6)  # so that freed memory would show
                expected = F.linear(F.gelu(F.linear(x + layer.mix(x, x), layer.fc1.weight, layer.fc1.bias)),
                                    layer.fc2.weight, layer.fc2.bias)  # fmt: skip
                assert numerics.relative_error(layer(x), expected) < CLOSE


def test_shapes_that_left_the_spec() -> None:
    x = torch.randn(3, 24)
    spec = ff.Spec(d_model=24, d_ff=40, activation="gelu_erf", up_bias=True, down_bias=True)
    for name, value in (("up_proj", nn.Linear(24, 20)), ("down_proj", nn.Linear(40, 2))):
        module = ff.nn.FeedForward(spec, backend="cpu")
        setattr(module, name, value)
        with torch.no_grad(), pytest.raises(ValueError, match="shapes of their spec"):
            module(x)


def test_memory_that_is_gone() -> None:
    module = _swapped(M())
    x = torch.randn(1, 3, 24)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            module(x)
        module.up.weight.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError):
            module(x)
    module = _swapped(M())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            module(x)
        x.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError):
            module(x)


def test_a_default_device_does_not_move_the_output() -> None:
    module = ff.nn.FeedForward(ff.Spec(d_model=24, d_ff=40, activation="relu"), backend="cpu").requires_grad_(False)
    x = torch.randn(3, 4, 24).transpose(0, 1)
    with torch.device("meta"):
        assert module(x).device.type == "cpu"
        assert _pair is not None


def test_tracing_and_transforms_see_the_work() -> None:
    x, other = torch.randn(3, 24), torch.randn(3, 24)
    module = _swapped(M()).requires_grad_(False)
    own = ff.nn.FeedForward(ff.Spec(d_model=24, d_ff=40, activation="gelu_erf")).requires_grad_(False)
    for m in (module, own):
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(2):
                m(x)
            want = m(other)
            traced = torch.jit.trace(m, (x,), check_trace=False)
            assert numerics.relative_error(traced(other), want) < CLOSE
            graph = torch.fx.experimental.proxy_tensor.make_fx(m)(x)
            assert numerics.relative_error(graph(other), want) < CLOSE
            assert numerics.relative_error(torch.func.vmap(m)(other[None])[0], want) < CLOSE
            assert numerics.relative_error(torch.func.functionalize(m)(other), want) < CLOSE
            _, tangent = torch.func.jvp(m, (x,), (other,))
            with forward_ad.dual_level():
                dual = forward_ad.unpack_dual(m(forward_ad.make_dual(x, other)))
            assert dual.tangent is not None
            assert numerics.relative_error(dual.tangent, tangent) < CLOSE


def test_double_backward_has_its_second_order_term() -> None:
    spec = ff.Spec.parse("swiglu", d_model=24, d_ff=40)
    weights = numerics.random_weights(spec, 0, lambda a: torch.tensor(a, dtype=torch.float32))
    grads = []
    for backend in ("cpu", "torch"):
        m = ff.nn.FeedForward.from_weights(weights, backend=backend)
        x = torch.linspace(-1, 1, 72).view(3, 24).requires_grad_()
        (g,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        (m(x).square().sum() + 10 * g.square().sum()).backward()
        grads.append(m.up_proj.weight.grad)
    assert numerics.relative_error(*grads) < CLOSE


def test_mixed_dtypes_with_gradients_are_refused_at_once() -> None:
    m = ff.nn.FeedForward(ff.Spec(d_model=24, d_ff=40, activation="relu"), backend="cpu")
    with pytest.raises(dispatch.BackendError, match="one dtype"):
        m(torch.randn(3, 24).bfloat16())


def test_a_linear_subclass_in_feedforward_is_called() -> None:
    m = ff.nn.FeedForward(ff.Spec(d_model=24, d_ff=40, activation="relu")).requires_grad_(False)
    m.up_proj = LoraLinear()
    nn.init.ones_(m.up_proj.b)
    x = torch.randn(3, 24)
    expected = m.down_proj(torch.relu(m.up_proj(x)))
    assert numerics.relative_error(m(x), expected) < CLOSE


def test_calls_by_keyword() -> None:
    x = torch.randn(1, 3, 24)
    for format in (None, "bf16"):
        module = M().eval()
        ff.swap(module, format=format)
        with torch.no_grad():
            assert numerics.relative_error(module(x=x), module(x)) < CLOSE
            if format:
                assert module.up(input=x).shape == (1, 3, 40)


def test_a_failing_swap_leaves_nothing_swapped(monkeypatch) -> None:
    from fanfold.models import swap as swap_module

    model = nn.ModuleDict({"a": M(), "b": M()}).eval()
    real, count = swap_module._install, []

    def fail_at_the_second(*args):
        count.append(1)
        if len(count) == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(swap_module, "_install", fail_at_the_second)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(KeyboardInterrupt):
        ff.swap(model, format="bf16", keep_originals=True)
    assert not any(map(is_swapped, model.modules()))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_swapping_touches_neither_hooks_nor_the_random_state(monkeypatch) -> None:
    from fanfold.models import choose

    monkeypatch.setattr(choose, "worth_measuring", lambda n: True)
    module = M().eval()
    seen = []
    module.register_forward_hook(lambda *a: seen.append(1))
    module.up.register_forward_hook(lambda *a: seen.append(1))
    state = torch.get_rng_state()
    ff.swap(module)
    assert torch.equal(torch.get_rng_state(), state)
    assert not seen
    with (
        torch.no_grad(),
        pytest.warns(UserWarning, match="up has a hook") if is_swapped(module) else warnings.catch_warnings(),
    ):
        module(torch.randn(1, 3, 24))
    assert len(seen) == 2


def test_weights_that_are_not_finite_are_not_verified() -> None:
    module = M().eval()
    with torch.no_grad():
        module.up.weight[3, 4] = torch.nan
    report = ff.swap(module)
    assert report.n_swapped == 0
    assert "not finite" in report.rows[0].reason


def test_unswap_says_what_it_gives_back() -> None:
    module = M().eval()
    ff.swap(module, format="bf16", keep_originals=True)
    with torch.no_grad():
        module.load_state_dict({k: torch.ones_like(v) for k, v in module.state_dict().items()})
    with pytest.warns(UserWarning, match="changed after the swap"):
        notes = ff.unswap(module)
    assert notes
    assert module.up.weight.eq(1).all()
    module = M().eval()
    ff.swap(module, format="bf16")
    module.float()
    with pytest.warns(UserWarning, match="fanfold: up: the weights"):
        assert ff.unswap(module)


def test_what_is_no_module() -> None:
    for call in (ff.find, ff.swap):
        with pytest.raises(ValueError, match=r"model is a str, expected a torch\.nn\.Module"):
            call("llama")
    with pytest.raises(ValueError, match="spec is a int, expected a Spec"):
        ff.nn.FeedForward(64, 172)  # type: ignore[arg-type]


def test_the_printed_report_tells_of_own_code() -> None:
    module = M().eval()
    report = ff.swap(module)
    for _ in range(2):
        module(torch.randn(1, 3, 24))
    assert "own code 2x: gradients are needed" in str(report)


def test_a_named_format_that_is_not_kept_gives_the_very_weights_back(monkeypatch) -> None:
    """Left by the verification, or rolled back: rounding must not stay behind without a word."""
    from fanfold.kernels import packed
    from fanfold.models import swap as swap_module

    module = M().eval()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    real = packed.forward
    with monkeypatch.context() as patch:
        patch.setattr(packed, "forward", lambda x, w: torch.zeros_like(real(x, w)))
        patch.setattr(packed, "prepare", lambda x, w: None)
        report = ff.swap(module, format="bf16")
    assert "verification failed" in report.rows[0].reason
    assert all(v.dtype == torch.float32 and torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert module.up.weight.requires_grad
    with torch.no_grad():
        module.up.weight[0, 0] = torch.nan
    ff.swap(module, format="bf16")
    assert torch.equal(module.down.weight, before["down.weight"])

    model = nn.ModuleDict({"a": M(), "b": M()}).eval()
    install, count = swap_module._install, []

    def fail_at_the_second(*args):
        count.append(1)
        if len(count) == 2:
            raise KeyboardInterrupt
        return install(*args)

    monkeypatch.setattr(swap_module, "_install", fail_at_the_second)
    with (
        pytest.raises(KeyboardInterrupt),
        pytest.warns(UserWarning, match="a.up: the weights are now the ones rounded"),
    ):
        ff.swap(model, format="bf16")


def test_a_scale_that_is_a_tensor_is_not_a_description() -> None:
    (found,) = ff.find(BufferScale().eval())
    assert found.status == "unidentified"
    assert "parameter or buffer" in found.reason


def test_a_wrong_description_is_caught_by_the_verification() -> None:
    """`found` from elsewhere: the kernel computes it faithfully, but the module does not."""
    import dataclasses

    module = M().eval()
    (found,) = ff.find(module)
    for fields in ({"spec": dataclasses.replace(found.spec, activation="gelu_tanh")}, {"scale": 1.01}):
        report = ff.swap(module, found=[dataclasses.replace(found, **fields)])
        assert report.n_swapped == 0
        assert "not what the description says" in report.rows[0].reason
    assert ff.swap(module, found=[found]).n_swapped == 1
