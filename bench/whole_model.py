"""Whole models under transformers' `generate`: tokens/s of prefill and decode, swapped by format, beside PyTorch.

    python bench/whole_model.py                                # SmolLM2-135M and a random Llama of 1.1 billion
    python bench/whole_model.py --models smollm2 --formats int8,int4 --new 32 --compile --json whole.json
    python bench/whole_model.py --models smollm2 --formats int8 --bound       # what no kernel can make faster

Variants of one model take turns in one run where they fit in memory together, else in several batches, each with torch
bf16 in it: torch fp32, torch bf16, torchao int8 (where torchao is installed), and fanfold with linears="all" in each
format. --compile adds each of them with torch.compile and a static cache, as transformers compiles it.
Decode is every token after the first; prefill is the first, with what `generate` does before it.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import fanfold as ff
from fanfold.count import formats as stored
from fanfold.show import machine, timing
from fanfold.show.failures import first_line
from fanfold.show.models import load, quiet
from fanfold.show.output import number, percent, plain, progress, size, table

MODELS = ("smollm2", "llama-1.1b")
FORMATS = ("bf16", "int8", "int4")
BASELINE = "torch bf16"  # in every batch
BOUND = "no linears"  # nor norms: what is left where they take no time
SPARE = 0.8  # of the available memory may be used
# A Llama of 1.1 billion parameters: TinyLlama's shape.
LLAMA: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
    "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048,
}  # fmt: skip
Model = Any
Maker = Callable[[Model], Model]  # a float32 model that it must not change -> the variant


@dataclasses.dataclass
class Variant:
    """One way to run a model.

    bits     of a weight, about: to see what fits in memory together.  base  the variant whose model it runs, if not its
             own.  options  further arguments of `generate`.  note  what its swap said.
    resident  bytes that the process grew by.  told  the tokens of the last pass.
    """

    name: str
    make: Maker
    bits: float
    base: str | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    model: Model = None
    note: str = ""
    resident: int = 0
    passes: list[dict[str, float]] = dataclasses.field(default_factory=list)
    told: list[int] = dataclasses.field(default_factory=list)
    ffn_share: float | None = None


class Stamps:
    """A stopping criterion that never stops: it notes when each token is there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def generate(model: Model, ids: torch.Tensor, new: int, options: dict[str, Any]) -> tuple[dict[str, float], list[int]]:
    """({"prefill": seconds to the first token, "decode": seconds of the others}, the new tokens), greedily."""
    from transformers import StoppingCriteriaList

    stamps = Stamps()
    begin = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=1,
        max_new_tokens=new,
        min_new_tokens=new,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([stamps]),
        **options,
    )
    times = stamps.times
    return {"prefill": times[0] - begin, "decode": times[-1] - times[0]}, out[0, ids.shape[1] :].tolist()


# ---- the variants ----


def variants(
    formats: Sequence[str], compiled: bool, unverified: bool, bound: bool = False
) -> tuple[list[Variant], list[str]]:
    """(what is measured, what is left out and why)."""
    made = [Variant("torch fp32", copy.deepcopy, 32), Variant(BASELINE, _bf16, 16)]
    left_out = []
    missing = _torchao_missing()
    if missing is None:
        made += [Variant("torchao int8, dynamic", _torchao("Int8DynamicActivationInt8WeightConfig"), 8),
                 Variant("torchao int8, weights", _torchao("Int8WeightOnlyConfig"), 8)]  # fmt: skip
    else:
        left_out.append(f"torchao int8: {missing}")
    made += [Variant(f"fanfold {f}", _swapped(f, unverified), stored.get(f).bits_per_weight) for f in formats]
    if bound:
        made.append(Variant(BOUND, _without_linears, 32))
    if compiled:
        made = [v for one in made for v in (one, _compiled(one))]
    else:
        left_out.append("torch.compile with a static cache: --compile measures it")
    return made, left_out


class Zeros(torch.nn.Module):
    """Gives [..., width] zeros for [..., anything]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(()).expand(*x.shape[:-1], self.width)


def _without_linears(model: Model) -> Model:
    from fanfold.models.swapped_norm import find_norms

    made = copy.deepcopy(model)
    for path in find_norms(made, []):
        parent, _, name = path.rpartition(".")
        setattr(made.get_submodule(parent), name, torch.nn.Identity())
    places = {f.path: f.spec.d_model for f in ff.find(made) if f.spec is not None and f.kind == "module"}
    inside = tuple(f"{path}." for path in places)
    for path, m in made.named_modules():
        if type(m) is torch.nn.Linear and not path.startswith(inside):
            places[path] = m.out_features
    for path, width in places.items():
        parent, _, name = path.rpartition(".")
        setattr(made.get_submodule(parent), name, Zeros(width))
    return made


def _bf16(model: Model) -> Model:
    return copy.deepcopy(model).to(torch.bfloat16)


def _torchao_missing() -> str | None:
    try:
        import torchao.quantization  # noqa: F401  # pyright: ignore[reportMissingImports]
    except Exception as error:  # it also fails on a torch that it was not built for
        return f"torchao cannot be imported ({first_line(error)})"
    return None


def _torchao(config: str) -> Maker:
    def make(model: Model) -> Model:
        from torchao import quantization  # pyright: ignore[reportMissingImports]

        made = _bf16(model)
        quantization.quantize_(made, getattr(quantization, config)())
        return made

    return make


def _swapped(format: str, unverified: bool) -> Maker:
    how = {"verify": False, "activations": "int8"} if unverified else {}

    def make(model: Model) -> Model:
        made = copy.deepcopy(model)
        report = ff.swap(made, format=format, linears="all", **how)  # type: ignore[call-arg]
        swapped = sum(row.status == "swapped" for row in report.rows)
        if not swapped:
            reasons = dict.fromkeys(str(row.reason) for row in report.rows)
            raise ValueError(f"nothing was swapped: {'; '.join(reasons)}")
        made.swap_note = f"{swapped} of {len(report.rows)} modules swapped{', not verified' if unverified else ''}"
        return made

    return make


def _compiled(variant: Variant) -> Variant:
    """The same model with a static cache, its decode steps compiled by transformers."""
    from transformers import CompileConfig

    config = CompileConfig(mode="default", dynamic=False)
    config._compile_all_devices = True  # pyright: ignore[reportAttributeAccessIssue]  # by itself transformers compiles on GPUs only
    options = {"cache_implementation": "static", "compile_config": config}
    return Variant(f"{variant.name}, compiled", variant.make, 0, variant.name, options)


def batches(made: Sequence[Variant], parameters: int, budget: float) -> Iterator[list[Variant]]:
    """The variants in groups that fit in `budget` bytes beside the float32 original and one more copy of it.

    The baseline comes first in each group. A group of the baseline and one other is made whether it fits or not.
    """
    baseline = next(v for v in made if v.name == BASELINE)
    room = budget - 2 * 4 * parameters - parameters * baseline.bits / 8
    group, used = [baseline], 0.0
    others = sorted((v for v in made if v is not baseline), key=lambda v: v.base != BASELINE)
    for one in others:
        need = parameters * one.bits / 8
        if need and len(group) > 1 and used + need > room:
            yield group
            group, used = [dataclasses.replace(baseline, passes=[], told=[])], 0.0
        group.append(one)
        used += need
    yield group


# ---- measuring ----


def resident() -> int:
    """Bytes of this process in memory now, freed memory given back first."""
    gc.collect()
    machine.reset_peak_memory()
    return machine.peak_memory()


def build(group: Sequence[Variant], original: Model, left_out: list[str]) -> list[Variant]:
    """The variants with their models; one that cannot be made is left out, with its reason."""
    ready = []
    for one in group:
        if one.base is not None:
            one.model = next((v.model for v in ready if v.name == one.base), None)
            if one.model is not None:
                ready.append(one)
            continue
        before = resident()
        try:
            one.model = one.make(original)
        except Exception as error:  # a library that cannot: the others go on
            left_out.append(f"{one.name}: {first_line(error)}")
            continue
        one.resident, one.note = resident() - before, getattr(one.model, "swap_note", "")
        ready.append(one)
    return ready


def measure(group: list[Variant], ids: torch.Tensor, new: int, repeats: int, left_out: list[str]) -> list[Variant]:
    """Passes by turns, in both orders; the first round warms up and is not counted. -> those that ran."""
    alive = list(group)
    with progress("by turns") as step:
        for i in range(repeats + 1):
            for one in list(alive if i % 2 else alive[::-1]):
                try:
                    seconds, one.told = generate(one.model, ids, new, one.options)
                except Exception as error:  # of a compiler, or of a library on this model
                    left_out.append(f"{one.name}: {first_line(error)}")
                    alive.remove(one)
                    continue
                if i:
                    one.passes.append(seconds)
            step(i + 1, repeats + 1)
    return alive


def ffn_share(variant: Variant, paths: list[str], ids: torch.Tensor, new: int) -> float | None:
    """The FFNs' share of a pass, by hooks around them; None for a compiled model, whose graph has no place for them."""
    if variant.options:
        return None
    return timing.ffn_time(variant.model, paths, lambda m: generate(m, ids, new, {})[0], 1)[1]


def rows(group: Sequence[Variant], prompt: int, new: int) -> list[dict[str, Any]]:
    """A row of figures for each variant, against torch fp32 and bf16 of the same group."""
    counts = {"prefill": prompt, "decode": new - 1}
    rates = {v.name: {k: timing.Spread.of([p[k] for p in v.passes]).rate(n) for k, n in counts.items()} for v in group}
    truth = next((v.told for v in group if v.name == "torch fp32"), None)
    return [
        {
            "variant": v.name,
            "tokens_per_s": {k: dataclasses.asdict(s) for k, s in rates[v.name].items()},
            "times": {
                base: {k: rates[v.name][k].median / rates[base][k].median for k in counts}
                for base in ("torch fp32", BASELINE)
                if base in rates
            },
            "resident_bytes": v.resident,
            "ffn_share": v.ffn_share,
            "same_tokens_as_fp32": None if truth is None else sum(a == b for a, b in zip(truth, v.told)),
            "note": v.note,
        }
        for v in group
    ]


def bench(name: str, original: Model, ids: torch.Tensor, args: argparse.Namespace) -> dict[str, Any]:
    """Everything measured on one model."""
    parameters = sum(p.numel() for p in original.parameters())
    made, left_out = variants(args.formats, args.compile, args.unverified, args.bound)
    paths = [p for f in ff.find(original) if f.spec is not None for p in f.timed_modules]
    budget = SPARE * (machine.available_memory() or 64e9) + 4 * parameters  # the original is in memory already
    found = []
    for group in batches(made, parameters, budget):
        alive = measure(build(group, original, left_out), ids, args.new, args.repeats, left_out)
        for one in alive:
            one.ffn_share = ffn_share(one, paths, ids, args.new)
        found.append(rows(alive, ids.shape[1], args.new))
        for one in group:
            one.model = None
        gc.collect()
    return {
        "model": name,
        "parameters": parameters,
        "prompt": ids.shape[1],
        "new": args.new,
        "repeats": args.repeats,
        "batches": found,
        "left_out": left_out,
    }


def random_llama(**fields: Any) -> Model:
    """A Llama of random weights, built from its config: LLAMA with `fields` put in."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**{**LLAMA, **fields}, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None)
    return LlamaForCausalLM(config).float().eval()


def models(args: argparse.Namespace) -> Iterator[tuple[str, Model]]:
    for name in args.models:
        if name == "llama-1.1b":
            yield f"{name} (random)", random_llama()
        elif name == "tiny":  # to see that everything runs
            tiny = {"hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 2, "num_attention_heads": 4}
            yield f"{name} (random)", random_llama(**tiny, num_key_value_heads=2, vocab_size=100)
        else:
            yield name, load(name).model


def show(result: dict[str, Any]) -> None:
    """Print the tables of one model."""
    print(f"{result['model']}, {number(result['parameters'] / 1e6)} million parameters")
    for group in result["batches"]:
        lines = [
            [row["variant"], *(_spread(row["tokens_per_s"][k]) for k in ("prefill", "decode")),
             *(f"{row['times'][b]['decode']:.2f}" if b in row["times"] else "" for b in ("torch fp32", BASELINE)),
             *(f"{row['times'][b]['prefill']:.2f}" if b in row["times"] else "" for b in ("torch fp32", BASELINE)),
             size(row["resident_bytes"]) if row["resident_bytes"] else "",
             "" if row["ffn_share"] is None else percent(row["ffn_share"]),
             "" if row["same_tokens_as_fp32"] is None else f"{row['same_tokens_as_fp32']} of {result['new']}",
             row["note"]]
            for row in group
        ]  # fmt: skip
        heads = [f"prefill, {result['prompt']} tokens/s", f"decode, {result['new'] - 1} tokens/s",
                 "decode x fp32", "x bf16", "prefill x fp32", "x bf16", "memory", "in FFNs", "as fp32", ""]  # fmt: skip
        table("", ["", *heads], lines)
    for line in result["left_out"]:
        print(f"left out: {line}")


def _spread(s: dict[str, float]) -> str:
    return f"{number(s['median'])} ({number(s['p20'])}–{number(s['p80'])})"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    p.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}, tiny; or folders, .gguf files")
    p.add_argument("--formats", default=",".join(FORMATS), help="of fanfold.swap")
    p.add_argument("--prompt", type=int, default=128, help="tokens read in prefill")
    p.add_argument("--new", type=int, default=33, help="tokens generated; the first belongs to prefill")
    p.add_argument("--repeats", type=int, default=5, help="timed passes of each, by turns")
    p.add_argument("--compile", action="store_true", help="also with torch.compile and a static cache")
    p.add_argument(
        "--unverified", action="store_true", help="swap without the float64 checks, long for a billion weights"
    )
    p.add_argument(
        "--bound",
        action="store_true",
        help="also with every FFN and linear giving zeros, and every norm its input, in no time",
    )
    p.add_argument("--json", type=Path, help="write everything there")
    args = p.parse_args(argv)
    args.models, args.formats = (text.split(",") for text in (args.models, args.formats))
    for name, least in (("prompt", 1), ("new", 2), ("repeats", 1)):
        if getattr(args, name) < least:
            p.error(f"--{name} {getattr(args, name)}: expected at least {least}")
    try:
        for name in args.formats:
            stored.get(name)
    except ValueError as error:
        p.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    quiet()
    head = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "processor": machine.processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(", ".join(str(v) if k != "threads" else f"{v} thread{'s' if v > 1 else ''}" for k, v in head.items()))
    results = []
    for name, original in models(args):
        ids = torch.randint(0, original.config.vocab_size, (1, args.prompt), generator=torch.Generator().manual_seed(0))
        results.append(bench(name, original, ids, args))
        show(results[-1])
        if args.json:  # after each model: a long run that is stopped leaves what it has
            args.json.write_text(json.dumps(plain({**head, "models": results}), indent=1, allow_nan=False) + "\n")
    print("tokens/s: median (p20–p80), higher is better; x: times torch's; memory: what the process grew by")
    return 0


if __name__ == "__main__":
    sys.exit(main())
