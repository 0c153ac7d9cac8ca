"""The verbs `size` and `cost`. They compute nothing but numbers about an FFN, so that no torch is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .failures import guarded, usage
from .output import emit, progress, stdout_kept, table

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, nothing else there.")]
Why = Annotated[bool, typer.Option("--why", help="Print the formulas with the numbers put in.")]
Variant = Annotated[str | None, typer.Option(help="swiglu, geglu, reglu, gelu, relu, …; default: swiglu.")]
Bias = Annotated[bool, typer.Option("--bias", help="A bias on each projection.")]
FormatName = Annotated[
    str, typer.Option("--format", help="fp32 bf16 fp16 fp8 int8 int4 q8_0 q4_1 q4_0, int8_g32 … int4_g128.")
]
Group = Annotated[int | None, typer.Option(help="For int8 and int4: weights that share a scale, 32, 64 or 128.")]
Device = Annotated[str | None, typer.Option("--hardware", help='A device ("h200"), or "this": the machine it runs on.')]
Ranks = Annotated[int, typer.Option("--tp", help="Ranks that share each matrix.")]


@guarded
def size(
    d_model: Annotated[int | None, typer.Option(help="Width of a token.")] = None,
    variant: Variant = None,
    bias: Bias = False,
    budget: Annotated[str | None, typer.Option(help="As many parameters as another FFN: gelu:768x3072.")] = None,
    params: Annotated[str | None, typer.Option(help="Budget in parameters: 135266304, 135M.")] = None,
    flops: Annotated[str | None, typer.Option("--flops-per-token", help="Budget in FLOPs per token, forward.")] = None,
    n_bytes: Annotated[str | None, typer.Option("--bytes", help="Budget in bytes of the weights in --format.")] = None,
    tp: Ranks = 1,
    format: FormatName = "bf16",
    group: Group = None,
    hardware: Device = None,
    multiple_of: Annotated[int | None, typer.Option(help="A multiple that the width has to be of.")] = None,
    tokens: Annotated[list[int] | None, typer.Option(help="Tokens of the products, for tiles and waves.")] = None,
    like: Annotated[
        str | None, typer.Option(help="A published rule: llama, llama2-70b, llama3, palm, gpt2, bert, shazeer, …")
    ] = None,
    multiplier: Annotated[float | None, typer.Option(help="The rule's multiplier, in place of its own.")] = None,
    explain: Annotated[
        str | None, typer.Option(help="Explain a model's width: llama-2-7b, smollm2, a config.json or its folder.")
    ] = None,
    limit: Annotated[int, typer.Option(help="Most candidates listed.")] = 12,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time the best on this machine, and rank by that.")
    ] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the released models that --explain knows.")] = False,
    why: Why = False,
    json: Json = False,
) -> None:
    """Which d_ff: candidate widths near a budget, with every rule that they keep or break."""
    from ..count import sizing
    from ..count.explain import listing
    from . import size as work

    if list_:
        emit({"models": listing()}) if json else work.show_models()
        return
    counts = tuple(tokens) if tokens else (2048,)
    if explain is not None:
        with usage():
            c = sizing.constraints(
                tp=tp, format=format, group=group, device=hardware, multiple_of=multiple_of, tokens=counts
            )
            explained = work.explained(explain, c)
        emit(explained.to_dict()) if json else work.show_explanation(explained)
        return
    with usage():
        if d_model is None:
            raise ValueError("size needs --d-model, or --explain MODEL, or --list")
        found = sizing.size(
            d_model, variant=variant or "swiglu", bias=bias, budget=work.budget(budget),
            params=work.amount("params", params), flop_per_token=work.amount("flops-per-token", flops),
            n_bytes=work.amount("bytes", n_bytes), tp=tp, format=format, group=group, hardware=hardware,
            multiple_of=multiple_of, tokens=counts, like=like, multiplier=multiplier, limit=limit,
        )  # fmt: skip
    if measure:
        from . import measure as timing

        with stdout_kept(json), progress("timing candidates by turns") as step:
            found = timing.measure(found, progress=step)
    document = found.to_dict()
    if why:
        document["why"] = [line for x in found.candidates for line in work.reasons(x, found)]
    emit(document) if json else work.show(found, why)


@guarded
def cost(
    what: Annotated[
        str | None,
        typer.Argument(help="A shape (4096x11008), a model (llama-2-7b, smollm2), a config.json or its folder."),
    ] = None,
    variant: Variant = None,
    bias: Bias = False,
    tokens: Annotated[int, typer.Option(help="Tokens at once: 1 in decode, the prompt's length in prefill.")] = 1,
    format: FormatName = "bf16",
    group: Group = None,
    hardware: Device = None,
    tp: Ranks = 1,
    heads: Annotated[int | None, typer.Option(help="With a shape: query heads, for the block around it.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key and value heads; default: as many.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Width of a head; default: d_model / heads.")] = None,
    context: Annotated[int, typer.Option(help="Positions that each token attends to.")] = 2048,
    sequences: Annotated[int | None, typer.Option(help="Contexts among the tokens; default: one for each.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the activations: fp32, bf16, fp16.")] = None,
    compute: Annotated[str | None, typer.Option(help="Of the products: fp32, bf16, fp16, fp8, int8.")] = None,
    sweep: Annotated[str | None, typer.Option(help="tokens=1:4096, d_ff=8192:16384:256, tokens=1,8,64.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the sweep into a .png or .svg.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Best tp at each latency, for 8 to 4096 devices.")] = False,
    devices: Annotated[
        list[int] | None, typer.Option(help="Device counts of the plan; give it again for more.")
    ] = None,
    target_ms: Annotated[list[float] | None, typer.Option(help="Latency targets of the plan, ms per step.")] = None,
    intra_gbps: Annotated[float | None, typer.Option("--intra-GBps", help="Link in a node, GB/s each way.")] = None,
    intra_us: Annotated[float | None, typer.Option("--intra-us", help="Its time per step, µs.")] = None,
    inter_gbps: Annotated[
        float | None, typer.Option("--inter-GBps", help="Link between nodes, GB/s per device.")
    ] = None,
    inter_us: Annotated[float | None, typer.Option("--inter-us", help="Its time per step, µs.")] = None,
    base_us: Annotated[float | None, typer.Option("--base-us", help="Time to start a collective, µs.")] = None,
    devices_per_node: Annotated[int | None, typer.Option(help="Devices in a node.")] = None,
    nodes: Annotated[
        int | None, typer.Option(help="Nodes that the ranks stand on; with --plan: that there are.")
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Measure this machine again, keep the larger figures.")
    ] = False,
    list_: Annotated[bool, typer.Option("--list", help="List devices, formats and models.")] = False,
    why: Why = False,
    json: Json = False,
) -> None:
    """What it costs: parameters, FLOPs, bytes, activations, and the floor of its time, with what binds."""
    from . import cost as work
    from .cost_tables import show

    if list_:
        _list(json)
        return
    with usage():
        if what is None:
            raise ValueError("cost needs a shape (4096x11008), a model (llama-2-7b) or a config.json; or --list")
        request = work.Request(
            what=what, variant=variant, bias=bias, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            options={"tokens": tokens, "format": format, "group": group, "hardware": hardware, "tp": tp,
                     "context": context, "sequences": sequences, "dtype": dtype, "compute": compute},
            links={"intra_GBps": intra_gbps, "intra_us": intra_us, "inter_GBps": inter_gbps, "inter_us": inter_us,
                   "base_us": base_us, "devices_per_node": devices_per_node},
            nodes=nodes,
            sweep=sweep, plot=plot, plan=plan, devices=devices or (), targets_ms=target_ms or (), probe=probe,
        )  # fmt: skip
        with progress("measuring this machine" if probe or hardware == "this" else "counting"), stdout_kept(json):
            document = work.run(request)
    lines = document["_cost"].why()
    if json:
        shown = {key: value for key, value in document.items() if not key.startswith("_")}
        emit({**shown, "why": lines} if why else shown)
        return
    show(document)
    if why:
        print()
        for line in lines:
            print(line)


def _list(json: bool) -> None:
    from ..count import explain, hardware
    from .cost import device_dict
    from .output import number
    from .size import show_models

    devices = [{"name": slug, **device_dict(d)} for slug, d in hardware.table().items()]
    document: dict[str, Any] = {
        "hardware": devices,
        "formats": explain.format_listing(),
        "models": explain.listing(),
    }
    if json:
        emit(document)
        return
    rows = [
        [d.slug, d.kind, *(number(d.peak_flops[k] / 1e12) if k in d.peak_flops else "–" for k in hardware.RATES),
         number(d.bytes_per_s / 1e9), "–" if d.memory_bytes is None else number(d.memory_bytes / 1e9),
         "–" if d.links is None else number(d.links.intra.bytes_per_s / 1e9), d.verified]
        for d in hardware.table().values()
    ]  # fmt: skip
    heads = ["device", "kind", *(f"{k}, T(FL)OP/s" for k in hardware.RATES), "memory, GB/s", "memory, GB",
             "link in a node, GB/s", "seen in a source"]  # fmt: skip
    table("devices; also: this, the machine it runs on", heads, rows)
    formats = [[f["name"], number(f["bits_per_weight"]), f["layout"], f["compute"]] for f in document["formats"]]
    table("formats", ["format", "bits per weight", "layout", "products in"], formats)
    show_models()
