"""`fanfold quantize MODEL --format int4 -o OUT`: a model's FFNs in fewer bits, as a folder that `ff.load` reads."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from .failures import guarded, usage
from .output import emit, number, percent, progress, size, stdout_kept, table

LENGTH = 512  # tokens of a calibration sequence, fewer where the model sees fewer


@guarded
def quantize(
    model: Annotated[
        str, typer.Argument(help="Folder of a Hugging Face model, a .safetensors or .gguf file, or: smollm2, minilm.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to make.")],
    format: Annotated[str, typer.Option(help="int4, int4_g128, int8, q4_0, bf16, …")] = "int4",
    method: Annotated[str, typer.Option(help="rtn: round to nearest; gptq: calibrated on text.")] = "rtn",
    activations: Annotated[str, typer.Option(help="What meets integer codes: auto, int8 or float.")] = "auto",
    calibration: Annotated[
        list[Path] | None, typer.Option(help="UTF-8 text to calibrate on; again for more. Default: Python's manual.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of calibration text that are read.")] = 8192,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout, nothing else there.")
    ] = False,
) -> None:
    """Quantize the FFNs of a model and save them: layer by layer; run it again to continue what was stopped."""
    start = time.monotonic()
    with stdout_kept(json):
        calibrated = method == "gptq" or bool(calibration)
        if calibrated:  # before anything imports tqdm, whose bars can be silenced only then
            from .models import quiet

            quiet()
        from .. import __version__
        from ..quantize.ffn import check
        from ..quantize.job import quantize_checkpoint

        with usage():
            check(format, method, activations)
        _check_out(out)
        checkpoint = _open(model, format)
        text = _calibration(model, calibration or [], tokens) if calibrated else None
        with progress(f"quantizing to {format}") as step:
            document = quantize_checkpoint(
                checkpoint, out, format, method, activations, text, Path(model).name, __version__, step
            )
    document = {"model": model, **document, "seconds": time.monotonic() - start}
    emit(document) if json else show(document)


def _check_out(out: Path) -> None:
    """Refuse a taken place before a model is loaded."""
    if out.exists():
        raise ValueError(f"{out} exists: give another place with -o, or remove it")


def _open(model: str, format: str) -> Any:
    """The checkpoint that MODEL means; GGUF's blocks as they are where their format is the one asked for."""
    from ..checkpoints import load
    from ..formats import GGUF
    from .models import resolve

    path = Path(model)
    if path.suffix.lower() != ".safetensors" or not path.exists():
        path = resolve(model)
    return load(path, packed=path.suffix.lower() == ".gguf" and format in GGUF)


def _calibration(model: str, files: list[Path], tokens: int) -> Any:
    """The model in memory and its inputs. Raises ValueError if it cannot be run on text."""
    import torch

    from ..quantize.job import Calibration
    from . import text as texts
    from .models import load

    if Path(model).suffix.lower() == ".safetensors":
        raise ValueError(f"{model} is a file of weights, not a model that runs: calibration needs the model's folder")
    text = "\n\n".join(texts.read_text(file) for file in files) if files else default_text()
    with progress(f"loading {model}"):
        loaded = load(model)
    if loaded.tokenizer is None or loaded.kind == "other":
        raise ValueError(f"{model} cannot be calibrated on text: it has no tokenizer, or does not read text alone")
    length = min(LENGTH, texts.context(loaded.model))
    ids = torch.tensor(sequences(loaded.tokenizer, text, tokens, length, loaded.kind == "encoder"))
    return Calibration(loaded.model, {"input_ids": ids} | ({"use_cache": False} if loaded.kind == "causal" else {}))


def default_text() -> str:
    """The second half of Python's manual: `fanfold bench` measures perplexity on the first."""
    from .text import default_text as whole

    text = whole()
    return text[len(text) // 2 :]


def sequences(tokenizer: Any, text: str, tokens: int, length: int, marked: bool) -> list[list[int]]:
    """`tokens` ids of the text in sequences of `length`, the last incomplete one left out unless it is the only one.

    marked  each sequence stands between the tokenizer's [CLS] and [SEP], as an encoder expects it.
    """
    ids = tokenizer(text[: 16 * tokens], add_special_tokens=False)["input_ids"][:tokens]
    if not ids:
        raise ValueError("the calibration text has no tokens")
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    ends = ([first], [last]) if marked and first is not None and last is not None else ([], [])
    inner = min(max(length - len(ends[0]) - len(ends[1]), 1), len(ids))
    return [[*ends[0], *ids[i : i + inner], *ends[1]] for i in range(0, len(ids) - inner + 1, inner)]


def show(document: dict[str, Any]) -> None:
    """Print what was done, for people."""
    rows = [
        [
            str(row["layer"]),
            row["ffn"],
            size(row["bytes"]),
            ", ".join(dict.fromkeys(row["activations"].values())),
            percent(max(row["weights_error"].values())),
            percent(row["output_error"]) if "output_error" in row else "–",
        ]
        for row in document["layers"]
    ]
    table("", ["layer", "ffn", "bytes", "activations", "weights error", "output error"], rows, numbers=False)
    share = document["bytes"] / document["fp32_bytes"]
    print(
        f"{len(rows)} FFNs in {document['format']} by {document['method']}: {size(document['bytes'])}, "
        f"{number(share)} of float32, in {document['seconds']:.0f} s; {document['out']}"
    )
    if document["kept"]:
        print(f"{document['kept']} of them were there already, from a run that was stopped")
    for line in remarks(document):
        print(line)
    sys.stdout.flush()


def remarks(document: dict[str, Any]) -> list[str]:
    """What the guard decided against int8, and what else is not as asked, with the layers that it holds for."""
    by_reason: dict[str, list[str]] = {}
    for row in document["layers"]:
        for note in row["notes"]:
            by_reason.setdefault(note, []).append(str(row["layer"]))
        for name, said in row["guard"].items():
            if row["activations"][name.split(" ")[0]] == "float":
                by_reason.setdefault(f"{name}: float activations: {said['reason']}", []).append(str(row["layer"]))
    every = len(document["layers"])
    out = [
        f"{'every layer' if len(layers) == every else 'layer ' + ', '.join(layers)}: {reason}"
        for reason, layers in by_reason.items()
    ]
    guarded = any(row["guard"] for row in document["layers"])
    if not guarded and any("int8" in row["activations"].values() for row in document["layers"]):
        out.append("what int8 activations cost was not measured: --calibration FILE or --method gptq measures it")
    return out
