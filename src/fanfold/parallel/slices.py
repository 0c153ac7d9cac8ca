"""Cutting the weights of an FFN by channels, and putting the parts together again: bit by bit, in any format.

D d_model, F d_ff; a matrix is [N, K]: gate and up are cut in N, down in K, where a quantized format has its groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import formats
from ..kernels.packed import PackedMatrix
from ..spec import Spec
from ..weights import Weights
from .plans import Plan

_BY_CHANNEL = ("gate", "up", "gate_bias", "up_bias")  # dimension 0 is the channels


def shard(weights: Weights, plan: Plan, rank: int) -> Weights:
    """The part of one rank, as a copy: forward of all ranks' parts adds up to forward of the whole.

    weights  of arrays, tensors or `PackedMatrix`; codes, scales and minima are cut on the same boundaries.
    plan     of `weights.spec`; its format must have the groups of packed matrices.
    -> Weights with d_ff = the rank's channels; down's bias is rank 0's alone.
    Raises ValueError if the plan is of another FFN, cuts a group, or has no such rank.
    """
    if weights.spec != plan.spec:
        raise ValueError(
            f"the plan is of {plan.spec.describe()}, the weights are of {weights.spec.describe()}: expected one FFN"
        )
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < plan.tp:
        raise ValueError(f"rank={rank!r}: expected 0 to {plan.tp - 1}, the plan has tp={plan.tp}")
    own = plan.ranks[rank]
    return channels(weights, own.start, own.stop, own.spec.down_bias)


def channels(weights: Weights, start: int, stop: int, bias: bool) -> Weights:
    """Channels start … stop of an FFN, as a copy; with down's bias or without. Raises ValueError if a group is cut."""
    arrays: dict[str, Any] = {}
    for name, value in weights.items():
        if name == "down_bias":
            if bias:
                arrays[name] = _copy(value)
        else:
            arrays[name] = cut(value, 0 if name in _BY_CHANNEL else 1, start, stop)
    spec = dataclasses.replace(weights.spec, d_ff=stop - start, down_bias=bias and weights.spec.down_bias)
    return Weights(spec, **arrays)


def unshard(parts: Sequence[Weights]) -> Weights:
    """The whole from all ranks' parts in order: the inverse of `shard`, bit by bit.

    Raises ValueError if they are not parts of one FFN.
    """
    if not parts:
        raise ValueError("no parts to put together: expected the Weights of every rank, in order")
    first = parts[0]
    for i, part in enumerate(parts):
        wanted = dataclasses.replace(first.spec, d_ff=part.spec.d_ff, down_bias=first.spec.down_bias and i == 0)
        if part.spec != wanted:
            raise ValueError(
                f"part {i} is {part.spec.describe()}, expected {wanted.describe()}, as part 0 is (down's bias on it "
                "alone): the parts of one FFN, in order of rank"
            )
    spec = dataclasses.replace(first.spec, d_ff=sum(part.spec.d_ff for part in parts))
    arrays: dict[str, Any] = {}
    for name, value in first.items():
        pieces = [getattr(part, name) for part in parts]
        arrays[name] = _copy(value) if name == "down_bias" else join(pieces, 0 if name in _BY_CHANNEL else 1)
    return Weights(spec, **arrays)


def pad(weights: Weights, d_ff: int) -> Weights:
    """The same FFN with zero channels added, so that `d_ff` ranks' groups come out even.

    The padded values (columns of down) are zeros, so the output is exactly unchanged; zeros that a group with a minimum
    cannot hold are allowed where act(0) * up(0) = 0 (`Spec.pad_exact`), which then makes up for them.
    Raises ValueError if `d_ff` is smaller than it is, or a padded value could not be kept zero.
    """
    spec = weights.spec
    more = d_ff - spec.d_ff
    if more < 0:
        raise ValueError(f"d_ff={d_ff} is smaller than the {spec.d_ff} channels that there are")
    arrays: dict[str, Any] = {}
    for name, value in weights.items():
        if name == "down_bias":
            arrays[name] = _copy(value)
        else:
            arrays[name] = _padded(value, 0 if name in _BY_CHANNEL else 1, more, spec)
    return Weights(dataclasses.replace(spec, d_ff=d_ff), **arrays)


def cut(value: Any, dim: int, start: int, stop: int) -> Any:
    """Elements start … stop of dimension `dim` of an array, tensor, `Quantized` or `PackedMatrix`, as a copy.

    Raises ValueError if a group would be cut.
    """
    if isinstance(value, PackedMatrix):
        return _repacked(value, lambda plain: cut(plain, dim, start, stop))
    if not isinstance(value, formats.Quantized):
        return _copy(value[start:stop] if dim == 0 else value[:, start:stop])
    group = formats.group(value.format)
    if dim == 0:
        tables = [None if t is None else t[start:stop].copy() for t in (value.scale, value.minimum)]
    elif not group:  # a scale a row: every part has it
        tables = [value.scale.copy(), None]
    else:
        check_groups(value.format, value.shape[1], start, stop)
        groups = slice(start // group, -(-stop // group))
        tables = [None if t is None else t[:, groups].copy() for t in (value.scale, value.minimum)]
    codes = value.codes[start:stop] if dim == 0 else value.codes[:, start:stop]
    return _quantized(value.format, codes, *tables)


def check_groups(format: str, length: int, start: int, stop: int) -> None:
    """Raise ValueError if the ends of inputs start … stop, of rows of `length`, lie within a group of the format."""
    group = formats.group(format)
    if group and any(end % group and end != length for end in (start, stop)):
        raise ValueError(
            f"inputs {start} to {stop} of {length} cut a group of {group} ({format}): plan with format={format!r}"
        )


def join(pieces: Sequence[Any], dim: int) -> Any:
    """The pieces one after the other along `dim`: the inverse of `cut`. Raises ValueError if they do not fit."""
    first = pieces[0]
    if isinstance(first, PackedMatrix):
        kinds = {(p.format, p.activations) for p in pieces}
        if len(kinds) > 1:
            raise ValueError(f"the pieces are packed as {sorted(kinds)}: expected one format and activations")
        return _repacked(first, lambda _: join([_plain(p) for p in pieces], dim))
    if isinstance(first, Tensor):
        return torch.cat([p.detach() for p in pieces], dim)
    if not isinstance(first, formats.Quantized):
        return np.concatenate(pieces, axis=dim)
    group = formats.group(first.format)
    codes = np.concatenate([p.codes for p in pieces], axis=dim)
    if dim == 1 and not group:
        if any(not np.array_equal(p.scale, first.scale) for p in pieces):
            raise ValueError("the pieces have other scales of the same rows: they are not parts of one matrix")
        return _quantized(first.format, codes, first.scale, None)
    for i, piece in enumerate(pieces[:-1]):
        if dim == 1 and piece.shape[1] % group:
            raise ValueError(f"piece {i} ends within a group of {group}: only the last may")
    minimum = None
    if first.minimum is not None:
        minimum = np.concatenate([p.minimum for p in pieces if p.minimum is not None], axis=dim)
    return _quantized(first.format, codes, np.concatenate([p.scale for p in pieces], axis=dim), minimum)


def _plain(value: PackedMatrix) -> Any:
    """What was packed: codes, or the floats in their own dtype."""
    return value.quantized() if value.format in formats.INTEGER else value.dequantize()


def _repacked(value: PackedMatrix, change: Callable[[Any], Any]) -> PackedMatrix:
    plain = change(_plain(value))
    format = None if isinstance(plain, formats.Quantized) else value.format
    return PackedMatrix.pack(plain, format, value.activations)


def _quantized(format: str, codes: Any, scale: Any, minimum: Any) -> formats.Quantized:
    return formats.Quantized(format=format, codes=np.ascontiguousarray(codes), scale=scale, minimum=minimum)


def _copy(value: Any) -> Any:
    # a view would keep the whole matrix in memory
    if isinstance(value, Tensor):
        return value.detach().clone(memory_format=torch.contiguous_format)
    return np.array(value, order="C")


def _padded(value: Any, dim: int, more: int, spec: Spec) -> Any:
    if isinstance(value, PackedMatrix):
        return _repacked(value, lambda plain: _padded(plain, dim, more, spec))
    if isinstance(value, Tensor):
        shape = list(value.shape)
        shape[dim] = more
        return torch.cat([value.detach(), value.detach().new_zeros(shape)], dim)
    widths = [(0, more) if i == dim else (0, 0) for i in range(len(value.shape))]
    if not isinstance(value, formats.Quantized):
        return np.pad(value, widths)
    group = formats.group(value.format)
    if dim == 1 and group and value.shape[1] % group and value.minimum is not None and not spec.pad_exact:
        raise ValueError(
            f"channels {value.shape[1]} and on would lie in a group of {group} with a minimum ({value.format}), where "
            f"a zero cannot be stored, and {spec.activation} of a padded channel is not 0: pad before quantizing"
        )
    codes = np.pad(value.codes, widths, constant_values=formats.offset(value.format))
    tables = [value.scale, value.minimum]
    if dim == 0 or group:
        added = more if dim == 0 else formats.n_groups(value.format, codes.shape[1]) - value.scale.shape[1]
        grown = [(0, added) if i == dim else (0, 0) for i in range(2)]
        tables = [None if t is None else np.pad(t, grown) for t in tables]
    return _quantized(value.format, codes, *tables)
