"""linears="all": attention's projections and lm_head on the same kernels; ties, what is left and why, calibration."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import fanfold as ff
from families import FAMILIES, build, inputs, logits
from fanfold import numerics
from fanfold.models.swapped import is_swapped

BY_NAME = {f.name: f for f in FAMILIES}
# (FFNs, other linears, RMS norms)
COUNTS = {
    "llama": (2, 9, 5), "gpt2": (2, 5, 0), "bert": (2, 10, 0), "opt": (2, 9, 0), "t5": (4, 25, 12), "phi3": (2, 5, 5),
}  # fmt: skip


def run(model: nn.Module, batch: dict) -> torch.Tensor:
    with torch.no_grad():
        return logits(model, batch)


@pytest.mark.parametrize("family", COUNTS)
@pytest.mark.parametrize("format", ["bf16", "int8", "q4_1"])
def test_every_linear_is_swapped_and_verified(family, format) -> None:
    model = build(BY_NAME[family])
    batch = inputs(model)
    report = ff.swap(model, format=format, linears="all", calibration=batch)
    assert (report.n_swapped, report.n_linears_swapped, report.n_norms_swapped) == COUNTS[family], str(report)
    assert (len(report.ffns), len(report.linears), len(report.norms)) == COUNTS[family]
    assert all(row.kind == "linear" and row.ratio <= 1 and row.shape for row in report.linears)
    assert all(row.kind == "norm" and row.ratio <= 1 and row.format is None for row in report.norms)
    run(model, batch)
    assert all(row.calls and not row.stepped_aside for row in report.rows), str(report)
    if format != "bf16":
        assert report.calibrated
        assert all(row.guard for row in (*report.ffns, *report.linears))
    ffns, linears, norms = COUNTS[family]
    said = f"{ffns} of {ffns} FFNs{', ' if norms else ' and '}{linears} of {linears} other linears"
    assert str(report).endswith(f"{said} and {norms} of {norms} norms swapped" if norms else f"{said} swapped")


@pytest.mark.parametrize("linears", ["ffn", "all"])
@pytest.mark.parametrize("given", [False, True])
def test_progress_rises_to_the_whole(linears, given) -> None:
    model, said = build(BY_NAME["llama"]), []
    found = ff.find(model) if given else None
    ff.swap(model, backend="cpu", linears=linears, found=found, progress=lambda *step: said.append(step))
    assert said == sorted(said)
    assert said[-1] == (100, 100)
    assert len(set(said)) > (1 if given and linears == "ffn" else 3)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_logits_are_those_of_the_dequantized_weights(family) -> None:
    model = build(BY_NAME[family])
    batch, plain = inputs(model), copy.deepcopy(model)
    ff.swap(model, format="q8_0", linears="all", activations="float")
    for name, m in model.named_modules():
        if is_swapped(m) and hasattr(m._fanfold, "weight"):
            own = plain.get_submodule(name)
            w = m._fanfold.weight.matrix(torch.float32)
            own.weight = nn.Parameter(w.t().contiguous() if own.weight.shape != w.shape else w)
            if type(own).__name__ == "Conv1D":
                own.weight = nn.Parameter(w.t().contiguous())
    after = run(model, batch)
    assert numerics.compare(after, run(copy.deepcopy(plain).double(), batch), run(plain, batch)).ok
    with torch.no_grad():
        next(m for n, m in plain.named_modules() if n.endswith(("q_proj", "c_attn", "query"))).weight[1].neg_()
    assert not numerics.compare(after, run(plain.double(), batch), run(plain.float(), batch)).ok


def test_in_place_linears() -> None:
    model = build(BY_NAME["llama"])
    batch = inputs(model)
    truth, before = run(copy.deepcopy(model).double(), batch), run(model, batch)
    report = ff.swap(model, linears="all", backend="cpu")
    assert report.n_linears_swapped == 9, str(report)
    assert numerics.compare(run(model, batch), truth, before).ok
    assert all(row.calls for row in report.rows)
    assert ff.unswap(model) == []
    assert torch.equal(run(model, batch), before)


@pytest.mark.parametrize("family", ["gpt2", "bert", "opt", "bloom"])
def test_tied_embeddings_stay_tied(family, tmp_path) -> None:
    model = build(BY_NAME[family])
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    original = table.weight
    assert head.weight is original
    batch = inputs(model)
    report = ff.swap(model, format="int8", linears="all")
    row = report.linears[-1]
    assert "tied to" in row.reason
    assert "keeps its own" in row.reason
    assert row.bytes_after == original.nbytes + head._fanfold.weight.nbytes
    assert table.weight is original
    expected = run(model, batch)
    twin = copy.deepcopy(model)
    for m in (model, twin):
        assert torch.equal(run(m, batch), expected)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            notes = ff.unswap(m)
        assert not any(row.path in n for n in notes)
        assert m.get_output_embeddings().weight is m.get_input_embeddings().weight
    assert head.weight is original


def test_a_tied_copy_that_does_not_pay_is_left() -> None:
    model = build(BY_NAME["gpt2"])
    row = ff.swap(model, format="fp32", linears="all").linears[-1]
    assert row.status == "left"
    assert "would add" in row.reason
    assert model.lm_head.weight is model.transformer.wte.weight


def test_a_table_that_changes_is_what_counts() -> None:
    model = build(BY_NAME["gpt2"])
    batch = inputs(model)
    row = ff.swap(model, format="q8_0", linears="all").linears[-1]
    head, table = model.lm_head, model.transformer.wte.weight
    x = torch.randn(1, 3, 32)
    with torch.no_grad():
        for _ in range(2):
            before = head(x)
        state = model.state_dict()
        assert state["lm_head.weight"].data_ptr() == table.data_ptr()
        model.load_state_dict(state)  # writes the same values
        assert torch.equal(head(x), before)
        assert not row.stepped_aside
        table.mul_(2)
        with pytest.warns(UserWarning, match="tied to has changed"):
            assert torch.equal(head(x), nn.functional.linear(x, table))
        assert torch.equal(copy.deepcopy(model).lm_head(x), nn.functional.linear(x, table))
        run(model, batch)


class Router(nn.Module):
    """An FFN behind a gate whose weight its code reads by itself."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.router = nn.Linear(32, 4, bias=False)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.other = nn.Linear(32, 32)

    def forward(self, x):
        w = self.router.weight
        scores = {
            "linear": lambda: nn.functional.linear(x, w),
            "transposed": lambda: x @ w.T,
            "rows": lambda: torch.stack([(x * row).sum(-1) for row in w], -1),
            "argmax": lambda: nn.functional.one_hot(nn.functional.linear(x, w).argmax(-1), 4).to(x),
            "dtype only": lambda: self.router(x.to(w.dtype)) * (w.dim() + w.shape[0]),
        }[self.how]()
        return self.other(x) + self.down(nn.functional.relu(self.up(x))) * scores.softmax(-1)[..., :1]


@pytest.mark.parametrize("how", ["linear", "transposed", "rows", "argmax", "dtype only"])
def test_a_weight_that_code_reads_by_itself_is_left(how) -> None:
    model = Router(how).eval()
    weight = model.router.weight
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        before = model(x)
    report = ff.swap(model, format="bf16", linears="all", inputs=x)
    row = next(row for row in report.linears if row.path == "router")
    if how == "dtype only":
        assert row.status == "swapped", str(report)
    else:
        assert row.status == "left"
        assert "by itself" in row.reason
        assert model.router.weight is weight
    assert next(row for row in report.linears if row.path == "other").status == "swapped"
    with torch.no_grad():
        assert numerics.relative_error(model(x), before) < 8 * numerics.UNIT_ROUNDOFF["bfloat16"]


def test_torchs_own_readers_are_left() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0).eval()
    model = nn.Sequential(layer, nn.Linear(32, 16)).eval()
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        before = model(x)
        report = ff.swap(model, format="int8", linears="all", inputs=x)
        assert [row.path for row in report.rows if row.status == "swapped"] == ["1"], str(report)
        assert all("reads its weight by itself" in row.reason for row in report.rows if row.status == "left")
        assert model(x).isfinite().all()
        assert torch.equal(layer(x), before.new_tensor(layer(x)))


def test_without_a_run_nothing_is_taken_for_granted() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 8)).eval()
    report = ff.swap(model, format="int8", linears="all")
    assert report.n_linears_swapped == 0
    assert all("pass inputs=" in row.reason for row in report.linears if row.status == "left")
    ff.unswap(model)
    model = nn.ModuleDict({"a": model, "unused": nn.Linear(32, 32)})
    model.forward = lambda x: model["a"](x)  # type: ignore[method-assign]
    report = ff.swap(model, format="int8", linears="all", inputs=torch.randn(4, 32))
    reasons = {row.path: row.reason for row in report.linears}
    assert reasons["unused"] == "a run of the model does not reach it"


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_subclass_that_does_more_is_left() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), Scaled(32, 8)).eval()
    x = torch.randn(4, 32)
    with torch.no_grad():
        before = model[3](x)
        report = ff.swap(model, format="fp32", linears="all", inputs=x)
        (row,) = [row for row in report.linears if row.path == "3"]
        assert row.status == "left"
        assert "not what the description says" in row.reason
        assert torch.equal(model[3](x), before)


def test_the_guard_gives_an_outlier_layer_float_activations() -> None:
    model = build(BY_NAME["llama"])
    batch = inputs(model)
    with torch.no_grad():  # a massive channel before the FFN of layer 0
        model.model.layers[0].post_attention_layernorm.weight[3] = 3e3
        model.model.layers[0].mlp.gate_proj.weight[:, 3] *= 1e-4
        model.model.layers[0].mlp.up_proj.weight[:, 3] *= 1e-4
    plain = copy.deepcopy(model)
    before = run(model, batch)
    report = ff.swap(model, format="int8", calibration=batch)
    first, second = report.rows
    assert first.activations["gate"] == first.activations["up"] == "float", str(report)
    assert second.activations["up"] == "int8"
    assert "massive" in first.guard["up"]
    assert "float activations: int8 activations change the output by" in str(report)
    assert report.argmax_tokens == before.shape[0] * before.shape[1]
    changed = int((run(model, batch).argmax(-1) != before.argmax(-1)).sum())
    assert report.argmax_changes == changed
    guarded = numerics.relative_error(run(model, batch), before)
    ff.swap(plain, format="int8", activations="int8")
    assert numerics.relative_error(run(plain, batch), before) > 2 * guarded


@pytest.mark.parametrize("kind", ["ids", "list", "array", "dict", "tuple"])
def test_forms_of_calibration(kind) -> None:
    model = build(BY_NAME["llama"])
    ids = torch.arange(3, 23).view(2, 10)
    given = {
        "ids": ids,
        "list": ids[0].tolist(),
        "array": ids.numpy(),
        "dict": {"input_ids": ids},
        "tuple": (ids,),
    }[kind]
    report = ff.swap(model, format="int8", calibration=given)
    assert report.calibrated
    assert report.argmax_tokens == (10 if kind == "list" else 20)


def test_calibration_leaves_hooks_and_random_numbers_alone() -> None:
    model = build(BY_NAME["llama"]).train()
    seen = []
    for m in model.modules():
        m.register_forward_hook(lambda *a: seen.append(1))
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ff.swap(model, format="int8", linears="all", calibration=inputs(model))
    assert not seen
    assert torch.equal(torch.get_rng_state(), state)
    assert all(m.training for m in model.modules())


def test_a_model_that_gives_nan_afterwards_is_put_back(monkeypatch) -> None:
    from fanfold.models import job

    model = build(BY_NAME["llama"])
    real, count = job.observe, []

    def observe(*args, **kwargs):
        seen = real(*args, **kwargs)
        count.append(1)
        seen.finite = len(count) == 1
        return seen

    monkeypatch.setattr(job, "observe", observe)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    report = ff.swap(model, format="bf16", linears="all", keep_originals=True)
    assert report.n_swapped == report.n_linears_swapped == 0
    assert "NaN came up" in report.rows[0].reason
    assert not any(map(is_swapped, model.modules()))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
