"""`edit`: change what channels write while a model runs, and put everything back.

A hook on the FFN adds to its output y the difference in what the edited channels write, Σ (m'·v' - m·v), with m
computed from the FFN's own input. The module itself still runs as it is, our kernels included, so a channel that is not
edited contributes bit by bit what it did, and nothing has to be put back but the hook.
D d_model, F d_ff, N edited channels.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import torch as torch_ops
from .anatomy import Anatomy
from .anatomy import anatomy as anatomy_of
from .changes import Added, Changes, Part, Value, notes, parts
from .layers import Layer


def edit(
    model: nn.Module, changes: Changes, *, add: Iterable[Added] = (), anatomy: Anatomy | None = None, inputs: Any = None
) -> Edit:
    """A context manager in which channels of `model` write something else: `with edit(model, {(12, 345): 0.0}): …`.

    y' = y + Σ (m'·v' - m·v) over the edited channels + Σ of what is added

    changes  {(layer, channel): change}, or pairs of those. layer as in `anatomy`, from 0; channel an int, or several:
             a tuple, a range, a slice (before Python 3.12 no dict takes a slice as a key: give pairs). The change is
             a number that multiplies the coefficient (0 silences), a function of the coefficients m [...] (of several
             channels [..., n]) that returns the new ones, `fixed(number)`, or a `Value` in place of the channel's own.
             [...] is how the FFN sees tokens: [batch, tokens], under generate with a cache one token a step.
    add      (layer, coefficient, vector [d_model]) for what no channel writes; the coefficient is a number, a tensor
             that broadcasts to [...], or a function of x [..., d_model] that returns one of those.
    anatomy  what `anatomy(model)` gave, to spare finding again;  inputs  for it, where it needs some.

    Differences are formed in float32 (float64 in a float64 model) and added with one rounding to y's dtype; where they
    are 0, y keeps its bits. What the module rounds on the way (coefficients in bfloat16, integer formats, see `notes`)
    stays of a silenced channel. Edits nest: an inner one takes the coefficients that the outer ones give. Weights are
    read on entry. Gradients flow to x, not to the edited weights. Code of torch.compile is made anew on entry and
    exit, for it would not see the hook.
    Raises ValueError for a layer, channel, change or vector that does not fit, naming what does; for an edit that is
    entered twice; and in the forward of an FFN whose own dropout is active.
    """
    found = anatomy if anatomy is not None else anatomy_of(model, inputs)
    return Edit(model, found.layers, changes, add)


class Edit:
    """What `edit` gives: entering it edits, leaving it restores. `notes` says where it is less than exact."""

    def __init__(self, model: nn.Module, layers: list[Layer], changes: Changes, add: Iterable[Added] = ()) -> None:
        self.parts = parts(layers, changes, add)
        self.notes = [note for layer, _ in self.parts for note in notes(layer)]
        self._model, self._layers = model, layers
        self._open: contextlib.ExitStack | None = None

    def __enter__(self) -> Edit:
        if self._open is not None:
            raise ValueError("this edit is active already: make another one with edit(model, …)")
        with contextlib.ExitStack() as stack:
            stack.callback(_forget_compiled)
            for layer, part in self.parts:
                site = _site(self._model, layer, sum(other.path == layer.path for other in self._layers))
                stack.callback(site.remove, layer, part)  # before adding, so that a failure half way is undone too
                site.add(layer, part)
            _forget_compiled()
            self._open = stack.pop_all()
        return self

    def __exit__(self, *_: Any) -> None:
        stack, self._open = self._open, None
        if stack is not None:
            stack.close()


def _forget_compiled() -> None:
    """Drop what torch.compile has made: it does not look whether hooks came or went (skip_nnmodule_hook_guards)."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


class _Site:
    """The hook on one FFN, and every active edit of it, the outermost first.

    calls  how many layers share this module: which one is running is told by counting its calls in a run.
    """

    def __init__(self, model: nn.Module, layer: Layer, calls: int) -> None:
        self.owner, self.pair, self.calls = model.get_submodule(layer.path), layer.found.kind == "pair", calls
        self.dropout = layer.found.dropout and not self.pair  # what a pair's down reads has gone through it
        self.edits: dict[int, list[tuple[Layer, Part]]] = {}
        self.ready: dict[int, _Ready] = {}
        self.called = 0
        self.x: Tensor | None = None
        paths = layer.found.projections
        self.hooked = model.get_submodule(paths["down"]) if self.pair else self.owner
        self.handles = [self.hooked.register_forward_hook(self._write, with_kwargs=True)]
        if calls > 1:
            self.handles.append(model.register_forward_pre_hook(self._begin))
        if self.pair:
            first = model.get_submodule(next(p for role, p in paths.items() if role != "down"))
            self.handles.append(first.register_forward_pre_hook(self._read, with_kwargs=True))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Site:
        return self  # so that the edit of a copied model ends with this one

    def add(self, layer: Layer, part: Part) -> None:
        self.edits.setdefault(layer.call, []).append((layer, part))
        self.ready[layer.call] = _Ready(layer, [p for _, p in self.edits[layer.call]])

    def remove(self, layer: Layer, part: Part) -> None:
        left = [(one, other) for one, other in self.edits.pop(layer.call, []) if other is not part]
        self.ready.pop(layer.call, None)
        if left:
            self.edits[layer.call] = left
            self.ready[layer.call] = _Ready(layer, [p for _, p in left])
        if not self.edits:
            for handle in self.handles:
                handle.remove()
            _SITES.pop(self.hooked, None)
            self.x = None

    def _begin(self, *_: Any) -> None:
        self.called = 0

    def _read(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.x = _given(args, kwargs)

    def _write(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor) -> Tensor | None:
        ready = self.ready.get(self.called % self.calls)
        self.called += 1
        if ready is None:
            return None
        if self.dropout and any(m.training for m in self.owner.modules()):
            raise ValueError(f"layer {ready.layer.index} is in training mode with dropout: call eval() to edit it")
        given = _given(args, kwargs)
        wide = torch.promote_types(y.dtype, torch.float32)
        with torch.autocast(y.device.type, enabled=False):
            if self.pair:
                assert self.x is not None
                delta = ready.delta(self.x.to(wide), given.to(wide)[..., ready.channels])
            else:
                x = given.to(wide)
                delta = ready.delta(x, ready.coefficients(x))
            return torch.where(delta == 0, y, (y + delta).to(y.dtype))  # 0 + -0 would lose the sign


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else next(iter(kwargs.values()))


_SITES: weakref.WeakKeyDictionary[nn.Module, _Site] = weakref.WeakKeyDictionary()


def _site(model: nn.Module, layer: Layer, calls: int) -> _Site:
    path = layer.found.projections["down"] if layer.found.kind == "pair" else layer.path
    hooked = model.get_submodule(path)
    if hooked not in _SITES:
        _SITES[hooked] = _Site(model, layer, calls)
    return _SITES[hooked]


class _Ready:
    """The keys and values [N, D] of a layer's edited channels, and what becomes of them, edit after edit."""

    def __init__(self, layer: Layer, edits: list[Part]) -> None:
        self.layer = layer
        weights = layer.weights()
        channels = sorted({c for part in edits for step in part.steps for c in step.channels})
        place = {channel: i for i, channel in enumerate(channels)}
        self.channels = torch.tensor(channels, dtype=torch.long)
        rows = {name: getattr(weights, name) for name in ("gate", "up", "gate_bias", "up_bias")}
        self.rows = {name: None if t is None else t[self.channels] for name, t in rows.items()}
        self.values = weights.down.t()[self.channels]
        written = self.values.clone()
        self.steps: list[tuple[Tensor, bool, Any]] = []
        for step in (s for part in edits for s in part.steps):
            where = torch.tensor([place[c] for c in step.channels], dtype=torch.long)
            if isinstance(step.change, Value):
                written[where] = step.change.vector
            self.steps.append((where, step.several, step.change))
        self.replaced = (written != self.values).any(1).nonzero()[:, 0]
        self.difference = (written - self.values)[self.replaced]
        self.added = [entry for part in edits for entry in part.added]

    def coefficients(self, x: Tensor) -> Tensor:
        """m [..., N] for x [..., D], in x's dtype."""
        rows = {name: None if t is None else t.to(x) for name, t in self.rows.items()}
        up = nn.functional.linear(x, rows["up"], rows["up_bias"])  # type: ignore[arg-type]
        gate = None if rows["gate"] is None else nn.functional.linear(x, rows["gate"], rows["gate_bias"])
        return torch_ops.coefficients(self.layer.spec, up, gate)

    def delta(self, x: Tensor, m: Tensor) -> Tensor:
        """Σ (m'·v' - m·v) + what is added [..., D], as (m' - m)·v + m'·(v' - v): exactly 0 where nothing changes."""
        new = m.clone()
        for where, several, change in self.steps:
            if isinstance(change, Value):
                new[..., where] = new[..., where] * change.scale
            elif callable(change):
                old = new[..., where] if several else new[..., int(where)]
                new[..., where] = self._fits(change(old.clone()), old).reshape(*new.shape[:-1], len(where))
            else:
                new[..., where] = new[..., where] * change
        out = (new - m) @ self.values.to(m) + new[..., self.replaced] @ self.difference.to(m)
        for coefficient, vector in self.added:
            c = coefficient(x) if callable(coefficient) else coefficient
            out = out + self._fits(c, out[..., 0])[..., None] * vector.to(m)
        return out

    def _fits(self, given: Any, like: Tensor) -> Tensor:
        """What a function gave, as a tensor of the shape it has to be of."""
        try:
            return torch.as_tensor(given).to(like).expand(like.shape)
        except (RuntimeError, TypeError, ValueError):
            got = f"shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
            raise ValueError(
                f"an edit of layer {self.layer.index} gave {got} for coefficients of shape {tuple(like.shape)}"
            ) from None
