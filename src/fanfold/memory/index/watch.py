"""The coefficients of every FFN while a model runs, each handed on as it passes and kept by nobody.

B sequences, T tokens, D d_model, F d_ff.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ... import numerics, reference
from ...weights import Weights, to_float64
from ..anatomy import Anatomy
from ..layers import Layer, coefficients
from ..taps import evaluating, run

Take = Callable[[Layer, Weights, Tensor], None]


class Watch:
    """Runs a model on token ids and gives `take` (layer, weights, coefficients [B, T, F] float32) for each layer, in
    order of execution.

    The coefficients are computed from what the FFN reads. Where the model's own `down` is seen to read the same, to the
    tolerance rule, they are taken from there, which takes a third less time. The hooks go after each run. Kernels of
    `ff.swap` stay on, or step aside, as they would in any run with hooks.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy, take: Take) -> None:
        self.model, self.take = model, take
        self._layers: dict[str, dict[int, Layer]] = {}
        for layer in anatomy.layers:
            self._layers.setdefault(layer.path, {})[layer.call] = layer
        # nobody reads the logits: where the model can be told so, it makes those of one token only
        told = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._more: dict[str, Any] = {"logits_to_keep": 1} if told else {}
        self._before_down = self._reading_coefficients()

    def run(self, ids: np.ndarray[Any, Any]) -> None:
        """One run on token ids [B, T]. Raises ValueError if an FFN reads other tokens than these."""

        def handed(layer: Layer, read: Tensor) -> None:
            width = layer.spec.d_ff if layer.path in self._before_down else layer.spec.d_model
            if read.numel() != ids.size * width:
                raise ValueError(
                    f"layer {layer.index} ({layer.path}) reads a tensor of {tuple(read.shape)} for {ids.shape[0]} "
                    f"sequences of {ids.shape[1]} tokens: it does not see every token once"
                )
            weights, rows = layer.weights(), read.reshape(*ids.shape, width)
            m = rows if layer.path in self._before_down else coefficients(weights, rows).coefficient
            self.take(layer, weights, m)

        places = {path: self._place(path, path in self._before_down) for path in self._layers}
        with self._hooks(places, handed):
            self._run(ids)

    def _run(self, ids: np.ndarray[Any, Any]) -> None:
        with evaluating(self.model):
            run(self.model, {"input_ids": torch.from_numpy(ids), **self._more})

    def _place(self, path: str, down: bool) -> str:
        """The module whose input is the FFN's, or the one that down reads."""
        found = next(iter(self._layers[path].values())).found
        if down:
            return found.projections["down"]
        return path if found.kind == "module" else next(p for r, p in found.projections.items() if r != "down")

    @contextlib.contextmanager
    def _hooks(self, places: dict[str, str], handed: Callable[[Layer, Tensor], None]) -> Iterator[None]:
        """`handed` gets (layer, what the module at places[path] reads, float32 on the CPU) while this lasts."""
        called: Counter[str] = Counter()
        handles = []

        def hook(path: str) -> Any:
            def read(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                layer = self._layers[path].get(called[path])
                called[path] += 1
                if layer is not None:
                    x = args[0] if args else next(iter(kwargs.values()))
                    handed(layer, x.detach().to("cpu", torch.float32))

            return read

        try:
            for path, place in places.items():
                handles.append(self.model.get_submodule(place).register_forward_pre_hook(hook(path), with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _reading_coefficients(self) -> set[str]:
        """The FFNs in float32, not swapped, whose down reads the coefficients in a run on a few tokens."""
        own = {path for path in self._layers if self._is_plain(path)}
        seen: dict[bool, dict[str, list[Tensor]]] = {True: {}, False: {}}
        table: Any = getattr(self.model, "get_input_embeddings", lambda: None)()
        if not own or not isinstance(getattr(table, "num_embeddings", None), int):
            return set()
        ids = np.arange(16, dtype=np.int64).reshape(2, 8) % table.num_embeddings
        with contextlib.ExitStack() as hooks:
            for down, by_path in seen.items():
                keep = lambda layer, read, kept=by_path: kept.setdefault(layer.path, []).append(read.clone())  # noqa: E731
                hooks.enter_context(self._hooks({path: self._place(path, down) for path in own}, keep))
            self._run(ids)
        return {path for path in own if self._agree(path, seen[False].get(path, []), seen[True].get(path, []))}

    def _is_plain(self, path: str) -> bool:
        found = next(iter(self._layers[path].values())).found
        modules: list[Any] = [self.model.get_submodule(p) for p in (path, *found.projections.values())]
        floats = all(p.dtype == torch.float32 for m in modules for p in m.parameters())
        return floats and not any("_fanfold" in m.__dict__ for m in modules)

    def _agree(self, path: str, read: list[Tensor], before_down: list[Tensor]) -> bool:
        layers = self._layers[path]
        if len(read) != len(before_down) or len(read) != len(layers):
            return False
        for layer, x, m in zip(layers.values(), read, before_down):
            weights, rows = layer.weights(), x.reshape(-1, layer.spec.d_model)
            if m.numel() != len(rows) * layer.spec.d_ff:
                return False
            truth, ours = reference.coefficients(to_float64(rows), weights), coefficients(weights, rows).coefficient
            if not numerics.compare(m.reshape(ours.shape), truth, ours):
                return False
        return True
