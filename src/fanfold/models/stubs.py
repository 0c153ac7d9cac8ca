"""What stands in for the parameter of a packed linear, and whether anybody has written to it.

A stub keeps the parameter's name, shape, dtype and device for code that asks (T5 reads `wo.weight.dtype`), and takes no
memory: one NaN, expanded. Code that computes with it gets NaN, never a wrong number.

PyTorch refuses most ways to write to such a tensor, but neither `zero_()` nor `fill_()`, nor writes through NumPy, and
it does not count those through `.data`. So the number itself is looked at, also by C code that runs long after the
Python objects have gone: it lies in memory that is never given back, 8 bytes a stub.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from . import snapshot

_BYTES, _PER_CHUNK = 8, 4096  # of a stub's place; places of a chunk
_lock = threading.Lock()
_chunks: list[tuple[int, memoryview]] = []  # address, its places as integers
_used = 0  # places of the newest


def make_stub(shape: torch.Size, dtype: torch.dtype) -> nn.Parameter:
    """The stand-in for a parameter: its shape and dtype, every element the same NaN."""
    return nn.Parameter(_nan(dtype).expand(shape), requires_grad=False)


def retype(stub: nn.Parameter, dtype: torch.dtype) -> None:
    """Give a stub another dtype."""
    stub.data = _nan(dtype).expand(stub.shape)


def mark(stub: Tensor) -> tuple[Any, ...]:
    """What changes when somebody gives a stub other memory or writes to it."""
    return *snapshot.mark(stub), word(stub)


def moved(stub: Tensor, before: tuple[Any, ...]) -> bool:
    """Whether a stub, once marked so, lies elsewhere and was not written to: it was sent to another process, with which
    PyTorch makes its memory shared."""
    if snapshot.version(stub) != before[0] or any(stub.stride()) or not stub.numel():
        return False
    return bool(stub.detach().as_strided((), ()).isnan())


def place(stub: Tensor) -> tuple[int, int] | None:
    """Where its number lies, 8 bytes that stay readable, and what they are; None for a tensor that is not of ours."""
    found = word(stub)
    return None if found is None else (stub.data_ptr(), found)


def word(stub: Tensor) -> int | None:
    at = stub.data_ptr()  # 0 of one without elements
    for base, words in _chunks:
        i, rest = divmod(at - base, _BYTES)
        if rest == 0 and 0 <= i < _PER_CHUNK:
            return words[i]
    return None


def _nan(dtype: torch.dtype) -> Tensor:
    """A scalar in a place of its own."""
    global _used
    with _lock:
        if not _chunks or _used == _PER_CHUNK:
            buffer = bytearray(_BYTES * _PER_CHUNK)
            _chunks.append((torch.frombuffer(buffer, dtype=torch.uint8).data_ptr(), memoryview(buffer).cast("q")))
            _used = 0
        words = _chunks[-1][1]
        scalar = torch.frombuffer(words, dtype=dtype, count=1, offset=_BYTES * _used)
        _used += 1
    return scalar.fill_(torch.nan)[0]
