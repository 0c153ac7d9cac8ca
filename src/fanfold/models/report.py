"""The report of a swap: a row per FFN, printed as a table or as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Iterable
from typing import Any

from ..layout import Layout
from ..spec import Spec
from .norms import RmsNorm
from .states import LinearState


@dataclasses.dataclass(kw_only=True)
class SwapRow:
    """One FFN of the report, or one other linear (kind "linear": no spec or layout), or norm (kind "norm").

    status  "swapped" or "left" (then `reason` says why).  backend  what ran in the verification.
    error, error_torch  relative errors of our output and of PyTorch's own against float64;
    ratio   our error as a share of what the tolerance rule allows (at most 1).
    format_error        what storing the weights in `format` changes by itself (None for format=None).
    quantization_error  the same with the activations quantized too, where they are.
    activations  {role: "int8" or "float"} where the weights are integer codes;  guard  {role: why}.
    bytes_before, bytes_after  of its matrices in memory (None for format=None); with a tied table, that one beside it.
    save    what forward keeps while it is trained (`FeedForward(save=…)`); None: PyTorch's own ops run then.
    gradient_ratio  the largest error of a gradient as a share of what the rule allows, where it was verified.
    shape  (n_in, n_out) of a linear.  norm  what a norm is.
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
    quantization_error: float | None = None
    activations: dict[str, str] = dataclasses.field(default_factory=dict)
    guard: dict[str, str] = dataclasses.field(default_factory=dict)
    bytes_before: int | None = None
    bytes_after: int | None = None
    save: str | None = None
    gradient_ratio: float | None = None
    shape: tuple[int, int] | None = None
    norm: RmsNorm | None = None
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
        out["norm"] = dataclasses.asdict(self.norm) if self.norm else None
        return out | {"calls": self.calls, "stepped_aside": self.stepped_aside}

    @property
    def what(self) -> str:
        """What it computes, in words."""
        if self.shape is not None:
            return f"linear {self.shape[0]}->{self.shape[1]}"
        if self.norm is not None:
            return self.norm.describe()
        return self.spec.describe() if self.spec else "?"

    @property
    def activations_text(self) -> str:
        kinds = dict.fromkeys(self.activations.values())
        if len(kinds) < 2:
            return next(iter(kinds), "-")
        return ", ".join(f"{role} {kind}" for role, kind in self.activations.items())


@dataclasses.dataclass
class RowGroup:
    """Rows that print as one.  stem  their path, "{}" for the layer's number;  layers  those numbers, if it has one."""

    stem: str
    rows: list[SwapRow]
    layers: list[int] = dataclasses.field(default_factory=list)

    @property
    def path(self) -> str:
        """The path, like rows' in one: "model.layers.0–29.mlp"."""
        return together(self.stem, self.layers)

    def largest(self, name: str, form: str = ".2f") -> str:
        """The largest of a number of the rows (NaN above all), as text; "-" where none has it."""
        values = [v for v in (getattr(row, name) for row in self.rows) if v is not None]
        return format(max(values, key=lambda v: (v != v, v)), form) if values else "-"


def layer_place(path: str) -> tuple[str, int | None]:
    """(the path with "{}" for the first number in it, that number): that of the layer."""
    parts = path.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    if at is None:
        return path, None
    layer, parts[at] = int(parts[at]), "{}"
    return ".".join(parts), layer


def together(stem: str, layers: Collection[int]) -> str:
    """One path for those of several layers: "model.layers.0–29.mlp"."""
    return (stem.replace("{}", runs(layers), 1) if layers else stem) or "(root)"


def runs(numbers: Iterable[int]) -> str:
    """Whole numbers in short: "0–3, 5"."""
    out: list[list[int]] = []
    for n in sorted(set(numbers)):
        if out and n == out[-1][1] + 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in out)


@dataclasses.dataclass(kw_only=True)
class SwapReport:
    """What `swap` did: a row per FFN, and per other linear and norm with linears="all". Prints as a table, in which
    like layers are one row, with the largest of their errors.

    calibrated      whether activations were chosen on calibration inputs.
    argmax_changes  next-token predictions on them that the swap changed, of `argmax_tokens`; None if not counted.
    notes           what else is to be known.
    """

    rows: list[SwapRow]
    calibrated: bool = False
    argmax_changes: int | None = None
    argmax_tokens: int = 0
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def ffns(self) -> list[SwapRow]:
        return [row for row in self.rows if is_ffn(row.kind)]

    @property
    def linears(self) -> list[SwapRow]:
        return [row for row in self.rows if row.kind == "linear"]

    @property
    def norms(self) -> list[SwapRow]:
        return [row for row in self.rows if row.kind == "norm"]

    @property
    def n_swapped(self) -> int:
        """FFNs that were swapped."""
        return sum(row.status == "swapped" for row in self.ffns)

    @property
    def n_linears_swapped(self) -> int:
        """Linears beside the FFNs' that were swapped."""
        return sum(row.status == "swapped" for row in self.linears)

    @property
    def n_norms_swapped(self) -> int:
        """RMS norms that were swapped."""
        return sum(row.status == "swapped" for row in self.norms)

    def to_dict(self) -> dict[str, Any]:
        return {
            "n_swapped": self.n_swapped,
            "n_ffns": len(self.ffns),
            "n_linears_swapped": self.n_linears_swapped,
            "n_linears": len(self.linears),
            "n_norms_swapped": self.n_norms_swapped,
            "n_norms": len(self.norms),
            "calibrated": self.calibrated,
            "argmax_changes": self.argmax_changes,
            "argmax_tokens": self.argmax_tokens,
            "notes": list(self.notes),
            "rows": [row.to_dict() for row in self.rows],
        }

    def grouped(self) -> list[RowGroup]:
        """The rows for people: those of layers that differ in their number and their errors alone are one."""
        groups: dict[Hashable, RowGroup] = {}
        for row in self.rows:
            place = layer_place(row.path)
            key = (place[0], place[1] is None, row.kind, row.what, row.layout, row.format, row.activations_text,
                   row.backend, row.status, row.save, _reason(row), row.calls)  # fmt: skip
            group = groups.setdefault(key, RowGroup(place[0], []))
            group.rows.append(row)
            if place[1] is not None:
                group.layers.append(place[1])
        return list(groups.values())

    def __str__(self) -> str:
        groups = self.grouped()
        firsts = [group.rows[0] for group in groups]
        columns = {
            "path": [group.path for group in groups],
            "what": [row.what for row in firsts],
            "layout": [row.layout.describe() if row.layout else "-" for row in firsts],
            "format": [row.format or "in place" for row in firsts],
            "activations": [row.activations_text for row in firsts],
            "backend": [row.backend or "-" for row in firsts],
            "status": [row.status for row in firsts],
            "error/allowed": [group.largest("ratio") for group in groups],
            "save": [row.save or "-" for row in firsts],
            "gradient error/allowed": [group.largest("gradient_ratio") for group in groups],
            "format error": [group.largest("format_error", ".1e") for group in groups],
            "calls": [str(row.calls) if row.calls or row.stepped_aside else "-" for row in firsts],
            "reason": [_reason(row) for row in firsts],
        }
        if not any(row.activations for row in self.rows):
            del columns["activations"]
        if not any(row.save for row in self.rows):
            del columns["save"], columns["gradient error/allowed"]
        widths = {name: max(map(len, (name, *cells))) for name, cells in columns.items()}
        lines = [columns.keys(), *zip(*columns.values())]
        text = ["  ".join(c.ljust(w) for c, w in zip(line, widths.values())).rstrip() for line in lines]
        return "\n".join([*text, *self.summary()])

    def summary(self) -> list[str]:
        """What the report comes to, in lines; the last one counts what was swapped."""
        lines = list(self.notes)
        lines += list(
            dict.fromkeys(
                f"{row.path}, {role}: float activations: {row.guard.get(role, 'asked for')}"
                for row in self.rows
                for role, kind in row.activations.items()
                if kind == "float" and role in row.guard
            )
        )
        if self.argmax_changes is not None:
            lines.append(f"{self.argmax_changes} of {self.argmax_tokens} next-token predictions changed")
        sized = [row for row in self.rows if row.status == "swapped" and row.bytes_before and row.bytes_after]
        if sized:
            before, after = (sum(getattr(r, n) or 0 for r in sized) for n in ("bytes_before", "bytes_after"))
            lines.append(f"their matrices: {before / 1e6:.1f} MB -> {after / 1e6:.1f} MB")
        counts = [f"{self.n_swapped} of {len(self.ffns)} FFNs"]
        if self.linears:
            counts.append(f"{self.n_linears_swapped} of {len(self.linears)} other linears")
        if self.norms:
            counts.append(f"{self.n_norms_swapped} of {len(self.norms)} norms")
        return [*lines, f"{listed(counts)} swapped"]


def is_ffn(kind: str) -> bool:
    """Whether a row of this kind is an FFN, and not what else a model is made of."""
    return kind not in ("linear", "norm")


def listed(items: list[str]) -> str:
    """Items in a row: "a, b and c"."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if items[1:] else items)


def _reason(row: SwapRow) -> str:
    aside = [f"own code {n}x: {r}" for r, n in row.stepped_aside.items()]
    return "; ".join([row.reason] * bool(row.reason) + aside)
