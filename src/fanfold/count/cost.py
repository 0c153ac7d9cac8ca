"""`cost`: what an FFN, a block or a whole model costs, and what bounds it. Each figure with formula and unit."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..spec import Spec
from . import ffn, formats, models, parts, roof
from .block import Block
from .figures import Figure, Figures
from .hardware import Hardware, Links
from .models import Model
from .settings import Settings, check_split, settings


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What `cost` found: sections of figures; made by `cost`.

    what        the thing, in words.       settings  the conditions.
    sections    {"ffn", "attention", "block", "model", …: Figures}; the last one is the whole.
    bound       what binds the whole: "memory", "compute" or "unknown".
    bytes_by_format   {format: bytes of the FFN's weights}.
    saved_bytes       {save: bytes kept for backward by the FFN}, with "autograd" those that PyTorch's own ops keep;
                      recompute_flop {save: FLOPs that backward repeats}.
    notes       what was left out or assumed, one sentence each.
    """

    what: str
    spec: Spec
    settings: Settings
    sections: dict[str, Figures]
    bound: str
    bytes_by_format: dict[str, int]
    saved_bytes: dict[str, int]
    recompute_flop: dict[str, int]
    notes: list[str] = field(default_factory=list)

    @property
    def whole(self) -> Figures:
        """The figures of the whole thing."""
        return list(self.sections.values())[-1]

    def __getitem__(self, key: str) -> Any:
        """The value of the whole's figure `key`. Raises KeyError, naming the known ones."""
        return self.whole[key].value

    def figure(self, key: str, section: str | None = None) -> Figure:
        """A figure with its formula, of the whole or of a section."""
        return (self.whole if section is None else self.sections[section])[key]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, units in the keys."""
        return {
            "what": self.what,
            "spec": self.spec.to_dict(),
            "settings": self.settings.to_dict(),
            **{name: figures.to_dict() for name, figures in self.sections.items()},
            "bound": self.bound,
            "ffn_weight_bytes_by_format": dict(self.bytes_by_format),
            "ffn_saved_bytes_by_save": dict(self.saved_bytes),
            "ffn_recompute_flop_by_save": dict(self.recompute_flop),
            "notes": list(self.notes),
        }

    def why(self) -> list[str]:
        """Every figure as one line: section, label, formula, the numbers put in, the value."""
        return [f"{name}: {line}" for name, figures in self.sections.items() for line in figures.why()]

    def __str__(self) -> str:
        s = self.settings
        place = f", {s.device.slug}" if s.device else ""
        lines = [f"{self.what}; tokens: {s.tokens}, format: {s.form.name}, tp: {s.tp}{place}"]
        for f in self.whole.values():
            value = (
                f.note if f.value is None else f"{f.value:,.0f}" if float(f.value).is_integer() else f"{f.value:.6g}"
            )
            lines.append(f"  {f.label}: {value} {f.unit}".rstrip())
        return "\n".join(lines)


def cost(
    what: Spec | Block | Model | str | os.PathLike[str],
    tokens: int = 1,
    format: str = "bf16",
    hardware: str | Hardware | None = None,
    *,
    group: int | None = None,
    tp: int = 1,
    context: int = 2048,
    sequences: int | None = None,
    dtype: str | None = None,
    compute: str | None = None,
    links: Links | None = None,
    nodes: int | None = None,
    variant: str | None = None,
) -> Cost:
    """Count what something costs: parameters, FLOPs, bytes, activations, and the floor of its time.

    floor = max(bytes moved / bandwidth, FLOPs / peak)

    what       a Spec; a Block (attention and FFN); a Model; the name of a released model ("llama-2-7b"); a config.json
               or a folder with one.
    tokens     processed together: 1 in decode, a prompt's length in prefill.
    format     of the weights: fp32 bf16 fp16 fp8 int8 int4 (with group 32, 64, 128) q8_0 q4_1 q4_0.
    hardware   None (no times), a device of the table ("h200"), or "this": the machine it runs on, measured once.
    tp         ranks that share each matrix; each FFN and each attention then ends in one all-reduce.
    context    positions that a token attends to; sequences: how many contexts there are, by default one a token.
    dtype      of the activations; default bf16, or the format's own if that is a float. compute: dtype of the products
               at their fastest; default by format, integer formats int8.
    links      of the devices, in place of the table's.
    nodes      that the ranks stand on, as many on each; default: as few as hold them.
    variant    for a config.json of an unknown model type.
    Units: bytes; FLOP with one multiply-add = 2; seconds. Counts are exact ints; times are lower bounds.

    Raises ValueError, naming the known values, for a count below 1, an unknown name, or a width that tp does not
    divide. Sources: roofline, Williams 2009; counts, Shazeer 2020, arXiv:2002.05202, and Anthony 2024,
    arXiv:2401.14489.
    """
    s = settings(
        tokens=tokens, format=format, group=group, hardware=hardware, tp=tp, context=context, sequences=sequences,
        dtype=dtype, compute=compute, links=links, nodes=nodes,
    )  # fmt: skip
    return count(resolve(what, variant), s)


def resolve(what: Any, variant: str | None = None) -> Spec | Block | Model:
    """What `cost` counts: names and paths looked up. Raises ValueError."""
    if isinstance(what, (Spec, Block, Model)):
        return what
    if not isinstance(what, (str, os.PathLike)):
        raise ValueError(f"{what!r} is {type(what).__name__}: expected a Spec, a Block, a Model, a name or a path")
    text = os.fspath(what)
    if text.lower().endswith(".gguf"):
        raise ValueError(f"{text!r} is a GGUF file: expected a model of the table, a config.json or a folder with one")
    if text.endswith(".json") or os.sep in text or Path(text).is_dir():
        from . import config

        return config.read(text, variant)
    return models.get(text)


def count(what: Spec | Block | Model, s: Settings) -> Cost:
    """`cost` of something resolved, under settings that were checked."""
    spec = what if isinstance(what, Spec) else what.ffn
    if s.tp > 1:
        check_split(spec.d_ff, s.tp, s.form.group)
        attention = None if isinstance(what, Spec) else what.attention
        if attention is not None and attention.n_heads % s.tp:
            works = [n for n in range(1, attention.n_heads + 1) if attention.n_heads % n == 0]
            raise ValueError(f"{attention.n_heads} heads cannot be split over {s.tp} ranks: use tp in {works}")
    notes: list[str] = []
    if isinstance(what, Spec):
        sections, title = {"ffn": parts.ffn_part(what, s)}, what.describe()
    elif isinstance(what, Block):
        sections, title = parts.block_parts(what, _together(what, s)), f"block of {what.ffn.describe()}"
    else:
        sections = parts.model_parts(what, _together(what, s), notes)
        title = f"{what.name}: {what.n_layers} layers of {spec.describe()}"
    _device_notes(s, notes)
    whole = list(sections.values())[-1]
    _fit_note(whole, s, notes)
    return Cost(
        what=title,
        spec=spec,
        settings=s,
        sections=sections,
        bound=roof.bound(whole),
        bytes_by_format={name: formats.ffn_bytes(spec, name) for name in formats.FORMATS},
        saved_bytes={save: ffn.saved_bytes(spec, s.tokens, save, s.dtype) for save in ffn.KEEPERS},
        recompute_flop={save: s.tokens * ffn.recompute_flops_per_token(spec, save) for save in ffn.SAVES},
        notes=notes,
    )


def _together(what: Block | Model, s: Settings) -> Settings:
    """Settings with the bytes of all parts as the working set, for a device whose rate depends on that."""
    if s.device is None or not s.device.read_rates:
        return s
    sections = parts.block_parts(what, s) if isinstance(what, Block) else parts.model_parts(what, s, [])
    return s.replace(working_set=list(sections.values())[-1].value("moved_bytes"))


def _fit_note(whole: Figures, s: Settings, notes: list[str]) -> None:
    """Say so if a device cannot hold its share of the weights."""
    room = s.device.memory_bytes if s.device is not None else None
    held = whole.value("weight_bytes") / s.tp
    if room is not None and held > room:
        per = f" on each of {s.tp} devices" if s.tp > 1 else ""
        notes.append(f"does not fit: {held / 1e9:.1f} GB of weights{per} on a {room / 1e9:.0f} GB device")


def _device_notes(s: Settings, notes: list[str]) -> None:
    device = s.device
    if device is None:
        return
    if device.verified != "yes":
        said = f" ({device.from_memory})" if device.from_memory else ""
        notes.append(f"figures of {device.slug} were not all seen in a source{said}")
    if device.kind == "CPU" and device.notes:
        notes.append(f"{device.slug}: {device.notes}")
