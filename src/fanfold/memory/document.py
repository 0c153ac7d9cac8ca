"""A reading as a dict of plain JSON values: what the report shows. T tokens, D d_model, V vocabulary."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .effects import written
from .parts import Channel, Tokens

if TYPE_CHECKING:
    from .index import Index
    from .layer_reading import LayerReading
    from .reading import Reading

_PREDICTIONS, _UPDATE, _ENDS = 10, 5, 8


def document(
    reading: Reading,
    top: int,
    positions: Iterable[int] | None,
    values: bool,
    index: Index | None,
    token: int | str | None = None,
) -> dict[str, Any]:
    """The document of a reading; see `Reading.to_dict`."""
    chosen = list(dict.fromkeys(reading.at(p) for p in (range(len(reading.ids)) if positions is None else positions)))
    specs = [r.layer.spec for r in reading.layers]
    kinds = list(dict.fromkeys(s.describe() for s in specs))
    states = {p: _States(reading, p, token) for p in chosen}
    strongest = _strongest(reading, states, top)
    out = {
        "title": reading.text,
        "model": {
            "name": reading.name,
            "layers": len(reading.anatomy.layers),
            "d_model": specs[0].d_model,
            "d_ff": specs[0].d_ff,
            "ffn": "; ".join(kinds),
            "vocabulary": None if reading.readout is None else len(reading.readout.e_VD),
        },
        "effects": reading.effects_why_not is None,
        "effects_why_not": reading.effects_why_not,
        "tokens": [{"id": int(i), "text": text} for i, text in zip(reading.ids, reading.tokens)],
        "sum_rule": [
            {"layer": r.layer, "error": _r(r.error), "allowed": _r(r.allowed), "holds": r.holds, "kind": r.arithmetic}
            for r in reading.sum_rule
        ],
        "notes": list(reading.notes),
        "positions": [_position(reading, p, states[p], strongest) for p in chosen],
        "heat": _heat(reading),
        "selective": [_selective(reading, r) for r in reading.layers],
    }
    used: dict[int, list[int]] = {}
    for position in out["positions"]:
        for row in position["layers"]:
            known = used.setdefault(row["layer"], [])
            known += [c["channel"] for c in row["channels"] if c["channel"] not in known]
    out["values"] = _values(reading, used) if values and reading.readout is not None else {}
    out["triggers"] = None if index is None else _triggers(index, used)
    return out


class _States:
    """What the residual says after each layer, at one position: the rank of the explained token, and the top one."""

    def __init__(self, reading: Reading, at: int, token: int | str | None) -> None:
        self.token = reading.explained(at) if token is None else reading.token(token)
        self.rows: dict[int, tuple[int, str, float]] = {}
        if reading.effects_why_not is not None or reading.readout is None:
            return
        stream = reading.anatomy.stream
        logits = reading.readout.logits(torch.stack([reading.captured.after[s.index][0, at] for s in stream]))
        p = reading.readout.capped(logits).softmax(-1).max(-1)
        rank = (logits > logits[:, self.token, None]).sum(-1) + 1
        for layer, r, best, share in zip(stream, rank.tolist(), p.indices.tolist(), p.values.tolist()):
            self.rows[layer.index] = (r, reading.vocabulary.text(best), share)


def _strongest(reading: Reading, states: dict[int, _States], top: int) -> dict[tuple[int, int], list[Channel]]:
    """{(layer, position): channels}, layer by layer, so that packed weights are unpacked once."""
    out = {}
    where = [(at, s.token) for at, s in states.items()]
    for r in reading.layers:
        effects = r.effects(where) if where and reading.has_effects(r.layer) else [None] * len(where)
        for (at, _), effect in zip(where, effects):
            out[(r.layer.index, at)] = r.strongest(at, effect, top)
    return out


def _position(
    reading: Reading, at: int, states: _States, strongest: dict[tuple[int, int], list[Channel]]
) -> dict[str, Any]:
    token = states.token
    shares = reading.shares(at, token) if reading.effects_why_not is None else None
    by_layer = {} if shares is None else {row.layer: row for row in shares.layers}
    updates = [_update(reading, r, at) for r in reading.layers]
    tokens: list[Tokens | None] = [None] * len(updates)
    if reading.readout is not None and updates:
        tokens = list(reading.read_vectors(torch.stack([u for u, _ in updates]), _UPDATE))
    layers = []
    for r, (update, residual), words in zip(reading.layers, updates, tokens):
        share, state = by_layer.get(r.layer.index), states.rows.get(r.layer.index)
        layers.append(
            {
                "layer": r.layer.index,
                "attention": None if share is None else _r(share.attention),
                "ffn": None if share is None else _r(share.ffn),
                "bias": None if share is None else _r(share.bias),
                "top10_share": _r(reading.top_share(r.layer.index, at)),
                "update_norm": _r(float(update.norm())),
                "residual_norm": None if residual is None else _r(float(residual.norm())),
                "rank": None if state is None else state[0],
                "top_after": None if state is None else [state[1], _r(state[2])],
                "update_tokens": [] if words is None else [[text, _r(score)] for text, score in words.promoted],
                "channels": [
                    {
                        "channel": c.channel,
                        "coefficient": _r(c.coefficient),
                        "gate": None if c.gate is None else _r(c.gate),
                        "content": _r(c.content),
                        "size": _r(c.size),
                        "effect": None if c.effect is None else _r(c.effect),
                    }
                    for c in strongest[(r.layer.index, at)]
                ],
            }
        )
    predictions = reading.predictions(at, _PREDICTIONS)
    return {
        "position": at,
        "predictions": [{"id": p.id, "text": p.text, "p": _r(p.p), "logit": _r(p.logit)} for p in predictions],
        "token": {"id": token, "text": reading.vocabulary.text(token)},
        "embedding": None if shares is None else _r(shares.embedding),
        "constant": None if shares is None else _r(shares.constant),
        "total": None if shares is None else _r(shares.logit),
        "sum": None if shares is None else _r(shares.sum),
        "layers": layers,
    }


def _update(reading: Reading, r: LayerReading, at: int) -> tuple[Tensor, Tensor | None]:
    """What a layer writes into the residual at a position, and the residual that its block began with."""
    before = reading.captured.before.get(r.layer.index)
    return written(reading.anatomy, r.layer, r.y[at], r.y[at]), None if before is None else before[0, at]


def _heat(reading: Reading) -> list[list[float | None]]:
    """[token][layer]: the size of what the FFN writes over that of the residual at the entry of its block."""
    rows = []
    for at in range(len(reading.ids)):
        pairs = [_update(reading, r, at) for r in reading.layers]
        rows.append([None if b is None else _r(float(u.norm() / b.norm().clamp_min(1e-30))) for u, b in pairs])
    return rows


def _selective(reading: Reading, r: LayerReading) -> dict[str, Any]:
    s = reading.selective(r.layer.index)
    return {
        "layer": s.layer,
        "nonzero": _r(s.nonzero),
        "above_cett": _r(s.above_cett),
        "participation": _r(s.participation),
        "top10_share": _r(s.top_share),
    }


def _values(reading: Reading, used: dict[int, list[int]]) -> dict[str, Any]:
    out = {}
    for (layer, channel), tokens in reading.values(used, _ENDS).items():
        out[f"{layer}:{channel}"] = {
            "norm": _r(float(reading.layer(layer).value_norm[channel])),
            "promoted": [[text, _r(score)] for text, score in tokens.promoted],
            "suppressed": [[text, _r(score)] for text, score in tokens.suppressed],
            "promoted_ids": tokens.promoted_ids,
        }
    return out


def _triggers(index: Index, used: dict[int, list[int]]) -> dict[str, Any]:
    out = {}
    for layer, channels in used.items():
        for channel in channels:
            known = index.channel(layer, channel, top=5)
            ends = (("positive", known.triggers_positive), ("negative", known.triggers_negative))
            out[f"{layer}:{channel}"] = {"frequency": _r(known.frequency), "mean": _r(known.mean)} | {
                name: [
                    {
                        "text": [[t.before, False], [t.peak, True], [t.after, False]],
                        "coefficient": _r(t.coefficient),
                    }
                    for t in some
                ]
                for name, some in ends
            }
    return out


def _r(x: float) -> float:
    """Four significant digits: more cannot be read off a page."""
    return float(f"{x:.4g}")
