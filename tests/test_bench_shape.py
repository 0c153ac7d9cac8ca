"""`fanfold bench --shape`: what is asked, who is timed and how, the check before it, the figures, the picture."""

from __future__ import annotations

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from fanfold import Spec, numerics
from fanfold.kernels import cpu, packed
from fanfold.show import bench_shape, bench_tables, cli, contenders, plot_points, plots, roofs

runner = CliRunner()
needs_kernels = pytest.mark.skipif(
    cpu.available() is not None or not hasattr(cpu._cpu, "bind_packed"), reason="no packed kernels here"
)
SPEC = Spec.parse("swiglu", d_model=64, d_ff=160)
ROOF = roofs.Roof(
    read_bytes_per_s=((1e6, 4e9), (1e9, 2e9)),
    flops={"fp32": 1e11, "bf16": 2e11, "int8": 4e11},
    estimated=("bf16", "int8"),
    threads=2,
    notes="fp32 measured",
)


@pytest.fixture
def quick(monkeypatch):
    """A roof that is known and turns of no time: nothing but what is printed is at stake."""
    monkeypatch.setattr(roofs, "measure", lambda: ROOF)
    monkeypatch.setattr(bench_shape, "SWEEP_BYTES", 64)
    turns = bench_shape.by_turns
    monkeypatch.setattr(bench_shape, "by_turns", lambda cells, repeats, step: turns(cells, repeats, step, turn=0.0))


def invoke(*args: object):
    return runner.invoke(cli.app, ["bench", *(str(a) for a in args)])


# --- what is asked ---


def test_lists_are_read():
    r = bench_shape.parse("64x160, 32x88", "16,1,16", "fp32,int4,int4_g32", "gelu_erf")
    assert [(s.d_model, s.d_ff, s.gated) for s in r.specs] == [(64, 160, False), (32, 88, False)]
    assert r.tokens == (1, 16)
    assert r.formats == ("fp32", "int4_g32")  # an alias is its format, once


def test_formats_are_all_that_can_be_packed():
    assert set(bench_shape.FORMATS) == set(packed.FORMATS)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "bench takes a MODEL (folder, .gguf file, smollm2, minilm) or --shape 4096x11008: neither was given"),
        (["smollm2", "--shape", "4x4"], "smollm2 and --shape 4x4 were given"),
        (["--shape", "4096"], "--shape '4096': expected d_model x d_ff, as in 4096x11008"),
        (["--shape", "4096x0"], "--shape '4096x0': d_ff=0: expected sizes from 1 on"),
        (["--shape", "64x64", "--tokens", "1,-2"], "--tokens '-2': expected whole numbers from 1 on"),
        (["--shape", "64x64", "--tokens", ","], "--tokens ','"),
        (["--shape", "64x64", "--format", "int3"], "--format 'int3' cannot be timed on a shape; known: fp32, bf16"),
        (["--shape", "64x64", "--format", "fp8"], "--format 'fp8'"),
        (["--shape", "64x64", "--ffn", "swigloo"], "FFN variant 'swigloo' is not known; known: swiglu"),
        (["--shape", "64x64", "--plot", "a.gif"], "ends in .png or .svg"),
        (["--shape", "64x64", "--dtype", "bf16"], "--dtype goes with a MODEL"),
        (["--shape", "64x64", "--text-tokens", "9"], "--text-tokens goes with a MODEL"),
        (["smollm2", "--tokens", "3", "--compile"], "--tokens, --compile goes with --shape"),
        (["smollm2", "--format", "bf16,int3"], "--format 'int3' is not known; known: none, fp32, bf16"),
    ],
)
def test_wrong_usage_is_one_line_and_2(args, said):
    result = invoke(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert said in result.stderr


def test_a_shape_that_does_not_fit_is_refused():
    result = invoke("--shape", "4000000x4000000")
    assert result.exit_code == 1
    assert "not enough memory: 4000000x4000000 in 4 formats needs about" in result.stderr


# --- who, and how it is timed ---


@pytest.mark.parametrize(
    ("n_bytes", "cold", "layers"),
    [(1 << 20, True, 16), (100 << 20, True, 3), (1 << 30, True, 1), (1 << 20, False, 1), (256 << 20, True, 1)],
)
def test_layers_exceed_the_caches_where_weights_are_to_come_from_memory(n_bytes, cold, layers):
    assert contenders.layer_count(n_bytes, cold) == layers


def test_copies_have_memory_of_their_own():
    base = contenders.gaussian(SPEC)
    for one in (contenders.Ours(base, "int4", cold=True), contenders.Eager(base, "bf16", cold=True)):
        assert len(one.layers) == 16
        memory = {(w.up.data if isinstance(w.up, packed.PackedMatrix) else w.up).data_ptr() for w in one.layers}
        assert len(memory) == 16


class Clock:
    """Seconds that go by only when a call is made."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Fake(contenders.Contender):
    def __init__(self, name="int8", format="int8", n_bytes=1000, ours=True):
        super().__init__(name, format, torch.float32, n_bytes)
        self.ours = ours


def cell(calls, clock, layers, swept=False, seconds=1.0, **fields):
    def run(layer):
        calls.append(layer)
        clock.now += seconds
        return torch.empty(0)

    return bench_shape.Cell(Fake(**fields), 1, run, layers, swept)


def test_a_turn_rotates_and_leaves_the_first_layer_out():
    calls, clock, sweeps = [], Clock(), []
    one = cell(calls, clock, layers=3, swept=True)
    one.turn(5.0, lambda: sweeps.append(len(calls)), clock)
    assert calls == [0, 1, 2] * 2  # 3 s a pass: the second ends after 5 s
    assert one.times == [1.0] * 4
    assert sweeps == [0, 3]


def test_a_single_layer_is_timed_at_once_and_never_swept():
    calls, clock = [], Clock()
    one = cell(calls, clock, layers=1)
    one.turn(0.0, lambda: pytest.fail("swept"), clock)
    assert (calls, one.times) == ([0], [1.0])


def test_turns_alternate_and_first_warm_every_layer():
    order, clock, steps = [], Clock(), []
    cells = [cell([], clock, layers=2) for _ in range(2)]
    for name, one in zip("ab", cells):
        one.warm = lambda name=name: order.append(f"warm {name}")
        one.turn = lambda *_, name=name: order.append(name)
    bench_shape.by_turns(cells, 2, lambda done, total: steps.append((done, total)), 0.0, clock)
    assert order == ["warm a", "warm b", "b", "a", "a", "b"]
    assert steps == [(1, 2), (2, 2)]


# --- the figures ---


def test_rows_from_known_times():
    clock = Clock()
    ours = cell([], clock, layers=16, n_bytes=2_000_000)
    theirs = cell([], clock, layers=16, name="torch fp32", format="fp32", ours=False)
    reused = cell([], clock, layers=1, name="torch bf16", format="bf16", ours=False, n_bytes=2_000_000)
    ours.times, theirs.times, reused.times = [2e-3, 3e-3, 7e-3], [8e-3], [1e-3]
    first, second, third = bench_shape.rows([ours, theirs, reused], SPEC, ROOF)
    moved, flop = 2_000_000 + 2 * 64 * 4, 2 * SPEC.n_params
    assert (first["min_s"], first["median_s"], first["calls"]) == (2e-3, 3e-3, 3)
    assert first["bytes_per_s"] == moved / 2e-3
    assert first["flop_per_s"] == flop / 2e-3
    assert (first["floor_s"], first["bound"]) == (moved / 2e9, "memory")
    assert first["share_of_roof"] == moved / 2e9 / 2e-3
    assert third["floor_s"] == moved / 4e9  # one layer of 2 MB again and again: at the rate of that working set
    assert (first["times_torch_fp32"], first["times_torch_bf16"]) == (4.0, 0.5)
    assert not [key for key in first if key.startswith("times_compiled")]
    assert not [key for row in (second, third) for key in row if key.startswith("times_")]


@pytest.mark.parametrize(
    ("format", "theirs"),
    [
        ("fp32", ("fp32",)),
        ("bf16", ("bf16",)),
        ("fp16", ("fp32",)),
        ("int8", ("fp32", "bf16")),
        ("q4_0", ("fp32", "bf16")),
    ],
)
def test_a_format_is_set_beside_its_own_dtype(format, theirs):
    assert bench_shape.compared_with(format) == theirs


def test_roof_by_what_binds():
    assert ROOF.floor(1e9, 1e9, "fp32", math.inf) == (0.5, "memory")
    assert ROOF.floor(1e6, 1e11, "int8", math.inf) == (0.25, "int8")
    assert ROOF.rate(10.0) == 4e9  # below the smallest size measured: as fast as that
    assert [roofs.arithmetic(f) for f in ("fp32", "bf16", "fp16", "int8", "q4_1")] == [
        "fp32", "bf16", "fp32", "int8", "int8",
    ]  # fmt: skip


def test_peaks_of_the_core_count_where_it_has_them(monkeypatch):
    probed = roofs.probe.Probe(
        processor="p", threads=2, memory_bytes=None, read_bytes_per_s=((1, 2.0),), measured="", numpy="",
        flops={"fp32": 10.0, "bf16": 20.0, "int8": 40.0},
        notes="fp32 measured; bf16: 2 x fp32; int8: 4 x fp32; fp8: no",
    )  # fmt: skip
    monkeypatch.setattr(roofs.probe, "probe", lambda again: probed)
    monkeypatch.setattr(roofs, "_seen", {})
    monkeypatch.delattr(cpu._cpu, "peak", raising=False)
    found = roofs.measure()
    assert (found.flops, found.estimated) == ({"fp32": 10.0, "bf16": 20.0, "int8": 40.0}, ("bf16", "int8"))
    assert found.notes == "fp32 measured; bf16: 2 x fp32; int8: 4 x fp32"
    peaks = {"fp32": 9.0, "bf16": 0.0, "int8": 33.0}
    monkeypatch.setattr(cpu._cpu, "peak", lambda kind, threads: peaks[kind], raising=False)
    found = roofs.measure()
    assert (found.flops, found.estimated) == ({"fp32": 10.0, "bf16": 20.0, "int8": 33.0}, ("bf16",))
    peaks["int8"] = 30.0  # a worse moment: the best one counts
    assert roofs.measure().flops["int8"] == 33.0


# --- the check ---

CHECKED = ("fp32", "bf16", "fp16", "int8", "int8_g64", "int4_g32", "int4_g128", "q4_0", "q8_0")


@needs_kernels
@pytest.mark.parametrize("ffn", ["swiglu", "gelu_erf"])
@pytest.mark.parametrize("format", CHECKED)
def test_right_kernels_pass(format, ffn):
    spec = Spec.parse(ffn, d_model=96, d_ff=1100)  # more channels than are taken at a time
    one = contenders.Ours(contenders.gaussian(spec), format, cold=False)
    x = torch.randn(20, 96, generator=torch.Generator().manual_seed(0)).to(one.dtype)
    answers = contenders.Answers(one, x, [0, 1, 5, 18, 19])
    found = contenders.check(one, answers, x, [0, 1, 18, 19])
    assert found.ok, found


@pytest.mark.parametrize("format", CHECKED)
def test_wrong_kernels_fail(format, monkeypatch):
    """The outputs of right ones, made wrong, and FFNs that compute something else."""
    base = contenders.gaussian(SPEC)
    one = contenders.Ours(base, format, cold=False)
    exact = contenders.as_torch(one.layers[0], torch.float64)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(one.dtype)
    rows = [0, 1, 2, 3]
    answers = contenders.Answers(one, x, rows)

    def gives(y):
        monkeypatch.setattr(one, "ready", lambda _: lambda layer: y)
        return contenders.check(one, answers, x, rows)

    right = contenders.plain_torch.forward(x.double(), exact).to(x.dtype)
    assert gives(right).ok  # or nothing is proven by what fails
    for name, y in numerics.output_mutants(right):
        assert not gives(torch.from_numpy(y)).ok, name
    for name, weights in numerics.mutants(exact):
        if name.startswith("last row") and format not in ("fp32", "bf16", "fp16"):
            continue  # one of 160 channels: no more than what int8 activations cost
        y = contenders.plain_torch.forward(x.double(), weights).to(x.dtype)
        assert not gives(y).ok, name


@needs_kernels
def test_a_wrong_kernel_is_not_timed(monkeypatch, quick):
    right = contenders.bound

    def wrong(layers, x):
        run = right(layers, x)
        return (lambda layer: torch.zeros_like(x)) if layers[0].up.format == "int8" else run

    monkeypatch.setattr(contenders, "bound", wrong)
    result = invoke("--shape", "64x160", "--tokens", "1", "--format", "fp32,int8", "--json")
    assert result.exit_code == 1
    assert "fanfold: a kernel is wrong and was not timed: 64x160 int8, tokens: 1: " in result.stderr
    (block,) = json.loads(result.stdout)["blocks"]
    assert [row["name"] for row in block["rows"]] == ["fp32", "torch fp32", "torch bf16"]
    assert len(block["wrong"]) == 1


# --- what is printed ---


@needs_kernels
def test_tables_and_picture(quick, tmp_path):
    path = tmp_path / "roof.svg"
    result = invoke("--shape", "64x160", "--tokens", "1,40", "--format", "bf16,int4", "--repeats", 1, "--plot", path)
    assert (result.exit_code, result.stderr) == (0, "")
    out = result.stdout
    assert "swiglu 64x160, 1 token\n" in out
    assert "swiglu 64x160, 40 tokens\n" in out
    for word in ("int4_g32", "torch bf16", "x torch fp32", "of the roof", "bf16 200 GFLOP/s (estimated)"):
        assert word in out, word
    assert "torch.compile is left out" in out
    assert f"plot written to {path}" in out.replace("\n", "")
    assert path.read_text().startswith("<?xml")


@needs_kernels
def test_json_is_one_document(quick):
    result = invoke("--shape", "64x160", "--tokens", "1", "--format", "fp32,int8", "--ffn", "gelu_erf", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert {"date", "processor", "threads", "isa", "torch", "repeats", "interrupted", "blocks"} == set(found)
    assert found["interrupted"] is False
    (block,) = found["blocks"]
    assert (block["ffn"], block["tokens"], block["wrong"]) == ("gelu_erf", 1, [])
    assert block["roof"]["flops"]["int8"] == 4e11
    ours = [row for row in block["rows"] if row["ours"]]
    assert [row["name"] for row in ours] == ["fp32", "int8"]
    assert all(row["layers"] == 16 and row["swept"] and row["error"] > 0 for row in ours)
    assert set(ours[1]) - set(ours[0]) == {"times_torch_bf16"}


@needs_kernels
@pytest.mark.parametrize("as_json", [True, False])
def test_ctrl_c_leaves_what_is_finished(quick, monkeypatch, as_json):
    block = bench_shape._block

    def stopped(spec, made, x, *rest):
        if len(x) == 40:
            raise KeyboardInterrupt
        return block(spec, made, x, *rest)

    monkeypatch.setattr(bench_shape, "_block", stopped)
    result = invoke("--shape", "64x160", "--tokens", "1,40", "--format", "fp32", *(["--json"] if as_json else []))
    assert result.exit_code == 130
    assert result.stderr == "fanfold: interrupted\n"
    if as_json:
        found = json.loads(result.stdout)
        assert found["interrupted"] is True
        assert [b["tokens"] for b in found["blocks"]] == [1]
    else:
        assert "swiglu 64x160, 1 token\n" in result.stdout
        assert "40 tokens" not in result.stdout


@needs_kernels
def test_a_compiler_that_fails_is_left_out_with_its_reason(quick, monkeypatch):
    def fails(weights):
        raise RuntimeError("no C++ compiler\nand more")

    monkeypatch.setattr(contenders.Compiled, "_compile", staticmethod(fails))
    result = invoke("--shape", "64x160", "--tokens", "1", "--format", "bf16", "--compile")
    assert result.exit_code == 0, result.stderr
    assert "compiled bf16 is left out: no C++ compiler\n" in result.stdout
    assert "torch.compile is left out" not in result.stdout


# --- the picture ---


def rows_of(tokens):
    """Points as they lie on a real machine: formats that move about the same bytes are close together."""
    kinds = {
        "fp32": 4,
        "bf16": 2,
        "fp16": 2,
        "int8": 1.02,
        "q8_0": 1.06,
        "int8_g64": 1.03,
        "int4_g32": 0.63,
        "q4_0": 0.56,
    }
    for format, width in kinds.items():
        x = 2 * tokens / width
        yield {"format": format, "name": format, "ours": True, "tokens": tokens, "intensity_flop_per_byte": x,
               "flop_per_s": min(2e9 * x, 1e11)}  # fmt: skip


def drawn(monkeypatch, tmp_path, blocks):
    kept = []
    save = plots.save
    monkeypatch.setattr(plots, "save", lambda figure, path: (kept.append(figure), save(figure, path)))
    plot_points.draw(tmp_path / "a.png", blocks, "title")
    assert (tmp_path / "a.png").stat().st_size > 10_000
    return kept[0]


def test_labels_lie_apart_and_inside(monkeypatch, tmp_path):
    from matplotlib.text import Text

    blocks = [{"d_model": 64, "d_ff": 160, "roof": ROOF.to_dict(), "rows": list(rows_of(t))} for t in (1, 16, 512)]
    figure = drawn(monkeypatch, tmp_path, blocks)
    figure.canvas.draw()
    ax, renderer = figure.axes[0], figure.canvas.get_renderer()
    labels = {t.get_text(): Text.get_window_extent(t, renderer) for t in ax.texts}
    assert {f"{r['format']}@{r['tokens']}" for b in blocks for r in b["rows"]} < set(labels)
    assert {"fp32: 100 GFLOP/s", "int8 (estimated): 400 GFLOP/s", "memory, 2 GB/s"} < set(labels)
    names = [n for n in labels if "@" in n]
    frame = ax.get_window_extent(renderer)
    for i, name in enumerate(names):
        box = labels[name]
        assert frame.x0 < box.x0 < box.x1 < frame.x1, name
        assert frame.y0 < box.y0 < box.y1 < frame.y1, name
        assert not [o for o in names[i + 1 :] if box.overlaps(labels[o])], name


def test_equal_peaks_share_a_line_of_text(monkeypatch, tmp_path):
    roof = {**ROOF.to_dict(), "flops": {"fp32": 1e11, "bf16": 1e11, "int8": 4e11}}
    blocks = [{"d_model": 64, "d_ff": 160, "roof": roof, "rows": list(rows_of(1))}]
    words = [t.get_text() for t in drawn(monkeypatch, tmp_path, blocks).axes[0].texts]
    assert "fp32, bf16 (estimated): 100 GFLOP/s" in words


def test_several_shapes_are_told_apart():
    row = next(rows_of(1))
    assert plot_points._label({"d_model": 64, "d_ff": 160}, row, shapes=True) == "fp32@1 64x160"


def test_a_missing_matplotlib_is_said_before_anything_is_timed(monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = invoke("--shape", "64x160", "--plot", tmp_path / "a.png")
    assert result.exit_code == 2
    assert "pip install 'fanfold[plots]'" in result.stderr


def test_another_thread_count_than_the_roofs_is_said():
    block = {"roof": ROOF.to_dict(), "threads": 1}
    assert "the roof is that of 2 threads, the calls had 1" in bench_tables._roof_line(block)
    assert "calls had" not in bench_tables._roof_line({**block, "threads": 2})
