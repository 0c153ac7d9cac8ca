"""How many bytes of tensors are alive at most while a piece of code runs."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """Counts what PyTorch's ops allocate, on any device, while it is entered; backward on the CPU included.

    now, peak  bytes of storages made since, alive now and at most; those that come in from outside do not count.
    largest    bytes of the largest of them.
    Seen are the results of ops, not the scratch memory inside one (what a matrix product packs).
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.largest = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for given in _storages((args, kwargs)):
            self._known.add(given)
        result = func(*args, **kwargs)
        for made in _storages(result):
            if made not in self._known:
                self._known.add(made)
                self._add(made)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        n_bytes = storage.nbytes()
        self.now += n_bytes
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, n_bytes)
        weakref.finalize(storage, self._free, n_bytes)

    def _free(self, n_bytes: int) -> None:
        self.now -= n_bytes


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
