"""FSDP2 around the module, in 1 and 2 processes; run by test_train_module.py with a folder to meet in."""

from __future__ import annotations

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fanfold as ff
from fanfold import Spec, numerics
from fanfold.count import ffn as counted
from fanfold.kernels import train

SPEC = Spec.parse("swiglu", d_model=24, d_ff=40, up_bias=True)
ROUNDING = 64 * numerics.UNIT_ROUNDOFF["float32"]


def blocks_of(save: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(ff.nn.FeedForward(SPEC, save=save) for _ in range(3)))


def check(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{size}", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    data = torch.randn(4, 2, 9, 24, generator=torch.Generator().manual_seed(1))
    for save in counted.SAVES:
        whole, model = blocks_of("all"), blocks_of(save)
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (whole, model)]
        seen, inner = [], train.ffn
        train.ffn = lambda *a, seen=seen, inner=inner: (seen.append(a[2]), inner(*a))[1]
        for batch in data:
            mine = batch.chunk(2)[rank] if size == 2 else batch
            whole(batch).square().mean().backward()
            model(mine).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        train.ffn = inner
        assert seen.count(save) >= 12, (save, seen)  # ours ran, in each block of each step
        moved = copy.deepcopy(blocks_of("all"))
        for (name, a), b, c in zip(whole.named_parameters(), model.parameters(), moved.parameters()):
            full = b.full_tensor()
            error = numerics.relative_error(full - c, a.detach() - c.detach())
            assert error < 1e3 * ROUNDING, (save, name, error)
    dist.destroy_process_group()


if __name__ == "__main__":
    for size in (1, 2):
        children = []
        for rank in range(size):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    check(rank, size, sys.argv[1])
                    code = 0
                finally:
                    if code:
                        import traceback

                        traceback.print_exc()
                    os._exit(code)
            children.append(child)
        if any(os.waitpid(child, 0)[1] for child in children):
            sys.exit(1)
        print(size, flush=True)
