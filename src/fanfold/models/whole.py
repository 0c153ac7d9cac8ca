"""The experiment on a module that is the FFN: run it whole, y = module(x) or module(x, residual)."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .decide import Identity, decide
from .description import Description, coefficients
from .laboratory import (
    ALLOWED,
    SCALES,
    TOKENS,
    MixesTokens,
    Unfit,
    check_token_wise,
    double,
    first_changed,
    relative,
)
from .linears import matrix
from .structure import Site

_OUTPUTS = 128  # of a comparison that only tells descriptions apart


def _required_arguments(module: nn.Module) -> int:
    cls = getattr(type(module), "_fanfold_original", type(module))  # swapped: its class's own signature
    _, *parameters = inspect.signature(cls.forward).parameters.values()
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def whole(twin: nn.Module, site: Site, generator: torch.Generator) -> Callable[[list[Description]], Identity]:
    """The experiment on a module that is the FFN: y = module(x), perhaps module(x, residual)."""
    n_args = _required_arguments(twin)
    if n_args not in (1, 2):
        raise Unfit(f"forward needs {n_args} arguments, expected (x) or (x, residual)")
    device, dtype = matrix(twin.get_submodule(site.last)).device, matrix(twin.get_submodule(site.last)).dtype
    firsts: list[Any] = [twin.get_submodule(n) for n in site.first]
    last: Any = twin.get_submodule(site.last)

    def run(x: Tensor, r: Tensor | None) -> Tensor:
        y = twin(x) if r is None else twin(x, r)
        if not isinstance(y, Tensor):
            raise Unfit(f"forward returns a {type(y).__name__}, expected one tensor")
        if y.shape != x.shape:
            raise Unfit(f"forward returns shape {tuple(y.shape)} for x {tuple(x.shape)}")
        return y

    wide = [(matrix(m).double(), double(m.bias)) for m in firsts]
    down, down_bias = matrix(last).double(), double(last.bias)

    def pre(x: Tensor) -> list[Tensor]:
        return [nn.functional.linear(x.double(), weight, bias) for weight, bias in wide]

    def describe(d: Description, firsts: list[Tensor], r: Tensor | None, rows: Tensor | slice = slice(None)) -> Tensor:
        """float64 outputs (only `rows` of them) from the float64 outputs of the first linears."""
        bias = down_bias[rows] if down_bias is not None and d.spec.down_bias else None
        y = nn.functional.linear(coefficients(d, firsts), down[rows], bias) * d.scale
        return y + r[..., rows].double() if d.residual and r is not None else y

    def experiment(options: list[Description]) -> Identity:
        xs = [torch.randn(1, TOKENS, site.d_model, generator=generator).to(device, dtype) * s for s in SCALES]
        xs[1][:, -1], xs[1][:, -2, 0] = 0.0, 0.0  # a token of zeros and one with a zero: some code masks by them
        rs = [torch.randn(x.shape, generator=generator).to(x) if n_args == 2 else None for x in xs]
        if n_args == 2:
            options = [dataclasses.replace(d, residual=flag) for d in options for flag in (True, False)]
        with torch.no_grad():
            ys = [run(x.clone(), r) for x, r in zip(xs, rs)]
            check_token_wise(ys[1], run(first_changed(xs[1]), rs[1]))
            _check_shapes(run, xs[1], rs[1], ys[1])
            _check_effects(twin, run, xs[1], rs[1])
            pres = [pre(x) for x in xs]
            # A look at few outputs and two scales first, then at some outputs and all scales for the nearest; the full
            # comparison is for the one that is left.
            rows = torch.randperm(site.d_model, generator=generator)[:32].to(device)
            some = torch.randperm(site.d_model, generator=generator)[:_OUTPUTS].to(device)
            few = [(ys[i][:, :16, rows], [p[:, :16] for p in pres[i]], rs[i]) for i in (1, 3)]

            def screen(d: Description) -> float:
                pairs = ((y, describe(d, p, None if r is None else r[:, :16], rows)) for y, p, r in few)
                return max(relative(y, truth) for y, truth in pairs)

            def error(d: Description, outputs: Tensor | slice) -> float:
                return max(relative(y[..., outputs], describe(d, p, r, outputs)) for y, p, r in zip(ys, pres, rs))

            def compare(d: Description) -> Tensor:
                return describe(d, pres[1], rs[1], some)

            near = [options[i] for _, i in sorted((screen(d), i) for i, d in enumerate(options))[:6]]
            near += [r for d in near for r in _rescued(d, ys[1][..., some], compare, last)]
            errors = [error(d, some) for d in near]
            checked = set[int]()
            while (nearest := errors.index(min(errors))) not in checked:
                errors[nearest] = error(near[nearest], slice(None))
                checked.add(nearest)
        x, r = xs[1].clone().requires_grad_(), rs[1]
        v = torch.randn(x.shape, generator=generator).to(x)
        (g_module,) = torch.autograd.grad(run(x, r), x, v)
        last_ones = slice(-16, None)  # tokens, those with zeros among them
        x64 = xs[1][:, last_ones].double().requires_grad_()

        def gradient_error(d: Description) -> float:
            y = describe(d, pre(x64), None if r is None else r[:, last_ones])
            (g,) = torch.autograd.grad(y, x64, v[:, last_ones].double())
            return relative(g_module[:, last_ones], g)

        twin.train()
        with torch.no_grad():
            dropout = relative(run(xs[1].clone(), rs[1]), ys[1].double()) > ALLOWED
        return dataclasses.replace(decide(near, errors, gradient_error, len(options)), dropout=dropout)

    return experiment


def _check_shapes(run: Callable[..., Tensor], x: Tensor, r: Tensor | None, y: Tensor) -> None:
    """The same tokens as one token, two sequences, plain rows and a long sequence: each token's output must stay."""
    for change in (
        lambda t: t.view(2, -1, t.shape[-1]),
        lambda t: t[0],
        lambda t: t[:, :1],
        lambda t: t.repeat(1, 13, 1),
    ):
        try:
            got = run(change(x).clone(), None if r is None else change(r))
        except Unfit:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError):
            continue  # a rank that this code does not take
        if relative(got, change(y).double()) > ALLOWED:
            raise MixesTokens("the output of a token depends on the shape of x or on other sequences")


def _check_effects(twin: nn.Module, run: Callable[..., Tensor], x: Tensor, r: Tensor | None) -> None:
    """The call must leave x and the module's buffers as they were, and pass NaN on."""
    before = [b.clone() for b in twin.buffers()]
    given = x.clone()
    run(given, r)
    if not torch.equal(given, x):
        raise Unfit("forward changes its input in place")
    if any(not torch.equal(a, b) for a, b in zip(before, twin.buffers())):
        raise Unfit("forward changes a buffer: it counts its calls or keeps statistics")
    given[:, 0, 0] = float("nan")
    y = run(given, r)
    if not (y[:, 0].isnan().all() and y[:, 1:].isfinite().all()):
        raise Unfit("forward does not pass NaN on as an FFN does")


def _rescued(
    near: Description, y: Tensor, compute: Callable[[Description], Tensor], last: Any
) -> Iterator[Description]:
    """A near description with its output scaled, and without down's bias: what the shapes alone cannot tell."""
    variants = [near]
    if last.bias is not None:
        variants.append(dataclasses.replace(near, spec=dataclasses.replace(near.spec, down_bias=False)))
        yield variants[-1]
    for d in variants:
        truth = compute(d)
        s = float((y.double() * truth).sum() / truth.square().sum())
        if abs(s - 1.0) > ALLOWED and s != 0.0:
            yield dataclasses.replace(d, scale=s)
