"""One FFN over many devices: which rank owns which channels, the cutting of weights, and modules that run cut.

gate and up are cut by output channel, down by input channel: rank r owns channels start … stop, computes its partial
sum, and one all-reduce adds the sums. Processes, groups and tensors are PyTorch's own: torch.distributed, DTensor.

    p = ff.parallel.plan(spec, tp=8, format="int4")     # pure: ranges, shapes, bytes; no torch
    part = ff.parallel.shard(weights, p, rank)          # Weights of one rank; `unshard` puts them together
    ff.parallel.apply(model, mesh)                      # every FFN of a model runs cut over the mesh
    ff.parallel.from_part(part, p, mesh)                # the FFN over all ranks, from the part that each has read
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# name -> module inside this package; imported when first used, so that `plan` needs no torch
_LAZY = {
    "Plan": "plans",
    "plan": "plans",
    "pad": "slices",
    "shard": "slices",
    "unshard": "slices",
    "FFNParallel": "attach",
    "apply": "attach",
    "from_part": "parts",
    "report": "attach",
    "ParallelError": "together",
    "agree": "together",
    "together": "together",
    "save": "folder",
}
__all__ = [
    "FFNParallel",
    "ParallelError",
    "Plan",
    "agree",
    "apply",
    "from_part",
    "pad",
    "plan",
    "report",
    "save",
    "shard",
    "together",
    "unshard",
]

if TYPE_CHECKING:
    from .attach import FFNParallel, apply, report
    from .folder import save
    from .parts import from_part
    from .plans import Plan, plan
    from .slices import pad, shard, unshard
    from .together import ParallelError, agree, together


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'fanfold.parallel' has no attribute {name!r}; names: {', '.join(__all__)}")
    value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value
