"""Timing candidate widths on this machine with our own kernels, by turns, and ranking them anew."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..count import ffn
from ..count.candidates import Candidate, Sizing
from ..count.sizing import reason
from ..spec import Spec
from .failures import NotEnoughMemoryError
from .machine import available_memory
from .output import size as size_text

TOP = 4  # candidates that are timed
TOKENS = (1, 64)
_SECONDS = 1.5  # for each candidate and token count
_FEW, _MANY = 3, 30  # passes, at least and at most
_PER_SHARE = 100.0  # points for being slower per FLOP than the fastest: 1 for each percent
_SPARE = 0.8  # of the available memory may be used


def measure(
    found: Sizing, tokens: Sequence[int] = TOKENS, top: int = TOP, progress: Callable[[int, int], None] | None = None
) -> Sizing:
    """The sizing with its best candidates timed and ranked by what was measured.

    A timed candidate's new score is 100 - 4 per % of deviation - points of broken format rules - 1 per % that it is
    slower per FLOP than the fastest (geometric mean over token counts): what the rules of the hardware predict is
    replaced by what it does. Weights are random, in fp32 if that is the format, else bf16.
    Raises ValueError where the kernels cannot run, NotEnoughMemoryError where a candidate does not fit.
    """
    from ..kernels import cpu

    missing = cpu.available()
    if missing is not None:
        raise ValueError(f"the cpu kernels cannot run here: {missing}")
    chosen = [c for c in found.candidates if c.usable][:top]
    dtype = "fp32" if found.constraints.form.name == "fp32" else "bf16"
    tp = found.constraints.tp
    specs = {c.d_ff: Spec.from_dict({**found.spec.to_dict(), "d_ff": c.d_ff // tp}) for c in chosen}
    _check_memory(specs, dtype)
    seconds = {count: _by_turns(specs, count, dtype, progress) for count in tokens}
    rates = {
        d_ff: {n: n * ffn.flops_per_token(spec) / seconds[n][d_ff] for n in tokens} for d_ff, spec in specs.items()
    }
    best = {n: max(r[n] for r in rates.values()) for n in tokens}
    timed = [_scored(c, rates[c.d_ff], {n: seconds[n][c.d_ff] for n in tokens}, best) for c in chosen]
    timed.sort(key=lambda c: -c.score)
    rest = [c for c in found.candidates if c.d_ff not in specs]
    spec = Spec.from_dict({**found.spec.to_dict(), "d_ff": timed[0].d_ff})
    why = f"measured here in {dtype}: {reason(timed[0], [*timed, *rest], found.budget, found.like)}"
    return dataclasses.replace(found, candidates=[*timed, *rest], recommended=timed[0], spec=spec, reason=why)


def _check_memory(specs: dict[int, Spec], dtype: str) -> None:
    needed = max(2 * spec.n_params for spec in specs.values()) * ffn.DTYPE_BYTES[dtype]
    free = available_memory()
    if free is not None and needed > _SPARE * free:
        raise NotEnoughMemoryError(f"timing needs {size_text(needed)}, {size_text(free)} are available")


def _scored(c: Candidate, rates: dict[int, float], seconds: dict[int, float], best: dict[int, float]) -> Candidate:
    share = math.exp(statistics.fmean(math.log(rates[n] / best[n]) for n in rates))
    format_rules = sum(r.cost for r in c.rules if r.name in ("k_quant_256", "fp8_16"))
    score = 100 - 400 * abs(c.deviation) - format_rules - _PER_SHARE * (1 - share)
    measured: dict[str, float] = {"speed_percent_of_best": 100 * share}
    for n in rates:
        measured[f"seconds_at_{n}_tokens_s"] = seconds[n]
        measured[f"rate_at_{n}_tokens_flop_per_s"] = rates[n]
    return dataclasses.replace(c, score=score, measured=measured)


def _by_turns(
    specs: dict[int, Spec], tokens: int, dtype: str, progress: Callable[[int, int], None] | None
) -> dict[int, float]:
    """{d_ff: seconds of a call, the median}; all candidates by turns, so that a busy machine hits them alike."""
    import torch

    from ..kernels import cpu

    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    generator = torch.Generator().manual_seed(0)
    made: dict[int, tuple[Any, Any]] = {}
    for d_ff, spec in specs.items():
        weights = _random(spec, kind, generator)
        made[d_ff] = (torch.randn(tokens, spec.d_model, generator=generator).to(kind), weights)
    times: dict[int, list[float]] = {d_ff: [] for d_ff in made}
    with torch.inference_mode():
        for x, weights in made.values():
            cpu.forward(x, weights)  # warm up
        end = time.perf_counter() + _SECONDS * len(made)
        for i in range(_MANY):
            if i >= _FEW and time.perf_counter() > end:
                break
            for d_ff, (x, weights) in made.items():
                begin = time.perf_counter()
                cpu.forward(x, weights)
                times[d_ff].append(time.perf_counter() - begin)
            if progress is not None:
                progress(i + 1, _MANY)
    return {d_ff: statistics.median(t) for d_ff, t in times.items()}


def _random(spec: Spec, dtype: Any, generator: Any) -> Any:
    import torch

    from ..weights import Weights

    def make(*shape: int) -> Any:
        return torch.empty(shape, dtype=dtype).uniform_(-0.02, 0.02, generator=generator)

    d, f = spec.d_model, spec.d_ff
    biases = {f"{p}_bias": make(n) for p, n in (("gate", f), ("up", f), ("down", d)) if getattr(spec, f"{p}_bias")}
    gate = {"gate": make(f, d)} if spec.gated else {}
    return Weights(spec, up=make(f, d), down=make(d, f), **gate, **biases)
