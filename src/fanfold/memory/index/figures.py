"""The figures of Geva et al. that `geva` measures again, with their sources and definitions."""

from __future__ import annotations

import dataclasses

GEVA_2021 = "Geva et al. 2021, arXiv:2012.14913"
GEVA_2022 = "Geva et al. 2022, arXiv:2203.14680"
MODEL = "a 16-layer language model with ReLU, d_model 1024, d_ff 4096, vocabulary 267,744, trained on WikiText-103"


@dataclasses.dataclass(frozen=True)
class Figure:
    """name of the measure;  title  in words;  paper  what they found;  source;  definition  as we measure it."""

    name: str
    title: str
    paper: str
    source: str
    definition: str


FIGURES = (
    Figure(
        "agreement",
        "value/key agreement",
        "about 0 in layers 1-10 of 16, rising from layer 11 to 3.5 %; chance 0.0004 %",
        GEVA_2021,
        "share of channels where the token that the value promotes most (coefficient 1) is the token after the key's "
        "strongest trigger",
    ),
    Figure(
        "top_values_upper",
        "of the 100 values with the largest top probability, those in the upper 6/16 of the layers",
        "97 (layers 11-16)",
        GEVA_2021,
        "values ordered by the largest probability in softmax(E v), coefficient 1",
    ),
    Figure(
        "top_values_agree",
        "of the same 100, those with a trigger that agrees",
        "46",
        GEVA_2021,
        "the promoted token follows one of the triggers that are kept (the paper keeps 50 or more a key)",
    ),
    Figure(
        "active",
        "active memories",
        "10-50 % of 4096, dropping toward layer 10",
        GEVA_2021,
        "share of channels with |m| |v| above the layer's threshold; with exact zeros (ReLU) that is m != 0",
    ),
    Figure(
        "zero_agreement",
        "layer output's top token is no memory's top token",
        "at least about 68 % in every layer",
        GEVA_2021,
        "share of prefixes where top(y) is top(v_i) for no channel i",
    ),
    Figure(
        "residual_final",
        "residual's top token is already the model's prediction",
        "about 1/3 in the bottom layers, fast growth from layer 10, about 95 % at 16 (read from a chart)",
        GEVA_2021,
        "share of prefixes where top(r) is the token that the model predicts; r is the residual that the FFN adds to",
    ),
    Figure(
        "residual",
        "case residual: o keeps r's token",
        "dominates, about 60-85 % (read from a chart)",
        GEVA_2021,
        "top(o) = top(r), and not top(y); o = r + y",
    ),
    Figure("ffn", "case ffn: o takes y's token", "the rarest", GEVA_2021, "top(o) = top(y), and not top(r)"),
    Figure("all_agree", "case agreement: r, y, o have one token", "no figure", GEVA_2021, "top(o) = top(y) = top(r)"),
    Figure(
        "composition",
        "case composition: o has a token of its own",
        "no figure",
        GEVA_2021,
        "top(o) is neither top(r) nor top(y)",
    ),
    Figure(
        "top10_share",
        "share of the ten largest contributions",
        "5-20 % (10 are 0.24 % of 4096 channels)",
        GEVA_2022,
        "sum of |m| |v| over the ten largest channels, over that of all channels",
    ),
)
