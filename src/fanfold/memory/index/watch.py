"""The inputs of every FFN while a model runs, each handed on as it passes and kept by nobody."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..anatomy import Anatomy
from ..layers import Layer
from ..taps import evaluating, run

Take = Callable[[Layer, Tensor], None]


class Watch:
    """Runs a model on token ids and gives `take` (layer, x [B, T, D] float32) for each layer, in order of execution.

    The hooks go after each run. Kernels of `ff.swap` stay on, or step aside, as they would in any run with hooks.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy, take: Take) -> None:
        self.model, self.take = model, take
        self._layers: dict[str, dict[int, Layer]] = {}
        for layer in anatomy.layers:
            self._layers.setdefault(layer.path, {})[layer.call] = layer
        # nobody reads the logits: where the model can be told so, it makes those of one token only
        told = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._more: dict[str, Any] = {"logits_to_keep": 1} if told else {}

    def run(self, ids: np.ndarray[Any, Any]) -> None:
        """One run on token ids [B, T]. Raises ValueError if an FFN reads other tokens than these."""
        with evaluating(self.model), self._hooks(ids.shape):
            run(self.model, {"input_ids": torch.from_numpy(ids), **self._more})

    @contextlib.contextmanager
    def _hooks(self, shape: tuple[int, ...]) -> Iterator[None]:
        called: Counter[str] = Counter()
        handles = []

        def hook(path: str) -> Any:
            def read(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                layer = self._layers[path].get(called[path])
                called[path] += 1
                if layer is None:
                    return
                x = (args[0] if args else next(iter(kwargs.values()))).detach().to("cpu", torch.float32)
                if x.numel() != shape[0] * shape[1] * layer.spec.d_model:
                    raise ValueError(
                        f"layer {layer.index} ({path}) reads a tensor of {tuple(x.shape)} for {shape[0]} sequences of "
                        f"{shape[1]} tokens: it does not see every token once"
                    )
                self.take(layer, x.reshape(*shape, layer.spec.d_model))

            return read

        try:
            for path, calls in self._layers.items():
                found = next(iter(calls.values())).found
                first = path if found.kind == "module" else next(p for r, p in found.projections.items() if r != "down")
                handles.append(self.model.get_submodule(first).register_forward_pre_hook(hook(path), with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()
