"""What is kept of every channel while text streams by: its strongest triggers, and statistics of its coefficient.

Memory is bounded by channels: k triggers an end, and 49 bins of a histogram, however long the text.
B sequences, T tokens, F d_ff, K triggers kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import activations
from ...spec import Spec
from ...weights import Weights
from ..selective import TAIL

LOW, OCTAVES = -14, 24  # the histogram's bins: |m| in [2^e, 2^(e+1)) for e = LOW … LOW + OCTAVES - 1, for either sign
BINS = 2 * OCTAVES + 1  # from the most negative to the most positive, exact zeros in the middle; the ends are open
_SAMPLE = 256  # tokens that the threshold of activity is found on


def is_signed(spec: Spec) -> bool:
    """Whether a channel's coefficient has two ends worth looking at: gated, or an activation that goes well below 0
    (GELU and SiLU, at most 0.28 below, do not)."""
    return spec.gated or bool(
        (activations.get(spec.activation).numpy(np.linspace(-8, 8, 65), spec.params) < -0.5).any()
    )


def is_exact(spec: Spec) -> bool:
    """Whether the activation is exactly 0 on a whole half of its range, as ReLU is: then m ≠ 0 says "active"."""
    grid = np.linspace(-8.0, -1.0, 29)
    return not activations.get(spec.activation).numpy(grid, spec.params).any()


def threshold(weights: Weights, m: Tensor) -> float:
    """The contribution size |m|·‖v‖ above which a channel of this layer counts as active.

    0 where the activation is exactly zero for half of its inputs. Else the largest size such that what all smaller
    contributions of a token add up to is, in the mean over the tokens of the coefficients m [T, F], at most TAIL of the
    norm of their output without bias: ‖Σ_small m_i v_i‖ ≤ TAIL · ‖Σ m_i v_i‖.
    """
    if is_exact(weights.spec) or not m.numel():
        return 0.0
    m = m[:_SAMPLE]
    size = m.abs() * weights.down.norm(dim=0)
    whole = torch.nn.functional.linear(m, weights.down).norm(dim=-1).clamp_min(1e-30)
    low, high = 0.0, float(size.max())
    for _ in range(16):  # to 1e-5 of the largest contribution
        middle = 0.5 * (low + high)
        tail = torch.nn.functional.linear(m * (size <= middle), weights.down).norm(dim=-1)
        low, high = (middle, high) if float((tail / whole).mean()) <= TAIL else (low, middle)
    return low


class NotFiniteError(ValueError):
    """A coefficient is NaN or infinite; `sequence` is the number of the sequence that it comes from."""

    def __init__(self, sequence: int) -> None:
        super().__init__(f"sequence {sequence} gives coefficients that are not finite numbers")
        self.sequence = sequence


class Top:
    """The K sequences in which each channel was strongest: one position in each, by strength, the earlier one first
    among equals.

    coefficient [F, K] float32, descending; 0 where there are fewer;  sequence [F, K] int64, -1 there;
    position [F, K] int32, of the token within the sequence.
    """

    def __init__(self, channels: int, top: int) -> None:
        self.coefficient = torch.zeros(channels, top)
        self.sequence = torch.full((channels, top), -1, dtype=torch.int64)
        self.position = torch.zeros(channels, top, dtype=torch.int32)

    def update(self, value_BF: Tensor, position_BF: Tensor, sequence_B: Tensor) -> None:
        """Take in the largest value of each sequence and channel. Values at or below 0 are no triggers."""
        better = (value_BF > self.coefficient[:, -1]).any(0).nonzero()[:, 0]
        if not len(better):
            return
        new = len(sequence_B), len(better)
        value = torch.cat([self.coefficient[better], value_BF[:, better].t()], 1)
        order = value.argsort(dim=1, descending=True, stable=True)[:, : self.coefficient.shape[1]]
        sequence = torch.cat([self.sequence[better], sequence_B[:, None].expand(new).t()], 1).gather(1, order)
        position = torch.cat([self.position[better], position_BF[:, better].t().int()], 1).gather(1, order)
        value = value.gather(1, order)
        self.coefficient[better] = value
        # an unfilled place may be moved among values that are no triggers, but holds no sequence itself
        self.sequence[better] = sequence.where(value > 0, -1)
        self.position[better] = position.where(value > 0, 0)
        self.coefficient[better] = value.clamp_min(0)


class Accumulator:
    """Everything that is kept of one layer.

    active_above  [F] the |m| above which a channel is active: the layer's threshold over its value's norm.
    """

    def __init__(self, channels: int, top: int, signed: bool, active_above: Tensor) -> None:
        self.ends = {1: Top(channels, top)} | ({-1: Top(channels, top)} if signed else {})
        self.active_above = active_above
        self.tokens = 0
        self.mean = torch.zeros(channels, dtype=torch.float64)
        self.squares = torch.zeros(channels, dtype=torch.float64)  # Σ (m - mean)²
        self.active = torch.zeros(channels, dtype=torch.int64)
        self.histogram = torch.zeros(channels, BINS, dtype=torch.int64)

    def update(self, m_BTF: Tensor, sequence_B: Tensor, first: int = 0) -> None:
        """Take in the coefficients of a batch, whose tokens are those of the sequences from position `first` on.

        Raises NotFiniteError, a ValueError, if one is not a finite number.
        """
        for sign, top in self.ends.items():
            value, position = (m_BTF if sign > 0 else -m_BTF).max(1)
            if not bool(value.isfinite().all()):
                bad = int((~value.isfinite()).any(1).nonzero()[0, 0])
                raise NotFiniteError(int(sequence_B[bad]))
            top.update(value, position + first, sequence_B)
        m_TF = m_BTF.flatten(0, 1)
        self._moments(m_TF)
        self.active += (m_TF.abs() > self.active_above).sum(0)
        self.histogram += histogram(m_TF)

    def _moments(self, m_TF: Tensor) -> None:
        """Chan's update: the moments of a batch, joined to those of all before in float64."""
        n = len(m_TF)
        mean = m_TF.mean(0)
        squares = (m_TF - mean).square().sum(0).double()
        delta, total = mean.double() - self.mean, self.tokens + n
        self.mean += delta * (n / total)
        self.squares += squares + delta.square() * (self.tokens * n / total)
        self.tokens = total

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Every number that the future depends on, by name."""
        out = {name: getattr(self, name).numpy() for name in ("mean", "squares", "active", "histogram")}
        for sign, top in self.ends.items():
            out |= {f"{name}{sign:+}": value.numpy() for name, value in vars(top).items()}
        return out | {"tokens": np.array([self.tokens], np.int64), "active_above": self.active_above.numpy()}

    def restore(self, arrays: Mapping[str, bytes]) -> None:
        """Take over what `arrays` gave, as bytes."""
        for name, own in self.arrays().items():
            own[...] = np.frombuffer(arrays[name], own.dtype).reshape(own.shape)
        self.tokens = int(np.frombuffer(arrays["tokens"], np.int64)[0])


# the sign and exponent of a float32 are its upper nine bits: a table from those to bins
def _table() -> Tensor:
    exponent = torch.arange(256) - 127
    octave = (exponent - LOW).clamp(0, OCTAVES - 1)
    positive, negative = OCTAVES + 1 + octave, OCTAVES - 1 - octave
    positive[0] = negative[0] = OCTAVES  # zero, and what is too small for a normal float32
    return torch.cat([positive, negative]).int()  # 32 bits: half the time of 64


_BIN = _table()


def histogram(m_TF: Tensor) -> Tensor:
    """[F, BINS] int64: how many of a channel's coefficients lie in each bin."""
    channels = m_TF.shape[1]
    upper = (m_TF.contiguous().view(torch.int32) >> 23).bitwise_and_(511)
    bins = _BIN.index_select(0, upper.flatten()).view(upper.shape)
    bins += torch.arange(channels, dtype=torch.int32) * BINS
    return torch.bincount(bins.flatten(), minlength=channels * BINS).view(channels, BINS)


def edges() -> list[float]:
    """The lower ends of the positive bins, in order: 2^LOW, 2^(LOW+1), …"""
    return [math.ldexp(1.0, LOW + i) for i in range(OCTAVES)]
