"""llama2.c checkpoints and tokenizers, written byte by byte and compared with a plain Python implementation."""

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import relative
from vitrail.errors import CheckpointError
from vitrail.hub import load, load_tokenizer, to_hf
from vitrail.hub.llama2c import Llama2cWeights, read_tokenizer, reorder_rotary_rows

SIZES = {"dim": 24, "hidden": 40, "layers": 3, "heads": 4, "kv_heads": 2, "vocab": 31, "context": 16}


def tensors(seed=0, *, dim, hidden, layers, heads, kv_heads, vocab, context, tied=True):
    """Random tensors in file order."""
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
    """Reference loop of run.c: token by token, with adjacent rotary pairs."""
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
def test_logits_match_llama2c(tmp_path, tied, heads):
    sizes = SIZES | {"heads": heads[0], "kv_heads": heads[1]}
    made = write_model(tmp_path / "model.bin", sizes, tied)
    ids = [1, 5, 30, 2, 2, 7, 11]
    model = load(tmp_path / "model.bin")
    with torch.no_grad():
        ours = model(torch.tensor([ids]))[0]
    assert relative(ours.double(), forward(ids, made, *heads)) < 1e-5
    assert (model.config.tie_word_embeddings, model.config.context_length) == (tied, 16)


def test_exports_as_llama(tmp_path):
    write_model(tmp_path / "model.bin")
    model = load(tmp_path / "model.bin")
    to_hf(model, tmp_path / "hf")
    ids = torch.arange(10)[None]
    assert torch.equal(load(tmp_path / "hf")(ids), model(ids))


def test_reorder_rotary_rows():
    rows = torch.arange(12)[:, None].expand(12, 2)
    assert reorder_rotary_rows(rows, 2)[:, 0].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


# ---- bad files --------------------------------------------------------------------------------------------------


def test_wrong_file_size_raises(tmp_path):
    path = tmp_path / "model.bin"
    write_model(path)
    whole = path.read_bytes()
    for data, message in (
        (whole[:-1], "truncated"),
        (whole[:40], "truncated"),
        (whole + b"\0" * 4, "data after the weights"),
    ):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=message) as caught:
            load(path)
        assert f"{len(data):,}" in caught.value.problem and f"{len(whole):,}" in caught.value.problem
    path.write_bytes(whole[:20])
    with pytest.raises(CheckpointError, match="has 20 bytes"):
        Llama2cWeights(path)


@pytest.mark.parametrize("place", range(7))
@pytest.mark.parametrize("value", [0, -5, 2**31 - 1, 7])
def test_invalid_header_raises(tmp_path, place, value):
    path = tmp_path / "model.bin"
    write_model(path)
    data = bytearray(path.read_bytes())
    struct.pack_into("<i", data, 4 * place, value)
    path.write_bytes(data)
    with pytest.raises(CheckpointError):
        load(path)


def test_torch_pickle_raises(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    for new in (True, False):
        torch.save({"w": torch.zeros(2)}, path, _use_new_zipfile_serialization=new)
        with pytest.raises(CheckpointError, match="can execute arbitrary code"):
            load(path)


def test_versioned_file_raises(tmp_path):
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
    """Build a SentencePiece-like vocabulary: each piece joins two earlier ones, and scores decrease."""
    words = list(" abcé")
    for left, right in joins:
        joined = words[left % len(words)] + words[right % len(words)]
        if joined not in words and len(joined) < 12:
            words.append(joined)
    grown = words[5:]
    pieces = ["<unk>", "\n<s>\n", "\n</s>\n", *BYTES, *grown, *words[:5]]
    return pieces, [0.0] * 259 + [-float(n) for n in range(len(words))]


def encode_as_llama2c(text: str, pieces: list[str], scores: list[float]) -> list[int]:
    """Reference tokenizer: merge the best-scored adjacent pair, leftmost first, until none is left."""
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
def test_ids_match_llama2c(vocabulary, texts, tmp_path_factory):
    path = tmp_path_factory.mktemp("words") / "tokenizer.bin"
    write_vocabulary(path, *vocabulary)
    words = read_tokenizer(path)
    for text in texts:
        ids = encode_as_llama2c(text, *vocabulary)
        assert words.encode(text, literal=True) == ids
        assert words.encode(text, literal=True, add_special_tokens=True) == [1, *ids]
        assert words.decode(ids) == text
        assert words.decode([1, *ids], skip_special_tokens=True) == text
        assert "".join(words.decode_stream(ids)) == text


def test_early_files_store_bytes_as_characters(tmp_path):
    pieces, scores = made_of([(0, 1), (1, 1), (5, 2)])
    write_vocabulary(tmp_path / "late.bin", pieces, scores)
    pieces[3:259] = [chr(byte) for byte in range(256)]
    write_vocabulary(tmp_path / "early.bin", pieces, scores)
    early, late = read_tokenizer(tmp_path / "early.bin"), read_tokenizer(tmp_path / "late.bin")
    for text in (" aab é\n漢", "caab", ""):
        assert early.encode(text) == late.encode(text)


def test_special_tokens_and_stop_ids(tmp_path):
    write_vocabulary(tmp_path / "tokenizer.bin", *made_of([]))
    write_model(tmp_path / "model.bin")
    words = load_tokenizer(tmp_path / "model.bin")
    assert (words.unk_token_id, words.bos_token_id, words.eos_token_id, words.stop_ids) == (0, 1, 2, (2, 1))
    assert words.encode("</s>") == [2] and 2 not in words.encode("</s>", literal=True)


def test_tokenizer_round_trip(tmp_path):
    write_vocabulary(tmp_path / "tokenizer.bin", *made_of([(0, 1), (1, 2), (5, 6)]))
    words = read_tokenizer(tmp_path / "tokenizer.bin")
    words.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    for text in ("a ab  abc", "é\n"):
        assert again.encode(text, add_special_tokens=True) == words.encode(text, add_special_tokens=True)


def test_damaged_vocabulary_raises(tmp_path):
    path = tmp_path / "tokenizer.bin"
    write_vocabulary(path, *made_of([]))
    whole = path.read_bytes()
    for data, message in (
        (whole[:-1], "end within piece 263"),
        (whole[:31], "end within piece 2"),
        (whole[:4], "0 pieces in 4 bytes"),
        (b"", "0 pieces in 0 bytes"),
        (whole[:8] + struct.pack("<i", 2**31 - 1) + whole[12:], "end within piece 0"),
        (whole[:8] + struct.pack("<i", -1) + whole[12:], "end within piece 0"),
        (whole[:12] + b"\xff" + whole[13:], "not UTF-8"),
    ):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=message):
            read_tokenizer(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_tokenizer(tmp_path / "absent.bin")
