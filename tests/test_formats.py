"""Integer codes: scales that are never worse than the plain ones, edges of float16, GGUF's blocks bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fanfold import formats
from fanfold.count import formats as stored
from fanfold.formats import fit
from fanfold.kernels import cpu
from fanfold.kernels.packed import PackedMatrix
from fanfold.numerics import UNIT_ROUNDOFF

Array = np.ndarray[Any, Any]
GROUPED = [f for f in formats.INTEGER if stored.get(f).group]
TINY = float(np.finfo(np.float16).smallest_subnormal)  # 2^-24
# (rows, inputs): whole groups, a short last group, one input, one more and one less than a group
SHAPES = [(3, 256), (2, 200), (5, 1), (1, 33), (4, 127), (2, 576)]


@contextmanager
def _threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _weights(shape: tuple[int, int], kind: str, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    w = {
        "normal": lambda: rng.normal(size=shape),
        "tails": lambda: rng.standard_t(2.5, size=shape),
        "shifted": lambda: rng.normal(size=shape) * 0.01 + 3,
        "sparse": lambda: rng.normal(size=shape) * (rng.random(shape) < 0.05),
        "tiny": lambda: rng.normal(size=shape) * 1e-7,
        "steps": lambda: rng.integers(-8, 8, shape) / 8,
    }[kind]()
    return np.asarray(w, np.float32)


def _group_errors(w: Array, q: formats.Quantized, weight: Array | None = None) -> Array:
    """[N, G] float64: each group's weighted squared error."""
    off = np.square(q.dequantize(np.float64) - w.astype(np.float64)) * (1.0 if weight is None else weight)
    starts = np.arange(0, w.shape[1], stored.get(q.format).group or w.shape[1])
    return np.add.reduceat(off, starts, axis=1)


def _worse(w: Array, q: formats.Quantized, weight: Array | None = None) -> bool:
    """Whether some group of `q` is worse than the plain scales leave it."""
    plain = formats.quantize_matrix(w, q.format, scales="plain")
    return bool((_group_errors(w, q, weight) > _group_errors(w, plain, weight)).any())


@pytest.mark.parametrize("format", formats.INTEGER)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["normal", "tails", "shifted", "sparse", "tiny", "steps"])
def test_search_is_never_worse_than_plain(format, shape, kind):
    w = _weights(shape, kind)
    q = formats.quantize_matrix(w, format)
    assert q.shape == shape
    assert not _worse(w, q)


@settings(max_examples=40, deadline=None)
@given(
    format=st.sampled_from(formats.INTEGER),
    kind=st.sampled_from(["normal", "tails", "sparse", "tiny", "steps"]),
    n=st.integers(1, 4),
    k=st.integers(1, 300),
    seed=st.integers(0, 1000),
)
def test_search_is_never_worse_than_plain_anywhere(format, kind, n, k, seed):
    w = _weights((n, k), kind, seed)
    importance = np.random.default_rng(seed).random(k).astype(np.float32) ** 4
    assert not _worse(w, formats.quantize_matrix(w, format))
    assert not _worse(w, formats.quantize_matrix(w, format, importance), importance.astype(np.float64))


def _same(a: formats.Quantized, b: formats.Quantized) -> bool:
    """Codes, scales and minima alike, but for the sign of a zero."""
    tables = [(a.codes, b.codes), (a.scale, b.scale)] + ([] if a.minimum is None else [(a.minimum, b.minimum)])
    return all(one.dtype == other.dtype and np.array_equal(one, other) for one, other in tables)


@pytest.mark.parametrize("isa", cpu.isas())
@pytest.mark.parametrize("format", formats.INTEGER)
@pytest.mark.parametrize("shape", [*SHAPES, (37, 127), (16, 64), (33, 257)])
def test_compiled_and_numpy_agree_bit_by_bit(isa, format, shape, monkeypatch):
    """On every instruction set and number of threads, rows that fill no vector too."""
    monkeypatch.setenv("FANFOLD_ISA", isa)
    for seed, kind in enumerate(["normal", "tails", "shifted", "sparse", "tiny", "steps"]):
        w = _weights(shape, kind, seed) * np.float32(1e-38 if seed == 2 else 1)  # subnormal numbers once
        w[0, 0] = 0
        importance = None if seed % 2 else np.random.default_rng(seed).random(shape[1]).astype(np.float32) ** 4
        for scales in ("search", "plain"):
            with _threads(1 + seed % 3):
                made = fit._compiled(w, format, importance, scales == "search")
            assert made is not None
            assert _same(made, fit._in_numpy(w, format, importance, scales)), (kind, scales)
            assert _same(made, formats.quantize_matrix(w, format, importance, scales))


@pytest.mark.parametrize("format", formats.INTEGER)
def test_that_agreement_is_of_every_step_of_the_search(format, monkeypatch):
    """Mutants: NumPy's way with a refinement less, with every other scale, with sums from the last weight on."""
    w = _weights((64, 256), "normal")
    made = formats.quantize_matrix(w, format)
    search = fit._Search

    def changed(**fields: Any) -> Any:
        def make(*args: Any) -> Any:
            how = search(*args)
            for name, change in fields.items():
                setattr(how, name, change(getattr(how, name)))
            return how

        return make

    for mutant in (changed(again=lambda n: n - 1), changed(steps=lambda s: s[::2])):
        with monkeypatch.context() as patch:
            patch.setattr(fit, "_Search", mutant)
            assert not _same(made, fit._in_numpy(w, format, None, "search"))
    monkeypatch.setattr(fit, "_sum", lambda of: np.add.accumulate(of[:, ::-1], axis=1)[:, -1])
    if format == "int8":  # float16 hides most of such roundings
        assert not _same(made, fit._in_numpy(w, format, None, "search"))


def test_rows_that_are_not_contiguous():
    format = "int4_g32"
    w = _weights((20, 128), "normal")
    assert _same(formats.quantize_matrix(np.asfortranarray(w), format), formats.quantize_matrix(w, format))
    assert _same(formats.quantize_matrix(w[::2, 32:], format), formats.quantize_matrix(w[::2, 32:].copy(), format))


def test_without_kernels_numpy_rounds(monkeypatch):
    w = _weights((20, 128), "normal")
    made = formats.quantize_matrix(w, "int4_g32")
    monkeypatch.setenv("FANFOLD_ISA", "none such")
    assert fit._compiled(w, "int4_g32", None, True) is None
    assert _same(formats.quantize_matrix(w, "int4_g32"), made)


@pytest.mark.parametrize("format", formats.INTEGER)
def test_that_property_sees_a_worse_scale(format):
    """Mutants: scales 5 % off, and codes of the group before."""
    w = _weights((4, 256), "normal")
    q = formats.quantize_matrix(w, format)
    wider = formats.Quantized(
        format=format, codes=q.codes, scale=(q.scale * 1.05).astype(q.scale.dtype), minimum=q.minimum
    )
    moved = formats.Quantized(format=format, codes=np.roll(q.codes, 1, axis=1), scale=q.scale, minimum=q.minimum)
    assert _worse(w, wider)
    assert _worse(w, moved)


@pytest.mark.parametrize("format", formats.INTEGER)
def test_search_gains_what_it_is_for(format):
    """Over a whole Gaussian matrix the squared error falls: by a tenth where four bits leave room for it."""
    w = _weights((64, 512), "normal")
    ratio = [_group_errors(w, formats.quantize_matrix(w, format, scales=s)).sum() for s in ("search", "plain")]
    assert ratio[0] < ratio[1] * (0.9 if stored.get(format).code_bits == 4 else 1)


@pytest.mark.parametrize("format", formats.INTEGER)
@pytest.mark.parametrize("scales", ["search", "plain"])
def test_codes_are_the_nearest_ones_of_the_scale_as_stored(format, scales):
    w = _weights((8, 300), "tails")
    q = formats.quantize_matrix(w, format, scales=scales)
    low, high = (0, 15) if stored.get(format).code_bits == 4 else (-127, 127)
    assert low <= q.codes.min()
    assert q.codes.max() <= high
    mine = np.abs(q.dequantize(np.float64) - w)
    slack = 4 * UNIT_ROUNDOFF["float32"] * np.abs(w).max()  # the division that picks a code is in float32
    for step in (-1, 1):
        codes = q.codes.astype(np.int16) + step
        inside = (codes >= low) & (codes <= high)
        other = formats.Quantized(
            format=format, codes=np.clip(codes, low, high).astype(q.codes.dtype), scale=q.scale, minimum=q.minimum
        )
        assert (mine <= np.abs(other.dequantize(np.float64) - w) + slack)[inside].all()


@pytest.mark.parametrize("format", formats.INTEGER)
def test_zero_rows_and_groups_stay_zero(format):
    w = _weights((4, 256), "normal")
    w[1] = 0
    w[2, :128] = 0
    back = formats.quantize_matrix(w, format).dequantize()
    assert not back[1].any()
    if stored.get(format).group:
        assert not back[2, :128].any()
    assert back[2, 128:].any()


@pytest.mark.parametrize("format", formats.INTEGER)
@pytest.mark.parametrize("value", [1e-45, 1e-30, 3e-8, 1e-7, 1.0, -5.5, 60000.0])
def test_equal_weights(format, value):
    """A group without spread: finite, and no farther off than its codes' range or float16's smallest step allows."""
    w = np.full((2, 70), value, np.float32)
    q = formats.quantize_matrix(w, format)
    assert np.isfinite(q.scale).all()
    assert not _worse(w, q)
    allowed = max(abs(np.float64(w[0, 0])) * 2.0**-7, TINY / 2)
    assert np.abs(q.dequantize(np.float64) - w).max() <= allowed
    if abs(value) > 1e-3:
        assert np.sign(q.dequantize()[0, 0]) == np.sign(value)


def test_equal_weights_below_float16_become_zero_or_its_smallest_step():
    w = np.asarray([[TINY * 0.4] * 32, [TINY * 0.6] * 32, [TINY * 1.2] * 32], np.float32)
    back = formats.quantize_matrix(w, "int8_g32").dequantize()
    assert back[:, 0].tolist() == [0.0, TINY, TINY]


@pytest.mark.parametrize("format", GROUPED)
def test_scales_below_float16(format):
    """max|w| / 15 is under 2^-24 but the weights are not: the smallest scale there is, never 0 / 0."""
    w = _weights((2, 128), "normal") * np.float32(TINY)
    q = formats.quantize_matrix(w, format)
    back = q.dequantize(np.float64)
    assert np.isfinite(back).all()
    assert np.square(back - w).sum() < np.square(w.astype(np.float64)).sum()
    assert np.abs(back - w).max() <= TINY


def test_int8_rows_have_float32_scales():
    """One scale a row reaches where float16 does not."""
    for factor in (1e-30, 1e30):
        w = _weights((3, 64), "normal") * np.float32(factor)
        q = formats.quantize_matrix(w, "int8")
        assert np.abs(q.dequantize(np.float64) - w).max() <= np.abs(w).max() / 127 * 0.51


@pytest.mark.parametrize("scales", ["search", "plain", "ggml"])
def test_too_large_for_float16_is_refused_with_the_numbers(scales):
    w = _weights((3, 96), "normal")
    w[1, 40] = 1e7
    with pytest.raises(ValueError, match=r"row 1, inputs 32 to 63: .*need a scale of 78740.*float16 is 65504"):
        formats.quantize_matrix(w, "q8_0", scales=scales)
    w[1, 32:64] = 70000.0
    with pytest.raises(ValueError, match=r"row 1, inputs 32 to 63: .*need a minimum of 70000"):
        formats.quantize_matrix(w, "q4_1", scales=scales)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(value):
    w = _weights((3, 40), "normal")
    w[2, 7] = value
    with pytest.raises(ValueError, match=r"weight \[2, 7\] is -?(nan|inf): 1 of 120 weights"):
        formats.quantize_matrix(w, "int4_g32")


def test_wrong_arguments():
    w = _weights((2, 40), "normal")
    with pytest.raises(ValueError, match="no integer codes; known: int8"):
        formats.quantize_matrix(w, "bf16")
    with pytest.raises(ValueError, match="known: search, plain, and ggml for q8_0"):
        formats.quantize_matrix(w, "int8", scales="ggml")
    with pytest.raises(ValueError, match="whole blocks of 32"):
        formats.quantize_matrix(w, "q8_0", scales="ggml")
    with pytest.raises(ValueError, match=r"expected floats \[n_out, n_in\]"):
        formats.quantize_matrix(w.astype(np.int32), "int8")
    for importance in (np.ones(39), np.full(40, -1.0), np.full(40, np.nan)):
        with pytest.raises(ValueError, match=r"expected \(40,\) finite numbers of at least 0"):
            formats.quantize_matrix(w, "int8", importance)


@pytest.mark.parametrize("format", formats.INTEGER)
def test_importance_moves_the_error_to_where_it_does_not_count(format):
    w = _weights((32, 256), "tails")
    importance = np.random.default_rng(1).random(256) ** 6
    errors = [
        _group_errors(w, formats.quantize_matrix(w, format, given), importance).sum() for given in (importance, None)
    ]
    assert errors[0] < errors[1]


@pytest.mark.parametrize("format", formats.INTEGER)
def test_no_columns_no_rows_and_packing(format):
    for shape in ((0, 64), (3, 0), (17, 75)):
        q = formats.quantize_matrix(_weights(shape, "normal"), format)
        if 0 in shape:
            assert q.dequantize().shape == shape
            continue
        back = PackedMatrix.pack(q).quantized()
        assert np.array_equal(back.codes, q.codes)
        assert np.array_equal(back.scale, q.scale)


# ---- GGUF ----


def _type(format: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[format.upper()]


@pytest.mark.parametrize("format", formats.GGUF)
@pytest.mark.parametrize("kind", ["normal", "tails", "shifted", "sparse", "steps"])
def test_ggml_rounding_is_bit_exact(format, kind):
    w = _weights((7, 160), kind)
    theirs = gguf.quants.quantize(w, _type(format))
    q = formats.quantize_matrix(w, format, scales="ggml")
    assert formats.to_gguf_blocks(q) == theirs.tobytes()
    ours = formats.quantize_matrix(w, format)
    off = [np.square(a.astype(np.float64) - w).sum() for a in (ours.dequantize(), q.dequantize())]
    assert off[0] <= off[1]


@pytest.mark.parametrize("format", formats.GGUF)
def test_blocks_read_as_the_gguf_package_reads_them(format):
    w = _weights((5, 96), "normal")
    raw = gguf.quants.quantize(w, _type(format))
    q = formats.from_gguf_blocks(raw, format, w.shape)
    assert np.array_equal(q.dequantize(), gguf.quants.dequantize(raw, _type(format)))
    assert formats.to_gguf_blocks(q) == raw.tobytes()
    again = formats.from_gguf_blocks(formats.to_gguf_blocks(q), format, w.shape)
    for name in ("codes", "scale", "minimum"):
        assert np.array_equal(getattr(q, name), getattr(again, name)) if getattr(q, name) is not None else True
    if format != "q8_0":  # mutant: neighbours in a byte instead of halves of the block
        pairs = q.codes.reshape(-1, 2, 16).swapaxes(1, 2).reshape(q.codes.shape)
        wrong = formats.Quantized(format=format, codes=np.ascontiguousarray(pairs), scale=q.scale, minimum=q.minimum)
        assert not np.array_equal(wrong.dequantize(), gguf.quants.dequantize(raw, _type(format)))


@pytest.mark.parametrize("format", formats.GGUF)
def test_any_bytes_are_blocks_and_come_back(format):
    """Codes of -128, scales of NaN, infinity, minus zero: nothing is normalised."""
    size = formats.block_bytes(format)
    raw = np.random.default_rng(0).integers(0, 256, 3 * 4 * size, dtype=np.uint8)
    raw[:2], raw[size : size + 2] = (0, 0x7E), (0, 0x80)
    assert formats.to_gguf_blocks(formats.from_gguf_blocks(raw.tobytes(), format, (3, 128))) == raw.tobytes()


def test_one_block_by_hand():
    """q4_1: scale 0.5, minimum -1; byte j holds weight j in its low half and weight j + 16 in its high one."""
    body = bytes(j | (15 - j) << 4 for j in range(16))
    block = np.asarray([0.5, -1], np.float16).tobytes() + body
    q = formats.from_gguf_blocks(block, "q4_1", (1, 32))
    expected = [0.5 * j - 1 for j in range(16)] + [0.5 * (15 - j) - 1 for j in range(16)]
    assert q.dequantize()[0].tolist() == expected


def test_wrong_blocks():
    with pytest.raises(ValueError, match="no GGUF blocks; known: q8_0, q4_0, q4_1"):
        formats.block_bytes("int4_g32")
    with pytest.raises(ValueError, match=r"q4_0 blocks of a \[2, 64\] matrix: 71 bytes.*18 bytes each: 72 bytes"):
        formats.from_gguf_blocks(bytes(71), "q4_0", (2, 64))
    with pytest.raises(ValueError, match="whole blocks"):
        formats.from_gguf_blocks(bytes(36), "q4_0", (1, 48))
    with pytest.raises(ValueError, match="rows of 48 weights are not whole blocks"):
        formats.to_gguf_blocks(formats.quantize_matrix(_weights((1, 48), "normal"), "q8_0"))
