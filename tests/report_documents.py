"""Documents of readings as the report takes them, made up: any number of tokens and layers, with everything or less."""

from __future__ import annotations

import math
import random

WORDS = (
    " Paris", " the", " a", " France", ",", ".", " is", " city", " capital", "ing", " London", " Berlin", "\n", " not",
    " of", " located", " Rome", " 1", " called", " known", "é", " été", "日本", " Москва", "�", " very", "ed",
    " French",
)  # fmt: skip
TOKENS = ("The", " capital", " of", " France", " is")


def document(
    tokens=TOKENS, *, layers=30, d_ff=1536, channels=8, effects=True, triggers=True, values=True, gated=True, seed=0
) -> dict:
    """A document whose parts sum to the logit at every position and whose token rises to rank 1 at two thirds."""
    draw = random.Random(seed)
    document = {
        "title": "".join(tokens),
        "model": {
            "name": "made-up", "layers": layers, "d_model": 576, "d_ff": d_ff, "ffn": f"gated silu 576->{d_ff}",
            "vocabulary": 49152,
        },
        "effects": effects,
        "effects_why_not": None if effects else "the block normalises the sum again after adding the FFN's output",
        "tokens": [{"id": i, "text": text} for i, text in enumerate(tokens)],
        "sum_rule": [{"layer": i, "error": 3.1e-7, "allowed": 8.4e-7, "holds": True} for i in range(layers)],
        "notes": ["Computed in float32 on the model's own weights."],
        "heat": [[draw.lognormvariate(-2, 0.8) * (1 + i / layers) for i in range(layers)] for _ in tokens],
        "selective": [
            {
                "layer": i, "nonzero": 1.0, "above_cett": 0.3 + 0.4 * draw.random(),
                "participation": draw.uniform(50, 600), "top10_share": draw.uniform(0.1, 0.6),
            }
            for i in range(layers)
        ],
    }  # fmt: skip
    document["positions"] = [_position(draw, at, layers, d_ff, channels, effects, gated) for at in range(len(tokens))]
    layers_of_all = [layer for position in document["positions"] for layer in position["layers"]]
    keys = sorted({f"{layer['layer']}:{c['channel']}" for layer in layers_of_all for c in layer["channels"]})
    document["values"] = {key: _value(draw) for key in keys} if values else {}
    document["triggers"] = {key: _triggers(draw) for key in keys} if triggers else None
    return _rounded(document)


def small(**more) -> dict:
    """Twelve layers: enough to see everything, quick to open."""
    return document(**{"layers": 12, "channels": 5, **more})


def _rounded(data):
    """Four significant digits, as a reading's document has them."""
    if isinstance(data, dict):
        return {key: _rounded(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_rounded(value) for value in data]
    return float(f"{data:.4g}") if isinstance(data, float) else data


def _position(draw, at, layers, d_ff, channels, effects, gated) -> dict:
    rows = []
    for layer in range(layers):
        late = (layer + 1) / layers
        rank = 1 if late > 0.66 else max(2, int(49152 ** (1 - late) * draw.uniform(0.4, 1)))
        rows.append(
            {
                "layer": layer,
                "attention": draw.gauss(0.1, 0.4) * late if effects else None,
                "ffn": draw.gauss(0.3, 0.7) * late if effects else None,
                "bias": 0.0 if effects else None,
                "top10_share": draw.uniform(0.1, 0.6),
                "update_norm": draw.uniform(2, 20),
                "residual_norm": draw.uniform(30, 90),
                "rank": rank if effects else None,
                "update_tokens": [[word, draw.uniform(1, 9)] for word in draw.sample(WORDS, 5)],
                "top_after": [draw.choice(WORDS) if rank > 1 else " Paris", late * 0.4] if effects else None,
                "channels": [
                    _channel(draw, c, late, effects, gated) for c in draw.sample(range(d_ff), min(channels, d_ff))
                ],
            }
        )
    total = 0.31 + 0.02 + sum(row["attention"] + row["ffn"] for row in rows) if effects else None
    p = [0.41 * 0.6**i for i in range(10)]
    words = [" Paris", *[word for word in draw.sample(WORDS, 10) if word != " Paris"]][:10]
    return {
        "position": at,
        "predictions": [
            {"id": 100 + i, "text": word, "p": p[i], "logit": 17 + math.log(p[i])} for i, word in enumerate(words)
        ],
        "token": {"id": 100, "text": " Paris"},
        "embedding": 0.31 if effects else None,
        "constant": 0.02 if effects else None,
        "total": total,
        "sum": total,
        "layers": rows,
    }


def _channel(draw, channel, late, effects, gated) -> dict:
    gate = draw.gauss(0, 1.5)
    content = draw.gauss(0, 1.5)
    coefficient = gate * content if gated else content
    return {
        "channel": channel, "coefficient": coefficient, "gate": gate if gated else None, "content": content,
        "size": abs(coefficient) * 1.7, "effect": draw.gauss(0, 0.3) * late * abs(coefficient) if effects else None,
    }  # fmt: skip


def _value(draw) -> dict:
    words = draw.sample(WORDS, 20)
    scores = sorted((draw.uniform(0.3, 3) for _ in range(10)), reverse=True)
    return {
        "norm": 1.7,
        "promoted": [[word, round(score, 3)] for word, score in zip(words[:10], scores)],
        "suppressed": [[word, round(-score, 3)] for word, score in zip(words[10:], scores)],
        "promoted_ids": list(range(10)),
    }


def _triggers(draw) -> dict:
    def one(sign):
        words = [draw.choice(WORDS) for _ in range(14)]
        return {"text": [[word, i == 9] for i, word in enumerate(words)], "coefficient": sign * draw.uniform(2, 9)}

    return {
        "frequency": draw.uniform(0.001, 0.4),
        "mean": draw.gauss(0, 0.2),
        "positive": [one(1), one(1), one(1)],
        "negative": [one(-1), one(-1)],
    }
