"""`memory.edit` against the same change made in the weights of a copy, and what it must leave alone."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import fanfold as ff
from families import FAMILIES, build, inputs, logits
from fanfold.kernels.torch import coefficients
from fanfold.memory.anatomy import Anatomy, anatomy
from fanfold.memory.changes import Value, fixed
from fanfold.memory.edit import edit
from fanfold.memory.layers import Layer
from fanfold.models.find import Found
from fanfold.models.linears import is_conv1d
from fanfold.numerics import compare, relative_error

BY_NAME = {family.name: family for family in FAMILIES}
READERS = [f for f in FAMILIES if f.name != "vit"]


@pytest.fixture(scope="module")
def llama() -> tuple[nn.Module, Anatomy]:
    model = build(BY_NAME["llama"])
    return model, anatomy(model)


def column(model: nn.Module, found: Found, channel: int) -> Tensor:
    """A view of one channel's value in the model's own memory."""
    down: Any = model.get_submodule(found.projections["down"])
    return down.weight.data[channel] if is_conv1d(down) else down.weight.data[:, channel]


def changed(model: nn.Module, shape: Anatomy, columns: dict[tuple[int, int], Any]) -> nn.Module:
    """A copy with values exchanged: (layer, channel) -> function of the old column."""
    twin = copy.deepcopy(model)
    for (layer, channel), new in columns.items():
        value = column(twin, shape.layers[layer].found, channel)
        value.copy_(new(value.clone()))
    return twin


def hooks(model: nn.Module) -> list[Any]:
    names = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
    return [(path, name, dict(getattr(m, name))) for path, m in model.named_modules() for name in names]


def same_bits(a: Tensor, b: Tensor) -> bool:
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


@torch.no_grad()
def run(model: nn.Module, seed: int = 0) -> Tensor:
    return logits(model, inputs(model, tokens=9 + seed))


def active(model: nn.Module, shape: Anatomy, layer: int, n: int) -> list[int]:
    """n channels that are not silent on the inputs of `run`, in no order (of ReLU's, half are)."""
    down = model.get_submodule(shape.layers[layer].found.projections["down"])
    reads: list[Tensor] = []
    handle = down.register_forward_pre_hook(lambda _m, args: reads.append(args[0]))
    run(model)
    handle.remove()
    size = reads[0].abs().flatten(0, -2).mean(0)
    chosen = size.topk(2 * n).indices[torch.randperm(2 * n, generator=torch.Generator().manual_seed(0))]
    return chosen[:n].tolist()


def truly(layer: Layer, x: Tensor) -> Tensor:
    """The coefficients of every channel, in float64."""
    w = {name: t.double() for name, t in layer.weights().items()}
    up = x.double() @ w["up"].T + w.get("up_bias", 0)
    gate = x.double() @ w["gate"].T + w.get("gate_bias", 0) if "gate" in w else None
    return coefficients(layer.spec, up, gate)


def vector(size: int, seed: int = 1) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


# ---- right: the same as in the weights of a copy ----


@pytest.mark.parametrize("family", READERS, ids=lambda f: f.name)
def test_an_edit_is_the_same_change_in_the_weights(family):
    """Silenced, doubled, scaled by a function, another value: every kind of change, all at once and in two layers."""
    model = build(family)
    shape = anatomy(model)
    d, last = shape.d_model, len(shape.layers) - 1
    new = vector(d)
    a, b, c, e, f, g = active(model, shape, 0, 6)
    h, i, j = active(model, shape, last, 3)
    changes = {
        (0, a): 0.0,
        (0, (b, c)): 2.0,
        (0, e): lambda m: 3 * m,
        (0, (f, g)): lambda m: 3 * m,
        (last, h): Value(new, scale=-0.5),
        (last, i): Value(new.flip(0)),
        (last, j): lambda m: m - 2 * m,
    }
    columns = {
        (0, a): lambda v: v * 0,
        **{(0, channel): (lambda v: 2 * v) for channel in (b, c)},
        **{(0, channel): (lambda v: 3 * v) for channel in (e, f, g)},
        (last, h): lambda v: -0.5 * new,
        (last, i): lambda v: new.flip(0),
        (last, j): lambda v: -v,
    }
    before, kept = run(model), copy.deepcopy(model.state_dict())
    twin = changed(model, shape, columns)
    truth, like = run(copy.deepcopy(twin).double()), run(twin)
    bare = hooks(model)
    with edit(model, changes, anatomy=shape):
        got = run(model)
    assert compare(got, truth, like), compare(got, truth, like)
    assert not compare(before, truth, like)
    for missing in columns:  # each of them shows: an edit that forgets one fails the same comparison
        almost = run(changed(model, shape, {k: f for k, f in columns.items() if k != missing}))
        assert not compare(almost, truth, like), missing
    assert same_bits(run(model), before)
    assert hooks(model) == bare
    assert all(torch.equal(kept[name], t) for name, t in model.state_dict().items())


def test_images_too():
    model = build(BY_NAME["vit"])
    shape = anatomy(model)
    twin = changed(model, shape, {(1, 4): lambda v: 0 * v})
    with edit(model, {(1, 4): 0}, anatomy=shape):
        got = run(model)
    assert compare(got, run(copy.deepcopy(twin).double()), run(twin))
    assert not compare(run(model), run(copy.deepcopy(twin).double()), run(twin))


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "bert"])
def test_functions_get_the_true_coefficients(name):
    """m itself, also of tokens apart: what a function is given is float64's coefficient."""
    family = BY_NAME[name]
    model = build(family)
    shape = anatomy(model)
    seen: dict[str, Tensor] = {}

    def look(m: Tensor) -> Tensor:
        seen["m"] = m.clone()
        return m.zero_()  # what it is given may be written to

    layer, channels = shape.layers[1], (7, 2)
    reads: dict[str, Tensor] = {}
    first = next(p for role, p in layer.found.projections.items() if role != "down")
    handle = model.get_submodule(first).register_forward_pre_hook(lambda _m, a: reads.update(x=a[0]))
    with edit(model, {(1, channels): look}, anatomy=shape):
        got = run(model)
    handle.remove()
    m = truly(layer, reads["x"])[..., channels]
    assert relative_error(seen["m"], m) < 4e-7
    assert seen["m"].shape == m.shape
    twin = changed(model, shape, {(1, c): (lambda v: 0 * v) for c in channels})
    assert compare(got, run(copy.deepcopy(twin).double()), run(twin))


def test_one_token_alone(llama):
    """A function may change one token's coefficient; the tokens before it, which attention cannot see it from, stay."""
    model, shape = llama
    before = run(model)

    def fourth(m: Tensor) -> Tensor:
        m[:, 4] = 5.0
        return m

    with edit(model, {(0, 9): fourth}, anatomy=shape):
        got = run(model)
    assert same_bits(got[:, :4], before[:, :4])
    assert bool((got[:, 4:] != before[:, 4:]).any(-1).all())
    with edit(model, {(0, 9): fixed(5.0)}, anatomy=shape):
        everywhere = run(model)
    assert not torch.equal(everywhere[:, 0], before[:, 0])


@pytest.mark.parametrize("name", ["llama_bias", "gpt2", "opt", "bert", "gemma2"])
def test_added_vectors(name):
    """A constant is a bias of down; a function of x is one more channel."""
    model = build(BY_NAME[name])
    shape = anatomy(model)
    d, layer = shape.d_model, shape.layers[1]
    new, key = vector(d), vector(d, 2) / 5
    twin = copy.deepcopy(model)
    down: Any = twin.get_submodule(layer.found.projections["down"])
    if down.bias is None:
        down.bias = nn.Parameter(torch.zeros(d))
    down.bias.data += 1.5 * new
    with edit(model, {}, add=[(1, 1.5, new)], anatomy=shape):
        got = run(model)
    assert compare(got, run(copy.deepcopy(twin).double()), run(twin))
    assert not compare(run(model), run(copy.deepcopy(twin).double()), run(twin))
    with edit(model, {}, add=[(1, torch.tensor([1.5]), new)], anatomy=shape):
        assert torch.equal(run(model), got)

    outputs: dict[str, Tensor] = {}
    path = layer.path if layer.found.kind == "module" else layer.found.projections["down"]
    first = next(p for role, p in layer.found.projections.items() if role != "down")
    model.get_submodule(first).register_forward_pre_hook(lambda _m, a: outputs.update(x=a[0]))
    model.get_submodule(path).register_forward_hook(lambda _m, _a, y: outputs.update(y=y))
    with edit(model, {}, add=[(1, lambda x: (x @ key).relu(), new)], anatomy=shape):
        model.get_submodule(path).register_forward_hook(lambda _m, _a, y: outputs.update(changed=y))
        run(model)
    truth = outputs["y"].double() + (outputs["x"].double() @ key.double()).relu()[..., None] * new.double()
    assert relative_error(outputs["changed"], truth) < 4e-7


# ---- what it leaves alone ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "gemma2", "t5"])
def test_what_changes_nothing_keeps_every_bit(name, dtype):
    model = build(BY_NAME[name]).to(dtype)
    shape = anatomy(model)
    before = run(model)
    own = shape.layers[0].weights().down[:, 6].clone()
    with edit(model, {(0, (1, 2)): 1.0, (0, 3): lambda m: m, (0, 6): Value(own)}, anatomy=shape):
        assert same_bits(run(model), before)
    with edit(model, {}, add=[(1, 0.0, vector(shape.d_model))], anatomy=shape):
        assert same_bits(run(model), before)


class Negated(nn.Module):
    """An FFN times -1: where down's row is 0, it gives -0."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6, bias=False)
        self.down.weight.data[2] = 0

    def forward(self, x: Tensor) -> Tensor:
        return -1.0 * self.down(torch.relu(self.up(x)))


def test_signs_of_zeros_and_constant_factors():
    """A factor on the module's output belongs to the values."""
    torch.manual_seed(0)
    module, x = Negated().eval(), torch.randn(4, 6)
    shape = anatomy(module, inputs=x)
    twin = copy.deepcopy(module)
    twin.down.weight.data[:, 3] *= 2
    assert abs(shape.layers[0].found.scale + 1) < 1e-6
    with torch.no_grad():
        before = module(x)
        assert bool(before[:, 2].signbit().all())
        with edit(module, {(0, 3): 1.0, (0, 4): lambda m: m}, anatomy=shape):
            assert same_bits(module(x), before)
        with edit(module, {(0, 3): 2.0}, anatomy=shape):
            assert relative_error(module(x), twin(x)) < 1e-6


@pytest.mark.parametrize("name", ["llama", "opt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_difference_is_added_with_one_rounding(name, dtype):
    """y' is the nearest number of y's dtype to y + Δ, with Δ from float64: so no other channel was touched."""
    model = build(BY_NAME[name]).to(dtype)
    shape = anatomy(model)
    layer = shape.layers[1]
    path = layer.path if layer.found.kind == "module" else layer.found.projections["down"]
    reads, writes = {}, {}
    first = next(p for role, p in layer.found.projections.items() if role != "down")
    a = model.get_submodule(first).register_forward_pre_hook(lambda _m, args: reads.update(x=args[0]))
    b = model.get_submodule(path).register_forward_hook(lambda _m, _a, y: writes.update(y=y))
    down = model.get_submodule(layer.found.projections["down"])
    c = down.register_forward_pre_hook(lambda _m, args: reads.update(m=args[0]))
    with edit(model, {(1, 5): 0.25, (1, 30): fixed(-1.0)}, anatomy=shape):
        d = model.get_submodule(path).register_forward_hook(lambda _m, _a, y: writes.update(edited=y))
        run(model)
    for handle in (a, b, c, d):
        handle.remove()
    v = layer.weights().down.double()
    m = reads["m"].double() if layer.found.kind == "pair" else truly(layer, reads["x"])
    delta = -0.75 * m[..., 5, None] * v[:, 5] + (-1 - m[..., 30, None]) * v[:, 30]
    truth = writes["y"].double() + delta
    off = (writes["edited"].double() - truth).abs()
    assert writes["edited"].dtype == dtype
    assert bool((off <= torch.finfo(dtype).eps / 2 * truth.abs() + 1e-6).all())
    assert bool((off > torch.finfo(dtype).eps / 8 * truth.abs()).any())  # as it would not be in a wider dtype


def test_slices_and_groups_are_channels(llama):
    model, shape = llama
    with edit(model, {(0, range(8, 16)): 0.0}, anatomy=shape):
        one = run(model)
    for changes in (
        [((0, slice(8, 16)), 0.0)],
        {(0, tuple(range(8, 16))): 0.0},
        [((0, np.arange(8, 16)), 0)],
        [((0, torch.arange(8, 16)), torch.tensor(0.0))],
        {(0, c): 0.0 for c in range(8, 16)},
        {(np.int64(0), np.int32(c)): np.float32(0.0) for c in range(8, 16)},
    ):
        with edit(model, changes, anatomy=shape):  # type: ignore[arg-type]
            assert torch.equal(run(model), one)
    with edit(model, [((0, slice(None)), 0.0)], anatomy=shape):
        nothing = run(model)
    down = model.get_submodule(shape.layers[0].found.projections["down"])
    twin = copy.deepcopy(model)
    twin.get_submodule(shape.layers[0].found.projections["down"]).weight.data.zero_()  # type: ignore[union-attr]
    assert down.weight.any()  # type: ignore[union-attr]
    assert relative_error(nothing, run(twin)) < 1e-5


# ---- on top of each other, and undone ----


def test_edits_nest(llama):
    """An inner edit takes what the outer one gives; in whatever order they end."""
    model, shape = llama
    new, bare = vector(shape.d_model), copy.deepcopy(model)

    def equals(twin_columns: dict[tuple[int, int], Any]) -> None:
        twin = changed(bare, shape, twin_columns)
        assert relative_error(run(model), run(twin)) < 1e-6

    before = run(model)
    with edit(model, {(1, 4): 2.0}, anatomy=shape):
        once = run(model)
        with edit(model, {(1, 4): 3.0, (0, 2): 0.0}, anatomy=shape):
            equals({(1, 4): lambda v: 6 * v, (0, 2): lambda v: 0 * v})
            with edit(model, {(1, 4): Value(new)}, anatomy=shape):
                equals({(1, 4): lambda v: 6 * new, (0, 2): lambda v: 0 * v})
        assert same_bits(run(model), once)
    with edit(model, {(1, 4): fixed(3.0)}, anatomy=shape):  # the order counts
        with edit(model, {(1, 4): 2.0}, anatomy=shape):
            twice = run(model)
        with edit(model, {(1, 4): lambda m: 0 * m + 6.0}, anatomy=shape):
            assert same_bits(run(model), twice)
        assert not torch.equal(run(model), twice)
    with edit(model, {(1, 4): 0.0}, anatomy=shape), edit(model, {(1, 4): 0.0}, anatomy=shape):
        equals({(1, 4): lambda v: 0 * v})
    first, second = edit(model, {(1, 4): 2.0}, anatomy=shape), edit(model, {(1, 4): 3.0, (1, 5): 0.0}, anatomy=shape)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    equals({(1, 4): lambda v: 3 * v, (1, 5): lambda v: 0 * v})
    second.__exit__(None, None, None)
    assert same_bits(run(model), before)


def test_an_edit_can_be_used_again_but_not_entered_twice(llama):
    model, shape = llama
    bare, before = hooks(model), run(model)
    e = edit(model, {(0, 1): 5.0}, anatomy=shape)
    with e:
        inside = run(model)
        with pytest.raises(ValueError, match="active already"), e:
            pass
        assert same_bits(run(model), inside)
    assert hooks(model) == bare
    with e:
        assert same_bits(run(model), inside)
    assert same_bits(run(model), before)
    e.__exit__(None, None, None)  # nothing left to end
    assert hooks(model) == bare


def test_everything_is_restored_after_an_exception(llama, monkeypatch):
    model, shape = llama
    bare, before = hooks(model), run(model)
    with pytest.raises(ZeroDivisionError), edit(model, {(0, 1): 0.0}, anatomy=shape):
        raise ZeroDivisionError
    assert hooks(model) == bare

    def fails(m: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), edit(model, {(1, 1): fails, (0, 1): 0.0}, anatomy=shape):
        run(model)
    assert hooks(model) == bare
    weights = Layer.weights
    monkeypatch.setattr(Layer, "weights", lambda self: 1 / (1 - self.index) and weights(self))
    e = edit(model, {(0, 1): 0.0, (1, 1): 0.0}, anatomy=shape)
    with pytest.raises(ZeroDivisionError), e:  # the second layer cannot be read
        pass
    monkeypatch.undo()
    assert hooks(model) == bare
    with e:
        assert not torch.equal(run(model), before)
    assert same_bits(run(model), before)


def test_a_copy_of_an_edited_model_is_freed_with_it(llama):
    model, shape = llama
    before = run(model)
    with edit(model, {(0, 1): 9.0}, anatomy=shape):
        twin = copy.deepcopy(model)
        assert not torch.equal(run(twin), before)
    assert same_bits(run(twin), before)


# ---- generation ----


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_generation_with_a_cache(name):
    """Greedy text, one prompt and a padded batch, is that of a model whose columns are exchanged."""
    model = build(BY_NAME[name])
    shape = anatomy(model)
    new = 6 * vector(shape.d_model)
    twin = changed(model, shape, {(0, 3): lambda v: 0 * v, (1, 2): lambda v: new})
    ids = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    before = model.generate(ids, attention_mask=mask, **options)  # type: ignore[operator]
    with edit(model, {(0, 3): 0.0, (1, 2): Value(new)}, anatomy=shape):
        got = model.generate(ids, attention_mask=mask, **options)  # type: ignore[operator]
        alone = model.generate(ids[:1], attention_mask=mask[:1], **options)  # type: ignore[operator]
    assert torch.equal(got, twin.generate(ids, attention_mask=mask, **options))  # type: ignore[operator]
    assert torch.equal(alone[0], got[0])
    assert not torch.equal(got, before)
    assert torch.equal(model.generate(ids, attention_mask=mask, **options), before)  # type: ignore[operator]


def test_layers_that_share_their_weights():
    """One of four calls of one module is edited, not all of them."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = tf.AlbertModel(tf.AlbertConfig(vocab_size=64, embedding_size=16, **sizes)).eval()
    shape = anatomy(model)
    assert [layer.call for layer in shape.layers] == [0, 1, 2, 3]
    ids = torch.arange(12).reshape(2, 6)

    def states() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return model(input_ids=ids, output_hidden_states=True).hidden_states

    fails: list[int] = []

    def fail(*_: Any) -> None:
        if fails and not (fails.append(fails.pop() - 1) or fails[0]):
            raise ArithmeticError

    before = states()
    model.get_submodule(shape.layers[0].block).register_forward_pre_hook(fail)
    for edited in range(4):
        with edit(model, {(edited, slice_): 0.0 for slice_ in range(48)}, anatomy=shape):
            for _ in range(2):  # counted from each run's beginning
                after = states()
                same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
                assert same == [i <= edited for i in range(5)]
                fails.append(2)
                with pytest.raises(ArithmeticError):  # a run that ends half way counts for nothing
                    states()
                fails.clear()


# ---- our kernels, other dtypes, compiled code, gradients ----


@pytest.mark.filterwarnings("ignore:fanfold. .* the weights are now the ones")
@pytest.mark.parametrize("format", [None, "fp32", "bf16", "int8_g32"])
@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2", "opt", "bert"])
def test_swapped_models(name, format):
    """The kernels stay on, and the edit is that of the weights they hold."""
    model = build(BY_NAME[name])
    report = ff.swap(model, format=format, backend="cpu", found=ff.find(model))
    rows = [row for row in report.rows if row.status == "swapped"]
    assert len(rows) == 2, report
    shape = anatomy(model)
    before = run(model)
    bare = hooks(model)
    for row in rows:
        for state in row.states:
            state.calls = 0
    with edit(model, {(0, 3): 0.0, (1, 7): -2.0}, anatomy=shape) as e:
        got = run(model)
        again = run(model)
    assert sum(state.calls for row in rows for state in row.states) >= 2 * len(rows)
    assert not any(state.aside for row in rows for state in row.states)
    assert (len(e.notes), hooks(model)) == (2 if format == "int8_g32" else 0, bare)
    assert same_bits(got, again)
    assert same_bits(run(model), before)
    ff.unswap(model)  # the rounded weights, in float32
    twin = changed(model, shape, {(0, 3): lambda v: 0 * v, (1, 7): lambda v: -2 * v})
    kernels = relative_error(before, run(model))  # those of int8 round x and m too
    assert relative_error(got, run(twin)) < max(2 * kernels, 1e-6), kernels
    assert relative_error(before, run(twin)) > 5 * relative_error(got, run(twin))


def test_swapped_while_edited_and_back(llama):
    """Swapping inside an edit, or ending it after the swap: one has nothing to do with the other."""
    model = build(BY_NAME["llama"])
    shape = anatomy(model)
    with edit(model, {(0, 3): 0.0}, anatomy=shape):
        want = run(model)
        ff.swap(model, backend="cpu")
        got = run(model)
        ff.unswap(model)
        assert same_bits(run(model), want)
    assert relative_error(got, want) < 1e-5


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_bfloat16(name):
    """Beside the copy in bfloat16: no further from float64 than twice its error, as the tolerance rule has it."""
    family = BY_NAME[name]
    model = build(family).bfloat16()
    shape = anatomy(model)
    columns = {(0, 3): lambda v: 0 * v, (1, 7): lambda v: -2 * v}
    twin = changed(model, shape, columns)
    with edit(model, {(0, 3): 0.0, (1, 7): -2.0}, anatomy=shape):
        got = run(model)
    truth = run(copy.deepcopy(twin).double())
    assert got.dtype == torch.bfloat16
    assert compare(got, truth, run(twin))


def test_autocast_does_not_reach_the_difference(llama):
    model, shape = llama
    new = vector(shape.d_model)
    seen: list[torch.dtype] = []

    def look(m: Tensor) -> Tensor:
        seen.append(m.dtype)
        return m * 0

    with torch.autocast("cpu", dtype=torch.bfloat16), edit(model, {(0, 3): look, (1, 2): Value(new)}, anatomy=shape):
        got = run(model)
    assert seen == [torch.float32]
    twin = changed(model, shape, {(0, 3): lambda v: 0 * v, (1, 2): lambda v: new})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compare(got, run(twin), run(twin), dtype=torch.bfloat16) or relative_error(got, run(twin)) < 0.02


@pytest.mark.parametrize("how", ["module", "function", "in place"])
def test_compiled_code_sees_the_edit_begin_and_end(how):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)) for _ in range(2))).eval()
    x = torch.randn(4, 6)
    shape = anatomy(model, inputs=x)
    twin = changed(model, shape, {(0, 3): lambda v: 0 * v, (1, 7): lambda v: 2 * v})
    if how == "in place":
        model.compile(backend="eager")
        call: Any = model
    else:
        call = torch.compile(model if how == "module" else lambda x: model(x), backend="eager")
    with torch.no_grad():
        before = call(x)
        with edit(model, {(0, 3): 0.0, (1, 7): lambda m: 2 * m}, anatomy=shape):
            got = call(x)
        after = call(x)
    torch.compiler.reset()
    assert relative_error(got, twin(x)) < 1e-6
    assert torch.equal(before, after)
    assert relative_error(before, twin(x)) > 1e-3


def test_gradients_reach_the_input():
    model = build(BY_NAME["llama"])
    shape = anatomy(model)
    twin = changed(model, shape, {(0, 3): lambda v: 0 * v, (1, 7): lambda v: 2 * v})
    x = model.get_input_embeddings()(inputs(model)["input_ids"]).detach()  # type: ignore[operator]

    def gradient(m: nn.Module) -> Tensor:
        leaf = x.clone().requires_grad_()
        (out,) = torch.autograd.grad(m(inputs_embeds=leaf).logits.square().sum(), leaf)
        return out

    plain = gradient(model)
    with edit(model, {(0, 3): 0.0, (1, 7): 2.0}, anatomy=shape):
        got = gradient(model)
    assert relative_error(got, gradient(twin)) < 1e-5
    assert relative_error(plain, gradient(twin)) > 1e-3


# ---- refused ----


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({(2, 0): 0.0}, "layer 2 is not in the model: its FFN layers are 0 to 1"),
        ({(-1, 0): 0.0}, "layer -1 is not in the model: its FFN layers are 0 to 1"),
        ({(0, 56): 0.0}, "channel 56 is not in layer 0: its channels are 0 to 55"),
        ({(0, (1, -1)): 0.0}, "channel -1 is not in layer 0: its channels are 0 to 55"),
        ({(0, 1): 0.0, (0, (1, 2)): 2.0}, "channel 0:1 is changed twice: give each channel one change"),
        ({(0, (4, 4)): 0.0}, "channel 0:4 is changed twice: give each channel one change"),
        ({(0, 1.5): 0.0}, "channel is 1.5, expected a whole number"),
        ({("0", 1): 0.0}, "layer is '0', expected a whole number"),
        ({(True, 1): 0.0}, "layer is True, expected a whole number"),
        ({5: 0.0}, "5 is not a place to edit: expected (layer, channel), as in (0, 12)"),
        ({(0, 1): True}, "a change is True, expected a finite number (a factor of the coefficient), a function"),
        ({(0, 1): None}, "a change is None, expected a finite number"),
        ({(0, 1): float("nan")}, "a change is nan, expected a finite number"),
        ({(0, 1): Value([1.0])}, "a vector for layer 0 has shape (1,), expected (32,)"),
        ({(0, 1): Value([float("inf")] * 32)}, "a vector for layer 0 has elements that are not finite"),
        ({(0, 1): Value([1.0] * 32, scale=float("inf"))}, "a value's scale is inf, expected a finite number"),
    ],
)
def test_what_does_not_fit_is_refused(llama, changes, said):
    model, shape = llama
    with pytest.raises(ValueError) as error:
        edit(model, changes, anatomy=shape)
    assert str(error.value).startswith(said)


def test_more_that_is_refused(llama):
    model, shape = llama
    with pytest.raises(ValueError, match="an added coefficient is 'a', expected a finite number"):
        edit(model, {}, add=[(0, "a", vector(32))], anatomy=shape)
    with pytest.raises(ValueError, match=r"shape \(31,\), expected \(32,\)"):
        edit(model, {}, add=[(0, 1.0, vector(31))], anatomy=shape)
    with pytest.raises(ValueError, match="a fixed coefficient is nan"):
        fixed(float("nan"))
    for wrong in (lambda m: m[:, :2], lambda m: "no", lambda m: None):
        said = r"an edit of layer 1 gave .* for coefficients of shape \(2, 9\)"
        with pytest.raises(ValueError, match=said), edit(model, {(1, 3): wrong}, anatomy=shape):
            run(model)
    five = edit(model, {}, add=[(1, torch.ones(5), vector(32))], anatomy=shape)
    with pytest.raises(ValueError, match=r"gave shape \(5,\) for coefficients of shape \(2, 9\)"), five:
        run(model)


def test_dropout_in_training_is_refused():
    """Where the module drops coefficients by itself, what a channel wrote cannot be known."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Dropout(0.5), nn.Linear(24, 16))
    x = torch.randn(2, 5, 16)
    shape = anatomy(module, inputs=x)
    with edit(module, {(0, 3): 0.0}, anatomy=shape):
        module.train()
        with pytest.raises(ValueError, match="training mode with dropout: call eval"):
            module(x)
        module.eval()
        assert not torch.equal(module(x), module(x) + 1)


def test_finds_for_itself():
    """Without an anatomy it makes one, for a plain module too."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6)).eval()
    x = torch.randn(4, 6)
    twin = copy.deepcopy(module)
    twin[2].weight.data[:, 8] = 0
    with torch.no_grad(), edit(module, {(0, 8): 0.0}, inputs=x):
        got = module(x)
    assert torch.allclose(got, twin(x), atol=1e-6)
    assert not torch.equal(got, module(x))
