"""How the matrices of an FFN lie in a file or a module, and how to cut them into gate, up and down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# D d_model, F d_ff
SEPARATE = "separate"  # gate [F,D] and up [F,D] are two matrices (or there is no gate)
GATE_UP = "[gate;up]"  # one matrix [2F,D]: the first F rows are gate (Phi-3)
UP_GATE = "[up;gate]"  # one matrix [2F,D]: the first F rows are up
GATE_UP_INTERLEAVED = "interleaved gate,up"  # rows gate 0, up 0, gate 1, up 1, …
UP_GATE_INTERLEAVED = "interleaved up,gate"
INTERLEAVED = (GATE_UP_INTERLEAVED, UP_GATE_INTERLEAVED)
FUSED = (GATE_UP, UP_GATE, *INTERLEAVED)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where gate and up lie, and which way round the matrices are stored.

    order       one of SEPARATE or FUSED.
    transposed  False: [out, in] as nn.Linear stores it; True: [in, out] as GPT-2's Conv1D does.
    """

    order: str = SEPARATE
    transposed: bool = False

    def __post_init__(self) -> None:
        if self.order not in (SEPARATE, *FUSED):
            raise ValueError(f"layout order {self.order!r} is not known; known: {', '.join((SEPARATE, *FUSED))}")

    def describe(self) -> str:
        return self.order + (", [in,out]" if self.transposed else "")

    def split(self, fused: Any) -> tuple[Any, Any]:
        """(gate, up), each a view of `fused`: a matrix [2F, D] ([..., 2F] if transposed) or a bias [2F].

        Works on anything that slices like an array. Raises ValueError if the layout is separate or 2F is odd.
        """
        if self.order not in FUSED:
            raise ValueError(f"layout {self.order!r} has no fused matrix to split")
        size = fused.shape[-1] if self.transposed else fused.shape[0]
        if size % 2:
            raise ValueError(f"a fused gate and up needs an even number of rows, got shape {tuple(fused.shape)}")

        def cut(start: int, stop: int | None, step: int) -> Any:
            part = slice(start, stop, step)
            return fused[..., part] if self.transposed else fused[part]

        if self.order in (GATE_UP, UP_GATE):
            first, second = cut(0, size // 2, 1), cut(size // 2, size, 1)
        else:
            first, second = cut(0, None, 2), cut(1, None, 2)
        return (first, second) if self.order in (GATE_UP, GATE_UP_INTERLEAVED) else (second, first)
