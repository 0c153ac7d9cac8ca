"""From texts to sequences of tokens: what is read, in which order, what is skipped and why, and the text of a token."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from fanfold.memory.index import sources as module
from fanfold.memory.index.sources import Sources
from fanfold.memory.index.stream import NONE, Pieces, Stream, chain
from memory_texts import byte_tokenizer, texts, tokenizer


def _read(given) -> dict[str, str]:
    return {name: "".join(blocks) for name, blocks in Sources(given)}


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path):
    for name in ("b.txt", "a/z.md", "a/c", ".hidden/x", "a/.y", "a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"in {name}")
    read = _read(tmp_path)
    assert [os.path.relpath(n, tmp_path) for n in read] == ["a/c", "a/z.md", "a.txt", "b.txt"]
    assert list(read.values()) == ["in a/c", "in a/z.md", "in a.txt", "in b.txt"]


def test_every_kind_of_text(tmp_path):
    path = tmp_path / "one"
    path.write_bytes("\ufeffé\r\nx".encode())
    given = [path, "a str is a text", io.BytesIO("bytes é".encode()), io.StringIO("open file")]
    assert list(_read(given).values()) == ["é\nx", "a str is a text", "bytes é", "open file"]
    assert _read({"name": "text"}) == {"name": "text"}
    assert list(_read("single").values()) == ["single"]
    assert list(_read(iter(["x", "y"])).values()) == ["x", "y"]


def test_standard_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"from a pipe")))
    assert _read([Path("-")]) == {"standard input": "from a pipe"}


def test_totals(tmp_path):
    path = tmp_path / "f"
    path.write_text("é" * 1000)
    given = Sources([path, "abc"])
    assert given.total == 2003
    for _, blocks in given:
        list(blocks)
    assert given.done == 2003
    assert Sources(iter(["abc"])).total == 0  # not known ahead
    assert Sources({"a": "bc", "d": "é"}).total == 4


def test_what_is_no_text_is_skipped_with_its_reason(tmp_path):
    bad = {"empty": b"", "blank": b" \n\t ", "binary": b"ab\0cd", "latin": "caf\xe9 au lait".encode("latin-1")}
    bad |= {"cut": "é".encode()[:1], "late": b"x" * (1 << 18) + b"\xff"}
    for name, data in bad.items():
        (tmp_path / name).write_bytes(data)
    os.mkfifo(tmp_path / "pipe")
    given = Sources([*sorted(tmp_path.iterdir()), "half \ud800 of a pair", "good"])
    assert [name for name, _ in given] == ["text 9"]
    reasons = {Path(name).name: reason for name, reason in given.skipped}
    assert set(reasons) == {*bad, "pipe", "text 8"}
    assert "empty" in reasons["empty"] + reasons["blank"]
    assert "NUL" in reasons["binary"]
    for name in ("latin", "cut", "late"):
        assert "UTF-8" in reasons[name]
    assert "surrogate" in reasons["text 8"]
    assert "regular file" in reasons["pipe"]
    nothing = Sources(["", " "])
    assert list(nothing) == []
    assert nothing.why_nothing() == "there is no text in the 2 given (text 1: it is empty; text 2: it is empty)"
    assert Sources([]).why_nothing() == "no text was given"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (5, "texts is a int"),
        ([5], "text 1 is a int, expected a string or a path"),
        (b"bytes", "texts is a bytes"),
        ([Path("/nowhere/x")], "/nowhere/x does not exist"),
        ([io.BytesIO(b"\xff\xfe")], "is not UTF-8 text"),
    ],
)
def test_wrong_texts(given, words):
    with pytest.raises(ValueError, match=words):
        [list(blocks) for _, blocks in Sources(given)]


@pytest.mark.parametrize("text", ["", "a", "one\ntwo\n\nthree" * 9, "w" * 100, "some words " * 12, "\n" * 30, " " * 50])
def test_blocks_join_to_the_text(text, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 8)
    blocks = list(module._blocks(module._parts("x", text)))
    assert "".join(blocks) == text
    assert all(len(b) <= 16 for b in blocks)


def test_blocks_end_with_a_line_or_before_a_space(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 10)
    assert list(module._blocks(["one two\nth", "ree four f", "ive"])) == ["one two\n", "three four", " five"]


@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize("length", [3, 8, 50])
def test_every_token_is_counted_once(marks, length):
    tok, given = tokenizer(marks), texts()
    length += 2 * marks
    stream = Stream(Sources(given), tok, length, 3)
    batches = list(stream.batches())
    assert (stream.prefix, stream.suffix, stream.uncounted) == (([1], [2], 0) if marks else ([], [], 1))
    sequences = sorted((s for b in batches for s in b), key=lambda s: s.id)
    assert [s.id for s in sequences] == list(range(len(sequences)))
    for name, text in given.items():
        ids, own = Pieces(tok).encode(text), [s for s in sequences if s.source == name]
        counted = [int(t) for s in own for t in s.ids[stream.uncounted :]]
        assert counted == ids[stream.uncounted :]
        for s in own:
            assert s.ids.tolist() == ids[s.offset : s.offset + len(s.ids)]
            after = s.offset + len(s.ids)
            assert s.following == (ids[after] if after < len(ids) else NONE)
    for batch in batches:
        assert len({len(s.ids) for s in batch}) == 1
        assert 0 < len(batch) <= 3
        inputs = stream.inputs(batch)
        assert inputs.shape[1] <= length
        assert not marks or (inputs[0, 0], inputs[0, -1]) == (1, 2)
    # as few batches as equal lengths allow
    sizes = {n: sum(len(s.ids) == n for s in sequences) for n in {len(s.ids) for s in sequences}}
    assert len(batches) == sum(-(-count // 3) for count in sizes.values())


def test_a_long_text_in_blocks_gives_the_tokens_of_the_whole(monkeypatch):
    text = "\n".join(texts(30).values())
    whole = Pieces(tokenizer()).encode(text)
    monkeypatch.setattr(module, "BLOCK", 64)
    stream = Stream(Sources(text), tokenizer(), 16, 4)
    sequences = sorted((s for b in stream.batches() for s in b), key=lambda s: s.id)
    assert [int(t) for s in sequences for t in s.ids[1:]] == whole[1:]


def test_texts_without_tokens_are_skipped():
    class Deaf:
        """Knows nothing but one letter."""

        unk_token_id = 9

        def decode(self, ids, **_):
            return "a" * len(ids)

        def __call__(self, text, **_):
            return {"input_ids": [9 if c != "a" else 1 for c in text if c != "-"]}

    given = Sources({"none": "---", "unknown": "zzz", "one": "a", "good": "aza"})
    assert [s.source for b in Stream(given, Deaf(), 8, 2).batches() for s in b] == ["good"]
    reasons = dict(given.skipped)
    assert "no token" in reasons["none"]
    assert "knows nothing" in reasons["unknown"]
    assert "one token" in reasons["one"]


def test_a_sequence_too_short_is_refused():
    for marks, length in ((False, 1), (True, 2)):
        with pytest.raises(ValueError, match=f"sequence={length} is too short"):
            Stream(Sources("x"), tokenizer(marks), length, 1)


def test_the_chain_tells_any_difference():
    def hashes(given, length=8):
        out, value = [], ""
        for batch in Stream(Sources(given), tokenizer(), length, 3).batches():
            value = chain(value, batch)
            out.append(value)
        return out

    base = texts(12)
    first = hashes(base)
    assert hashes(dict(base)) == first
    renamed = {name.replace("text 3", "text x"): t for name, t in base.items()}
    for other in (renamed, base | {"text 3": base["text 3"] + " cat"}, dict(reversed(base.items()))):
        assert hashes(other)[-1] != first[-1]
    assert len(set(first)) == len(first)


@pytest.mark.parametrize("text", ["plain words", "naïve café ☃ 🙂🙂 end", "日本語", " leading", "tab\tand\nline", "a"])
def test_pieces_join_to_the_text(text):
    tok = byte_tokenizer()
    pieces = Pieces(tok)(Pieces(tok).encode(text))
    assert "".join(pieces) == text
    assert len(pieces) == len(Pieces(tok).encode(text))
    assert "\ufffd" not in "".join(pieces)


def test_pieces_keep_spaces_and_split_characters():
    tok = byte_tokenizer()
    assert Pieces(tok)(Pieces(tok).encode("a é")) == ["a", " ", "", "é"]
    assert Pieces(tokenizer())(Pieces(tokenizer()).encode("a cat sat")) == ["a", " cat", " sat"]
