"""In and out of the cut part of an FFN, as DTensor redistributions: PyTorch's own collectives, with their gradients.

                enter                                     leave
TP              identity; all-reduce of the gradient      all-reduce; identity for the gradient
sequence        all-gather; reduce-scatter                reduce-scatter; all-gather
parallel
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .together import together


class Clock:
    """Seconds that calls spent in collectives, and how many there were. Waiting for the slowest rank counts."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0


_clock: Clock | None = None


@contextlib.contextmanager
def timed() -> Iterator[Clock]:
    """Time the collectives of all cut FFNs of this process while the block runs (forward only, not compiled)."""
    global _clock
    before, _clock = _clock, Clock()
    try:
        yield _clock
    finally:
        _clock = before


class Lane:
    """A one-dimensional mesh that FFNs are cut over, and what tokens look like on it.

    sequence  whether x and y are cut along the tokens (dimension -2): Shard(1) of [batch, tokens, d_model].
    path      of the FFN, for messages.
    """

    def __init__(self, mesh: DeviceMesh, sequence: bool, path: str) -> None:
        self.mesh, self.sequence, self.path = mesh, sequence, path

    def enter(self, x: Tensor) -> Tensor:
        """All tokens, as every rank needs them. The gradient that comes back is this rank's share of a sum.

        x  a plain tensor: this rank's tokens (as many on each rank) or, without sequence parallelism, all of them; or
        a DTensor on this mesh, of any placement and any number of tokens.
        """
        if isinstance(x, DTensor):
            spread = x
        elif self.sequence:
            spread = DTensor.from_local(x, self.mesh, [Shard(self._tokens(x))], run_check=False)
        elif not (torch.is_grad_enabled() and x.requires_grad):
            return x
        else:
            spread = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        if torch.compiler.is_compiling():
            return self._all(spread)
        with self._watched():
            return self._all(spread)

    def leave(self, y: Tensor, bias: Tensor | None, like: Tensor) -> Tensor:
        """The sum of all ranks' partial results y, then down's bias: once, and its gradient as on one device.

        like  what `enter` was given: a DTensor gets a DTensor back.
        """
        if torch.compiler.is_compiling():
            summed = self._summed(y)
        else:
            with self._watched():
                summed = self._summed(y)
        local = summed.to_local()
        if bias is not None:
            local = local + self._bias(bias).to(local.dtype)
        if not isinstance(like, DTensor):
            return local
        return DTensor.from_local(
            local, self.mesh, summed.placements, run_check=False, shape=summed.shape, stride=summed.stride()
        )

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Around a collective: the error of a lost rank, and the clock if one runs."""
        begin = time.perf_counter()
        with together(f"the FFN at {self.path}", self.mesh.get_group()):
            yield
        if _clock is not None:
            _clock.seconds += time.perf_counter() - begin
            _clock.calls += 1

    def _all(self, spread: DTensor) -> Tensor:
        return spread.redistribute(self.mesh, [Replicate()]).to_local(grad_placements=[Partial()])

    def _summed(self, y: Tensor) -> DTensor:
        out = Shard(self._tokens(y)) if self.sequence else Replicate()
        return DTensor.from_local(y, self.mesh, [Partial()], run_check=False).redistribute(self.mesh, [out])

    def _bias(self, bias: Tensor) -> Tensor:
        if not isinstance(bias, DTensor):
            return bias
        if not self.sequence:
            return bias.to_local()  # every rank has the gradient of all tokens
        return bias.redistribute(self.mesh, [Replicate()]).to_local(grad_placements=[Partial()])

    def _tokens(self, x: Tensor) -> int:
        if x.dim() < 2:
            raise ValueError(f"{self.path}: x has shape {tuple(x.shape)}, expected (…, tokens, d_model) to cut tokens")
        return x.dim() - 2
