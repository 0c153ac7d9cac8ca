"""`fanfold bench`: a model before and after the swap, measured by turns and compared on what it says."""

from __future__ import annotations

import copy
import dataclasses
import gc
from pathlib import Path
from typing import Any

from . import machine, outcome, text, timing
from .output import number, percent, progress, size, table

LENGTHS = (16, 64, 256)  # tokens of an encoder's inputs
SENTENCES = 32
HIGHER, LOWER = " (higher is better)", " (lower is better)"
RANDOM = "random tokens"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure: see `fanfold bench --help`."""

    backend: str = "auto"
    prompt_tokens: int = 128
    new_tokens: int = 32
    repeats: int = 5
    text_file: Path | None = None
    text_tokens: int = 1024
    prompt: str = text.PROMPT
    linears: str = "ffn"
    checkpoint: Path | None = None


def twin(model: Any) -> Any:
    """A second model tree over the very same parameters and buffers: swapping it leaves `model` as it was."""
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def bench(loaded: Any, format: str | None, settings: Settings, found: list[Any]) -> dict[str, Any]:
    """Everything measured on one model and one format, as plain values.

    loaded.model is not changed: a twin that shares its parameters is swapped.
    found   what `fanfold.find` gave for it: which modules are FFNs.
    """
    import torch

    from ..models.swap import swap

    before = loaded.model
    read = text.read_text(settings.text_file)
    sample = text.token_ids(loaded, read, settings.text_tokens) if loaded.kind != "other" else None
    one, counts = work(loaded, sample, settings)
    paths = [p for f in found if f.spec is not None for p in f.timed_modules]
    memory_before = _peak(before, one)
    after = twin(before)
    quantizes = settings.checkpoint is not None or outcome.quantizes(format)
    with progress("swapping, each FFN verified") as step:
        report = swap(
            after,
            format=format,
            backend=settings.backend,
            found=found,
            progress=step,
            linears=settings.linears,
            calibration=text.calibration_ids(loaded, None, text.CALIBRATION_TOKENS) if quantizes else None,
            checkpoint=settings.checkpoint,
        )
    with progress("timing by turns") as step:
        seconds = timing.by_turns(before, after, one, settings.repeats, step)
    with progress("comparing results") as step:
        ffn = [timing.ffn_time(model, paths, one, min(settings.repeats, 3)) for model in (before, after)]
        step(1, 2)
        said = _compare(loaded, before, after, sample, read, settings)
    sides = [
        {
            "tokens_per_s": {what: dataclasses.asdict(s.rate(counts[what])) for what, s in times.items()},
            "ffn_seconds": spent,
            "ffn_share": share,
            "ffn_bytes": _ffn_bytes(model, found),
        }
        for model, times, (spent, share) in zip((before, after), seconds, ffn)
    ]
    return {
        "model": loaded.name,
        "class": type(before).__name__,
        "dtype": str(before.dtype).removeprefix("torch."),
        "format": format,
        "linears": settings.linears,
        "checkpoint": None if settings.checkpoint is None else str(settings.checkpoint),
        "backend": settings.backend,
        "threads": torch.get_num_threads(),
        "processor": machine.processor(),
        "repeats": settings.repeats,
        "tokens": counts,
        "swap": report.to_dict(),
        "before": sides[0],
        "after": sides[1],
        "peak_memory": {"before": memory_before, "after": _peak(after, one, besides=before)},
        "text": _source(loaded, settings),
        "results": said,
    }


def _source(loaded: Any, settings: Settings) -> str | None:
    """Where the tokens come from; None for a model that reads none."""
    if loaded.kind == "other":
        return None
    if loaded.tokenizer is None:
        return RANDOM
    return str(settings.text_file) if settings.text_file else "Python's manual"


def ignored(loaded: Any, given: list[str]) -> list[str]:
    """A line for the options among `given` (names of Settings' fields) that do not apply to this model."""
    generation = {"prompt_tokens", "new_tokens", "prompt"}
    no_text = {"text_file", "text_tokens"}
    useless = {
        "causal": (set(), "a model that generates text"),
        "encoder": (generation, "an encoder"),
        "other": (generation | no_text, "a model that reads no text"),
    }
    names, kind = useless[loaded.kind]
    if loaded.kind != "other" and loaded.tokenizer is None:
        names, kind = names | {"text_file", "prompt"}, f"{kind}, without a tokenizer"
    said = ["--" + name.removesuffix("_file").replace("_", "-") for name in given if name in names]
    return [f"{', '.join(said)} ignored: not for {kind}"] if said else []


def not_finite(result: dict[str, Any]) -> str | None:
    """What to say if a model's results are NaN or infinite, so that they prove nothing."""
    wrong = result["results"]["not_finite"]
    what = "logits" if "logits" in result["results"] else "outputs"
    return f"{what} are not finite {' and '.join(wrong)} the swap" if wrong else None


def work(loaded: Any, sample: Any, settings: Settings) -> tuple[timing.Pass, dict[str, int]]:
    """(the pass that is timed, {what it times: tokens in it})."""
    if loaded.kind == "causal":
        limit = text.context(loaded.model) - settings.new_tokens
        if limit < 1:
            raise ValueError(
                f"--new-tokens {settings.new_tokens} does not fit a context of {text.context(loaded.model)}"
            )
        ids = sample[:, : min(settings.prompt_tokens, limit)]
        return timing.generation(ids, settings.new_tokens), {"prefill": ids.shape[1], "decode": settings.new_tokens}
    if loaded.kind == "encoder":
        lengths = sorted({min(n, text.context(loaded.model) - 2, sample.shape[1]) for n in LENGTHS})
        inputs = {f"{n} tokens": {"input_ids": sample[:, :n]} for n in lengths}
        return timing.forwards(inputs), {f"{n} tokens": n for n in lengths}
    return timing.forwards({"forward": inputs_of(loaded)}), {"forward": 1}


def inputs_of(loaded: Any) -> dict[str, Any]:
    from ..models.inputs import default_inputs

    inputs = default_inputs(loaded.model)
    if inputs is None:
        raise ValueError(f"it is not known what {type(loaded.model).__name__} reads: it cannot be run here")
    return inputs


def _peak(model: Any, one: timing.Pass, besides: Any = None) -> int | None:
    """Peak resident bytes of this process during one pass of `model`; None where a peak cannot be started anew.

    besides  another model in memory: the parameters that only it holds are subtracted.
    """
    gc.collect()
    if not machine.reset_peak_memory():
        return None
    one(model)
    held = {id(p) for p in model.parameters()}
    others = besides.parameters() if besides is not None else ()
    return machine.peak_memory() - sum(p.nbytes for p in others if id(p) not in held)


def _ffn_bytes(model: Any, found: list[Any]) -> int:
    """Bytes of the FFNs' matrices and biases as they are held now, packed or not."""
    from ..models.packed_module import resident_bytes

    names = {p for f in found if f.spec is not None for p in f.projections.values()}
    modules = {id(m): m for name in names for m in model.get_submodule(name).modules()}
    return sum(resident_bytes(m) for m in modules.values())


def _compare(loaded: Any, before: Any, after: Any, sample: Any, read: str, settings: Settings) -> dict[str, Any]:
    """What the two models make of the same input; not_finite lists those whose output is NaN or infinite."""
    if loaded.kind == "causal":
        window = sample[:, : min(text.WINDOW, text.context(before))]
        inputs = {"input_ids": window, "use_cache": False}
    elif loaded.kind == "encoder":
        inputs = {"input_ids": sample[:, : min(text.context(before) - 2, 128)]}
    else:
        inputs = inputs_of(loaded)
    difference, wrong = _difference(before, after, inputs)
    out: dict[str, Any] = {"not_finite": wrong}
    if loaded.kind == "causal":
        return {
            **out,
            "logits": {"relative_difference": difference},
            **_compare_text(loaded, before, after, sample, settings, not wrong),
        }
    if loaded.kind == "encoder" and loaded.tokenizer is not None:
        texts = text.sentences(read, SENTENCES)
        cosine = (text.embeddings(loaded, before, texts) * text.embeddings(loaded, after, texts)).sum(1)
        return {**out, "embeddings": {"sentences": len(texts), "cosine_min": float(cosine.min())}}
    return {**out, "outputs": {"relative_difference": difference}}


def _compare_text(
    loaded: Any, before: Any, after: Any, sample: Any, settings: Settings, finite: bool
) -> dict[str, dict[str, Any]]:
    """Perplexities and greedy texts. Texts of logits that are not `finite` are never called identical."""
    prompt = text.token_ids(loaded, settings.prompt, settings.prompt_tokens)
    told = [text.greedy(model, prompt, settings.new_tokens) for model in (before, after)]
    same = next((i for i, (a, b) in enumerate(zip(*told)) if a != b), min(len(t) for t in told))
    identical = finite and told[0] == told[1]
    decode = loaded.tokenizer.decode if loaded.tokenizer is not None else str
    return {
        "perplexity": {
            "tokens": sample.shape[1],
            "before": text.perplexity(before, sample),
            "after": text.perplexity(after, sample),
        },
        "greedy": {
            "identical": identical,
            "tokens": len(told[0]),
            "first_difference": None if identical or not finite else same,
            "prompt": settings.prompt if loaded.tokenizer is not None else RANDOM,
            "before": decode(told[0]),
            "after": decode(told[1]),
        },
    }


def greedy_words(greedy: dict[str, Any]) -> str:
    """How the greedy texts compare, in words."""
    if greedy["identical"]:
        return "identical"
    first = greedy["first_difference"]
    return "not comparable: logits are not finite" if first is None else f"differs from token {first + 1}"


def _difference(before: Any, after: Any, inputs: dict[str, Any]) -> tuple[float, list[str]]:
    """(root mean square of the change of the model's first output over that of the output, whose is not finite)."""
    import torch

    from .. import numerics

    with torch.inference_mode():
        a, b = (next(iter(model(**inputs).to_tuple())) for model in (before, after))
    wrong = [side for side, y in (("before", a), ("after", b)) if not bool(torch.isfinite(y).all())]
    return (float("nan") if wrong else numerics.relative_error(b, a)), wrong


def show(result: dict[str, Any]) -> None:
    """Print one bench result for people."""
    before, after = result["before"], result["after"]
    rows = []
    drawn = " random" if result["text"] == RANDOM else ""
    for what in before["tokens_per_s"]:
        a, b = before["tokens_per_s"][what], after["tokens_per_s"][what]
        unit = f"{what}, {result['tokens'][what]}{drawn} tokens" if what in ("prefill", "decode") else what
        unit += ", per second" if what == "forward" else ", tokens/s"
        rows.append([f"{unit}{HIGHER}", _spread(a), _spread(b), _ratio(a, b)])
    rows.append(_row(f"FFN time of a pass, ms{LOWER}", before["ffn_seconds"] * 1e3, after["ffn_seconds"] * 1e3, number))
    rows.append(["FFN share of the time", percent(before["ffn_share"]), percent(after["ffn_share"]), ""])
    rows.append(_row(f"FFN bytes{LOWER}", before["ffn_bytes"], after["ffn_bytes"], size))
    peak = result["peak_memory"]
    if peak["before"] and peak["after"]:
        rows.append(_row(f"peak memory of the process{LOWER}", peak["before"], peak["after"], size))
    rows += _said(result["results"], drawn)
    report = result["swap"]
    form = "none (in place)" if result["checkpoint"] is None else f"of {result['checkpoint']}"
    title = f"{result['model']}, {result['dtype']}, format {result['format'] or form}: {outcome.headline(report)}"
    table(title, ["", "before", "after", ""], rows)
    for line in (*outcome.reasons(report), *outcome.errors(report), *outcome.activations(report, details=False)):
        print(line)
    if result["text"] == RANDOM:
        print("tokens: random tokens, as the model has no tokenizer")
    elif result["text"]:
        print(f"tokens: of {result['text']}")
    print(f"median (p20–p80) of {result['repeats']}, by turns; ~ where the ranges overlap")
    print(f"{result['threads']} threads, {result['processor']}")


def _said(results: dict[str, Any], drawn: str) -> list[list[str]]:
    rows = []
    if "perplexity" in results:
        p = results["perplexity"]
        rows.append([f"perplexity, {p['tokens']}{drawn} tokens{LOWER}", f"{p['before']:.4f}", f"{p['after']:.4f}", ""])
    if "greedy" in results:
        g = results["greedy"]
        rows.append([f"greedy text, {g['tokens']} tokens", "", greedy_words(g), ""])
    rows += [
        [f"{name}, relative difference{LOWER}", "", number(results[name]["relative_difference"]), ""]
        for name in ("logits", "outputs")
        if name in results
    ]
    if "embeddings" in results:
        e = results["embeddings"]
        rows.append([f"lowest cosine of {e['sentences']} sentences{HIGHER}", "", f"{e['cosine_min']:.7f}", ""])
    return rows


def _row(name: str, before: float, after: float, form: Any) -> list[str]:
    return [name, form(before), form(after), f"x {after / before:.2f}" if before else ""]


def _ratio(before: dict[str, float], after: dict[str, float]) -> str:
    """after / before; "~" where the ranges from p20 to p80 overlap, so that no difference was measured."""
    if before["p20"] <= after["p80"] and after["p20"] <= before["p80"]:
        return "~"
    return f"x {after['median'] / before['median']:.2f}"


def _spread(s: dict[str, float]) -> str:
    return f"{number(s['median'])} ({number(s['p20'])}–{number(s['p80'])})"
