"""PaliGemma 1 and 2: a SigLIP tower, a linear projector, and Gemma with bidirectional attention among prompt tokens.

The logits of PaliGemma 2 are capped, as its text_config says. transformers 5 does not cap them, which changes no greedy
answer.
"""

from typing import Any

from vitrail.connectors import ProjectorConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.chat_config import ChatConfig
from vitrail.hub.checkpoint_family import CheckpointFamily, build_round_trip_check, fill_defaults
from vitrail.hub.encoder_families import SIGLIP_VISION
from vitrail.hub.gemma import GEMMA, GEMMA2
from vitrail.hub.llava import (
    DUPLICATE_TENSORS,
    LEGACY_NAMES,
    MODULE_NAMES,
    find_part_family,
    normalize_llava_config,
    read_part,
    write_part,
)
from vitrail.hub.tensor_rules import TensorRule, add_prefix, rename_layer
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.processing import image_processors
from vitrail.processing.image_loading import NORMALIZATIONS
from vitrail.processing.resolution_policies import NaivePolicy
from vitrail.registry import FAMILIES
from vitrail.stream import StreamRules

HFConfig = dict[str, Any]

LANGUAGE_MODELS = {family.name: family for family in (GEMMA, GEMMA2)}

# Defaults of transformers for keys that a config.json leaves out.
DEFAULTS: HFConfig = {"image_token_index": 256_000, "projection_dim": 2048, "tie_word_embeddings": True}
VISION_DEFAULTS: HFConfig = {  # of a config.json without vision_config
    "hidden_size": 1152,
    "intermediate_size": 4096,
    "patch_size": 14,
    "image_size": 224,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "vision_use_head": False,
}
TEXT_DEFAULTS: HFConfig = {  # of a config.json without text_config
    "hidden_size": 2048,
    "num_hidden_layers": 18,
    "intermediate_size": 16_384,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "vocab_size": 257_152,
}


def _read_config(hf_config: HFConfig) -> VLMConfig:
    hf_config = fill_defaults(hf_config, DEFAULTS)
    hf_config.setdefault("vision_config", VISION_DEFAULTS)
    # The prompt of every PaliGemma is bidirectional, which newer files say in the text_config.
    hf_config["text_config"] = {
        key: value
        for key, value in (hf_config.get("text_config") or TEXT_DEFAULTS).items()
        if key != "use_bidirectional_attention"
    }
    _, tower = read_part(hf_config, "vision_config", {SIGLIP_VISION.name: SIGLIP_VISION}, SIGLIP_VISION.name)
    _, decoder = read_part(hf_config, "text_config", LANGUAGE_MODELS, GEMMA.name)
    width = decoder.block.width
    if hf_config["projection_dim"] != width:
        raise CheckpointError(
            f"projection_dim is {hf_config['projection_dim']}, but text_config.hidden_size is {width}",
            "set both to the same value, as in the original config",
        )
    normalization, size = NORMALIZATIONS["half"], tower.image_size
    return VLMConfig(
        tower=tower,
        connector=ProjectorConfig(in_features=tower.width, out_features=width, layers=1),
        decoder=decoder.replace(
            tie_word_embeddings=hf_config["tie_word_embeddings"],
            window_limits_spans=decoder.sliding_window is None,
        ),
        policy=NaivePolicy(image_size=size, patch_size=tower.patch_size, unread_pixels=size % tower.patch_size),
        mean=normalization.mean,
        std=normalization.std,
        rules=StreamRules(fill_id=hf_config["image_token_index"], bidirectional_prompt=True),
    )


def _write_config(config: VLMConfig) -> HFConfig:
    if not isinstance(config.tower, ViTConfig) or not isinstance(config.connector, ProjectorConfig):
        raise ConfigError("PaliGemma needs a ViT and a projector")
    width = config.decoder.block.width
    return {
        "architectures": ["PaliGemmaForConditionalGeneration"],
        "vision_config": write_part(SIGLIP_VISION, config.tower),
        "text_config": write_part(_find_language_model(config), config.decoder),
        "image_token_index": config.rules.fill_id,
        "projection_dim": width,
        "hidden_size": width,
        "vocab_size": config.decoder.vocab_size,
        "tie_word_embeddings": config.decoder.tie_word_embeddings,
    }


def _find_language_model(config: VLMConfig) -> CheckpointFamily:
    return find_part_family(config.decoder.replace(window_limits_spans=True), LANGUAGE_MODELS)


def _build_rules(config: VLMConfig) -> list[TensorRule]:
    language_family = _find_language_model(config)
    return [
        *add_prefix("tower.", "vision_tower.vision_model.", SIGLIP_VISION.tensor_rules(config.tower)),
        *rename_layer("connector.layers.linears.0", "multi_modal_projector.linear"),
        *add_prefix("decoder.", "language_model.", language_family.tensor_rules(config.decoder)),
    ]


PALIGEMMA = CheckpointFamily(
    "paligemma",
    VLM,
    _read_config,
    _write_config,
    build_round_trip_check(_read_config, _write_config, normalize_llava_config, image_processors.PALIGEMMA),
    _build_rules,
    duplicate_tensors=DUPLICATE_TENSORS,
    legacy_names=LEGACY_NAMES,
    module_names=MODULE_NAMES,
    image_processor=image_processors.PALIGEMMA,
    chat_config=ChatConfig(
        "PaliGemmaProcessor", "paligemma", tokenizer_tokens={"image_token": "image"}, takes_chat_template=False
    ),
    class_defaults=DEFAULTS,
    part_defaults={"vision_config": VISION_DEFAULTS, "text_config": TEXT_DEFAULTS},
)
FAMILIES.register("paligemma", PALIGEMMA)
