"""The measurements of Geva et al., against a computation by other code, in float64, prefix by prefix."""

from __future__ import annotations

import copy
import functools
import json

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import families
from fanfold.memory import anatomy, capture
from fanfold.memory.index import Index, geva, index
from fanfold.memory.index.accumulate import is_signed
from fanfold.memory.index.figures import FIGURES
from fanfold.memory.index.geva import Geva
from fanfold.memory.index.prefixes import Counts, Reader, values
from fanfold.reference import coefficients
from fanfold.weights import to_float64
from memory_texts import texts, tokenizer

SAMPLE, SEED, SEQUENCE = 21, 3, 20
# a gate, and two ends; one end, a layer norm with a bias; exact zeros; a norm behind the FFN
NAMES = ["llama", "gpt2", "opt", "gemma2"]


@functools.cache
def model(name: str) -> nn.Module:
    torch.manual_seed(1)
    own = families.build(next(f for f in families.FAMILIES if f.name == name))
    with torch.no_grad():
        for path, p in own.named_parameters():
            if "norm" in path or "ln_" in path:  # gains that matter
                p.add_(torch.randn_like(p) * 0.5)
    return own


@functools.cache
def anatomy_of(name: str):
    return anatomy(model(name))


@pytest.fixture(scope="module", params=NAMES)
def measured(request, tmp_path_factory) -> tuple[str, Index, Geva]:
    name, found = request.param, anatomy_of(request.param)
    made = index(
        model(name), tokenizer(), texts(), tmp_path_factory.mktemp(name), top=3, sequence=SEQUENCE, anatomy=found
    )
    return name, made, geva(model(name), made, prefixes_measured=SAMPLE, seed=SEED, anatomy=found)


class Plain:
    """The parts of a model by their names, and its readings in float64."""

    def __init__(self, name: str) -> None:
        own: nn.Module = model(name)
        get = own.get_submodule
        paths = {
            "llama": ("model.layers", "mlp", "model.norm"),
            "gemma2": ("model.layers", "post_feedforward_layernorm", "model.norm"),
            "gpt2": ("transformer.h", "mlp", "transformer.ln_f"),
            "opt": ("model.decoder.layers", "fc2", "model.decoder.final_layer_norm"),
        }[name]
        self.model, self.blocks = own, get(paths[0])
        self.updates = [block.get_submodule(paths[1]) for block in self.blocks]  # type: ignore[union-attr]
        self.norm, self.head = get(paths[2]), get("lm_head")
        self.gain = to_float64(self.norm.weight) + (name == "gemma2")
        self.centre = name in ("gpt2", "opt")
        self.e = to_float64(self.head.weight)
        self.post = None
        if name == "gemma2":
            self.post = [1 + to_float64(b.post_feedforward_layernorm.weight) for b in self.blocks]  # type: ignore

    def part(self, v: np.ndarray, raw: bool = False) -> np.ndarray:
        """Logits of parts of a state [..., D]."""
        if raw:
            return v @ self.e.T
        if self.centre:
            v = v - v.mean(-1, keepdims=True)
        return (v * self.gain) @ self.e.T

    def state(self, h: np.ndarray) -> int:
        with torch.no_grad():
            return int(self.head(self.norm(torch.tensor(h).float()))[0].argmax())

    def run(self, ids: list[int]) -> tuple[list[np.ndarray], list[np.ndarray], int]:
        """(updates, states after each block) at the last token, and the token that the model predicts."""
        seen: dict[tuple[str, int], np.ndarray] = {}

        def keep(what: str, i: int):
            def hook(_m, _a, out):
                out = out[0] if isinstance(out, tuple) else out
                seen[what, i] = to_float64(out).reshape(-1, out.shape[-1])[-1:]

            return hook

        handles = [m.register_forward_hook(keep("y", i)) for i, m in enumerate(self.updates)]
        handles += [m.register_forward_hook(keep("o", i)) for i, m in enumerate(self.blocks)]  # type: ignore
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits
        for handle in handles:
            handle.remove()
        n = range(len(self.updates))
        return [seen["y", i] for i in n], [seen["o", i] for i in n], int(logits[0, -1].argmax())


def _prefixes(made: Index):
    for number, ids in made.sample(SAMPLE):
        end = int(np.random.default_rng([SEED, number]).integers(1, len(ids)))
        yield ids[: end + 1].tolist()


def test_prefixes(measured):
    name, made, result = measured
    plain, layers = Plain(name), anatomy_of(name).layers
    columns: list[dict[str, list[float]]] = [{} for _ in layers]
    for ids in _prefixes(made):
        updates, states, final = plain.run(ids)
        x = capture(model(name), anatomy_of(name), torch.tensor([ids])).x
        for i, layer in enumerate(layers):
            y, o = updates[i], states[i]
            r, top_y = plain.state(o - y), int(plain.part(y)[0].argmax())
            top_o = plain.state(o)
            weights = layer.weights()
            m, down = coefficients(x[i][0, -1:], weights)[0], to_float64(weights.down)
            values = plain.part(_written(plain, i, down.T))
            tops = values.argmax(-1)
            if is_signed(layer.spec):
                tops = np.where(m < 0, values.argmin(-1), tops)
            size = np.abs(m) * np.linalg.norm(down, axis=0)
            active = size > made.layers[i]["threshold"]
            row = {
                "active": active.mean(),
                "nonzero": (m != 0).mean(),
                "zero_agreement": top_y not in tops,
                "zero_agreement_active": top_y not in tops[active],
                "residual_final": r == final,
                "residual": r == top_o != top_y,
                "ffn": top_y == top_o != r,
                "all_agree": r == top_o == top_y,
                "composition": top_o not in (r, top_y),
                "top10_share": np.sort(size)[-10:].sum() / size.sum(),
            }
            for key, value in row.items():
                columns[i].setdefault(key, []).append(float(value))
    assert result.prefixes == SAMPLE
    for column, row in zip(columns, result.layers):
        for key, value in column.items():
            near = 2 / 56 / SAMPLE if key in ("active", "nonzero") else 1e-5  # a channel may lie on the threshold
            assert row[key] == pytest.approx(np.mean(value), abs=near), (row["layer"], key)
        assert sum(row[c] for c in ("residual", "ffn", "all_agree", "composition")) == pytest.approx(1.0)
    # the test sees different cases, or a wrong definition could pass it
    for key in ("residual", "ffn", "composition", "residual_final"):
        assert 0 < np.mean([np.mean(c[key]) for c in columns]) < 1, key


def _written(plain: Plain, layer: int, rows: np.ndarray) -> np.ndarray:
    """What values write, up to a factor: through the norm behind the FFN where there is one."""
    return rows if plain.post is None else rows * plain.post[layer]


def test_agreement(measured):
    name, made, result = measured
    plain = Plain(name)
    best = []
    for i, row in enumerate(result.layers):
        layer = anatomy_of(name).layers[i]
        down = _written(plain, i, to_float64(layer.weights().down).T)
        hits: dict[str, list[bool]] = {
            "agreement": [],
            "agreement_negative": [],
            "agreement_raw": [],
            "agreement_all": [],
        }
        nexts, tops = [], []
        for c in range(layer.spec.d_ff):
            channel = made.channel(i, c)
            for sign, triggers in ((1, channel.triggers_positive), (-1, channel.triggers_negative)):
                logits = sign * plain.part(down[c])
                top, p = int(logits.argmax()), np.exp(logits - logits.max())
                follow = [t.next_token for t in triggers]
                if sign > 0 or is_signed(layer.spec):
                    best.append((float(p.max() / p.sum()), i, top in follow))
                hits["agreement_all"] += [f == top for f in follow if f is not None]
                if sign > 0:
                    tops.append(top)
                if follow and follow[0] is not None:
                    hits["agreement" if sign > 0 else "agreement_negative"].append(follow[0] == top)
                    if sign > 0:
                        nexts.append(follow[0])
                        hits["agreement_raw"].append(follow[0] == int(plain.part(down[c], raw=True).argmax()))
        for key, value in hits.items():
            assert row[key] == (pytest.approx(np.mean(value)) if value else None), key
        assert row["chance"] == pytest.approx(np.mean([[n == t for t in tops] for n in nexts]))
    assert any(row["agreement_all"] for row in result.layers)
    top100 = sorted(best, reverse=True)[:100]
    said = {c["name"]: c["ours"] for c in result.comparison}
    assert said["top_values_upper"] == str(sum(i >= 10 / 16 * len(result.layers) for _, i, _ in top100))
    assert said["top_values_agree"] == str(sum(hit for *_, hit in top100))


def test_the_table_stands_beside_the_paper(measured):
    name, made, result = measured
    assert [c["name"] for c in result.comparison] == [f.name for f in FIGURES]
    assert all(c["paper"] and "arXiv" in c["source"] and c["definition"] and c["ours"] for c in result.comparison)
    assert json.loads(json.dumps(result.to_dict())) == result.to_dict()
    assert made.geva() == result  # kept in the index
    notes = " ".join(result.notes)
    assert ("signed" in notes) == (name in ("llama", "gemma2"))
    assert ("no exact zeros" in notes) == (name != "opt")
    assert ("through a norm before it is added" in notes) == (name == "gemma2")
    assert result.layers[0]["agreement_negative"] is None or name in ("llama", "gemma2")
    other = geva(model(name), made, prefixes_measured=SAMPLE, seed=SEED + 1, anatomy=anatomy_of(name))
    assert other.layers != result.layers  # other positions


def test_each_case_of_composition_is_told_apart():
    """r, y and o in every relation, which few prefixes of small models show."""
    found = anatomy_of("llama")
    tops = {x.index: values(Reader(found), x.weights().down, (1, -1)) for x in found.layers}
    counts = Counts(found, {0: 0.0, 1: 0.0}, tops)
    cases = torch.tensor([[1, 2, 1], [2, 1, 1], [1, 1, 1], [1, 2, 3], [1, 1, 2]])  # r, y, o
    counts._tops = lambda *_: tuple(cases.t())  # type: ignore[method-assign, assignment]
    counts.add(model("llama"), torch.arange(15).view(5, 3), torch.full((5,), 2))
    row = counts.row(1)
    found_cases = [row[name] for name in ("residual", "ffn", "all_agree", "composition")]
    assert found_cases == pytest.approx([0.2, 0.2, 0.2, 0.4])


def test_refusals(tmp_path):
    def made(own: nn.Module, where: str) -> Index:
        return index(own, tokenizer(), texts(4), tmp_path / where, top=2, sequence=16)

    bert = model("bert")
    with pytest.raises(ValueError, match=r"does not add to the residual: .*LayerNorm normalises the sum"):
        geva(bert, made(bert, "bert"))
    headless = copy.deepcopy(model("llama").get_submodule("model"))
    with pytest.raises(ValueError, match="it has no head that gives logits"):
        geva(headless, made(headless, "headless"))
    own = made(model("llama"), "llama")
    with pytest.raises(ValueError, match=r"was made with another model than the GPT2LMHeadModel given"):
        geva(model("gpt2"), own)
    with pytest.raises(ValueError, match=r"holds no measurements yet: they need the model, index.geva\(model\)"):
        own.geva()


class Bidirectional(transformers.LlamaForCausalLM):
    """A Llama whose every token sees all others."""

    def forward(self, input_ids, use_cache=False, **more):  # type: ignore[override]
        n = input_ids.shape[1]
        mask = torch.zeros(len(input_ids), 1, n, n)
        return super().forward(input_ids, attention_mask=mask, use_cache=use_cache, **more)


def test_a_model_that_sees_later_tokens_is_refused(tmp_path):
    both = copy.deepcopy(model("llama"))
    both.__class__ = Bidirectional
    made = index(both, tokenizer(), texts(4), tmp_path, top=2, sequence=16)
    with pytest.raises(ValueError, match="is not causal: what it predicts after a prefix depends on later tokens"):
        geva(both, made)
