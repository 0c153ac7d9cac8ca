"""`fanfold superpose MODEL`: how crowded the keys and values of a model's FFNs are, and what its channels do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from .failures import guarded, usage
from .output import emit, percent, progress, stdout_kept, table


@guarded
def superpose(
    model: Annotated[str, typer.Argument(help="Folder of a Hugging Face model, a .gguf file, or: smollm2, minilm.")],
    layers: Annotated[str | None, typer.Option(help="Which layers, as in 0,3,8-11; default all.")] = None,
    threshold: Annotated[
        float, typer.Option(help="|cosine| from which a key points along its value, for the classes.")
    ] = 0.5,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the page here, an .html file.")] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout, nothing else there.")
    ] = False,
) -> None:
    """Superposition in a model: its keys and values beside random directions, and classes of channels, by layer."""
    with usage():
        chosen = None if layers is None else parse_layers(layers)
        if not 0 < threshold < 1:
            raise ValueError(f"--threshold {threshold:g}: expected a cosine between 0 and 1")
        if out is not None:
            _check(out)
    with stdout_kept(json):
        from .models import load, quiet

        quiet()  # before anything imports tqdm, whose bars can be silenced only then
        from ..memory.anatomy import anatomy
        from ..superposition import page, real

        with progress(f"loading {model}"):
            loaded = load(model)
        with progress("identifying by experiment") as step:
            looked = anatomy(loaded.model, progress=step)
        with usage():
            looked.choose(chosen)
        with progress("measuring directions") as step:
            found = real.measure(looked, chosen, threshold, progress=step)
        if out is not None:
            _write(out, page.of_model(found, loaded.name))
    document = {"model": model, **found, "page": None if out is None else str(out)}
    emit(document) if json else show(document)


def parse_layers(text: str) -> list[int]:
    """[0, 3, 8, 9] of "0,3,8-9". Raises ValueError, saying what is expected."""
    out: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ValueError(f"--layers {text!r}: expected numbers and ranges by commas, as in 0,3,8-11")
        out += range(int(first), int(last or first) + 1)
    return out


def _check(out: Path) -> None:
    """Refuse a place that cannot be written, and pictures without Matplotlib, before a model is loaded."""
    from ..canvas import figure

    if out.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--out {str(out)!r}: a page is written to a file that ends in .html")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"--out {str(out)!r}: there is no folder {str(out.absolute().parent)!r}")
    figure((1, 1))


def _write(out: Path, text: str) -> None:
    beside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(out)
    finally:
        beside.unlink(missing_ok=True)


def show(document: dict[str, Any]) -> None:
    """Print what was measured, for people."""
    rows = document["layers"]
    parts = [p for p in ("gate", "up", "value") if p in rows[0]]
    header = ["layer"]
    for what, more in (("interference", ()), ("nearest", ("random",)), ("effective rank", ("random",))):
        header += [f"{p}: {what}" for p in (*parts, *more)]
    table(
        "Interference: squared cosines to all others, over that of random directions. Nearest: mean largest |cos|.",
        header,
        [
            [
                str(r["layer"]),
                *(f"{r[p]['interference'] / r['random']['interference']:.2f}" for p in parts),
                *(f"{r[p]['nearest']:.2f}" for p in (*parts, "random")),
                *(f"{r[p]['effective_rank']:.0f}" for p in (*parts, "random")),
            ]
            for r in rows
        ],
    )
    kinds = [k for k in rows[0]["channels"]["classes"] if any(r["channels"]["classes"][k] for r in rows)]
    table(
        f"Channels by what they do with what they read (Gerstner & Schütze 2025; |cos| ≥ {document['threshold']:g}, "
        "a threshold quoted from memory)",
        ["layer", *kinds, "mean cos(up, value)"],
        [
            [
                str(r["layer"]),
                *(percent(r["channels"]["classes"][k] / r["d_ff"]) for k in kinds),
                f"{r['channels']['cosines']['up, value']['mean']:+.2f}",
            ]
            for r in rows
        ],
    )
    folded = [r for r in rows if r["norm"] is not None]
    print(
        f"{len(rows)} layers, {rows[0]['d_ff']} channels in {rows[0]['d_model']} dimensions: "
        f"{rows[0]['d_ff'] / rows[0]['d_model']:.2f} per dimension; the gain of the norm before the FFN is in "
        f"the keys of {len(folded)} of them"
    )
    for path, reason in document["left"]:
        print(f"left out: {path}: {reason}")
    if document["page"] is not None:
        print(document["page"])
