"""Whether this CPU multiplies 16-bit matrices faster as float32: PyTorch's products without a unit for them are slow.

Seen: 0.45 GFLOP/s in bfloat16 and float16 where float32 reaches 170 (AVX2 alone), half of float32's rate on a Xeon with
AVX512_BF16, four times its rate with AMX (PyTorch 2.13). So it is measured, not looked up.
"""

from __future__ import annotations

import functools
import time

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
# float32 has to be so much faster: its copies of the operands take 6 bytes a number.
_FACTOR = 1.25
_SHAPE = (128, 512, 512)  # 0.4 ms in float32 on two cores
_ROUNDS = 5


def dtype_of_products(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which products of matrices of `dtype` are fastest: its own, or float32."""
    slow = dtype in HALF and device.type == "cpu" and _slow(dtype)
    return torch.float32 if slow else dtype


@functools.cache
def _slow(dtype: torch.dtype) -> bool:
    """Measured once in a process. By turns, least times: a disturbance makes nothing look faster."""
    tokens, n_in, n_out = _SHAPE
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        operands = [
            (torch.ones(tokens, n_in, dtype=d), torch.ones(n_in, n_out, dtype=d)) for d in (torch.float32, dtype)
        ]
        least = [float("inf"), float("inf")]
        for i in range(_ROUNDS):
            for which, (left, right) in enumerate(operands):
                least[which] = min(least[which], _seconds(left, right))
            if i > 1 and least[1] > 4 * least[0]:
                break  # clear, and such a round takes 60 ms
    return least[1] > _FACTOR * least[0]


def _seconds(left: Tensor, right: Tensor) -> float:
    begin = time.perf_counter()
    torch.mm(left, right)
    return time.perf_counter() - begin
