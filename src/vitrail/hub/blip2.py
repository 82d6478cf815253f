"""BLIP-2 of transformers: a ViT, a Q-Former over all its tokens, a projection and a decoder.

Also its first stage (`Blip2ForImageTextRetrieval`): a Q-Former that takes text, with contrastive and matching heads.
"""

from typing import Any

from vitrail.connectors import QFormerConfig
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.chat_config import ChatConfig
from vitrail.hub.checkpoint_family import CheckpointFamily, build_round_trip_check, fill_defaults
from vitrail.hub.encoder_families import build_patch_embed_rules
from vitrail.hub.llava import LANGUAGE_MODELS, find_part_family, normalize_llava_config, read_part, write_part
from vitrail.hub.opt import OPT
from vitrail.hub.plain_vit import read_plain_vit
from vitrail.hub.tensor_rules import TensorRule, add_prefix, fuse_layer, rename, rename_layer, view
from vitrail.hub.vlm_towers import (
    build_tower_family,
    to_hf_activation,
)
from vitrail.models.text_qformer import TextQFormer, TextQFormerConfig
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.processing import image_processors
from vitrail.processing.image_loading import NORMALIZATIONS
from vitrail.processing.resolution_policies import NaivePolicy
from vitrail.registry import FAMILIES
from vitrail.stream import StreamRules

HFConfig = dict[str, Any]

# Defaults of transformers for keys that a config.json leaves out.
VISION_DEFAULTS: HFConfig = {
    "hidden_size": 1408,
    "intermediate_size": 6144,
    "num_hidden_layers": 39,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "qkv_bias": True,
}
BLIP_VISION_DEFAULTS: HFConfig = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 384,
    "patch_size": 16,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
}
QFORMER_DEFAULTS: HFConfig = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "cross_attention_frequency": 2,
    "use_qformer_text_input": False,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
}
LANGUAGE_MODELS_WITH_OPT = {OPT.name: OPT, **LANGUAGE_MODELS}

# ---- tower ------------------------------------------------------------------------------------------------------


def _read_tower(hf_config: HFConfig) -> ViTConfig:
    return read_plain_vit(fill_defaults(hf_config, VISION_DEFAULTS))


def _read_blip_tower(hf_config: HFConfig) -> ViTConfig:
    return read_plain_vit({**fill_defaults(hf_config, BLIP_VISION_DEFAULTS), "qkv_bias": True})


def _write_tower(config: ViTConfig) -> HFConfig:
    block = config.block
    return {
        "architectures": ["Blip2VisionModel"],
        "hidden_size": block.width,
        "intermediate_size": block.mlp.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": block.attention.heads,
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "hidden_act": to_hf_activation(block.mlp.activation),
        "layer_norm_eps": block.eps,
        "qkv_bias": block.attention.bias == "all",
    }


def _write_blip_tower(config: ViTConfig) -> HFConfig:
    hf_config = {**_write_tower(config), "architectures": ["BlipVisionModel"]}
    return {key: value for key, value in hf_config.items() if key != "qkv_bias"}


def _build_tower_rules(config: ViTConfig) -> list[TensorRule]:
    W, rows = config.block.width, 1 + config.grid_size**2
    rules = [
        view("cls", "embeddings.class_embedding", (W,), (1, 1, W)),
        *build_patch_embed_rules(config, "embeddings.patch_embedding"),
        view("positions.table", "embeddings.position_embedding", (rows, W), (1, rows, W)),
        *rename_layer("norm_last", "post_layernorm"),
    ]
    block = [
        *rename_layer("branches.self.norm", "layer_norm1"),
        *rename_layer("branches.self.op.qkv", "self_attn.qkv", config.block.attention.bias == "all"),
        *rename_layer("branches.self.op.out", "self_attn.projection"),
        *rename_layer("branches.mlp.norm", "layer_norm2"),
        *rename_layer("branches.mlp.op.up", "mlp.fc1"),
        *rename_layer("branches.mlp.op.down", "mlp.fc2"),
    ]
    for i in range(config.layers):
        rules += add_prefix(f"blocks.{i}.", f"encoder.layers.{i}.", block)
    return rules


BLIP2_TOWER = build_tower_family(
    "blip_2_vision_model", ViT, _read_tower, _write_tower, _build_tower_rules, VISION_DEFAULTS
)

BLIP_TOWER = build_tower_family(
    "blip_vision_model", ViT, _read_blip_tower, _write_blip_tower, _build_tower_rules, BLIP_VISION_DEFAULTS
)

# ---- Q-Former ---------------------------------------------------------------------------------------------------


def _read_qformer(hf_config: HFConfig, in_features: int, out_features: int) -> QFormerConfig:
    settings = fill_defaults(hf_config.get("qformer_config") or {}, QFORMER_DEFAULTS)
    if settings["hidden_act"] != "gelu":
        raise CheckpointError(f"qformer_config.hidden_act is {settings['hidden_act']!r}: only gelu is supported")
    return QFormerConfig(
        in_features=in_features,
        out_features=out_features,
        num_queries=hf_config.get("num_query_tokens", 32),
        layers=settings["num_hidden_layers"],
        cross_attention_frequency=settings["cross_attention_frequency"],
        width=settings["hidden_size"],
        heads=settings["num_attention_heads"],
        intermediate_size=settings["intermediate_size"],
        use_text=settings["use_qformer_text_input"],
        eps=settings["layer_norm_eps"],
    )


def _write_qformer(config: QFormerConfig) -> HFConfig:
    return {
        "model_type": "blip_2_qformer",
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.intermediate_size,
        "encoder_hidden_size": config.in_features,
        "cross_attention_frequency": config.cross_attention_frequency,
        "use_qformer_text_input": config.use_text,
        "layer_norm_eps": config.eps,
    }


def build_qformer_rules(config: QFormerConfig) -> list[TensorRule]:
    """Build the tensor rules of a Q-Former's layers, without its queries and its projection."""
    rules = rename_layer("norm", "layernorm")
    for i in range(config.layers):
        native, hf = f"layers.{i}.block.branches", f"encoder.layer.{i}"
        rules += _build_attention_rules(f"{native}.self", f"{hf}.attention", config.width, cross=False)
        if i % config.cross_attention_frequency == 0:
            rules += _build_attention_rules(f"{native}.cross", f"{hf}.crossattention", config.width, cross=True)
        rules += _build_mlp_rules(f"{native}.mlp", f"{hf}.intermediate_query", f"{hf}.output_query")
        if config.use_text:
            rules += _build_mlp_rules(f"layers.{i}.text_mlp", f"{hf}.intermediate", f"{hf}.output")
    return rules


def _build_attention_rules(native: str, hf: str, width: int, *, cross: bool) -> list[TensorRule]:
    q, *kv = [f"{hf}.attention.{name}" for name in ("query", "key", "value")]
    if cross:
        rules = rename_layer(f"{native}.op.q", q) + fuse_layer(f"{native}.op.kv", kv, [width] * 2)
    else:
        rules = fuse_layer(f"{native}.op.qkv", [q, *kv], [width] * 3)
    out = rename_layer(f"{native}.op.out", f"{hf}.output.dense")
    return rules + out + rename_layer(f"{native}.norm", f"{hf}.output.LayerNorm")


def _build_mlp_rules(native: str, up: str, down: str) -> list[TensorRule]:
    rules = rename_layer(f"{native}.op.up", f"{up}.dense") + rename_layer(f"{native}.op.down", f"{down}.dense")
    return rules + rename_layer(f"{native}.norm", f"{down}.LayerNorm")


def _build_vision_rules(tower: ViTConfig, queries: QFormerConfig, prefix: str) -> list[TensorRule]:
    """Build the tensor rules of the tower, the queries and the Q-Former."""
    size = (queries.num_queries, queries.width)
    return [
        *add_prefix("tower.", "vision_model.", _build_tower_rules(tower)),
        view(f"{prefix}.queries", "query_tokens", size, (1, *size)),
        *add_prefix(f"{prefix}.", "qformer.", build_qformer_rules(queries)),
    ]


# ---- vision-language model --------------------------------------------------------------------------------------


def _read_config(hf_config: HFConfig) -> VLMConfig:
    language_model = (hf_config.get("text_config") or {}).get("model_type") or "opt"
    if language_model == "t5":
        raise CheckpointError(
            "text_config.model_type is 't5': encoder-decoder language models are not supported",
            f"use a BLIP-2 with one of the language models {', '.join(LANGUAGE_MODELS_WITH_OPT)}",
        )
    tower = _read_tower(hf_config.get("vision_config") or {})
    _, decoder = read_part(hf_config, "text_config", LANGUAGE_MODELS_WITH_OPT, "opt")
    image = hf_config.get("image_token_index", hf_config.get("image_token_id"))
    if image is None:
        raise CheckpointError(
            "image_token_index is missing, as in older files",
            "add it to config.json (OPT: 50265)",
        )
    return VLMConfig(
        tower=tower,
        connector=_read_qformer(hf_config, tower.block.width, decoder.block.width),
        decoder=decoder,
        policy=NaivePolicy(
            image_size=tower.image_size, patch_size=tower.patch_size, unread_pixels=tower.image_size % tower.patch_size
        ),
        mean=NORMALIZATIONS["clip"].mean,
        std=NORMALIZATIONS["clip"].std,
        keep_prefix_tokens=True,
        rules=StreamRules(fill_id=image),
    )


def _write_config(config: VLMConfig) -> HFConfig:
    if not isinstance(config.tower, ViTConfig) or not isinstance(config.connector, QFormerConfig):
        raise ConfigError("BLIP-2 needs a ViT and a Q-Former")
    return {
        "architectures": ["Blip2ForConditionalGeneration"],
        "vision_config": write_part(BLIP2_TOWER, config.tower),
        "qformer_config": _write_qformer(config.connector),
        "text_config": write_part(find_part_family(config.decoder, LANGUAGE_MODELS_WITH_OPT), config.decoder),
        "num_query_tokens": config.connector.num_queries,
        "image_token_index": config.rules.fill_id,
        "tie_word_embeddings": config.decoder.tie_word_embeddings,
        "use_decoder_only_language_model": True,
    }


def _build_rules(config: VLMConfig) -> list[TensorRule]:
    queries, language_model = config.connector, find_part_family(config.decoder, LANGUAGE_MODELS_WITH_OPT)
    assert isinstance(config.tower, ViTConfig) and isinstance(queries, QFormerConfig)
    return [
        *_build_vision_rules(config.tower, queries, "connector"),
        *rename_layer("connector.project", "language_projection"),
        *add_prefix("decoder.", "language_model.", language_model.tensor_rules(config.decoder)),
    ]


DUPLICATE_TENSORS = (("language_model.lm_head.weight", "language_model.model.decoder.embed_tokens.weight"),)
BLIP2 = CheckpointFamily(
    "blip-2",
    VLM,
    _read_config,
    _write_config,
    build_round_trip_check(_read_config, _write_config, normalize_llava_config, image_processors.BLIP),
    _build_rules,
    duplicate_tensors=DUPLICATE_TENSORS,
    image_processor=image_processors.BLIP,
    chat_config=ChatConfig(
        "Blip2Processor",
        "blip-2",
        processor_fields=lambda config, _vision_tokens: {"num_query_tokens": config.connector.num_queries},
        fixed_image_token="<image>",
        takes_chat_template=False,
    ),
    part_defaults={"vision_config": VISION_DEFAULTS, "qformer_config": QFORMER_DEFAULTS},
)

# ---- first stage ------------------------------------------------------------------------------------------------


def _read_text(hf_config: HFConfig) -> TextQFormerConfig:
    tower = _read_tower(hf_config.get("vision_config") or {})
    settings = fill_defaults(hf_config.get("qformer_config") or {}, QFORMER_DEFAULTS)
    return TextQFormerConfig(
        tower=tower,
        qformer=_read_qformer(hf_config, tower.block.width, hf_config.get("image_text_hidden_size", 256)),
        vocab_size=settings["vocab_size"],
        context_length=settings["max_position_embeddings"],
        keep_prefix_tokens=True,
        log_scale=None,  # not stored, nor is the text generation head
    )


def _write_text(config: TextQFormerConfig) -> HFConfig:
    text_settings = {"vocab_size": config.vocab_size, "max_position_embeddings": config.context_length}
    return {
        "architectures": ["Blip2ForImageTextRetrieval"],
        "model_type": "blip-2",
        "vision_config": write_part(BLIP2_TOWER, config.tower),
        "qformer_config": _write_qformer(config.qformer) | text_settings,
        "num_query_tokens": config.qformer.num_queries,
        "image_text_hidden_size": config.qformer.out_features,
        "image_token_index": None,
    }


def _build_text_rules(config: TextQFormerConfig) -> list[TensorRule]:
    return [
        *_build_vision_rules(config.tower, config.qformer, "qformer"),
        rename("embed.weight", "embeddings.word_embeddings.weight"),
        rename("positions", "embeddings.position_embeddings.weight"),
        *rename_layer("qformer.project", "vision_projection"),
        *rename_layer("text_projection", "text_projection"),
        *rename_layer("matcher", "itm_head"),
    ]


BLIP2_TEXT = CheckpointFamily(
    "Blip2ForImageTextRetrieval",
    TextQFormer,
    _read_text,
    _write_text,
    build_round_trip_check(_read_text, _write_text),
    _build_text_rules,
    config_key="architectures",
)
FAMILIES.register("blip_2_vision_model", BLIP2_TOWER)
FAMILIES.register("blip_vision_model", BLIP_TOWER)
FAMILIES.register("blip-2", BLIP2)
FAMILIES.register("Blip2ForImageTextRetrieval", BLIP2_TEXT)
