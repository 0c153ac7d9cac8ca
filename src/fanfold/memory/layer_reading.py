"""`LayerReading`: one layer at every token of a prompt. T tokens, D d_model, F d_ff."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .anatomy import Layer
from .parts import Channel

if TYPE_CHECKING:
    from .reading import Reading


@dataclasses.dataclass
class LayerReading:
    """One layer at every token of the prompt, float32 copies.

    x, y  what the FFN read and gave [T, D].
    gate, content, coefficient  [T, F] as `Coefficients`; gate is None without one.
    value_norm  ‖v‖ [F];  size  |m| · ‖v‖ [T, F], how much each channel contributes.
    """

    layer: Layer
    x: Tensor
    y: Tensor
    gate: Tensor | None
    content: Tensor
    coefficient: Tensor
    value_norm: Tensor
    reading: Reading = dataclasses.field(repr=False)

    @property
    def size(self) -> Tensor:
        return self.coefficient.abs() * self.value_norm

    def effect(self, token: int | str, position: int, centred: bool = True) -> Tensor:
        """[F] float64: what each channel adds to the logit of `token` at `position`, m_i · (v_i . e_t) through the
        norms on the way, with their scales as they were there.

        centred  on the logit less the mean of all: what raises all alike changes no probability; False: on the logit.
        Raises ValueError where there are no direct effects.
        """
        return self.effects([(self.reading.at(position), self.reading.token(token))], centred)[0]

    def effects(self, where: list[tuple[int, int]], centred: bool = True) -> Tensor:
        """`effect` for several (position, token id) -> [n, F] float64."""
        u_ND = torch.stack([self.reading.path_of(self.layer, at, token, centred)[0] for at, token in where])
        return self.coefficient[[at for at, _ in where]].double() * (u_ND @ self.layer.weights().down.double())

    def strongest(self, at: int, effect: Tensor | None, top: int, by: str | None = None) -> list[Channel]:
        """The channels with the largest |effect| [F], or size where that is None or asked for by "size"."""
        size = self.size[at]
        key = size if by == "size" or effect is None else effect.abs()
        best = key.topk(min(top, len(key))).indices
        gates = [None] * len(best) if self.gate is None else self.gate[at, best].tolist()
        effects = [None] * len(best) if effect is None else effect[best].tolist()
        numbers = (self.coefficient[at, best].tolist(), gates, self.content[at, best].tolist(), size[best].tolist())
        return [Channel(self.layer.index, c, *row) for c, *row in zip(best.tolist(), *numbers, effects)]
