"""What a swap came to, in words: how many FFNs, why the others were left, and how far results are off."""

from __future__ import annotations

from typing import Any

from ..count import formats as stored
from .output import number, size, table

PAID_NOTHING = "PyTorch is as fast"  # how the reason begins where the swap was undone because it saved no time


def quantizes(format: str | None) -> bool:
    """Whether a swap to `format` has activations to choose, so that calibration text is of use."""
    from ..models.packing import integer

    return format is not None and integer(stored.get(format).name)


def on_purpose(row: dict[str, Any]) -> bool:
    """Whether an FFN was identified and verified, and left because PyTorch runs it as fast."""
    return row["status"] != "swapped" and row["spec"] is not None and row["reason"].startswith(PAID_NOTHING)


def failed(report: dict[str, Any]) -> str | None:
    """Why nothing was swapped, if that is a failure: the reason of the first FFN that was not left on purpose."""
    if report["n_swapped"]:
        return None
    return next((row["reason"] for row in _ffns(report) if not on_purpose(row)), None)


def _ffns(report: dict[str, Any]) -> list[dict[str, Any]]:
    from ..models.report import is_ffn

    return [row for row in report["rows"] if is_ffn(row["kind"])]


def headline(report: dict[str, Any]) -> str:
    """How many FFNs were identified and swapped, and what else; `report` is a SwapReport's to_dict()."""
    rows, swapped = _ffns(report), report["n_swapped"]
    identified = sum(row["spec"] is not None for row in rows)
    others = "".join(
        f", {report[f'n_{kind}_swapped']} of {report[f'n_{kind}']} {what}"
        for kind, what in (("linears", "other linears"), ("norms", "norms"))
        if report[f"n_{kind}"]
    )
    if identified == swapped:
        return f"{swapped} of {len(rows)} FFNs identified and swapped{others}"
    said = f"{identified} of {len(rows)} FFNs identified, {swapped} swapped"
    left = [row for row in rows if row["spec"] is not None and row["status"] != "swapped"]
    if all(on_purpose(row) for row in left):
        said += ": PyTorch is as fast or faster on this machine" + (" for the others" if swapped else "")
    return said + others


def reasons(report: dict[str, Any]) -> list[str]:
    """Each reason why an FFN, a linear or a norm was left, once, with the number of them that it holds for."""
    counts: dict[tuple[str, str], int] = {}
    for row in report["rows"]:
        if row["status"] != "swapped":
            key = (row["kind"] if row["kind"] in ("linear", "norm") else "FFN", row["reason"])
            counts[key] = counts.get(key, 0) + 1
    return [f"{n} {what}{'s' if n > 1 else ''} left as found: {reason}" for (what, reason), n in counts.items()]


def activations(report: dict[str, Any], details: bool = True) -> list[str]:
    """Where activations are not quantized and why (`details`); what that and the format come to: predictions, bytes."""
    out = [] if not report["notes"] else list(report["notes"])
    swapped = [row for row in report["rows"] if row["status"] == "swapped"]
    n_kept = sum(kind == "float" for row in swapped for kind in row["activations"].values())
    n_all = sum(len(row["activations"]) for row in swapped)
    if report["calibrated"] and n_all:
        out.append(
            f"activations measured on calibration text: int8 at {n_all - n_kept} of {n_all} matrices, else float"
        )
    out += _guarded(swapped) if details else []
    errors = [row["quantization_error"] for row in swapped if row["quantization_error"] is not None]
    if errors and n_all > n_kept:
        out.append(f"with the activations quantized too, outputs change by at most {number(max(errors))} (relative)")
    if report["argmax_changes"] is not None:
        out.append(f"next-token predictions that changed: {report['argmax_changes']} of {report['argmax_tokens']}")
    before, after = (sum(row[f"bytes_{side}"] or 0 for row in swapped) for side in ("before", "after"))
    if before and after:
        out.append(f"matrices: {size(before)} before, {size(after)} after")
    return out


def _guarded(swapped: list[dict[str, Any]]) -> list[str]:
    """A line for the matrices of one kind that keep float activations: their layers, and why, for the first of them."""
    from ..models.report import layer_place, together

    kinds: dict[tuple[str, bool, str], list[tuple[int | None, str]]] = {}
    for row in swapped:
        stem, layer = layer_place(row["path"])
        whys: dict[str, list[str]] = {}
        for role, kind in row["activations"].items():
            if kind == "float" and role in row["guard"]:
                whys.setdefault(row["guard"][role], []).append(role)
        for why, roles in whys.items():
            what = "" if row["kind"] == "linear" else f" {', '.join(roles)}"
            kinds.setdefault((stem, layer is None, what), []).append((layer, why))
    out = []
    for (stem, _, what), found in kinds.items():
        layers = [layer for layer, _ in found if layer is not None]
        more = f" (layer {layers[0]}; --json has all)" if len(layers) > 1 else ""
        out.append(f"  {together(stem, layers)}{what}: float, as {found[0][1]}{more}")
    return out


def errors(report: dict[str, Any]) -> list[str]:
    """The kernels' largest error and, where the weights were stored in a named format, what that changes by itself."""
    swapped = [row for row in report["rows"] if row["status"] == "swapped"]
    out = []
    ratios = [row["ratio"] for row in swapped if row["ratio"] is not None]
    if ratios:
        out.append(
            f"kernel error against float64 of the weights as stored: at most {number(max(ratios))} of what the "
            "rule allows"
        )
    by_format: dict[tuple[str, str], float] = {}
    for row in swapped:
        if row["format_error"] is not None:
            key = (row["format"], "a linear" if row["kind"] == "linear" else "an FFN")
            by_format[key] = max(by_format.get(key, 0.0), row["format_error"])
    out += [
        f"rounding the weights to {form} changes {what}'s output by at most {number(error)} (relative)"
        for (form, what), error in by_format.items()
    ]
    return out


def show(report: Any) -> None:
    """Print a SwapReport for people: like layers in one row, then what it comes to."""
    groups = report.grouped()
    firsts = [group.rows[0] for group in groups]
    rows = [
        [
            group.path,
            row.what,
            row.layout.describe() if row.layout else "–",
            row.format or "in place",
            row.activations_text.replace("-", "–"),
            row.backend or "–",
            row.status,
            group.largest("ratio").replace("-", "–"),
        ]
        for group, row in zip(groups, firsts)
    ]
    head = ["path", "what", "layout", "format", "activations", "backend", "status", "error/allowed"]
    if not any(row.activations for row in report.rows):
        place = head.index("activations")
        head, rows = [*head[:place], *head[place + 1 :]], [[*r[:place], *r[place + 1 :]] for r in rows]
    table("", head, rows, numbers=False)
    said = report.to_dict()
    remarks = dict.fromkeys(row.reason for row in report.rows if row.status == "swapped" and row.reason)
    for line in (headline(said), *reasons(said), *errors(said), *activations(said), *remarks):
        print(line)
