"""One rank's part of quantized folders: bit by bit what cutting the whole gives, from its own bytes alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import fanfold as ff
from fanfold import formats, parallel
from fanfold.checkpoints import CheckpointError, packed_parts, partial
from fanfold.count import formats as stored
from fanfold.kernels.packed import FORMATS, LANES, PackedMatrix, block_inputs, packed_bytes
from fanfold.kernels.packed_spans import region
from fanfold.quantize.files import Folder
from test_parallel_plan import same

BIASED = {"up_bias": True, "gate_bias": True, "down_bias": True}


def matrix(format, n, k, seed=0, activations=None):
    """Random codes and scales, packed: quicker than rounding."""
    rng = np.random.default_rng([seed, n, k])
    if format in formats.FLOAT:
        return PackedMatrix.pack(torch.from_numpy(rng.normal(size=(n, k)).astype(np.float32)), format)
    low, high = (-127, 128) if stored.get(format).code_bits == 8 else (0, 16)
    codes = rng.integers(low, high, (n, k)).astype(formats.code_dtype(format))
    wide = np.float16 if stored.get(format).group else np.float32
    scale, minimum = (rng.uniform(0.01, 1, (n, formats.n_groups(format, k))).astype(wide) for _ in range(2))
    least = minimum if formats.has_minimum(format) else None
    return PackedMatrix.pack(
        formats.Quantized(format=format, codes=codes, scale=scale, minimum=least), activations=activations
    )


def weights(spec, format, down=None, seed=0):
    arrays = {}
    for i, (name, shape) in enumerate(stored.matrices(spec).items()):
        arrays[name] = matrix(down or format if name == "down" else format, *shape, seed=10 * seed + i)
        width = shape[0]
        if getattr(spec, f"{name}_bias"):
            arrays[f"{name}_bias"] = torch.from_numpy(np.random.default_rng(i).normal(size=width)).float()
    return ff.Weights(spec, **arrays)


def folder(path, layers):
    """A quantized folder of these Weights."""
    rows = []
    with Folder(path, {}, "1") as out:
        for i, own in enumerate(layers):
            metadata = out.write(i, i, own, {})
            rows.append({"layer": i, "file": out.place(i).name, "sha256": metadata["sha256"]})
        out.finish({"format": "x", "method": "rtn", "source": "", "layers": rows, "config": {}})
    return path


def widths(format, down):
    """d_ff of several whole groups, of a started one, and of none more than that."""
    group = formats.group(down or format) or 1
    return (5 * group, 7 * group + group // 3) if group > 1 else (80, 97)


CASES = [
    *((name, None, gated) for name in FORMATS for gated in (True, False)),
    ("int4_g64", "bf16", True),  # rows in columns that the cut goes through
    ("int8_g128", "int8", True),
    ("fp16", "q4_1", False),
]


@pytest.mark.parametrize(("format", "down", "gated"), CASES)
def test_parts_are_those_of_the_whole(format, down, gated, tmp_path):
    for i, d_ff in enumerate(widths(format, down)):
        biases = BIASED if gated else {"up_bias": True, "down_bias": True}
        spec = ff.Spec(d_model=(40, 33)[i], d_ff=d_ff, activation="silu", gated=gated, **(biases if i else {}))
        whole = weights(spec, format, down)
        path = folder(tmp_path / f"q{i}", [whole])
        for tp in (1, 2, 3, 4, 5):
            loaded = [ff.load(path, rank=r, tp=tp) for r in range(tp)]
            parts = [one.ffns[0] for one in loaded]
            for r, part in enumerate(parts):
                assert part.spec == loaded[r].spec(0) == loaded[r].plans[0].ranks[r].spec
                assert same(part, parallel.shard(whole, loaded[r].plans[0], r)), (tp, r)
            assert same(parallel.unshard(parts), whole)
        parallel.save(ff.load(path), tmp_path / f"s{i}", 4)
        for tp in (1, 2, 3, 4):
            for r in range(tp):
                loaded = ff.load(tmp_path / f"s{i}", rank=r, tp=tp)
                assert same(loaded.ffns[0], parallel.shard(whole, loaded.plans[0], r)), (tp, r)


def test_several_batches(tmp_path, monkeypatch):
    """Parts that are read in many batches, whose columns the cut goes through: none is read twice."""
    spec = ff.Spec(d_model=70, d_ff=301, activation="silu", gated=True)
    for size in (1, 4000):
        monkeypatch.setattr(packed_parts, "_BATCH", size)
        for format in ("bf16", "int8", "fp32"):
            whole = weights(spec, format)
            path = folder(tmp_path / f"{format}{size}", [whole])
            for tp, r in ((2, 1), (3, 1), (5, 4)):
                loaded = ff.load(path, rank=r, tp=tp)
                count, part = reading(lambda made=loaded: made.ffns[0], monkeypatch)
                assert same(part, parallel.shard(whole, loaded.plans[0], r)), (format, tp, r)
                assert count <= allowed(whole, part)


def test_groups_are_not_cut(tmp_path):
    spec = ff.Spec(d_model=16, d_ff=160, activation="silu", gated=True)
    path = folder(tmp_path / "q", [weights(spec, "int8", "q4_0")])
    with pytest.raises(
        ValueError, match=r"d_ff=160 cannot be split over 6 ranks in groups of 32: it has 5 groups. Use tp"
    ):
        ff.load(path, rank=0, tp=6)
    piece = packed_parts.Piece(None, "q4_0", "int8", (16, 160), (0, 16), (32, 80))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"inputs 32 to 80 of 160 cut a group of 32 \(q4_0\): plan with"):
        packed_parts.gather([piece], 1)


# ---- the bytes of a part ----


@pytest.mark.parametrize("format", FORMATS)
def test_region_of_any_part(format):
    """A region's bytes hold the part, whatever else its file holds; and they are few."""
    rng = np.random.default_rng(FORMATS.index(format))
    group = formats.group(format) or 1
    for n, k in ((48, 4 * group * (1 if group > 1 else 13)), (35, 5 * group + group // 3 + 1), (7, 3)):
        whole = matrix(format, n, k)
        ends = sorted({*range(0, k, group), k})
        for _ in range(12):
            a, b = sorted(rng.choice(len(ends), 2, replace=False)) if len(ends) > 1 else (0, 1)
            first, last = sorted(rng.choice(n + 1, 2, replace=False))
            rows, inputs = (int(first), int(last)), (ends[a], ends[b])
            found = region(format, (n, k), rows, inputs)
            data = torch.zeros(packed_bytes(format, *found.shape), dtype=torch.uint8)
            for at, to, size in found.spans:
                data[to : to + size] = whole.data[at : at + size]
            held = PackedMatrix(format, found.shape, data)
            mine = parallel.slices.cut(held, 0, rows[0] - found.rows[0], rows[1] - found.rows[0])
            mine = parallel.slices.cut(mine, 1, inputs[0] - found.inputs[0], inputs[1] - found.inputs[0])
            wanted = parallel.slices.cut(parallel.slices.cut(whole, 0, *rows), 1, *inputs)
            assert torch.equal(mine.data, wanted.data), (rows, inputs)
            read = sum(size for *_, size in found.spans)
            assert read <= packed_bytes(format, rows[1] - rows[0] + 30, inputs[1] - inputs[0]) + excess(format, n)


def excess(format, n_out):
    """Bytes that a part of inputs reads beside its own, at most: the other groups' headers or inputs at either end."""
    f = stored.get(format)
    groups = block_inputs(format) // f.group * f.group_bytes if f.group else 3 * f.code_bits // 8
    return 2 * -(-n_out // LANES) * LANES * groups


def allowed(whole, part):
    """Bytes that a part may cost: its own, a column of gate and up at either end, and `excess`."""
    total = sum(4 * v.numel() for name, v in part.items() if name.endswith("bias"))
    for name, value in part.items():
        if isinstance(value, PackedMatrix):
            more = excess(value.format, value.shape[0])
            if name != "down":
                more = 2 * packed_bytes(value.format, LANES, value.shape[1])
            total += value.nbytes + more
    return total


def reading(work, monkeypatch):
    """(bytes that `work` asked files for, its result)."""
    asked = []
    original = os.preadv

    def preadv(descriptor, buffers, offset):
        got = original(descriptor, buffers, offset)
        asked.append(got)
        return got

    with monkeypatch.context() as patch:
        patch.setattr(partial.os, "preadv", preadv)
        result = work()
    return sum(asked), result


# with a fixed threshold what is freed goes back to the system at once, so that the peak is the code's own
ALONE = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
MEASURE = """
import json, sys
from pathlib import Path
import fanfold as ff

def number(file, key):
    return int(next(line for line in Path(file).read_text().splitlines() if line.startswith(key)).split()[1])

ff.load(sys.argv[2], rank=1, tp=3).ffns[0]  # what is imported and allocated once
for place, tp, rank in json.loads(sys.argv[1]):
    loaded = ff.load(place, rank=rank, tp=tp)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    read, resident = number("/proc/self/io", "rchar"), number("/proc/self/status", "VmRSS")
    part = loaded.ffns[0]
    read, peak = number("/proc/self/io", "rchar") - read, number("/proc/self/status", "VmHWM") - resident
    print(json.dumps([read, 1024 * peak, sum(value.nbytes for _, value in part.items())]))
    del part
"""


@pytest.mark.parametrize("format", ["bf16", "int8", "int4_g128", "q8_0", "q4_1"])
def test_each_rank_reads_its_own_bytes(format, tmp_path):
    """Bytes that the system handed over, and the peak of memory, mapped files counted: this rank's share, and next to
    nothing else. tp=3: columns and blocks that the cut goes through; a folder of shards: joined, too."""
    spec = ff.Spec(d_model=512, d_ff=24600, activation="silu", gated=True, **BIASED)
    whole = weights(spec, format)
    folder(tmp_path / "q", [whole])
    parallel.save(ff.load(tmp_path / "q"), tmp_path / "s", 4)
    n_bytes = sum(value.nbytes for _, value in whole.items())
    asked = [("q", 4, 0), ("q", 4, 3), ("q", 3, 1), ("s", 3, 1), ("s", 2, 1)]
    tiny = folder(tmp_path / "tiny", [weights(ff.Spec(d_model=40, d_ff=610, activation="silu", gated=True), format)])
    places = [(str(tmp_path / place), tp, rank) for place, tp, rank in asked]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps(places), str(tiny)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **ALONE},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for (place, tp, rank), line in zip(asked, done.stdout.splitlines(), strict=True):
        read, peak, share = json.loads(line)
        assert share <= n_bytes / tp + 128 * 3 * 512 * 4 + 4 * 512, (place, tp, rank)  # a group more, down's bias
        slack = 16 << 10  # of /proc itself
        assert 0.99 * share <= read <= allowed(whole, part_of(whole, tp, rank)) + slack, (place, tp, rank, read, share)
        assert read <= 1.03 * share + slack
        assert peak <= share + (5 << 20) < n_bytes, (place, tp, rank, peak, share, n_bytes)


def part_of(whole, tp, rank):
    return parallel.shard(whole, parallel.plan(whole.spec, tp, whole.down.format), rank)


def test_a_file_that_changes_is_noticed(tmp_path):
    spec = ff.Spec(d_model=16, d_ff=64, activation="silu", gated=False)
    path = folder(tmp_path / "q", [weights(spec, "int8")])
    loaded = ff.load(path, rank=0, tp=2)
    os.utime(path / "ffn-00000.safetensors", ns=(1, 1))
    with pytest.raises(CheckpointError, match=r"has changed since it was opened: load it again"):
        loaded.ffns[0]


def test_pieces_of_other_formats_are_refused(tmp_path):
    spec = ff.Spec(d_model=16, d_ff=64, activation="silu", gated=False)
    for name, form in (("a", "int8"), ("b", "bf16")):
        parallel.save(ff.load(folder(tmp_path / name, [weights(spec, form)])), tmp_path / f"s{name}", 2)
    file = "rank-1-of-2/ffn-00000.safetensors"
    (tmp_path / "sa" / file).write_bytes((tmp_path / "sb" / file).read_bytes())
    index, other = (tmp_path / f"s{name}" / "rank-1-of-2" / "fanfold.json" for name in "ab")
    said = json.loads(index.read_text())
    said["layers"] = json.loads(other.read_text())["layers"]
    index.write_text(json.dumps(said))
    with pytest.raises(ValueError, match=r"the pieces are packed as .*bf16.*int8.*: expected one format"):
        ff.load(tmp_path / "sa", rank=0, tp=1).ffns[0]
