"""Checkpoints and tokenizers of llama2.c, such as stories15M: a Llama in one file of float32 values.

The file pairs adjacent channels for rotary positions. The q and k rows are reordered as in Hugging Face's Llama, which
pairs halves. The attention scores stay the same, and the model can be exported as an ordinary Llama.

Shapes: L layers, W width, H heads, G key/value heads, D head width, F MLP width, V vocabulary, C context.
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
from vitrail.hub.tokenizer_builders import BYTE_PIECE, PieceType, Vocabulary, build_sentencepiece_bpe
from vitrail.processing.tokenizer import Tokenizer

HEADER_FORMAT = "<7i"  # width, hidden width, layers, heads, key/value heads, vocabulary, context
HEADER_BYTES = struct.calcsize(HEADER_FORMAT)
VERSIONED_MAGIC = 0x616B3432  # first bytes of versioned files
ROTARY_TABLES = "cos and sin of every position"  # stored, but not needed
UNK_ID, BOS_ID, EOS_ID, FIRST_BYTE_ID = 0, 1, 2, 3
EPS = 1e-5  # of the norms; fixed in llama2.c, not stored


class _TensorGroup(NamedTuple):
    """One kind of tensor, stored `copies` times in sequence."""

    name: str
    shape: tuple[int, ...]
    copies: int = 1
    heads: int | None = None  # heads whose rows are reordered

    @property
    def each(self) -> int:
        return math.prod(self.shape)


class Llama2cWeights:
    """Tensors of a llama2.c checkpoint under the names of Hugging Face's Llama, read one at a time."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        size = _get_file_size(self.path)
        with self.path.open("rb") as stream:
            header = stream.read(HEADER_BYTES)
        if len(header) < HEADER_BYTES:
            raise CheckpointError(
                f"{self.path} has {size} bytes, but the llama2.c header needs {HEADER_BYTES}", "download it again"
            )
        W, F, L, H, G, V, C = struct.unpack(HEADER_FORMAT, header)
        if W == VERSIONED_MAGIC:
            raise CheckpointError(f"{self.path} is a versioned llama2.c file", "export it with version 0")
        tied, V = V > 0, abs(V)
        if min(W, F, L, H, G, V, C) < 1 or W % H or H % G or (W // H) % 2:
            raise CheckpointError(
                f"{self.path} is not a llama2.c checkpoint: its first {HEADER_BYTES} bytes mean width {W}, hidden {F}, "
                f"{L} layers, {H} heads, {G} key/value heads, vocabulary {V}, context {C}",
                "use the .safetensors version; .bin files of torch are pickles and are not supported",
            )
        groups = _list_tensor_groups(W, F, L, H, G, V, C, tied)
        required = HEADER_BYTES + 4 * sum(group.each * group.copies for group in groups)
        if size != required:
            raise CheckpointError(
                f"{self.path} has {size:,} bytes, but its header requires {required:,}: "
                + ("it is truncated" if size < required else "there is data after the weights"),
                "download it again",
            )
        self._offsets: dict[str, tuple[int, _TensorGroup]] = {}  # name → index of its first value
        offset = 0
        for group in groups:
            for i in range(group.copies):
                self._offsets[group.name.format(i)] = offset, group
                offset += group.each
        del self._offsets[ROTARY_TABLES]
        self._numbers = np.memmap(self.path, dtype="<f4", mode="r", offset=HEADER_BYTES)
        self.hf_config: dict[str, Any] = {
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
        return iter(self._offsets)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._offsets:
            raise CheckpointError(f"{self.path} has no tensor {name!r}")
        offset, group = self._offsets[name]
        tensor = torch.from_numpy(np.array(self._numbers[offset : offset + group.each])).view(group.shape)
        return tensor if group.heads is None else reorder_rotary_rows(tensor, group.heads)


def _list_tensor_groups(W: int, F: int, L: int, H: int, G: int, V: int, C: int, tied: bool) -> list[_TensorGroup]:
    """List the tensors after the header: each kind for all layers, then the next kind."""
    D, prefix = W // H, "model.layers.{}."
    groups = [
        _TensorGroup("model.embed_tokens.weight", (V, W)),
        _TensorGroup(prefix + "input_layernorm.weight", (W,), L),
        _TensorGroup(prefix + "self_attn.q_proj.weight", (W, W), L, heads=H),
        _TensorGroup(prefix + "self_attn.k_proj.weight", (G * D, W), L, heads=G),
        _TensorGroup(prefix + "self_attn.v_proj.weight", (G * D, W), L),
        _TensorGroup(prefix + "self_attn.o_proj.weight", (W, W), L),
        _TensorGroup(prefix + "post_attention_layernorm.weight", (W,), L),
        _TensorGroup(prefix + "mlp.gate_proj.weight", (F, W), L),
        _TensorGroup(prefix + "mlp.down_proj.weight", (W, F), L),
        _TensorGroup(prefix + "mlp.up_proj.weight", (F, W), L),
        _TensorGroup("model.norm.weight", (W,)),
        _TensorGroup(ROTARY_TABLES, (C, D)),
    ]
    return groups if tied else [*groups, _TensorGroup("lm_head.weight", (V, W))]


def reorder_rotary_rows(rows: Tensor, heads: int) -> Tensor:
    """Reorder each head's rows from adjacent rotary pairs to paired halves: (H·D, …) → (H·D, …)."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)  # (H, D/2, 2, …) → (H, 2, D/2, …)


def read_tokenizer(path: str | Path) -> Tokenizer:
    """Read the tokenizer of llama2.c (tokenizer.bin): a score, a length and the bytes of each piece."""
    path = Path(path)
    size = _get_file_size(path)
    data = path.read_bytes()
    offset, pieces, scores = 4, [], []  # the first value is the length of the longest piece
    while offset < size:
        if size - offset < 8:
            raise _build_truncation_error(path, size, len(pieces))
        score, length = struct.unpack_from("<fi", data, offset)
        offset += 8
        if not 0 <= length <= size - offset:
            raise _build_truncation_error(path, size, len(pieces))
        try:
            pieces.append(data[offset : offset + length].decode())
        except UnicodeDecodeError:
            raise CheckpointError(
                f"piece {len(pieces)} of {path} is not UTF-8", "check that it is a tokenizer.bin"
            ) from None
        scores.append(score)
        offset += length
    if len(pieces) <= EOS_ID:
        raise CheckpointError(
            f"{path} contains {len(pieces)} pieces in {size} bytes", "check that it is a complete tokenizer.bin"
        )
    pieces[UNK_ID], pieces[BOS_ID], pieces[EOS_ID] = "<unk>", "<s>", "</s>"  # the file stores them with line breaks
    if pieces[FIRST_BYTE_ID : FIRST_BYTE_ID + 256] == [chr(byte) for byte in range(256)]:
        # Early files store bytes as characters, which would be duplicates.
        pieces[FIRST_BYTE_ID : FIRST_BYTE_ID + 256] = [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [PieceType.BYTE if BYTE_PIECE.fullmatch(piece) else PieceType.NORMAL for piece in pieces]
    kinds[UNK_ID], kinds[BOS_ID], kinds[EOS_ID] = PieceType.UNKNOWN, PieceType.CONTROL, PieceType.CONTROL
    special_ids = {"bos": BOS_ID, "eos": EOS_ID, "unk": UNK_ID}
    # llama2.c also stops at bos, which separates its training texts.
    return build_sentencepiece_bpe(
        Vocabulary(pieces, kinds, special_ids, add_bos=True, stop_ids=(EOS_ID, BOS_ID)), scores, space_symbol=" "
    )


def _build_truncation_error(path: Path, size: int, piece: int) -> CheckpointError:
    return CheckpointError(f"{path} is truncated: its {size:,} bytes end within piece {piece}", "download it again")


def _get_file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", "check the path") from None
