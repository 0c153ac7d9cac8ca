"""The rules that a width keeps or breaks, by name: what the hardware, the format and the split ask of d_ff."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..spec import Spec
from .formats import Format
from .hardware import Hardware

SUPER_BLOCK = 256  # weights in a super-block of GGUF's k-quants: ggml-org/ggml src/ggml-common.h, QK_K
_FP8_UNIT = 16  # elements to which fp8 products are cut: NVIDIA Transformer Engine
_POWER = 128  # the power of two that a width should have as a factor
# Points for a width that the matrix unit cannot cut whole, times (1 - p / unit)^3, p the largest power of two in it: on
# H100 at d_model=4096, 10912 (p = 32, half a unit) is 1 % slower than 10944, 10922 (p = 2) 31 %: arXiv:2401.14489.
_UNIT_POINTS = 30.0
_FULL = 0.9  # share of the cores' turns from which waves count as full
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule for one width.

    hard    whether a width that breaks it cannot be used at all, as against being slower.
    kept    whether it is kept; detail: the numbers behind that.
    cost    points that breaking it costs in the score (0 to 100).
    """

    name: str
    kept: bool
    hard: bool
    detail: str
    cost: float


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """What the width has to suit: ranks, format, device, token counts of the products, a multiple asked for."""

    tp: int = 1
    form: Format
    device: Hardware | None = None
    tokens: tuple[int, ...] = (2048,)
    multiple_of: int | None = None

    @property
    def unit(self) -> int:
        """Elements of the matrix unit: its bytes over the width of the products' dtype; 128 bytes without a device.

        A device whose table has no rate for fp8 or int8 multiplies in bf16, as it does with int4's codes.
        """
        dtype = self.form.compute
        if dtype == "int8" and self.form.code_bits < 8:
            dtype = "bf16"
        if self.device is not None and dtype in ("fp8", "int8") and self.device.peak(dtype) is None:
            dtype = "bf16"
        return (self.device.unit_bytes if self.device else 128) // _BYTES[dtype]

    @property
    def step(self) -> int:
        """Every width that keeps the hard rules is a multiple of this."""
        per_rank = math.lcm(max(self.form.group, 1), _FP8_UNIT if self.form.name == "fp8" else 1)
        return math.lcm(self.tp * per_rank, self.multiple_of or 1)


def rules(spec: Spec, c: Constraints) -> list[Rule]:
    """Every rule, kept or broken, for this width."""
    d_ff, tp = spec.d_ff, c.tp
    local = d_ff / tp
    found = []
    if tp > 1:
        found.append(_rule("tp", d_ff % tp == 0, f"{d_ff}/{tp} = {local:.6g} channels per rank", hard=True))
    if c.form.group:
        groups = local / c.form.group
        found.append(
            _rule(
                "group",
                _whole(d_ff, tp * c.form.group),
                f"{local:.6g} / {c.form.group} = {groups:.6g} groups",
                hard=True,
            )
        )
    if c.multiple_of:
        left = d_ff % c.multiple_of
        found.append(_rule("multiple_of", left == 0, f"{d_ff} mod {c.multiple_of} = {left}", hard=True))
    device = c.device.slug if c.device else "GPUs since A100"
    power = _power_of_two(d_ff // tp) if d_ff % tp == 0 else 1
    unit = f"{local:.6g} / {c.unit} = {local / c.unit:.6g}, {device}"
    found.append(
        _rule("matrix_unit", _whole(d_ff, tp * c.unit), unit, _UNIT_POINTS * (1 - min(power / c.unit, 1)) ** 3)
    )
    found.append(
        _rule("fp8_16", _whole(d_ff, tp * _FP8_UNIT), f"{local:.6g} / {_FP8_UNIT} = {local / _FP8_UNIT:.6g}",
              10, hard=c.form.name == "fp8")
    )  # fmt: skip
    found.append(_rule("k_quant_256", d_ff % SUPER_BLOCK == 0, f"{d_ff} / {SUPER_BLOCK} = {d_ff / SUPER_BLOCK:.6g}", 6))
    found.append(_rule("power_of_two", power >= _POWER, f"{power} divides a rank's width, {_POWER} wanted", 4))
    found += _tiles(spec, c)
    return found


def _rule(name: str, kept: bool, detail: str, cost: float = 0.0, hard: bool = False) -> Rule:
    return Rule(name=name, kept=kept, hard=hard, detail=detail, cost=0.0 if kept else cost)


def _whole(value: int, divisor: int) -> bool:
    return value % divisor == 0


def _power_of_two(value: int) -> int:
    """The largest power of two that divides `value`."""
    return value & -value


@dataclass(frozen=True, kw_only=True)
class Product:
    """How full the device is in one matrix product: [tokens, k] by [k, outputs], cut into tiles, run in waves.

    tiles  ceil(tokens / tile) * ceil(outputs / tile); waves = ceil(tiles / cores).
    tile_share  of the computed elements that are wanted; wave_share  of the cores' turns that are used.
    """

    name: str
    tokens: int
    outputs: int
    tiles: int
    waves: int
    tile_share: float
    wave_share: float

    @property
    def utilisation(self) -> float:
        """Both shares together: what quantization leaves of the device's peak."""
        return self.tile_share * self.wave_share


def product(name: str, tokens: int, outputs: int, device: Hardware) -> Product:
    """Tiles and waves of one product on a GPU. Source: Anthony 2024, arXiv:2401.14489: 109 tiles, 108 SMs, 2 waves.

    An 8192 x 14336 output in tiles of 128 x 256 is 3584 tiles.
    """
    assert device.tile is not None
    assert device.cores is not None
    rows, columns = device.tile
    tiles = -(-tokens // rows) * -(-outputs // columns)
    waves = -(-tiles // device.cores)
    return Product(
        name=name,
        tokens=tokens,
        outputs=outputs,
        tiles=tiles,
        waves=waves,
        tile_share=tokens * outputs / (tiles * rows * columns),
        wave_share=tiles / (waves * device.cores),
    )


def products(spec: Spec, c: Constraints) -> list[Product]:
    """The products of one rank's FFN at each token count: gate and up as one, and down; none without a GPU."""
    if c.device is None or c.device.tile is None or spec.d_ff % c.tp:
        return []
    local = spec.d_ff // c.tp
    name = "gate+up" if spec.gated else "up"
    return [
        p
        for tokens in c.tokens
        for p in (
            product(name, tokens, local * (2 if spec.gated else 1), c.device),
            product("down", tokens, spec.d_model, c.device),
        )
    ]


def utilisation(spec: Spec, c: Constraints) -> float | None:
    """The predicted utilisation over all products, each weighted by its FLOPs; None without a GPU."""
    found = products(spec, c)
    if not found:
        return None
    weights = [(spec.d_model if p.name != "down" else spec.d_ff / c.tp) * p.tokens * p.outputs for p in found]
    return sum(weights) / sum(w / p.utilisation for w, p in zip(weights, found, strict=True))


def _tiles(spec: Spec, c: Constraints) -> list[Rule]:
    """Tile and wave rules: whether the wider product fills its tiles, and all of them their waves."""
    wide = [p for p in products(spec, c) if p.name != "down"]
    if not wide:
        return []
    assert c.device is not None
    assert c.device.tile is not None
    worst = min(wide, key=lambda p: p.wave_share)
    whole = wide[0].outputs % c.device.tile[1] == 0
    tiles = f"{wide[0].outputs} / {c.device.tile[1]} = {wide[0].outputs / c.device.tile[1]:.6g} tiles of {wide[0].name}"
    waves = f"{worst.tiles} tiles at {worst.tokens} tokens in {worst.waves} waves of {c.device.cores}"
    return [
        _rule("tile", whole, tiles, 2),
        _rule("wave", worst.wave_share >= _FULL, f"{waves}: {100 * worst.wave_share:.1f} % full", 2),
    ]
