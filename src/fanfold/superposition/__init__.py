"""More features than dimensions, measured: `fanfold.superposition`.

`train` fits the toy models of Elhage et al. 2022 (Toy Models of Superposition, Transformer Circuits Thread), many at
once; `measures` and `closed` say what they should look like; `real` measures the keys and values of real FFNs;
`readout` and `separability` measure what the wider space of an FFN gives: room to read, select and recombine.
"""

from __future__ import annotations

from .toy import Trained, train

__all__ = ["Trained", "train"]
