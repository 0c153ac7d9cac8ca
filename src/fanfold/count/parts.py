"""The parts of a cost: the FFN, the attention beside it, the output head, and their sums for a block and a model."""

from __future__ import annotations

from ..spec import Spec
from . import ffn, formats, roof
from .block import Attention, Block
from .figures import Figures
from .models import Model
from .settings import Settings


def ffn_part(spec: Spec, s: Settings, reads: float = 1.0, uses: int = 1) -> Figures:
    """Figures of one FFN; of a mixture, `uses` experts run per token and the weights of `reads` are read."""
    figures = Figures()
    n_bytes = _ffn_parameters(figures, spec, s)
    k, d, f = ffn.n_matrices(spec), spec.d_model, spec.d_ff
    forward = s.tokens * uses * ffn.flops_per_token(spec)
    of_uses = {"uses": uses} if uses > 1 else {}
    times = " * uses" if uses > 1 else ""
    figures.add("forward_flop", "FLOPs forward", "FLOP", forward, f"2 * n_matrices * d_model * d_ff * tokens{times}",
                n_matrices=k, d_model=d, d_ff=f, tokens=s.tokens, **of_uses)  # fmt: skip
    figures.add("backward_flop", "FLOPs backward", "FLOP", 2 * forward, "2 * forward_flop", forward_flop=forward)
    _ffn_activations(figures, spec, s)
    read = n_bytes * reads
    if reads != 1.0:
        figures.add("read_weight_bytes", "weights read, experts in use", "B", read, "weight_bytes * experts_read",
                    weight_bytes=n_bytes, experts_read=reads)  # fmt: skip
    per_token = 2 * d * s.width
    roof.add_traffic(figures, s, read, per_token, forward)
    roof.add_times(figures, s, read, per_token, forward)
    roof.add_all_reduce(figures, s, d)
    roof.add_step(figures, s)
    return figures


def _ffn_parameters(figures: Figures, spec: Spec, s: Settings) -> int:
    d, f = spec.d_model, spec.d_ff
    for name in formats.matrices(spec):
        figures.add(f"{name}_params", f"parameters of {name}", "", d * f, "d_model * d_ff", d_model=d, d_ff=f)
    biases = formats.n_biases(spec)
    if biases:
        figures.add("bias_params", "parameters of the biases", "", biases,
                    "d_ff * (gate_bias + up_bias) + d_model * down_bias", d_ff=f, d_model=d,
                    gate_bias=int(spec.gate_bias), up_bias=int(spec.up_bias),
                    down_bias=int(spec.down_bias))  # fmt: skip
    figures.add("params", "parameters", "", spec.n_params, "n_matrices * d_model * d_ff + biases",
                n_matrices=ffn.n_matrices(spec), d_model=d, d_ff=f, biases=biases)  # fmt: skip
    n_bytes = formats.ffn_bytes(spec, s.form.name)
    inward, outward = s.form.matrix_bytes(1, d), s.form.matrix_bytes(1, f)
    figures.add(
        "weight_bytes",
        f"weights in {s.form.name}",
        "B",
        n_bytes,
        "(n_matrices - 1) * d_ff * row_of_d_model + d_model * row_of_d_ff + biases * bias_bytes",
        s.form.layout,
        n_matrices=ffn.n_matrices(spec),
        d_ff=f,
        row_of_d_model=inward,
        d_model=d,
        row_of_d_ff=outward,
        biases=biases,
        bias_bytes=s.form.bias_bytes,
    )
    if s.tp > 1:
        figures.add("device_weight_bytes", "weights per device", "B", n_bytes / s.tp, "weight_bytes / tp",
                    weight_bytes=n_bytes, tp=s.tp)  # fmt: skip
    return n_bytes


def _ffn_activations(figures: Figures, spec: Spec, s: Settings) -> None:
    d, f, width = spec.d_model, spec.d_ff, s.width
    figures.add("fused_activation_bytes", "activations of inference, fused", "B",
                ffn.inference_bytes(spec, s.tokens, s.dtype), "tokens * 2 * d_model * width",
                tokens=s.tokens, d_model=d, width=width)  # fmt: skip
    figures.add("unfused_activation_bytes", "activations of inference, op by op", "B",
                ffn.inference_bytes(spec, s.tokens, s.dtype, fused=False),
                "tokens * (d_model + n_matrices * d_ff) * width",
                tokens=s.tokens, d_model=d, n_matrices=ffn.n_matrices(spec), d_ff=f, width=width)  # fmt: skip
    for save in ffn.KEEPERS:
        n_d, n_f, n_mask = ffn.saved_tensors(spec, save)
        figures.add(
            f"saved_{save}_bytes",
            "kept for backward by PyTorch's own ops" if save == "autograd" else f"kept for backward, save={save}",
            "B",
            ffn.saved_bytes(spec, s.tokens, save, s.dtype),
            "tokens * ((of_d_model * d_model + of_d_ff * d_ff) * width + masks * d_ff)",
            tokens=s.tokens,
            of_d_model=n_d,
            d_model=d,
            of_d_ff=n_f,
            d_ff=f,
            width=width,
            masks=n_mask,
        )


def attention_part(att: Attention, s: Settings) -> Figures:
    """Figures of one layer's attention: projections, scores over the context, and the cache of keys and values."""
    figures = Figures()
    q, kv = att.n_heads * att.head_dim, att.n_kv_heads * att.head_dim
    for name, (rows, length) in att.matrices.items():
        figures.add(f"{name}_params", f"parameters of {name}", "", rows * length, "rows * length",
                    rows=rows, length=length)  # fmt: skip
    figures.add("params", "parameters", "", att.n_params, "2 * d_model * (q_width + kv_width) + biases",
                d_model=att.d_model, q_width=q, kv_width=kv, biases=att.n_biases)  # fmt: skip
    n_bytes = sum(s.form.matrix_bytes(*shape) for shape in att.matrices.values()) + att.n_biases * s.form.bias_bytes
    figures.add(
        "weight_bytes",
        f"weights in {s.form.name}",
        "B",
        n_bytes,
        "(q_width + 2 * kv_width) * row_of_d_model + d_model * row_of_q + biases * bias_bytes",
        q_width=q,
        kv_width=kv,
        row_of_d_model=s.form.matrix_bytes(1, att.d_model),
        d_model=att.d_model,
        row_of_q=s.form.matrix_bytes(1, q),
        biases=att.n_biases,
        bias_bytes=s.form.bias_bytes,
    )
    projections = s.tokens * 2 * (att.n_params - att.n_biases)
    scores = s.tokens * att.score_flops_per_token(s.context)
    figures.add("projection_flop", "FLOPs of the projections", "FLOP", projections, "2 * weights * tokens",
                weights=att.n_params - att.n_biases, tokens=s.tokens)  # fmt: skip
    figures.add("score_flop", "FLOPs of the scores", "FLOP", scores, "4 * context * n_heads * head_dim * tokens",
                context=s.context, n_heads=att.n_heads, head_dim=att.head_dim, tokens=s.tokens)  # fmt: skip
    flop = projections + scores
    figures.add("forward_flop", "FLOPs forward", "FLOP", flop, "projections + scores",
                projections=projections, scores=scores)  # fmt: skip
    figures.add("backward_flop", "FLOPs backward", "FLOP", 2 * flop, "2 * forward_flop", forward_flop=flop)
    cache = s.sequences * s.context * att.cache_bytes_per_position(s.width)
    figures.add("cache_bytes", "keys and values read", "B", cache,
                "sequences * context * 2 * n_kv_heads * head_dim * width", sequences=s.sequences, context=s.context,
                n_kv_heads=att.n_kv_heads, head_dim=att.head_dim, width=s.width)  # fmt: skip
    # ranks beyond the key and value heads hold copies of them
    per_token = 2 * att.d_model * s.width + cache / s.tokens / min(s.tp, att.n_kv_heads)
    roof.add_traffic(figures, s, n_bytes, per_token, flop)
    roof.add_times(figures, s, n_bytes, per_token, flop)
    roof.add_all_reduce(figures, s, att.d_model)
    roof.add_step(figures, s)
    return figures


def block_parts(block: Block, s: Settings) -> dict[str, Figures]:
    """The FFN, the attention and their sum, with the FFN's share of each."""
    inner = {"ffn": ffn_part(block.ffn, s), "attention": attention_part(block.attention, s)}
    whole = Figures()
    sum_up(whole, s, {"ffn": 1, "attention": 1}, inner)
    whole.add(
        "equal_context_tokens",
        "context at which scores cost as much as the FFN",
        "tokens",
        block.equal_context(),
        "n_matrices * d_model * d_ff / (2 * n_heads * head_dim)",
        n_matrices=ffn.n_matrices(block.ffn),
        d_model=block.ffn.d_model,
        d_ff=block.ffn.d_ff,
        n_heads=block.attention.n_heads,
        head_dim=block.attention.head_dim,
    )
    return {**inner, "block": whole}


_SUMS = {
    "params": ("parameters", ""),
    "weight_bytes": ("weights", "B"),
    "forward_flop": ("FLOPs forward", "FLOP"),
    "backward_flop": ("FLOPs backward", "FLOP"),
    "moved_bytes": ("bytes moved per device", "B"),
    "memory_s": ("time to move the bytes", "s"),
    "compute_s": ("time to multiply", "s"),
    "floor_s": ("floor of the time", "s"),
    "all_reduce_s": ("all-reduce time", "s"),
}


def sum_up(whole: Figures, s: Settings, counts: dict[str, int], inner: dict[str, Figures]) -> None:
    """Add the sums of the parts, each so many times, and the FFN's share of parameters, FLOPs and floor."""
    for key, (label, unit) in _SUMS.items():
        having = {name: figures[key] for name, figures in inner.items() if key in figures}
        if not having:
            continue
        missing = next((f.note for f in having.values() if f.value is None), None)
        if missing is not None:
            whole.add(key, label, unit, None, "", missing)
            continue
        numbers = {name: f.value for name, f in having.items() if f.value is not None}
        formula = " + ".join(name if counts[name] == 1 else f"{counts[name]} * {name}" for name in numbers)
        total = sum(counts[name] * value for name, value in numbers.items())
        whole.add(key, label, unit, total, formula, **numbers)
    for key, label in (("params", "parameters"), ("forward_flop", "FLOPs"), ("floor_s", "floor")):
        if key in whole and whole[key].value:
            part, total = counts["ffn"] * inner["ffn"].value(key), whole.value(key)
            whole.add(f"ffn_share_of_{key}", f"FFN's share of the {label}", "", part / total, "of_ffn / total",
                      of_ffn=part, total=total)  # fmt: skip
    roof.add_step(whole, s)


def model_parts(model: Model, s: Settings, notes: list[str]) -> dict[str, Figures]:
    """One FFN, one attention and the head of a model, and the sums over its layers."""
    mixture = model.n_experts > 0
    reads, uses = 1.0, 1
    if mixture:
        uses = model.experts_per_token
        reads = model.n_experts * (1 - (1 - uses / model.n_experts) ** s.tokens)
        notes.append(
            f"each FFN is {model.n_experts} experts, {uses} per token; {s.tokens} tokens read {reads:.4g} of them "
            "if each is as likely; shared experts and dense first layers are not counted"
        )
    inner = {"ffn": ffn_part(model.ffn, s, reads, uses)}
    counts = {"ffn": model.n_ffns, "head": 1}
    if model.attention is not None:
        inner["attention"], counts["attention"] = attention_part(model.attention, s), model.n_attentions
    else:
        notes.append("attention is left out: its shapes (multi-head latent attention) are not known here")
    inner["head"] = _head_part(model, s)
    whole = Figures()
    sum_up(whole, s, counts, inner)
    _model_parameters(whole, model)
    _model_bytes(whole, model, inner)
    if model.note:
        notes.append(f"{model.name}: {model.note}")
    if model.shared:
        notes.append("its layers share their parameters; its embedding is factorised, but counted whole here")
    if not model.verified:
        notes.append(f"the shapes of {model.name} are from memory, not seen in a source")
    notes.append("norms and position embeddings are not counted, nor attention's biases where no config states them")
    return {**inner, "model": whole}


def _head_part(model: Model, s: Settings) -> Figures:
    """The output head [vocab, d_model], in bf16 whatever the format (fp32 stays fp32)."""
    figures = Figures()
    d, vocab = model.ffn.d_model, model.vocab
    width = s.width
    n_bytes, flop = vocab * d * width, 2 * vocab * d * s.tokens
    figures.add("params", "parameters", "", vocab * d, "vocab * d_model", vocab=vocab, d_model=d)
    figures.add("weight_bytes", f"weights in {s.dtype}", "B", n_bytes, "vocab * d_model * width",
                vocab=vocab, d_model=d, width=width)  # fmt: skip
    figures.add("forward_flop", "FLOPs forward", "FLOP", flop, "2 * vocab * d_model * tokens",
                vocab=vocab, d_model=d, tokens=s.tokens)  # fmt: skip
    figures.add("backward_flop", "FLOPs backward", "FLOP", 2 * flop, "2 * forward_flop", forward_flop=flop)
    own = s.replace(compute=s.dtype)
    roof.add_traffic(figures, own, n_bytes, 2 * d * width, flop)
    roof.add_times(figures, own, n_bytes, 2 * d * width, flop)
    return figures


def _model_parameters(whole: Figures, model: Model) -> None:
    """Replace the sum's parameters by the totals, with the embedding once and twice, and add what a token uses."""
    whole.drop("params")
    whole.drop("ffn_share_of_params")
    whole.add("ffn_params", "parameters of all FFNs", "", model.ffn_params, "n_ffns * (experts * ffn + router)",
              n_ffns=1 if model.shared else model.n_ffns, experts=max(model.n_experts, 1), ffn=model.ffn.n_params,
              router=model.ffn.d_model * model.n_experts)  # fmt: skip
    attention = model.attention_params
    if attention is None:
        return
    numbers = {"ffn": model.ffn_params, "attention": attention, "embedding": model.embedding_params}
    if model.tied is not True:
        label = "parameters" if model.tied is False else "parameters, head of its own"
        note = "" if model.tied is False else "whether the head is the embedding is not known"
        whole.add("params", label, "", model.n_params(False), "ffn + attention + 2 * embedding", note, **numbers)
    if model.tied is not False:
        key, label = ("params", "parameters") if model.tied else ("params_tied", "parameters, head tied to embedding")
        whole.add(key, label, "", model.n_params(True), "ffn + attention + embedding", **numbers)
    total = whole.value("params")
    whole.add("ffn_share_of_params", "FFN's share of the parameters", "", model.ffn_params / total, "ffn / params",
              ffn=model.ffn_params, params=total)  # fmt: skip
    if model.n_experts:
        idle = model.n_ffns * (model.n_experts - model.experts_per_token) * model.ffn.n_params
        whole.add("active_params", "parameters that a token uses", "", total - idle,
                  "params - n_ffns * (n_experts - experts_per_token) * expert", params=total, n_ffns=model.n_ffns,
                  n_experts=model.n_experts, experts_per_token=model.experts_per_token,
                  expert=model.ffn.n_params)  # fmt: skip


def _model_bytes(whole: Figures, model: Model, inner: dict[str, Figures]) -> None:
    """Replace the sum's weight bytes by what the model takes: every expert, and the embedding once more if untied."""
    layers = 1 if model.shared else model.n_ffns
    attentions = (1 if model.shared else model.n_attentions) if "attention" in inner else 0
    numbers = {
        "n_ffns": layers,
        "experts": max(model.n_experts, 1),
        "ffn": inner["ffn"].value("weight_bytes"),
        "n_attentions": attentions,
        "attention": inner["attention"].value("weight_bytes") if attentions else 0,
        "embeddings": 1 if model.tied else 2,
        "head": inner["head"].value("weight_bytes"),
    }
    total = numbers["n_ffns"] * numbers["experts"] * numbers["ffn"] + attentions * numbers["attention"]
    total += numbers["embeddings"] * numbers["head"]
    whole.add("weight_bytes", "weights", "B", total,
              "n_ffns * experts * ffn + n_attentions * attention + embeddings * head", **numbers)  # fmt: skip
