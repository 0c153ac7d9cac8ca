"""Whole models as numbers: the table of released models, and the totals of any model."""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass

from ..spec import Spec
from .block import Attention, Block
from .hardware import read_table

_VARIANTS = {"swiglu_clamped": "swiglu_oai"}  # the table's name -> the one that Spec.parse knows
_STACKS = "layers per stack"  # in a row's note: an encoder and a decoder, whose layers also attend to the encoder


@dataclass(frozen=True, kw_only=True)
class Model:
    """A Transformer, as far as its parameters go.

    ffn          of every layer; with experts, of one expert.
    attention    of every layer, None where its shapes are not in the table (multi-head latent attention).
    n_ffns, n_attentions   in the whole model: n_layers, but for encoder-decoders.
    n_experts, experts_per_token   0 without experts.
    tied         whether the output head is the embedding; None where that is not known.
    shared       whether all layers share one set of parameters (ALBERT).
    note, source, verified   of the table's row.
    """

    name: str
    ffn: Spec
    attention: Attention | None
    n_layers: int
    vocab: int
    n_ffns: int
    n_attentions: int
    n_experts: int = 0
    experts_per_token: int = 0
    tied: bool | None = None
    shared: bool = False
    note: str = ""
    source: str = ""
    verified: bool = True

    @property
    def slug(self) -> str:
        """The name as one types it: "Llama 2 7B" -> llama-2-7b."""
        return slug(self.name)

    @property
    def block(self) -> Block | None:
        """One layer, or None where attention is not known."""
        return None if self.attention is None else Block(ffn=self.ffn, attention=self.attention)

    @property
    def ffn_params(self) -> int:
        """Parameters of all FFNs, all experts and their routers (d_model per expert)."""
        one = self.ffn.n_params * max(self.n_experts, 1) + self.ffn.d_model * self.n_experts
        return one * (1 if self.shared else self.n_ffns)

    @property
    def attention_params(self) -> int | None:
        """Parameters of all attention, or None."""
        if self.attention is None:
            return None
        return self.attention.n_params * (1 if self.shared else self.n_attentions)

    @property
    def embedding_params(self) -> int:
        """vocab * d_model, once."""
        return self.vocab * self.ffn.d_model

    def n_params(self, tied: bool) -> int | None:
        """All parameters, the embedding counted once if `tied`, else twice; None where attention is not known.

        Norms and position embeddings are not counted.
        """
        attention = self.attention_params
        if attention is None:
            return None
        return self.ffn_params + attention + self.embedding_params * (1 if tied else 2)


def slug(name: str) -> str:
    """Lower case, everything else than letters, digits and dots as one dash."""
    return "-".join(p for p in re.split(r"[^a-z0-9.]+", name.lower()) if p)


@functools.cache
def table() -> dict[str, Model]:
    """{slug: Model} of the packaged table."""
    models = [_model(row) for row in read_table("models.csv")]
    return {m.slug: m for m in models}


def _model(row: dict[str, str]) -> Model:
    name, _, note = row["model"].partition(" (")
    note = note.rstrip(")")
    bias = row["ffn_bias"] == "yes"
    gated = row["gated"] == "yes"
    d_model, d_ff, n_layers = (int(row[k]) for k in ("d_model", "d_ff", "n_layers"))
    shape = {"d_model": d_model, "d_ff": d_ff, "up_bias": bias, "down_bias": bias}
    if gated:
        shape["gate_bias"] = bias
    if row["activation"] in _VARIANTS:
        spec = Spec.parse(_VARIANTS[row["activation"]], **shape)
    else:
        spec = Spec(activation=row["activation"], gated=gated, **shape)
    attention = None
    if row["n_kv_heads"].isdecimal():
        heads, kv, head_dim = (int(row[k]) for k in ("n_heads", "n_kv_heads", "head_dim"))
        attention = Attention(d_model=d_model, n_heads=heads, n_kv_heads=kv, head_dim=head_dim)
    stacks = _STACKS in note
    return Model(
        name=name,
        ffn=spec,
        attention=attention,
        n_layers=n_layers,
        vocab=int(row["vocab"]),
        n_ffns=n_layers * (2 if stacks else 1),
        n_attentions=n_layers * (3 if stacks else 1),
        n_experts=int(row["n_experts"]),
        experts_per_token=int(row["experts_per_token"]),
        tied={"yes": True, "no": False}.get(row["tied_embeddings"]),
        shared=name.startswith("ALBERT"),
        note=note,
        source=row["source"],
        verified=row["verified"] == "yes",
    )


def get(name: str) -> Model:
    """The model of the table called `name`; case and punctuation do not count ("llama-2-7b", "Llama 2 7B").

    Raises ValueError, naming the nearest ones, when there is none.
    """
    models = table()
    wanted = slug(name)
    if wanted in models:
        return models[wanted]
    bare = {re.sub(r"[^a-z0-9.]", "", key): key for key in models}
    key = bare.get(re.sub(r"[^a-z0-9.]", "", wanted))
    if key is not None:
        return models[key]
    near = difflib.get_close_matches(wanted, models, n=5, cutoff=0.4)
    known = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(list(models)[:8])}, …"
    raise ValueError(f"model {name!r} is not among the {len(models)} of the table; {known}; all: fanfold size --list")
