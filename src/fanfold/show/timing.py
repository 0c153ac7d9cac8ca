"""Timing of a model in use: prefill and decode, before and after by turns, and the part of it that is FFN."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

Pass = Callable[[Any], dict[str, float]]  # model -> {what: seconds}


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median and the 20th and 80th percentile of some measurements."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        ordered = sorted(values)
        return cls(statistics.median(ordered), _percentile(ordered, 0.2), _percentile(ordered, 0.8))

    def rate(self, count: int) -> Spread:
        """`count` things in this many seconds, as things per second."""
        return Spread(count / self.median, count / self.p80, count / self.p20)


def _percentile(ordered: list[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def generation(ids: Any, new_tokens: int) -> Pass:
    """A pass that reads `ids` [1, tokens] ("prefill") and then adds `new_tokens` greedily, one at a time ("decode")."""
    import torch

    def run(model: Any) -> dict[str, float]:
        with torch.inference_mode():
            begin = time.perf_counter()
            out = model(input_ids=ids, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
            middle = time.perf_counter()
            for _ in range(new_tokens):
                out = model(input_ids=token, past_key_values=out.past_key_values, use_cache=True)
                token = out.logits[:, -1:].argmax(-1)
            return {"prefill": middle - begin, "decode": time.perf_counter() - middle}

    return run


def forwards(inputs: dict[str, dict[str, Any]]) -> Pass:
    """A pass that runs the model once on each of the named keyword arguments."""
    import torch

    def run(model: Any) -> dict[str, float]:
        seconds = {}
        with torch.inference_mode():
            for name, kwargs in inputs.items():
                begin = time.perf_counter()
                model(**kwargs)
                seconds[name] = time.perf_counter() - begin
        return seconds

    return run


def by_turns(
    before: Any, after: Any, one: Pass, repeats: int, progress: Callable[[int, int], None]
) -> tuple[dict[str, Spread], dict[str, Spread]]:
    """({what: seconds} before, the same after): one warm-up each, then `repeats` passes by turns.

    Turns alternate who goes first, so that a machine that slows down or is shared hits both alike.
    """
    times: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
    models = (before, after)
    total = 2 * (repeats + 1)
    for i in range(repeats + 1):
        for which in (0, 1) if i % 2 else (1, 0):
            seconds = one(models[which])
            if i:  # the first turn warms up
                times[which].append(seconds)
            progress(2 * i + 1, total)
        progress(2 * i + 2, total)
    spread = [{what: Spread.of([t[what] for t in runs]) for what in runs[0]} for runs in times]
    return spread[0], spread[1]


def ffn_time(model: Any, paths: list[str], one: Pass, passes: int) -> tuple[float, float]:
    """(seconds of a pass spent in the modules at `paths`, their share of the pass, 0 to 1), by hooks around each."""
    spent, begun = 0.0, 0.0

    def enter(*_: Any) -> None:
        nonlocal begun
        begun = time.perf_counter()

    def leave(*_: Any) -> None:
        nonlocal spent
        spent += time.perf_counter() - begun

    handles = []
    for path in paths:
        module = model.get_submodule(path)
        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        whole = sum(sum(one(model).values()) for _ in range(passes))
    finally:
        for handle in handles:
            handle.remove()
    return spent / passes, spent / whole
