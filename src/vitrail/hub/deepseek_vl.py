"""DeepSeek-VL of transformers: SigLIP, alone or with the tower of Segment Anything, an MLP and a Llama."""

from typing import Any

from vitrail.connectors import ProjectorConfig
from vitrail.encoders.hybrid_tower import HybridTowerConfig
from vitrail.encoders.multi_tower import TowerConfig
from vitrail.encoders.sam import SAMConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import ConfigError
from vitrail.hub.chat_config import ChatConfig, VisionTokens
from vitrail.hub.checkpoint_family import CheckpointFamily, build_round_trip_check
from vitrail.hub.llava import (
    LANGUAGE_MODELS,
    VISION_TOWERS,
    find_part_family,
    normalize_llava_config,
    read_part,
    write_part,
)
from vitrail.hub.tensor_rules import TensorRule, add_prefix, rename, rename_layer
from vitrail.hub.vlm_towers import SAM_VISION, build_neck_rules
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.processing import image_processors
from vitrail.processing.image_loading import NORMALIZATIONS
from vitrail.processing.resolution_policies import FramedPolicy
from vitrail.registry import FAMILIES
from vitrail.stream import StreamRules

HFConfig = dict[str, Any]

COARSE_TOWERS = {"siglip_vision_model": VISION_TOWERS["siglip_vision_model"]}
FINE_TOWERS = {SAM_VISION.name: SAM_VISION}
MIN_IMAGE_SIZE = 14  # default minimum size of an image's short side, in pixels


def _read_language_model(hf_config: HFConfig) -> dict[str, Any]:
    """Read the decoder and the stream rules. The top-level tie_word_embeddings takes precedence."""
    _, decoder = read_part(hf_config, "text_config", LANGUAGE_MODELS, "llama")
    tied = hf_config.get("tie_word_embeddings", decoder.tie_word_embeddings)
    return {
        "decoder": decoder.replace(tie_word_embeddings=tied),
        "rules": StreamRules(fill_id=hf_config.get("image_token_id", 100_015)),
    }


def _build_policy(tower: ViTConfig, **fields: Any) -> FramedPolicy:
    """Build the default policy for checkpoints without a preprocessor config."""
    policy = FramedPolicy(
        image_size=tower.image_size,
        patch_size=tower.patch_size,
        unread_pixels=tower.image_size % tower.patch_size,
        min_size=1,
        **fields,
    )
    return policy.replace(min_size=min(MIN_IMAGE_SIZE, policy.view_size))


def _read_config(hf_config: HFConfig) -> VLMConfig:
    _, tower = read_part(hf_config, "vision_config", COARSE_TOWERS, "siglip_vision_model")
    language_settings, norm = _read_language_model(hf_config), NORMALIZATIONS["half"]
    return VLMConfig(
        tower=tower,
        connector=ProjectorConfig(in_features=tower.block.width, out_features=language_settings["decoder"].block.width),
        policy=_build_policy(tower),
        mean=norm.mean,
        std=norm.std,
        **language_settings,
    )


def _read_hybrid(hf_config: HFConfig) -> VLMConfig:
    _, low = read_part(hf_config, "vision_config", COARSE_TOWERS, "siglip_vision_model")
    _, high = read_part(hf_config, "high_res_vision_config", FINE_TOWERS, "sam_vision_model")
    language_settings, norm = _read_language_model(hf_config), NORMALIZATIONS["clip"]
    tower = HybridTowerConfig(low=TowerConfig(vit=low), high=high, mean=norm.mean, std=norm.std)
    split_widths = (tower.high_width, low.block.width)
    return VLMConfig(
        tower=tower,
        connector=ProjectorConfig(
            in_features=tower.width, out_features=language_settings["decoder"].block.width, split_widths=split_widths
        ),
        policy=_build_policy(
            low, high_res_size=tower.image_size, fill_colour=image_processors.mean_to_fill_colour(norm.mean)
        ),
        mean=(0.0,) * 3,  # each tower has its own normalization
        std=(1.0,) * 3,
        **language_settings,
    )


def _write_shared(config: VLMConfig, tower: ViTConfig) -> HFConfig:
    return {
        "vision_config": write_part(find_part_family(tower, COARSE_TOWERS), tower),
        "text_config": write_part(find_part_family(config.decoder, LANGUAGE_MODELS), config.decoder),
        "image_token_id": config.rules.fill_id,
        "tie_word_embeddings": config.decoder.tie_word_embeddings,
    }


def _write_config(config: VLMConfig) -> HFConfig:
    if not isinstance(config.tower, ViTConfig):
        raise ConfigError("DeepSeek-VL needs a ViT and a projector")
    return {"architectures": ["DeepseekVLForConditionalGeneration"], **_write_shared(config, config.tower)}


def _write_hybrid(config: VLMConfig) -> HFConfig:
    if not isinstance(config.tower, HybridTowerConfig):
        raise ConfigError("hybrid DeepSeek-VL needs a hybrid tower and a projector")
    high = config.tower.high
    return {
        "architectures": ["DeepseekVLHybridForConditionalGeneration"],
        **_write_shared(config, config.tower.low.vit),
        "high_res_vision_config": write_part(find_part_family(high, FINE_TOWERS), high),
    }


def _write_processor_fields(config: Any, vision_tokens: VisionTokens) -> HFConfig:
    return {"num_image_tokens": config.tower.grid_size**2}


# ---- tensor rules -----------------------------------------------------------------------------------------------


def _build_decoder_rules(config: VLMConfig) -> list[TensorRule]:
    """Build the decoder's rules. Its head is outside of the module that holds decoder and tower."""
    rules = []
    for rule in find_part_family(config.decoder, LANGUAGE_MODELS).tensor_rules(config.decoder):
        hf = (name.replace("model.", "model.language_model.", 1) for name in rule.hf)
        rules.append(rule._replace(hf=tuple(hf)))
    return add_prefix("decoder.", "", rules)


def _build_rules(config: VLMConfig) -> list[TensorRule]:
    return [
        *add_prefix("tower.", "model.vision_model.", COARSE_TOWERS["siglip_vision_model"].tensor_rules(config.tower)),
        *rename_layer("connector.layers.linears.0", "model.aligner.linear1"),
        *rename_layer("connector.layers.linears.1", "model.aligner.linear2"),
        *_build_decoder_rules(config),
    ]


def _build_hybrid_rules(config: VLMConfig) -> list[TensorRule]:
    tower = config.tower
    assert isinstance(tower, HybridTowerConfig)
    high: SAMConfig = tower.high
    prefix = "connector.layers.linears.0.parts"
    return [
        *add_prefix(
            "tower.low.", "model.vision_model.", COARSE_TOWERS["siglip_vision_model"].tensor_rules(tower.low.vit)
        ),
        *add_prefix("tower.high.", "model.high_res_vision_model.", FINE_TOWERS["sam_vision_model"].tensor_rules(high)),
        *build_neck_rules(high.block.width, high.out_features, "tower.neck", "model.high_res_vision_neck"),
        *rename_layer("tower.halve1", "model.high_res_vision_proj.conv1", bias=False),
        *rename_layer("tower.halve2", "model.high_res_vision_proj.conv2", bias=False),
        rename("tower.alpha", "model.high_res_vision_alpha"),
        *rename_layer(f"{prefix}.0", "model.aligner.high_res_vision_proj"),
        *rename_layer(f"{prefix}.1", "model.aligner.vision_proj"),
        *rename_layer("connector.layers.linears.1", "model.aligner.proj"),
        *_build_decoder_rules(config),
    ]


DEEPSEEK_VL, DEEPSEEK_VL_HYBRID = tuple(
    CheckpointFamily(
        name,
        VLM,
        read,
        write,
        build_round_trip_check(read, write, normalize_llava_config, default_image_size),
        moves,
        duplicate_tensors=(("lm_head.weight", "model.language_model.embed_tokens.weight"),),
        legacy_names=(("model.vision_model.", "model.vision_model.vision_model."),),  # names in the released files
        image_processor=default_image_size,
        chat_config=ChatConfig(
            processor,
            "deepseek-vl",
            processor_fields=_write_processor_fields,
            tokenizer_tokens={"image_token": "image"},
        ),
    )
    for name, read, write, moves, default_image_size, processor in [
        ("deepseek_vl", _read_config, _write_config, _build_rules, image_processors.DEEPSEEK_VL, "DeepseekVLProcessor"),
        (
            *("deepseek_vl_hybrid", _read_hybrid, _write_hybrid, _build_hybrid_rules),
            *(image_processors.DEEPSEEK_VL_HYBRID, "DeepseekVLHybridProcessor"),
        ),
    ]
)
FAMILIES.register("deepseek_vl", DEEPSEEK_VL)
FAMILIES.register("deepseek_vl_hybrid", DEEPSEEK_VL_HYBRID)
