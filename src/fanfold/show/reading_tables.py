"""What `fanfold read` prints for people."""

from __future__ import annotations

import math
from typing import Any

from .output import number, percent, table

_BAR = 8  # characters of a bar to each side of zero


def show(document: dict[str, Any], top: int) -> None:
    """Print a reading's document: one position of it."""
    model, (position,) = document["model"], document["positions"]
    print(
        f"{model['name']}: {model['layers']} FFN layers, {model['ffn']}; the prompt's {len(document['tokens'])} "
        "tokens, the one that is read in brackets:"
    )
    at = position["position"]
    words = [quoted(t["text"]) for t in document["tokens"]]
    print("  " + " ".join(f"[{i} {w}]" if i == at else f"{i} {w}" for i, w in enumerate(words)))
    print()
    _predictions(position)
    if document["effects"]:
        _shares(position, document["model"]["layers"])
    else:
        _updates(position)
    _channels(document, position, top)
    print(sum_rule(document["sum_rule"]))
    for note in document["notes"]:
        print(note)
    if "edit" in document:
        _edit(document["edit"])
    if "check" in document:
        _check(document["check"])
    if "report" in document:
        print(f"report, to open in a browser: {document['report']}")


def sum_rule(rows: list[dict[str, Any]]) -> str:
    """One line: whether Σ coefficient · value + bias is what each layer gave."""
    if not rows:
        return "Sum rule: no layer was read."
    bad = [str(r["layer"]) for r in rows if not r["holds"]]
    worst = max(rows, key=lambda r: r["error"])
    held = f"holds in {len(rows)} of {len(rows)} layers" if not bad else f"DOES NOT HOLD in layer {', '.join(bad)}"
    return (
        f"Sum rule: Σ coefficient · value + bias = the layer's output {held}; largest relative error "
        f"{number(worst['error'])} (layer {worst['layer']}, allowed {number(worst['allowed'])})."
    )


def quoted(text: str) -> str:
    """A token with its spaces and line ends visible."""
    return repr(text)


def _words(pairs: list[list[Any]], n: int = 4) -> str:
    return " ".join(quoted(text) for text, _ in pairs[:n])


def _predictions(position: dict[str, Any]) -> None:
    if not position["predictions"]:
        return
    rows = [[quoted(p["text"]), _p(p["p"]), number(p["logit"])] for p in position["predictions"][:5]]
    table("What the model predicts next:", ["token", "probability", "logit"], rows)


def bar(value: float, largest: float) -> str:
    """A bar to the left for what is negative, to the right for what is positive."""
    n = round(_BAR * min(abs(value) / largest, 1)) if largest > 0 else 0
    left, right = ("█" * n, "") if value < 0 else ("", "█" * n)
    return f"{left:>{_BAR}}│{right:<{_BAR}}"


def _signed(value: float) -> str:
    return f"{'+' if value >= 0 else '−'}{number(abs(value))}"


def _column(values: list[float]) -> list[str]:
    """Signed numbers with as many decimals each as give the largest of them three digits."""
    largest = max(map(abs, values), default=0.0)
    decimals = min(max(2 - math.floor(math.log10(largest)), 0), 12) if largest > 0 else 0
    return [f"{'−' if value < 0 else '+'}{abs(value):,.{decimals}f}" for value in values]


def _p(probability: float) -> str:
    return f"{number(100 * float(f'{probability:.4g}'))} %"


def _shares(position: dict[str, Any], layers: int) -> None:
    rows, word = position["layers"], quoted(position["token"]["text"])
    attention, ffn = sum(r["attention"] for r in rows), sum(r["ffn"] for r in rows)
    if len(rows) == layers:
        parts = (position["total"], position["embedding"], attention, ffn, position["constant"])
        total, embedding, attention, ffn, constant = _column(list(parts))
        print(
            f"Where the logit of {word} comes from (above the mean of all tokens): {total} = embedding {embedding}, "
            f"attention {attention}, FFNs {ffn}, biases {constant}."
        )
    print(
        "In each layer: top 10, the ten largest channels' share of what the FFN writes; and if the state after it\n"
        f"were the last: the rank of {word}, and the likeliest token."
    )
    largest = max((abs(r[part]) for r in rows for part in ("attention", "ffn")), default=0.0)
    columns = zip(_column([r["attention"] for r in rows]), _column([r["ffn"] for r in rows]))
    body = [
        [
            str(r["layer"]),
            by_attention,
            bar(r["attention"], largest),
            by_ffn,
            bar(r["ffn"], largest),
            percent(r["top10_share"]),
            "–" if r["rank"] is None else f"{r['rank']:,}",
            "–" if r["top_after"] is None else f"{quoted(r['top_after'][0])} {_p(r['top_after'][1])}",
        ]
        for r, (by_attention, by_ffn) in zip(rows, columns)
    ]
    heads = ["layer", "attention", "", "FFN", "", "top 10", "rank", "likeliest"]
    table("", heads, body)


def _updates(position: dict[str, Any]) -> None:
    """A layer's updates where there are no effects on logits."""
    largest = max((r["update_norm"] for r in position["layers"]), default=0.0)
    rows = [
        [
            str(r["layer"]),
            number(r["update_norm"]),
            f"{'█' * round(2 * _BAR * r['update_norm'] / largest) if largest else '':<{2 * _BAR}}",
            "–" if r["residual_norm"] is None else number(r["residual_norm"]),
            percent(r["top10_share"]),
            _words(r["update_tokens"]),
        ]
        for r in position["layers"]
    ]
    heads = ["layer", "size", "", "state", "top 10", "nearest tokens"]
    print(
        "What each FFN writes at this position: its size beside that of the state before it; top 10, the ten largest\n"
        "channels' share of it; the tokens that it points to."
    )
    table("", heads, rows)


def _channels(document: dict[str, Any], position: dict[str, Any], top: int) -> None:
    effects = document["effects"]
    every = [c | {"layer": row["layer"]} for row in position["layers"] for c in row["channels"]]
    best = sorted(every, key=lambda c: -abs(c["effect"] if effects else c["size"]))[:top]
    if not best:
        return
    triggers = document.get("triggers")
    first = _column([c["effect"] for c in best]) if effects else [number(c["size"]) for c in best]
    rows = []
    for c, strength in zip(best, first):
        name = f"{c['layer']}:{c['channel']}"
        value = document["values"].get(name, {"promoted": [], "suppressed": []})
        ends = ("promoted", "suppressed") if c["coefficient"] >= 0 else ("suppressed", "promoted")
        row = [name, strength, _signed(c["coefficient"])]
        row += [number(c["size"])] if effects else []
        row += [_words(value[end]) for end in ends]
        rows.append([*row, _trigger(triggers[name], c["coefficient"])] if triggers is not None else row)
    heads = ["channel", "effect", "coefficient", "size"] if effects else ["channel", "size", "coefficient"]
    heads += ["what it writes promotes", "and suppresses"] + (["fires most on"] if triggers is not None else [])
    what = f"effects on the logit of {quoted(position['token']['text'])}" if effects else "sizes"
    print(
        f"The {len(best)} channels with the largest {what} (coefficient m; size |m|·‖v‖, how much it writes"
        + ("; effect, what that adds to the logit):" if effects else "):")
    )
    table("", heads, rows, numbers=False)


def _trigger(known: dict[str, Any], coefficient: float) -> str:
    some = known["positive" if coefficient >= 0 else "negative"]
    if not some:
        return "–"
    pieces = [
        (piece, f"{' ' * piece[:1].isspace()}[{piece.strip() or piece}]", peak) for piece, peak in some[0]["text"]
    ]
    return " ".join("".join(marked if peak else piece for piece, marked, peak in pieces).split())


def _edit(edit: dict[str, Any]) -> None:
    print()
    print(f"Edited: {', '.join(edit['given'])}")
    for note in edit["notes"]:
        print(note)
    rows = [[quoted(t["text"]), _p(t["before"]), _p(t["after"])] for t in edit["tokens"]]
    if rows:
        table("", ["next token", "before", "after"], rows)
    if edit["before"] is not None:
        print(f"text before: {quoted(edit['before'])}")
        print(f"text after:  {quoted(edit['after'])}")
    if "cosine" in edit:
        print(f"cosine of the sentence's vector before and after: {edit['cosine']:.6f}")


def _check(found: dict[str, Any]) -> None:
    print()
    print(f"Checked on {found['prompts']} prompts:")
    said = {None: "not checked", True: "yes", False: "NO"}
    for finding in found["findings"]:
        print(f"- {said[finding['holds']]}: {finding['words']}")
    print(f"The memory view of {found['model']} {found['verdict']}.")
