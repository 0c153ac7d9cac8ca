"""The report of a swap: a row per FFN, printed as a table or as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..layout import Layout
from ..spec import Spec
from .states import LinearState


@dataclasses.dataclass(kw_only=True)
class SwapRow:
    """One FFN of the report.

    status  "swapped" or "left" (then `reason` says why).  backend  what ran in the verification.
    error, error_torch  relative errors of our output and of PyTorch's own against float64;
    ratio   our error as a share of what the tolerance rule allows (at most 1).
    format_error  what storing the weights in `format` changes by itself (None for format=None).
    """

    path: str
    kind: str
    spec: Spec | None
    layout: Layout | None
    format: str | None
    backend: str | None
    status: str
    reason: str
    error: float | None = None
    error_torch: float | None = None
    ratio: float | None = None
    format_error: float | None = None
    states: list[LinearState] = dataclasses.field(default_factory=list, repr=False)

    @property
    def calls(self) -> int:
        """Calls since the swap that ran on our kernels."""
        return sum(state.calls for state in self.states)

    @property
    def stepped_aside(self) -> dict[str, int]:
        """{reason: calls} since the swap that ran the module's own code."""
        out: dict[str, int] = {}
        for state in self.states:
            for reason, count in state.aside.items():
                out[reason] = out.get(reason, 0) + count
        return out

    def to_dict(self) -> dict[str, Any]:
        names = [f.name for f in dataclasses.fields(self) if f.name != "states"]
        out = {name: getattr(self, name) for name in names}
        out["spec"] = self.spec.to_dict() if self.spec else None
        out["layout"] = dataclasses.asdict(self.layout) if self.layout else None
        return out | {"calls": self.calls, "stepped_aside": self.stepped_aside}


@dataclasses.dataclass(kw_only=True)
class SwapReport:
    """What `swap` did, a row per FFN; prints as a table."""

    rows: list[SwapRow]

    @property
    def n_swapped(self) -> int:
        return sum(row.status == "swapped" for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        return {"n_swapped": self.n_swapped, "n_ffns": len(self.rows), "rows": [row.to_dict() for row in self.rows]}

    def __str__(self) -> str:
        head = [
            "path",
            "ffn",
            "layout",
            "format",
            "backend",
            "status",
            "error/allowed",
            "format error",
            "calls",
            "reason",
        ]
        lines = [head] + [
            [
                row.path or "(root)",
                row.spec.describe() if row.spec else "?",
                row.layout.describe() if row.layout else "?",
                row.format or "in place",
                row.backend or "-",
                row.status,
                "-" if row.ratio is None else f"{row.ratio:.2f}",
                "-" if row.format_error is None else f"{row.format_error:.1e}",
                str(row.calls) if row.calls or row.stepped_aside else "-",
                "; ".join(
                    [row.reason] * bool(row.reason) + [f"own code {n}x: {r}" for r, n in row.stepped_aside.items()]
                ),
            ]
            for row, aside in ((row, row.stepped_aside.items()) for row in self.rows)
        ]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        text = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in lines]
        return "\n".join([*text, f"{self.n_swapped} of {len(self.rows)} FFNs swapped"])
