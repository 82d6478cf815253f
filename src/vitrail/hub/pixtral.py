"""Pixtral: its vision tower, and Pixtral 12B, which transformers stores as LLaVA with this tower.

A token [IMG_BREAK] follows every row of an image but the last, which [IMG_END] follows. Their ids are no part of the
released config.json, and equal in all tokenizers of Mistral; exports state them.
"""

from collections.abc import Callable
from typing import Any

from vitrail.connectors import ProjectorConfig
from vitrail.encoders.packed_vit import PackedViT, PackedViTConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.chat_config import ChatConfig, VisionTokens
from vitrail.hub.checkpoint_family import ACTIVATIONS, CheckpointFamily, build_round_trip_check, fill_defaults
from vitrail.hub.llava import (
    DEFAULTS,
    DUPLICATE_TENSORS,
    LANGUAGE_MODELS,
    LEGACY_NAMES,
    MODULE_NAMES,
    find_part_family,
    normalize_llava_config,
    read_part,
    write_part,
)
from vitrail.hub.tensor_rules import TensorRule, add_prefix, flatten_kernel, fuse_layer, rename_layer
from vitrail.hub.vlm_towers import build_tower_family, read_activation, read_square_size, to_hf_activation
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.models.vlm_config import ROW_TOKENS
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig
from vitrail.processing import image_processors
from vitrail.processing.image_loading import NORMALIZATIONS
from vitrail.processing.resolution_policies import LongestEdgePolicy
from vitrail.registry import FAMILIES
from vitrail.stream import StreamRules

HFConfig = dict[str, Any]

EPS = 1e-5  # of all norms; fixed, not part of the config
IMAGE_TOKEN_ID = 10  # of Mistral's tokenizers
ROW_TOKEN_IDS = dict(zip(ROW_TOKENS, (12, 13), strict=True))
TOWER_DEFAULTS: HFConfig = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 1024,
    "patch_size": 16,
    "hidden_act": "gelu",
}


# ---- the tower --------------------------------------------------------------------------------------------------


def _read_tower(hf_config: HFConfig) -> PackedViTConfig:
    hf_config = fill_defaults(hf_config, TOWER_DEFAULTS)
    rope = hf_config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") not in ("default", "axial"):
        raise CheckpointError(f"rope_type is {rope['rope_type']!r}", "known: axial")
    attention = AttentionConfig(heads=hf_config["num_attention_heads"], head_dim=hf_config.get("head_dim"))
    mlp = GatedMLPConfig(intermediate_size=hf_config["intermediate_size"], activation=read_activation(hf_config))
    return PackedViTConfig(
        layers=hf_config["num_hidden_layers"],
        block=BlockConfig(width=hf_config["hidden_size"], attention=attention, mlp=mlp, norm="rms", eps=EPS),
        patch_size=read_square_size(hf_config, "patch_size"),
        temporal_patch_size=1,
        spatial_merge_size=1,
        channels=hf_config["num_channels"],
        theta=float(rope.get("rope_theta") or hf_config.get("rope_theta") or 10_000.0),
        rotary_layout="2d_split",
        norm_first=True,
    )


def _write_tower(config: PackedViTConfig) -> HFConfig:
    block = config.block
    return {
        "architectures": ["PixtralVisionModel"],
        "hidden_size": block.width,
        "intermediate_size": block.mlp.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": block.attention.heads,
        "head_dim": block.attention.resolve_head_dim(block.width),
        "num_channels": config.channels,
        "patch_size": config.patch_size,
        "hidden_act": to_hf_activation(block.mlp.activation),
        "rope_parameters": {"rope_type": "axial", "rope_theta": config.theta},
    }


def _build_tower_rules(config: PackedViTConfig) -> list[TensorRule]:
    W, P, hidden = config.block.width, config.patch_size, config.block.mlp.intermediate_size
    inner = config.block.attention.heads * config.block.attention.resolve_head_dim(W)
    block = [
        *rename_layer("branches.self.norm", "attention_norm", bias=False),
        *rename_layer("branches.mlp.norm", "ffn_norm", bias=False),
        *fuse_layer("branches.self.op.qkv", [f"attention.{name}_proj" for name in "qkv"], [inner] * 3, bias=False),
        *rename_layer("branches.self.op.out", "attention.o_proj", bias=False),
        *fuse_layer(
            "branches.mlp.op.gate_up", ["feed_forward.gate_proj", "feed_forward.up_proj"], [hidden] * 2, bias=False
        ),
        *rename_layer("branches.mlp.op.down", "feed_forward.down_proj", bias=False),
    ]
    rules = [
        flatten_kernel("embed.proj.weight", "patch_conv.weight", (W, config.channels, P, P)),
        *rename_layer("norm_first", "ln_pre", bias=False),
    ]
    for i in range(config.layers):
        rules += add_prefix(f"blocks.{i}.", f"transformer.layers.{i}.", block)
    return rules


PIXTRAL_VISION = build_tower_family("pixtral", PackedViT, _read_tower, _write_tower, _build_tower_rules, TOWER_DEFAULTS)
VISION_TOWERS = {PIXTRAL_VISION.name: PIXTRAL_VISION}
FAMILIES.register("pixtral", PIXTRAL_VISION)


# ---- models with this tower -------------------------------------------------------------------------------------


def normalize_tower(config: PackedViTConfig) -> PackedViTConfig:
    """Return the equivalent config of a tower without merging, as its own file states it."""
    attention = config.block.attention
    attention = attention.replace(head_dim=attention.resolve_head_dim(config.block.width))
    return config.replace(spatial_merge_size=1, block=config.block.replace(attention=attention))


def read_pixtral_parts(hf_config: HFConfig, merge_size: int, vision_defaults: HFConfig) -> dict[str, Any]:
    """Read the parts of a model with the tower of Pixtral: all settings of `VLMConfig` but the connector."""
    layer = hf_config["vision_feature_layer"]
    if layer != -1:
        raise CheckpointError(f"vision_feature_layer is {layer!r}", "only the last layer, -1, is supported")
    vision = hf_config.get("vision_config") or vision_defaults
    _, tower = read_part({"vision_config": vision}, "vision_config", VISION_TOWERS, PIXTRAL_VISION.name)
    _, decoder = read_part(hf_config, "text_config", LANGUAGE_MODELS, "mistral")
    image_size = read_square_size(fill_defaults(vision, TOWER_DEFAULTS), "image_size")
    normalization = NORMALIZATIONS["clip"]
    return {
        "tower": tower.replace(spatial_merge_size=merge_size),
        "decoder": decoder,
        "policy": LongestEdgePolicy(patch_size=tower.patch_size, merge_size=merge_size, longest_edge=image_size),
        "mean": normalization.mean,
        "std": normalization.std,
        "rules": StreamRules(fill_id=hf_config["image_token_index"]),
        "vision_token_ids": {
            name: hf_config.get(f"{name}_token_id", default) for name, default in ROW_TOKEN_IDS.items()
        },
    }


def write_pixtral_parts(config: VLMConfig) -> HFConfig:
    """Write the keys that models with the tower of Pixtral share."""
    if not isinstance(config.tower, PackedViTConfig) or not isinstance(config.policy, LongestEdgePolicy):
        raise ConfigError("Pixtral needs a packed ViT and the policy longest_edge")
    vision_config = write_part(PIXTRAL_VISION, config.tower)
    return {
        "vision_config": {**vision_config, "image_size": config.policy.longest_edge},
        "text_config": write_part(find_part_family(config.decoder, LANGUAGE_MODELS), config.decoder),
        "image_token_index": config.rules.fill_id,
        **{f"{name}_token_id": id for name, id in config.vision_token_ids.items()},
        "vision_feature_layer": -1,
        "tie_word_embeddings": config.decoder.tie_word_embeddings,
    }


def normalize_pixtral_config(config: VLMConfig) -> VLMConfig:
    """Return the equivalent config with all defaults filled in."""
    config = normalize_llava_config(config)
    if not isinstance(config.tower, PackedViTConfig):
        return config
    tower = normalize_tower(config.tower).replace(spatial_merge_size=config.tower.spatial_merge_size)
    return config.replace(tower=tower)


def build_pixtral_rules(config: VLMConfig, connector: list[TensorRule]) -> list[TensorRule]:
    """Build the tensor rules of a model with the tower of Pixtral; `connector` are those of its connector."""
    language_family = find_part_family(config.decoder, LANGUAGE_MODELS)
    return [
        *add_prefix("tower.", "vision_tower.", PIXTRAL_VISION.tensor_rules(config.tower)),
        *add_prefix("connector.", "multi_modal_projector.", connector),
        *add_prefix("decoder.", "language_model.", language_family.tensor_rules(config.decoder)),
    ]


def _write_processor_fields(config: Any, vision_tokens: VisionTokens) -> HFConfig:
    tokens = {f"{name}_token": vision_tokens[name] for name in ("image", *ROW_TOKENS) if name in vision_tokens}
    return {"patch_size": config.tower.patch_size, "spatial_merge_size": config.tower.spatial_merge_size, **tokens}


def build_pixtral_family(
    name: str,
    read: Callable[[HFConfig], VLMConfig],
    write: Callable[[VLMConfig], HFConfig],
    rules: Callable[[VLMConfig], list[TensorRule]],
    **family_fields: Any,
) -> CheckpointFamily:
    """Build the family of a model with the tower of Pixtral."""
    return CheckpointFamily(
        name,
        VLM,
        read,
        write,
        build_round_trip_check(read, write, normalize_pixtral_config, image_processors.PIXTRAL),
        rules,
        duplicate_tensors=DUPLICATE_TENSORS,
        legacy_names=LEGACY_NAMES,
        module_names=MODULE_NAMES,
        image_processor=image_processors.PIXTRAL,
        chat_config=ChatConfig("PixtralProcessor", "mistral", processor_fields=_write_processor_fields),
        **family_fields,
    )


# ---- Pixtral 12B ------------------------------------------------------------------------------------------------


def _read_config(hf_config: HFConfig) -> VLMConfig:
    if hf_config.get("image_token_id") is not None:  # the newer key
        hf_config = {**hf_config, "image_token_index": hf_config["image_token_id"]}
    hf_config = fill_defaults(hf_config, DEFAULTS)
    if hf_config["vision_feature_select_strategy"] != "full":
        raise CheckpointError(
            f"vision_feature_select_strategy is {hf_config['vision_feature_select_strategy']!r}: the tower has no CLS "
            "token to drop",
            "set it to full",
        )
    activation = hf_config["projector_hidden_act"]
    if activation not in ACTIVATIONS:
        raise CheckpointError(
            f"projector_hidden_act {activation!r} is not supported", f"known: {', '.join(ACTIVATIONS)}"
        )
    parts = read_pixtral_parts(hf_config, 1, TOWER_DEFAULTS)
    decoder = parts["decoder"]
    if hf_config.get("tie_word_embeddings"):  # either key is valid
        parts["decoder"] = decoder.replace(tie_word_embeddings=True)
    connector = ProjectorConfig(
        in_features=parts["tower"].block.width,
        out_features=decoder.block.width,
        activation=ACTIVATIONS[activation],  # pyrefly: ignore
        bias=hf_config["multimodal_projector_bias"],
    )
    return VLMConfig(connector=connector, **parts)


def _write_config(config: VLMConfig) -> HFConfig:
    if not isinstance(config.connector, ProjectorConfig):
        raise ConfigError("Pixtral 12B needs a projector")
    return {
        **write_pixtral_parts(config),
        "architectures": ["LlavaForConditionalGeneration"],
        "projector_hidden_act": to_hf_activation(config.connector.activation),
        "multimodal_projector_bias": config.connector.bias,
        "vision_feature_select_strategy": "full",
    }


def _build_rules(config: VLMConfig) -> list[TensorRule]:
    assert isinstance(config.connector, ProjectorConfig)
    layers = [rename_layer(f"layers.linears.{i}", f"linear_{i + 1}", config.connector.bias) for i in range(2)]
    return build_pixtral_rules(config, [rule for layer in layers for rule in layer])


LLAVA_PIXTRAL = build_pixtral_family("llava", _read_config, _write_config, _build_rules)
FAMILIES.register("llava_pixtral", LLAVA_PIXTRAL)
