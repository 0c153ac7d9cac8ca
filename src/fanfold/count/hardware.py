"""Devices: how fast they multiply and read, how they are linked. A table with sources, and `this` machine."""

from __future__ import annotations

import csv
import functools
import re
from dataclasses import dataclass, field
from importlib import resources

from . import probe

THIS = "this"
_VENDORS = ("nvidia", "amd", "google", "apple", "intel")
RATES = {
    "bf16": "bf16_dense_tflops",
    "fp16": "fp16_dense_tflops",
    "fp8": "fp8_dense_tflops",
    "int8": "int8_dense_tops",
}


@dataclass(frozen=True, kw_only=True)
class Link:
    """What devices talk over, per device and direction: bytes per second, seconds per step of a collective."""

    bytes_per_s: float
    step_s: float


@dataclass(frozen=True, kw_only=True)
class Links:
    """The links of a cluster: within a node, between nodes, and what a collective costs before its first step."""

    devices_per_node: int
    intra: Link
    inter: Link
    base_s: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device.

    slug           the name to call it by; name: the vendor's.
    kind           GPU, GPU/SoC, TPU or CPU.
    peak_flops     {dtype: FLOP/s of dense products}; what is missing is not known.
    bytes_per_s    of its memory; `read_rates` refines it by working set where that was measured (caches).
    memory_bytes, cores   None where not known. cores: SMs, CUs or CPU cores.
    links          None where not known.
    verified       "yes", "partly", "no": whether the figures were seen in a source; `from_memory` names those not.
    """

    slug: str
    name: str
    kind: str
    peak_flops: dict[str, float]
    bytes_per_s: float
    memory_bytes: float | None
    cores: int | None
    links: Links | None
    source: str
    verified: str
    from_memory: str = ""
    notes: str = ""
    read_rates: tuple[tuple[float, float], ...] = field(default=())  # (bytes of the working set, bytes/s), ascending

    def rate(self, n_bytes: float) -> float:
        """Bytes per second at which a working set of `n_bytes`, read again and again, can be read.

        Between two measured sizes the rate of the smaller one holds: a bound must not be too slow.
        """
        if not self.read_rates:
            return self.bytes_per_s
        reached = [rate for size, rate in self.read_rates if size <= n_bytes]
        return reached[-1] if reached else self.read_rates[0][1]

    def peak(self, dtype: str) -> float | None:
        """FLOP/s of dense products in `dtype`, or None where it is not known."""
        return self.peak_flops.get(dtype)

    @property
    def unit_bytes(self) -> int:
        """Bytes that a side of a product should be a multiple of, so that the matrix unit is full.

        GPU: 128 (A100 and later; Anthony et al. 2024, arXiv:2401.14489). TPU: 128 lanes of bf16. CPU: a cache line.
        """
        return {"TPU": 256, "CPU": 64}.get(self.kind, 128)

    @property
    def tile(self) -> tuple[int, int] | None:
        """(tokens, outputs) of the tile that one core computes, for GPUs: 128 x 256 (arXiv:2401.14489)."""
        return (128, 256) if self.kind == "GPU" and self.cores else None


def read_table(name: str) -> list[dict[str, str]]:
    """The rows of a packaged CSV table."""
    text = (resources.files("fanfold.count") / "data" / name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def slug(name: str) -> str:
    """A device's name as one types it: "NVIDIA H200 SXM" -> h200-sxm, "AMD EPYC 9654 Genoa (96c)" -> epyc-9654-genoa.

    The maker and what stands in parentheses are left out.
    """
    words = re.sub(r"\(.*?\)", " ", name).lower()
    parts = [p for p in re.split(r"[^a-z0-9.]+", words) if p]
    return "-".join(parts[1:] if parts[0] in _VENDORS else parts)


@functools.cache
def table() -> dict[str, Hardware]:
    """{slug: Hardware} of the packaged table; `this` is not in it."""
    links = {row["device"]: _links(row) for row in read_table("links.csv")}
    found = {}
    for row in read_table("hardware.csv"):
        name = slug(row["device"])
        link = next((v for k, v in links.items() if name == k or name.startswith(f"{k}-")), None)
        found[name] = _device(row, name, link)
    return found


def _links(row: dict[str, str]) -> Links:
    return Links(
        devices_per_node=int(row["devices_per_node"]),
        intra=Link(bytes_per_s=float(row["intra_GBps"]) * 1e9, step_s=float(row["intra_step_us"]) * 1e-6),
        inter=Link(bytes_per_s=float(row["inter_GBps"]) * 1e9, step_s=float(row["inter_step_us"]) * 1e-6),
        base_s=float(row["base_us"]) * 1e-6,
        source=row["source"],
    )


def _device(row: dict[str, str], name: str, links: Links | None) -> Hardware:
    cores = re.match(r"\d+", row["sm_or_cu_or_cores"])
    return Hardware(
        slug=name,
        name=row["device"],
        kind=row["kind"],
        peak_flops={dtype: float(row[column]) * 1e12 for dtype, column in RATES.items() if row[column]},
        bytes_per_s=float(row["mem_bw_GBps"]) * 1e9,
        memory_bytes=float(row["mem_gb"]) * 1e9 if row["mem_gb"] else None,
        cores=int(cores.group()) if cores else None,
        links=links,
        source=row["source_seen"],
        verified=row["verified"],
        from_memory=row["fields_from_memory"],
        notes=row["notes"],
    )


def known() -> list[str]:
    """Every name that `get` takes in full."""
    return [THIS, *table()]


def get(name: str) -> Hardware:
    """The device called `name`: a slug, or any part of one that fits no other device ("h200", "4090").

    "this" is the machine it runs on, measured once and then read from the cache (see `probe`).
    Raises ValueError, naming the known devices or those that fit, when there is not exactly one.
    """
    if isinstance(name, Hardware):
        return name
    wanted = slug(name) if isinstance(name, str) and re.search(r"[a-zA-Z0-9]", name) else ""
    if wanted == THIS:
        return this()
    devices = table()
    if wanted in devices:
        return devices[wanted]
    parts = set(wanted.split("-")) if wanted else set()
    fitting = [key for key in devices if parts and parts <= set(key.split("-"))]
    if len(fitting) == 1:
        return devices[fitting[0]]
    if fitting:
        raise ValueError(f"hardware {name!r} names {len(fitting)} devices: {', '.join(fitting)}")
    raise ValueError(f"hardware {name!r} is not known; known: {', '.join(known())}")


def this() -> Hardware:
    """The machine it runs on, measured. Takes up to 3 seconds the first time, then it is read from the cache."""
    found = probe.probe()
    rates = tuple((float(size), rate) for size, rate in found.read_bytes_per_s)
    return Hardware(
        slug=THIS,
        name=f"{found.processor}, {found.threads} threads",
        kind="CPU",
        peak_flops=found.flops,
        bytes_per_s=rates[-1][1],
        memory_bytes=found.memory_bytes,
        cores=found.threads,
        links=None,
        source=f"measured {found.measured} with NumPy {found.numpy}",
        verified="yes",
        notes=found.notes,
        read_rates=rates,
    )
