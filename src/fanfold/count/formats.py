"""How weights are stored, and what that weighs: codes, scales and minima of every format, to the byte."""

from __future__ import annotations

from dataclasses import dataclass

from ..spec import Spec


@dataclass(frozen=True, kw_only=True)
class Format:
    """One way to store a matrix.

    name         its name.
    code_bits    bits of one weight's code.
    group        weights of a row that share one scale; 0: there are no groups. A row's last, partly filled group
                 counts whole.
    group_bytes  bytes of scale and minimum per group.
    row_bytes    bytes of scale per row, where a row has one.
    bias_bytes   bytes of one bias.
    compute      the dtype of the products at their fastest: integer codes meet activations quantized to int8.
    source       where the layout is defined.
    """

    name: str
    code_bits: int
    group: int = 0
    group_bytes: int = 0
    row_bytes: int = 0
    bias_bytes: int = 4
    compute: str
    source: str

    @property
    def bits_per_weight(self) -> float:
        """Bits of one weight, its share of scale and minimum included, a row's own scale not."""
        return self.code_bits + (8 * self.group_bytes / self.group if self.group else 0.0)

    def matrix_bytes(self, rows: int, length: int) -> int:
        """Bytes of `rows` rows of `length` weights.

        rows * (ceil(length / group) * (group * code_bits / 8 + group_bytes) + row_bytes), and without groups
        rows * (length * code_bits / 8 + row_bytes).
        """
        if self.group:
            row = -(-length // self.group) * (self.group * self.code_bits // 8 + self.group_bytes)
        else:
            row = length * self.code_bits // 8
        return rows * (row + self.row_bytes)

    @property
    def layout(self) -> str:
        """What the bytes are, in words."""
        parts = [f"{self.code_bits}-bit codes" if self.code_bits < 16 or self.group else f"{self.code_bits}-bit floats"]
        if self.group:
            scale = "scale + minimum" if self.group_bytes == 4 else "scale"
            parts.append(f"{self.group_bytes} bytes {scale} per {self.group}")
        if self.row_bytes:
            parts.append(f"{self.row_bytes} bytes scale per row")
        return ", ".join(parts)


_IEEE = "IEEE 754; bfloat16: the upper half of a float32"
_GGML = "ggml-org/ggml src/ggml-common.h (block_q8_0, block_q4_0, block_q4_1)"
_GROUPS = "fp16 scale, and for int4 an fp16 minimum, per group of a row; fp32 scale where a row has one"


def _grouped(bits: int, group: int) -> Format:
    group_bytes = 4 if bits == 4 else 2
    name = f"int{bits}_g{group}"
    return Format(
        name=name, code_bits=bits, group=group, group_bytes=group_bytes, compute="int8", source=_GROUPS
    )  # fmt: skip


_TABLE = (
    Format(name="fp32", code_bits=32, compute="fp32", source=_IEEE),
    Format(name="bf16", code_bits=16, bias_bytes=2, compute="bf16", source=_IEEE),
    Format(name="fp16", code_bits=16, bias_bytes=2, compute="fp16", source=_IEEE),
    Format(name="fp8", code_bits=8, row_bytes=4, compute="fp8", source="Micikevicius 2022, arXiv:2209.05433 (e4m3)"),
    Format(name="int8", code_bits=8, row_bytes=4, compute="int8", source=_GROUPS),
    *(_grouped(8, g) for g in (32, 64, 128)),
    *(_grouped(4, g) for g in (32, 64, 128)),
    Format(name="q8_0", code_bits=8, group=32, group_bytes=2, compute="int8", source=_GGML),
    Format(name="q4_1", code_bits=4, group=32, group_bytes=4, compute="int8", source=_GGML),
    Format(name="q4_0", code_bits=4, group=32, group_bytes=2, compute="int8", source=_GGML),
)
FORMATS: dict[str, Format] = {f.name: f for f in _TABLE}
ALIASES = {"int4": "int4_g32", "fp8_e4m3": "fp8"}
GROUPS = (32, 64, 128)
COMMON = ("fp32", "bf16", "int8", "int4_g128", "q8_0", "q4_1", "q4_0")  # for tables that have no room for all


def names() -> list[str]:
    """Every format that `get` knows, aliases last."""
    return [*FORMATS, *ALIASES]


def get(name: str, group: int | None = None) -> Format:
    """The format called `name`; "int4" alone means groups of 32.

    group  for "int8" and "int4": weights that share a scale.
    Raises ValueError, naming the known formats or groups, when there is none such.
    """
    if not isinstance(name, str) or (name not in FORMATS and name not in ALIASES):
        raise ValueError(f"format {name!r} is not known; known: {', '.join(names())}")
    if group is None:
        return FORMATS[ALIASES.get(name, name)]
    found = f"{name}_g{group}"
    if name not in ("int8", "int4"):
        raise ValueError(f"format {name!r} has no choice of group: group={group} goes with int8 and int4")
    if found not in FORMATS:
        raise ValueError(f"group={group!r} is not known; known: {', '.join(map(str, GROUPS))}")
    return FORMATS[found]


def matrices(spec: Spec) -> dict[str, tuple[int, int]]:
    """{projection: (rows, length of a row)}: gate and up [d_ff, d_model], down [d_model, d_ff]."""
    inward = (spec.d_ff, spec.d_model)
    gate = {"gate": inward} if spec.gated else {}
    return {**gate, "up": inward, "down": (spec.d_model, spec.d_ff)}


def n_biases(spec: Spec) -> int:
    """Number of bias values: d_ff for each of gate and up that has one, d_model for down."""
    return spec.d_ff * (spec.gate_bias + spec.up_bias) + spec.d_model * spec.down_bias


def ffn_bytes(spec: Spec, format: str, group: int | None = None) -> int:
    """Bytes of one FFN's matrices in `format`, scales and minima included, and of its biases.

    Biases take the format's own width in fp32, bf16 and fp16, and 4 bytes in all others (GGUF keeps
    one-dimensional tensors in fp32). Raises ValueError as `get` does.
    """
    form = get(format, group)
    return sum(form.matrix_bytes(*shape) for shape in matrices(spec).values()) + n_biases(spec) * form.bias_bytes
