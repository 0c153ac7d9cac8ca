"""What `fanfold bench --shape` prints: tables or JSON, and with every figure when, where, by how many threads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from . import machine, plot_points
from .bench_shape import DECODE, TURN, Request, run
from .output import emit, number, percent, stdout_kept, table


def report(request: Request, json: bool) -> None:
    """Time what was asked for and print it: a table as soon as it is finished, or one JSON document.

    Ctrl-C leaves what is finished: the tables printed so far, or a document of them with "interrupted": true.
    Raises ValueError at the end if a kernel was wrong, and what `run` raises.
    """
    found = header()
    blocks: list[dict[str, Any]] = []
    if not json:
        show_header(found)
    interrupted = True
    try:
        with stdout_kept(json):
            for block in run(request):
                blocks.append(block)
                if not json:
                    show_block(block)
        interrupted = False
    finally:
        if json and (blocks or not interrupted):
            emit({**found, "repeats": request.repeats, "interrupted": interrupted, "blocks": blocks})
        elif blocks:
            show_footer(blocks, request.repeats)
    timed = [block for block in blocks if block["rows"]]
    if request.plot is not None and timed:
        plot_points.draw(request.plot, timed, _title(timed[0], found))
        if not json:
            print(f"plot written to {request.plot}")
    wrong = [line for block in blocks for line in block["wrong"]]
    if wrong:
        raise ValueError(f"a kernel is wrong and was not timed: {'; '.join(wrong)}")


def _title(block: dict[str, Any], found: dict[str, Any]) -> str:
    shape = f"{block['ffn']} {block['d_model']}x{block['d_ff']}"
    return f"{shape}: {found['processor']}, {_threads(found)}, {found['date']}"


def header() -> dict[str, Any]:
    """Where and when: goes with every figure."""
    import torch

    from ..kernels import cpu

    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "processor": machine.processor(),
        "threads": torch.get_num_threads(),
        "isa": cpu.isa() if cpu.available() is None else None,
        "torch": torch.__version__,
    }


def show_header(found: dict[str, Any]) -> None:
    print(f"{found['date']}, {found['processor']}, {_threads(found)}, {found['isa']}, torch {found['torch']}")


def _threads(found: dict[str, Any]) -> str:
    return f"{found['threads']} thread{'s' if found['threads'] > 1 else ''}"


def show_block(block: dict[str, Any]) -> None:
    """Print the table of one block."""
    ratios = [key for key in ("times_torch_fp32", "times_torch_bf16", "times_compiled_fp32", "times_compiled_bf16")
              if any(key in row for row in block["rows"])]  # fmt: skip
    heads = ["format", "ms, min", "ms, median", "GB/s", "GFLOP/s", "of the roof", "bound",
             *(f"x {key.removeprefix('times_').replace('_', ' ')}" for key in ratios), "error"]  # fmt: skip
    lines = [
        [row["name"], number(1e3 * row["min_s"]), number(1e3 * row["median_s"]), number(row["bytes_per_s"] / 1e9),
         number(row["flop_per_s"] / 1e9), percent(row["share_of_roof"]), row["bound"],
         *(f"{row[key]:.2f}" if key in row else "" for key in ratios),
         "" if row["error"] is None else f"{row['error']:.1e}"]
        for row in block["rows"]
    ]  # fmt: skip
    count = f"{block['tokens']} token{'s' if block['tokens'] > 1 else ''}"
    table(f"{block['ffn']} {block['d_model']}x{block['d_ff']}, {count}", heads, lines)
    print(_roof_line(block))
    for line in block["wrong"]:
        print(f"not timed, wrong: {line}")


def _roof_line(block: dict[str, Any]) -> str:
    roof = block["roof"]
    peaks = [f"{kind} {number(rate / 1e9)} GFLOP/s{' (estimated)' if kind in roof['estimated'] else ''}"
             for kind, rate in roof["flops"].items()]  # fmt: skip
    line = f"roof: memory {number(roof['read_bytes_per_s'][-1][1] / 1e9)} GB/s, {', '.join(peaks)}; {roof['notes']}"
    if roof["threads"] != block["threads"]:
        line += f"; the roof is that of {roof['threads']} threads, the calls had {block['threads']}"
    return line


def show_footer(blocks: Sequence[dict[str, Any]], repeats: int) -> None:
    """What the columns mean, and what was left out."""
    print("rates, roof and ratios by the fastest call; x: times as fast as PyTorch in the same run (higher is better)")
    print(f"below {DECODE} tokens weights come from memory: calls rotate over layers, or the caches are swept")
    print(f"turns of {TURN:g} s each: {repeats}; error: relative, against float64 on the stored weights")
    for line in dict.fromkeys(line for block in blocks for line in block["left_out"]):
        print(line)
