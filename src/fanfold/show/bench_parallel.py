"""`torchrun --nproc-per-node N -m fanfold bench MODEL --tp N`: a model's FFNs over N ranks, against one rank.

One rank alone runs the same code on a mesh of one, while the others wait; then all run together, by turns.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Callable
from typing import Any

from . import bench, machine, text, timing
from .output import emit, number, percent, size, stdout_kept, table

ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def check(tp: int) -> None:
    """Raise ValueError unless torchrun has started as many ranks as --tp says."""
    started = int(os.environ.get("WORLD_SIZE", "1")) if all(n in os.environ for n in ENVIRONMENT) else 0
    if started != tp:
        found = f"torchrun has started {started}" if started else "it was not started by torchrun"
        raise ValueError(
            f"bench --tp {tp} runs on {tp} ranks, and {found}: torchrun --nproc-per-node {tp} -m fanfold bench MODEL "
            f"--tp {tp}"
        )


def report(
    load: Callable[[], Any], tp: int, format: str | None, settings: bench.Settings, timeout: float, json: bool
) -> None:
    """Measure and print, on rank 0. Raises the same ParallelError on every rank if one fails or is lost."""
    if not os.environ.get("FANFOLD_VERBOSE"):
        os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is first imported, which torch.distributed does
    import torch.distributed as dist

    from ..parallel.together import together

    rank = int(os.environ["RANK"])
    # as `fanfold bench` does: on the CPU, also where there are GPUs
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
    try:
        with stdout_kept(json or rank > 0), together("bench --tp"):
            document = measure(load, tp, format, settings)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        emit(document) if json else show(document)


def measure(load: Callable[[], Any], tp: int, format: str | None, settings: bench.Settings) -> dict[str, Any]:
    """Everything measured, as plain values; the same on every rank but for the times of rank 0's."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from .. import parallel
    from ..models.find import find
    from ..models.swap import swap
    from ..parallel import links
    from ..parallel.together import jointly

    meshes = init_device_mesh("cpu", (tp, 1), mesh_dim_names=("all", "one"))
    loaded = jointly(f"loading the model for --tp {tp}", None, load)
    sample = (
        text.token_ids(loaded, text.read_text(settings.text_file), settings.text_tokens)
        if loaded.kind != "other"
        else None
    )
    one_pass, counts = bench.work(loaded, sample, settings)
    found = find(loaded.model) if format is None else None
    alone, cut = bench.twin(loaded.model), bench.twin(loaded.model)
    if format is not None:
        jointly("swapping", None, lambda: [swap(m, format=format, verify=False) for m in (alone, cut)])
    alone = parallel.apply(alone, meshes["one"], found=found, backend=settings.backend)
    cut = parallel.apply(cut, meshes["all"], found=found, backend=settings.backend)
    bytes_alone, bytes_cut = (ffn_bytes(m) for m in (alone, cut))
    times, shares = by_turns(alone, cut, one_pass, settings.repeats)
    points = []
    for n in range(2, tp + 1):
        group = dist.new_group(list(range(n)))
        if dist.get_rank() < n:
            points += links.measure(group)
        dist.barrier()
    said = [points]
    dist.broadcast_object_list(said, src=0)
    fitted = links.fit(said[0]) if tp > 1 else None
    return {
        "model": loaded.name,
        "class": type(loaded.model).__name__,
        "format": format,
        "tp": tp,
        "threads_per_rank": torch.get_num_threads(),
        "processor": machine.processor(),
        "repeats": settings.repeats,
        "tokens": counts,
        "tokens_per_s": [
            {what: dataclasses.asdict(timing.Spread.of([t[what] for t in side]).rate(counts[what])) for what in counts}
            for side in times
        ],
        "collective_share": {what: timing.Spread.of([s[what] for s in shares]).median for what in counts},
        "ffn_bytes_per_rank": [bytes_alone, bytes_cut],
        "relative_difference": difference(alone, cut, loaded, sample, counts),
        "links": None
        if fitted is None
        else {
            "base_s": fitted.base_s,
            "step_s": fitted.intra.step_s,
            "bytes_per_s": fitted.intra.bytes_per_s,
            "points": links.compared(said[0], fitted),
        },
    }


def ffn_bytes(model: Any) -> int:
    """Bytes of this rank's parts of all FFNs."""
    from torch.distributed.tensor import DTensor

    from ..parallel.sharded import ATTRIBUTE, Cut, ParallelPacked

    total, seen = 0, set()
    for m in model.modules():
        cut = m.__dict__.get(ATTRIBUTE)
        if isinstance(m, ParallelPacked):
            total += sum(b.nbytes for b in m.buffers())
        elif isinstance(cut, Cut) and m in cut.linears.values():
            for p in m.parameters(recurse=False):
                if id(p) not in seen:
                    seen.add(id(p))
                    total += (p.to_local() if isinstance(p, DTensor) else p).nbytes
    return total


def by_turns(
    alone: Any, cut: Any, one_pass: timing.Pass, repeats: int
) -> tuple[tuple[list[dict[str, float]], list[dict[str, float]]], list[dict[str, float]]]:
    """((seconds of passes on one rank, on all), share of the latter that was spent in collectives)."""
    import torch.distributed as dist

    from ..parallel.lanes import timed

    times: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
    shares: list[dict[str, float]] = []
    rank = dist.get_rank()
    for i in range(repeats + 1):
        seconds = one_pass(alone) if rank == 0 else {}
        dist.barrier()
        marks: list[float] = []
        with timed() as clock:
            together = one_pass(_marked(cut, clock, marks))
        dist.barrier()
        if i:  # the first turn warms up
            times[0].append(seconds or together)
            times[1].append(together)
            shares.append(_shares(together, marks, clock.seconds))
    return times, shares


def _marked(model: Any, clock: Any, marks: list[float]) -> Any:
    """The model, noting after each call how long its collectives have taken so far."""

    def call(*args: Any, **kwargs: Any) -> Any:
        out = model(*args, **kwargs)
        marks.append(clock.seconds)
        return out

    return call


def _shares(seconds: dict[str, float], marks: list[float], whole: float) -> dict[str, float]:
    """The share of each timed part: the first call is the first part; of generation, all others are decode."""
    names = list(seconds)
    ends = [marks[0], whole] if names == ["prefill", "decode"] else marks
    starts = [0.0, *ends[:-1]]
    return {name: (end - begin) / seconds[name] for name, begin, end in zip(names, starts, ends)}


def difference(alone: Any, cut: Any, loaded: Any, sample: Any, counts: dict[str, int]) -> float:
    """How far the outputs on all ranks are from those on one: root mean square, relative."""
    import torch

    from ..numerics import relative_error

    inputs = bench.inputs_of(loaded) if sample is None else {"input_ids": sample[:, : max(counts.values())]}
    with torch.inference_mode():
        first, second = (m(**inputs)[0] for m in (alone, cut))
    return relative_error(second, first)


def show(document: dict[str, Any]) -> None:
    """Print the document for people."""
    tp, rows = document["tp"], []
    one, many = document["tokens_per_s"]
    for what, count in document["tokens"].items():
        a, b = one[what], many[what]
        ranges = [f"{number(s['median'])} ({number(s['p20'])}–{number(s['p80'])})" for s in (a, b)]
        ratio, share = f"× {b['median'] / a['median']:.2f}", percent(document["collective_share"][what])
        rows.append([f"{what}, {count} tokens, tokens/s", *ranges, ratio, share])
    before, after = document["ffn_bytes_per_rank"]
    rows.append(["FFN bytes of a rank", size(before), size(after), f"× {after / before:.2f}", ""])
    title = (
        f"{document['model']} ({document['class']}), {document['format'] or 'weights in place'}, "
        f"{document['threads_per_rank']} thread(s) a rank, {document['processor']}; median of {document['repeats']} "
        "(p20–p80)"
    )
    table(title, ["", "one rank", f"{tp} ranks", "", "in collectives"], rows)
    print(f"outputs of {tp} ranks differ from those of one by {number(document['relative_difference'])} (relative)")
    found = document["links"]
    if found is not None:
        rows = [
            [str(p["ranks"]), f"{p['bytes']:,}", number(p["seconds"] * 1e6), number(p["model_seconds"] * 1e6),
             f"{p['model_over_measured']:.2f}"]
            for p in found["points"]
        ]  # fmt: skip
        print()
        table("all-reduce, measured beside the fitted model", ["ranks", "bytes", "µs", "model µs", "model/µs"], rows)
        print(
            f"fanfold cost with these links: --intra-GBps {found['bytes_per_s'] / 1e9:.3g} "
            f"--intra-us {found['step_s'] * 1e6:.3g} --base-us {found['base_s'] * 1e6:.3g}"
        )
