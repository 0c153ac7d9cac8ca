"""What a swap came to, in words: how many FFNs, why the others were left, and how far results are off."""

from __future__ import annotations

from typing import Any

from .output import number, table

PAID_NOTHING = "PyTorch is as fast"  # how the reason begins where the swap was undone because it saved no time


def on_purpose(row: dict[str, Any]) -> bool:
    """Whether an FFN was identified and verified, and left because PyTorch runs it as fast."""
    return row["status"] != "swapped" and row["spec"] is not None and row["reason"].startswith(PAID_NOTHING)


def failed(report: dict[str, Any]) -> str | None:
    """Why nothing was swapped, if that is a failure: the reason of the first FFN that was not left on purpose."""
    if report["n_swapped"]:
        return None
    return next((row["reason"] for row in report["rows"] if not on_purpose(row)), None)


def headline(report: dict[str, Any]) -> str:
    """How many FFNs were identified and swapped; `report` is a SwapReport's to_dict()."""
    rows, swapped = report["rows"], report["n_swapped"]
    identified = sum(row["spec"] is not None for row in rows)
    if identified == swapped:
        return f"{swapped} of {len(rows)} FFNs identified and swapped"
    said = f"{identified} of {len(rows)} FFNs identified, {swapped} swapped"
    left = [row for row in rows if row["spec"] is not None and row["status"] != "swapped"]
    if all(on_purpose(row) for row in left):
        said += ": PyTorch is as fast or faster on this machine" + (" for the others" if swapped else "")
    return said


def reasons(report: dict[str, Any]) -> list[str]:
    """Each reason why an FFN was left, once, with the number of FFNs that it holds for."""
    counts: dict[str, int] = {}
    for row in report["rows"]:
        if row["status"] != "swapped":
            counts[row["reason"]] = counts.get(row["reason"], 0) + 1
    return [f"{n} FFN{'s' if n > 1 else ''} left as found: {reason}" for reason, n in counts.items()]


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
    by_format: dict[str, float] = {}
    for row in swapped:
        if row["format_error"] is not None:
            by_format[row["format"]] = max(by_format.get(row["format"], 0.0), row["format_error"])
    out += [
        f"rounding the weights to {form} changes an FFN's output by at most {number(error)} (relative)"
        for form, error in by_format.items()
    ]
    return out


def show(report: Any) -> None:
    """Print a SwapReport for people: a row per FFN, then what it comes to."""
    rows = [
        [
            row.path or "(root)",
            row.spec.describe() if row.spec else "?",
            row.layout.describe() if row.layout else "?",
            row.format or "in place",
            row.backend or "–",
            row.status,
            "–" if row.ratio is None else f"{row.ratio:.2f}",
        ]
        for row in report.rows
    ]
    table("", ["path", "ffn", "layout", "format", "backend", "status", "error/allowed"], rows, numbers=False)
    said = report.to_dict()
    remarks = dict.fromkeys(row.reason for row in report.rows if row.status == "swapped" and row.reason)
    for line in (headline(said), *reasons(said), *errors(said), *remarks):
        print(line)
