"""The work of `fanfold read`: load, read, edit, check, write the report; everything as plain values."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from . import text as texts
from .models import Loaded
from .output import progress

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
        folder = request.out.parent
        if request.out.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            what = "is a folder" if request.out.is_dir() else f"cannot be written: {folder} is no folder to write in"
            raise ValueError(f"-o {request.out} {what}; expected a file, as in report.html")
    if request.index is not None:
        from ..memory.index import Index

        Index.open(request.index).close()


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
            document["check"] = check(loaded.model, loaded.tokenizer, anatomy=found, progress=step).to_dict()
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
