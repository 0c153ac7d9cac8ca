"""`swap`: run a model's FFNs on our kernels, each verified against what it replaces; `unswap` undoes it."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..count import ffn as counted
from ..count import formats as stored
from ..kernels import dispatch, packed
from ..layout import SEPARATE
from ..nn import FeedForward
from ..weights import Weights
from . import prepacked
from .activations import CHOICES, choose_activations, describe_again
from .choose import choose_by_measurement
from .find import Found, Progress, find
from .job import Job, other_linears
from .others import swap_linear, unusable
from .packed_ffn import PackedFFNState
from .packing import put_back
from .report import SwapReport, SwapRow
from .states import FFNState, LinearState, reset
from .swapped import SwappedFFN, SwappedLinear, install, is_swapped
from .swapped_norm import find_norms, swap_norm
from .verify import Truth
from .verify_packed import LinearTruth, ffn_cases, judge, run_linear
from .verify_train import judge_gradients

SWAP_FORMATS = (None, *packed.FORMATS, "int4")
LINEARS = ("ffn", "all")


def swap(
    model: nn.Module,
    format: str | None = None,
    backend: str = "auto",
    verify: bool = True,
    inputs: Any = None,
    keep_originals: bool = False,
    found: list[Found] | None = None,
    progress: Progress | None = None,
    linears: str = "ffn",
    activations: str = "auto",
    calibration: Any = None,
    checkpoint: Any = None,
    train: bool = False,
    save: str = "all",
) -> SwapReport:
    """Run the FFNs of `model`, or all its linears and RMS norms, on our kernels.

    Every FFN is found by structure and identified by experiment; one that matches no description, or two, is left.
    format    None: the model's own parameters stay where they are and are read in place. A name of
              `fanfold.kernels.packed.FORMATS`, for inference: weights are packed, layer by layer, and the originals
              freed (keep_originals=True keeps them for unswap).
    backend   "auto": our kernels at the token counts where they are measured to be ahead of the module's own code on
              this machine (format=None), an FFN where they never are is left; or a name that then runs or raises.
    verify    hold each swapped FFN to the tolerance rule on its own weights; one that fails is put back.
    inputs    see `find`; found  what `find` gave for this very model, to spare finding again.
    progress  called with (per cent done, 100).
    linears   "ffn", or "all": every other nn.Linear and Conv1D too, each verified alone. With a named format, one that
              a run of the model (on calibration, `inputs`, or random tokens) does not reach, or whose weight other code
              reads by itself, is left. And the RMS norms between them, found by experiment: their weights stay as they
              are, in every format.
    activations  for integer formats: "int8", "float", or "auto": int8 except where `quantize.guard` finds on the
              calibration inputs that it costs too much.
    calibration  token ids, a tensor, a tuple, or a dict for model(**batch); default: `inputs`. It also counts how many
              next-token predictions change.
    checkpoint   a folder of `fanfold quantize`, a .gguf file, or what `ff.load` gave for one: FFN i of the model takes
              the packed weights of its layer i, after a check that they are the model's own, as far as the format goes.
    train     while gradients are needed an FFN runs with a derivative of ours, which keeps from forward to backward
              what `save` says (see `nn.FeedForward`), under autocast too; its gradients are verified as well. It stays
              swapped where our kernels are not ahead in inference. format=None alone; an FFN written out in its
              layer's code is not reached.
    -> SwapReport: a row per FFN, linear and norm. While gradients are needed (without `train`), in training with
    dropout, under autocast, or when an adapter or hook is found, a swapped FFN runs its own code;
    `rows[i].stepped_aside` counts that.
    Raises FindError if there is no FFN, ValueError on an unknown format or option, or a model already swapped.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}, expected a torch.nn.Module")
    format = _known_format(format)
    for name, value, known in (("linears", linears, LINEARS), ("activations", activations, CHOICES)):
        if value not in known:
            raise ValueError(f"{name}={value!r} is not known; known: {', '.join(known)}")
    if save not in counted.SAVES:
        raise ValueError(f"save={save!r} is not known; known: {', '.join(counted.SAVES)}")
    if train and (format is not None or checkpoint is not None):
        raise ValueError("train=True needs the model's own parameters: packed weights are for inference")
    if train and dispatch.resolve(backend) == "cpu":
        raise ValueError("train=True runs PyTorch's ops while gradients are needed: use backend 'auto' or 'torch'")
    dispatch.resolve(backend)
    already = list(_swapped(model))
    if already:
        raise ValueError(f"{already[0] or 'the model'} is already swapped: call unswap(model) first")
    layers = None if checkpoint is None else prepacked.Layers(checkpoint)
    if layers is not None:
        if format not in (None, layers.format) and linears == "ffn":
            raise ValueError(f"format={format!r}, but {layers.checkpoint.path} holds {layers.format}: leave format out")
        format = format or layers.format
    bounds = [0 if found is not None else 50, 75 if linears == "all" else 100, 100]  # identifying is half of the work
    if found is None:
        found = find(model, inputs=inputs, progress=_part(progress, 0, bounds[0]))
    if layers is not None:
        layers.check_count(found)
    given = calibration if calibration is not None else inputs
    job = Job(model, format, backend, verify, activations, linears, keep_originals, given, save if train else None)
    job.prepacked = layers is not None
    report = SwapReport(rows=[])
    try:
        job.look(found)
        step = _part(progress, bounds[0], bounds[1])
        for i, item in enumerate(found):
            report.rows.append(_swap_one(job, item, None if layers is None else layers[i]))
            step(i + 1, len(found))
        if linears == "all":
            done = [item for item, row in zip(found, report.rows) if row.status == "swapped"]
            taken = [path for item in done for path in item.projections.values()]
            step, others = _part(progress, bounds[1], bounds[2]), other_linears(model, taken)
            norms = find_norms(model, [item.path for item in done if item.kind == "module"])
            for i, (path, m) in enumerate(others.items()):
                report.rows.append(swap_linear(job, path, m))
                step(i + 1, len(others))
            report.rows += [swap_norm(job, path, *norm) for path, norm in norms.items()]
        if format is None and dispatch.resolve(backend) == "auto":
            choose_by_measurement(model, report.rows)
        describe_again([state for row in report.rows for state in row.states])
        for row in job.compare(report):
            put_back({state.path: model.get_submodule(state.path) for state in row.states})
            row.status, row.backend, row.reason, row.states = "left", None, report.notes[-1], []
        reset([state for row in report.rows for state in row.states])
    except BaseException:  # a model half swapped is nobody's wish; Ctrl-C included
        put_back(_swapped(model))
        raise
    job.finish(report)
    written_out = sum(row.status == "swapped" and row.save is None for row in report.ffns)
    if train and written_out:
        report.notes.append(f"{written_out} FFNs are written out in their layer's code and train on PyTorch's own ops")
    return report


def unswap(model: nn.Module) -> list[str]:
    """Put every swapped module back. -> a note per module whose weights could not be put back bit by bit.

    With format=None nothing was touched, so everything is as before. Packed weights return to their own dtype:
    exact where the format holds it, else they are now the dequantized ones (unless keep_originals was given). Tied
    parameters are tied again.
    """
    return put_back(_swapped(model))


def _part(progress: Progress | None, begin: int, end: int) -> Progress:
    """A progress of one part of the work, from `begin` to `end` per cent of the whole."""

    def step(done: int, total: int) -> None:
        if progress is not None:
            progress(begin + (end - begin) * done // total, 100)

    return step


def _known_format(format: str | None) -> str | None:
    if format not in SWAP_FORMATS:
        known = ", ".join(str(f) for f in SWAP_FORMATS)
        raise ValueError(f"format={format!r} is not known; known: {known}")
    return format and stored.ALIASES.get(format, format)


def _swapped(model: nn.Module) -> dict[str, nn.Module]:
    return {path: module for path, module in model.named_modules() if is_swapped(module)}


def _swap_one(job: Job, found: Found, given: Weights | None) -> SwapRow:
    row = SwapRow(
        path=found.path,
        kind=found.kind,
        spec=found.spec,
        layout=found.layout,
        format=job.format,
        backend=None,
        status="left",
        reason=found.reason,
    )
    module = job.model.get_submodule(found.path)
    if found.spec is None or found.layout is None:
        return row
    if isinstance(module, FeedForward):
        row.reason = "a fanfold FeedForward already"
        return row
    linears: dict[str, Any] = {role: job.model.get_submodule(path) for role, path in found.projections.items()}
    for role, linear in linears.items():
        # in training any dtype and device will do
        backend = job.backend if job.save is None or found.kind == "pair" else "torch"
        reason = unusable(role, linear, backend) or (job.format and job.reader(found.projections[role]))
        if reason:
            row.reason = reason
            return row
    if given is not None:
        row.format = given.up.format
        reason = prepacked.differs(given, linears, found)
        if reason is not None:
            row.reason = reason
            return row
    try:
        truths = _truths(job, module, linears, found) if job.verify else None
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        row.reason = f"its own code fails on 1 or 40 tokens: {type(error).__name__}: {error}"
        return row
    row.bytes_before = sum(m.weight.nbytes for m in linears.values()) if job.format else None
    try:
        installed = _install(module, linears, found, job, given)
    except ValueError as error:  # weights that no format holds: infinite, or beyond float16's range
        put_back(
            {
                p: job.model.get_submodule(p)
                for p in found.projections.values()
                if is_swapped(job.model.get_submodule(p))
            }
        )
        row.reason = str(error)
        return row
    row.states = [m._fanfold for m in installed]
    row.save = row.states[-1].trains
    row.status, row.backend = "swapped", "cpu" if job.backend == "auto" else job.backend
    if job.format is not None:
        row.bytes_after = sum(m._fanfold.weight.nbytes for m in linears.values())
        choose_activations(row, linears, found.projections, job.activations, job.inputs, given is not None)
    snapshot = getattr(row.states[-1], "snapshot", None)
    learning = snapshot.learning() if row.save is not None and snapshot is not None else []
    if learning:
        row.status = "left"
        row.reason = f"{', '.join(learning)} learn, too, and would get no gradient: ours are those of x and the linears"
    if row.status == "swapped" and truths is not None:
        _verify(row, module, linears, found, truths)
        if row.status == "swapped" and row.save is not None:
            judge_gradients(row, module, found, truths)
    if row.status != "swapped":
        put_back({m._fanfold.path: m for m in installed})
        row.states, row.bytes_after, row.save = [], None, None
    if job.packer is not None:
        job.packer.release(row.states)
    reset(row.states)
    return row


def _truths(job: Job, module: nn.Module, linears: dict[str, Any], found: Found) -> Any:
    """What the FFN gives now: the whole, or where a layer's code connects packed linears, each of them."""
    more = {role: job.sample(path) for role, path in found.projections.items()}
    if found.kind == "pair" and job.format is not None:
        return {role: LinearTruth(linear, more[role]) for role, linear in linears.items()}
    first = next(x for role, x in more.items() if role != "down")
    return Truth(module, linears, found, first)


def _verify(row: SwapRow, module: nn.Module, linears: dict[str, Any], found: Found, truths: Any) -> None:
    if row.format is None:
        truths.judge(row, module, linears)
    elif isinstance(truths, Truth):
        weights = row.states[-1].weights(module)  # type: ignore[attr-defined]
        if isinstance(weights, str):
            row.status, row.reason = "left", weights
            return
        judge(row, ffn_cases(truths, weights, list(linears.values())), lambda x: truths.run(module, linears, x))
    else:
        for role, truth in truths.items():
            judge(row, truth.cases(linears[role]._fanfold.weight), run_linear(linears[role]))
            if row.status != "swapped":
                row.reason = f"{role}: {row.reason}"
                return


def _install(module: nn.Module, linears: dict[str, Any], found: Found, job: Job, given: Weights | None) -> list[Any]:
    assert found.spec is not None
    assert found.layout is not None
    installed: list[Any] = []
    for role, linear in linears.items():
        path = found.projections[role]
        if job.packer is not None:
            order = found.layout.order if role == "gate_up" else SEPARATE
            owner = job.owner(linear)
            state = job.packer.pack(linear, path, order, prepacked.parts(given, role))
            if owner is not None:
                state.tie(owner[1:])
            if found.kind == "pair":
                state.found = found
        elif found.kind == "pair":
            install(linear, SwappedLinear, LinearState(path, None, job.backend))
        else:
            continue
        installed.append(linear)
    if found.kind == "module":
        prefix = len(found.path) + 1 if found.path else 0
        roles = {role: path[prefix:] for role, path in found.projections.items()}
        ffn_state = (FFNState if job.format is None else PackedFFNState)(
            module,
            found.path,
            found.spec,
            found.layout,
            roles,
            scale=found.scale,
            residual=found.residual,
            dropout=found.dropout,
            format=job.format,
            backend=job.backend,
            save=job.save,
        )
        install(module, SwappedFFN, ffn_state)
        ffn_state.look(module)
        installed.append(module)
    return installed
