"""Published rules for d_ff, applied exactly: their int() truncations and ceilings included."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .settings import positive

_META = "meta-llama/llama-models, models/llama3/reference_impl (FeedForward)"
# d_model -> (multiplier, multiple_of) of Llama 3, 3.1 and 3.2: meta-llama/llama-models, sku_list
LLAMA3 = {2048: (1.5, 256), 3072: (1.0, 256), 4096: (1.3, 1024), 8192: (1.3, 4096), 16384: (1.2, 4096)}


@dataclass(frozen=True, kw_only=True)
class Width:
    """A width by a published rule: d_ff, the variant it belongs to, the steps taken, and where the rule is from."""

    rule: str
    d_ff: int
    variant: str
    steps: tuple[str, ...]
    source: str


def ceil_multiple(value: int, multiple_of: int) -> int:
    """The smallest multiple of `multiple_of` that is not below `value`, in whole numbers."""
    return multiple_of * -(-value // multiple_of)


def make_divisible(value: float, divisor: int) -> int:
    """`value` rounded to a multiple of `divisor`, and one more where that lost over 10 %: 285, 256 -> 512.

    The second step is easily forgotten; 256 would lose 10.2 %. Source: apple/corenet, make_divisible (OpenELM).
    """
    rounded = max(divisor, int(value + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * value else rounded


def _llama(
    d_model: int, multiplier: float | None, multiple_of: int | None, name: str = "llama", default: int = 256
) -> Width:
    """h = int(2 * (4 * dim) / 3); h = int(multiplier * h) if there is one; h = multiple_of * ceil(h / multiple_of)."""
    multiple_of = default if multiple_of is None else multiple_of
    h = int(2 * (4 * d_model) / 3)
    steps = [f"int(2 * (4 * {d_model}) / 3) = {h}"]
    if multiplier is not None:
        h, before = int(multiplier * h), h
        steps.append(f"int({multiplier} * {before}) = {h}")
    width = ceil_multiple(h, multiple_of)
    steps.append(f"{multiple_of} * ceil({h} / {multiple_of}) = {width}")
    return Width(rule=name, d_ff=width, variant="swiglu", steps=tuple(steps), source=_META)


def _llama3(d_model: int, multiplier: float | None, multiple_of: int | None) -> Width:
    mult, multiple = LLAMA3.get(d_model, (1.3, 1024))
    found = _llama(d_model, multiplier or mult, multiple_of or multiple, "llama3")
    known = (
        f"of the released model with d_model={d_model}" if d_model in LLAMA3 else "of Llama 3 8B: none has this d_model"
    )
    first = f"multiplier {multiplier or mult}, multiple_of {multiple_of or multiple}"
    chosen = "" if multiplier and multiple_of else f", {known}"
    return Width(rule="llama3", d_ff=found.d_ff, variant="swiglu", steps=(first + chosen, *found.steps), source=_META)


def _llama2_70b(d_model: int, multiplier: float | None, multiple_of: int | None) -> Width:
    # sku_list prints multiple_of 256 for this model, which gives 28416; the released width, 28672, needs 4096
    return _llama(d_model, multiplier or 1.3, multiple_of or 4096, "llama2-70b")


def _four(variant: str, source: str, name: str) -> Callable[[int, float | None, int | None], Width]:
    def rule(d_model: int, multiplier: float | None, multiple_of: int | None) -> Width:
        _refuse(name, multiplier, multiple_of)
        steps = (f"4 * {d_model} = {4 * d_model}",)
        return Width(rule=name, d_ff=4 * d_model, variant=variant, steps=steps, source=source)

    return rule


def _shazeer(d_model: int, multiplier: float | None, multiple_of: int | None) -> Width:
    _refuse("shazeer", multiplier, multiple_of)
    width = int(2 * (4 * d_model) / 3)
    steps = (f"int(2 * (4 * {d_model}) / 3) = {width}",)
    return Width(rule="shazeer", d_ff=width, variant="swiglu", steps=steps, source="Shazeer 2020, arXiv:2002.05202")


def _openelm(d_model: int, multiplier: float | None, multiple_of: int | None) -> Width:
    value, divisor = (4.0 if multiplier is None else multiplier) * d_model, multiple_of or 256
    width = make_divisible(value, divisor)
    steps = (f"make_divisible({value:g}, {divisor}) = {width}",)
    return Width(rule="openelm", d_ff=width, variant="swiglu", steps=steps, source="apple/corenet, OpenELM")


def _refuse(name: str, multiplier: float | None, multiple_of: int | None) -> None:
    for what, value in (("multiplier", multiplier), ("multiple_of", multiple_of)):
        if value is not None:
            raise ValueError(f"the rule {name!r} has no {what}: it goes with llama, llama2-70b, llama3 and openelm")


RULES: dict[str, Callable[[int, float | None, int | None], Width]] = {
    "llama": _llama,
    "llama2-70b": _llama2_70b,
    "llama3": _llama3,
    "palm": _four("swiglu", "Chowdhery 2022 (PaLM), arXiv:2204.02311", "palm"),
    "gpt2": _four("gelu_tanh", "Radford 2019 (GPT-2)", "gpt2"),
    "transformer": _four("relu", "Vaswani 2017, arXiv:1706.03762", "transformer"),
    "bert": _four("gelu_erf", "Devlin 2018 (BERT), arXiv:1810.04805", "bert"),
    "shazeer": _shazeer,
    "openelm": _openelm,
}


def like(rule: str, d_model: int, multiplier: float | None = None, multiple_of: int | None = None) -> Width:
    """The width that a published rule gives for `d_model`.

    rule         llama (also Llama 2 7B and 13B), llama2-70b, llama3 (3, 3.1 and 3.2: the released multiplier and
                 multiple by d_model), palm, gpt2, transformer, bert, shazeer, openelm.
    multiplier, multiple_of  in place of the rule's own, where it has them.
    Raises ValueError, naming the rules, for an unknown one; for a count below 1; for a width of 0.
    """
    if rule not in RULES:
        raise ValueError(f"rule {rule!r} is not known; known: {', '.join(RULES)}")
    positive("d_model", d_model)
    if multiple_of is not None:
        positive("multiple_of", multiple_of)
    if multiplier is not None and not (
        isinstance(multiplier, (int, float)) and multiplier > 0 and math.isfinite(multiplier)
    ):
        raise ValueError(f"multiplier={multiplier!r}: expected a positive number")
    found = RULES[rule](d_model, multiplier, multiple_of)
    if found.d_ff < 1:
        raise ValueError(f"{rule} gives d_ff=0 for d_model={d_model}: {'; '.join(found.steps)}")
    return found
