"""What Inductor compiles our operators to: `fanfold::packed_run`, in C, and products of one x in one call.

In a decoding model a call of an operator that is written in Python takes 28 us beside its work, longer than many of
them work (SmolLM2 in int8, docs/measured.md); in C 12. So a pass over Inductor's graph puts in the place of
`packed_linear` and `packed_ffn` an operator whose implementation is C, as far as PyTorch offers its stable C interface
(2.10 and later), and merges attention's q, k and v. There nodes that have one x for argument have one value of x:
nothing in that graph is written to in place.

Inductor has no public list of passes that an operator's author may add to. Ours stands beside its own when it first
meets one of our operators; should that list be gone, the operators stay what they are.

    packed_run(Tensor x, Tensor[] parts, str description) -> Tensor

    parts        the matrices' bytes, then the biases that there are
    description  "linear|…" or "ffn|…", which biases there are as 0 and 1, and the text that the operators of
                 `packed_op` take, those of several linears with ";" between
    ->           [..., N], the outputs of several linears side by side
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import cpu, packed_op

_library = torch.library.Library("fanfold", "FRAGMENT")
_library.define("packed_run(Tensor x, Tensor[] parts, str description) -> Tensor")

_POST_GRAD = "torch._inductor.fx_passes.post_grad"


def _describe(kind: str, biases: list[Any], text: str) -> str:
    return f"{kind}|{''.join('01'[bias is not None] for bias in biases)}|{text}"


@functools.lru_cache(maxsize=4096)
def _read(description: str) -> tuple[str, tuple[bool, ...], str]:
    kind, flags, text = description.split("|", 2)
    return kind, tuple(flag == "1" for flag in flags), text


def run(x: Tensor, parts: list[Tensor], description: str) -> Tensor:
    """One `packed_op.ffn`, or the outputs of `packed_op.linear`s of one x side by side. Further calls like it are made
    without Python."""
    kind, flags, text = _read(description)
    n_matrices = len(parts) - sum(flags)
    matrices, given = parts[:n_matrices], iter(parts[n_matrices:])
    biases = [next(given) if there else None for there in flags]
    if kind == "ffn":
        *gate, up, down = matrices
        tensors = (gate[0] if gate else None, up, down, *biases)
        y = packed_op.ffn(x, *tensors, text)  # type: ignore[arg-type]
        _remember(x, parts, description, n_matrices, [packed_op.bind_ffn(x, tensors, text)], [y])
        return y
    products = list(zip(matrices, biases, text.split(";"), strict=True))
    ys = [packed_op.linear(x, *each) for each in products]
    _remember(x, parts, description, n_matrices, [packed_op.bind_linear(x, *each) for each in products], ys)
    return ys[0] if len(ys) == 1 else torch.cat(ys, -1)


def _remember(
    x: Tensor, parts: list[Tensor], description: str, n_matrices: int, kernels: list[Any], ys: list[Tensor]
) -> None:
    if not IN_C or "FANFOLD_ISA" in os.environ or not x.is_contiguous() or any(k is None for k in kernels):
        return
    together = len(kernels) <= 1 + cpu.MOST_BESIDE and all(cpu.fit_together(kernels[0], k) for k in kernels[1:])
    places = [(t.data_ptr(), t.numel()) for t in parts]
    cpu.remember(description, x, kernels, [y.shape[-1] for y in ys], together, n_matrices, places)


@torch.library.register_fake("fanfold::packed_run")
def _(x, parts, description):
    kind, _, text = _read(description)
    if kind == "ffn":
        return x.new_empty(x.shape)
    return x.new_empty((*x.shape[:-1], sum(packed_op._kind(one)[1][0] for one in text.split(";"))))


def _by_handles(given: list[Any], description: str) -> Any:
    """`run` for C: handles of x and the parts, which are taken over, to one of y."""
    # not PyTorch's function for one of them: that takes nothing over (2.13)
    x, *parts = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(given)  # type: ignore[attr-defined]
    y = run(x, parts, description)
    return torch._C._aoti.unsafe_alloc_void_ptr_from_tensor(y)  # type: ignore[attr-defined]


def _implement() -> bool:
    """-> whether in C."""
    ending = {"win32": "dll", "darwin": "dylib"}.get(sys.platform, "so")
    name = f"{'' if sys.platform == 'win32' else 'lib'}torch_cpu.{ending}"
    try:
        there = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
        functions = {n: ctypes.cast(getattr(there, n), ctypes.c_void_p).value for n in cpu._cpu.graph_op_needs()}
        _ = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs  # type: ignore[attr-defined]
    except (OSError, AttributeError):  # an earlier PyTorch, or none of our kernels
        _library.impl("packed_run", run, "CPU")
        return False
    cpu._cpu.register_graph_op(functions, _by_handles)
    return True


IN_C = _implement()


# ---- the pass ----


def offer() -> None:
    """Put the pass among Inductor's, if that is at work and does not have it yet; in Python it would gain nothing."""
    passes = getattr(sys.modules.get(_POST_GRAD), "pass_patterns", None)
    if IN_C and isinstance(passes, list) and _PASS not in passes:
        passes.append(_PASS)


class _Pass:
    """In the form of Inductor's own."""

    def apply(self, graph: torch.fx.Graph) -> int:
        """-> how many operators were replaced."""
        products, ffns = defaultdict(list), []
        for node in graph.nodes:
            if node.target is torch.ops.fanfold.packed_linear.default:
                products[node.args[0]].append(node)
            elif node.target is torch.ops.fanfold.packed_ffn.default:
                ffns.append(node)
        for node in ffns:
            _replace_ffn(graph, node)
        # Inductor reads `as_strided` on the buffer below a slice, with the strides that it had when traced.
        apart = any(node.target is torch.ops.aten.as_strided.default for node in graph.nodes)
        for nodes in products.values():
            while nodes:
                nodes = _replace_products(graph, nodes, apart)
        return len(ffns) + len(products)


_PASS = _Pass()
packed_op.when_traced.append(offer)


def _replace_ffn(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    with graph.inserting_before(node):
        new = _call(graph, "ffn", [node])
    new.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _replace_products(graph: torch.fx.Graph, nodes: list[torch.fx.Node], apart: bool) -> list[torch.fx.Node]:
    """The first, and as many others as one pass takes, unless each is to stay apart. -> the others"""
    first = nodes[0]
    able = [n for n in nodes[1:] if not apart and _may_precede(n, first)][: cpu.MOST_BESIDE]
    group = [first, *able]
    for node in group:
        for needed in node.all_input_nodes:
            if needed > first:
                first.prepend(needed)
    value = first.meta["val"]
    widths = [node.meta["val"].shape[-1] for node in group]
    with graph.inserting_before(first):
        new = _call(graph, "linear", group)
        new.meta["val"] = value.new_empty((*value.shape[:-1], sum(widths)))
        at = 0
        for node, width in zip(group, widths):
            one = new
            if len(group) > 1:
                one = graph.call_function(torch.ops.aten.slice.Tensor, (new, value.dim() - 1, at, at + width))
                one.meta["val"] = new.meta["val"].narrow(-1, at, width)
            at += width
            node.replace_all_uses_with(one)
    for node in group:
        graph.erase_node(node)
    return [n for n in nodes[1:] if n not in able]


def _call(graph: torch.fx.Graph, kind: str, nodes: list[torch.fx.Node]) -> torch.fx.Node:
    """`packed_run` for one `packed_ffn`, or for `packed_linear`s of one x."""
    text = ";".join(str(node.args[-1]) for node in nodes)

    def merged(all_args: list[tuple[Any, ...]]) -> tuple[Any, ...]:
        matrices = [t for args in all_args for t in args[1 : 4 if kind == "ffn" else 2]]
        biases = [t for args in all_args for t in args[4 if kind == "ffn" else 2 : -1]]
        return all_args[0][0], [t for t in (*matrices, *biases) if t is not None], _describe(kind, biases, text)

    new = graph.call_function(torch.ops.fanfold.packed_run.default, merged([node.args for node in nodes]))
    seen = [node.meta["eager_input_vals"] for node in nodes if "eager_input_vals" in node.meta]
    if len(seen) == len(nodes):  # the strides that an operator may count on
        new.meta["eager_input_vals"] = merged([args for args, _ in seen]), {}
    return new


def _may_precede(node: torch.fx.Node, first: torch.fx.Node) -> bool:
    """Whether what `node` needs is there before `first`, or can be: a bias of the graph's inputs in another dtype."""
    return all(
        needed < first or all(source.op in ("placeholder", "get_attr") for source in needed.all_input_nodes)
        for needed in node.all_input_nodes
    )
