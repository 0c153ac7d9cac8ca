"""`fanfold bench --shape`: one FFN of random weights, our kernels by format beside PyTorch, by turns in one run."""

from __future__ import annotations

import dataclasses
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..count import formats as stored
from ..spec import Spec
from . import machine, plots, roofs
from .failures import NotEnoughMemoryError, first_line
from .output import Progress, progress, size

if TYPE_CHECKING:
    from torch import Tensor

    from .contenders import Answers, Contender, Run

FORMATS = tuple(name for name in stored.FORMATS if name != "fp8")
DEFAULT_FORMATS, DEFAULT_TOKENS = "fp32,bf16,int8,int4", "1,16,512"
DECODE = 32  # below so many tokens weights are read from memory, as in a model's decode; from there on one layer serves
TURN = 0.1  # seconds that a contender has in each turn, or one pass over its layers
CHECKED = 4  # tokens of each count that are held to float64
SWEEP_BYTES = 128 << 20  # read before a pass whose layers would otherwise stay in the caches
_SPARE = 0.8  # of the available memory may be used
_SHAPE = re.compile(r"(\d+)x(\d+)", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What the command line asked for; see `parse`."""

    specs: tuple[Spec, ...]
    tokens: tuple[int, ...]
    formats: tuple[str, ...]
    ffn: str = "swiglu"
    repeats: int = 5
    compiled: bool = False
    plot: Path | None = None


def parse(
    shape: str,
    tokens: str = DEFAULT_TOKENS,
    formats: str = DEFAULT_FORMATS,
    ffn: str = "swiglu",
    repeats: int = 5,
    compiled: bool = False,
    plot: Path | None = None,
) -> Request:
    """Read "4096x11008", "1,16,512" and "fp32,int4"; each may list several. Raises ValueError."""
    if plot is not None:
        plots.check(plot)
        plots.figure((1, 1))  # a missing Matplotlib is said before anything is timed
    specs = []
    for one in _listed(shape):
        found = _SHAPE.fullmatch(one)
        if found is None:
            raise ValueError(f"--shape {one!r}: expected d_model x d_ff, as in 4096x11008")
        sizes = {"d_model": int(found[1]), "d_ff": int(found[2])}
        zero = [f"{name}=0" for name, n in sizes.items() if n == 0]
        if zero:
            raise ValueError(f"--shape {one!r}: {' and '.join(zero)}: expected sizes from 1 on")
        specs.append(Spec.parse(ffn, **sizes))
    counts = _listed(tokens)
    wrong = [t for t in counts if not t.isdecimal() or int(t) < 1]
    if wrong or not counts:
        raise ValueError(f"--tokens {wrong[0] if wrong else tokens!r}: expected whole numbers from 1 on, as in 1,16")
    return Request(
        specs=tuple(specs),
        tokens=tuple(sorted({int(t) for t in counts})),
        formats=_formats(formats),
        ffn=ffn,
        repeats=repeats,
        compiled=compiled,
        plot=plot,
    )


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _formats(text: str) -> tuple[str, ...]:
    names = [name.lower() for name in _listed(text)]
    for name in names:
        if stored.ALIASES.get(name, name) not in FORMATS:
            known = ", ".join([*FORMATS, "int4"])
            raise ValueError(f"--format {name!r} cannot be timed on a shape; known: {known}")
    if not names:
        raise ValueError("--format is empty: name at least one format, as in fp32,int4")
    return tuple(dict.fromkeys(stored.get(name).name for name in names))


@dataclasses.dataclass
class Cell:
    """One contender at one number of tokens: what was checked and what was timed.

    layers  distinct layers that calls rotate over;  swept  whether the caches are swept before each pass.
    times   seconds of single calls.
    """

    contender: Contender
    tokens: int
    run: Run
    layers: int
    swept: bool
    error: float | None = None
    times: list[float] = dataclasses.field(default_factory=list)

    def warm(self) -> None:
        for layer in range(self.layers):
            self.run(layer)

    def turn(self, seconds: float, sweep: Callable[[], object], clock: Callable[[], float]) -> None:
        """Time calls one by one for `seconds`, at least one pass over the layers.

        The first of several layers is called but not timed: it wakes the threads.
        """
        timed = range(1, self.layers) if self.layers > 1 else range(1)
        end = clock() + seconds
        while True:
            if self.swept:
                sweep()
            if self.layers > 1:
                self.run(0)
            for layer in timed:
                begin = clock()
                self.run(layer)
                self.times.append(clock() - begin)
            if clock() >= end:
                return


def by_turns(
    cells: Sequence[Cell], repeats: int, step: Progress, turn: float = TURN, clock: Callable[[], float] | None = None
) -> None:
    """`repeats` turns each, in both orders by turns: a machine that slows down hits all alike."""
    import numpy as np

    words = np.ones(SWEEP_BYTES // 8, np.int64)
    for cell in cells:
        cell.warm()
    for i in range(repeats):
        for cell in cells if i % 2 else cells[::-1]:
            cell.turn(turn, words.sum, clock or time.perf_counter)
        step(i + 1, repeats)


def run(request: Request) -> Iterator[dict[str, Any]]:
    """A block of rows for each shape and number of tokens, as soon as it is measured.

    Raises NotEnoughMemoryError, and ValueError with the reason where our kernels cannot run.
    """
    import torch

    for spec in request.specs:
        _check_memory(spec, request)
        with progress(f"{_name(spec)}: making weights"):
            made, left_out = contenders(spec, request)
        x = torch.randn(max(request.tokens), spec.d_model, generator=torch.Generator().manual_seed(0))
        answers = _answers(spec, made, x, request.tokens)
        for tokens in request.tokens:
            yield _block(spec, made, x[:tokens], answers, request, left_out)
        made.clear()


def contenders(spec: Spec, request: Request) -> tuple[list[Contender], list[str]]:
    """(ours in each format, then PyTorch in the dtypes they are compared with; why others are left out)."""
    from .contenders import Compiled, Eager, Ours, gaussian

    base, cold = gaussian(spec), min(request.tokens) < DECODE
    made: list[Contender] = [Ours(base, name, cold) for name in request.formats]
    dtypes = sorted({d for name in request.formats for d in compared_with(name)}, reverse=True)
    made += [Eager(base, name, cold) for name in dtypes]
    if not request.compiled:
        return made, ["torch.compile is left out: it takes up to a minute for each shape; --compile times it"]
    return made + [Compiled(base, name, cold) for name in dtypes], []


def compared_with(format: str) -> tuple[str, ...]:
    """The dtypes of PyTorch that a format is set beside: its own; both for integer codes; fp32 for fp16, whose x is."""
    return {"fp32": ("fp32",), "fp16": ("fp32",), "bf16": ("bf16",)}.get(format, ("fp32", "bf16"))


def _checked(tokens: int) -> list[int]:
    """The tokens that are held to float64: the first and the last ones."""
    half = CHECKED // 2
    return sorted({*range(min(half, tokens)), *range(max(0, tokens - half), tokens)})


def _answers(spec: Spec, made: Sequence[Contender], x: Tensor, tokens: Sequence[int]) -> dict[str, Answers]:
    """What ours must give for the tokens that are checked, at any of the counts."""
    from .contenders import Answers, Ours

    rows = sorted({row for count in tokens for row in _checked(count)})
    ours = [one for one in made if isinstance(one, Ours)]
    answers = {}
    with progress(f"{_name(spec)}: the right answers, in float64") as step:
        for i, one in enumerate(ours):
            answers[one.name] = Answers(one, x.to(one.dtype), rows)
            step(i + 1, len(ours))
    return answers


def _block(
    spec: Spec, made: list[Contender], x: Tensor, answers: dict[str, Answers], request: Request, left_out: list[str]
) -> dict[str, Any]:
    import torch

    tokens = len(x)
    what = f"{_name(spec)}, tokens: {tokens}"
    with progress(f"{what}, measuring the machine"):
        roof = roofs.measure()
    with torch.no_grad():
        with progress(f"{what}, checking") as step:
            cells, wrong, failed = _cells(spec, made, x, answers, step)
        with progress(f"{what}, timing by turns") as step:
            by_turns(cells, request.repeats, step)
    return {
        "d_model": spec.d_model,
        "d_ff": spec.d_ff,
        "ffn": request.ffn,
        "tokens": tokens,
        "threads": torch.get_num_threads(),
        "roof": roof.to_dict(),
        "rows": rows(cells, spec, roof),
        "wrong": wrong,
        "left_out": [*left_out, *failed],
    }


def _cells(
    spec: Spec, made: Sequence[Contender], x: Tensor, answers: dict[str, Answers], step: Progress
) -> tuple[list[Cell], list[str], list[str]]:
    """(the cells to time, a line for each of ours that is wrong and so not timed, one for each that cannot compile)."""
    from . import contenders as work

    tokens = len(x)
    cells, wrong, failed = [], [], []
    for i, one in enumerate(made):
        own = x.to(one.dtype)
        error = None
        if isinstance(one, work.Ours):
            found = work.check(one, answers[one.name], own, _checked(tokens))
            error = found.rms
            if not found.ok:
                wrong.append(f"{_name(spec)} {one.name}, tokens: {tokens}: {found.ratio:.3g} times the error allowed")
                continue
        try:
            run = one.ready(own)
        except Exception as problem:  # whatever a compiler raises
            if not isinstance(one, work.Compiled):
                raise
            failed.append(f"{one.name} is left out: {first_line(problem)}")
            continue
        layers = len(one.layers) if tokens < DECODE else 1
        swept = tokens < DECODE and layers * one.layer_bytes < work.COLD_BYTES
        cells.append(Cell(one, tokens, run, layers, swept, error))
        step(i + 1, len(made))
    return cells, wrong, failed


def rows(cells: Sequence[Cell], spec: Spec, roof: roofs.Roof) -> list[dict[str, Any]]:
    """A row of figures for each cell; rates and ratios are of the fastest call."""
    best = {cell.contender.name: min(cell.times) for cell in cells if not cell.contender.ours}
    out = []
    for cell in cells:
        one, seconds = cell.contender, min(cell.times)
        moved = one.layer_bytes + 2 * cell.tokens * spec.d_model * one.dtype.itemsize  # the weights, x and y once each
        flop = 2 * cell.tokens * spec.n_params
        working_set = moved if cell.layers == 1 and not cell.swept else float("inf")
        floor, bound = roof.floor(moved, flop, one.arithmetic, working_set)
        ratios = {f"times_{kind}_{d}": best[f"{kind} {d}"] / seconds
                  for kind in ("torch", "compiled") for d in compared_with(one.format)
                  if one.ours and f"{kind} {d}" in best}  # fmt: skip
        out.append({
            "name": one.name,
            "format": one.format,
            "ours": one.ours,
            "arithmetic": one.arithmetic,
            "tokens": cell.tokens,
            "weight_bytes": one.layer_bytes,
            "layers": cell.layers,
            "swept": cell.swept,
            "calls": len(cell.times),
            "min_s": seconds,
            "median_s": statistics.median(cell.times),
            "bytes_per_s": moved / seconds,
            "flop_per_s": flop / seconds,
            "intensity_flop_per_byte": flop / moved,
            "floor_s": floor,
            "bound": bound,
            "share_of_roof": floor / seconds,
            "error": cell.error,
            **ratios,
        })  # fmt: skip
    return out


def _name(spec: Spec) -> str:
    return f"{spec.d_model}x{spec.d_ff}"


def _check_memory(spec: Spec, request: Request) -> None:
    """Raise NotEnoughMemoryError unless the weights of all contenders fit together."""
    from .contenders import COMPILED_LAYERS, MOST_LAYERS, layer_count

    cold = min(request.tokens) < DECODE
    need = 2.0 * stored.ffn_bytes(spec, "fp32") + SWEEP_BYTES
    dtypes = {d for name in request.formats for d in compared_with(name)}
    kinds = [(name, MOST_LAYERS) for name in (*request.formats, *dtypes)]
    # inductor keeps its own packed copy beside the parameters
    kinds += [(name, n) for name in dtypes for n in (COMPILED_LAYERS, COMPILED_LAYERS)] if request.compiled else []
    for name, most in kinds:
        n_bytes = stored.ffn_bytes(spec, name)
        need += n_bytes * layer_count(n_bytes, cold, most)
    free = machine.available_memory()
    if free is not None and need > _SPARE * free:
        raise NotEnoughMemoryError(
            f"not enough memory: {_name(spec)} in {len(request.formats)} formats needs about {size(need)}, "
            f"{size(free)} are available; time fewer formats at once"
        )
