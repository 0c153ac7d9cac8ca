"""`geva`: the measurements of Geva et al. 2021 and 2022 on an indexed model, beside the paper's figures."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..anatomy import Anatomy
from ..anatomy import anatomy as anatomy_of
from ..taps import evaluating, logits_of, run
from . import fingerprint
from .accumulate import is_exact
from .figures import FIGURES, MODEL
from .prefixes import Counts, Reader, Values, prefixes, values

if TYPE_CHECKING:
    from collections.abc import Callable

    from .query import Index

_TOP_VALUES, _UPPER = 100, 10 / 16  # the paper's layers 11-16 of 16


@dataclasses.dataclass(frozen=True)
class Geva:
    """What `geva` measured.

    layers      a dict of shares per layer: the names of `figures.FIGURES`, and "agreement_negative", "agreement_raw",
                "agreement_all", "chance", "nonzero", "zero_agreement_active"; None where it is not defined.
    comparison  a dict per figure of the paper: "title", "ours", "paper", "source", "definition".
    model, prefixes, seed, notes  what it was measured on, and where a definition had to differ.
    """

    model: dict[str, Any]
    layers: list[dict[str, Any]]
    comparison: list[dict[str, str]]
    prefixes: int
    seed: int
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Geva:
        return cls(**data)


def geva(
    model: nn.Module,
    index: Index,
    *,
    prefixes_measured: int = 512,
    seed: int = 0,
    anatomy: Anatomy | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Geva:
    """Measure how a model's FFNs build its prediction, by the definitions of Geva et al.; kept in the index.

    model     the one that the index was made with.
    prefixes_measured  sequences of the index, drawn at random, of which one random position each is looked at (the
              paper: 4,000, the most that an index keeps);  seed  of the positions.
    progress  called with (steps done, steps).
    -> Geva. A state is read as the model's head reads it, through its final norm; a value or an update through that
    norm's gain alone. Value/key agreement is over all channels, at both ends where coefficients are signed.
    Raises ValueError if it is another model, one without a head for tokens, one that is not causal, or one in which
    FFNs do not add to the residual. Sources: arXiv:2012.14913, arXiv:2203.14680.
    """
    found = anatomy if anatomy is not None else anatomy_of(model)
    _refuse(model, index, found)
    reader, raw = Reader(found), Reader(found, raw=True)
    sample = index.sample(prefixes_measured)
    steps, done = len(found.stream) + len(sample), 0
    tops: dict[int, Values] = {}
    layers: dict[int, dict[str, Any]] = {}
    for layer in found.stream:
        signs = (1, -1) if index.layers[layer.index]["signed"] else (1,)
        down = layer.weights().down
        post = found.post_norm(layer)
        if post is not None:
            # the gain of the norm after the FFN is part of what a value writes; its scale is one for all channels
            down = (post.gain[:, None] * post.centred(down.t().double()).t()).float()
        tops[layer.index] = values(reader, down, signs)
        plain = raw.top(down.t()) if reader.norm.kind != "none" else tops[layer.index].token[1]
        layers[layer.index] = _agreement(index, layer.index, tops[layer.index], plain)
        done += 1
        if progress is not None:
            progress(done, steps)
    counts = Counts(found, {r["layer"]: r["threshold"] for r in index.layers}, tops)
    with torch.no_grad():
        for ids, ends in prefixes(sample, seed, index.meta["prefix"], index.meta["uncounted"]):
            counts.add(model, ids, ends)
            if progress is not None:
                progress(done + counts.prefixes, steps)
    rows = [{"layer": i, **layers[i], **counts.row(i)} for i in layers]
    out = _result(index, found, rows, tops, counts.prefixes, seed)
    index.keep("geva", out.to_dict())
    return out


def _refuse(model: nn.Module, index: Index, anatomy: Anatomy) -> None:
    if fingerprint.of_model(model) != index.meta["job"]["model"]:
        raise ValueError(f"{index.path} was made with another model than the {type(model).__name__} given")
    if anatomy.effects_why_not is not None:
        raise ValueError(
            f"{type(model).__name__} cannot be measured so: {anatomy.effects_why_not}; the definitions need a residual "
            "that FFNs add to, and a head that reads tokens from it"
        )
    vocabulary = anatomy.unembedding()
    assert vocabulary is not None
    ids = torch.arange(8)[None] % len(vocabulary)
    other = ids.clone()
    other[0, -1] = (other[0, -1] + 1) % len(vocabulary)
    with evaluating(model):
        first, second = (logits_of(run(model, {"input_ids": i})) for i in (ids, other))
    if first is None or second is None or not torch.allclose(first[0, 0].float(), second[0, 0].float()):
        raise ValueError(
            f"{type(model).__name__} is not causal: what it predicts after a prefix depends on later tokens"
        )


def _agreement(index: Index, layer: int, tops: Values, raw: Tensor) -> dict[str, Any]:
    """Value/key agreement of one layer: at either end, without the final norm, over all triggers, and by chance."""
    out: dict[str, Any] = {"agreement_negative": None}
    hits: list[Tensor] = []
    for sign, token in tops.token.items():
        channel, rank, following = torch.from_numpy(index.next_tokens(layer, sign)).unbind(1)
        hit, first = following == token[channel], rank == 0
        tops.agrees[sign] = torch.bincount(channel, hit.double(), len(token)) > 0
        hits.append(hit)
        out["agreement" if sign > 0 else "agreement_negative"] = _mean(hit[first])
        if sign > 0:
            out["agreement_raw"] = _mean((following == raw[channel])[first])
            # the mean over all pairs of a trigger and a value: what pairing them at random would give
            promoted = Counter(token.tolist())
            by_chance = [promoted[t] / len(token) for t in following[first].tolist()]
            out["chance"] = _mean(torch.tensor(by_chance))
    out["agreement_all"] = _mean(torch.cat(hits))
    return out


def _mean(of: Tensor) -> float | None:
    return float(of.double().mean()) if len(of) else None


def _result(
    index: Index, anatomy: Anatomy, rows: list[dict[str, Any]], tops: dict[int, Values], n: int, seed: int
) -> Geva:
    spec, vocabulary = anatomy.stream[0].spec, anatomy.unembedding()
    assert vocabulary is not None
    ours = {figure.name: _spread([row[figure.name] for row in rows]) for figure in FIGURES if figure.name in rows[0]}
    upper, agree = _top_values(list(tops.values()))
    ours |= {"top_values_upper": str(upper), "top_values_agree": str(agree)}
    both = any(row["agreement_negative"] is not None for row in rows)
    if both:
        ours["agreement"] += f"; negative end {_spread([row['agreement_negative'] for row in rows])}"
    chance = [row["chance"] for row in rows if row["chance"] is not None]
    ours["agreement"] += f"; chance {_percent(sum(chance) / max(len(chance), 1))}"
    comparison = [
        {
            "name": f.name,
            "title": f.title,
            "ours": ours[f.name],
            "paper": f.paper,
            "source": f.source,
            "definition": f.definition,
        }
        for f in FIGURES
    ]
    about = {
        "name": index.meta["name"],
        "layers": len(rows),
        "ffn": spec.describe(),
        "vocabulary": len(vocabulary),
        "tokens": index.meta["tokens"],
    }
    return Geva(about, rows, comparison, n, seed, _notes(index, anatomy, len(vocabulary), both))


def _top_values(tops: list[Values]) -> tuple[int, int]:
    """Of the values with the largest probability of one token: how many lie in the upper layers, how many agree."""
    flat = [(float(p), i, bool(v.agrees[s][c])) for i, v in enumerate(tops) for s in v.token
            for c, p in enumerate(v.probability[s])]  # fmt: skip
    best = sorted(flat, reverse=True)[:_TOP_VALUES]
    return sum(i >= _UPPER * len(tops) for _, i, _ in best), sum(agrees for *_, agrees in best)


def _notes(index: Index, anatomy: Anatomy, vocabulary: int, both: bool) -> list[str]:
    """Where this is not the paper's setting, or a definition had to differ."""
    top = index.meta["job"]["top"]
    out = [
        f"the paper's model: {MODEL}",
        f"chance in the paper is 1 / vocabulary, here 1 / {vocabulary:,}; ours pairs triggers and values of a layer at "
        "random, since common tokens agree more often than that",
        f"triggers: {top} sequences for each end of a channel, one maximum position in each",
    ]
    if index.meta["uncounted"]:
        out.append("the first token of a sequence, an attention sink in many models, is neither trigger nor prefix end")
    if anatomy.norm_kind != "none":
        out.append(
            "the model has a final norm, the paper's has none: states are read through it, values and updates through "
            "its gain; agreement_raw leaves it out"
        )
    if both:
        out.append(
            "coefficients are signed: a negative one writes -v, so each channel has two ends, with triggers and a top "
            "token of their own; top(v_i) below is that of the sign at hand"
        )
    if not all(is_exact(layer.spec) for layer in anatomy.stream):
        out.append(
            "the activation has no exact zeros, m != 0 is true nearly everywhere (column nonzero): a channel is active "
            "where |m| |v| is above the layer's threshold, below which all contributions together make 20 % of the "
            "output's norm"
        )
    if any(layer.post_norm is not None for layer in anatomy.stream):
        out.append("the FFN's output goes through a norm before it is added: y is what is added")
    return out


def _spread(shares: list[float | None]) -> str:
    """The range over layers, and the means of their lower and upper halves."""
    known = [(s, i) for i, s in enumerate(shares) if s is not None]
    if not known:
        return "not defined"
    (low, at_low), (high, at_high) = min(known), max(known)
    half = [[s for s, i in known if (i >= len(shares) / 2) == upper] for upper in (False, True)]
    means = " and ".join(_percent(sum(h) / len(h)) for h in half if h)
    return f"{_percent(low)} (layer {at_low}) to {_percent(high)} (layer {at_high}); lower and upper half {means}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
