"""The limits of this machine at this moment: how fast memory is read, and products by arithmetic."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..count import formats as stored
from ..count import probe

ARITHMETICS = ("fp32", "bf16", "int8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roof:
    """What no program on this machine can exceed.

    read_bytes_per_s  (working set in bytes, bytes/s of reading it), ascending;  flops  FLOP/s by arithmetic.
    estimated         the arithmetics whose FLOP/s were not measured but derived from fp32.
    threads           CPUs that took part;  notes  where the figures come from.
    """

    read_bytes_per_s: tuple[tuple[float, float], ...]
    flops: dict[str, float]
    estimated: tuple[str, ...]
    threads: int
    notes: str

    def rate(self, working_set: float) -> float:
        """Bytes/s at which `working_set` bytes are read again and again; of two measured sizes the smaller counts."""
        reached = [rate for size, rate in self.read_bytes_per_s if size <= working_set]
        return reached[-1] if reached else self.read_bytes_per_s[0][1]

    def floor(self, moved: float, flop: float, arithmetic: str, working_set: float) -> tuple[float, str]:
        """(the least seconds in which `moved` bytes and `flop` can be done, "memory" or the arithmetic that binds)."""
        return max((moved / self.rate(working_set), "memory"), (flop / self.flops[arithmetic], arithmetic))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def arithmetic(format: str) -> str:
    """What multiplies weights in `format` at their fastest: "fp32", "bf16" or "int8"."""
    compute = stored.get(format).compute
    return compute if compute in ARITHMETICS else "fp32"  # fp16 is widened


def measure() -> Roof:
    """Measure now. The larger of this and earlier measurements counts: other programs only ever take away.

    fp32 and reading by `count.probe`; bf16 and int8 by the C++ core's own probe where it has one, else from fp32.
    Without an instruction for dot products of bytes (AVX2) int8's is the rate for codes of 4 bits, whose products can
    be summed in 16 bits: codes of 8 bits take twice the instructions and reach half of it at most.
    """
    found = probe.probe(again=True)
    own = _own_peaks(found.threads)
    flops = {kind: own.get(kind) or found.flops[kind] for kind in ARITHMETICS}
    flops["fp32"] = max(flops["fp32"], found.flops["fp32"])
    estimated = tuple(kind for kind in ARITHMETICS[1:] if not own.get(kind))
    return Roof(
        read_bytes_per_s=tuple((float(size), rate) for size, rate in found.read_bytes_per_s),
        flops=flops,
        estimated=estimated,
        threads=found.threads,
        notes=_notes(found.notes, estimated),
    )


def _notes(notes: str, estimated: tuple[str, ...]) -> str:
    """What the probe says of the arithmetics that come from it, and of the load it met."""
    others = tuple(f"{kind}:" for kind in ("fp8", "fp16", *ARITHMETICS) if kind not in estimated)
    return "; ".join(part for part in notes.split("; ") if not part.startswith(others))


_seen: dict[str, float] = {}  # the largest of this process


def _own_peaks(threads: int) -> dict[str, float]:
    """{arithmetic: FLOP/s} of the C++ core's `peak(kind, threads)`; empty where it has none, 0 for a missing unit."""
    from ..kernels import cpu

    peak = getattr(cpu._cpu, "peak", None)
    if peak is not None:
        for kind in ARITHMETICS:
            _seen[kind] = max(_seen.get(kind, 0.0), float(peak(kind, threads)))
    return dict(_seen)
