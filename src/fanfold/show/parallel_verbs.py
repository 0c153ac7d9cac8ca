"""`fanfold shard MODEL --tp 4 -o OUT`: the parts of every rank, each in a folder that `ff.load` reads."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from .failures import guarded, usage
from .output import emit, percent, progress, size, stdout_kept, table


@guarded
def shard(
    model: Annotated[
        str,
        typer.Argument(
            help="Hugging Face folder, .safetensors or .gguf file, folder of quantize, or: smollm2, minilm."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder to make; without it the plan is shown.")
    ] = None,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Ranks that share each FFN.")] = 2,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout, nothing else there.")
    ] = False,
) -> None:
    """Cut the FFNs of a model for `tp` ranks and save a folder for each; or, without --out, say how it would be cut."""
    start = time.monotonic()
    with stdout_kept(json):
        from .. import __version__
        from ..checkpoints import load
        from ..parallel.folder import save
        from ..parallel.plans import plan
        from .models import resolve

        path = Path(model)
        if not path.exists():
            path = resolve(model)
        source = load(path, packed=path.suffix.lower() == ".gguf")
        with usage():
            plans = {layer: plan(source.spec(layer), tp, source.format(layer)) for layer in source.ffns}
        document: dict[str, Any] = {"model": model, "tp": tp, "plans": _distinct(plans)}
        if out is not None:
            with progress(f"cutting for {tp} ranks") as step:
                document["saved"] = save(source, out, tp, path.name, __version__, step)
            document["seconds"] = time.monotonic() - start
    emit(document) if json else _show(document)


def _distinct(plans: dict[Any, Any]) -> list[dict[str, Any]]:
    """Each plan once, with the layers that it holds for."""
    found: dict[Any, dict[str, Any]] = {}
    for layer, made in plans.items():
        key = (made.spec, made.form.name)
        found.setdefault(key, {**made.to_dict(), "layers": []})["layers"].append(layer)
    return list(found.values())


def _show(document: dict[str, Any]) -> None:
    from ..spec import Spec

    for made in document["plans"]:
        spec, layers = Spec.from_dict(made["spec"]), made["layers"]
        rows = []
        for r in made["ranks"]:
            first, stop = r["channels"]
            share = percent(r["bytes"] / made["whole_bytes"])
            rows.append([str(r["rank"]), f"{first}–{stop - 1}", str(stop - first), size(r["bytes"]), share])
        which = f"{len(layers)} layers" if len(layers) > 1 else f"layer {layers[0]}"
        title = f"{spec.describe()}, {made['format']}, {made['tp']} ranks ({which}; bytes of one layer)"
        table(title, ["rank", "channels", "how many", "bytes", "of the whole"], rows)
    per_token = document["plans"][0]["all_reduce_bytes_per_token_bf16"]
    if document["tp"] > 1:
        print(f"each FFN adds up {per_token:,} bytes a token in bfloat16, by one all-reduce")
    if "saved" in document:
        done = document["saved"]
        parts = ", ".join(f"{r['folder']} {size(r['bytes'])}" for r in done["ranks"])
        print(f"{done['out']}: {parts}")
