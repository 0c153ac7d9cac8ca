"""The work of `fanfold read`: load, read, edit, check, write the report; everything as plain values."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from . import text as texts
from .models import Loaded
from .output import percent, progress

PROMPT = "The capital of France is"


@dataclasses.dataclass(frozen=True)
class Request:
    """What was asked for: prompt, layers (None: all), position, token, channels per table, edits {place: change} and
    how they were typed, tokens to generate, check?, the index's directory, the report's path."""

    prompt: str
    layers: list[int] | None
    position: int
    token: str | None
    top: int
    changes: dict[tuple[int, int], Any]
    typed: list[str]
    new_tokens: int
    check: bool
    index: Path | None
    out: Path | None


def check_places(request: Request) -> None:
    """Refuse an index that cannot be read, or a report that could not be written, before a model is loaded."""
    if request.out is not None:
        check_report(request.out)
    if request.index is not None:
        from ..memory.index import Index

        Index.open(request.index).close()


def check_report(out: Path) -> None:
    """Raise ValueError unless a file can be written there."""
    if out.is_dir():
        raise ValueError(f"-o {out} is a folder; expected a file, as in report.html")
    if not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise ValueError(f"-o {out} cannot be written: {out.parent} is no folder to write in")


def look(loaded: Loaded, found: list[Any], out: Path) -> dict[str, Any]:
    """The report of `PROMPT` on a model, as a file, and in a few numbers. found: what `ff.find` gave."""
    from ..memory.anatomy import anatomy
    from ..memory.reading import read

    with progress("reading"):
        seen = read(loaded.model, loaded.tokenizer, PROMPT, anatomy=anatomy(loaded.model, found=found))
        seen.name = Path(loaded.name).name
        path = seen.save_html(out).resolve()
    best = seen.predictions(-1, 1)[0]
    shares = seen.shares(-1) if seen.effects_why_not is None else None
    layer = None if shares is None else max(shares.layers, key=lambda row: row.ffn)
    return {
        "model": seen.name,
        "prompt": PROMPT,
        "token": best.text,
        "p": best.p,
        "layer": None if layer is None else layer.layer,
        "effect": None if layer is None else layer.ffn,
        "sum_rule": {"layers": len(seen.sum_rule), "holds": sum(rule.holds for rule in seen.sum_rule)},
        "report": str(path),
    }


def words(seen: dict[str, Any]) -> str:
    """What `look` found, in two sentences."""
    rule = seen["sum_rule"]
    most = ""
    if seen["layer"] is not None:
        most = f"; of the FFNs, that of layer {seen['layer']} adds most to its logit, {seen['effect']:+.2f}"
    return (
        f"{seen['model']} reads {seen['prompt']!r} and says {seen['token']!r} ({percent(seen['p'])}){most}. In "
        f"{rule['holds']} of {rule['layers']} layers, what the channels write adds up to the layer's output.\n"
        f"Which channels carried it is in the report, to open in a browser: {seen['report']}"
    )


def run(loaded: Loaded, request: Request) -> dict[str, Any]:
    """The document of one position, with "edit", "check" and "report" where they were asked for."""
    from ..memory.anatomy import anatomy
    from ..memory.index import Index
    from ..memory.reading import read

    if loaded.tokenizer is None:
        raise ValueError(f"{loaded.name} cannot read a prompt: it comes without a tokenizer")
    with progress("finding its parts by experiment") as step:
        found = anatomy(loaded.model, progress=step)
    with progress("reading"):
        reading = read(loaded.model, loaded.tokenizer, request.prompt, layers=request.layers, anatomy=found)
        reading.name = Path(loaded.name).name
        index = None if request.index is None else Index.open(request.index)
        try:
            document = reading.to_dict(request.top, [request.position], index=index, token=request.token)
            if request.out is not None:
                document["report"] = str(reading.save_html(request.out, index, request.token).resolve())
        finally:
            if index is not None:
                index.close()
    if request.changes:
        with progress("editing"):
            document["edit"] = edited(loaded, found, reading, request)
    if request.check:
        from ..memory.check import check

        with progress("checking on prompts") as step:
            found_so = check(loaded.model, loaded.tokenizer, anatomy=found, progress=step)
            document["check"] = {**found_so.to_dict(), "model": reading.name}
    return document


def edited(loaded: Loaded, anatomy: Any, reading: Any, request: Request) -> dict[str, Any]:
    """What the edits change: probabilities at the position, the text that follows, an encoder's sentence vector."""
    from ..memory.edit import edit
    from ..memory.reading import read

    at = reading.at(request.position)
    before, then = _texts(loaded, reading, request)
    with edit(loaded.model, request.changes, anatomy=anatomy) as active:
        again = read(loaded.model, loaded.tokenizer, request.prompt, layers=[], anatomy=anatomy)
        after, now = _texts(loaded, reading, request)
    out: dict[str, Any] = {
        "given": request.typed,
        "notes": active.notes,
        "tokens": [],
        "before": before,
        "after": after,
    }
    if then is not None:
        out["cosine"] = float((then * now).sum())
    first, second = reading.captured.logits, again.captured.logits
    if first is not None and second is not None:
        p, q = (z[0, at].double().softmax(-1) for z in (first, second))
        shown = [reading.explained(at), *p.topk(5).indices.tolist(), *q.topk(5).indices.tolist()]
        if request.token is not None:
            shown.insert(0, reading.token(request.token))
        out["tokens"] = [
            {"id": t, "text": reading.vocabulary.text(t), "before": float(p[t]), "after": float(q[t])}
            for t in dict.fromkeys(shown)
        ]
    return out


def _texts(loaded: Loaded, reading: Any, request: Request) -> tuple[str | None, Any]:
    """(the greedy text that follows the prompt, or None; an encoder's vector of the prompt [d_model], or None)."""
    import torch

    if loaded.kind == "encoder":
        return None, texts.embeddings(loaded, loaded.model, [request.prompt])[0]
    if loaded.kind != "causal" or not request.new_tokens:
        return None, None
    ids = torch.tensor([list(reading.ids)])
    return loaded.tokenizer.decode(texts.greedy(loaded.model, ids, request.new_tokens)), None
