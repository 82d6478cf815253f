"""Phi-4-multimodal with images: SigLIP over the tiles of a padded canvas, mean pooling with separators, and Phi-4-mini.

phi4mm           the published layout, with a vision LoRA in the decoder. Other libraries need the code files of the
                 original repository
phi4_multimodal  the layout of transformers, with the vision LoRA in the subfolder vision-lora, or without it

The vision LoRA applies to conversations with images. Speech is not implemented: its tower and its LoRA are left out.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.backbones.decoder import DecoderConfig
from vitrail.backbones.fusion import ImageLoRAConfig, PrefixFusionConfig
from vitrail.connectors import MergerConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import ConfigError
from vitrail.hub.chat_config import ChatConfig, VisionTokens
from vitrail.hub.checkpoint_family import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_STEM,
    AdapterFolder,
    CheckpointFamily,
    build_round_trip_check,
    fill_defaults,
    require_key,
)
from vitrail.hub.encoder_families import SIGLIP_VISION
from vitrail.hub.llava import normalize_llava_config, write_part
from vitrail.hub.phi3 import DEFAULTS as PHI3_DEFAULTS
from vitrail.hub.phi3 import PHI3, write_published_config
from vitrail.hub.phi3_v import (
    IMAGE_TOKEN_KEY,
    build_image_token_reader,
    build_projection_rules,
    check_settings,
)
from vitrail.hub.safetensors_files import SafetensorsWeights, read_json
from vitrail.hub.tensor_rules import TensorRule, add_prefix, rename
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.processing import hd_image_processors
from vitrail.processing.hd_tiles import DynamicHDPolicy
from vitrail.processing.image_loading import NORMALIZATIONS
from vitrail.registry import FAMILIES
from vitrail.stream import StreamRules

HFConfig = dict[str, Any]

IMAGE_TOKEN, IMAGE_TOKEN_ID = "<|endoftext10|>", 200_010
MERGE = 2
# Defaults of transformers for keys that a config.json leaves out.
DEFAULTS: HFConfig = {
    **PHI3_DEFAULTS,
    "vocab_size": 200_064,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
}
VISION_DEFAULTS: HFConfig = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 448,
    "patch_size": 14,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "crop_size": 448,
    "image_token_id": IMAGE_TOKEN_ID,
    "feature_layer": -2,
}
TOWER: HFConfig = {**VISION_DEFAULTS}  # of the published layout, whose config does not list it
PUBLISHED_DEFAULTS: HFConfig = {**PHI3_DEFAULTS, "vocab_size": 200_064}  # of the published config class
EMBEDDING: HFConfig = {
    "embedding_cls": "tune_image",
    "hd_transform_order": "sub_glb",
    "image_token_compression_cls": "avg_pool_2d",
    "projection_cls": "mlp",
    "use_hd_transform": True,
    "with_learnable_separator": True,
}  # the released config has these values
LORA_LAYERS = r"layers.*((self_attn\.(qkv_proj|o_proj))|(mlp\.(gate_up|down)_proj))"
LORA_NAMES = {
    "qkv": "self_attn.qkv_proj",
    "out": "self_attn.o_proj",
    "gate_up": "mlp.gate_up_proj",
    "down": "mlp.down_proj",
}
IMAGE_PREFIX, AUDIO_PREFIX = "model.embed_tokens_extend.image_embed.", "model.embed_tokens_extend.audio_embed."
SPEECH_SUFFIXES = (".lora_A.speech.weight", ".lora_B.speech.weight")
ADAPTER = AdapterFolder(
    "vision-lora",
    {f".lora_{x}.vision.weight": f".lora_{x}.weight" for x in "AB"},
    lambda config: _write_adapter_config(config),
)
# Settings of speech in the released config, which the published code requires.
SPEECH_SETTINGS: HFConfig = {
    "audio_processor": {
        "name": "cascades",
        "config": {
            "activation": "swish",
            "activation_checkpointing": {"interval": 1, "module": "transformer", "offload": False},
            "attention_dim": 1024,
            "attention_heads": 16,
            "batch_norm": False,
            "bias_in_glu": True,
            "causal": True,
            "chunk_size": -1,
            "cnn_layer_norm": True,
            "conv_activation": "swish",
            "conv_glu_type": "swish",
            "depthwise_multiplier": 1,
            "depthwise_seperable_out_channel": 1024,
            "dropout_rate": 0.0,
            "encoder_embedding_config": {"input_size": 80},
            "ext_pw_kernel_size": 1,
            "ext_pw_out_channel": 1024,
            "input_layer": "nemo_conv",
            "input_size": 80,
            "kernel_size": 3,
            "left_chunk": 18,
            "linear_units": 1536,
            "nemo_conv_settings": {"conv_channels": 1024},
            "num_blocks": 24,
            "relative_attention_bias_args": {"t5_bias_max_distance": 500, "type": "t5"},
            "time_reduction": 8,
        },
    },
    "speech_lora": {"dp": 0.01, "layer": LORA_LAYERS, "lora_alpha": 640, "r": 320},
}
SPEECH_EMBEDDING: HFConfig = {
    "compression_rate": 8,
    "downsample_rate": 1,
    "embedding_cls": "audio",
    "projection_cls": "mlp",
    "use_conv_downsample": False,
    "use_qformer": False,
}


# ---- config.json ------------------------------------------------------------------------------------------------


def _read_vlm(hf_config: HFConfig, vision: HFConfig, image_token_id: int) -> VLMConfig:
    """Read the settings that both layouts share."""
    tower = SIGLIP_VISION.from_hf_config(vision).replace(position_interpolation="bucket")
    check_settings(vision, {"crop_size": tower.image_size}, "vision_config")
    decoder, normalization, lora = PHI3.from_hf_config(hf_config), NORMALIZATIONS["half"], hf_config.get("vision_lora")
    return VLMConfig(
        tower=tower,
        connector=MergerConfig(
            in_features=tower.width,
            out_features=decoder.block.width,
            merge=MERGE,
            intermediate_size=decoder.block.width,
            norm_position="none",
            reduction="mean",
            separators=True,
        ),
        decoder=decoder if lora is None else decoder.replace(fusion=_read_lora(lora)),
        policy=DynamicHDPolicy(tile_size=tower.image_size, patch_size=tower.patch_size, merge_size=MERGE),
        mean=normalization.mean,
        std=normalization.std,
        vision_feature_layer=vision["feature_layer"],
        rules=StreamRules(fill_id=image_token_id),
    )


def _read_lora(lora: HFConfig) -> ImageLoRAConfig:
    check_settings(lora, {"dp": 0.0, "layer": LORA_LAYERS}, "vision_lora")
    return ImageLoRAConfig(rank=require_key(lora, "r"), alpha=float(require_key(lora, "lora_alpha")))


def _read_published(hf_config: HFConfig) -> VLMConfig:
    hf_config = fill_defaults(hf_config, PUBLISHED_DEFAULTS)
    embedding = (hf_config.get("embd_layer") or {}).get("image_embd_layer") or {}
    check_settings(embedding, {**EMBEDDING, "crop_size": TOWER["crop_size"]}, "embd_layer.image_embd_layer")
    settings = hf_config.get("img_processor") or {}
    check_settings(settings, {"type_feature": "patch"}, "img_processor")
    require_key(hf_config, "vision_lora")
    vision = {**TOWER, "feature_layer": settings.get("layer_idx", TOWER["feature_layer"])}
    return _read_vlm(hf_config, vision, hf_config.get(IMAGE_TOKEN_KEY, IMAGE_TOKEN_ID))


def _read_transformers(hf_config: HFConfig) -> VLMConfig:
    hf_config = fill_defaults(hf_config, DEFAULTS)
    vision = fill_defaults(hf_config.get("vision_config") or {}, VISION_DEFAULTS)
    return _read_vlm(hf_config, vision, vision["image_token_id"])


def _split_tower(config: VLMConfig) -> tuple[ViTConfig, DecoderConfig]:
    """Return the tower as SigLIP's, and the decoder without image LoRA."""
    if not isinstance(config.tower, ViTConfig) or config.tower.position_interpolation != "bucket":
        raise ConfigError("Phi-4-multimodal needs a ViT with the position interpolation bucket")
    usual = SIGLIP_VISION.from_hf_config(VISION_DEFAULTS).position_interpolation
    return (
        config.tower.replace(position_interpolation=usual),
        config.decoder.replace(fusion=PrefixFusionConfig()),
    )


def _write_published(config: VLMConfig) -> HFConfig:
    (tower, decoder), lora = _split_tower(config), config.decoder.fusion
    if not isinstance(lora, ImageLoRAConfig):
        raise ConfigError("the published layout of Phi-4-multimodal needs the decoder's fusion image-lora")
    if SIGLIP_VISION.from_hf_config(TOWER) != tower:
        raise ConfigError("the tower is not that of Phi-4-multimodal", "export as phi4_multimodal")
    return {
        "architectures": ["Phi4MMForCausalLM"],
        **write_published_config(decoder, "longrope"),
        "embd_layer": {
            "embedding_cls": "image_audio",
            "image_embd_layer": {**EMBEDDING, "crop_size": tower.image_size},
            "audio_embd_layer": SPEECH_EMBEDDING,
        },
        "img_processor": {"layer_idx": config.vision_feature_layer, "type_feature": "patch"},
        "vision_lora": _write_lora(lora),
        **SPEECH_SETTINGS,
        IMAGE_TOKEN_KEY: config.rules.fill_id,  # not used by the published code
    }


def _write_transformers(config: VLMConfig) -> HFConfig:
    (tower, decoder), lora = _split_tower(config), config.decoder.fusion
    vision = {key: value for key, value in write_part(SIGLIP_VISION, tower).items() if key in VISION_DEFAULTS}
    return {
        **PHI3.to_hf_config(decoder),
        "architectures": ["Phi4MultimodalForCausalLM"],
        "vision_config": {
            "model_type": "phi4_multimodal_vision",
            **vision,
            "crop_size": tower.image_size,
            "image_token_id": config.rules.fill_id,
            "feature_layer": config.vision_feature_layer,
        },
        **({"vision_lora": _write_lora(lora)} if isinstance(lora, ImageLoRAConfig) else {}),  # not used by transformers
    }


def _write_lora(lora: ImageLoRAConfig) -> HFConfig:
    return {"dp": 0.0, "layer": LORA_LAYERS, "lora_alpha": lora.alpha, "r": lora.rank}


def _write_adapter_config(config: VLMConfig) -> HFConfig:
    assert isinstance(config.decoder.fusion, ImageLoRAConfig)
    lora = _write_lora(config.decoder.fusion)
    layers = "|".join(re.escape(name) for name in LORA_NAMES.values())
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": lora["r"],
        "lora_alpha": lora["lora_alpha"],
        "lora_dropout": lora["dp"],
        "bias": "none",
        "target_modules": rf"model\.layers\.\d+\.({layers})",
    }


# ---- tensors ----------------------------------------------------------------------------------------------------


def _build_lora_rules(config: DecoderConfig) -> list[TensorRule]:
    return [
        rename(f"decoder.fusion.layers.{i}.{native}.{x}", f"model.layers.{i}.{hf}.lora_{x.upper()}.vision.weight")
        for i in range(config.layers if isinstance(config.fusion, ImageLoRAConfig) else 0)
        for native, hf in LORA_NAMES.items()
        for x in "ab"
    ]


def _build_published_rules(config: VLMConfig) -> list[TensorRule]:
    bases = {f"{hf}.weight": f"{hf}.base_layer.weight" for hf in LORA_NAMES.values()}

    def to_base(name: str) -> str:
        return next((name.removesuffix(end) + base for end, base in bases.items() if name.endswith(end)), name)

    return [
        *add_prefix("tower.", f"{IMAGE_PREFIX}img_processor.", SIGLIP_VISION.tensor_rules(config.tower)),
        *build_projection_rules(config, IMAGE_PREFIX),
        *(rule.with_names(lambda name: f"decoder.{name}", to_base) for rule in PHI3.tensor_rules(config.decoder)),
        *_build_lora_rules(config.decoder),
    ]


NEW_NAMES = {
    "img_projection.0": "img_projection_up",
    "img_projection.2": "img_projection_down",
    "glb_GN": "global_img_feature_extensor",
    "sub_GN": "sub_img_feature_extensor",
    ".base_layer.": ".",
}  # of the published layout → of transformers


def _build_transformers_rules(config: VLMConfig) -> list[TensorRule]:
    def to_new(name: str) -> str:
        for old, new in NEW_NAMES.items():
            name = name.replace(old, new)
        return name

    return [rule.with_names(str, to_new) for rule in _build_published_rules(config)]


class _WeightsWithAdapter(SafetensorsWeights):
    """Weights of a folder, and the vision LoRA in its subfolder under the names of the published layout."""

    def __init__(self, path: Path, adapter: SafetensorsWeights):
        super().__init__(path)
        self._adapter = adapter
        self._adapter_names = {self._to_published_name(name): name for name in adapter}

    @staticmethod
    def _to_published_name(name: str) -> str:
        return re.sub(r"\.(lora_[AB])\.weight$", r".\1.vision.weight", name.removeprefix("base_model.model."))

    def __contains__(self, name: str) -> bool:
        return super().__contains__(name) or name in self._adapter_names

    def __iter__(self) -> Iterator[str]:
        yield from super().__iter__()
        yield from self._adapter_names

    def get_shape(self, name: str) -> tuple[int, ...]:
        own = self._adapter_names.get(name)
        return super().get_shape(name) if own is None else self._adapter.get_shape(own)

    def get_file(self, name: str) -> Path:
        own = self._adapter_names.get(name)
        return super().get_file(name) if own is None else self._adapter.get_file(own)

    def __getitem__(self, name: str) -> Tensor:
        own = self._adapter_names.get(name)
        return super().__getitem__(name) if own is None else self._adapter[own]


def _open_weights(path: Path, hf_config: HFConfig) -> SafetensorsWeights:
    file = path / ADAPTER.name / f"{ADAPTER_STEM}.safetensors"
    return _WeightsWithAdapter(path, SafetensorsWeights(file)) if file.is_file() else SafetensorsWeights(path)


def _add_adapter(hf_config: HFConfig, folder: Path) -> HFConfig:
    """Add the settings of the vision LoRA, if the folder has one."""
    file = folder / ADAPTER.name / ADAPTER_CONFIG_FILE
    if not file.is_file():
        return hf_config
    adapter = read_json(file)
    return {**hf_config, "vision_lora": {key: require_key(adapter, key) for key in ("r", "lora_alpha")}}


# ---- families ---------------------------------------------------------------------------------------------------


def _write_processor_fields(config: Any, vision_tokens: VisionTokens) -> HFConfig:
    return {"audio_processor": {"feature_extractor_type": "Phi4MultimodalFeatureExtractor"}}


CHAT = ChatConfig("Phi4MMProcessor", "phi-4-multimodal", end_of_turn="<|end|>", required_word="type")
PHI4MM = CheckpointFamily(
    "phi4mm",
    VLM,
    _read_published,
    _write_published,
    build_round_trip_check(_read_published, _write_published, normalize_llava_config, hd_image_processors.PHI4MM),
    _build_published_rules,
    ignored_suffixes=(".rotary_emb.inv_freq", ".position_ids", *SPEECH_SUFFIXES),
    ignored_prefixes=(AUDIO_PREFIX,),
    duplicate_tensors=(("lm_head.weight", "model.embed_tokens.weight"),),
    image_processor=hd_image_processors.PHI4MM,
    add_settings=build_image_token_reader(IMAGE_TOKEN),
    chat_config=CHAT,
)
PHI4_MULTIMODAL = CheckpointFamily(
    "phi4_multimodal",
    VLM,
    _read_transformers,
    _write_transformers,
    build_round_trip_check(
        _read_transformers, _write_transformers, normalize_llava_config, hd_image_processors.PHI4_MULTIMODAL
    ),
    _build_transformers_rules,
    ignored_prefixes=(AUDIO_PREFIX,),
    duplicate_tensors=(("lm_head.weight", "model.embed_tokens.weight"),),
    image_processor=hd_image_processors.PHI4_MULTIMODAL,
    add_settings=_add_adapter,
    open_weights=_open_weights,
    adapter=ADAPTER,
    chat_config=CHAT._replace(
        processor_class="Phi4MultimodalProcessor",
        processor_fields=_write_processor_fields,
        tokenizer_tokens={"image_token": "image", "audio_token": "<|endoftext11|>"},
    ),
    class_defaults=DEFAULTS,
    part_defaults={"vision_config": VISION_DEFAULTS},
)
FAMILIES.register("phi4_multimodal", PHI4_MULTIMODAL)
FAMILIES.register("phi4mm", PHI4MM)
