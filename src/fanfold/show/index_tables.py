"""What `fanfold index` answers with, as plain values and as tables for people."""

from __future__ import annotations

from typing import Any

from ..memory.index.accumulate import edges
from .output import number, percent, size, table

_BAR = 30


def summary(index: Any) -> dict[str, Any]:
    """What an index holds: text read, and for each layer how its channels respond."""
    layers = []
    for row in index.layers:
        s = index.statistics(row["layer"])
        layers.append(
            {
                **row,
                "frequency": float(s["frequency"].mean()),
                "positive": float(s["positive"].mean()),
                "zero": float(s["zero"].mean()),
                "never": int((s["frequency"] == 0).sum()),
            }
        )
    return {
        "index": str(index.path),
        "bytes": index.path.stat().st_size,
        "model": index.meta["name"],
        "tokens": index.meta["tokens"],
        "sequences": index.meta["sequences"],
        "settings": index.meta["job"],
        "layers": layers,
        "skipped": [list(entry) for entry in index.skipped],
    }


def show_summary(found: dict[str, Any]) -> None:
    channels = sum(row["d_ff"] for row in found["layers"])
    took = f", in {found['seconds']:.0f} s" if "seconds" in found else ""
    print(
        f"{found['model']}: {channels:,} channels in {len(found['layers'])} layers, {found['tokens']:,} tokens of text "
        f"in {found['sequences']:,} sequences{took}; {found['index']}, {size(found['bytes'])}"
    )
    rows = [
        [
            str(row["layer"]),
            row["ffn"],
            number(row["threshold"]),
            percent(row["frequency"]),
            percent(row["positive"]),
            percent(row["zero"]),
            f"{row['never']:,}",
        ]
        for row in found["layers"]
    ]
    heads = ["layer", "ffn", "active above |m|·‖v‖", "channels active at a token", "m > 0", "m = 0", "never active"]
    table("", heads, rows)
    for name, reason in found["skipped"]:
        print(f"{name} was left out: {reason}")
    print(f"Ask it: fanfold index {_folder(found)} --search WORD, or --channel LAYER:CHANNEL, or --geva")


def _folder(found: dict[str, Any]) -> str:
    return found["index"].rpartition("/")[0] or "."


def channel(index: Any, layer: int, which: int, limit: int) -> dict[str, Any]:
    return {"index": str(index.path), "model": index.meta["name"], **index.channel(layer, which, limit).to_dict()}


def show_channel(found: dict[str, Any]) -> None:
    print(
        f"channel {found['layer']}:{found['channel']} of {found['model']}: active at {percent(found['frequency'])} of "
        f"tokens (|m|·‖v‖ above {number(found['threshold'])}; ‖v‖ = {number(found['value_norm'])})"
    )
    deviation = found["variance"] ** 0.5
    print(
        f"coefficient m: mean {number(found['mean'])}, standard deviation {number(deviation)}; positive at "
        f"{percent(found['positive'])} of tokens, zero at {percent(found['zero'])}, negative at "
        f"{percent(found['negative'])}"
    )
    most = max((n for _, n in found["histogram"]), default=0)
    rows = [[_bin(low), f"{n:,}", f"{'█' * round(_BAR * n / most):<{_BAR}}"] for low, n in found["histogram"]]
    table("", ["coefficient", "tokens", ""], rows)
    for sign in ("positive", "negative"):
        some = found[f"triggers_{sign}"]
        if some:
            rows = [[number(t["coefficient"]), _context(t), quoted(t["next"]), _place(t)] for t in some]
            table(f"Strongest {sign} coefficients:", ["m", "at [token]", "next", "in"], rows, numbers=False)


def _bin(low: float) -> str:
    """The coefficients of a bin [low, 2 low), or of (2 low, low]; the outermost ones hold what is beyond."""
    least, *_, most = edges()
    if low == 0:
        return "0"
    if abs(low) == most:
        return f"{number(low)} and {'more' if low > 0 else 'less'}"
    ends = ["0" if abs(low) == least else number(low), number(2 * low)]
    return " to ".join(ends if low > 0 else reversed(ends))


def quoted(text: str) -> str:
    return repr(text) if text else "–"


def _context(t: dict[str, Any]) -> str:
    peak = t["peak"].strip() or t["peak"]
    lead = " " if t["peak"][:1].isspace() else ""
    return " ".join(f"{t['before']}{lead}[{peak}]{t['after']}".split())


def _place(t: dict[str, Any]) -> str:
    return f"{t['source']}, token {t['position']:,}"


def search(index: Any, text: str | None, token: str | None, layer: int | None, limit: int) -> dict[str, Any]:
    matches = index.search(text, token=token, layer=layer, limit=limit)
    return {
        "index": str(index.path),
        "model": index.meta["name"],
        "search": text,
        "token": token,
        "matches": [m.to_dict() for m in matches],
    }


def show_matches(found: dict[str, Any]) -> None:
    asked = quoted(found["search"]) if found["search"] is not None else f"the token {quoted(found['token'])}"
    if not found["matches"]:
        print(f"No channel of {found['model']} has a trigger with {asked}.")
        return
    rows = [
        [
            f"{m['layer']}:{m['channel']}",
            "+" if m["sign"] > 0 else "−",
            f"{m['matches']} of {m['triggers']}",
            str(m["at_peak"]),
            number(m["score"]),
            _context(m["examples"][0]),
        ]
        for m in found["matches"]
    ]
    heads = ["channel", "end", "triggers with it", "at the peak", "score", "the strongest of them"]
    table(f"Channels of {found['model']} whose triggers hold {asked}:", heads, rows, numbers=False)


def show_geva(found: dict[str, Any]) -> None:
    about = found["model"]
    print(
        f"{about['name']}: {about['layers']} layers, {about['ffn']}; triggers from {about['tokens']:,} tokens, "
        f"{found['prefixes']:,} prefixes"
    )
    rows = [[c["title"], c["ours"], c["paper"], c["source"]] for c in found["comparison"]]
    table("", ["measured", "here", "in the paper", "source"], rows, numbers=False)
    names = [n for n in found["layers"][0] if n != "layer"]
    body = [
        [str(row["layer"]), *("–" if row[n] is None else percent(row[n]) for n in names)] for row in found["layers"]
    ]
    table("Shares in each layer:", ["layer", *names], body)
    print("Definitions:")
    for c in found["comparison"]:
        print(f"- {c['title']}: {c['definition']}")
    print("Notes:")
    for note in found["notes"]:
        print(f"- {note}")
