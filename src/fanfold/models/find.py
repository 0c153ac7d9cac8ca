"""`find`: every FFN in a module tree, found by shapes and identified by experiment."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn

from ..layout import SEPARATE, Layout
from ..spec import Spec
from .alike import kind
from .decide import Evidence
from .description import Description
from .identify import identify
from .inputs import default_inputs, record_calls
from .structure import Site, scan

Progress = Callable[[int, int], None]


class FindError(ValueError):
    """No FFN was found; the message lists what was looked at."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """One FFN, or something with an FFN's shapes that could not be identified.

    path         of the module, or of the layer that holds its parts (kind "pair").
    kind         "module": one module is the FFN; "pair": a layer's code connects its linears.
    spec, layout what it computes and how gate and up lie; None if not identified.
    projections  role ("gate", "up", "down", or "gate_up" when fused) -> path of its linear in the model.
    status       "identified" or "unidentified", with `reason`; `evidence` is what the experiment saw.
    scale        constant factor on the output; residual: forward adds its second argument; dropout: its
                 outputs differ in training mode.
    """

    path: str
    kind: str
    spec: Spec | None
    layout: Layout | None
    projections: dict[str, str]
    status: str
    reason: str
    evidence: Evidence | None
    n_params: int
    scale: float = 1.0
    residual: bool = False
    dropout: bool = False

    @property
    def timed_modules(self) -> list[str]:
        """Paths of the modules whose forward times add up to this FFN's (a pair: without the activation)."""
        return [self.path] if self.kind == "module" else list(self.projections.values())

    def to_dict(self) -> dict[str, Any]:
        out = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        out["spec"] = self.spec.to_dict() if self.spec else None
        out["layout"] = dataclasses.asdict(self.layout) if self.layout else None
        out["evidence"] = self.evidence.to_dict() if self.evidence else None
        return out


def find(model: nn.Module, inputs: Any = None, progress: Progress | None = None, each: bool = True) -> list[Found]:
    """Find and identify every FFN in `model`.

    inputs    for one run of the whole model, where a layer's code connects the FFN's parts (OPT, BERT): a dict of
              keyword arguments, a tuple, or a tensor; default: small random ones made from a transformers config.
    progress  called with (done, total).
    each      False: experiment on one module of each kind (code and shapes alike), and take the rest to be the same;
              for callers who check what each one computes.
    -> in tree order; "unidentified" ones included, with the reason. The model is not changed: experiments run on
    float32 copies of one FFN at a time. Raises FindError, listing what was looked at, if nothing has an FFN's shape.
    """
    if not isinstance(model, nn.Module):
        raise FindError(f"model is a {type(model).__name__}, expected a torch.nn.Module; ff.load reads files")
    sites, overlooked, looked = scan(model)
    pairs = [s.path for s in sites if s.kind == "pair"]
    calls: dict[str, Any] = {}
    why = ""
    if pairs:
        given = inputs if inputs is not None else default_inputs(model)
        if given is None:
            why = "no inputs to run the model with: pass inputs="
        else:
            calls, why = record_calls(model, pairs, given)
    out = []
    known: dict[Any, Found | None] = {}
    for i, site in enumerate(sites):
        like = None if each else kind(model.get_submodule(site.path), site)
        if like is not None and like in known:
            found = _moved(known[like], site.path)
        else:
            found = known[like] = _found(model, site, calls.get(site.path), why)
        if found is not None:
            out.append(found)
        if progress is not None:
            progress(i + 1, len(sites))
    out += [_overlooked(model, o.path, o.reason) for o in overlooked]
    if not out:
        seen = "; ".join(looked[:12]) + ("; …" if len(looked) > 12 else "") if looked else "no linear layers at all"
        raise FindError(
            f"no FFN found in {type(model).__name__}: expected linears d_model->d_ff and d_ff->d_model in one module "
            f"or in neighbours; looked at: {seen}"
        )
    order = {path: i for i, (path, _) in enumerate(model.named_modules())}
    return sorted(out, key=lambda f: order[f.path])


def _found(model: nn.Module, site: Site, call: Any, why: str) -> Found | None:
    """The outcome for one site; None if its code mixes tokens, or is not a tensor function of square matrices: then
    it is attention or the like, and no FFN was passed over."""
    module = model.get_submodule(site.path)
    identity = identify(module, site, call)
    for other in site.alternatives if identity.description is None else ():
        second = identify(module, other, call)
        if second.description is not None:
            site, identity = other, second
            break
    if identity.token_wise is False or (site.weak and identity.description is None and identity.token_wise is None):
        return None
    reason = identity.reason
    if identity.description is None and call is None and site.kind == "pair" and why:
        reason = f"{reason} ({why})"
    d = identity.description
    return Found(
        path=site.path,
        kind=site.kind,
        spec=d.spec if d else None,
        layout=Layout(order=d.order if d else SEPARATE, transposed=site.transposed) if d else None,
        projections={role: _join(site.path, name) for role, name in _roles(site, d).items()},
        status="identified" if d else "unidentified",
        reason=reason,
        evidence=identity.evidence,
        n_params=sum(p.numel() for n in (*site.first, site.last) for p in module.get_submodule(n).parameters()),
        scale=d.scale if d else 1.0,
        residual=d.residual if d else False,
        dropout=identity.dropout,
    )


def _moved(found: Found | None, path: str) -> Found | None:
    """The same for a module of the same kind at another path."""
    if found is None:
        return None
    cut = len(found.path)
    return dataclasses.replace(
        found, path=path, projections={role: path + inside[cut:] for role, inside in found.projections.items()}
    )


def _roles(site: Site, d: Description | None) -> dict[str, str]:
    if site.fused:
        return {"gate_up": site.first[0], "down": site.last}
    if len(site.first) == 1:
        return {"up": site.first[0], "down": site.last}
    gate, up = site.first if d is None or d.gate_first else site.first[::-1]
    return {"gate": gate, "up": up, "down": site.last}


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _overlooked(model: nn.Module, path: str, reason: str) -> Found:
    size = sum(p.numel() for p in model.get_submodule(path).parameters(recurse=False))
    return Found(
        path=path,
        kind="module",
        spec=None,
        layout=None,
        projections={},
        status="unidentified",
        reason=reason,
        evidence=None,
        n_params=size,
    )
