"""The checkpoint and vocabulary of llama2.c, such as stories15M: a Llama in one file of bare float32 numbers.

The file pairs neighbouring channels for rotary positions. Its q and k rows are put in the order of Hugging Face's
Llama, which pairs halves: the scores are the same, and the model then is an ordinary Llama that can be exported.

L layers, W width, H heads, G key/value heads, D head width, F hidden width, V vocabulary, C context
"""

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import CheckpointError
from vitrail.hub.vocabularies import BYTE, Kind, Vocabulary, scored
from vitrail.processing.text import Tokenizer

LAYOUT = "<7i"  # width, hidden width, layers, heads, key/value heads, vocabulary, context
HEADER = struct.calcsize(LAYOUT)
NEWER = 0x616B3432  # how the later, versioned files begin
TABLES = "cos and sin of every position"  # in the file, but not needed
UNK, BOS, EOS, FIRST_BYTE = 0, 1, 2, 3
EPS = 1e-5  # of the norms: fixed in the program, not in the file


class _Part(NamedTuple):
    """One kind of tensor, `copies` of it one behind the other."""

    name: str
    shape: tuple[int, ...]
    copies: int = 1
    heads: int | None = None  # of rows to be reordered

    @property
    def each(self) -> int:
        return math.prod(self.shape)


class Llama2c:
    """The tensors of a llama2.c checkpoint under the names of Hugging Face's Llama, read one at a time."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        size = _size(self.path)
        with self.path.open("rb") as stream:
            head = stream.read(HEADER)
        if len(head) < HEADER:
            raise CheckpointError(
                f"{self.path} has {size} bytes, a llama2.c header alone is {HEADER}", "fetch it again"
            )
        W, F, L, H, G, V, C = struct.unpack(LAYOUT, head)
        if W == NEWER:
            raise CheckpointError(f"{self.path} is a versioned llama2.c file", "export it with version 0")
        tied, V = V > 0, abs(V)
        if min(W, F, L, H, G, V, C) < 1 or W % H or H % G or (W // H) % 2:
            raise CheckpointError(
                f"{self.path} is no llama2.c checkpoint: its first {HEADER} bytes say width {W}, hidden {F}, "
                f"{L} layers, {H} heads, {G} key/value heads, vocabulary {V}, context {C}",
                "a .bin of torch is a pickle and is not read; use its .safetensors version",
            )
        parts = _parts(W, F, L, H, G, V, C, tied)
        asked = HEADER + 4 * sum(part.each * part.copies for part in parts)
        if size != asked:
            raise CheckpointError(
                f"{self.path} has {size:,} bytes and its header asks for {asked:,}: "
                + ("it is cut short" if size < asked else "something follows the weights"),
                "fetch it again",
            )
        self._places: dict[str, tuple[int, _Part]] = {}  # name → the number it starts at
        at = 0
        for part in parts:
            for i in range(part.copies):
                self._places[part.name.format(i)] = at, part
                at += part.each
        del self._places[TABLES]
        self._numbers = np.memmap(self.path, dtype="<f4", mode="r", offset=HEADER)
        self.about: dict[str, Any] = {
            "model_type": "llama",
            "vocab_size": V,
            "hidden_size": W,
            "intermediate_size": F,
            "num_hidden_layers": L,
            "num_attention_heads": H,
            "num_key_value_heads": G,
            "max_position_embeddings": C,
            "rms_norm_eps": EPS,
            "tie_word_embeddings": tied,
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._places:
            raise CheckpointError(f"{self.path} has no tensor {name!r}")
        at, part = self._places[name]
        tensor = torch.from_numpy(np.array(self._numbers[at : at + part.each])).view(part.shape)
        return tensor if part.heads is None else pair_halves(tensor, part.heads)


def _parts(W: int, F: int, L: int, H: int, G: int, V: int, C: int, tied: bool) -> list[_Part]:
    """What follows the header: each kind of tensor for all layers, then the next."""
    D, of = W // H, "model.layers.{}."
    parts = [
        _Part("model.embed_tokens.weight", (V, W)),
        _Part(of + "input_layernorm.weight", (W,), L),
        _Part(of + "self_attn.q_proj.weight", (W, W), L, heads=H),
        _Part(of + "self_attn.k_proj.weight", (G * D, W), L, heads=G),
        _Part(of + "self_attn.v_proj.weight", (G * D, W), L),
        _Part(of + "self_attn.o_proj.weight", (W, W), L),
        _Part(of + "post_attention_layernorm.weight", (W,), L),
        _Part(of + "mlp.gate_proj.weight", (F, W), L),
        _Part(of + "mlp.down_proj.weight", (W, F), L),
        _Part(of + "mlp.up_proj.weight", (F, W), L),
        _Part("model.norm.weight", (W,)),
        _Part(TABLES, (C, D)),
    ]
    return parts if tied else [*parts, _Part("lm_head.weight", (V, W))]


def pair_halves(rows: Tensor, heads: int) -> Tensor:
    """Reorder each head's rows from neighbours that turn together to halves that do: (H·D, …) → (H·D, …)."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)  # (H, D/2, 2, …) → (H, 2, D/2, …)


def read_tokenizer(path: str | Path) -> Tokenizer:
    """The vocabulary of llama2.c (tokenizer.bin): a score, a length and the bytes of each piece."""
    path = Path(path)
    size = _size(path)
    data = path.read_bytes()
    at, pieces, scores = 4, [], []  # the first number is the length of the longest piece, which nobody needs
    while at < size:
        if size - at < 8:
            raise _cut(path, size, len(pieces))
        score, length = struct.unpack_from("<fi", data, at)
        at += 8
        if not 0 <= length <= size - at:
            raise _cut(path, size, len(pieces))
        try:
            pieces.append(data[at : at + length].decode())
        except UnicodeDecodeError:
            raise CheckpointError(f"piece {len(pieces)} of {path} is not UTF-8", "is it a tokenizer.bin?") from None
        scores.append(score)
        at += length
    if len(pieces) <= EOS:
        raise CheckpointError(f"{path} holds {len(pieces)} pieces in {size} bytes", "is it a tokenizer.bin, and whole?")
    pieces[UNK], pieces[BOS], pieces[EOS] = "<unk>", "<s>", "</s>"  # the file writes line ends around them
    if pieces[FIRST_BYTE : FIRST_BYTE + 256] == [chr(byte) for byte in range(256)]:
        # Early files wrote bytes as characters, which then stand twice.
        pieces[FIRST_BYTE : FIRST_BYTE + 256] = [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [Kind.BYTE if BYTE.fullmatch(piece) else Kind.NORMAL for piece in pieces]
    kinds[UNK], kinds[BOS], kinds[EOS] = Kind.UNKNOWN, Kind.CONTROL, Kind.CONTROL
    named = {"bos": BOS, "eos": EOS, "unk": UNK}
    # llama2.c ends at bos as well: its training texts followed one another with nothing else between.
    return scored(Vocabulary(pieces, kinds, named, add_bos=True, stops=(EOS, BOS)), scores, space=" ")


def _cut(path: Path, size: int, piece: int) -> CheckpointError:
    return CheckpointError(f"{path} is cut short: its {size:,} bytes end within piece {piece}", "fetch it again")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", "check the path") from None
