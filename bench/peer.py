"""Our kernels as candidates of a harness that times FFN libraries side by side.

For a harness with this interface: `make()` returns objects with

    name, group, arith   what it is called; "fp32", "bf16", "int8" or "int4"; the arithmetic it is held against
    default, max_layers, chain, threads   (threads is set by the harness before build)
    unavailable(ffn) -> None or the reason        version() -> str        bits(d, d_ff) -> bits of weight memory
    prepare(x float32 [T, d]) -> native input     fetch(y) -> float32 [T, d]          (neither is timed)
    build(weights, ffn) -> fn(native input, layer) -> native output

weights is a sequence of {"gate": [d_ff, d], "up": [d_ff, d], "down": [d, d_ff]} float32 arrays ("gate" for ffn "swiglu"
alone, not for "gelu"). Put this folder and src/ on PYTHONPATH and name `peer:make`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

import fanfold
from fanfold import Spec, Weights
from fanfold.count import formats as stored
from fanfold.kernels import packed
from fanfold.show import contenders, roofs

FFNS = {"swiglu": "swiglu", "gelu": "gelu_erf"}  # what the harness calls it -> our name
# (name, format, dtype of x and y, part of a default run)
_ALL = (
    ("fp32", "fp32", torch.float32, True),
    ("bf16", "bf16", torch.bfloat16, True),
    ("bf16-x32", "bf16", torch.float32, True),
    ("fp16", "fp16", torch.float32, False),
    ("int8", "int8", torch.float32, True),
    ("int8_g32", "int8_g32", torch.float32, False),
    ("int8_g64", "int8_g64", torch.float32, True),
    ("int8_g128", "int8_g128", torch.float32, False),
    ("q8_0", "q8_0", torch.float32, True),
    ("int4_g32", "int4_g32", torch.float32, True),
    ("int4_g64", "int4_g64", torch.float32, False),
    ("int4_g128", "int4_g128", torch.float32, True),
    ("q4_0", "q4_0", torch.float32, True),
    ("q4_1", "q4_1", torch.float32, True),
)  # fmt: skip


class FanfoldPeer:
    """One format: each layer packed once, its call bound once, its outputs in memory of its own."""

    max_layers = 16
    chain = False
    threads = 1

    def __init__(self, name: str, format: str, dtype: torch.dtype, default: bool) -> None:
        form = stored.get(format)
        self.name, self.format, self.dtype, self.default = f"fanfold-{name}", format, dtype, default
        self.group = {32: "fp32", 16: "bf16", 8: "int8", 4: "int4"}[form.code_bits]
        self.arith = roofs.arithmetic(format)

    def unavailable(self, ffn: str) -> str | None:
        from fanfold.kernels import cpu

        return cpu.available() if ffn in FFNS else f"{ffn!r} is not known; known: {', '.join(FFNS)}"

    def version(self) -> str:
        from fanfold.kernels import cpu

        return f"fanfold {fanfold.__version__} ({cpu.isa()})"

    def bits(self, d: int, d_ff: int) -> float:
        """Bits per parameter, scales, minima and padding included. Gate and up take the same; a GELU block has no gate,
        which changes the mean by the padding of one matrix at most."""
        n_bytes = 2 * packed.packed_bytes(self.format, d_ff, d) + packed.packed_bytes(self.format, d, d_ff)
        return 8 * n_bytes / (3 * d * d_ff)

    def prepare(self, x: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(self.dtype)

    def fetch(self, y: torch.Tensor) -> np.ndarray[Any, Any]:
        return y.float().numpy().copy()  # a later call writes over y

    def build(
        self, weights: Sequence[Mapping[str, np.ndarray[Any, Any]]], ffn: str
    ) -> Callable[[torch.Tensor, int], torch.Tensor]:
        torch.set_num_threads(self.threads)
        layers = [self._pack(layer, ffn) for layer in weights]
        d = layers[0].spec.d_model
        calls = [packed.bind(self.dtype, layer).run for layer in layers]
        outputs: dict[int, torch.Tensor] = {}  # tokens -> y
        threads = self.threads

        def run(x: torch.Tensor, layer: int, _alive: Any = layers) -> torch.Tensor:
            tokens = x.shape[0]
            y = outputs.get(tokens)
            if y is None:
                reason = packed.why_not(x, layers[0])
                if reason is not None:
                    raise ValueError(f"{self.name} cannot run this: {reason}")
                y = outputs[tokens] = torch.empty_like(x)
            calls[layer](threads, x.data_ptr(), d, y.data_ptr(), d, tokens)
            return y

        return run

    def _pack(self, layer: Mapping[str, np.ndarray[Any, Any]], ffn: str) -> Weights:
        d_ff, d_model = layer["up"].shape
        spec = Spec.parse(FFNS[ffn], d_model=d_model, d_ff=d_ff)
        return contenders.pack(Weights(spec, **layer), self.format)


def make() -> list[FanfoldPeer]:
    """Every format, with float32 x and y; bf16 with bfloat16 ones too."""
    return [FanfoldPeer(*row) for row in _ALL]
