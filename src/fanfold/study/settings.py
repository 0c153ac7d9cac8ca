"""What a study compares: variants of the FFN, and the small language model around them that stays the same."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from ..spec import Spec

BUDGETS = ("params", "flops", "time")
DTYPES = ("fp32", "bf16")
ATTENTION_ONLY = "none"
DEFAULT_VARIANTS = (
    "relu", "relu2", "gelu_erf", "gelu_tanh", "silu", "glu", "bilinear", "reglu", "geglu", "swiglu", "linear", "none",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One FFN to compare.

    name    as it was written;  ffn  a name that `Spec.parse` knows ("linear": no activation), or "none": no FFN at all.
    layers  blocks of the model; None: the setup's (attention alone: as many as the budget gives).
    d_ff    None: what the budget gives.  bias  whether the projections have biases.
    """

    name: str
    ffn: str
    layers: int | None = None
    d_ff: int | None = None
    bias: bool = False

    @classmethod
    def parse(cls, text: str) -> Variant:
        """ "swiglu", or with settings: "swiglu:layers=6", "gelu_erf:bias=true", "relu:d_ff=300". Raises ValueError."""
        ffn, _, rest = text.strip().partition(":")
        values: dict[str, Any] = {}
        for part in filter(None, (p.strip() for p in rest.split("+"))):
            key, _, value = (p.strip() for p in part.partition("="))
            if key in ("layers", "d_ff") and value.isdecimal() and int(value) > 0:
                values[key] = int(value)
            elif key == "bias" and value in ("true", "false"):
                values[key] = value == "true"
            else:
                raise ValueError(f"variant {text!r}: {part!r} is not layers=N, d_ff=N, bias=true or bias=false")
        made = cls(name=text.strip(), ffn=ffn, **values)
        if made.ffn == ATTENTION_ONLY and (made.d_ff is not None or made.bias):
            raise ValueError(f"variant {text!r}: without an FFN there is no d_ff and no bias to set")
        if made.ffn != ATTENTION_ONLY:
            made.spec(d_model=8, d_ff=8)  # an unknown name is said now
        return made

    def spec(self, d_model: int, d_ff: int) -> Spec:
        """The FFN at these widths."""
        plain = Spec.parse(self.ffn, d_model=d_model, d_ff=d_ff)
        flags = {"up_bias": self.bias, "down_bias": self.bias, "gate_bias": self.bias and plain.gated}
        return dataclasses.replace(plain, **flags)

    @property
    def folder(self) -> str:
        """A name for files."""
        return "".join(c if c.isalnum() or c in "_-" else "-" for c in self.name)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything that is the same for all variants.

    d_model, n_layers, n_heads  of the model; d_ff  of the ungated FFN whose model sets the budget.
    budget      what is equal: "params", "flops" (forward, for each token), or "time" (equal parameters and equal
                training time, by the speed measured before).
    vocabulary  256: bytes; more: a byte-level BPE of so many tokens, made from the training text.
    sequence, batch, steps, warmup   tokens of a sequence, sequences of a step, steps, of them with rising rate.
    rates       learning rates to choose from; rate_share  of the steps that a trial of a rate takes.
    decay, clip weight decay of matrices; largest norm of the gradient.
    dtype       "bf16" runs matrix products under autocast.  threads  of one run (results depend on it in rounding).
    log_every, check_every   steps between lines of metrics, and between validations and checkpoints.
    check_tokens  of validation text that are read each time.
    """

    d_model: int = 160
    n_layers: int = 4
    n_heads: int = 5
    d_ff: int = 640
    budget: str = "params"
    vocabulary: int = 256
    sequence: int = 128
    batch: int = 8
    steps: int = 1200
    warmup: int = 60
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    rate_share: float = 0.25
    decay: float = 0.1
    clip: float = 1.0
    dtype: str = "fp32"
    threads: int = 1
    log_every: int = 20
    check_every: int = 200
    check_tokens: int = 65536

    def __post_init__(self) -> None:
        whole = ("d_model", "n_layers", "n_heads", "d_ff", "sequence", "batch", "steps", "warmup", "threads",
                 "log_every", "check_every", "check_tokens")  # fmt: skip
        for name in whole:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: expected a positive int")
        if self.d_model % self.n_heads or self.d_model // self.n_heads % 2:
            raise ValueError(f"d_model={self.d_model} and n_heads={self.n_heads}: a head must have a whole, even width")
        for name, known in (("budget", BUDGETS), ("dtype", DTYPES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is not known; known: {', '.join(known)}")
        if self.vocabulary < 256:
            raise ValueError(f"vocabulary={self.vocabulary}: expected 256 (bytes) or more (BPE)")
        if not self.rates or not all(math.isfinite(r) and r > 0 for r in self.rates):
            raise ValueError(f"rates={self.rates}: expected positive learning rates")
        if not 0 < self.rate_share <= 1:
            raise ValueError(f"rate_share={self.rate_share}: expected a share of the steps, above 0 and at most 1")
        if self.check_every % self.log_every:
            raise ValueError(f"check_every={self.check_every} must be a multiple of log_every={self.log_every}")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**dataclasses.asdict(self), "rates": list(self.rates)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Setup:
        """What `to_dict` gave. Raises ValueError on unknown keys."""
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ValueError(f"unknown setting {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        return cls(**{**data, "rates": tuple(data["rates"])} if "rates" in data else data)


QUICK: dict[str, Any] = {
    "d_model": 64, "n_layers": 2, "n_heads": 2, "d_ff": 256, "sequence": 64, "batch": 8, "steps": 200, "warmup": 20,
    "check_every": 100, "check_tokens": 8192, "rates": (4e-3,),
}  # fmt: skip
QUICK_VARIANTS = ("relu", "gelu_erf", "swiglu", "none")
