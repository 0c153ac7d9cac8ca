"""`read`: what every FFN of a model reads and writes at every token of a prompt, and what that does to a prediction.

T tokens, D d_model, F d_ff, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .anatomy import Anatomy, Layer
from .anatomy import anatomy as anatomy_of
from .capture import Captured, capture, coefficients
from .effects import Readout, through_post_norm, written
from .layer_reading import LayerReading
from .parts import Channel, LayerShare, Prediction, Shares, Tokens
from .prompt import Prompt
from .selective import TAIL, Selective, selective
from .sums import SumRule, sum_rule

if TYPE_CHECKING:
    from .index import Index


class Reading:
    """What `read` gives.

    tokens, ids  of the prompt;  layers  a LayerReading for each layer that was asked for;  sum_rule  held in each.
    captured     the run itself;  anatomy  the model's parts;  name  of the model, for titles;  notes  what to know.
    Positions count from 0, negative ones from the end. A token is an id or the text of one token, with its space; by
    default it is the model's own most likely one at the position (without logits, the prompt's own token).
    """

    def __init__(self, prompt: Prompt, captured: Captured, anatomy: Anatomy, layers: list[Layer]) -> None:
        self.anatomy, self.captured, self.name = anatomy, captured, prompt.name
        self.text, self.ids, self.vocabulary = prompt.text, prompt.ids, prompt.vocabulary
        self.tokens = self.vocabulary.texts(self.ids)
        self.effects_why_not = anatomy.effects_why_not or prompt.effects_why_not
        self.readout = None if anatomy.unembedding() is None else Readout(anatomy)
        self.layers: list[LayerReading] = []
        self.sum_rule: list[SumRule] = []
        self._logits = None if captured.logits is None or prompt.effects_why_not else captured.logits[0]
        for layer in layers:
            self._add(layer)
        self.notes = [*prompt.notes, *_notes(self)]

    def _add(self, layer: Layer) -> None:
        weights = layer.weights()
        x, y = (t[layer.index][0] for t in (self.captured.x, self.captured.y))
        c = coefficients(weights, x)
        norm = weights.down.norm(dim=0)
        self.layers.append(LayerReading(layer, x, y, c.gate, c.content, c.coefficient, norm, self))
        dtype, largest = self.captured.dtype[layer.index], self.captured.largest[layer.index]
        self.sum_rule.append(sum_rule(layer, weights, x, y, c.coefficient, dtype, largest))

    def at(self, position: int) -> int:
        """A position from 0. Raises ValueError if there is none."""
        n = len(self.ids)
        if not -n <= position < n:
            raise ValueError(f"position {position} does not exist: the prompt has {n} tokens, 0 to {n - 1}")
        return position % n

    def layer(self, index: int) -> LayerReading:
        """The reading of the layer with this index. Raises ValueError if it was not read."""
        for reading in self.layers:
            if reading.layer.index == index:
                return reading
        known = ", ".join(str(r.layer.index) for r in self.layers)
        raise ValueError(f"layer {index} was not read; layers: {known}")

    def token(self, token: int | str) -> int:
        """The id of a token given as an id or a text."""
        size = len(self.readout.e_VD) if self.readout is not None else len(self.ids)
        return self.vocabulary.id(token, size)

    def explained(self, position: int) -> int:
        """The id of the token that is explained by default."""
        at = self.at(position)
        return int(self.ids[at]) if self._logits is None else int(self._logits[at].argmax())

    def predictions(self, position: int = -1, top: int = 10) -> list[Prediction]:
        """The model's most likely tokens at a position; empty for a model without logits."""
        if self._logits is None:
            return []
        logits = self._logits[self.at(position)]
        p = logits.double().softmax(-1)
        ids = logits.topk(min(top, len(logits))).indices.tolist()
        return [Prediction(i, self.vocabulary.text(i), float(p[i]), float(logits[i])) for i in ids]

    def shares(self, position: int = -1, token: int | str | None = None, centred: bool = True) -> Shares:
        """What the embedding, each block's attention (all of it but the FFN) and each FFN added to a token's logit.

        centred  on the logit less the mean of all; False: on the logit itself.
        Raises ValueError, with the reason, where the model has no direct effects.
        """
        at = self.at(position)
        t = self.explained(at) if token is None else self.token(token)
        toward = self._toward(at, t, centred)
        assert self.readout is not None
        assert self.captured.embedded is not None
        assert self._logits is not None
        rows = []
        for layer in self.anatomy.stream:
            i = layer.index
            block = float((self.captured.after[i][0, at].double() - self.captured.before[i][0, at].double()) @ toward)
            u, shift = self.path_of(layer, at, t, centred)
            ffn = float(self.captured.y[i][0, at].double() @ u) + shift
            bias = layer.down_bias()
            rows.append(LayerShare(i, block - ffn, ffn, shift + (0.0 if bias is None else float(bias.double() @ u))))
        return Shares(
            position=at,
            token=t,
            text=self.vocabulary.text(t),
            embedding=float(self.captured.embedded[0, at].double() @ toward),
            layers=rows,
            constant=self.readout.constant(t, centred),
            logit=self.readout.logit(self._logits[at], t, centred),
        )

    def channels(
        self,
        position: int = -1,
        layer: int | None = None,
        token: int | str | None = None,
        top: int = 10,
        by: str | None = None,
    ) -> list[Channel]:
        """The strongest channels at a position, of one layer or of all that were read.

        by  "effect": the largest |effect| on the token's logit; "size": the largest |m| · ‖v‖; default: effect where
            there are direct effects. Raises ValueError for by="effect" where there are none.
        """
        if by not in (None, "effect", "size"):
            raise ValueError(f"by={by!r} is not known; known: effect, size")
        at = self.at(position)
        t = self.explained(at) if token is None else self.token(token)
        out: list[Channel] = []
        for reading in self.layers if layer is None else [self.layer(layer)]:
            effect = reading.effect(t, at) if by == "effect" or self.has_effects(reading.layer) else None
            out += reading.strongest(at, effect, top, by)
        by_size = by == "size" or any(c.effect is None for c in out)
        return sorted(out, key=lambda c: -(c.size if by_size else abs(c.effect or 0.0)))[:top]

    def value(self, layer: int, channel: int, top: int = 10) -> Tokens:
        """The tokens that a channel's value promotes and suppresses: both ends of E · v_i.

        The final norm's gain (and that of a norm on the FFN's output) is applied to v_i, as the model does, and scores
        are less their mean; times the coefficient and the norm's scale of a state, one is the token's effect there.
        """
        d_ff = self.layer(layer).layer.spec.d_ff
        if not 0 <= channel < d_ff:
            raise ValueError(f"channel {channel} does not exist: layer {layer} has channels 0 to {d_ff - 1}")
        return self.values({layer: [channel]}, top)[(layer, channel)]

    def values(self, channels: dict[int, list[int]], top: int = 10) -> dict[tuple[int, int], Tokens]:
        """`value` of many channels, {layer: channels} -> {(layer, channel): Tokens}, by blocks of one product each."""
        out = {}
        for layer, some in channels.items():
            own = self.layer(layer).layer
            vectors = written(self.anatomy, own, own.weights().down.t()[some])
            out |= zip([(layer, c) for c in some], self.read_vectors(vectors, top))
        return out

    def update(self, layer: int, position: int = -1, top: int = 10) -> Tokens:
        """The tokens that a layer's whole update at a position promotes and suppresses, read like a value."""
        reading, at = self.layer(layer), self.at(position)
        return self.read_vectors(written(self.anatomy, reading.layer, reading.y[at], reading.y[at])[None], top)[0]

    def read_vectors(self, vectors_ND: Tensor, top: int) -> list[Tokens]:
        """Tokens for directions in the residual [N, D]. Raises ValueError if the model has no token embedding."""
        if self.readout is None:
            raise ValueError(f"values cannot be read as tokens: {self.anatomy.head_note}")
        ends = self.readout.ends(vectors_ND, top)
        return [
            Tokens(
                [(self.vocabulary.text(i), s) for i, s in zip(ids, scores)],
                [(self.vocabulary.text(i), s) for i, s in zip(low, low_scores)],
                ids,
                low,
            )
            for ids, scores, low, low_scores in zip(
                ends.promoted.tolist(),
                ends.promoted_scores.tolist(),
                ends.suppressed.tolist(),
                ends.suppressed_scores.tolist(),
            )
        ]

    def top_share(self, layer: int, position: int = -1, k: int = 10) -> float:
        """Σ of the k largest |m| · ‖v‖ over Σ of all: the share of the top sub-updates of Geva et al. 2022."""
        size = self.layer(layer).size[self.at(position)]
        return float(size.topk(min(k, len(size))).values.sum() / size.sum().clamp_min(1e-30))

    def selective(self, layer: int, top: int = 10, tail: float = TAIL) -> Selective:
        """How selectively a layer responds, over the tokens of the prompt."""
        reading = self.layer(layer)
        return selective(layer, reading.coefficient, reading.layer.weights().down, top, tail)

    def has_effects(self, layer: Layer) -> bool:
        """Whether the layer's channels have direct effects on logits."""
        return self.effects_why_not is None and layer.direct

    def to_dict(
        self,
        top: int = 8,
        positions: Iterable[int] | None = None,
        values: bool = True,
        index: Index | None = None,
        token: int | str | None = None,
    ) -> dict[str, Any]:
        """The reading as a dict of plain JSON values, what `fanfold.report.page` shows.

        top  channels per layer and position;  positions  default all;  values  whether the tokens of each channel's
        value are in it;  index  the model's `memory.index`, for what triggers each channel;  token  the one that is
        explained at every position, by default the model's own most likely there.
        """
        from .document import document

        return document(self, top, positions, values, index, token)

    def save_html(
        self, path: str | os.PathLike[str], index: Index | None = None, token: int | str | None = None
    ) -> Path:
        """Write the report: one HTML file without a server or network; index, token as in `to_dict`. -> its path."""
        from ..report import page

        target = Path(path)
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            partial.write_text(page(self.to_dict(index=index, token=token)), encoding="utf-8")
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
        return target

    def _repr_html_(self) -> str:
        from ..report import fragment

        return fragment(self.to_dict())

    def __repr__(self) -> str:
        said = "".join(repr(p.text) for p in self.predictions(-1, 1))
        held = sum(rule.holds for rule in self.sum_rule)
        then = f" -> {said}" if said else ""
        return f"Reading({self.text!r}{then}, {len(self.layers)} layers, the sum rule holds in {held})"

    def _toward(self, at: int, token: int, centred: bool) -> Tensor:
        if self.effects_why_not is not None:
            raise ValueError(f"there are no direct effects on logits: {self.effects_why_not}")
        assert self.readout is not None
        assert self.captured.final is not None
        return self.readout.direction(self.captured.final[0, at], token, centred)

    def path_of(self, layer: Layer, at: int, token: int, centred: bool) -> tuple[Tensor, float]:
        """(u, constant): a part c of the layer's output at a position adds c · u to the token's logit, whatever norm it
        goes through adds `constant`."""
        toward = self._toward(at, token, centred)
        if not layer.direct:
            raise ValueError(f"layer {layer.index} has no direct effects: what it writes does not lead to the head")
        return through_post_norm(self.anatomy, layer, self.captured.y[layer.index][0, at], toward)


def read(
    model: nn.Module,
    tokenizer: Any,
    prompt: Any,
    *,
    layers: Iterable[int] | None = None,
    anatomy: Anatomy | None = None,
) -> Reading:
    """Run a model on a prompt and read its FFNs as memories: y = Σ m_i · v_i + bias.

    tokenizer  of the model; None if the prompt is given as token ids.
    prompt     a text, or token ids [T];  layers  which `Layer.index` to read, default all.
    anatomy    what `memory.anatomy(model)` gave, to spare the experiment (seconds) in a second reading.
    -> Reading. Coefficients are computed in float32 from copies of what the FFNs read; it takes about
    12 · layers · T · d_ff bytes. Kernels of `ff.swap` stay on, edits of `memory.edit` count.
    Raises FindError or ValueError if there is no FFN that is identified, if the prompt is empty or longer than the
    model can read, or for a layer that does not exist.
    Sources: Geva et al. 2021, arXiv:2012.14913; 2022, arXiv:2203.14680.
    """
    given = Prompt.of(model, tokenizer, prompt)
    found = anatomy if anatomy is not None else anatomy_of(model)
    wanted = given.reached(found, layers)
    captured = capture(model, found, given.inputs, {layer.index for layer in (*wanted, *found.stream)})
    return Reading(given, captured, found, wanted)


def _notes(reading: Reading) -> list[str]:
    head, notes = reading.anatomy.head, []
    if reading.anatomy.head_note:
        notes.append(reading.anatomy.head_note)
    if reading.effects_why_not:
        notes.append(f"There are no direct effects on logits: {reading.effects_why_not}.")
    else:
        notes.append(
            "Effects are on a token's logit less the mean of all logits: what raises all alike changes no probability."
        )
    if head.softcap is not None:
        notes.append(f"The model caps its logits softly at {head.softcap:g}; effects add up to the logit before that.")
    if head.error > 1e-4:
        notes.append(
            f"The model's head gives logits {head.error:.1%} (rms) beside those that effects add up to: it computes in "
            "a coarser format."
        )
    if reading.anatomy.left:
        path, reason = reading.anatomy.left[0]
        notes.append(f"{len(reading.anatomy.left)} FFNs are not read; {path}: {reason}")
    kinds = {rule.arithmetic for rule in reading.sum_rule} - {"float32"}
    if kinds:
        notes.append(f"The sum rule allows for the arithmetic of {', '.join(sorted(kinds))}.")
    return notes
