"""What adding up partial results over devices takes: the alpha-beta model of one all-reduce.

n bytes, p devices = g per node * m nodes.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from .hardware import Links


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """One all-reduce.

    n_bytes          of the tensor that is reduced (the same on every device).
    intra_bytes, inter_bytes   that each device sends within its node, and to other nodes.
    seconds          the time of it; base, steps and bytes as in `all_reduce`.
    per_node, nodes  g and m.
    """

    n_bytes: float
    intra_bytes: float
    inter_bytes: float
    seconds: float
    per_node: int
    nodes: int


def spread(links: Links, devices: int, nodes: int) -> Links:
    """The links as `devices` see them that stand on `nodes` nodes, as many on each.

    Raises ValueError if the nodes get unequal numbers, or more than they have room for.
    """
    if devices % nodes:
        raise ValueError(f"{devices} devices on {nodes} nodes: expected a number of nodes that divides {devices}")
    if devices // nodes > links.devices_per_node:
        fitting = (n for n in range(nodes, devices + 1) if devices % n == 0 and devices // n <= links.devices_per_node)
        least = next(fitting)
        raise ValueError(
            f"{devices} devices on {nodes} nodes of {links.devices_per_node}: expected at least {least} nodes"
        )
    return dataclasses.replace(links, devices_per_node=devices // nodes)


def all_reduce(n_bytes: float, devices: int, links: Links) -> AllReduce:
    """Bytes and time of one all-reduce over `devices`, the nodes filled one after the other.

    Within a node a reduce-scatter and an all-gather over g devices, between them an all-reduce of n/g over m nodes:
        bytes sent per device  2 (g-1)/g n  within the node,  2 (m-1)/m n/g  to other nodes
        seconds                base + 2 (g-1) alpha_intra + 2 ceil(log2 m) alpha_inter + bytes / beta of each link
    One device reduces nothing and takes no time. The steps are those of NCCL's tree (NVIDIA/nccl src/graph/tuning.cc).
    Switches that add in the network (NVLS, SHARP) send fewer bytes.

    Raises ValueError if `devices` do not fill whole nodes.
    """
    if devices == 1:
        return AllReduce(n_bytes=n_bytes, intra_bytes=0.0, inter_bytes=0.0, seconds=0.0, per_node=1, nodes=1)
    g = min(devices, links.devices_per_node)
    if devices % g:
        raise ValueError(
            f"{devices} devices do not fill nodes of {links.devices_per_node}: "
            f"expected at most {links.devices_per_node}, or a multiple of it"
        )
    m = devices // g
    intra = 2 * (g - 1) / g * n_bytes
    inter = 2 * (m - 1) / m * n_bytes / g
    steps = 2 * (g - 1) * links.intra.step_s + 2 * math.ceil(math.log2(m)) * links.inter.step_s
    seconds = links.base_s + steps + intra / links.intra.bytes_per_s + inter / links.inter.bytes_per_s
    return AllReduce(
        n_bytes=n_bytes, intra_bytes=intra, inter_bytes=inter, seconds=seconds, per_node=g, nodes=m
    )  # fmt: skip
