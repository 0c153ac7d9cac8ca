"""What each format costs in quality, on the two packaged models, FFNs only.

    python bench/quality.py [--models smollm2,minilm] [--tokens 8192] [--calibration-tokens 8192] [--kernels] [--json X]

SmolLM2-135M (its Q4_1 file, dequantized to float32): perplexity of the first tokens of Python's manual in windows of
512, as change from float32 with the standard error of the change (token by token, both models on the same text).
all-MiniLM-L6-v2 (float32): cosine of sentence embeddings with float32's. Weights only: the model's FFN weights are
replaced by their dequantized values; with --kernels: by the packed kernels too, activations in int8. GPTQ is
calibrated on the second half of the manual, which is not measured on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import fanfold as ff
from fanfold import formats
from fanfold.kernels.packed import PackedMatrix
from fanfold.quantize.calibrate import match, put, walk
from fanfold.quantize.ffn import quantize_ffn, to_float32
from fanfold.show import models, quantize_verb, text

RUNS = {  # (format, method); "plain" is round-to-nearest with max-abs and min-max scales
    "smollm2": [
        ("int8_g32", "rtn"),
        ("int8_g64", "rtn"),
        ("int8_g128", "rtn"),
        ("int4_g128", "plain"),
        ("int4_g128", "rtn"),
        ("int4_g128", "gptq"),
        ("int4_g32", "rtn"),
        ("int4_g32", "gptq"),
    ],
    "minilm": [
        ("int8_g32", "rtn"),
        ("int8_g128", "rtn"),
        ("int8", "rtn"),
        ("int4_g32", "plain"),
        ("int4_g32", "rtn"),
        ("int4_g32", "gptq"),
        ("int4_g128", "plain"),
        ("int4_g128", "rtn"),
        ("int4_g128", "gptq"),
        ("q4_0", "rtn"),
        ("q4_0", "gptq"),
    ],
}


class Model:
    """A packaged model whose FFNs can be quantized and put back."""

    def __init__(self, name: str, tokens: int, calibration_tokens: int) -> None:
        self.name, self.loaded = name, models.load(name)
        self.model, self.causal = self.loaded.model, self.loaded.kind == "causal"
        self.checkpoint = ff.load(models.resolve(name))
        self.sites = match(self.model, self.checkpoint)
        self.inputs = quantize_verb._calibration(name, [], calibration_tokens).inputs
        self.ids = text.token_ids(self.loaded, text.default_text(), tokens)
        self.texts = text.sentences(text.default_text(), 200)
        self.base = self._measure()

    def quantize(self, format: str, method: str) -> list[ff.Weights]:
        """Every layer's quantized weights; the model's own are replaced by them."""
        made: dict[int, ff.Weights] = {}
        layers = list(self.checkpoint.ffns)

        def visit(position: int, x: torch.Tensor | None) -> ff.Weights:
            own = self.checkpoint.ffns[layers[position]]
            made[position] = plain(own, format) if method == "plain" else quantize_ffn(own, format, method, x).weights
            return made[position]

        if method == "gptq":
            walk(self.model, self.inputs, self.checkpoint, visit, self.sites)
        else:  # needs no inputs: the guard is not asked, and integer codes meet int8
            for position, site in enumerate(self.sites):
                with torch.no_grad():
                    put(self.model, site, visit(position, None))
        return [made[i] for i in range(len(layers))]

    def restore(self) -> None:
        with torch.no_grad():
            for site, layer in zip(self.sites, self.checkpoint.ffns, strict=True):
                put(self.model, site, self.checkpoint.ffns[layer])

    def _measure(self) -> Any:
        if self.causal:
            return nll(self.model, self.ids)
        return torch.cat([text.embeddings(self.loaded, self.model, [one]) for one in self.texts])

    def result(self) -> dict[str, float]:
        """How far the model, as it is now, is from float32."""
        now = self._measure()
        if self.causal:
            change = now - self.base
            error = float(change.std() / len(change) ** 0.5)
            return {"perplexity": float(now.mean().exp()), "relative": float(change.mean().expm1()), "error": error}
        cosine = (now * self.base).sum(1)
        return {"cosine_min": float(cosine.min()), "cosine_mean": float(cosine.mean())}

    def with_kernels(self, packed: list[ff.Weights]) -> dict[str, float]:
        """`result` with the FFNs run by the packed kernels. Only for FFNs that are one module."""
        modules = [self.model.get_submodule(site.path) for site in self.sites]
        for module, weights in zip(modules, packed, strict=True):
            module.forward = lambda x, w=weights: ff.ffn(x, w, "cpu")
        try:
            return self.result()
        finally:
            for module in modules:
                del module.forward


def nll(model: Any, ids: torch.Tensor, window: int = 512) -> torch.Tensor:
    """[tokens] the negative log-likelihood of each token of `ids` [1, tokens] but the first of each window."""
    out = []
    with torch.inference_mode():
        for part in ids[0].split(window):
            logits = model(input_ids=part[None], use_cache=False).logits[0, :-1].float()
            out.append(torch.nn.functional.cross_entropy(logits, part[1:], reduction="none"))
    return torch.cat(out).double()


def plain(own: ff.Weights, format: str) -> ff.Weights:
    """Round to nearest with max-abs or min-max scales: what the searched scales are to beat."""
    arrays = dict(own.items())
    for name in ("gate", "up", "down"):
        if arrays.get(name) is not None:
            arrays[name] = PackedMatrix.pack(
                formats.quantize_matrix(to_float32(arrays[name]).numpy(), format, scales="plain")
            )
    return ff.Weights(own.spec, **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--calibration-tokens", type=int, default=8192)
    parser.add_argument("--kernels", action="store_true", help="with the packed kernels too, activations in int8")
    parser.add_argument("--models", default=",".join(RUNS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for name in args.models.split(","):
        model = Model(name, args.tokens, args.calibration_tokens)
        if model.causal:
            print(f"{name}: float32 perplexity {float(model.base.mean().exp()):.4f}, {args.tokens} tokens", flush=True)
        for format, method in RUNS[name]:
            start = time.monotonic()
            packed = model.quantize(format, method)
            row: dict[str, Any] = {"model": name, "format": format, "method": method, **model.result()}
            if args.kernels and model.causal and method == "rtn":
                row |= {f"{k}_with_activations": v for k, v in model.with_kernels(packed).items()}
            row["seconds"] = time.monotonic() - start
            model.restore()
            rows.append(row)
            print("  ".join(f"{k} {v:.6g}" if isinstance(v, float) else f"{v}" for k, v in row.items()), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    sys.exit(main())
