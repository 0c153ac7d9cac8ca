"""The roofline: how fast a device can do it at best, and what keeps it from being faster."""

from __future__ import annotations

from .collective import AllReduce, all_reduce
from .figures import Figures
from .settings import Settings

MEMORY, COMPUTE, UNKNOWN = "memory", "compute", "unknown"


def add_traffic(figures: Figures, s: Settings, weight_bytes: float, token_bytes: float, flop: float) -> None:
    """Add bytes moved by one device, and the arithmetic intensity.

    weight_bytes  read once, whole, over all ranks.      token_bytes  moved for each token, on every rank.
    flop          of the products, over all ranks.
    """
    moved = figures.add(
        "moved_bytes",
        "bytes moved per device",
        "B",
        weight_bytes / s.tp + s.tokens * token_bytes,
        "weight_bytes / tp + tokens * bytes_per_token",
        weight_bytes=weight_bytes,
        tp=s.tp,
        tokens=s.tokens,
        bytes_per_token=token_bytes,
    )
    assert moved is not None
    figures.add(
        "intensity_flop_per_byte",
        "arithmetic intensity",
        "FLOP/B",
        flop / s.tp / moved,
        "flop / tp / moved_bytes",
        flop=flop,
        tp=s.tp,
        moved_bytes=moved,
    )


def add_times(figures: Figures, s: Settings, weight_bytes: float, token_bytes: float, flop: float) -> None:
    """Add the times of one device, what binds, the ridge and the upper bound of tokens per second.

    floor = max(moved bytes / bandwidth, FLOP / peak); the ridge is the token count at which both are equal. Nothing is
    added without a device. Raises nothing: a peak that the table does not know leaves the compute time out.
    """
    device = s.device
    if device is None:
        return
    moved = figures.value("moved_bytes")
    rate = device.rate(max(moved, s.working_set))
    memory = figures.add(
        "memory_s", "time to move the bytes", "s", moved / rate, "moved_bytes / bytes_per_s",
        moved_bytes=moved, bytes_per_s=rate,
    )  # fmt: skip
    assert memory is not None
    peak = device.peak(s.compute)
    compute = None
    if peak is None:
        missing = f"the peak of {device.slug} in {s.compute} is not known: {_peaks(s)}"
        figures.add("compute_s", "time to multiply", "s", None, "", missing)
    else:
        compute = figures.add(
            "compute_s", "time to multiply", "s", flop / s.tp / peak, "flop / tp / flop_per_s",
            flop=flop, tp=s.tp, flop_per_s=peak,
        )  # fmt: skip
    floor = max(memory, compute or 0.0)
    figures.add("floor_s", "floor of the time", "s", floor, "max(memory_s, compute_s)",
                memory_s=memory, compute_s=compute or 0.0)  # fmt: skip
    _add_ridge(figures, s, weight_bytes, token_bytes, flop, rate, peak)


def _peaks(s: Settings) -> str:
    assert s.device is not None
    return f"known: {', '.join(s.device.peak_flops)}"


def _add_ridge(
    figures: Figures, s: Settings, weight_bytes: float, token_bytes: float, flop: float, rate: float, peak: float | None
) -> None:
    per_token = flop / s.tokens / s.tp
    weights = weight_bytes / s.tp
    slope = per_token / peak - token_bytes / rate if peak else 0.0
    formula = "weight_bytes / bytes_per_s / (flop_per_token / flop_per_s - bytes_per_token / bytes_per_s)"
    if peak is None or slope <= 0 or not weights:
        reason = "no number of tokens makes it compute-bound" if peak else "it needs the peak, which is not known"
        figures.add("ridge_tokens", "tokens at which compute binds", "tokens", None, "", reason)
        return
    figures.add(
        "ridge_tokens",
        "tokens at which compute binds",
        "tokens",
        weights / rate / slope,
        formula,
        weight_bytes=weights,
        bytes_per_s=rate,
        flop_per_token=per_token,
        flop_per_s=peak,
        bytes_per_token=token_bytes,
    )


def add_all_reduce(figures: Figures, s: Settings, d_model: int, count: int = 1) -> AllReduce | None:
    """Add bytes and time of `count` all-reduces of the output [tokens, d_model]; None for one rank."""
    if s.tp == 1:
        return None
    n_bytes = s.tokens * d_model * s.width
    figures.add("all_reduce_bytes", "all-reduce, bytes of the tensor", "B", n_bytes, "tokens * d_model * width",
                tokens=s.tokens, d_model=d_model, width=s.width)  # fmt: skip
    if s.links is None:
        where = "no hardware was named" if s.device is None else f"the links of {s.device.slug} are not in the table"
        note = f"{where}: give the bandwidth within a node (intra_GBps)"
        figures.add("all_reduce_s", "all-reduce time", "s", None, "", note)
        return None
    found = all_reduce(n_bytes, s.tp, s.links)
    g, m = found.per_node, found.nodes
    figures.add("all_reduce_sent_bytes", "all-reduce, bytes sent per device", "B",
                count * (found.intra_bytes + found.inter_bytes),
                "count * (2 * (g - 1) / g * n + 2 * (m - 1) / m * n / g)",
                count=count, g=g, m=m, n=n_bytes)  # fmt: skip
    figures.add(
        "all_reduce_s",
        "all-reduce time",
        "s",
        count * found.seconds,
        "count * (base_s + 2 * (g - 1) * alpha_intra + 2 * ceil(log2(m)) * alpha_inter "
        "+ intra_bytes / beta_intra + inter_bytes / beta_inter)",
        count=count,
        base_s=s.links.base_s,
        g=g,
        alpha_intra=s.links.intra.step_s,
        m=m,
        alpha_inter=s.links.inter.step_s,
        intra_bytes=found.intra_bytes,
        beta_intra=s.links.intra.bytes_per_s,
        inter_bytes=found.inter_bytes,
        beta_inter=s.links.inter.bytes_per_s,
    )
    return found


def add_step(figures: Figures, s: Settings) -> None:
    """Add the time of a step, floor + all-reduce, and what it bounds: tokens per second and device."""
    if s.device is None:
        return
    floor = figures.value("floor_s")
    reduce = figures["all_reduce_s"].value if "all_reduce_s" in figures else 0.0
    if reduce is None:
        figures.add("step_s", "step: floor + all-reduce", "s", None, "", figures["all_reduce_s"].note)
        return
    step = floor + reduce
    figures.add("step_s", "step: floor + all-reduce", "s", step, "floor_s + all_reduce_s",
                floor_s=floor, all_reduce_s=reduce)  # fmt: skip
    figures.add("tokens_per_s", "tokens per second, at most", "tokens/s", s.tokens / step, "tokens / step_s",
                tokens=s.tokens, step_s=step)  # fmt: skip
    figures.add("tokens_per_s_per_device", "the same per device", "tokens/s", s.tokens / step / s.tp,
                "tokens / step_s / tp", tokens=s.tokens, step_s=step, tp=s.tp)  # fmt: skip


def bound(figures: Figures) -> str:
    """What binds: "memory", "compute", or "unknown" where the peak or the device is."""
    if "memory_s" not in figures or figures["compute_s"].value is None:
        return UNKNOWN
    return MEMORY if figures.value("memory_s") >= figures.value("compute_s") else COMPUTE
