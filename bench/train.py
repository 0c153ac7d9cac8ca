"""Forward and backward of one FFN: PyTorch eager, torch.compile, and each `save` of ours, by turns in one run.

    python bench/train.py                       # 768x2048, 768x3072, 2048x5632; 2048 tokens; every dtype
    python bench/train.py --quick               # one small shape, to see that it works
    python bench/train.py --shape 768x2048 --dtype fp32 --threads 2 --json
    python bench/train.py --save all --rounds 41   # eager, torch.compile and one `save`: who is faster?

Every contender's gradients are held to float64 first (64 tokens). A round runs each contender once, in an order that
turns; the ratio is the median over the rounds of its time over eager's in the same round, so that a machine that slows
down or is shared hits all alike. Beside it the same over torch.compile's, with the 95 % interval of that median (from
the order of the rounds' ratios, whatever their distribution): below 1 is faster, above slower, around 1 not separated
by so many rounds. Peak bytes are those of PyTorch's allocator in one step, beyond x, the parameters and
the gradient of y; the gradients of the parameters are in it, the scratch memory of MKL is not. "Within" is what remains
of them without y and the gradients of x and of the parameters, which every way has to return: what this FFN keeps and
works in.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from fanfold import Spec, numerics, reference
from fanfold.count import ffn as counted
from fanfold.kernels import torch as torch_ops
from fanfold.nn import FeedForward
from fanfold.show.output import emit, table
from fanfold.show.timing import Spread

SHAPES = ((768, 2048), (768, 3072), (2048, 5632))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "autocast": torch.float32}
CHECKED = 64


class Plain(nn.Module):
    """The parameters of a FeedForward through PyTorch's ops and autograd."""

    def __init__(self, ours: FeedForward) -> None:
        super().__init__()
        self.ours = ours

    def forward(self, x: Tensor) -> Tensor:
        return torch_ops.forward(x, self.ours.weights())


def make(spec: Spec, kind: str, save: str) -> FeedForward:
    torch.manual_seed(0)
    return FeedForward(spec, save=save, dtype=DTYPES[kind])


def contenders(spec: Spec, kind: str, compiled: bool, saves: Sequence[str] = counted.SAVES) -> dict[str, nn.Module]:
    out: dict[str, Any] = {"eager": Plain(make(spec, kind, "all"))}
    if compiled:
        out["compile"] = torch.compile(Plain(make(spec, kind, "all")))
    return out | {save: make(spec, kind, save) for save in saves}


def step(module: nn.Module, x: Tensor, grad_y: Tensor, kind: str) -> None:
    """Forward and backward, gradients made anew, as after zero_grad()."""
    module.zero_grad(set_to_none=True)
    x.grad = None
    with torch.autocast("cpu", torch.bfloat16) if kind == "autocast" else contextlib.nullcontext():
        y = module(x)
    y.backward(grad_y)


def inputs(spec: Spec, kind: str, tokens: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(tokens, spec.d_model).to(DTYPES[kind]).requires_grad_()
    return x, torch.randn(tokens, spec.d_model).to(torch.bfloat16 if kind == "autocast" else DTYPES[kind])


def check(modules: dict[str, nn.Module], spec: Spec, kind: str, tokens: int) -> list[str]:
    """What is wrong with whose gradient, by the tolerance rule; the widths and the blocks are those of the timing."""
    x, grad_y = inputs(spec, kind, tokens)
    truth: dict[str, Any] = {}
    eager: dict[str, Tensor] = {}
    wrong = []
    for name, module in modules.items():
        step(module, x, grad_y, kind)
        ours = module if isinstance(module, FeedForward) else module.ours
        grads = {"x": x.grad, **{n: p.grad for n, p in ours.weights().items()}}
        if not truth:
            truth, eager = reference.backward(x, ours.weights(), grad_y), {n: g.clone() for n, g in grads.items()}
        for part, gradient in grads.items():
            result = numerics.compare(gradient, truth[part], eager[part], dtype=grad_y.dtype)
            if not result.ok:
                wrong.append(f"{name}: the gradient of {part} is {result.ratio:.3g} x what the rule allows")
    return wrong


def peak_bytes(run: Callable[[], None]) -> int:
    """Most bytes that PyTorch's allocator had handed out at once during `run`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    events = found.profiler.kineto_results.events()  # type: ignore[union-attr]
    now = peak = 0
    for _, n_bytes in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        now += n_bytes
        peak = max(peak, now)
    return peak


def measured(modules: dict[str, nn.Module], spec: Spec, kind: str, tokens: int, rounds: int) -> dict[str, list[float]]:
    """{contender: seconds of each round}."""
    x, grad_y = inputs(spec, kind, tokens)
    names = list(modules)
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds + 1):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            begin = time.perf_counter()
            step(modules[name], x, grad_y, kind)
            if i:  # the first round warms up
                times[name].append(time.perf_counter() - begin)
    return times


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """(median, low, high): the interval between two of the values that holds the true median so surely, or more.

    Each value is above the true median with probability 1/2, so how many are is binomial. Below 6 values 95 % cannot
    be had: the least and the largest are given.
    """
    ordered, n = sorted(values), len(values)
    left_out, tail = 0, 0.5**n  # tail: the probability that at most `left_out` values are on one side
    while left_out + 1 < n / 2 and 2 * (tail + math.comb(n, left_out + 1) * 0.5**n) <= 1 - confidence:
        left_out += 1
        tail += math.comb(n, left_out) * 0.5**n
    return statistics.median(ordered), ordered[left_out], ordered[n - 1 - left_out]


def one(shape: tuple[int, int], kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """Check, measure and count one shape in one dtype; a dict for each contender."""
    spec = Spec.parse(args.ffn, d_model=shape[0], d_ff=shape[1])
    modules = contenders(spec, kind, not args.no_compile, args.save or counted.SAVES)
    wrong = check(modules, spec, kind, min(CHECKED, args.tokens))
    times = measured(modules, spec, kind, args.tokens, args.rounds)
    x, grad_y = inputs(spec, kind, args.tokens)
    flops = 3 * args.tokens * counted.flops_per_token(spec)
    rows = []
    for name, module in modules.items():
        seconds = Spread.of(times[name])
        ratio = Spread.of([own / eager for own, eager in zip(times[name], times["eager"])])
        over = None
        if "compile" in times and name != "compile":
            over = median_interval([own / other for own, other in zip(times[name], times["compile"])])
        module.zero_grad(set_to_none=True)
        x.grad = None
        known = {"eager": "autograd"}.get(name, name)
        dtype = "fp32" if kind == "fp32" else "bf16"
        kept = counted.saved_bytes(spec, args.tokens, known, dtype) if known != "compile" else None
        again = args.tokens * counted.recompute_flops_per_token(spec, name) if name in counted.SAVES else 0
        rows.append(
            {
                "contender": name, "least_s": min(times[name]), "median_s": seconds.median, "ratio": ratio.median,
                "ratio_p20": ratio.p20, "ratio_p80": ratio.p80, "over_compile": over,
                "ratio_of_least": min(times[name]) / min(times["eager"]),
                "ratio_allowed": (flops + again) / flops, "kept_bytes_predicted": kept,
                "peak_bytes": peak_bytes(lambda m=module: step(m, x, grad_y, kind)),
            }
        )  # fmt: skip
        returned = [grad_y, x, *(p for p in module.parameters())]  # y is as large as its gradient
        rows[-1]["within_bytes"] = rows[-1]["peak_bytes"] - sum(t.nbytes for t in returned)
    return {"shape": list(shape), "dtype": kind, "tokens": args.tokens, "spec": spec.to_dict(), "wrong": wrong,
            "rows": rows}  # fmt: skip


def show(result: dict[str, Any]) -> None:
    eager = result["rows"][0]
    rows = [
        [
            row["contender"], f"{1e3 * row['least_s']:.2f}", f"{1e3 * row['median_s']:.2f}", f"{row['ratio']:.3f}",
            f"{row['ratio_p20']:.3f}–{row['ratio_p80']:.3f}", f"{row['ratio_of_least']:.3f}",
            "-" if row["over_compile"] is None else "{:.3f} ({:.3f}–{:.3f})".format(*row["over_compile"]),
            f"{row['ratio_allowed']:.3f}",
            "-" if row["kept_bytes_predicted"] is None else f"{row['kept_bytes_predicted'] / 1e6:.2f}",
            f"{row['peak_bytes'] / 1e6:.2f}", f"{row['peak_bytes'] / eager['peak_bytes']:.3f}",
            f"{row['within_bytes'] / 1e6:.2f}", f"{row['within_bytes'] / eager['within_bytes']:.3f}",
        ]
        for row in result["rows"]
    ]  # fmt: skip
    d_model, d_ff = result["shape"]
    title = f"{result['spec']['activation']} {d_model}x{d_ff}, {result['dtype']}, tokens: {result['tokens']}"
    header = ["who", "least, ms", "median, ms", "time / eager", "p20–p80", "least / eager", "/ compile (95 %)",
              "its FLOPs / eager",
              "kept (predicted), MB", "peak, MB", "peak / eager", "within, MB", "within / eager"]  # fmt: skip
    table(title, header, rows)
    for line in result["wrong"]:
        print(line, file=sys.stderr)


def _shape(text: str) -> tuple[int, int]:
    d_model, d_ff = text.split("x")
    return int(d_model), int(d_ff)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=_shape, action="append", help="d_model x d_ff; may be repeated")
    parser.add_argument("--ffn", default="swiglu")
    parser.add_argument(
        "--dtype", choices=DTYPES, action="append", help="may be repeated; autocast: float32 in bfloat16"
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--save", choices=counted.SAVES, action="append", help="may be repeated; default: each")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="one small shape, few rounds")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.quick:
        args.shape, args.tokens, args.rounds = args.shape or [(96, 256)], min(args.tokens, 512), min(args.rounds, 3)
    results = []
    for shape in args.shape or SHAPES:
        for kind in args.dtype or DTYPES:
            torch._dynamo.reset()
            results.append(one(shape, kind, args))
            if not args.json:
                show(results[-1])
    if args.json:
        emit({"threads": torch.get_num_threads(), "torch": torch.__version__, "results": results})
    return 1 if any(result["wrong"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
