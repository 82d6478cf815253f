"""Gemma 3 with images: a SigLIP tower, average pooling with a norm and a projection, and bidirectional image tokens."""

import math
from typing import Any

from vitrail.connectors import PoolConnectorConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.chat_config import ChatConfig, VisionTokens
from vitrail.hub.checkpoint_family import CheckpointFamily, build_round_trip_check, fill_defaults
from vitrail.hub.encoder_families import SIGLIP_VISION
from vitrail.hub.gemma import GEMMA3
from vitrail.hub.llava import (
    DUPLICATE_TENSORS,
    LEGACY_NAMES,
    MODULE_NAMES,
    normalize_llava_config,
    read_part,
    write_part,
)
from vitrail.hub.tensor_rules import TensorRule, add_prefix, rename, transpose
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.processing import image_processors
from vitrail.processing.image_loading import NORMALIZATIONS
from vitrail.processing.resolution_policies import NaivePolicy
from vitrail.registry import FAMILIES
from vitrail.stream import StreamRules

HFConfig = dict[str, Any]

# Defaults of transformers for keys that a config.json leaves out.
DEFAULTS: HFConfig = {
    "mm_tokens_per_image": 256,
    "boi_token_index": 255_999,
    "eoi_token_index": 256_000,
    "image_token_index": 262_144,
    "tie_word_embeddings": True,
}
BOUNDARY_TOKENS = {"vision_start": "boi_token_index", "vision_end": "eoi_token_index"}


def _read_config(hf_config: HFConfig) -> VLMConfig:
    hf_config = fill_defaults(hf_config, DEFAULTS)
    _, tower = read_part(hf_config, "vision_config", {SIGLIP_VISION.name: SIGLIP_VISION}, SIGLIP_VISION.name)
    _, decoder = read_part(hf_config, "text_config", {GEMMA3.name: GEMMA3}, GEMMA3.name)
    decoder = decoder.replace(tie_word_embeddings=hf_config["tie_word_embeddings"])
    connector = PoolConnectorConfig(
        in_features=tower.width,
        out_features=decoder.block.width,
        spatial_window=_read_window(hf_config["mm_tokens_per_image"], tower),
        norm="rms_zero_centered",
        eps=tower.block.eps,
    )
    normalization, size = NORMALIZATIONS["half"], tower.image_size
    return VLMConfig(
        tower=tower,
        connector=connector,
        decoder=decoder,
        policy=NaivePolicy(
            image_size=size, patch_size=tower.patch_size, unread_pixels=size % tower.patch_size, resample="bilinear"
        ),
        mean=normalization.mean,
        std=normalization.std,
        rules=StreamRules(fill_id=hf_config["image_token_index"], bidirectional=("image",)),
        vision_token_ids={name: hf_config[key] for name, key in BOUNDARY_TOKENS.items()},
    )


def _read_window(num_tokens: int, tower: ViTConfig) -> int:
    side = math.isqrt(num_tokens)
    if side**2 != num_tokens or not side or tower.grid_size % side:
        raise CheckpointError(
            f"mm_tokens_per_image is {num_tokens}, but an image has {tower.grid_size} × {tower.grid_size} patches",
            "use the square of a divisor of the number of rows",
        )
    return tower.grid_size // side


def _write_config(config: VLMConfig) -> HFConfig:
    tower, connector = config.tower, config.connector
    if not isinstance(tower, ViTConfig) or not isinstance(connector, PoolConnectorConfig):
        raise ConfigError("Gemma 3 needs a ViT and pooling")
    missing = [name for name in BOUNDARY_TOKENS if name not in config.vision_token_ids]
    if missing:
        raise ConfigError(f"vision_token_ids lacks {missing[0]!r}", "add the ids of the tokens around an image")
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "vision_config": write_part(SIGLIP_VISION, tower),
        "text_config": write_part(GEMMA3, config.decoder),
        "mm_tokens_per_image": _count_tokens(config),
        "image_token_index": config.rules.fill_id,
        **{key: config.vision_token_ids[name] for name, key in BOUNDARY_TOKENS.items()},
        "tie_word_embeddings": config.decoder.tie_word_embeddings,
    }


def _count_tokens(config: Any) -> int:
    return config.connector.count_tokens(config.view_grid)


def _write_processor_fields(config: Any, vision_tokens: VisionTokens) -> HFConfig:
    return {"image_seq_length": _count_tokens(config)}


def _build_rules(config: VLMConfig) -> list[TensorRule]:
    return [
        *add_prefix("tower.", "vision_tower.vision_model.", SIGLIP_VISION.tensor_rules(config.tower)),
        rename("connector.norm.weight", "multi_modal_projector.mm_soft_emb_norm.weight"),
        transpose("connector.width_proj.weight", "multi_modal_projector.mm_input_projection_weight"),
        *add_prefix("decoder.", "language_model.", GEMMA3.tensor_rules(config.decoder)),
    ]


GEMMA3_VLM = CheckpointFamily(
    "gemma3",
    VLM,
    _read_config,
    _write_config,
    build_round_trip_check(_read_config, _write_config, normalize_llava_config, image_processors.GEMMA3),
    _build_rules,
    duplicate_tensors=DUPLICATE_TENSORS,
    legacy_names=LEGACY_NAMES,
    module_names=MODULE_NAMES,
    image_processor=image_processors.GEMMA3,
    chat_config=ChatConfig(
        "Gemma3Processor",
        "gemma",
        expansions={"<start_of_image>": "\n\n<start_of_image><image_soft_token><end_of_image>\n\n"},
        end_of_turn="<end_of_turn>",
        processor_fields=_write_processor_fields,
        tokenizer_tokens={"image_token": "image", "boi_token": "vision_start", "eoi_token": "vision_end"},
        fixed_image_token="<image_soft_token>",
    ),
    class_defaults=DEFAULTS,
    part_defaults={"vision_config": SIGLIP_VISION.class_defaults},
)
FAMILIES.register("gemma3", GEMMA3_VLM)
