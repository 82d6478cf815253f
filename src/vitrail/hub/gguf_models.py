"""GGUF files as decoders and tokenizers: llama, qwen2 and qwen3."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import CheckpointError
from vitrail.hub.gguf import GGUF
from vitrail.hub.llama2c import pair_halves
from vitrail.hub.vocabularies import SPLITS, Kind, Vocabulary, merged, scored
from vitrail.nn import Rotary, RotaryConfig
from vitrail.nn.rotary import Llama3
from vitrail.processing.text import Tokenizer

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # the same names in transformers
OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
INSIDE = {
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
FREQUENCIES = "rope_freqs.weight"  # Llama 3's scaling, as a factor a frequency


class GGUFWeights:
    """A GGUF file seen as a Hugging Face checkpoint: `about` is its config.json, and tensors go by those names.

    Files mix types (norms in float32), so all tensors come as the embedding is stored, or as float32 if that is
    quantised.
    """

    def __init__(self, path: str | Path):
        self.file = GGUF(path)
        self.path = self.file.path
        self.arch = self.file.need("general.architecture", str)
        if self.arch not in ARCHITECTURES:
            raise CheckpointError(
                f"{self.path} is a {self.arch[:40]!r} model, which is not read", f"known: {', '.join(ARCHITECTURES)}"
            )
        self.about = self._about()
        theirs = {name: ours for ours, name in OUTSIDE.items()}
        for i in range(self.about["num_hidden_layers"]):
            for ours, name in INSIDE.items():
                for part in ("weight", "bias"):
                    theirs[f"blk.{i}.{name}.{part}"] = f"model.layers.{i}.{ours}.{part}"
        # A name that is not known stays as it is, and is refused by whoever finds no place for it.
        self._names = {theirs.get(name, name): name for name in self.file.entries if name != FREQUENCIES}
        stored = self.file.entries["token_embd.weight"].quant.name
        self.dtype = {"F16": torch.float16, "BF16": torch.bfloat16}.get(stored, torch.float32)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.file.read(self._names.get(name, name))
        if self.arch == "llama":  # stored for neighbours that turn together; the Qwen files pair halves
            if ".q_proj." in name:
                tensor = pair_halves(tensor, self.about["num_attention_heads"])
            elif ".k_proj." in name:
                tensor = pair_halves(tensor, self.about["num_key_value_heads"])
        return tensor.to(self.dtype)

    def _about(self) -> dict[str, Any]:
        """Sizes as the tensors have them; what the metadata says must agree before a model of that size is made."""
        need, maybe, entries = self.file.need, self.file.maybe, self.file.entries
        heads = need("{arch}.attention.head_count", int)
        groups, layers = maybe("{arch}.attention.head_count_kv", int, heads), need("{arch}.block_count", int)
        width = need("{arch}.embedding_length", int)
        channels = maybe("{arch}.attention.key_length", int, width // max(heads, 1))
        V, hidden = self._rows("token_embd.weight", width), self._rows("blk.0.ffn_gate.weight", width)
        q, k = self._rows("blk.0.attn_q.weight", width), self._rows("blk.0.attn_k.weight", width)
        if not all(f"blk.{i}.attn_q.weight" in entries for i in {0, layers - 1}) or layers > len(entries):
            raise CheckpointError(f"{self.path} says {layers} blocks and does not hold them", "fetch it again")
        if min(heads, groups, channels) < 1 or (q, k) != (heads * channels, groups * channels) or channels % 2:
            raise CheckpointError(
                f"{self.path} says {heads} heads, {groups} of keys, of {channels} channels, "
                f"and its first block has {q} rows for queries and {k} for keys"
            )
        turned = maybe("{arch}.rope.dimension_count", int, channels)
        if turned != channels:
            raise CheckpointError(f"{self.path} turns {turned} of {channels} channels by position, which is not read")
        theta = float(maybe("{arch}.rope.freq_base", (int, float), 10_000.0))
        return {
            "model_type": self.arch,
            "vocab_size": V,
            "hidden_size": width,
            "intermediate_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "head_dim": channels,
            "max_position_embeddings": maybe("{arch}.context_length", int, 2048),
            "rms_norm_eps": need("{arch}.attention.layer_norm_rms_epsilon", float),
            "tie_word_embeddings": "output.weight" not in entries,
            "attention_bias": "blk.0.attn_output.bias" in entries,
            "rope_parameters": {"rope_theta": theta, **self._scaling(theta, channels)},
        }

    def _rows(self, name: str, width: int) -> int:
        entry = self.file.entries.get(name)
        if entry is None or len(entry.shape) != 2 or entry.shape[1] != width:
            shape = "missing" if entry is None else f"of shape {entry.shape}"
            raise CheckpointError(f"{self.path}: tensor {name!r} is {shape}, and the model is {width} wide")
        return entry.shape[0]

    def _scaling(self, theta: float, channels: int) -> dict[str, Any]:
        """`rope_type` and its options, as config.json has them."""
        if FREQUENCIES in self.file.entries:
            return self._llama3(theta, channels)
        kind = self.file.maybe("{arch}.rope.scaling.type", str, "none")
        if kind == "none":
            return {"rope_type": "default"}
        if kind not in ("linear", "yarn"):
            raise CheckpointError(f"{self.path} scales positions by {kind[:40]!r}, which is not read")
        scaling = {"rope_type": kind, "factor": float(self.file.need("{arch}.rope.scaling.factor", (int, float)))}
        original = self.file.maybe("{arch}.rope.scaling.original_context_length", int)
        return scaling if original is None else {**scaling, "original_max_position_embeddings": original}

    def _llama3(self, theta: float, channels: int) -> dict[str, Any]:
        """The file has the ramp's values and not its settings; those of Llama 3.1 to 3.3 are tried."""
        table = self.file.read(FREQUENCIES)
        scaling = Llama3(factor=float(table.max()), original_length=8192)
        plain, ramp = (
            Rotary(RotaryConfig(head_dim=channels, theta=theta, scaling=s)).frequency for s in (None, scaling)
        )
        if table.shape != plain.shape or not torch.allclose(plain / ramp, table, rtol=1e-4):
            raise CheckpointError(
                f"{self.path}: {FREQUENCIES} is not the scaling of Llama 3", "use another export of it"
            )
        return {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low,
            "high_freq_factor": scaling.high,
            "original_max_position_embeddings": scaling.original_length,
        }


# ---- the tokenizer ----------------------------------------------------------------------------------------------


def read_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer inside a GGUF file: SentencePiece's (`llama`) or GPT-2's (`gpt2`)."""
    file = GGUF(path)
    model = file.need("tokenizer.ggml.model", str)
    pieces = _strings(file, "tokenizer.ggml.tokens")
    kinds = file.maybe("tokenizer.ggml.token_type", list, [Kind.NORMAL] * len(pieces))
    ids = {
        role: file.maybe(f"tokenizer.ggml.{name}_token_id", int)
        for role, name in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "eot": "eot"}.items()
    }
    ids = {role: id for role, id in ids.items() if id is not None}
    if len(kinds) != len(pieces) or any(not 0 <= id < len(pieces) for id in ids.values()):
        raise CheckpointError(f"{file.path}: {len(pieces)} pieces do not fit their types or the special ids {ids}")
    stops = [ids.pop("eot")] if "eot" in ids else []
    template = file.maybe("tokenizer.chat_template", str)

    def vocabulary(add_bos: bool) -> Vocabulary:
        add_bos = file.maybe("tokenizer.ggml.add_bos_token", bool, add_bos)
        return Vocabulary(pieces, kinds, ids, add_bos, template, stops)

    if model == "llama":
        scores = file.need("tokenizer.ggml.scores", list)
        if len(scores) != len(pieces):
            raise CheckpointError(f"{file.path}: {len(scores)} scores do not fit {len(pieces)} pieces")
        return scored(vocabulary(True), scores, prefix=file.maybe("tokenizer.ggml.add_space_prefix", bool, True))
    if model != "gpt2":
        raise CheckpointError(f"{file.path} has a tokenizer of the kind {model[:40]!r}", "known: llama, gpt2")
    split = file.maybe("tokenizer.ggml.pre", str, "missing")
    if split not in SPLITS:
        raise CheckpointError(f"{file.path} splits words as {split[:40]!r}", f"known: {', '.join(SPLITS)}")
    return merged(vocabulary(SPLITS[split].bos), _strings(file, "tokenizer.ggml.merges"), SPLITS[split])


def _strings(file: GGUF, key: str) -> Sequence[str]:
    found = file.need(key, list)
    if not all(isinstance(one, str) for one in found):
        raise CheckpointError(f"{file.path}: {key} is no list of strings", "fetch it again")
    return found
