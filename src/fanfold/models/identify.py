"""Identification by experiment: which description computes what a module computes.

A copy of the module (or of the layer around a pair) gets Gaussian weights and biases of known scale, is run on random
inputs whose pre-activations have std 0.1 … 30 (so that a clamp at 7 or 10 shows, and gelu_erf parts from gelu_tanh),
and every candidate description is computed in float64 beside it. One that agrees to rounding at *every* scale, in
outputs and in input gradients, while no other does, is the answer; else the module is left alone.
T tokens, D d_model, F d_ff.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .. import activations
from ..kernels import torch as torch_ops
from ..layout import FUSED, SEPARATE, Layout
from ..numerics import UNIT_ROUNDOFF
from ..spec import Spec
from .linears import is_half, matrix
from .structure import Site

SCALES = (0.1, 1.0, 3.0, 10.0, 30.0)
TOKENS = 48
# A match is agreement to rounding in float32. The module may round more often than one fused formula does, and sums
# over d_ff: 64 roundings. At pre-activation std 1 the nearest variants (gelu_erf, gelu_tanh) differ by 2e-4, 50 times this.
ALLOWED = 64 * UNIT_ROUNDOFF["float32"]
_LIMITS = (7.0, 10.0)  # gpt-oss, DeepSeek-V4: the clamps that public models use


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the experiment saw.

    error           largest relative error over the scales of the best description, against float64.
    allowed         the largest that counts as agreement.
    gradient_error  the same for the gradient of the input (None if not reached).
    runner_up, runner_up_error  the nearest different description.
    candidates      how many descriptions were compared; scales: pre-activation std of the inputs.
    """

    error: float
    allowed: float
    gradient_error: float | None
    runner_up: str
    runner_up_error: float
    candidates: int
    scales: tuple[float, ...] = SCALES

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """A candidate: everything needed to compute it from the first linears' outputs."""

    spec: Spec
    order: str  # of the fused matrix, or SEPARATE
    gate_first: bool  # separate gated: the first-registered linear is the gate
    scale: float = 1.0
    residual: bool = False

    def name(self) -> str:
        s = self.spec
        text = ("gated " if s.gated else "") + s.activation
        text += "".join(f" {k}={v:g}" for k, v in s.params.items() if v != activations.get(s.activation).params[k])
        text += f" limit {s.gate_limit:g}" if s.gate_limit else ""
        text += f" up+{s.up_offset:g}" if s.up_offset else ""
        if s.gated and self.order == SEPARATE:
            text += "" if self.gate_first else ", second linear gates"
        elif s.gated:
            text += f", {self.order}"
        return text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
    """The outcome: a description with its evidence, or the reason why there is none.

    token_wise  True if the code was seen to map each token on its own, False if it was seen to mix tokens (then it is
                no FFN), None if that was not reached.
    dropout     whether the outputs differ in training mode.
    """

    description: Description | None
    reason: str
    evidence: Evidence | None
    token_wise: bool | None = None
    dropout: bool = False


class _Stop(Exception):  # noqa: N818 - ends a layer's forward once the last linear has been reached
    pass


def _variants(act_names: list[str], gated: bool, params: dict[str, dict[str, float]]) -> Iterator[dict[str, Any]]:
    for name in act_names:
        yield {"activation": name, "activation_params": tuple(params.get(name, {}).items())}
    if not gated:
        return
    for name in ("silu", "gelu_sigmoid", "gelu_erf", "gelu_tanh"):
        for limit in _LIMITS:
            for offset in (0.0, 1.0):
                fields: dict[str, Any] = {"activation": name, "gate_limit": limit, "up_limit": limit}
                if name == "gelu_sigmoid":  # the same function; gpt-oss calls it silu with beta 1.702
                    fields |= {"activation": "silu", "beta": 1.702}
                yield fields | {"up_offset": offset}


def candidates(site: Site, biases: dict[str, bool], params: dict[str, dict[str, float]]) -> list[Description]:
    """Every description that the site's shapes allow.

    biases  {"first": …, "last": …} whether the linears have one; params  {activation: parameters read from modules}.
    """
    gated = site.fused or len(site.first) == 2
    orders = FUSED if site.fused else (SEPARATE,)
    out = []
    for fields in _variants(list(activations.ACTIVATIONS), gated, params):
        base = {"d_model": site.d_model, "d_ff": site.d_ff, "gated": gated, "up_bias": biases["first"]}
        spec = Spec(**base, gate_bias=gated and biases["first"], down_bias=biases["last"], **fields)
        for order in orders:
            flips = (True, False) if gated and order == SEPARATE else (True,)
            if spec.activation == "identity" and gated and not (spec.gate_limit or spec.up_offset):
                # Bilinear is symmetric: only the pairing of rows can be told, not which half is the gate.
                if order in (FUSED[1], FUSED[3]):
                    continue
                flips = (True,)
            out += [Description(spec=spec, order=order, gate_first=g) for g in flips]
    return out


def coefficients(d: Description, firsts: list[Tensor]) -> Tensor:
    """[T,F] coefficients of a description from the outputs of the first linears, in their dtype."""
    if not d.spec.gated:
        return torch_ops.coefficients(d.spec, firsts[0], None)
    if d.order != SEPARATE:
        gate, up = Layout(order=d.order, transposed=True).split(firsts[0])  # channels are the last dimension here
    else:
        gate, up = firsts if d.gate_first else firsts[::-1]
    return torch_ops.coefficients(d.spec, up, gate)


def _relative(y: Tensor, truth: Tensor) -> float:
    error = ((y.double() - truth).square().mean() / truth.square().mean().clamp_min(1e-300)).sqrt()
    return float(error) if torch.isfinite(error) else float("inf")


def activation_params(module: nn.Module) -> dict[str, dict[str, float]]:
    """Parameters of activations that carry their own (LeakyReLU's slope, ELU's alpha, xIELU's four), read from the
    modules below `module`."""
    out: dict[str, dict[str, float]] = {}
    for child in module.modules():
        if isinstance(child, nn.LeakyReLU):
            out["leaky_relu"] = {"slope": float(child.negative_slope)}
        elif isinstance(child, nn.ELU):
            out["elu"] = {"alpha": float(child.alpha)}
        elif all(hasattr(child, n) for n in ("alpha_p", "alpha_n", "beta", "eps")):
            with torch.no_grad():
                beta = float(child.beta)
                effective = {n: float(nn.functional.softplus(getattr(child, n).float())) for n in ("alpha_p", "alpha_n")}
            effective["alpha_n"] += beta
            out["xielu"] = effective | {"beta": beta, "eps": float(child.eps)}
    return out


def _copy(module: nn.Module) -> nn.Module:
    """A float32 (or float64) copy in eval mode without hooks: what the code computes, free to be changed."""
    twin = copy.deepcopy(module)
    if any(is_half(p) for p in twin.parameters()):
        twin = twin.float()
    for m in twin.modules():
        for hooks in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks):
            hooks.clear()
    return twin.eval().requires_grad_(False)


def _randomise(linear: Any, generator: torch.Generator) -> None:
    """Gaussian weights with unit-variance outputs, biases of std 0.5: independent of what training left there."""
    with torch.no_grad():
        weight, std = linear.weight, matrix(linear).shape[1] ** -0.5
        weight.copy_(torch.randn(weight.shape, generator=generator) * std)
        if linear.bias is not None:
            linear.bias.copy_(torch.randn(linear.bias.shape, generator=generator) * 0.5)


def _objection(module: nn.Module, site: Site) -> str | None:
    patched = [n or "itself" for n, m in module.named_modules() if "forward" in m.__dict__]
    if patched:
        return f"forward is patched on the instance ({', '.join(patched)}): another tool has already replaced it"
    if any(p.is_meta for p in module.parameters()):
        return "parameters are on the meta device (offloaded or not loaded): nothing to experiment with"
    biased = [getattr(module.get_submodule(n), "bias", None) is not None for n in site.first]
    if len(set(biased)) > 1:
        return f"only one of {', '.join(site.first)} has a bias: not supported"
    return None


def identify(module: nn.Module, site: Site, call: tuple[tuple, dict[str, Any]] | None = None) -> Identity:
    """Find the one description of `site` (whose `path` leads to `module`), or say why there is none.

    call  for a pair: (args, kwargs) with which the layer is called in a run of the whole model.
    """
    reason = _objection(module, site)
    if reason is None and site.kind == "pair" and call is None:
        reason = "the layer's code connects its linears, and the layer was not reached in a run of the model: pass inputs="
    if reason is not None:
        return Identity(description=None, reason=reason, evidence=None)
    try:
        with torch.inference_mode(False), torch.enable_grad():  # gradients are part of the experiment
            return _experiment(module, site, call)
    except _MixesTokens as mixes:
        return Identity(description=None, reason=str(mixes), evidence=None, token_wise=False)
    except _Unfit as unfit:
        return Identity(description=None, reason=str(unfit), evidence=None)
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError, IndexError, KeyError) as error:
        text = str(error).strip().splitlines()[0] if str(error).strip() else ""
        reason = f"{type(error).__name__} when run on its own: {text}"
        return Identity(description=None, reason=reason, evidence=None)


def _experiment(module: nn.Module, site: Site, call: tuple[tuple, dict[str, Any]] | None) -> Identity:
    twin = _copy(module)
    generator = torch.Generator().manual_seed(0)
    for name in (*site.first, site.last):
        _randomise(twin.get_submodule(name), generator)
    biases = {k: twin.get_submodule(n).bias is not None for k, n in (("first", site.first[0]), ("last", site.last))}
    options = candidates(site, biases, activation_params(twin))
    experiment = _whole(twin, site, generator) if site.kind == "module" else _middle(twin, site, generator, call)
    return experiment(options)


class _Unfit(Exception):  # noqa: N818 - carries the reason why a module is no FFN we can describe
    pass


class _MixesTokens(_Unfit):
    pass


def _required_arguments(module: nn.Module) -> int:
    cls = getattr(type(module), "_fanfold_original", type(module))  # swapped: its class's own signature
    _, *parameters = inspect.signature(cls.forward).parameters.values()
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def _whole(twin: nn.Module, site: Site, generator: torch.Generator) -> Callable[[list[Description]], Identity]:
    """The experiment on a module that is the FFN: y = module(x), perhaps module(x, residual)."""
    n_args = _required_arguments(twin)
    if n_args not in (1, 2):
        raise _Unfit(f"forward needs {n_args} arguments, expected (x) or (x, residual)")
    device, dtype = matrix(twin.get_submodule(site.last)).device, matrix(twin.get_submodule(site.last)).dtype
    firsts = [twin.get_submodule(n) for n in site.first]
    last = twin.get_submodule(site.last)

    def run(x: Tensor, r: Tensor | None) -> Tensor:
        y = twin(x) if r is None else twin(x, r)
        if not isinstance(y, Tensor):
            raise _Unfit(f"forward returns a {type(y).__name__}, expected one tensor")
        if y.shape != x.shape:
            raise _Unfit(f"forward returns shape {tuple(y.shape)} for x {tuple(x.shape)}")
        return y

    def describe(d: Description, x: Tensor, r: Tensor | None, rows: Tensor | None = None) -> Tensor:
        pre = [nn.functional.linear(x.double(), matrix(m).double(), _double(m.bias)) for m in firsts]
        m = coefficients(d, pre)
        down, bias = matrix(last).double(), _double(last.bias)
        if rows is not None:
            down, bias = down[rows], None if bias is None else bias[rows]
        y = nn.functional.linear(m, down, bias if d.spec.down_bias else None) * d.scale
        if d.residual and r is not None:
            y = y + (r if rows is None else r[..., rows]).double()
        return y

    def experiment(options: list[Description]) -> Identity:
        xs = [torch.randn(1, TOKENS, site.d_model, generator=generator).to(device, dtype) * s for s in SCALES]
        rs = [torch.randn(x.shape, generator=generator).to(x) if n_args == 2 else None for x in xs]
        with torch.no_grad():
            ys = [run(x.clone(), r) for x, r in zip(xs, rs)]
            _check_token_wise(ys[1], run(_first_changed(xs[1]), rs[1]))
            if n_args == 2:
                options = [dataclasses.replace(d, residual=flag) for d in options for flag in (True, False)]
            # A look at few outputs and two scales first: the full comparison is only for the nearest.
            rows = torch.randperm(site.d_model, generator=generator)[:32].to(device)
            few = [(ys[i][..., rows], *(None if t is None else t[:, :16] for t in (xs[i], rs[i]))) for i in (1, 3)]

            def screen(d: Description) -> float:
                return max(_relative(y[:, :16], describe(d, x, r, rows)) for y, x, r in few)  # type: ignore[arg-type]

            near = sorted(((screen(d), i) for i, d in enumerate(options)))[:6]
            near_options = [options[i] for _, i in near]
            near_options += [r for d in near_options for r in _rescued(d, ys[1], lambda d: describe(d, xs[1], rs[1]), last)]
            errors = [max(_relative(y, describe(d, x, r)) for x, y, r in zip(xs, ys, rs)) for d in near_options]
        x, r = xs[1].clone().requires_grad_(), rs[1]
        v = torch.randn(x.shape, generator=generator).to(x)
        (g_module,) = torch.autograd.grad(run(x, r), x, v)
        x64 = xs[1].double().requires_grad_()

        def gradient_error(d: Description) -> float:
            (g,) = torch.autograd.grad(describe(d, x64, r), x64, v.double())
            return _relative(g_module, g)

        twin.train()
        with torch.no_grad():
            dropout = _relative(run(xs[1].clone(), rs[1]), ys[1].double()) > ALLOWED
        return dataclasses.replace(_decide(near_options, errors, gradient_error, len(options)), dropout=dropout)

    return experiment


def _check_token_wise(y: Tensor, y_changed: Tensor) -> None:
    """The first token of the input was changed between the two: the others must have stayed, to rounding."""
    rest, rest_changed = (t.reshape(-1, t.shape[-1])[1:] for t in (y, y_changed))
    if _relative(rest_changed, rest.double()) > ALLOWED:
        raise _MixesTokens("the output of a token depends on other tokens: not a feed-forward network")


def _first_changed(x: Tensor) -> Tensor:
    out = x.clone()
    out.view(-1, x.shape[-1])[0] *= -2.0
    return out


def _double(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.double()


def _rescued(near: Description, y: Tensor, compute: Callable[[Description], Tensor], last: Any) -> Iterator[Description]:
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


def _middle(
    twin: nn.Module, site: Site, generator: torch.Generator, call: tuple[tuple, dict[str, Any]] | None
) -> Callable[[list[Description]], Identity]:
    """The experiment on a pair: inject chosen outputs of the first linears into the layer, read the last one's input.

    Each linear is checked alone as well, so that the three together are the FFN.
    """
    assert call is not None
    dtype = matrix(twin.get_submodule(site.last)).dtype
    args, kwargs = _cast(call[0], dtype), _cast(call[1], dtype)
    for name in (*site.first, site.last):
        _check_linear(twin.get_submodule(name), name, generator)

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
                twin(*_negated(args, site.d_model), **_negated(kwargs, site.d_model))
            else:
                twin(*args, **kwargs)
        except _Stop:
            pass
        finally:
            for handle in handles:
                handle.remove()
        if not seen or any(c != 1 for c in calls.values()):
            counts = ", ".join(f"{n} {c}x" for n, c in calls.items())
            raise _Unfit(f"{site.last} must follow one call of each first linear; called: {counts}")
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
            _check_token_wise(h_1, run(lambda name, _: _first_changed(injected_1[name])))
            # Attention's query and output have an FFN's shapes; but what it writes depends on keys and values too.
            if _relative(run(lambda name, _: injected_1[name], other_inputs=True), h_1.double()) > ALLOWED:
                raise _MixesTokens(f"what {site.last} reads depends on more than the first linears' outputs")

            def error(d: Description) -> float:
                worst = 0.0
                for injected, h in runs:
                    truth = coefficients(d, [injected[n].double() for n in site.first])
                    if h.shape != truth.shape:
                        raise _Unfit(f"{site.last} reads shape {tuple(h.shape)}, the first linears give {tuple(truth.shape)}")
                    worst = max(worst, _relative(h, truth))
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
            return max(_relative(a, b) for a, b in zip(got, wanted))

        return _decide([options[i] for _, i in ranked], [e for e, _ in ranked], gradient_error, len(options))

    return experiment


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (tuple, list)):
        return type(value)(_cast(v, dtype) for v in value)
    if isinstance(value, dict):
        return {k: _cast(v, dtype) for k, v in value.items()}
    return value


def _negated(value: Any, d_model: int) -> Any:
    """The layer's arguments with every hidden state [..., d_model] changed."""
    if isinstance(value, Tensor):
        return value * -1.5 if value.is_floating_point() and value.dim() >= 2 and value.shape[-1] == d_model else value
    if isinstance(value, tuple):
        return tuple(_negated(v, d_model) for v in value)
    return {k: _negated(v, d_model) for k, v in value.items()} if isinstance(value, dict) else value


def _check_linear(linear: Any, name: str, generator: torch.Generator) -> None:
    weight = matrix(linear)
    x = torch.randn(8, weight.shape[1], generator=generator).to(weight)
    truth = nn.functional.linear(x.double(), weight.double(), _double(linear.bias))
    error = _relative(linear(x), truth)
    if error > ALLOWED:
        raise _Unfit(f"{name} ({type(linear).__name__}) is not x @ weight + bias: relative error {error:.1e}")


def _decide(
    options: list[Description], errors: list[float], gradient_error: Callable[[Description], float], tried: int
) -> Identity:
    """Exactly one description within ALLOWED, in values and gradients; else the nearest ones, as a reason."""
    order = sorted(range(len(options)), key=lambda i: errors[i])
    best = options[order[0]]
    rest = [i for i in order[1:] if options[i] != best]
    runner = rest[0] if rest else order[0]
    evidence = Evidence(
        error=errors[order[0]],
        allowed=ALLOWED,
        gradient_error=None,
        runner_up=options[runner].name(),
        runner_up_error=errors[runner] if rest else float("inf"),
        candidates=tried,
    )
    nearest = "; ".join(f"{options[i].name()} {errors[i]:.1e}" for i in order[:3])
    if evidence.error > ALLOWED:
        reason = f"no description matches (allowed {ALLOWED:.1e}); nearest: {nearest}"
        return Identity(description=None, reason=reason, evidence=evidence, token_wise=True)
    if evidence.runner_up_error <= ALLOWED:
        reason = f"two descriptions match (allowed {ALLOWED:.1e}): {nearest}"
        return Identity(description=None, reason=reason, evidence=evidence, token_wise=True)
    slope = gradient_error(best)
    evidence = dataclasses.replace(evidence, gradient_error=slope)
    if slope > ALLOWED:
        reason = f"outputs match {best.name()}, but input gradients differ by {slope:.1e} (allowed {ALLOWED:.1e})"
        return Identity(description=None, reason=reason, evidence=evidence, token_wise=True)
    notes = [f"output scaled by {best.scale:g}"] if best.scale != 1.0 else []
    if options[0].spec.down_bias and not best.spec.down_bias:
        notes.append("the bias of down is there, but the module's code does not use it")
    return Identity(description=best, reason="; ".join(notes), evidence=evidence, token_wise=True)
