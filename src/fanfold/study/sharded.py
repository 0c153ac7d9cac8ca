"""One run on several processes, as torchrun starts them: FSDP2 cuts parameters, gradients and the optimizer's state;
each process takes its part of every batch. A single process is a group of one, with nothing cut."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn


class Group:
    """The processes of a run. `rank` of this one, `size` of them all."""

    def __init__(self) -> None:
        self.rank, self.size = 0, int(os.environ.get("WORLD_SIZE", "1"))
        if self.size > 1:
            import torch.distributed as dist

            if not dist.is_initialized():
                dist.init_process_group("gloo")
            self.rank, self.size = dist.get_rank(), dist.get_world_size()

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files."""
        return self.rank == 0

    def wait(self) -> None:
        """Until all are here."""
        if self.size > 1:
            import torch.distributed as dist

            dist.barrier()

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the processes."""
        if self.size > 1:
            import torch.distributed as dist

            dist.all_reduce(values)
        return values

    def own(self, rows: Tensor) -> Tensor:
        """This process's part of the rows, as many as every other's; what cannot be divided is left out."""
        return rows[: len(rows) // self.size * self.size][self.rank :: self.size]

    def cut(self, model: nn.Module, blocks: Any) -> None:
        """FSDP2 on each block and on the rest."""
        if self.size > 1:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (self.size,))
            for block in blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)

    def settle(self, model: nn.Module) -> None:
        """Cut the parameters again that a forward without a backward has left whole."""
        if self.size > 1:
            from torch.distributed.fsdp import FSDPModule

            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


def whole(value: Tensor) -> Tensor:
    """A parameter, or the optimizer's state of one, put together. All processes must ask together."""
    gather = getattr(value, "full_tensor", None)
    return value.detach() if gather is None else gather().detach()


def like(value: Tensor, other: Tensor) -> Tensor:
    """A whole tensor cut as `other` is."""
    mesh = getattr(other, "device_mesh", None)
    if mesh is None or value.dim() == 0:
        return value
    from torch.distributed.tensor import distribute_tensor

    placements: Any = other.placements  # type: ignore[attr-defined]
    return distribute_tensor(value, mesh, placements)


def number(value: Any) -> float:
    """A norm that FSDP may give as a cut tensor."""
    return float(whole(value)) if isinstance(value, torch.Tensor) else float(value)
