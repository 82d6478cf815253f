"""Llama-3.2-Vision (Mllama of transformers): a tiled tower, a linear projector, and a Llama with inserted gated
cross-attention blocks.

This follows Meta's code, with which the model was trained, where transformers 5 differs from it in two points:

- A tap of the tower is the input of its block. transformers takes the output (`tower.taps` + 1 gives the same).
- Text without an image skips the cross-attention blocks. In transformers it attends to all images of the batch, so its
  logits depend on the other samples.
"""

from typing import Any

from vitrail.backbones.fusion import CrossAttentionFusionConfig
from vitrail.connectors import ProjectorConfig
from vitrail.encoders.tiled_vit import TiledViTConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.chat_config import ChatConfig
from vitrail.hub.checkpoint_family import CheckpointFamily, build_round_trip_check, fill_defaults, reject_settings
from vitrail.hub.decoder_families import LLAMA, build_decoder_rules, normalize_decoder_config
from vitrail.hub.tensor_rules import TensorRule, add_prefix, fuse_layer, rename, rename_layer
from vitrail.hub.vlm_towers import MLLAMA_VISION
from vitrail.models.cross_attention_vlm import CrossAttentionVLM, CrossAttentionVLMConfig
from vitrail.nn import BlockConfig
from vitrail.processing import image_processors
from vitrail.processing.mllama_canvas import CanvasPolicy
from vitrail.registry import FAMILIES

HFConfig = dict[str, Any]

EXTRA_EMBEDDING_ROWS = 8  # rows that the embedding has more than the head
OMITTED_KEYS = (
    "architectures",
    "head_dim",
    "attention_bias",
    "mlp_bias",
)  # keys of Llama that a Mllama text_config lacks

# Defaults of transformers for keys that a config.json leaves out.
TEXT_DEFAULTS: HFConfig = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "hidden_act": "silu",
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
    "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
}  # fmt: skip
IMAGE_TOKEN_ID = 128_256


def _read_config(hf_config: HFConfig) -> CrossAttentionVLMConfig:
    text = fill_defaults(hf_config.get("text_config") or {}, TEXT_DEFAULTS)
    vision = hf_config.get("vision_config") or {}
    reject_settings(
        text,
        tie_word_embeddings="the head has fewer rows than the embedding",
        dropout="it is not supported",
        attention_bias="this model has none",
        mlp_bias="this model has none",
    )
    cross_layers = tuple(text["cross_attention_layers"])
    decoder = LLAMA.from_hf_config(
        text | {"num_hidden_layers": text["num_hidden_layers"] - len(cross_layers), "head_dim": None}
    )
    attention = decoder.block.attention
    # transformers would apply rotary positions to head_dim channels of heads with another width.
    if text.get("head_dim") not in (None, attention.resolve_head_dim(decoder.block.width)):
        raise CheckpointError(f"head_dim is {text['head_dim']}, but must be hidden_size / num_attention_heads")
    tower = MLLAMA_VISION.from_hf_config(vision)
    if vision.get("vision_output_dim", tower.width) != tower.width:
        raise CheckpointError(
            f"vision_output_dim is {vision['vision_output_dim']}, but the tower with its taps has {tower.width}"
        )
    cross_attention = attention.replace(qk_norm="rms", eps=decoder.block.eps)
    fusion = CrossAttentionFusionConfig(
        layer_indices=cross_layers, placement="inserted", attention=cross_attention, without_image="skip"
    )
    return CrossAttentionVLMConfig(
        tower=tower,
        connector=ProjectorConfig(in_features=tower.width, out_features=decoder.block.width, layers=1),
        decoder=decoder.replace(fusion=fusion, extra_embeddings=EXTRA_EMBEDDING_ROWS),
        image_token_id=hf_config.get("image_token_index", hf_config.get("image_token_id", IMAGE_TOKEN_ID)),
        join_adjacent=True,
        policy=CanvasPolicy(tile_size=tower.image_size, patch_size=tower.patch_size, max_tiles=tower.max_tiles),
    )


def _write_config(config: CrossAttentionVLMConfig) -> HFConfig:
    if not isinstance(config.tower, TiledViTConfig):
        raise ConfigError("Llama-3.2-Vision needs a tiled tower")
    text = LLAMA.to_hf_config(config.decoder)
    text |= {
        "model_type": "mllama_text_model",
        "num_hidden_layers": config.decoder.layers + len(config.cross_attention.layer_indices),
        "cross_attention_layers": list(config.cross_attention.layer_indices),
        "pad_token_id": None,  # the default 128004 is invalid for small vocabularies
    }
    return {
        "architectures": ["MllamaForConditionalGeneration"],
        "vision_config": {"model_type": MLLAMA_VISION.name, **MLLAMA_VISION.to_hf_config(config.tower)},
        "text_config": {key: value for key, value in text.items() if key not in OMITTED_KEYS},
        "image_token_index": config.image_token_id,
    }


def _build_rules(config: CrossAttentionVLMConfig) -> list[TensorRule]:
    decoder, cross_layers = config.decoder, sorted(config.cross_attention.layer_indices)
    self_layers = [
        layer_index for layer_index in range(decoder.layers + len(cross_layers)) if layer_index not in cross_layers
    ]
    text_rules = [
        rule._replace(hf=tuple(_renumber_layer(name, self_layers) for name in rule.hf))
        for rule in build_decoder_rules(decoder)
    ]
    block_rules = [
        *build_cross_attention_rules(config.cross_attention.block_config(decoder.block), ("q_norm", "k_norm")),
        rename("branches.cross.gate", "cross_attn_attn_gate"),
        rename("branches.mlp.gate", "cross_attn_mlp_gate"),
    ]
    for index, layer_index in enumerate(cross_layers):
        text_rules += add_prefix(f"fusion.blocks.{index}.", f"model.layers.{layer_index}.", block_rules)
    return [
        *add_prefix("tower.", "vision_model.", MLLAMA_VISION.tensor_rules(config.tower)),
        *rename_layer("connector.layers.linears.0", "multi_modal_projector"),
        *add_prefix("decoder.", "language_model.", text_rules),
    ]


def build_cross_attention_rules(block: BlockConfig, norms: tuple[str, str]) -> list[TensorRule]:
    """Build the tensor rules of a cross-attention block, without its gates."""
    attention, op = block.attention, "branches.cross.op"
    rows = attention.num_kv_heads * attention.resolve_head_dim(block.width)
    rules = [
        *rename_layer(f"{op}.q", "cross_attn.q_proj", False),
        *fuse_layer(f"{op}.kv", ["cross_attn.k_proj", "cross_attn.v_proj"], [rows, rows], False),
        *rename_layer(f"{op}.out", "cross_attn.o_proj", False),
        *rename_layer("branches.cross.norm", "input_layernorm", False),
        *rename_layer("branches.mlp.norm", "post_attention_layernorm", False),
        *fuse_layer(
            "branches.mlp.op.gate_up", ["mlp.gate_proj", "mlp.up_proj"], [block.mlp.intermediate_size] * 2, False
        ),
        *rename_layer("branches.mlp.op.down", "mlp.down_proj", False),
    ]
    for native, hf in zip(("q_norm", "k_norm"), norms, strict=True):
        rules += rename_layer(f"{op}.{native}", f"cross_attn.{hf}", False) if attention.qk_norm else []
    return rules


def _renumber_layer(name: str, numbers: list[int]) -> str:
    """Renumber a layer's name to count the inserted blocks too."""
    parts = name.split(".")
    if parts[:2] == ["model", "layers"]:
        parts[2] = str(numbers[int(parts[2])])
    return ".".join(parts)


def normalize_mllama_config(config: CrossAttentionVLMConfig) -> CrossAttentionVLMConfig:
    """Return the equivalent config with all defaults filled in."""
    decoder = normalize_decoder_config(config.decoder)
    block = config.cross_attention.block_config(decoder.block)
    attention = block.attention.replace(
        kv_heads=block.attention.num_kv_heads, head_dim=block.attention.resolve_head_dim(block.width)
    )
    cross = config.cross_attention.replace(
        layer_indices=tuple(sorted(config.cross_attention.layer_indices)),
        attention=attention,
        mlp=block.mlp,
        context_width=config.width,
    )
    return config.replace(decoder=decoder.replace(fusion=cross), policy=config.resolved_policy)


MLLAMA = CheckpointFamily(
    "mllama",
    CrossAttentionVLM,
    _read_config,
    _write_config,
    build_round_trip_check(_read_config, _write_config, normalize_mllama_config, image_processors.MLLAMA),
    _build_rules,
    image_processor=image_processors.MLLAMA,
    chat_config=ChatConfig("MllamaProcessor", "llama3", {"after": ""}, tokenizer_tokens={"image_token": "image"}),
    part_defaults={"text_config": TEXT_DEFAULTS, "vision_config": MLLAMA_VISION.class_defaults},
)
FAMILIES.register("mllama", MLLAMA)
