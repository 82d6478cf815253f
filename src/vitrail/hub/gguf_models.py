"""Decoders and tokenizers in GGUF files: llama, qwen2 and qwen3."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import CheckpointError
from vitrail.hub.gguf import GGUFFile
from vitrail.hub.llama2c import reorder_rotary_rows
from vitrail.hub.tokenizer_builders import (
    PRE_TOKENIZERS,
    PieceType,
    Vocabulary,
    build_byte_level_bpe,
    build_sentencepiece_bpe,
)
from vitrail.nn import RotaryConfig, RotaryEmbedding
from vitrail.nn.rotary_embedding import Llama3Scaling
from vitrail.processing.tokenizer import Tokenizer

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # the same names in transformers
MODEL_TENSORS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3 rope scaling, as one factor for each frequency


class GGUFWeights:
    """A GGUF file as a Hugging Face checkpoint: `hf_config` is its config.json, and tensors have those names.

    Files mix dtypes (norms in float32). All tensors get the dtype of the embedding, or float32 if that is quantized.
    """

    def __init__(self, path: str | Path):
        self.file = GGUFFile(path)
        self.path = self.file.path
        self.architecture = self.file.require_value("general.architecture", str)
        if self.architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"{self.path} has the unsupported architecture {self.architecture[:40]!r}",
                f"known: {', '.join(ARCHITECTURES)}",
            )
        self.hf_config = self._read_hf_config()
        hf_names = {name: hf_name for hf_name, name in MODEL_TENSORS.items()}
        for i in range(self.hf_config["num_hidden_layers"]):
            for hf_name, name in LAYER_TENSORS.items():
                for part in ("weight", "bias"):
                    hf_names[f"blk.{i}.{name}.{part}"] = f"model.layers.{i}.{hf_name}.{part}"
        # Unknown names stay unchanged and raise an error when the tensors are loaded.
        self._names = {hf_names.get(name, name): name for name in self.file.entries if name != ROPE_FACTORS}
        embedding_type = self.file.entries["token_embd.weight"].quantization.name
        self.dtype = {"F16": torch.float16, "BF16": torch.bfloat16}.get(embedding_type, torch.float32)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.file.read_tensor(self._names.get(name, name))
        if self.architecture == "llama":  # stored with adjacent rotary pairs; Qwen files pair halves
            if ".q_proj." in name:
                tensor = reorder_rotary_rows(tensor, self.hf_config["num_attention_heads"])
            elif ".k_proj." in name:
                tensor = reorder_rotary_rows(tensor, self.hf_config["num_key_value_heads"])
        return tensor.to(self.dtype)

    def _read_hf_config(self) -> dict[str, Any]:
        """Derive config.json. Sizes come from tensor shapes, and the metadata must agree with them."""
        require, get, entries = self.file.require_value, self.file.get_value, self.file.entries
        heads = require("{arch}.attention.head_count", int)
        groups, layers = get("{arch}.attention.head_count_kv", int, heads), require("{arch}.block_count", int)
        width = require("{arch}.embedding_length", int)
        channels = get("{arch}.attention.key_length", int, width // max(heads, 1))
        V, hidden = self._count_rows("token_embd.weight", width), self._count_rows("blk.0.ffn_gate.weight", width)
        q, k = self._count_rows("blk.0.attn_q.weight", width), self._count_rows("blk.0.attn_k.weight", width)
        if not all(f"blk.{i}.attn_q.weight" in entries for i in {0, layers - 1}) or layers > len(entries):
            raise CheckpointError(
                f"{self.path} declares {layers} blocks and does not contain them", "download it again"
            )
        if min(heads, groups, channels) < 1 or (q, k) != (heads * channels, groups * channels) or channels % 2:
            raise CheckpointError(
                f"{self.path} declares {heads} heads, {groups} key heads and {channels} channels, "
                f"but its first block has {q} query rows and {k} key rows"
            )
        rotated = get("{arch}.rope.dimension_count", int, channels)
        if rotated != channels:
            raise CheckpointError(f"{self.path} rotates {rotated} of {channels} channels, which is not supported")
        theta = float(get("{arch}.rope.freq_base", (int, float), 10_000.0))
        return {
            "model_type": self.architecture,
            "vocab_size": V,
            "hidden_size": width,
            "intermediate_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "head_dim": channels,
            "max_position_embeddings": get("{arch}.context_length", int, 2048),
            "rms_norm_eps": require("{arch}.attention.layer_norm_rms_epsilon", float),
            "tie_word_embeddings": "output.weight" not in entries,
            "attention_bias": "blk.0.attn_output.bias" in entries,
            "rope_parameters": {"rope_theta": theta, **self._read_rope_scaling(theta, channels)},
        }

    def _count_rows(self, name: str, width: int) -> int:
        entry = self.file.entries.get(name)
        if entry is None or len(entry.shape) != 2 or entry.shape[1] != width:
            shape = "missing" if entry is None else f"of shape {entry.shape}"
            raise CheckpointError(f"{self.path}: tensor {name!r} is {shape}, but the model width is {width}")
        return entry.shape[0]

    def _read_rope_scaling(self, theta: float, channels: int) -> dict[str, Any]:
        """Return `rope_type` and its options for config.json."""
        if ROPE_FACTORS in self.file.entries:
            return self._read_llama3_scaling(theta, channels)
        kind = self.file.get_value("{arch}.rope.scaling.type", str, "none")
        if kind == "none":
            return {"rope_type": "default"}
        if kind not in ("linear", "yarn"):
            raise CheckpointError(f"{self.path} has the unsupported rope scaling {kind[:40]!r}")
        scaling = {
            "rope_type": kind,
            "factor": float(self.file.require_value("{arch}.rope.scaling.factor", (int, float))),
        }
        original = self.file.get_value("{arch}.rope.scaling.original_context_length", int)
        return scaling if original is None else {**scaling, "original_max_position_embeddings": original}

    def _read_llama3_scaling(self, theta: float, channels: int) -> dict[str, Any]:
        """Recover the settings of Llama 3 rope scaling: the file has its values only. Tries Llama 3.1 to 3.3."""
        factors = self.file.read_tensor(ROPE_FACTORS)
        scaling = Llama3Scaling(factor=float(factors.max()), original_length=8192)
        plain, ramp = (
            RotaryEmbedding(RotaryConfig(head_dim=channels, theta=theta, scaling=s)).frequency for s in (None, scaling)
        )
        if factors.shape != plain.shape or not torch.allclose(plain / ramp, factors, rtol=1e-4):
            raise CheckpointError(
                f"{self.path}: {ROPE_FACTORS} is not the rope scaling of Llama 3", "use another export"
            )
        return {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_length,
        }


# ---- the tokenizer ----------------------------------------------------------------------------------------------


def read_tokenizer(path: str | Path) -> Tokenizer:
    """Read the tokenizer of a GGUF file: SentencePiece (`llama`) or GPT-2 (`gpt2`)."""
    file = GGUFFile(path)
    model = file.require_value("tokenizer.ggml.model", str)
    pieces = _read_strings(file, "tokenizer.ggml.tokens")
    kinds = file.get_value("tokenizer.ggml.token_type", list, [PieceType.NORMAL] * len(pieces))
    ids = {
        role: file.get_value(f"tokenizer.ggml.{name}_token_id", int)
        for role, name in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "eot": "eot"}.items()
    }
    ids = {role: id for role, id in ids.items() if id is not None}
    if len(kinds) != len(pieces) or any(not 0 <= id < len(pieces) for id in ids.values()):
        raise CheckpointError(f"{file.path}: {len(pieces)} pieces do not match their types or the special ids {ids}")
    stops = [ids.pop("eot")] if "eot" in ids else []
    template = file.get_value("tokenizer.chat_template", str)

    def vocabulary(add_bos: bool) -> Vocabulary:
        add_bos = file.get_value("tokenizer.ggml.add_bos_token", bool, add_bos)
        return Vocabulary(pieces, kinds, ids, add_bos, template, stops)

    if model == "llama":
        scores = file.require_value("tokenizer.ggml.scores", list)
        if len(scores) != len(pieces):
            raise CheckpointError(f"{file.path}: {len(scores)} scores do not match {len(pieces)} pieces")
        return build_sentencepiece_bpe(
            vocabulary(True), scores, add_prefix_space=file.get_value("tokenizer.ggml.add_space_prefix", bool, True)
        )
    if model != "gpt2":
        raise CheckpointError(f"{file.path} has the unsupported tokenizer {model[:40]!r}", "known: llama, gpt2")
    pre_tokenizer = file.get_value("tokenizer.ggml.pre", str, "missing")
    if pre_tokenizer not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"{file.path} has the unsupported pre-tokenizer {pre_tokenizer[:40]!r}",
            f"known: {', '.join(PRE_TOKENIZERS)}",
        )
    return build_byte_level_bpe(
        vocabulary(PRE_TOKENIZERS[pre_tokenizer].add_bos),
        _read_strings(file, "tokenizer.ggml.merges"),
        PRE_TOKENIZERS[pre_tokenizer],
    )


def _read_strings(file: GGUFFile, key: str) -> Sequence[str]:
    strings = file.require_value(key, list)
    if not all(isinstance(string, str) for string in strings):
        raise CheckpointError(f"{file.path}: {key} is not a list of strings", "download it again")
    return strings
