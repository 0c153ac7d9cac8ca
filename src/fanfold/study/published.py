"""What papers measured, to set beside a study: loss in nats per token at their scale, so only orders compare."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """A table of losses: {our name: held-out loss}."""

    source: str
    what: str
    losses: dict[str, float]


# T5-base on C4, d_model 768, d_ff 3072 without and 2048 with a gate; held-out log-perplexity after 524,288 steps.
SHAZEER = Published(
    "Shazeer 2020, arXiv:2002.05202, table 1",
    "T5-base, held-out log-perplexity, 524,288 steps, one run",
    {"relu": 1.677, "gelu_erf": 1.679, "silu": 1.683, "glu": 1.663, "bilinear": 1.648, "geglu": 1.633,
     "swiglu": 1.636, "reglu": 1.645},
)  # fmt: skip
# T5-base re-implemented, final validation loss; LiGLU is the bilinear form.
NARANG = Published(
    "Narang 2021, arXiv:2102.11972, table 1",
    "T5-base, final validation loss, one run",
    {"relu": 1.838, "gelu_erf": 1.838, "silu": 1.847, "glu": 1.814, "bilinear": 1.798, "geglu": 1.792,
     "reglu": 1.803, "swiglu": 1.789},
)  # fmt: skip
TABLES = (SHAZEER, NARANG)
