"""Where a part of a packed matrix lies among its bytes: the layout of `packed`, for who reads or writes parts of it."""

from __future__ import annotations

from dataclasses import dataclass

from ..count import formats as stored
from .packed import _FLOATS, LANES, _blocks, packed_bytes

Range = tuple[int, int]  # first, after the last
Span = tuple[int, int, int]


@dataclass(frozen=True)
class Region:
    """The smallest packed matrix, of whole columns and blocks, that holds some outputs and inputs of a larger one.

    rows, inputs  that it holds of the larger one's.
    spans         (byte in the larger one, byte in this one, bytes) of what the wanted inputs need. What lies between
                  them belongs to inputs that are not wanted; zeros do there.
    """

    rows: Range
    inputs: Range
    spans: list[Span]

    @property
    def shape(self) -> tuple[int, int]:
        """(n_out, n_in)."""
        return self.rows[1] - self.rows[0], self.inputs[1] - self.inputs[0]


def region(format: str, shape: tuple[int, int], rows: Range, inputs: Range) -> Region:
    """The region of outputs `rows` and of `inputs` in a packed matrix [n_out, n_in] of this `shape`.

    It reads at most 15 outputs more at either end, 1 (bf16) or 3 (int8) inputs, and of groups another one's header.
    """
    n, k = shape
    first, last = rows[0] // LANES, -(-rows[1] // LANES)
    low, high, within = _within(format, k, *inputs)
    # where a row has one scale they lie before the columns, all of them
    scales = 0 if format in _FLOATS or stored.get(format).group else 4 * LANES
    column, own = (packed_bytes(format, LANES, width) - scales for width in (k, high - low))
    here, there = scales * -(-n // LANES), scales * (last - first)
    spans: list[Span] = [(scales * first, 0, scales * (last - first))] if scales else []
    for c in range(first, last):
        spans += [(here + c * column + a, there + (c - first) * own + b, size) for a, b, size in within]
    return Region((first * LANES, min(last * LANES, n)), (low, high), _merged(spans))


def _within(format: str, k: int, start: int, stop: int) -> tuple[int, int, list[Span]]:
    """(first input, after the last, spans) of a column's region."""
    f = stored.get(format)
    if not f.group:
        unit = {"bf16": 2, "int8": 4}.get(format, 1)
        low, high = start // unit * unit, min(-(-stop // unit) * unit, k)
        size = LANES * f.code_bits // 8
        return low, high, [(low * size, 0, -(-(high - low) // unit) * unit * size)]
    group = f.group * LANES * f.code_bits // 8  # bytes of a group's codes
    spans: list[Span] = []
    at, low, high = 0, k, 0
    for k0, inputs, _, header, codes in _blocks(format, k):
        if start < k0 + inputs and k0 < stop:
            skip = max(start - k0, 0) // f.group * group
            end = min(-(-(stop - k0) // f.group) * group, codes)
            spans += [(at, 0, header), (at + header + skip, 0, end - skip)]
            low, high = min(low, k0), k0 + inputs
        at += header + codes
    return low, high, [(a, a - spans[0][0], size) for a, _, size in spans]


def _merged(spans: list[Span]) -> list[Span]:
    """The same bytes in as few spans as possible."""
    out: list[Span] = []
    for a, b, size in spans:
        if out and (out[-1][0] + out[-1][2], out[-1][1] + out[-1][2]) == (a, b):
            out[-1] = (*out[-1][:2], out[-1][2] + size)
        else:
            out.append((a, b, size))
    return out
