"""The verbs `read` and `index`: what a model's FFNs read and write, and what triggers each of their channels."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from .edits import FORM, parse, place
from .failures import guarded, usage
from .output import emit, progress, stdout_kept
from .reading import PROMPT

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, nothing else there.")]


@guarded
def read(
    model: Annotated[str, typer.Argument(help="Folder of a Hugging Face model, a .gguf file, or: smollm2, minilm.")],
    prompt: Annotated[str, typer.Argument(help="Text to read.")] = PROMPT,
    layer: Annotated[list[int] | None, typer.Option(help="Only this layer, from 0; give it again for more.")] = None,
    position: Annotated[int, typer.Option(help="Token that is read, from 0; negative: from the end.")] = -1,
    token: Annotated[
        str | None, typer.Option(help='Explain the logit of this token (" Paris"); default: the likeliest.')
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Channels that are listed.")] = 10,
    edit: Annotated[list[str] | None, typer.Option(help=f"{FORM}; give it again for more.")] = None,
    new_tokens: Annotated[int, typer.Option(min=0, help="With --edit: tokens of text before and after.")] = 24,
    check: Annotated[
        bool, typer.Option("--check", help="Check by experiment that the view holds, on prompts.")
    ] = False,
    index: Annotated[Path | None, typer.Option(help="Folder of `fanfold index`: what triggers each channel.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the report: one HTML file.")] = None,
    json: Json = False,
) -> None:
    """What each FFN of a model reads and writes at a token, which channels carry the prediction, what an edit does."""
    from . import reading as work
    from .models import quiet

    quiet()  # before anything imports torch, and so tqdm, whose bars can be silenced only then
    with usage():
        changes = parse(edit or [])
        request = work.Request(
            prompt=prompt, layers=layer or None, position=position, token=token, top=top, changes=changes,
            typed=edit or [], new_tokens=new_tokens, check=check, index=index, out=out,
        )  # fmt: skip
        work.check_places(request)
    with stdout_kept(json):
        document = work.run(_load(model), request)
    if json:
        emit(document)
    else:
        from .reading_tables import show

        show(document, top)
    if check and not document["check"]["ok"]:
        raise ValueError(f"the check of {model} failed: the memory view {document['check']['verdict']}")


@guarded
def index(
    what: Annotated[str, typer.Argument(help="MODEL, as for read, to make an index; or the folder of one, to ask it.")],
    files: Annotated[
        list[str] | None, typer.Argument(help="UTF-8 files, folders of them, or - for standard input.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the index; an unfinished one goes on.")
    ] = (None),
    top: Annotated[int, typer.Option(min=1, help="Triggers kept for each end of each channel.")] = 20,
    sequence: Annotated[int | None, typer.Option(min=1, help="Tokens read at once; default 128.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences read together.")] = 8,
    search: Annotated[str | None, typer.Option(help='Channels whose triggers hold these words, "a phrase", beg*.')] = (
        None
    ),
    token: Annotated[str | None, typer.Option(help="Channels that peak at this token.")] = None,
    channel: Annotated[str | None, typer.Option(help="One channel's statistics and triggers: 12:345.")] = None,
    layer: Annotated[int | None, typer.Option(help="With --search and --token: only this layer.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most channels or triggers that are listed.")] = 10,
    geva: Annotated[bool, typer.Option("--geva", help="The measurements of Geva et al. 2021, beside theirs.")] = False,
    model: Annotated[str | None, typer.Option(help="With --geva: the model, if not where it was.")] = None,
    prefixes: Annotated[int, typer.Option(min=1, help="With --geva: how many prefixes are measured.")] = 512,
    json: Json = False,
) -> None:
    """Index what triggers every channel of a model, over any amount of text; or ask an index."""
    questions = {"--search": search, "--token": token, "--channel": channel, "--geva": geva or None}
    asked = [name for name, value in questions.items() if value is not None]
    with usage():
        if len(asked) > 1 or (asked and files):
            raise ValueError(
                f"{', '.join([*asked, *(files or [])])}: one question at a time, to the folder of an index"
            )
        if files and out is None:
            raise ValueError(f"an index of {what} needs a place: -o FOLDER")
        if out is not None and not files:
            raise ValueError("an index needs text: files, folders, or - for standard input")
        where = None if channel is None else place(channel)
    if files or geva:
        from .models import quiet

        quiet()  # before anything imports torch, as for read
    from . import index_tables as tables

    if files:
        assert out is not None
        made = _make(what, files, out, {"top": top, "sequence": sequence, "batch": batch}, json)
        emit(made) if json else tables.show_summary(made)
        return
    from ..memory.index import Index

    with Index.open(what) as opened:
        if where is not None:
            found: dict[str, Any] = tables.channel(opened, *where, limit)
            emit(found) if json else tables.show_channel(found)
        elif geva:
            with stdout_kept(json):
                measured = _geva(opened, model, prefixes)
            emit(measured) if json else tables.show_geva(measured)
        elif asked:
            found = tables.search(opened, search, token, layer, limit)
            emit(found) if json else tables.show_matches(found)
        else:
            found = tables.summary(opened)
            emit(found) if json else tables.show_summary(found)


def _load(name: str, dtype: str = "fp32") -> Any:
    from .models import load

    with progress(f"loading {name}"):
        return load(name, dtype)


def _make(name: str, files: list[str], out: Path, settings: dict[str, Any], json: bool) -> dict[str, Any]:
    from ..memory.anatomy import anatomy
    from ..memory.index import index as make
    from . import index_tables as tables

    start = time.monotonic()
    paths = [Path(f) for f in files]
    missing = [f for f, path in zip(files, paths) if f != "-" and not path.exists()]
    if missing:
        raise ValueError(f"{missing[0]} does not exist: expected UTF-8 files, folders, or - for standard input")
    with stdout_kept(json):
        loaded = _load(name)
        kept = name if not Path(name).exists() else str(Path(name).resolve())
        with progress("finding its parts by experiment") as step:
            found = anatomy(loaded.model, progress=step)
        with progress("indexing, bytes of text") as step:
            made = make(loaded.model, loaded.tokenizer, paths, out, name=kept, anatomy=found, progress=step, **settings)
    with made:
        return tables.summary(made) | {"seconds": time.monotonic() - start}


def _geva(opened: Any, model: str | None, prefixes: int) -> dict[str, Any]:
    """The measurements that the index holds; taken now where it holds none, or another number of prefixes."""
    try:
        kept = opened.geva()
    except ValueError:
        kept = None
    if kept is not None and model is None and kept.prefixes == min(prefixes, opened.meta["sequences"]):
        return kept.to_dict()
    from ..memory.anatomy import anatomy

    loaded = _load(model or opened.meta["name"])
    with progress("finding its parts by experiment") as step:
        found = anatomy(loaded.model, progress=step)
    with progress("measuring") as step:
        return opened.geva(loaded.model, prefixes_measured=prefixes, anatomy=found, progress=step).to_dict()
