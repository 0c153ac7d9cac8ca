"""`fanfold cost`: from what was typed to one document of figures, curves and a plan."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..count import cost as work
from ..count import hardware, plan, probe, settings, sweep
from ..count.block import Attention, Block, Widened, widen
from ..count.hardware import Link, Links
from ..count.models import Model
from ..spec import Spec
from . import plots
from .models import TABLED

_SHAPE = re.compile(r"(\d+)x(\d+)", re.IGNORECASE)
FACTOR = 1.5  # of the parameters, where widths are compared


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What the command line asked for."""

    what: str
    variant: str | None = None
    bias: bool = False
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of `settings`
    links: dict[str, float | None] = dataclasses.field(default_factory=dict)
    nodes: int | None = None  # that the ranks stand on; of a plan: that there are
    sweep: str | None = None
    plot: Path | None = None
    plan: bool = False
    devices: Sequence[int] = ()
    targets_ms: Sequence[float] = ()
    probe: bool = False


def target(r: Request) -> Spec | Block | Model:
    """What is to be counted: "4096x11008" is an FFN, with heads a block; else a model's name or its config.json.

    Raises ValueError.
    """
    shape = _SHAPE.fullmatch(r.what)
    if shape is None and re.match(r"\d+x", r.what, re.IGNORECASE):
        raise ValueError(f"{r.what!r}: expected d_model x d_ff, as in 4096x11008")
    if shape is None:
        if r.heads is not None or r.bias:
            raise ValueError(f"--heads and --bias go with a shape such as 4096x11008, not with {r.what!r}")
        return work.resolve(TABLED.get(r.what, r.what), r.variant)  # type: ignore[return-value]
    d_model, d_ff = (int(v) for v in shape.groups())
    spec = Spec.parse(r.variant or "swiglu", d_model=d_model, d_ff=d_ff, up_bias=r.bias, down_bias=r.bias)
    spec = Spec.from_dict({**spec.to_dict(), "gate_bias": r.bias and spec.gated})
    if r.heads is None:
        return spec
    settings.positive("heads", r.heads)
    head_dim = r.head_dim or d_model // r.heads
    kv = r.heads if r.kv_heads is None else r.kv_heads
    return Block(ffn=spec, attention=Attention(d_model=d_model, n_heads=r.heads, n_kv_heads=kv, head_dim=head_dim))


def _links(given: dict[str, float | None], known: Links | None) -> Links | None:
    """The table's links with those given put in. Raises ValueError for a figure that is not above 0."""
    wanted = {k: v for k, v in given.items() if v is not None}
    for name, value in wanted.items():
        if not value > 0:
            raise ValueError(f"{name}={value!r}: expected a number above 0")
    if not wanted:
        return known
    if known is None:
        missing = "intra_GBps" not in wanted
        if missing:
            raise ValueError(f"links need intra_GBps, the bandwidth within a node; given: {', '.join(wanted)}")
        bandwidth = wanted["intra_GBps"] * 1e9
        known = Links(
            devices_per_node=8, intra=Link(bytes_per_s=bandwidth, step_s=1e-6),
            inter=Link(bytes_per_s=bandwidth, step_s=5e-6), base_s=0.0, source="",
        )  # fmt: skip
    intra = Link(
        bytes_per_s=wanted.get("intra_GBps", known.intra.bytes_per_s / 1e9) * 1e9,
        step_s=wanted.get("intra_us", known.intra.step_s * 1e6) * 1e-6,
    )
    inter = Link(
        bytes_per_s=wanted.get("inter_GBps", known.inter.bytes_per_s / 1e9) * 1e9,
        step_s=wanted.get("inter_us", known.inter.step_s * 1e6) * 1e-6,
    )
    per_node = int(wanted.get("devices_per_node", known.devices_per_node))
    return Links(
        devices_per_node=per_node, intra=intra, inter=inter, base_s=wanted.get("base_us", known.base_s * 1e6) * 1e-6,
        source="given on the command line",
    )  # fmt: skip


def run(r: Request) -> dict[str, Any]:
    """The document of a request, with the objects it was made from under keys that start with "_"."""
    if r.plot is not None:
        plots.check(r.plot)
        if r.sweep is None:
            raise ValueError("--plot draws a sweep: name it with --sweep tokens=1:4096 or --sweep d_ff=8192:16384:256")
    what = target(r)
    if r.probe:
        probe.probe(again=True)
    s = settings.settings(**r.options)
    s = s.replace(links=_links(r.links, s.links))
    devices = r.devices
    if r.nodes is not None and r.plan:
        if s.links is None:
            raise ValueError(f"--nodes {r.nodes}: name a device of the table with --hardware, or give --intra-GBps")
        devices = devices or (settings.positive("nodes", r.nodes) * s.links.devices_per_node,)
    elif r.nodes is not None:
        s = settings.on_nodes(s, r.nodes)
    found = work.count(what, s)
    document: dict[str, Any] = {**found.to_dict(), "_cost": found, "_what": what}
    if s.device is not None:
        document["hardware"] = device_dict(s.device)
    block = what if isinstance(what, Block) else what.block if isinstance(what, Model) else None
    if block is not None:
        ways: list[Widened] = widen(block, FACTOR, s.context, s.width)
        document["widened"] = [w.to_dict() for w in ways]
    if r.sweep is not None:
        name, values = sweep.parse(r.sweep)
        curves = sweep.sweep(what, s, name, values)
        document.update(curves.to_dict(), _sweep=curves)
        if r.plot is not None:
            wide = sweep.widths(block, s.context, s.width) if block and name == "d_ff" else None
            ranks = f", tp={s.tp}" if s.tp > 1 else ""
            plots.draw(r.plot, curves, f"{found.what}, {s.form.name}{ranks}", wide)
            document["plot"] = str(r.plot)
    if r.plan:
        made = plan.plan(what, s, devices or plan.DEVICES, [t / 1e3 for t in r.targets_ms] or None)
        document.update(plan=made.to_dict(), _plan=made)
    return document


def device_dict(device: hardware.Hardware) -> dict[str, Any]:
    """A device as plain values, units in the keys."""
    return {
        "slug": device.slug,
        "name": device.name,
        "kind": device.kind,
        "peak_flop_per_s": dict(device.peak_flops),
        "bytes_per_s": device.bytes_per_s,
        "read_bytes_per_s_by_working_set_bytes": {str(int(n)): rate for n, rate in device.read_rates},
        "memory_bytes": device.memory_bytes,
        "cores": device.cores,
        "source": device.source,
        "verified": device.verified,
        "notes": device.notes,
    }
