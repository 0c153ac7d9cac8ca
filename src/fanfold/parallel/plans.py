"""`plan`: who owns which channels, and what that weighs. Pure functions of the description; no torch.

D d_model, F d_ff. Rank r owns channels start … stop: rows of gate and up, columns of down.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..count import ffn, formats
from ..count.collective import AllReduce, all_reduce
from ..count.formats import Format
from ..count.hardware import Link, Links
from ..layout import INTERLEAVED, SEPARATE, Layout
from ..spec import Spec

Range = tuple[int, int]


@dataclass(frozen=True)
class Cut:
    """Which part of a stored tensor a rank reads: the ranges (start, stop) of dimension `dim`, one after the other."""

    dim: int
    ranges: tuple[Range, ...]

    @property
    def length(self) -> int:
        """Elements along `dim` that are read."""
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank's part.

    start, stop  its channels.
    spec         of its weights: d_ff = stop - start; down's bias on rank 0 alone, so that the partial sums add up.
    cuts         {name of a stored tensor: Cut}: "up.weight", "gate_up.weight", "gate.bias", …
    shapes       {the same name: its shape on this rank}.
    bytes        of its matrices and biases in the plan's format.
    """

    rank: int
    start: int
    stop: int
    spec: Spec
    cuts: dict[str, Cut]
    shapes: dict[str, tuple[int, ...]]
    bytes: int

    @property
    def channels(self) -> int:
        """How many channels it owns."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A division of one FFN's channels over `tp` ranks; made by `plan`.

    spec, form, layout  of the whole FFN: what it is, its format, how it lies in its file.
    ranks               a Rank each.
    replicated_bytes    that every rank holds alike (a row's scale of down, where a format has one a row); so
                        sum of ranks' bytes = whole_bytes + (tp - 1) * replicated_bytes.
    """

    spec: Spec
    tp: int
    form: Format
    layout: Layout
    ranks: tuple[Rank, ...]
    whole_bytes: int
    replicated_bytes: int
    group: int = field(default=1)

    @property
    def ranges(self) -> tuple[Range, ...]:
        """(start, stop) of every rank."""
        return tuple((r.start, r.stop) for r in self.ranks)

    @property
    def even(self) -> bool:
        """Whether all ranks own the same number of channels."""
        return len({r.channels for r in self.ranks}) == 1

    @property
    def chunked(self) -> bool:
        """Whether the ranges are those of torch.chunk, which DTensor's Shard placement follows."""
        return self.ranges == _chunks(self.spec.d_ff, self.tp)

    def collective(self, tokens: int, dtype: str = "bf16", links: Links | None = None) -> AllReduce:
        """The one all-reduce of a forward over `tokens` tokens of `dtype`: [tokens, d_model].

        links  with them, its seconds too (`count.collective.all_reduce`); without, the bytes that each rank sends:
               2 (tp-1)/tp n. With sequence parallelism an all-gather and a reduce-scatter send as many together.
        Raises ValueError if the ranks do not fill whole nodes.
        """
        n_bytes = tokens * self.spec.d_model * ffn.activation_width(dtype)
        if links is not None:
            return all_reduce(n_bytes, self.tp, links)
        free = Link(bytes_per_s=float("inf"), step_s=0.0)
        return all_reduce(n_bytes, self.tp, _unlinked(self.tp, free))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, units in the keys."""
        sent = self.collective(1)
        return {
            "spec": self.spec.to_dict(),
            "tp": self.tp,
            "format": self.form.name,
            "group": self.group,
            "layout": self.layout.describe(),
            "whole_bytes": self.whole_bytes,
            "replicated_bytes": self.replicated_bytes,
            "all_reduce_bytes_per_token_bf16": sent.n_bytes,
            "sent_bytes_per_token_bf16": sent.intra_bytes,
            "ranks": [
                {
                    "rank": r.rank,
                    "channels": [r.start, r.stop],
                    "bytes": r.bytes,
                    "shapes": {name: list(shape) for name, shape in r.shapes.items()},
                }
                for r in self.ranks
            ],
        }


def plan(
    spec: Spec,
    tp: int,
    format: str = "bf16",
    layout: Layout | None = None,
    *,
    group: int | None = None,
    even: bool = False,
    channels: Sequence[int] | None = None,
) -> Plan:
    """Divide an FFN's channels over `tp` ranks.

    Every rank owns ceil(n / tp) of the n = ceil(d_ff / group) groups, the last one what is left, as torch.chunk and
    DTensor divide; where that would leave a rank without any, ranks differ by one group at most. The widest rank is
    the same either way. `group` is that of the format: along d_ff it is down's rows that are grouped.

    spec      the whole FFN.           tp        ranks, at least 1.
    format    a name of `count.formats`; group: for "int8" and "int4", weights that share a scale.
    layout    how gate and up lie in the file (default: separate, [out, in]): fused matrices and biases are cut in each
              half, interleaved ones by pairs.
    even      refuse ranks of different width (PyTorch's own Colwise/RowwiseParallel need equal ones).
    channels  instead: how many channels each rank owns.

    Raises ValueError, with the numbers and the ways out, for fewer groups than ranks, or a group that would be cut.
    """
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
        raise ValueError(f"tp={tp!r}: expected a positive int")
    layout = layout or Layout()
    if layout.order != SEPARATE and not spec.gated:
        raise ValueError(f"layout {layout.order!r} holds a gate, but the FFN has none: {spec.describe()}")
    form = formats.get(format, group)
    unit = max(form.group, 1)
    if channels is not None:
        ranges = _given(spec.d_ff, tp, unit, channels)
    else:
        ranges = _divided(spec, tp, unit, even)
    ranks = tuple(_rank(spec, form, layout, i, *r) for i, r in enumerate(ranges))
    return Plan(
        spec=spec,
        tp=tp,
        form=form,
        layout=layout,
        ranks=ranks,
        whole_bytes=formats.ffn_bytes(spec, form.name),
        replicated_bytes=spec.d_model * form.row_bytes,
        group=unit,
    )


def _unlinked(tp: int, free: Link) -> Links:
    """Links of one node that take no time: for the bytes alone."""
    return Links(devices_per_node=tp, intra=free, inter=free, base_s=0.0, source="")


def _chunks(n: int, parts: int) -> tuple[Range, ...]:
    """torch.chunk's ranges, with empty ones at the end where n has not enough."""
    size = -(-n // parts)
    return tuple((min(i * size, n), min((i + 1) * size, n)) for i in range(parts))


def _divided(spec: Spec, tp: int, unit: int, even: bool) -> tuple[Range, ...]:
    d_ff = spec.d_ff
    n = -(-d_ff // unit)
    if n < tp or (even and d_ff % (tp * unit)):
        raise ValueError(_refusal(spec, tp, unit, even))
    found = _chunks(n, tp)
    if found[-1][0] == found[-1][1]:  # the last would have none
        small, more = divmod(n, tp)
        ends = [i * small + min(i, more) for i in range(tp + 1)]
        found = tuple(itertools.pairwise(ends))
    return tuple((a * unit, min(b * unit, d_ff)) for a, b in found)


def _refusal(spec: Spec, tp: int, unit: int, even: bool) -> str:
    d_ff, n = spec.d_ff, -(-spec.d_ff // unit)
    groups = f" in groups of {unit}" if unit > 1 else ""
    if n < tp:
        why = f"it has {n} {'groups' if unit > 1 else 'channels'}"
        works = range(1, n + 1)
    else:
        why = f"{d_ff}/{tp} is not whole" if d_ff % tp else f"{d_ff}/{tp} = {d_ff // tp} is {d_ff / tp / unit:g} groups"
        works = range(1, 1025)
    allowed = [w for w in works if d_ff % (w * unit) == 0]
    listed = f"in {{{', '.join(map(str, allowed[:12]))}{', …' if len(allowed) > 12 else ''}}}"
    if not even:
        listed = f"from 1 to {n}"
    step = tp * unit if even else unit
    padded = -(-d_ff // step) * step if n >= tp else tp * unit
    kept = "" if spec.pad_exact else "; exact only while the padded values stay zero, which training does not keep"
    uneven = ", leave out even=True for uneven ranks" if even and n >= tp else ""
    return (
        f"d_ff={d_ff} cannot be split over {tp} {'equal ' if even else ''}ranks{groups}: {why}. Use tp {listed}"
        f"{uneven}, or pad with zero channels to {padded} (adds {100 * (padded / d_ff - 1):.2f} %{kept})."
    )


def _given(d_ff: int, tp: int, unit: int, channels: Sequence[int]) -> tuple[Range, ...]:
    if len(channels) != tp or any(isinstance(c, bool) or not isinstance(c, int) or c < 1 for c in channels):
        raise ValueError(f"channels={list(channels)!r}: expected {tp} positive ints, one a rank")
    if sum(channels) != d_ff:
        raise ValueError(f"channels={list(channels)!r} add up to {sum(channels)}, expected d_ff={d_ff}")
    ends = [0]
    for i, n in enumerate(channels):
        ends.append(ends[-1] + n)
        if ends[-1] % unit and ends[-1] != d_ff:
            low = ends[-1] // unit * unit
            raise ValueError(
                f"channels={list(channels)!r}: rank {i} would end at channel {ends[-1]}, which cuts a group of {unit} "
                f"({low} to {low + unit}): end it at {low or unit} or {low + unit}, or use a format of smaller groups"
            )
    return tuple(itertools.pairwise(ends))


def _rank(spec: Spec, form: Format, layout: Layout, rank: int, start: int, stop: int) -> Rank:
    own = dataclasses.replace(spec, d_ff=stop - start, down_bias=spec.down_bias and rank == 0)
    cuts, shapes = {}, {}
    for name, whole in stored_shapes(spec, layout).items():
        cut = cut_of(name, layout, spec, start, stop)
        if cut is None:
            if rank:
                continue
            cut = Cut(0, ((0, spec.d_model),))
        shape = list(whole)
        shape[cut.dim] = cut.length
        cuts[name], shapes[name] = cut, tuple(shape)
    n_bytes = formats.ffn_bytes(own, form.name)
    return Rank(rank=rank, start=start, stop=stop, spec=own, cuts=cuts, shapes=shapes, bytes=n_bytes)


def stored_shapes(spec: Spec, layout: Layout) -> dict[str, tuple[int, ...]]:
    """{name: shape} of the tensors of an FFN as they lie in a file of this layout."""
    d, f = spec.d_model, spec.d_ff
    fused = layout.order != SEPARATE
    matrices = {"gate_up": (2 * f, d)} if fused else {**({"gate": (f, d)} if spec.gated else {}), "up": (f, d)}
    matrices["down"] = (d, f)
    biases = {"gate_up": spec.up_bias, "gate": spec.gate_bias, "up": spec.up_bias, "down": spec.down_bias}
    out: dict[str, tuple[int, ...]] = {}
    for role, shape in matrices.items():
        out[f"{role}.weight"] = shape[::-1] if layout.transposed else shape
        if biases[role]:
            out[f"{role}.bias"] = shape[:1]
    return out


def cut_of(name: str, layout: Layout, spec: Spec, start: int, stop: int) -> Cut | None:
    """The part of the stored tensor `name` that belongs to channels start … stop; None for down's bias, which belongs
    to none of them."""
    role, _, kind = name.partition(".")
    if name == "down.bias":
        return None
    if role == "down":
        return Cut(0 if layout.transposed else 1, ((start, stop),))
    dim = 1 if layout.transposed and kind == "weight" else 0
    if role != "gate_up":
        return Cut(dim, ((start, stop),))
    if layout.order in INTERLEAVED:
        return Cut(dim, ((2 * start, 2 * stop),))
    return Cut(dim, ((start, stop), (spec.d_ff + start, spec.d_ff + stop)))
