"""Under what conditions a cost is counted: tokens, format, device, ranks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from . import collective, ffn, formats, hardware
from .formats import Format
from .hardware import Hardware, Links

_FLOATS = tuple(ffn.DTYPE_BYTES)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `cost` counts for; made by `settings`.

    tokens     T, processed together; sequences: how many of them have a context of their own (T in decode, 1 in the
               prefill of one text).
    context    positions that each token attends to.
    form       how weights are stored; dtype: of the activations; compute: of the products.
    device     None: no times.      tp: ranks that share each matrix.      links: None where not known.
    working_set  bytes that are read by turns with what is counted: a layer of a model does not stay in a cache.
    """

    tokens: int
    sequences: int
    context: int
    form: Format
    dtype: str
    compute: str
    device: Hardware | None
    tp: int
    links: Links | None
    working_set: float = 0.0

    @property
    def width(self) -> int:
        """Bytes of one activation."""
        return ffn.activation_width(self.dtype)

    def replace(self, **changes: Any) -> Settings:
        """A copy with some fields exchanged."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, units in the keys."""
        return {
            "tokens": self.tokens,
            "sequences": self.sequences,
            "context_tokens": self.context,
            "format": self.form.name,
            "activation_dtype": self.dtype,
            "compute_dtype": self.compute,
            "hardware": self.device.slug if self.device else None,
            "tp": self.tp,
        }


def settings(
    *,
    tokens: int = 1,
    format: str = "bf16",
    group: int | None = None,
    hardware: str | Hardware | None = None,
    tp: int = 1,
    context: int = 2048,
    sequences: int | None = None,
    dtype: str | None = None,
    compute: str | None = None,
    links: Links | None = None,
    nodes: int | None = None,
) -> Settings:
    """Settings, checked. The arguments are those of `fanfold.cost`.

    Raises ValueError, naming the known values, for a count below 1 or an unknown format, device or dtype.
    """
    for name, value in (("tokens", tokens), ("tp", tp)):
        positive(name, value)
    if isinstance(context, bool) or not isinstance(context, int) or context < 0:
        raise ValueError(f"context={context!r}: expected an int of at least 0")
    sequences = tokens if sequences is None else positive("sequences", sequences)
    if sequences > tokens:
        raise ValueError(f"sequences={sequences} with tokens={tokens}: expected no more sequences than tokens")
    form = formats.get(format, group)
    if dtype is None:
        dtype = form.name if form.name in _FLOATS else "bf16"
    ffn.activation_width(dtype)
    device = _device(hardware)
    if compute is None:
        compute = form.compute
        if device is not None and compute == "fp8" and device.peak("fp8") is None:
            compute = "bf16" if device.peak("bf16") else "fp16"
    known = ("fp32", *hardware_dtypes())
    if compute not in known:
        raise ValueError(f"compute dtype {compute!r} is not known; known: {', '.join(known)}")
    if links is None and device is not None:
        links = device.links
    made = Settings(
        tokens=tokens,
        sequences=sequences,
        context=context,
        form=form,
        dtype=dtype,
        compute=compute,
        device=device,
        tp=tp,
        links=links,
    )
    return made if nodes is None else on_nodes(made, nodes)


def on_nodes(s: Settings, nodes: int) -> Settings:
    """The settings with the ranks spread over so many nodes, as many on each.

    Raises ValueError if that cannot be, or the links are not known.
    """
    positive("nodes", nodes)
    if s.links is None:
        raise ValueError(f"nodes={nodes}: the links are not known; name a device of the table, or give intra_GBps")
    return s.replace(links=collective.spread(s.links, s.tp, nodes))


def hardware_dtypes() -> tuple[str, ...]:
    """The dtypes for which the table of devices has rates."""
    return tuple(hardware.RATES)


def _device(given: str | Hardware | None) -> Hardware | None:
    return given if given is None or isinstance(given, Hardware) else hardware.get(given)


def positive(name: str, value: Any) -> int:
    """`value` if it is an int of at least 1. Raises ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}: expected a positive int")
    return value


def check_split(d_ff: int, tp: int, group: int = 0, what: str = "d_ff") -> None:
    """Raise ValueError unless `d_ff` channels can be cut into `tp` equal ranks of whole groups.

    The message names the ranks that work, and the width to which zeros could be padded.
    """
    unit = max(group, 1)
    if d_ff % (tp * unit) == 0:
        return
    works = [n for n in range(1, 1025) if d_ff % (n * unit) == 0]
    step = tp * unit
    padded = -(-d_ff // step) * step
    groups = f" in groups of {group}" if group > 1 else ""
    if d_ff % tp == 0:
        found = f"{d_ff}/{tp} = {d_ff // tp} channels, which is {d_ff // tp / unit:.6g} groups"
    else:
        found = f"{d_ff}/{tp} is not whole"
    use = (
        f"Use tp in {{{', '.join(map(str, works[:12]))}{', …' if len(works) > 12 else ''}}}, or pad" if works else "Pad"
    )
    raise ValueError(
        f"{what}={d_ff} cannot be split over {tp} ranks{groups}: {found}. "
        f"{use} to {padded} (adds {100 * (padded / d_ff - 1):.2f} %)."
    )
