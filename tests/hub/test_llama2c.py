"""llama2.c's checkpoint and vocabulary, written here byte by byte and compared with its own rules in plain Python."""

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import relative
from vitrail.errors import CheckpointError
from vitrail.hub import load, to_hf, tokenizer
from vitrail.hub.llama2c import Llama2c, pair_halves, read_tokenizer

SIZES = {"dim": 24, "hidden": 40, "layers": 3, "heads": 4, "kv_heads": 2, "vocab": 31, "context": 16}


def tensors(seed=0, *, dim, hidden, layers, heads, kv_heads, vocab, context, tied=True):
    """Every tensor in the order of the file."""
    rng = np.random.default_rng(seed)
    kv = kv_heads * dim // heads
    shapes = {
        "embed": (vocab, dim),
        "norm1": (layers, dim),
        "wq": (layers, dim, dim),
        "wk": (layers, kv, dim),
        "wv": (layers, kv, dim),
        "wo": (layers, dim, dim),
        "norm2": (layers, dim),
        "w1": (layers, hidden, dim),
        "w2": (layers, dim, hidden),
        "w3": (layers, hidden, dim),
        "norm": (dim,),
        "tables": (context, dim // heads),
    }
    if not tied:
        shapes["head"] = (vocab, dim)
    return {name: (rng.standard_normal(shape) * 0.3).astype("<f4") for name, shape in shapes.items()}


def write_model(path, sizes=SIZES, tied=True, seed=0):
    made = tensors(seed, **sizes, tied=tied)
    vocab = sizes["vocab"] if tied else -sizes["vocab"]
    numbers = (
        sizes["dim"],
        sizes["hidden"],
        sizes["layers"],
        sizes["heads"],
        sizes["kv_heads"],
        vocab,
        sizes["context"],
    )
    path.write_bytes(struct.pack("<7i", *numbers) + b"".join(array.tobytes() for array in made.values()))
    return made


def forward(ids, w, heads, kv_heads):
    """The loop of run.c: one token after another, channels turned in neighbouring pairs."""
    dim = w["embed"].shape[1]
    D, out = dim // heads, []
    keys = [[] for _ in w["norm1"]]
    values = [[] for _ in w["norm1"]]

    def norm(x, weight):
        return weight * x / math.sqrt((x @ x) / len(x) + 1e-5)

    def turn(x, at):
        x = x.copy()
        for i in range(0, len(x), 2):
            angle = at / 10000.0 ** ((i % D) / D)
            a, b = x[i], x[i + 1]
            x[i] = a * math.cos(angle) - b * math.sin(angle)
            x[i + 1] = a * math.sin(angle) + b * math.cos(angle)
        return x

    w = {name: array.astype(np.float64) for name, array in w.items()}
    for at, id in enumerate(ids):
        x = w["embed"][id]
        for layer in range(len(w["norm1"])):
            h = norm(x, w["norm1"][layer])
            q = turn(w["wq"][layer] @ h, at)
            keys[layer].append(turn(w["wk"][layer] @ h, at))
            values[layer].append(w["wv"][layer] @ h)
            mixed = np.zeros(dim)
            for head in range(heads):
                group = slice(head // (heads // kv_heads) * D, head // (heads // kv_heads) * D + D)
                own = slice(head * D, head * D + D)
                scores = np.array([q[own] @ k[group] for k in keys[layer]]) / math.sqrt(D)
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                mixed[own] = sum(a * v[group] for a, v in zip(weights, values[layer], strict=True))
            x = x + w["wo"][layer] @ mixed
            h = norm(x, w["norm2"][layer])
            gate = w["w1"][layer] @ h
            x = x + w["w2"][layer] @ (gate / (1 + np.exp(-gate)) * (w["w3"][layer] @ h))
        out.append(w.get("head", w["embed"]) @ norm(x, w["norm"]))
    return torch.tensor(np.array(out))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("heads", [(4, 2), (4, 4), (2, 1), (6, 3)])
def test_logits_are_those_of_the_program(tmp_path, tied, heads):
    sizes = SIZES | {"heads": heads[0], "kv_heads": heads[1]}
    made = write_model(tmp_path / "model.bin", sizes, tied)
    ids = [1, 5, 30, 2, 2, 7, 11]
    model = load(tmp_path / "model.bin")
    with torch.no_grad():
        ours = model(torch.tensor([ids]))[0]
    assert relative(ours.double(), forward(ids, made, *heads)) < 1e-5
    assert (model.config.tied, model.config.context) == (tied, 16)


def test_it_is_an_ordinary_llama(tmp_path):
    write_model(tmp_path / "model.bin")
    model = load(tmp_path / "model.bin")
    to_hf(model, tmp_path / "hf")
    ids = torch.arange(10)[None]
    assert torch.equal(load(tmp_path / "hf")(ids), model(ids))


def test_halves_undo_the_order_of_neighbours():
    rows = torch.arange(12)[:, None].expand(12, 2)
    assert pair_halves(rows, 2)[:, 0].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


# ---- bad files --------------------------------------------------------------------------------------------------


def test_a_short_or_long_file_says_how_many_bytes(tmp_path):
    path = tmp_path / "model.bin"
    write_model(path)
    whole = path.read_bytes()
    for data, says in (
        (whole[:-1], "cut short"),
        (whole[:40], "cut short"),
        (whole + b"\0" * 4, "follows the weights"),
    ):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=says) as caught:
            load(path)
        assert f"{len(data):,}" in caught.value.problem and f"{len(whole):,}" in caught.value.problem
    path.write_bytes(whole[:20])
    with pytest.raises(CheckpointError, match="has 20 bytes"):
        Llama2c(path)


@pytest.mark.parametrize("place", range(7))
@pytest.mark.parametrize("value", [0, -5, 2**31 - 1, 7])
def test_an_absurd_header_is_refused_at_once(tmp_path, place, value):
    path = tmp_path / "model.bin"
    write_model(path)
    data = bytearray(path.read_bytes())
    struct.pack_into("<i", data, 4 * place, value)
    path.write_bytes(data)
    with pytest.raises(CheckpointError):
        load(path)


def test_a_torch_pickle_is_refused_with_the_reason(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    for new in (True, False):
        torch.save({"w": torch.zeros(2)}, path, _use_new_zipfile_serialization=new)
        with pytest.raises(CheckpointError, match="pickle runs whatever code"):
            load(path)


def test_a_later_version_is_named(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(struct.pack("<7i", 0x616B3432, 1, 0, 0, 0, 0, 0))
    with pytest.raises(CheckpointError, match="versioned"):
        load(path)


# ---- the vocabulary ---------------------------------------------------------------------------------------------

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def write_vocabulary(path, pieces, scores):
    entries = [struct.pack("<fi", s, len(p.encode())) + p.encode() for p, s in zip(pieces, scores, strict=True)]
    path.write_bytes(struct.pack("<i", max(len(p.encode()) for p in pieces)) + b"".join(entries))


def made_of(joins: list[tuple[int, int]]) -> tuple[list[str], list[float]]:
    """A vocabulary as SentencePiece makes one: each piece joins two before it, and scores fall."""
    words = list(" abcé")
    for left, right in joins:
        joined = words[left % len(words)] + words[right % len(words)]
        if joined not in words and len(joined) < 12:
            words.append(joined)
    grown = words[5:]
    pieces = ["<unk>", "\n<s>\n", "\n</s>\n", *BYTES, *grown, *words[:5]]
    return pieces, [0.0] * 259 + [-float(n) for n in range(len(words))]


def encode_as_llama2c(text: str, pieces: list[str], scores: list[float]) -> list[int]:
    """The program's rule as it reads: the best-scored pair of neighbours joins, the leftmost of equals, until none."""
    ids = {piece: i for i, piece in reversed(list(enumerate(pieces)))}
    if not text:
        return []
    tokens = [ids[" "]]
    for char in text:
        tokens += [ids[char]] if char in ids else [byte + 3 for byte in char.encode()]
    while True:
        best, place, joined = -1e10, -1, -1
        for i in range(len(tokens) - 1):
            id = ids.get(pieces[tokens[i]] + pieces[tokens[i + 1]], -1)
            if id >= 0 and scores[id] > best:
                best, place, joined = scores[id], i, id
        if place < 0:
            return tokens
        tokens[place : place + 2] = [joined]


VOCABULARIES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=40).map(made_of)


@settings(max_examples=150)
@given(vocabulary=VOCABULARIES, texts=st.lists(st.text(" abcé漢\n<>▁", max_size=40), max_size=8))
def test_ids_are_those_of_the_program(vocabulary, texts, tmp_path_factory):
    path = tmp_path_factory.mktemp("words") / "tokenizer.bin"
    write_vocabulary(path, *vocabulary)
    words = read_tokenizer(path)
    for text in texts:
        ids = encode_as_llama2c(text, *vocabulary)
        assert words.encode(text, literal=True) == ids
        assert words.encode(text, literal=True, specials=True) == [1, *ids]
        assert words.decode(ids) == text
        assert words.decode([1, *ids], skip_specials=True) == text
        assert "".join(words.stream(ids)) == text


def test_early_files_write_bytes_as_characters(tmp_path):
    pieces, scores = made_of([(0, 1), (1, 1), (5, 2)])
    write_vocabulary(tmp_path / "late.bin", pieces, scores)
    pieces[3:259] = [chr(byte) for byte in range(256)]
    write_vocabulary(tmp_path / "early.bin", pieces, scores)
    early, late = read_tokenizer(tmp_path / "early.bin"), read_tokenizer(tmp_path / "late.bin")
    for text in (" aab é\n漢", "caab", ""):
        assert early.encode(text) == late.encode(text)


def test_names_and_stops(tmp_path):
    write_vocabulary(tmp_path / "tokenizer.bin", *made_of([]))
    write_model(tmp_path / "model.bin")
    words = tokenizer(tmp_path / "model.bin")
    assert (words.unk, words.bos, words.eos, words.stops) == (0, 1, 2, (2, 1))
    assert words.encode("</s>") == [2] and 2 not in words.encode("</s>", literal=True)


def test_it_survives_saving(tmp_path):
    write_vocabulary(tmp_path / "tokenizer.bin", *made_of([(0, 1), (1, 2), (5, 6)]))
    words = read_tokenizer(tmp_path / "tokenizer.bin")
    words.save(tmp_path / "saved")
    again = tokenizer(tmp_path / "saved")
    for text in ("a ab  abc", "é\n"):
        assert again.encode(text, specials=True) == words.encode(text, specials=True)


def test_a_damaged_vocabulary_is_refused(tmp_path):
    path = tmp_path / "tokenizer.bin"
    write_vocabulary(path, *made_of([]))
    whole = path.read_bytes()
    for data, says in (
        (whole[:-1], "end within piece 263"),
        (whole[:31], "end within piece 2"),
        (whole[:4], "0 pieces in 4 bytes"),
        (b"", "0 pieces in 0 bytes"),
        (whole[:8] + struct.pack("<i", 2**31 - 1) + whole[12:], "end within piece 0"),
        (whole[:8] + struct.pack("<i", -1) + whole[12:], "end within piece 0"),
        (whole[:12] + b"\xff" + whole[13:], "not UTF-8"),
    ):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=says):
            read_tokenizer(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_tokenizer(tmp_path / "absent.bin")
