"""Superposition as one HTML page, in the style of every report: of a model's FFNs, or of any list of sections."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..canvas import svg
from ..report.render import render
from . import classes, figures_ffn


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells are text; `numbers` are the columns set to the right, those of short cells. `title` is what its fold is
    called."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = "The numbers"

    @property
    def numbers(self) -> set[int]:
        return {i for i in range(1, len(self.header)) if all(len(row[i]) <= 16 for row in self.rows)}


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading, paragraphs, a picture (a Matplotlib figure) with what it shows in words, and a table."""

    title: str
    text: Sequence[str] = ()
    figure: Any = None
    alt: str = ""
    table: Table | None = None


def page(title: str, facts: Sequence[tuple[str, str]], sections: Iterable[Section]) -> str:
    """HTML that opens from disk. Raises ValueError for a picture without words for those who cannot see it."""
    shown = []
    for i, section in enumerate(sections):
        if section.figure is not None and not section.alt:
            raise ValueError(f"section {section.title!r} has a picture without alt text")
        picture = None if section.figure is None else _address(svg(section.figure, str(i)))
        shown.append(
            {
                "title": section.title,
                "text": section.text,
                "picture": picture,
                "alt": section.alt,
                "table": section.table,
            }
        )
    return render(
        "superposition.html.j2",
        title=title,
        data={},
        styles=("superposition.css",),
        images=True,
        facts=facts,
        sections=shown,
    )


def _address(text: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(text.encode()).decode()


def of_model(document: dict[str, Any], name: str) -> str:
    """The page of what `real.measure` found in the model called `name`."""
    rows = document["layers"]
    first = rows[0]
    facts = [
        ("Model", name),
        ("Layers", str(len(rows))),
        ("FFN", str(first["ffn"]).replace("->", "→")),
        ("Channels per dimension", f"{first['d_ff'] / first['d_model']:.2f}"),
    ]
    return page(f"Superposition in {name}", facts, model_sections(document, name))


def model_sections(document: dict[str, Any], name: str) -> list[Section]:
    """Crowding, and the input-output classes of channels, by layer."""
    folded = sum(r["norm"] is not None for r in document["layers"])
    keys = (
        f"Keys are taken as directions of the residual, the gain of the norm before the FFN multiplied in ({folded} of "
        f"{len(document['layers'])} layers have one)."
    )
    return [
        Section(
            title=f"How crowded the directions are: {name}",
            text=[
                "An FFN has more keys and values than the residual has dimensions, so they cannot all be orthogonal. "
                "Interference is the sum of squared cosines to all others; random directions of the same shape are the "
                "dashed line, the dotted one is the least that geometry allows.",
                keys,
            ],
            figure=figures_ffn.crowding(document, name),
            alt="Interference, nearest neighbours and effective rank by layer, beside random directions",
            table=crowding_table(document),
        ),
        Section(
            title=f"What channels do with what they read: {name}",
            text=[
                "Input-output classes of Gerstner & Schütze 2025 from the cosines of each channel's keys and value. "
                "Enrichment writes more of the direction that the channel reads, depletion takes it away; conditional: "
                "the gate reads another direction than up; proportional change: only the gate reads the value's "
                f"direction. |cos| ≥ {document['threshold']:g} counts as the same direction; that this is the paper's "
                "threshold is from memory.",
            ],
            figure=figures_ffn.channel_classes(document, name),
            alt="Share of channels in each input-output class, and mean cosines of gate, up and value, by layer",
            table=classes_table(document),
        ),
    ]


_PARTS = ("gate", "up", "value")


def crowding_table(document: dict[str, Any]) -> Table:
    """Interference over that of random directions, nearest neighbour, effective rank, features per dimension."""
    parts = [p for p in _PARTS if p in document["layers"][0]]
    header = ["layer"]
    for what in ("interference, × random", "nearest |cos|", "effective rank", "features per dimension"):
        header += [f"{what}: {p}" for p in (*parts, "random") if not (p == "random" and what.startswith("interf"))]
    rows = []
    for r in document["layers"]:
        cells = [str(r["layer"]), *(f"{r[p]['interference'] / r['random']['interference']:.2f}" for p in parts)]
        cells += [f"{r[p]['nearest']:.2f}" for p in (*parts, "random")]
        cells += [f"{r[p]['effective_rank']:.0f}" for p in (*parts, "random")]
        cells += [f"{r[p]['features_per_dimension']:.2f}" for p in (*parts, "random")]
        rows.append(cells)
    return Table(header=header, rows=rows)


def classes_table(document: dict[str, Any]) -> Table:
    """Channels in each class, and the mean cosines."""
    cosines = list(document["layers"][0]["channels"]["cosines"])
    rows = [
        [
            str(r["layer"]),
            *(str(r["channels"]["classes"][kind]) for kind in classes.CLASSES),
            *(f"{r['channels']['cosines'][c]['mean']:+.2f}".replace("-", "−") for c in cosines),
        ]
        for r in document["layers"]
    ]
    return Table(header=["layer", *classes.CLASSES, *(f"mean cos({c})" for c in cosines)], rows=rows)
