"""One rank's part read from files: the numbers of the whole, its bytes alone; folders of shards, for any number."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from safetensors.torch import save_file

import fanfold as ff
from fanfold import numerics, parallel
from fanfold.checkpoints import CheckpointError, partial
from fanfold.count import formats as stored
from fanfold.parallel.folder import packed
from fanfold.parallel.plans import Cut
from test_parallel_plan import same

D, F = 32, 160


def matrices(d=D, f=F, bias=False, dtype=torch.float32, layers=2):
    """[{name: tensor} a layer] of a gated FFN."""
    spec = ff.Spec.parse("swiglu", d_model=d, d_ff=f, up_bias=bias, gate_bias=bias, down_bias=bias)
    made = [numerics.random_weights(spec, seed=i, make=lambda a: torch.tensor(a).to(dtype)) for i in range(layers)]
    return [dict(w.items()) for w in made]


def config(path, **fields):
    (path / "config.json").write_text(json.dumps({"num_hidden_layers": 2, **fields}))
    return path


def llama(path, **options):
    tensors, bias = {}, options.get("bias", False)
    for i, w in enumerate(matrices(**options)):
        for name, value in w.items():
            projection, _, kind = name.partition("_")
            tensors[f"model.layers.{i}.mlp.{projection}_proj.{kind or 'weight'}"] = value.contiguous()
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    sizes = {"hidden_size": options.get("d", D), "intermediate_size": options.get("f", F)}
    return config(path, model_type="llama", hidden_act="silu", mlp_bias=bias, **sizes)


def phi3(path):
    tensors = {}
    for i, w in enumerate(matrices(dtype=torch.bfloat16)):
        tensors[f"model.layers.{i}.mlp.gate_up_proj.weight"] = torch.cat([w["gate"], w["up"]])
        tensors[f"model.layers.{i}.mlp.down_proj.weight"] = w["down"]
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    return config(path, model_type="phi3", hidden_act="silu", hidden_size=D, intermediate_size=F)


def gpt2(path):
    tensors = {}
    for i, w in enumerate(matrices(bias=True, dtype=torch.float16)):
        tensors[f"h.{i}.mlp.c_fc.weight"] = w["up"].t().contiguous()
        tensors[f"h.{i}.mlp.c_proj.weight"] = w["down"].t().contiguous()
        tensors[f"h.{i}.mlp.c_fc.bias"], tensors[f"h.{i}.mlp.c_proj.bias"] = w["up_bias"], w["down_bias"]
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    return config(path, model_type="gpt2", activation_function="gelu_new", n_embd=D, n_inner=F, n_layer=2)


def gguf_file(path, form, arch="llama", bias=False):
    writer = gguf.GGUFWriter(path, arch)
    for i, w in enumerate(matrices(bias=bias)):
        if arch == "phi3":
            w = {"up": torch.cat([w["gate"], w["up"]]), "down": w["down"]}
        for name, value in w.items():
            projection, _, kind = name.partition("_")
            at, array = f"blk.{i}.ffn_{projection}.{kind or 'weight'}", value.numpy()
            if array.ndim == 1:
                writer.add_tensor(at, array)
            else:
                writer.add_tensor(at, gguf.quants.quantize(array, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


FILES = {
    "llama": lambda p: llama(p, bias=True),
    "uneven": lambda p: llama(p, f=97, dtype=torch.bfloat16),
    "float64": lambda p: llama(p, f=98, dtype=torch.float64),
    "phi3": phi3,
    "gpt2": gpt2,
    "q8_0": lambda p: gguf_file(p.with_suffix(".gguf"), Q.Q8_0, bias=True),
    "q4_1": lambda p: gguf_file(p.with_suffix(".gguf"), Q.Q4_1),
    "q4_0 fused": lambda p: gguf_file(p.with_suffix(".gguf"), Q.Q4_0, arch="phi3"),
    "bf16 gguf": lambda p: gguf_file(p.with_suffix(".gguf"), Q.BF16, bias=True),
}


def dense(weights):
    return ff.Weights(
        weights.spec, **{n: v.contiguous() if isinstance(v, torch.Tensor) else v for n, v in weights.items()}
    )


@pytest.mark.parametrize("kind", FILES)
def test_parts_are_those_of_the_whole(kind, tmp_path):
    path = FILES[kind](tmp_path / "model")
    for as_packed in (False, True):
        if kind == "float64" and as_packed:
            continue
        whole = ff.load(path, packed=as_packed)
        for tp in (1, 2, 3, 4, 5):
            loaded = [ff.load(path, packed=as_packed, rank=r, tp=tp) for r in range(tp)]
            for layer in whole.ffns:
                parts = [one.ffns[layer] for one in loaded]
                made = loaded[0].plans[layer]
                for r, part in enumerate(parts):
                    assert part.spec == loaded[r].spec(layer) == made.ranks[r].spec
                    assert same(dense(part), dense(parallel.shard(whole.ffns[layer], made, r))), (kind, tp, r)
                assert same(parallel.unshard(list(map(dense, parts))), dense(whole.ffns[layer])), (kind, tp)


def test_groups_are_not_cut(tmp_path):
    path = gguf_file(tmp_path / "x.gguf", Q.Q4_0)
    with pytest.raises(
        ValueError, match=r"d_ff=160 cannot be split over 6 ranks in groups of 32: it has 5 groups. Use tp"
    ):
        ff.load(path, rank=0, tp=6)
    assert ff.load(path, rank=4, tp=5).spec(0).d_ff == 32


@pytest.mark.parametrize(("rank", "tp"), [(0, None), (None, 2), (2, 2), (-1, 2), (True, 2), (0, 0)])
def test_rank_and_tp_go_together(rank, tp, tmp_path):
    with pytest.raises(ValueError, match=re.escape(f"rank={rank!r}, tp={tp!r}: expected both, with 0 <= rank < tp")):
        ff.load(llama(tmp_path / "m"), rank=rank, tp=tp)


def _status(key):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def _read_bytes():
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


@pytest.mark.parametrize("kind", ["llama", "gpt2-like", "q8_0"])
def test_each_rank_reads_its_own_bytes(kind, tmp_path):
    """Bytes that the system handed over, and the peak of memory: this rank's share, and next to nothing else."""
    d, f, tp = 256, 8192, 4
    if kind == "q8_0":
        writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
        for i, w in enumerate(matrices(d, f)):
            for name, value in w.items():
                writer.add_tensor(
                    f"blk.{i}.ffn_{name}.weight", gguf.quants.quantize(value.numpy(), Q.Q8_0), raw_dtype=Q.Q8_0
                )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        path = tmp_path / "x.gguf"
    elif kind == "llama":
        path = llama(tmp_path / "m", d=d, f=f, dtype=torch.bfloat16)
    else:
        path = gpt2_like(tmp_path / "m", d, f)
    for rank in (0, 3):
        loaded = ff.load(path, packed=kind == "q8_0", rank=rank, tp=tp)
        share = sum(made.ranks[rank].bytes for made in loaded.plans.values())
        whole = sum(made.whole_bytes for made in loaded.plans.values())
        assert share <= whole / tp + 2 * 2 * d  # down's biases
        slack = 64 << 10  # of /proc itself, and what Python reads meanwhile
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before, resident = _read_bytes(), _status("VmRSS")
        kept = [partial.read_cut(ref, cut) for layer in loaded.ffns for _, ref, cut in loaded._ffns[layer]._cuts()]
        read, peak = _read_bytes() - before, _status("VmHWM") - resident
        assert share <= read + 4096
        assert read <= share + slack, (kind, read, share, whole)
        # blocks are unpacked to a byte a code: q8_0's codes are read and then stand beside the blocks of one matrix
        allowed = share * (1.6 if kind == "q8_0" else 1.0) + (4 << 20)
        assert peak <= allowed < whole, (kind, peak, share, whole)
        del kept


def gpt2_like(path, d, f):
    tensors = {}
    for i, w in enumerate(matrices(d, f, bias=True, dtype=torch.float16)):
        tensors[f"h.{i}.mlp.c_fc.weight"] = w["up"].t().contiguous()
        tensors[f"h.{i}.mlp.c_proj.weight"] = w["down"].t().contiguous()
        tensors[f"h.{i}.mlp.c_fc.bias"], tensors[f"h.{i}.mlp.c_proj.bias"] = w["up_bias"], w["down_bias"]
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    return config(path, model_type="gpt2", activation_function="gelu_new", n_embd=d, n_inner=f, n_layer=2)


def test_a_file_that_changes_is_noticed(tmp_path):
    path = llama(tmp_path / "m")
    loaded = ff.load(path, rank=0, tp=2)
    os.utime(path / "model.safetensors", ns=(1, 1))
    with pytest.raises(CheckpointError, match=r"has changed since it was opened: load it again"):
        loaded.ffns[0]
    loaded = ff.load(path, rank=0, tp=2)
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"cannot be opened"):
        loaded.ffns[0]


def test_read_cut_of_a_short_file(tmp_path):
    ref = next(iter(ff.load(llama(tmp_path / "m"))._ffns[0].parts.values()))
    longer = type(ref)(ref.name, ref.format, (10**6, D), ref.file, ref.start, ref.nbytes)
    with pytest.raises(CheckpointError, match=r"ends early"):
        partial.read_cut(longer, Cut(0, ((0, 10**6),)))


# ---- folders of shards ----


@pytest.mark.parametrize("kind", ["llama", "uneven", "gpt2", "q4_1", "q4_0 fused", "quantized"])
def test_saved_for_four_loaded_for_any(kind, tmp_path):
    if kind == "quantized":
        from fanfold.quantize.job import quantize_checkpoint

        quantize_checkpoint(ff.load(llama(tmp_path / "m", bias=True)), tmp_path / "q", "int8_g32", version="1")
        path = tmp_path / "q"
    else:
        path = FILES[kind](tmp_path / "model")
    source = ff.load(path, packed=path.suffix == ".gguf")
    done = []
    said = parallel.save(source, tmp_path / "out", 4, "a model", "1.2", lambda *at: done.append(at))
    assert done == [(1, 2), (2, 2)]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "fanfold_shards.json", *(f"rank-{r}-of-4" for r in range(4))
    ]  # fmt: skip
    assert [r["folder"] for r in said["ranks"]] == [f"rank-{r}-of-4" for r in range(4)]
    for layer in source.ffns:
        whole = packed(source.ffns[layer], "")
        assert same(ff.load(tmp_path / "out").ffns[layer], whole)
        for tp in (1, 2, 3, 4, 5):
            for r in range(tp):
                loaded = ff.load(tmp_path / "out", rank=r, tp=tp)
                assert loaded.rank == r
                wanted = parallel.shard(whole, loaded.plans[layer], r)
                assert same(loaded.ffns[layer], wanted), (kind, tp, r)
        for r in range(4):  # by itself, too
            assert same(
                ff.load(tmp_path / "out" / f"rank-{r}-of-4").ffns[layer],
                ff.load(tmp_path / "out", rank=r, tp=4).ffns[layer],
            )
        if kind == "quantized":  # the quantized folder itself, cut
            for r in range(3):
                loaded = ff.load(path, rank=r, tp=3)
                assert same(loaded.ffns[layer], parallel.shard(whole, loaded.plans[layer], r))
    again = parallel.save(source, tmp_path / "again", 4, "a model", "1.2")
    for name in ("rank-2-of-4/ffn-00001.safetensors", "fanfold_shards.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert again["layers"] == said["layers"]


def test_save_is_whole_or_absent(tmp_path):
    source = ff.load(llama(tmp_path / "m"))

    def stop(done, total):
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        parallel.save(source, out, 2, progress=stop)
    assert not out.exists()
    parallel.save(source, out, 2)  # what was left is begun anew
    assert not (tmp_path / "out.partial").exists()
    with pytest.raises(ValueError, match=r"out exists: give another place"):
        parallel.save(source, out, 2)
    (tmp_path / "other.partial").mkdir()
    with pytest.raises(ValueError, match=r"other.partial exists and is not what a stopped"):
        parallel.save(source, tmp_path / "other", 2)
    with pytest.raises(ValueError, match=r"d_ff=160 cannot be split over 161 ranks"):
        parallel.save(source, tmp_path / "third", 161)
    assert not (tmp_path / "third.partial").exists()
    with pytest.raises(ValueError, match=r"layer 0: (gate|up) is torch.float64"):
        parallel.save(ff.load(llama(tmp_path / "d", dtype=torch.float64)), tmp_path / "third", 2)
    with pytest.raises(ValueError, match=r"is not a folder"):
        parallel.save(source, tmp_path / "none" / "out", 2)


def test_damaged_shards_are_refused(tmp_path):
    parallel.save(ff.load(llama(tmp_path / "m", bias=True)), tmp_path / "out", 3)
    index = tmp_path / "out" / "fanfold_shards.json"
    good = json.loads(index.read_text())

    def refused(words, **changes):
        index.write_text(json.dumps({**good, **changes}))
        with pytest.raises(CheckpointError, match=words):
            ff.load(tmp_path / "out", rank=0, tp=2)

    refused("fanfold_shards is 2, this fanfold reads 1", fanfold_shards=2)
    refused("tp is 0", tp=0)
    refused("config is", config=[])
    layers = json.loads(json.dumps(good["layers"]))
    layers[0]["channels"][0] = [0, 50]
    refused("does not describe a layer", layers=layers)
    layers[0]["channels"] = [[0, 50], [50, 100], [100, 160]]
    refused("is gated silu 32->54 .*, expected gated silu 32->50", layers=layers)
    refused("does not describe a layer: 'layer'", layers=[{}])
    index.write_text(json.dumps(good))
    shutil.rmtree(tmp_path / "out" / "rank-1-of-3")
    with pytest.raises(CheckpointError, match=r"rank-1-of-3"):
        ff.load(tmp_path / "out", rank=0, tp=2)
    assert ff.load(tmp_path / "out", rank=0, tp=3).ffns[0].spec.down_bias  # rank 0 needs its own folder alone
    with pytest.raises(CheckpointError, match=r"activation='silu': a folder of quantized FFNs states its own"):
        ff.load(tmp_path / "out", activation="silu")


def test_sum_of_loaded_parts(tmp_path):
    """What users do: each rank loads its part, the partial outputs add up."""
    path = llama(tmp_path / "m", bias=True)
    x = torch.tensor(np.random.default_rng(0).normal(size=(4, D))).float()
    whole = ff.load(path).ffns[1]
    truth = ff.reference.forward(x, whole)
    total = sum(ff.ffn(x, ff.load(path, rank=r, tp=3).ffns[1]) for r in range(3))
    assert numerics.compare(total, truth, ff.ffn(x, whole, backend="torch")).ok
    assert stored.ffn_bytes(whole.spec, "fp32") == sum(r.bytes for r in ff.load(path, rank=0, tp=3).plans[1].ranks)
