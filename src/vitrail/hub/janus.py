"""Janus and Janus-Pro of transformers, as far as they answer questions about images: SigLIP, an MLP and a Llama.

Image generation is not implemented. Its tensors are left out, also from an export.
"""

from typing import Any

from vitrail.connectors import ProjectorConfig
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.chat_config import ChatConfig, VisionTokens
from vitrail.hub.checkpoint_family import CheckpointFamily, build_round_trip_check, fill_defaults, reject_settings
from vitrail.hub.llava import (
    LANGUAGE_MODELS,
    VISION_TOWERS,
    find_part_family,
    normalize_llava_config,
    read_part,
    write_part,
)
from vitrail.hub.tensor_rules import TensorRule, add_prefix, rename_layer
from vitrail.hub.vlm_towers import build_tower_family
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.processing import image_processors
from vitrail.processing.image_loading import NORMALIZATIONS
from vitrail.processing.resolution_policies import FramedPolicy
from vitrail.registry import FAMILIES
from vitrail.stream import StreamRules

HFConfig = dict[str, Any]

SIGLIP = VISION_TOWERS["siglip_vision_model"]
# Defaults of the config classes of transformers.
VISION_DEFAULTS: HFConfig = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 384,
    "patch_size": 16,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "mlp_ratio": 4.0,
    "attention_bias": True,
    "use_qk_norm": False,
}
ALIGNER_DEFAULTS: HFConfig = {"projection_dim": 2048, "depth": 2}  # keys of vision_config
DEFAULTS: HFConfig = {"image_token_id": 100_581, "tie_word_embeddings": True}
GENERATION_PREFIXES = tuple(f"model.{name}." for name in ("vqmodel", "generation_embeddings", "generation_aligner"))
GENERATION_PREFIXES += ("model.generation_head.",)
IMAGE_BOUNDARY_TOKENS = ("<begin_of_image>", "<end_of_image>")
BOUNDARY_TOKEN_IDS = {"image_start": 100_016, "image_end": 100_593}  # of the released models; not part of the config
MIN_IMAGE_SIZE = 14  # default minimum size of an image's short side, in pixels


def _read_tower(hf_config: HFConfig) -> ViTConfig:
    hf_config = fill_defaults(hf_config, VISION_DEFAULTS)
    reject_settings(hf_config, use_qk_norm="norms of queries and keys are not supported")
    if not hf_config["attention_bias"]:
        raise CheckpointError("attention_bias is false", "only a tower with biases is supported")
    hidden = int(hf_config["hidden_size"] * hf_config["mlp_ratio"])
    return SIGLIP.from_hf_config({**hf_config, "intermediate_size": hidden, "vision_use_head": False})


def _write_tower(config: ViTConfig) -> HFConfig:
    hf_config = SIGLIP.to_hf_config(config)
    hidden, width = hf_config.pop("intermediate_size"), config.block.width
    ratio = hidden / width
    if int(width * ratio) != hidden:  # readers round down
        ratio = (hidden + 0.5) / width
    return {**{key: hf_config[key] for key in VISION_DEFAULTS if key in hf_config}, "mlp_ratio": ratio}


def _build_tower_rules(config: ViTConfig) -> list[TensorRule]:
    return [
        rule._replace(hf=tuple(name.replace(".out_proj.", ".projection_layer.") for name in rule.hf))
        for rule in SIGLIP.tensor_rules(config)
    ]


JANUS_VISION = build_tower_family(
    "janus_vision_model", ViT, _read_tower, _write_tower, _build_tower_rules, VISION_DEFAULTS
)


def _read_config(hf_config: HFConfig) -> VLMConfig:
    hf_config = fill_defaults(hf_config, DEFAULTS)
    vision = hf_config.get("vision_config") or {}
    _, tower = read_part(hf_config, "vision_config", {JANUS_VISION.name: JANUS_VISION}, JANUS_VISION.name)
    _, decoder = read_part(hf_config, "text_config", LANGUAGE_MODELS, "llama")
    aligner, width = fill_defaults(vision, ALIGNER_DEFAULTS), decoder.block.width
    if aligner["projection_dim"] != width:
        raise CheckpointError(
            f"vision_config.projection_dim is {aligner['projection_dim']}, but the width of the language model is "
            f"{width}",
            "use equal widths",
        )
    norm = NORMALIZATIONS["half"]
    policy = FramedPolicy(
        image_size=tower.image_size,
        patch_size=tower.patch_size,
        unread_pixels=tower.image_size % tower.patch_size,
        min_size=min(MIN_IMAGE_SIZE, tower.image_size),
    )
    return VLMConfig(
        tower=tower,
        connector=ProjectorConfig(
            in_features=tower.block.width,
            out_features=width,
            layers=aligner["depth"],
            activation=tower.block.mlp.activation,
        ),
        decoder=decoder.replace(tie_word_embeddings=hf_config["tie_word_embeddings"]),
        policy=policy,
        mean=norm.mean,
        std=norm.std,
        rules=StreamRules(fill_id=hf_config["image_token_id"]),
        vision_token_ids=BOUNDARY_TOKEN_IDS,
    )


def _write_config(config: VLMConfig) -> HFConfig:
    tower, connector = config.tower, config.connector
    if not isinstance(tower, ViTConfig) or not isinstance(connector, ProjectorConfig):
        raise ConfigError("Janus needs a ViT and a projector")
    vision_config = write_part(JANUS_VISION, tower)
    return {
        "architectures": ["JanusForConditionalGeneration"],
        "vision_config": vision_config
        | {
            "projection_dim": connector.out_features,
            "depth": connector.layers,
            "num_image_tokens": tower.grid_size**2,
        },
        "text_config": write_part(find_part_family(config.decoder, LANGUAGE_MODELS), config.decoder),
        "image_token_id": config.rules.fill_id,
        "tie_word_embeddings": config.decoder.tie_word_embeddings,
    }


def _build_rules(config: VLMConfig) -> list[TensorRule]:
    connector = config.connector
    assert isinstance(connector, ProjectorConfig)
    rules = [
        *add_prefix("tower.", "model.vision_model.", JANUS_VISION.tensor_rules(config.tower)),
        *rename_layer("connector.layers.linears.0", "model.aligner.fc1"),
    ]
    for i in range(1, connector.layers):
        rules += rename_layer(f"connector.layers.linears.{i}", f"model.aligner.hidden_layers.{i - 1}")
    for rule in find_part_family(config.decoder, LANGUAGE_MODELS).tensor_rules(config.decoder):
        hf = (name.replace("model.", "model.language_model.", 1) for name in rule.hf)  # the head stays outside
        rules += add_prefix("decoder.", "", [rule._replace(hf=tuple(hf))])
    return rules


def _write_processor_fields(config: Any, vision_tokens: VisionTokens) -> HFConfig:
    # The chat template writes the system prompt.
    return {"num_image_tokens": config.tower.grid_size**2, "use_default_system_prompt": False}


JANUS = CheckpointFamily(
    "janus",
    VLM,
    _read_config,
    _write_config,
    build_round_trip_check(_read_config, _write_config, normalize_llava_config, image_processors.JANUS),
    _build_rules,
    ignored_prefixes=GENERATION_PREFIXES,
    duplicate_tensors=(("lm_head.weight", "model.language_model.embed_tokens.weight"),),
    image_processor=image_processors.JANUS,
    chat_config=ChatConfig(
        "JanusProcessor",
        "deepseek-vl",
        {"user_start": "<|User|>: ", "assistant_start": "<|Assistant|>:", "after": "\n"},
        image_boundary_tokens=IMAGE_BOUNDARY_TOKENS,
        processor_fields=_write_processor_fields,
        tokenizer_tokens={
            "image_token": "image",
            "boi_token": IMAGE_BOUNDARY_TOKENS[0],
            "eoi_token": IMAGE_BOUNDARY_TOKENS[1],
        },
    ),
    class_defaults=DEFAULTS,
    part_defaults={"vision_config": VISION_DEFAULTS | ALIGNER_DEFAULTS},
)
FAMILIES.register("janus", JANUS)
