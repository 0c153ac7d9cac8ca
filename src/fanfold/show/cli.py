"""The command line: one verb per view. Everything heavy is imported when a verb needs it."""

from __future__ import annotations

import os
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from . import count_verbs, memory_verbs, parallel_verbs, quantize_verb, study_verb, superpose_verb
from . import text as text_of_models
from .failures import INTERRUPTED, forget_interrupt, guarded, usage
from .output import emit, progress, stdout_kept

app = typer.Typer(
    name="fanfold",
    help="The feed-forward network of Transformers: identified by experiment, swapped, verified, measured.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class Format(str, Enum):
    none = "none"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"
    int8 = "int8"
    int8_g32 = "int8_g32"
    int8_g64 = "int8_g64"
    int8_g128 = "int8_g128"
    int4_g32 = "int4_g32"
    int4_g64 = "int4_g64"
    int4_g128 = "int4_g128"
    q8_0 = "q8_0"
    q4_0 = "q4_0"
    q4_1 = "q4_1"
    int4 = "int4"  # int4_g32


class Dtype(str, Enum):
    fp32 = "fp32"
    bf16 = "bf16"


class Linears(str, Enum):
    ffn = "ffn"
    all = "all"


class Activations(str, Enum):
    auto = "auto"
    int8 = "int8"
    float = "float"


class Backend(str, Enum):
    auto = "auto"
    cpu = "cpu"
    torch = "torch"


Model = Annotated[str, typer.Argument(help="Folder of a Hugging Face model, a .gguf file, or: smollm2, minilm.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, nothing else there.")]
OneFormat = Annotated[
    Format, typer.Option(case_sensitive=False, help="How the swapped weights are stored; none: read in place.")
]
Formats = Annotated[
    list[str] | None, typer.Option("--format", help="As for swap; several by commas. With --shape: fp32 to q4_1.")
]
WhichLinears = Annotated[Linears, typer.Option(help="ffn, or all: attention's projections, lm_head, RMS norms too.")]
Checkpoint = Annotated[
    Path | None, typer.Option(help="Take packed FFNs from here: a folder of quantize, or a .gguf file.")
]
ModelDtype = Annotated[Dtype, typer.Option(help="Dtype that the model is loaded in.")]
OneBackend = Annotated[Backend, typer.Option(help="Who computes the swapped FFNs.")]
PromptTokens = Annotated[int, typer.Option(min=1, help="Tokens read in prefill.")]
_OF_TEXT = ("prompt_tokens", "new_tokens", "text", "text_tokens", "prompt")
NewTokens = Annotated[int, typer.Option(min=1, help="Tokens generated in decode.")]
Repeats = Annotated[int, typer.Option(min=1, help="Timed passes of each, by turns.")]


def _version(show: bool) -> None:
    if show:
        from .. import __version__

        print(f"fanfold {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Keep the messages of the libraries used.")] = False,
) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # models are read from disk; nothing is downloaded
    if verbose:
        os.environ["FANFOLD_VERBOSE"] = "1"


@app.command()
@guarded
def inspect(model: Model, json: Json = False) -> None:
    """The FFN card: what the FFNs of a model are, and what they weigh."""
    from . import card
    from .demo import identify

    with stdout_kept(json):
        loaded = _load(model, Dtype.fp32)
        sheet = card.card(loaded.model, identify(loaded), loaded.name)
    emit(sheet) if json else card.show(sheet)


@app.command()
@guarded
def swap(
    model: Model,
    format: OneFormat = Format.none,
    backend: OneBackend = Backend.auto,
    dtype: ModelDtype = Dtype.fp32,
    linears: WhichLinears = Linears.ffn,
    activations: Annotated[Activations, typer.Option(help="What meets integer codes; auto: measured on text.")] = (
        Activations.auto
    ),
    calibration: Annotated[
        Path | None, typer.Option(help="UTF-8 text to measure activations on; default: Python's manual.")
    ] = None,
    calibration_tokens: Annotated[int, typer.Option(min=0, help="Tokens of it; 0: none, int8 everywhere.")] = (
        text_of_models.CALIBRATION_TOKENS
    ),
    checkpoint: Checkpoint = None,
    json: Json = False,
) -> None:
    """Swap the FFNs of a model, or all its linears and norms, verify each, and report what was done."""
    with stdout_kept(json):
        loaded = _load(model, dtype)
        from ..models.swap import swap as do_swap
        from . import outcome
        from .text import calibration_ids

        wanted = checkpoint is not None or outcome.quantizes(_format(format))
        ids = calibration_ids(loaded, calibration, calibration_tokens) if wanted else None
        with progress("swapping, each FFN verified") as step:
            report = do_swap(
                loaded.model,
                format=_format(format),
                backend=backend.value,
                progress=step,
                linears=linears.value,
                activations=activations.value,
                calibration=ids,
                checkpoint=checkpoint,
            )
    document = {"model": model, "format": _format(format), "backend": backend.value, **report.to_dict()}
    emit(document) if json else outcome.show(report)
    failed = outcome.failed(document)
    if failed is not None:
        raise ValueError(f"no FFN of {model} was swapped: {failed}")


@app.command()
@guarded
def bench(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(help="As for swap; or none, with --shape.")] = None,
    format: Formats = None,
    dtype: ModelDtype = Dtype.fp32,
    backend: OneBackend = Backend.auto,
    linears: WhichLinears = Linears.ffn,
    checkpoint: Checkpoint = None,
    prompt_tokens: PromptTokens = 128,
    new_tokens: NewTokens = 32,
    repeats: Repeats = 5,
    text: Annotated[Path | None, typer.Option(help="UTF-8 file for perplexity; default: Python's manual.")] = None,
    text_tokens: Annotated[int, typer.Option(min=2, help="Tokens of it that are read.")] = 1024,
    prompt: Annotated[str | None, typer.Option(help="Prompt of the greedy continuation.")] = None,
    shape: Annotated[str | None, typer.Option(help="Without a model: d_model x d_ff, as in 4096x11008.")] = None,
    tokens: Annotated[str, typer.Option(help="With --shape: tokens at once, several by commas.")] = "1,16,512",
    ffn: Annotated[str, typer.Option(help="With --shape: swiglu, geglu, gelu_erf, relu2, …")] = "swiglu",
    compile: Annotated[bool, typer.Option("--compile", help="With --shape: time torch.compile too.")] = False,
    plot: Annotated[Path | None, typer.Option(help="With --shape: draw the roofline into a .png or .svg.")] = None,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Under torchrun: FFNs cut over so many ranks.")] = 1,
    timeout: Annotated[float, typer.Option(min=1, help="With --tp: seconds that ranks wait for each other.")] = 120.0,
    json: Json = False,
) -> None:
    """Measure a model before and after the swap, or with --shape one FFN of random weights, beside PyTorch."""
    from . import bench_parallel

    if shape is not None or model is None:
        from . import bench_shape, bench_tables

        with usage():
            _one_of(context, model, shape)
            formats = ",".join(format or [bench_shape.DEFAULT_FORMATS])
            request = bench_shape.parse(shape or "", tokens, formats, ffn, repeats, compile, plot)
        bench_tables.report(request, json)
        return
    with usage():
        _one_of(context, model, shape)
        chosen = _formats(format)
        if tp > 1:
            beside = [f"--{n}" for n in _typed(context, ("linears", "checkpoint"))]
            if beside:
                raise ValueError(f"{', '.join(beside)}: not with --tp, which cuts the FFNs of the model itself")
            bench_parallel.check(tp)
            if len(chosen) > 1:
                raise ValueError(f"--tp takes one format, got {len(chosen)}")
        if checkpoint is not None and format is not None and linears is Linears.ffn:
            raise ValueError(f"--format {','.join(format)}: the FFNs of a --checkpoint have their own, leave it out")
    from . import bench as work
    from .demo import identify
    from .text import PROMPT, read_text

    settings = work.Settings(
        backend=backend.value,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        repeats=repeats,
        text_file=text,
        text_tokens=max(text_tokens, prompt_tokens),
        prompt=prompt or PROMPT,
        linears=linears.value,
        checkpoint=checkpoint,
    )
    read_text(text)  # a wrong path is reported before a model is loaded
    if tp > 1:
        form = _format(chosen[0])
        bench_parallel.report(lambda: _load(model, dtype, copies=3.0), tp, form, settings, timeout, json)
        return
    runs: list[dict[str, Any]] = []
    with stdout_kept(json):
        loaded = _load(model, dtype, copies=2.0)
        for line in work.ignored(loaded, _given(context)):
            print(f"fanfold: {line}", file=sys.stderr)
        found = identify(loaded)
    for one in chosen:
        with stdout_kept(json):
            runs.append(work.bench(loaded, _format(one), settings, found))
        if not json:
            work.show(runs[-1])
    if json:
        emit({"model": model, "runs": runs})
    _refuse_not_finite(runs)


@app.command()
@guarded
def demo(
    repeats: Repeats = 5,
    out: Annotated[Path, typer.Option("--out", "-o", help="The report that it ends with, one HTML file.")] = Path(
        "fanfold-demo.html"
    ),
    json: Json = False,
) -> None:
    """The main job on two real models: card, swap and bench of SmolLM2-135M and all-MiniLM-L6-v2; a look into one."""
    from . import demo as work
    from .bench import Settings

    with stdout_kept(json):
        document = work.demo(Settings(repeats=repeats), show=not json, report=out)
    if json:
        emit(document)
    _refuse_not_finite([run for entry in document["models"] for run in entry["runs"]])


app.command()(count_verbs.size)
app.command()(count_verbs.cost)
app.command()(quantize_verb.quantize)
app.command()(memory_verbs.read)
app.command()(memory_verbs.index)
app.command()(parallel_verbs.shard)
app.command()(study_verb.study)
app.command()(superpose_verb.superpose)


@app.command()
@guarded
def doctor(json: Json = False) -> None:
    """Versions, instruction sets, threads and backends of this machine, with a self-test."""
    from . import doctor as work

    with stdout_kept(json):
        found = work.doctor()
    emit(found) if json else work.show(found)
    if not found["ok"]:
        failed = [f"{t['backend']} {t['isa'] or ''} {t['dtype']}" for t in found["self_test"] if not t["ok"]]
        raise ValueError(f"the self-test failed: {'; '.join(failed)}")


def _typed(context: typer.Context, names: tuple[str, ...]) -> list[str]:
    """Those of the options `names` that were typed."""
    return [n for n in names if getattr(context.get_parameter_source(n), "name", "") == "COMMANDLINE"]


def _given(context: typer.Context) -> list[str]:
    """Names of Settings' fields whose options were typed."""
    return ["text_file" if n == "text" else n for n in _typed(context, _OF_TEXT)]


def _one_of(context: typer.Context, model: str | None, shape: str | None) -> None:
    """Raise ValueError unless bench has a model or a shape, and only options that go with it."""
    if (model is None) == (shape is None):
        given = "neither was given" if model is None else f"{model} and --shape {shape} were given"
        raise ValueError(f"bench takes a MODEL (folder, .gguf file, smollm2, minilm) or --shape 4096x11008: {given}")
    of_model = ("dtype", "backend", "linears", "checkpoint", "tp", "timeout", *_OF_TEXT)
    others = of_model if model is None else ("tokens", "ffn", "compile", "plot")
    wrong = [f"--{n.replace('_', '-')}" for n in _typed(context, others)]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} goes with {'a MODEL' if model is None else '--shape'}")


def _formats(given: list[str] | None) -> list[Format]:
    """The formats of --format, which may list several by commas. Raises ValueError, naming those known."""
    names = [n.strip().lower() for one in given or [Format.none.value] for n in one.split(",")]
    known = [f.value for f in Format]
    for name in names:
        if name not in known:
            raise ValueError(f"--format {name!r} is not known; known: {', '.join(known)}")
    return [Format(name) for name in names]


def _refuse_not_finite(runs: list[dict[str, Any]]) -> None:
    """Raise ValueError if a model gave NaN or infinity: then nothing that was measured means anything."""
    from .bench import not_finite

    for run in runs:
        said = not_finite(run)
        if said is not None:
            raise ValueError(f"{run['model']}, format {run['format'] or 'none'}: {said}")


def _format(format: Format) -> str | None:
    return None if format is Format.none else format.value


def _load(model: str, dtype: Dtype, copies: float = 1.0) -> Any:
    from .models import load

    with progress(f"loading {model}"):
        return load(model, dtype.value, copies)


def main() -> None:
    """Entry point of the `fanfold` command."""
    try:
        app(prog_name="fanfold")
    except KeyboardInterrupt:  # outside a verb: while Python is still importing
        forget_interrupt()
        sys.exit(INTERRUPTED)
