"""`anatomy`: what a model is made of, as far as its FFNs' memories go: by experiment, never by a name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..models.find import Found, Progress, find
from ..models.inputs import default_inputs
from ..models.linears import quiet
from ..models.norms import Norm, recognise
from ..models.observe import batch
from .heads import Head, look_at_head
from .layers import Layer, coefficients, plain_matrix
from .sums import sum_rule
from .taps import Taps, logits_of, run
from .trace import calls, events, outside
from .writes import look_at_write

__all__ = ["Anatomy", "Layer", "anatomy"]


@dataclasses.dataclass
class Anatomy:
    """The FFNs of a model in order of execution, and the way from the residual to the logits.

    layers   one `Layer` per identified FFN and call;  left  (path, reason) of FFNs that are not among them.
    stream   the layers between the first block and the head, where the residual goes from block to block unchanged.
    head     the way to the logits (`heads.Head`);  effects_why_not  why there are no direct effects, or None.
    """

    model: nn.Module = dataclasses.field(repr=False)
    layers: list[Layer]
    left: list[tuple[str, str]]
    stream: list[Layer]
    head: Head
    effects_why_not: str | None

    @property
    def d_model(self) -> int:
        return self.layers[0].spec.d_model

    @property
    def head_note(self) -> str:
        """What the unembedding is, where it is not the model's head; else ""."""
        return self.head.note

    @property
    def final_norm(self) -> str | None:
        """Path of the norm between the last block and the head."""
        return self.head.norm_path

    @property
    def norm_kind(self) -> str | None:
        """ "rms", "layer" or "none" (the head reads the state itself); None where that is not known."""
        return None if self.head.norm is None else self.head.norm.kind

    @property
    def head_bias(self) -> Tensor | None:
        """[V] float32, the bias that the head adds."""
        bias = None if self.head.path is None else getattr(self.model.get_submodule(self.head.path), "bias", None)
        return None if bias is None else bias.detach().to("cpu", torch.float32)

    def unembedding(self) -> Tensor | None:
        """E [V, D] float32 on the CPU: the head's matrix, dequantized if packed; without a head the input embedding
        (`head_note` says so); None if there is neither. A view of the model's memory where that is float32."""
        if self.head.path is None:
            return None
        module: Any = self.model.get_submodule(self.head.path)
        if isinstance(module, nn.Embedding):
            return module.weight.detach().to("cpu", torch.float32)
        return plain_matrix(module)

    def choose(self, layers: Iterable[int] | None) -> list[Layer]:
        """The layers with these indices, all by default. Raises ValueError for one that does not exist."""
        if layers is None:
            return list(self.layers)
        chosen = sorted(set(layers))
        wrong = [i for i in chosen if i not in range(len(self.layers))]
        if wrong:
            raise ValueError(f"layer {wrong[0]} does not exist: the model has layers 0 to {len(self.layers) - 1}")
        return [self.layers[i] for i in chosen]

    def post_norm(self, layer: Layer) -> Norm | None:
        """The norm that the layer's output goes through on its way to the residual."""
        return None if layer.post_norm is None else self._norms[layer.post_norm]

    def __post_init__(self) -> None:
        self._norms: dict[str, Norm] = {}

    def _as_described(self, taps: Taps) -> bool:
        """Whether each layer's own output is what its description gives."""
        for layer in self.layers:
            key, weights = (layer.path, layer.call), layer.weights()
            x, y = (t[key].flatten(0, -2) for t in (taps.x, taps.y))
            m = coefficients(weights, x).coefficient
            if not sum_rule(layer, weights, x, y, m, taps.dtype[key], taps.largest[key]).holds:
                return False
        return True


def anatomy(
    model: nn.Module, inputs: Any = None, found: list[Found] | None = None, progress: Progress | None = None
) -> Anatomy:
    """Find a model's FFNs, how each writes to the residual, and how the residual becomes logits.

    inputs    for the runs of the experiment, as `capture` takes them; default: small random ones from the config.
    found     what `ff.find` gave for this model, to spare finding again;  progress  called with (done, total).
    -> Anatomy. The model is not changed: hooks are taken off again, modes put back, and its own hooks do not fire.
    Raises FindError if there is no FFN, ValueError if none is identified or the model cannot be run.
    """
    if found is None:
        out, taps = _examined(model, inputs, find(model, inputs=inputs, progress=progress, each=False))
        if out._as_described(taps):
            return out
        found = find(model, inputs=inputs, progress=progress)  # alike to look at, and not in what they compute
    return _examined(model, inputs, found)[0]


def _examined(model: nn.Module, inputs: Any, found: list[Found]) -> tuple[Anatomy, Taps]:
    known = [f for f in found if f.spec is not None]
    left = [(f.path, f.reason) for f in found if f.spec is None]
    if not known:
        raise ValueError(f"none of {len(found)} FFNs was identified; the first, {left[0][0]}: {left[0][1]}")
    given = inputs if inputs is not None else default_inputs(model)
    if given is None:
        raise ValueError(f"{type(model).__name__} cannot be run without inputs: pass inputs=")
    places = {f.path: (f, block_of(model, f.path, known)) for f in known}
    blocks = {block for _, block in places.values()}
    with torch.no_grad(), quiet(model):
        taps = Taps(model, places.values())
        with calls(model, blocks) as called, events(outside(model, known)) as seen, taps.placed():
            logits = logits_of(run(model, given))
        layers, missed = _layers(model, taps, places)
        for layer in layers:
            look_at_write(layer, called[(layer.block, layer.block_call)], known)
        stream = _stream(taps, layers)
        final = taps.after.get((stream[-1].block, stream[-1].block_call))
        ids = batch(given)[1].get("input_ids")
        width = layers[0].spec.d_model
        head = look_at_head(seen, blocks, logits, final, ids, width, lambda: logits_of(run(model, given)))
    out = Anatomy(model, layers, left + missed, stream, head, None)
    for layer in stream:
        if layer.post_norm is not None:
            norm = recognise(model.get_submodule(layer.post_norm), layer.spec.d_model, taps.y[(layer.path, layer.call)])
            if norm is None:
                layer.write, layer.write_reason = (
                    "not additive",
                    f"{layer.post_norm}, which reads it, is no norm",
                )
            else:
                out._norms[layer.post_norm] = norm
    bad = next((layer for layer in stream if layer.write == "not additive"), None)
    if bad is not None:
        out.effects_why_not = f"layer {bad.index} does not add to the residual: {bad.write_reason}"
    elif head.why_not:
        out.effects_why_not = head.why_not
    if out.effects_why_not is None:
        for layer in stream:
            layer.direct = True
    return out, taps


def block_of(model: nn.Module, path: str, founds: list[Found]) -> str:
    """The repeated block around an FFN: the outermost item of a list of modules that holds no other FFN."""
    names = path.split(".") if path else []
    above = [(".".join(names[:i]), ".".join(names[: i + 1])) for i in range(len(names))]
    items = [item for owner, item in above if isinstance(model.get_submodule(owner), (nn.ModuleList, nn.Sequential))]
    alone = [item for item in items if sum(f"{f.path}.".startswith(f"{item}.") for f in founds) == 1]
    if alone or items:
        return alone[0] if alone else items[-1]
    return path.rpartition(".")[0]


def _layers(
    model: nn.Module, taps: Taps, places: dict[str, tuple[Found, str]]
) -> tuple[list[Layer], list[tuple[str, str]]]:
    layers, missed = [], []
    for (path, call), (block, block_call) in taps.order:
        if (path, call) not in taps.y or block_call < 0:
            missed.append((path, "it is called outside its block"))
            continue
        found = places[path][0]
        layers.append(Layer(index=len(layers), found=found, model=model, block=block, call=call, block_call=block_call))
    reached = {layer.path for layer in layers}
    missed += [(path, "a run of the model does not reach it") for path in places if path not in reached]
    if not layers:
        raise ValueError(f"a run of {type(model).__name__} reaches none of its FFNs: pass inputs= that do")
    return layers, missed


def _stream(taps: Taps, layers: list[Layer]) -> list[Layer]:
    """The longest row of layers up to the last in which each block reads what the one before gave."""
    out = layers[-1:]
    for layer in reversed(layers[:-1]):
        here = taps.after.get((layer.block, layer.block_call))
        there = taps.before.get((out[0].block, out[0].block_call))
        if here is None or there is None or here.shape != there.shape or not torch.equal(here, there):
            break
        out.insert(0, layer)
    return out
