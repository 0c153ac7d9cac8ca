"""Identification by experiment: which description computes what a module computes.

A copy of the module (or of the layer around a pair) gets Gaussian weights and biases of known scale, is run on random
inputs whose pre-activations have std 0.1 … 30 (so that a clamp at 7 or 10 shows, and gelu_erf parts from gelu_tanh),
and every candidate description is computed in float64 beside it. One that agrees to rounding at *every* scale, in
outputs and in input gradients, while no other does, is the answer; else the module is left alone.
T tokens, D d_model, F d_ff.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from .decide import Identity
from .description import activation_params, candidates
from .laboratory import MixesTokens, Unfit, disturb, free_copy, randomise
from .middle import middle
from .structure import Site
from .whole import whole


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
        reason = "a layer's code connects its linears, and it was not reached in a run of the model: pass inputs="
    if reason is not None:
        return Identity(description=None, reason=reason, evidence=None)
    try:
        with torch.inference_mode(False), torch.enable_grad():  # gradients are part of the experiment
            return _experiment(module, site, call)
    except MixesTokens as mixes:
        return Identity(description=None, reason=str(mixes), evidence=None, token_wise=False)
    except Unfit as unfit:
        return Identity(description=None, reason=str(unfit), evidence=None)
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError, IndexError, KeyError) as error:
        text = str(error).strip().splitlines()[0] if str(error).strip() else ""
        reason = f"{type(error).__name__} when run on its own: {text}"
        return Identity(description=None, reason=reason, evidence=None)


def _experiment(module: nn.Module, site: Site, call: tuple[tuple, dict[str, Any]] | None) -> Identity:
    twin = free_copy(module)
    generator = torch.Generator().manual_seed(0)
    for name in (*site.first, site.last):
        randomise(twin.get_submodule(name), generator)
    disturbed = disturb(twin, [twin.get_submodule(n) for n in (*site.first, site.last)], generator)
    biases = {k: twin.get_submodule(n).bias is not None for k, n in (("first", site.first[0]), ("last", site.last))}
    options = candidates(site, biases, activation_params(twin))
    experiment = whole(twin, site, generator) if site.kind == "module" else middle(twin, site, generator, call)
    identity = experiment(options)
    if disturbed and identity.description is not None and identity.description.scale != 1.0:
        reason = "the output is scaled by a parameter or buffer of the module: not supported"
        return dataclasses.replace(identity, description=None, reason=reason)
    return identity
