"""The operator that Inductor's graphs hold: the same numbers as the operators it takes the place of, with and without
Python, and no call made from memory that differs from the one remembered."""

from __future__ import annotations

import copy
import gc
import re
import shutil
import subprocess
import sys
import threading
import types
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fanfold as ff
from fanfold import Spec, Weights, formats, numerics
from fanfold.kernels import cpu, dispatch, graph_op, packed, packed_op
from fanfold.kernels.packed import PackedMatrix

compiles = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles C++")
in_c = pytest.mark.skipif(not graph_op.IN_C, reason="this PyTorch has no stable C interface")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv("FANFOLD_ISA", raising=False)
    cpu._cpu.forget_graph_op()
    packed_op._ready.clear()


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + 0.1


def matrix(n: int, k: int, format: str, seed: int = 1) -> PackedMatrix:
    weight = randn(n, k, seed=seed)
    if format in packed._FLOATS:
        return PackedMatrix.pack(weight, format)
    return PackedMatrix.pack(formats.quantize_matrix(weight.numpy(), format))


class Linears:
    """Arguments of `packed_run` for products of one x [..., k]."""

    def __init__(self, widths: list[int], k: int, format_of: list[str], biased: list[bool]) -> None:
        self.matrices = [matrix(n, k, f, seed) for seed, (n, f) in enumerate(zip(widths, format_of))]
        self.biases = [randn(n, seed=99 + n) if b else None for n, b in zip(widths, biased)]
        text = ";".join(map(packed_op.describe, self.matrices))
        self.description = graph_op._describe("linear", self.biases, text)

    def parts(self) -> list[Tensor]:
        return [*(m.data for m in self.matrices), *(b for b in self.biases if b is not None)]

    def expected(self, x: Tensor) -> Tensor:
        return torch.cat([packed.linear(x, m, b) for m, b in zip(self.matrices, self.biases)], -1)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.fanfold.packed_run(x, self.parts(), self.description)


def made_in_c(call, *args) -> int:
    before = cpu.compiled_calls()
    call(*args)
    return cpu.compiled_calls() - before


@in_c
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", ["int8", "int4", "q8_0", "bf16"])
@pytest.mark.parametrize("widths", [[48], [48, 16, 17], [1, 5, 48, 3], [7, 33]])
def test_linears_side_by_side(widths, format, dtype) -> None:
    biased = [i % 2 == 1 for i in range(len(widths))]
    linears = Linears(widths, 48, [format] * len(widths), biased)
    for tokens in (1, 0, 3, 16, 17, 40):
        x = randn(tokens, 48, seed=tokens).to(dtype)
        expected = linears.expected(x)
        linears(x)
        assert made_in_c(linears, x) == 1
        for given in (x, x[None], x.view(tokens, 1, 48)):
            y = linears(given)
            assert y.shape == (*given.shape[:-1], sum(widths))
            assert y.dtype == dtype
            assert y.is_contiguous()
            assert torch.equal(y.reshape(expected.shape), expected), tokens


@in_c
def test_formats_and_activations_of_several_kinds_are_not_computed_in_one_pass() -> None:
    linears = Linears([8, 24, 16], 64, ["int8", "bf16", "int8"], [False, True, False])
    linears.matrices[2].activations = "float"
    text = ";".join(map(packed_op.describe, linears.matrices))
    linears.description = graph_op._describe("linear", linears.biases, text)
    x = randn(2, 64, seed=3)
    x[0, 0] = 100.0  # what int8 activations lose much by
    for _ in range(2):
        assert torch.equal(linears(x), linears.expected(x))
    assert made_in_c(linears, x) == 1


@in_c
@pytest.mark.parametrize("biases", ["", "gate_bias", "up_bias down_bias", "gate_bias up_bias down_bias"])
@pytest.mark.parametrize(("kind", "f"), [("swiglu", 32), ("swiglu", 48), ("gelu", 80)])
def test_an_ffn(kind, f, biases) -> None:
    named = [b for b in biases.split() if kind == "swiglu" or b != "gate_bias"]
    spec = Spec.parse(kind, d_model=48, d_ff=f, **dict.fromkeys(named, True))
    w = Weights(
        spec,
        gate=matrix(f, 48, "int8", 1) if spec.gated else None,
        up=matrix(f, 48, "int8", 2),
        down=matrix(48, f, "int8", 3),
        **{b: randn(48 if b == "down_bias" else f, seed=len(b)) for b in named},
    )
    tensors = [None if w.gate is None else w.gate.data, w.up.data, w.down.data, w.gate_bias, w.up_bias, w.down_bias]
    description = graph_op._describe("ffn", tensors[3:], packed_op.describe_ffn(w))
    parts = [t for t in tensors if t is not None]
    for tokens in (1, 3, 40):
        x = randn(tokens, 48, seed=tokens)
        for _ in range(2):
            assert torch.equal(torch.ops.fanfold.packed_run(x, parts, description), packed.forward(x, w))
        assert made_in_c(torch.ops.fanfold.packed_run, x, parts, description) == 1
    torch.library.opcheck(torch.ops.fanfold.packed_run.default, (x, parts, description))


def test_pytorchs_own_checks_and_python() -> None:
    linears = Linears([8, 24], 16, ["int8", "int4"], [True, False])
    x = randn(3, 16, seed=2)
    torch.library.opcheck(torch.ops.fanfold.packed_run.default, (x, linears.parts(), linears.description))
    assert torch.equal(graph_op.run(x, linears.parts(), linears.description), linears.expected(x))


CHANGES = ["data", "in place", "bias", "bias in place", "x", "x strided", "x of another dtype", "isa", "width"]
WRONG = ["more", "fewer", "shorter", "floats"]


@in_c
@pytest.mark.parametrize("change", [*CHANGES, *WRONG])
def test_a_call_again_sees_what_has_changed(change, monkeypatch) -> None:
    linears = Linears([20, 12], 48, ["int8", "int8"], [True, True])
    other = Linears([20, 12], 48, ["int8", "int8"], [True, True])
    other.matrices = [matrix(20, 48, "int8", 50), matrix(12, 48, "int8", 51)]
    x = randn(3, 48, seed=7)
    linears(x)
    before = linears(x)
    if change == "data":
        linears.matrices[1] = other.matrices[1]
    elif change == "in place":
        linears.matrices[1].data.copy_(other.matrices[1].data)
    elif change == "bias":
        linears.biases[1] = linears.biases[1] + 1
    elif change == "bias in place":
        linears.biases[1] += 1
    elif change == "x":
        x = x[1:] * 2
    elif change == "x strided":
        x = randn(3, 96, seed=8)[:, ::2]
    elif change == "x of another dtype":
        x = x.bfloat16()
    elif change == "isa":
        monkeypatch.setenv("FANFOLD_ISA", "scalar")
        assert made_in_c(linears, x) == 0
    if change == "width":
        for given, said in ((x[:, :40].contiguous(), "ValueError: .*shape"), (x[0, 0], "^IndexError: ")):
            with pytest.raises(RuntimeError, match=said):
                linears(given)
        return
    if change in WRONG:
        parts = linears.parts()
        first, second, *biases = parts
        given = {
            "more": [*parts, biases[1]],
            "fewer": [first],
            "shorter": [first, second[:64], *biases],
            "floats": [first, second, biases[0], biases[1].view(torch.int32)],
        }
        with pytest.raises(RuntimeError):
            torch.ops.fanfold.packed_run(x, given[change], linears.description)
        return
    y = linears(x)
    assert torch.equal(y, linears.expected(x))
    if x.shape == before.shape:
        assert not torch.equal(y, before)


@in_c
def test_one_input_and_negative_views() -> None:
    linears = Linears([8, 3], 1, ["int8", "int8"], [True, False])
    for tokens in (1, 4):
        x = randn(tokens, 1, seed=tokens)
        z = torch.complex(x, x + 2).conj().imag
        assert z.is_neg()
        for given, plain in ((x, x), (x, x), (z, -(x + 2))):
            assert torch.equal(linears(given), linears.expected(plain))


@in_c
def test_an_error_of_python_is_told() -> None:
    linears = Linears([20], 48, ["int8"], [False])
    with pytest.raises(RuntimeError, match=r"^ValueError: \d+ bytes .* given for int8 \[20, 48\]"):
        torch.ops.fanfold.packed_run(randn(1, 48, seed=1), [linears.parts()[0][:64]], linears.description)


@in_c
def test_nothing_is_kept_alive() -> None:
    linears = Linears([20, 12], 48, ["int8", "int8"], [True, False])
    seen = []
    for _ in range(3):
        x, parts = randn(3, 48, seed=7), [p.clone() for p in linears.parts()]
        strided = randn(3, 96, seed=8)[:, ::2]
        for given in (x, x, strided, strided):
            y = torch.ops.fanfold.packed_run(given, parts, linears.description)
        seen += [weakref.ref(t) for t in (x, strided, y, *parts)]
    del x, strided, y, parts, given
    gc.collect()
    assert [r() for r in seen] == [None] * len(seen)


@in_c
def test_the_backend_that_ran_last() -> None:
    linears = Linears([20], 48, ["int8"], [False])
    x = randn(1, 48, seed=1)
    linears(x)
    dispatch.record("torch")
    assert dispatch.last_backend() == "torch"
    assert made_in_c(linears, x) == 1
    assert dispatch.last_backend() == "cpu"
    dispatch.record("torch")
    assert dispatch.last_backend() == "torch"


@in_c
def test_two_threads_at_once() -> None:
    linears = [Linears([48, 16, 16], 64, ["int8"] * 3, [False] * 3) for _ in range(2)]
    xs = [randn(n, 64, seed=n) for n in (1, 5)]
    wrong: list[str] = []

    def work(i: int) -> None:
        expected = linears[i].expected(xs[i])
        for turn in range(300):
            if turn % 50 == 0:
                cpu._cpu.forget_graph_op()
            if not torch.equal(linears[i](xs[i]), expected):
                wrong.append(f"thread {i}, turn {turn}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


# ---- the pass ----


class Attention(nn.Module):
    """q, k and v of one x, as far as the pass is concerned."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, n, bias=bias) for n in (32, 8, 8))
        self.o = nn.Linear(32, 32, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        q = torch.relu(q) * (k[..., 2:3] + v[..., 5:6])  # operations whose results do not depend on how they are fused
        return self.o(q) + x


class Chain(nn.Module):
    """Linears whose inputs may come to lie in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(torch.relu(x))))))


class Written(nn.Module):
    """x is written to between two products of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        first = self.a(x)
        x.add_(first[..., 3:4])
        return first - self.b(x)


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ModuleList(nn.Linear(32, 4 + i) for i in range(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([linear(x) for linear in self.all], -1)


class Block(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.attention = Attention(bias)
        self.gate, self.up, self.down = (nn.Linear(*size, bias=bias) for size in ((32, 48), (32, 48), (48, 32)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        return x + self.down(torch.relu(self.gate(x)) * self.up(x))


class Model(nn.Module):
    """An FFN, without which `swap` finds nothing to do, and `inner`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def compiled(model: nn.Module, x: Tensor) -> tuple[Tensor, str]:
    """-> y of a second call, and Inductor's code."""
    from torch._inductor.utils import fresh_inductor_cache, run_and_get_code

    torch._dynamo.reset()
    with fresh_inductor_cache():
        # rounded to bfloat16 wherever the model does
        again = torch.compile(model, fullgraph=True, options={"emulate_precision_casts": True})
        y, code = run_and_get_code(again, x)
        assert torch.equal(again(x), y)
        assert not torch.equal(again(x * 2), y)
    return y, "\n".join(code)


F32, BF16 = torch.float32, torch.bfloat16


@compiles
@in_c
@pytest.mark.parametrize(
    ("make", "calls", "dtype", "tokens"),
    [
        (lambda: Attention(bias=False), 2, F32, 1),
        (lambda: Attention(bias=True), 2, BF16, 3),  # biases become float32 in the graph
        (Chain, 3, F32, 3),
        (Written, 2, F32, 3),
        (Many, 2, F32, 3),
        (lambda: Block(bias=True), 4, F32, 20),
    ],
)
def test_compiled_modules(make, calls, dtype, tokens) -> None:
    torch.manual_seed(5)
    model = Model(make()).to(dtype).eval()
    ff.swap(model, format="int8", linears="all", activations="int8", inputs=randn(2, 5, 32, seed=9).to(dtype))
    x = randn(2, tokens, 32, seed=tokens).to(dtype)
    with torch.no_grad():
        expected = model(x)
        y, code = compiled(model, x)
    assert re.findall(r"ops\.fanfold\.(\w+)\.default\(", code) == ["packed_run"] * calls
    assert torch.equal(y, expected)


@compiles
@in_c
def test_a_number_of_tokens_that_the_compiler_does_not_know() -> None:
    torch.manual_seed(5)
    model = Model(Block(bias=True)).eval()
    ff.swap(model, format="int8", linears="all", activations="int8", inputs=randn(2, 5, 32, seed=9))
    torch._dynamo.reset()
    again = torch.compile(model, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for tokens in (3, 1, 17, 40):
            x = randn(2, tokens, 32, seed=tokens)
            assert torch.equal(again(x), model(x))
        assert made_in_c(again, x) == 4


def graph_of(*nodes) -> torch.fx.Graph:
    """A graph that calls packed_linear with (x, data, bias) of its inputs' names, each a node."""
    graph = torch.fx.Graph()
    text = packed_op.describe(matrix(8, 32, "int8"))
    made = {name: graph.placeholder(name) for name in ("x", "y", "data", "bias")}
    outputs: list[torch.fx.Node] = []
    for x, bias in nodes:
        b = made.get(bias)
        if bias == "computed":
            b = graph.call_function(torch.ops.aten.squeeze.default, (outputs[-1],))
        elif bias == "converted":
            b = graph.call_function(torch.ops.aten.neg.default, (made["bias"],))
        outputs.append(graph.call_function(torch.ops.fanfold.packed_linear.default, (made[x], made["data"], b, text)))
        outputs[-1].meta["val"] = torch.empty(1, 8)
    graph.output(tuple(outputs))
    graph_op._PASS.apply(graph)
    graph.lint()
    return graph


@pytest.mark.parametrize(
    ("nodes", "merged"),
    [
        ([("x", None), ("x", "bias"), ("x", None)], [3]),
        ([("x", None), ("y", None), ("x", None)], [2, 1]),
        ([("x", None), ("x", "converted")], [2]),
        ([("x", None), ("x", "computed"), ("x", "bias")], [2, 1]),  # a bias that comes of the first product
        ([("x", None)] * 9, [4, 4, 1]),
    ],
)
def test_what_is_merged(nodes, merged) -> None:
    graph = graph_of(*nodes)
    calls = [n for n in graph.nodes if n.target is torch.ops.fanfold.packed_run.default]
    assert [n.args[2].count(";") + 1 for n in calls] == merged
    gm = torch.fx.GraphModule({}, graph)
    m, bias = matrix(8, 32, "int8"), randn(8, seed=3)
    x, y = randn(1, 32, seed=4), randn(1, 32, seed=5)
    expected: list[Tensor] = []
    for of, b in nodes:
        one = {"computed": lambda: expected[-1].squeeze(), "converted": lambda: -bias, "bias": lambda: bias}.get(b)
        expected.append(packed.linear(x if of == "x" else y, m, None if one is None else one()))
    for ours, theirs in zip(gm(x, y, m.data, bias), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_without_inductors_list_all_stays_as_it_is(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, graph_op._POST_GRAD, types.ModuleType("moved"))
    graph_op.offer()
    monkeypatch.delitem(sys.modules, graph_op._POST_GRAD)
    graph_op.offer()


WITHOUT_C = """
from fanfold.kernels import cpu
cpu._cpu.graph_op_needs = lambda: ["of_a_later_pytorch"]
import sys
sys.path.insert(0, {tests!r})
from test_graph_op import Linears, graph_op, randn, torch
assert not graph_op.IN_C
linears, x = Linears([8, 24], 16, ["int8", "int4"], [True, False]), randn(3, 16, seed=2)
for _ in range(3):
    assert torch.equal(linears(x), linears.expected(x))
assert cpu.compiled_calls() == 0
from torch._inductor.fx_passes import post_grad
graph_op.offer()
assert graph_op._PASS not in post_grad.pass_patterns
"""


def test_a_pytorch_without_the_c_interface() -> None:
    code = WITHOUT_C.format(tests=str(Path(__file__).parent))
    subprocess.run([sys.executable, "-c", code], check=True)


class Strided(nn.Module):
    """Each token's k beside the next one's, by strides."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(32, 32), nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        (b, t, d), (i, j, u) = k.shape, k.stride()
        return self.mlp(q[:, 1:] + k.as_strided((b, t - 1, 2, d), (i, j, j, u)).sum(2))


@compiles
@torch.no_grad()
def test_products_that_are_read_by_strides_stay_apart() -> None:
    from torch._inductor.utils import fresh_inductor_cache

    torch.manual_seed(0)
    model, x = Strided().eval(), torch.randn(2, 6, 32)
    ff.swap(model, format="fp32", linears="all", inputs=x)
    torch._dynamo.reset()
    with fresh_inductor_cache():
        y = torch.compile(model)(x)
    assert numerics.relative_error(y, model(x)) < 64 * numerics.UNIT_ROUNDOFF["float32"]


@compiles
@torch.no_grad()
def test_what_an_earlier_pass_has_compiled_is_not_taken_from_disk(monkeypatch) -> None:
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_inductor_cache

    torch.manual_seed(0)
    model, x = Strided().eval().mlp, torch.randn(2, 6, 32)

    def taken_from_disk() -> bool:
        twin = copy.deepcopy(model)
        ff.swap(twin, format="fp32", linears="all", inputs=x)
        torch._dynamo.reset()
        counters.clear()
        torch.compile(twin)(x)
        return counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"] > 0

    with fresh_inductor_cache():
        assert not taken_from_disk()
        assert taken_from_disk()
        monkeypatch.setattr(packed_op, "GRAPHS", packed_op.GRAPHS + 1)
        assert not taken_from_disk()


def test_texts_without_the_number_of_the_pass_are_read() -> None:
    assert packed_op._kind("['fp32', 3, 4, 'float']") == ("fp32", (3, 4), "float")
    assert packed_op._kind(packed_op.describe(matrix(3, 4, "fp32"))) == ("fp32", (3, 4), "float")
