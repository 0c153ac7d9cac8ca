"""The module in training, with every `save`, amid what is wrapped around it: checkpoints, autocast, compilers, FSDP."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fanfold as ff
from fanfold import Spec, numerics, reference
from fanfold.count import ffn as counted
from fanfold.kernels import blocks, dispatch, train
from fanfold.kernels import torch as torch_ops

SAVES = counted.SAVES
SWIGLU = Spec.parse("swiglu", d_model=24, d_ff=40, gate_bias=True, up_bias=True, down_bias=True)
GELU = Spec(d_model=24, d_ff=24, activation="gelu_tanh", up_bias=True)
DROPPING = Spec.parse("geglu", d_model=24, d_ff=40, dropout=0.4)
ROUNDING = 32 * numerics.UNIT_ROUNDOFF["float32"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    cut = {"all": (16, 16, 2), "preact": (16, 8, 1), "input": (8, 16, 3), "tiles": (3, 3, 2)}
    for name in ("BLOCKS", "WIDENED"):
        monkeypatch.setattr(train, name, {save: blocks.Block(*sizes) for save, sizes in cut.items()})
    monkeypatch.setattr(blocks, "_ALIGNED", 1)


def module(spec: Spec, save: str = "all", dtype=torch.float32, backend: str = "auto") -> ff.nn.FeedForward:
    weights = numerics.random_weights(spec, 0, lambda a: torch.tensor(a, dtype=dtype))
    return ff.nn.FeedForward.from_weights(copy.deepcopy(weights), save=save, backend=backend)


class Plain(nn.Module):
    """The same parameters under the same names, through PyTorch's ops and autograd alone."""

    def __init__(self, ours: ff.nn.FeedForward) -> None:
        super().__init__()
        self.ours = ours

    def forward(self, x):
        return torch_ops.forward(x, self.ours.weights(), self.training)


def step(m: nn.Module, x: torch.Tensor, call=None) -> dict[str, torch.Tensor]:
    """Output and gradients of one step; the generator's next number too."""
    torch.manual_seed(7)
    leaf = x.detach().clone().requires_grad_()
    m.zero_grad()
    y = m(leaf) if call is None else call(leaf)
    y.float().square().sum().backward()
    found = {"y": y.detach(), "x": leaf.grad, "next": torch.rand(3)}
    return found | {n.removeprefix("ours."): p.grad for n, p in m.named_parameters()}


def agree(a, b, rounding: float = ROUNDING) -> bool:
    assert a.keys() == b.keys()
    return all(a[n].dtype == b[n].dtype and numerics.relative_error(a[n], b[n]) <= rounding for n in b)


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("spec", [SWIGLU, GELU, DROPPING], ids=["swiglu", "gelu", "dropout"])
def test_the_module_and_checkpointing(spec, save):
    """Alone, under checkpointing of both kinds, and twice in one graph: as PyTorch's own ops, dropout included."""
    m = module(spec, save)
    x = torch.randn(2, 11, 24)
    expected = step(Plain(m), x)
    assert agree(step(m, x), expected)
    assert agree(step(m, x, lambda x: checkpoint(m, x, use_reentrant=False)), expected)
    assert agree(step(m, x, lambda x: checkpoint(m, x, use_reentrant=True)), expected)
    assert agree(step(m, x, lambda x: m(m(x))), step(p := Plain(m), x, lambda x: p(p(x))))
    assert not agree(step(m, x, lambda x: m(2 * x)), expected)
    for twin in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert twin.save == save
        assert agree(step(twin, x), expected)
    assert f"save='{save}'" in repr(m)


def test_no_mask_of_another_draw():
    """Recompute with a mask of its own would pass every test without dropout."""
    m = module(DROPPING, "input")
    x = torch.randn(22, 24)
    expected = step(Plain(m), x)
    drawn = train._draw
    try:
        train._draw = lambda call, x, state=None: drawn(call, x)
        assert not agree(step(m, x), expected)
    finally:
        train._draw = drawn
    m.eval()
    assert agree(step(m, x), step(Plain(m).eval(), x))


@pytest.mark.parametrize("save", SAVES)
def test_a_saved_tensor_hook_sees_it_all(save):
    """What is kept can be moved away and brought back: nothing is held beside autograd."""
    m = module(DROPPING, save)
    x = torch.randn(22, 24)
    expected = step(m, x)

    def call(x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            return m(x)

    assert agree(step(m, x, call), expected, 0.0)


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("spec", [SWIGLU, DROPPING], ids=["swiglu", "dropout"])
def test_autocast(spec, save):
    m = module(spec, save)
    x = torch.randn(22, 24)

    def cast(m):
        def call(x):
            with torch.autocast("cpu", torch.bfloat16):
                return m(x)

        return call

    ours, eager = step(m, x, cast(m)), step(p := Plain(m), x, cast(p))
    assert ours["y"].dtype == torch.bfloat16
    assert agree(ours, eager, 4 * numerics.UNIT_ROUNDOFF["bfloat16"])
    assert all(t.dtype == torch.float32 for n, t in ours.items() if n != "y")
    if not spec.dropout:
        w = m.weights()
        truth = reference.backward(x, w, 2 * ours["y"].double())
        for n in truth:
            projection, _, kind = n.partition("_")
            key = n if n == "x" else f"{projection}_proj.{kind or 'weight'}"
            shape = (1, -1) if ours[key].dim() == 1 else ours[key].shape
            compared = (ours[key].view(shape), truth[n].reshape(shape), eager[key].view(shape))
            assert numerics.compare(*compared, dtype=torch.bfloat16).ok, n
    with torch.autocast("cpu", torch.bfloat16):  # backward inside the region too
        again = step(m, x)
    assert agree(again, ours, 4 * numerics.UNIT_ROUNDOFF["bfloat16"])
    double = module(SWIGLU, save, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert double(x.double().requires_grad_()).dtype == torch.float64  # autocast leaves it alone


@pytest.mark.parametrize("save", SAVES)
def test_parameters_in_bfloat16(save):
    m = module(SWIGLU, save, torch.bfloat16)
    x = torch.randn(40, 24, dtype=torch.bfloat16)
    assert agree(step(m, x), step(Plain(m), x), 4 * numerics.UNIT_ROUNDOFF["bfloat16"])


@pytest.mark.parametrize("save", ["all", "input"])  # "preact" takes the way of the former, "tiles" of the latter
def test_compiled_whole_with_tokens_that_change(save):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    m = module(GELU, save)
    compiled = torch.compile(m, fullgraph=True, backend=counter)
    for tokens in (5, 9, 23):
        x = torch.randn(tokens, 24)
        assert agree(step(m, x, compiled), step(Plain(m), x))
    assert counter.frame_count <= 2


def test_compiled_under_autocast_and_with_dropout():
    torch._dynamo.reset()
    m, dropping = module(GELU, "tiles"), module(DROPPING, "input")
    x = torch.randn(9, 24)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (step(m, x, call) for call in (torch.compile(m, fullgraph=True, backend="aot_eager"), None))
    assert agree(ours, theirs, 8 * numerics.UNIT_ROUNDOFF["bfloat16"])
    torch.manual_seed(0)
    y = torch.compile(dropping, fullgraph=True, backend="aot_eager")(x.requires_grad_())
    torch.manual_seed(0)
    assert numerics.relative_error(y, Plain(dropping)(x)) <= ROUNDING
    (found,) = torch.autograd.grad(y.sum(), x)
    torch.manual_seed(0)
    assert numerics.relative_error(found, torch.autograd.grad(dropping(x).sum(), x)[0]) <= ROUNDING


def test_compiled_with_x_alone_keeps_x_alone():
    """Under "input" nothing of [tokens, d_ff] goes from the compiled forward to its backward."""
    torch._dynamo.reset()
    kept: dict[str, int] = {}
    for save in ("all", "input"):
        compiled = torch.compile(module(SWIGLU, save), fullgraph=True, backend="aot_eager")
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: (s.append(t.numel()), t)[1], lambda t: t):
            compiled(torch.randn(100, 24, requires_grad=True))
        kept[save] = max(sizes)
    assert kept["all"] == 100 * 40
    assert kept["input"] == 100 * 24


def test_the_named_cpu_backend_keeps_x_alone():
    if (reason := dispatch.backends()["cpu"]) is not None:
        pytest.skip(reason)
    m = module(SWIGLU, "all", backend="cpu")
    x = torch.randn(2, 11, 24)
    assert agree(step(m, x), step(Plain(m), x))
    assert agree(step(m, x, lambda x: m(m(x))), step(p := Plain(m), x, lambda x: p(p(x))))
    y = m(leaf := x.requires_grad_())
    (g,) = torch.autograd.grad(y.square().sum(), leaf, create_graph=True)
    assert torch.autograd.grad(g.square().sum(), leaf)[0].any()


def test_errors():
    with pytest.raises(ValueError, match=r"save='disk' is not known; known: all, preact, input, tiles"):
        ff.nn.FeedForward(SWIGLU, save="disk")


def test_fully_shard_in_one_and_two_processes(tmp_path):
    """FSDP2: sharded parameters, gathered for forward and again for backward, give the gradients of one process."""
    script = Path(__file__).with_name("train_ranks.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["1", "2"]


def _bench_script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "bench"))
    sys.modules.pop("train", None)
    import train as script  # type: ignore[import-not-found]

    return script


def test_the_interval_of_the_bench_script_holds_the_median(monkeypatch):
    """As sure as it says, and no wider: with one value less on each side it would be less sure."""
    interval = _bench_script(monkeypatch).median_interval
    assert interval([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    for n in range(6, 80):
        median, low, high = interval(range(n))
        assert median == (n - 1) / 2
        assert low == n - 1 - high
        outside = [2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n for k in (low, low + 1)]
        assert outside[0] <= 0.05 < outside[1]


def test_the_bench_script_checks_before_it_times(monkeypatch, capsys):
    """bench/train.py: a row per contender with kept and peak bytes; a wrong gradient is told, and fails the script."""
    import json

    script = _bench_script(monkeypatch)
    arguments = ["train.py", "--quick", "--no-compile", "--shape", "24x40", "--dtype", "fp32", "--tokens", "100"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--rounds", "1", "--json"])
    assert script.main() == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    rows = {row["contender"]: row for row in result["rows"]}
    assert list(rows) == ["eager", *SAVES]
    assert all(row["peak_bytes"] > row["kept_bytes_predicted"] - 100 * 24 * 4 for row in rows.values())  # x was there
    assert rows["eager"]["kept_bytes_predicted"] == 100 * (24 + 4 * 40) * 4
    assert rows["input"]["ratio_allowed"] == pytest.approx(11 / 9)
    assert rows["eager"]["ratio"] == 1.0
    monkeypatch.setattr(sys, "argv", [*arguments, "--rounds", "1", "--json", "--save", "input"])
    assert script.main() == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert [row["contender"] for row in result["rows"]] == ["eager", "input"]
    inner = train._backward
    monkeypatch.setattr(train, "_backward", lambda *args: {**(found := inner(*args)), "x": found["x"] * 1.01})
    assert script.main() == 1
