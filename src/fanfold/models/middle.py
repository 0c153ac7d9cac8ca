"""The experiment on a pair of linears that a layer's own code connects: inject, and read what arrives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .decide import Identity, decide
from .description import Description, coefficients
from .laboratory import (
    ALLOWED,
    SCALES,
    MixesTokens,
    Unfit,
    cast,
    check_linear,
    check_token_wise,
    first_changed,
    negated,
    relative,
)
from .linears import matrix
from .structure import Site


class _Stop(Exception):  # noqa: N818 - ends a layer's forward once the last linear has been reached
    pass


def middle(
    twin: nn.Module, site: Site, generator: torch.Generator, call: tuple[tuple, dict[str, Any]] | None
) -> Callable[[list[Description]], Identity]:
    """The experiment on a pair: inject chosen outputs of the first linears into the layer, read the last one's input.

    Each linear is checked alone as well, so that the three together are the FFN.
    """
    assert call is not None
    dtype = matrix(twin.get_submodule(site.last)).dtype
    args, kwargs = cast(call[0], dtype), cast(call[1], dtype)
    for name in (*site.first, site.last):
        check_linear(twin.get_submodule(name), name, generator)

    def run(make: Callable[[str, Tensor], Tensor], other_inputs: bool = False) -> Tensor:
        calls: dict[str, int] = dict.fromkeys(site.first, 0)
        seen: list[Tensor] = []

        def inject(name: str) -> Callable[..., Tensor]:
            def hook(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
                calls[name] += 1
                return make(name, output)

            return hook

        def capture(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen.append(inputs[0])
            raise _Stop

        handles = [twin.get_submodule(n).register_forward_hook(inject(n)) for n in site.first]
        handles.append(twin.get_submodule(site.last).register_forward_pre_hook(capture))
        try:
            if other_inputs:
                twin(*negated(args, site.d_model), **negated(kwargs, site.d_model))
            else:
                twin(*args, **kwargs)
        except _Stop:
            pass
        finally:
            for handle in handles:
                handle.remove()
        if not seen or any(c != 1 for c in calls.values()):
            counts = ", ".join(f"{n} {c}x" for n, c in calls.items())
            raise Unfit(f"{site.last} must follow one call of each first linear; called: {counts}")
        return seen[0]

    def experiment(options: list[Description]) -> Identity:
        def values(scale: float) -> tuple[dict[str, Tensor], Tensor]:
            injected: dict[str, Tensor] = {}

            def make(name: str, output: Tensor) -> Tensor:
                injected[name] = (torch.randn(output.shape, generator=generator) * scale).to(output)
                return injected[name]

            return injected, run(make)

        with torch.no_grad():
            runs = [values(s) for s in SCALES]
            injected_1, h_1 = runs[1]
            check_token_wise(h_1, run(lambda name, _: first_changed(injected_1[name])))
            # Attention's query and output have an FFN's shapes; but what it writes depends on keys and values too.
            if relative(run(lambda name, _: injected_1[name], other_inputs=True), h_1.double()) > ALLOWED:
                raise MixesTokens(f"what {site.last} reads depends on more than the first linears' outputs")

            def error(d: Description) -> float:
                worst = 0.0
                for injected, h in runs:
                    truth = coefficients(d, [injected[n].double() for n in site.first])
                    if h.shape != truth.shape:
                        raise Unfit(
                            f"{site.last} reads shape {tuple(h.shape)}, the first linears give {tuple(truth.shape)}"
                        )
                    worst = max(worst, relative(h, truth))
                return worst

            ranked = sorted(((error(d), i) for i, d in enumerate(options)))[:6]
        leaves: dict[str, Tensor] = {}

        def leaf(name: str, output: Tensor) -> Tensor:
            leaves[name] = torch.randn(output.shape, generator=generator).to(output).requires_grad_()
            return leaves[name]

        h = run(leaf)
        v = torch.randn(h.shape, generator=generator).to(h)
        got = torch.autograd.grad(h, [leaves[n] for n in site.first], v)

        def gradient_error(d: Description) -> float:
            doubles = [leaves[n].detach().double().requires_grad_() for n in site.first]
            wanted = torch.autograd.grad(coefficients(d, doubles), doubles, v.double())
            return max(relative(a, b) for a, b in zip(got, wanted))

        return decide([options[i] for _, i in ranked], [e for e, _ in ranked], gradient_error, len(options))

    return experiment
