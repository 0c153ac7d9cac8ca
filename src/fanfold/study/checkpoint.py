"""A run's state on disk: parameters and the optimizer's, in one safetensors file, replaced as a whole."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from .sharded import Group, like, whole

NAME = "checkpoint.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class Checkpoint:
    """Saves and loads the state of a model and its AdamW; the file is the same for any number of processes."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group) -> None:
        self.path, self.model, self.optimizer, self.group = folder / NAME, model, optimizer, group

    def load(self) -> tuple[int, float]:
        """Take over what was saved. -> (steps done, seconds that they took), (0, 0.0) if there is nothing."""
        if not self.path.exists():
            return 0, 0.0
        with safe_open(self.path, framework="pt") as file:
            metadata = file.metadata()
            with torch.no_grad():
                for name, p in self.model.named_parameters():
                    p.copy_(like(file.get_tensor(name), p))
                    self.optimizer.state[p] = {m: like(file.get_tensor(f"{name}/{m}"), p) for m in _MOMENTS}
        return int(metadata["steps"]), float(metadata["seconds"])

    def save(self, steps: int, seconds: float) -> None:
        """Write everything beside the old file, then put it in its place."""
        tensors: dict[str, Tensor] = {}
        for name, p in self.model.named_parameters():
            tensors[name] = whole(p)
            for moment in _MOMENTS:
                tensors[f"{name}/{moment}"] = whole(self.optimizer.state[p][moment])
        if not self.group.first:
            return
        beside = self.path.with_suffix(f".{os.getpid()}")
        save_file(tensors, beside, {"steps": str(steps), "seconds": repr(seconds)})
        with open(beside, "rb") as file:
            os.fsync(file.fileno())
        beside.replace(self.path)
