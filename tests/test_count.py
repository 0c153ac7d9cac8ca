"""The count floor: bits, bytes, FLOPs, widths of the same budget."""

from __future__ import annotations

import pytest

from fanfold import Spec
from fanfold.count import cost

LLAMA = Spec.parse("swiglu", d_model=4096, d_ff=11008)


def test_flops_and_parameters_of_llama():
    """4096 x 11008 gated: 135,266,304 parameters, 270,532,608 FLOPs a token (180,355,072 would count two matrices)."""
    assert LLAMA.n_params == 135_266_304
    assert cost.flops_per_token(LLAMA) == 270_532_608
    assert cost.flops_per_token(Spec(d_model=4096, d_ff=11008, activation="gelu")) == 180_355_072


@pytest.mark.parametrize(
    ("format", "bits"), [("fp32", 32), ("bf16", 16), ("fp16", 16), ("q8_0", 8.5), ("q4_1", 5), ("q4_0", 4.5)]
)
def test_bits_and_bytes(format, bits):
    assert cost.bits_per_weight(format) == bits
    assert cost.ffn_bytes(LLAMA, format) == LLAMA.n_params * bits / 8


def test_bits_are_those_of_the_gguf_package():
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    for name in ("q8_0", "q4_1", "q4_0"):
        weights, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]]
        assert cost.bits_per_weight(name) == 8 * n_bytes / weights


def test_bytes_with_biases_and_partly_filled_blocks():
    spec = Spec(d_model=4, d_ff=33, activation="relu", up_bias=True, down_bias=True)
    assert cost.ffn_bytes(spec, "bf16") == 2 * spec.n_params
    # up: 33 rows of one block; down: 4 rows of two; 34 bytes each; 37 biases in fp32
    assert cost.ffn_bytes(spec, "q8_0") == (33 + 8) * 34 + 37 * 4


def test_unknown_format_lists_the_known():
    with pytest.raises(ValueError, match=r"format 'int3' is not known; known: fp32, bf16, fp16, q8_0, q4_1, q4_0"):
        cost.bits_per_weight("int3")
    assert cost.formats() == ["fp32", "bf16", "fp16", "q8_0", "q4_1", "q4_0"]


def test_equal_budget_widths():
    assert f"{cost.classic_width(LLAMA):.2f}" == "10922.67"
    assert cost.classic_width(Spec(d_model=768, d_ff=3072, activation="gelu")) == 3072
    assert cost.equal_budget_width(LLAMA) == 16512
    ungated = Spec(d_model=768, d_ff=3072, activation="gelu")
    assert cost.equal_budget_width(ungated) == 2048  # and 3 x 768 x 2048 = 2 x 768 x 3072 = 4,718,592 weights
    assert Spec.parse("geglu", d_model=768, d_ff=2048).n_params == ungated.n_params == 4_718_592
    assert cost.equal_budget_width(LLAMA, gated=True) == 11008
