"""The FFN card: what the FFNs of a model are and what they weigh, equal layers in one row."""

from __future__ import annotations

from typing import Any

from ..count import formats
from ..count.ffn import classic_width, equal_budget_width, flops_per_token
from ..models.report import runs
from .output import number, percent, plain, size, table


def card(model: Any, found: list[Any], name: str) -> dict[str, Any]:
    """The card of `model` as plain values; `found` is what `fanfold.find` gave for it.

    Parameters are counted once where they are shared. The block of an FFN is the layer that holds it.
    """
    total = sum(p.numel() for p in model.parameters())
    identified = [f for f in found if f.spec is not None]
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for f in identified:
        block = block_path(f.path)
        block_params = sum(p.numel() for p in model.get_submodule(block).parameters())
        stack = block.rpartition(".")[0]
        stem = f.path.replace(block, stack, 1) if block else f.path
        key = (f.spec, f.layout, f.kind, block_params, stem)
        if key not in groups:
            groups[key] = {"stack": stack, **_group(f, block_params)}
        groups[key]["paths"].append(f.path)
        if f.evidence is not None and f.evidence.error is not None:
            groups[key]["error"] = max(groups[key]["error"], f.evidence.error)
    ffn = sum(f.n_params for f in identified)
    return {
        "model": name,
        "class": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "n_params": total,
        "ffn_n_params": ffn,
        "ffn_share": ffn / total if total else 0.0,
        "n_ffns": len(identified),
        "groups": [{"layers": ranges(g["paths"]), **g} for g in groups.values()],
        "unidentified": [{"path": f.path, "reason": f.reason} for f in found if f.spec is None],
    }


def _group(f: Any, block_params: int) -> dict[str, Any]:
    spec = f.spec
    return {
        "paths": [],
        "kind": f.kind,
        "spec": spec.to_dict(),
        "describe": spec.describe(),
        "layout": f.layout.describe(),
        "projections": dict(f.projections),
        "n_params": spec.n_params,
        "block_share": spec.n_params / block_params if block_params else 0.0,
        "d_ff_over_d_model": spec.d_ff / spec.d_model,
        "classic_width": classic_width(spec),
        "other_kind_width": equal_budget_width(spec),
        "flops_per_token": flops_per_token(spec),
        "bytes": {form: formats.ffn_bytes(spec, form) for form in formats.COMMON},
        "error": 0.0,
    }


def block_path(path: str) -> str:
    """Path of the layer that holds an FFN: up to the first number in it; its parent where there is none."""
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: i + 1])
    return ".".join(parts[:-1])


def ranges(paths: list[str]) -> str:
    """Layer numbers of the paths in short: "0–3, 5"; the paths themselves where they have no numbers."""
    numbers = [block_path(p).rpartition(".")[2] for p in paths]
    if not all(n.isdecimal() for n in numbers):
        return ", ".join(p or "(root)" for p in paths)
    return runs(int(n) for n in numbers)


def show(card: dict[str, Any]) -> None:
    """Print a card for people."""
    share = percent(card["ffn_share"])
    print(f"{card['model']}: {card['class']}, {card['n_params']:,} parameters, {card['dtype']}")
    print(f"{card['n_ffns']} FFNs with {card['ffn_n_params']:,} parameters, {share} of the model\n")
    names = _stack_names([group["stack"] for group in card["groups"]])
    for group, name in zip(card["groups"], names):
        table("", [f"{name}layers {group['layers']}", group["describe"]], _rows(group), numbers=False)
    for item in card["unidentified"]:
        print(f"not identified: {item['path'] or '(root)'}: {item['reason']}")


def _stack_names(stacks: list[str]) -> list[str]:
    """What tells the groups' stacks apart, "encoder " of encoder.block; "" for each where all are of one stack."""
    if len(set(stacks)) < 2:
        return [""] * len(stacks)
    parts = [stack.split(".") for stack in stacks]
    first = min((i for i, same in enumerate(zip(*parts)) if len(set(same)) > 1), default=min(map(len, parts)))
    while len({p[-1] for p in parts}) == 1 and min(map(len, parts)) > first + 1:
        parts = [p[:-1] for p in parts]
    return [f"{'.'.join(p[first:]) or '.'.join(p)} ".lstrip() for p in parts]


def _rows(g: dict[str, Any]) -> list[list[str]]:
    gated = g["spec"]["gated"]
    from ..models.swap import SWAP_FORMATS

    other, ratio = ("ungated", "8/3") if gated else ("gated", "4")
    count = len(g["paths"])
    return [
        ["first", g["paths"][0] or "(root)"],
        ["layout", g["layout"] + ("" if g["kind"] == "module" else "; linears in two modules of one layer")],
        ["parameters each", f"{g['n_params']:,} ({percent(g['block_share'])} of a block)"],
        ["d_ff / d_model", f"{g['d_ff_over_d_model']:.3g}"],
        [f"classic budget, {ratio} d_model", f"d_ff {_width(g['classic_width'])}"],
        [f"as many weights {other}", f"d_ff {_width(g['other_kind_width'])}"],
        ["FLOPs per token each", f"{g['flops_per_token']:,}"],
        *(
            [f"bytes, all {count}, {form}{'' if form in SWAP_FORMATS else ' (cost only)'}", size(count * n)]
            for form, n in g["bytes"].items()
        ),
        ["identified by experiment, error", number(plain(g["error"]) or 0.0)],
    ]


def _width(d_ff: float) -> str:
    return f"{d_ff:.0f}" if d_ff == int(d_ff) else f"{d_ff:.2f}"
