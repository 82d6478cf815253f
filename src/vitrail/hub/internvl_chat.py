"""OpenGVLab's layout of InternVL 1.5, 2, 2.5 and 3: read as InternVL. Exports have transformers' layout.

The config names no image token: its id is that of <IMG_CONTEXT> in the tokenizer's files. The chat template is a
conversation of the published code, which config.json names (see `processing.tokenizer_files`).
"""

from pathlib import Path
from typing import Any

from vitrail.backbones.decoder import DecoderConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import CheckpointError
from vitrail.hub.chat_config import ChatConfig
from vitrail.hub.checkpoint_family import CheckpointFamily, fill_defaults, make_read_only, reject_settings
from vitrail.hub.decoder_families import LLAMA
from vitrail.hub.encoder_families import build_patch_embed_rules
from vitrail.hub.internlm2 import INTERNLM2
from vitrail.hub.internvl import IMAGE_BOUNDARY_TOKENS, INTERNVL, make_config
from vitrail.hub.llava import LANGUAGE_MODELS, find_part_family, read_part
from vitrail.hub.tensor_rules import TensorRule, add_prefix, rename, rename_layer, view
from vitrail.hub.vlm_towers import INTERNVL_VISION
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.processing.tokenizer_files import read_added_tokens
from vitrail.registry import FAMILIES

HFConfig = dict[str, Any]

IMAGE_TOKEN = "<IMG_CONTEXT>"
IMAGE_TOKEN_KEY = "img_context_token_id"
NUM_LATER_TOKENS = 6  # released vocabularies end with <IMG_CONTEXT> and six tokens of boxes
LANGUAGE_FAMILIES = {**LANGUAGE_MODELS, INTERNLM2.name: INTERNLM2}

# Defaults of the published config classes, InternVLChatConfig and InternVisionConfig.
DEFAULTS: HFConfig = {
    "downsample_ratio": 0.5,
    "dynamic_image_size": False,
    "max_dynamic_patch": 6,
    "min_dynamic_patch": 1,
    "ps_version": "v1",
    "select_layer": -1,
    "use_thumbnail": False,
}
VISION_DEFAULTS: HFConfig = {
    "model_type": "intern_vit_6b",
    "hidden_size": 3200,
    "image_size": 224,
    "intermediate_size": 12_800,
    "layer_norm_eps": 1e-6,
    "norm_type": "rms_norm",
    "num_attention_heads": 25,
    "num_hidden_layers": 48,
    "qk_normalization": True,
    "qkv_bias": False,
}


def _read_config(hf_config: HFConfig) -> VLMConfig:
    hf_config = fill_defaults(hf_config, DEFAULTS)
    reject_settings(hf_config, pad2square="images are not padded")
    if hf_config["ps_version"] != "v2":
        raise CheckpointError(f"ps_version is {hf_config['ps_version']!r}", "known: v2")
    is_tiled = hf_config["dynamic_image_size"]
    if is_tiled and not hf_config["use_thumbnail"]:
        raise CheckpointError("use_thumbnail is false with dynamic_image_size", "set it to true, as in released models")
    _, decoder = read_part(hf_config, "llm_config", LANGUAGE_FAMILIES, "llama")
    config = make_config(
        {
            **INTERNVL.class_defaults,
            "downsample_ratio": hf_config["downsample_ratio"],
            "vision_feature_layer": hf_config["select_layer"],
            "image_token_id": hf_config.get(IMAGE_TOKEN_KEY, decoder.vocab_size - NUM_LATER_TOKENS - 1),
        },
        INTERNVL_VISION.from_hf_config(_convert_vision_config(hf_config)),
        decoder,
    )
    tiles = {"min_tiles": hf_config["min_dynamic_patch"], "max_tiles": hf_config["max_dynamic_patch"]}
    return config.replace(policy=config.policy.replace(**tiles if is_tiled else {"max_tiles": 1}))


def _convert_vision_config(hf_config: HFConfig) -> HFConfig:
    """Convert the config of InternViT to that of transformers."""
    vision = fill_defaults(hf_config.get("vision_config") or {}, VISION_DEFAULTS)
    if vision["model_type"] != VISION_DEFAULTS["model_type"]:
        raise CheckpointError(
            f"vision_config.model_type {vision['model_type']!r} is not supported",
            f"known: {VISION_DEFAULTS['model_type']}",
        )
    if hf_config.get("force_image_size") not in (None, vision["image_size"]):
        raise CheckpointError(
            f"force_image_size is {hf_config['force_image_size']}, but the tower has positions for images of "
            f"{vision['image_size']} pixels",
            "set both to the image size of the stored position embeddings",
        )
    return {
        **vision,
        "attention_bias": vision["qkv_bias"],
        "use_qk_norm": vision["qk_normalization"],
    }


def _add_image_token(hf_config: HFConfig, folder: Path) -> HFConfig:
    """Add the id of the image token, if the folder has a file of the tokenizer with it."""
    tokens = read_added_tokens(folder)
    return {**hf_config, IMAGE_TOKEN_KEY: tokens[IMAGE_TOKEN]} if IMAGE_TOKEN in tokens else hf_config


def _build_tower_rules(config: ViTConfig) -> list[TensorRule]:
    W, rows, has_bias = config.block.width, 1 + config.grid_size**2, config.block.norm == "layer"
    attention = config.block.attention
    block = [
        *rename_layer("branches.self.norm", "norm1", has_bias),
        *rename_layer("branches.mlp.norm", "norm2", has_bias),
        *rename_layer("branches.self.op.qkv", "attn.qkv", attention.bias == "all"),
        *rename_layer("branches.self.op.out", "attn.proj"),
        *rename_layer("branches.mlp.op.up", "mlp.fc1"),
        *rename_layer("branches.mlp.op.down", "mlp.fc2"),
        rename("branches.self.scale", "ls1"),
        rename("branches.mlp.scale", "ls2"),
    ]
    if attention.qk_norm is not None:
        block += [rename(f"branches.self.op.{name}.weight", f"attn.{name}.weight") for name in ("q_norm", "k_norm")]
    rules = [
        view("cls", "embeddings.class_embedding", (W,), (1, 1, W)),
        view("positions.table", "embeddings.position_embedding", (rows, W), (1, rows, W)),
        *build_patch_embed_rules(config, "embeddings.patch_embedding"),
    ]
    for i in range(config.layers):
        rules += add_prefix(f"blocks.{i}.", f"encoder.layers.{i}.", block)
    return rules


def _build_rules(config: VLMConfig) -> list[TensorRule]:
    assert isinstance(config.tower, ViTConfig)
    return [
        *add_prefix("tower.", "vision_model.", _build_tower_rules(config.tower)),
        *rename_layer("connector.norm", "mlp1.0"),
        *rename_layer("connector.layers.linears.0", "mlp1.1"),
        *rename_layer("connector.layers.linears.1", "mlp1.3"),
        *add_prefix("decoder.", "language_model.", _build_language_rules(config.decoder)),
    ]


def _build_language_rules(config: DecoderConfig) -> list[TensorRule]:
    """Build the tensor rules of the language model. InternLM2 is a Llama with other names in the files."""
    family = find_part_family(config, LANGUAGE_MODELS)
    rules = family.tensor_rules(config)
    if family.name != LLAMA.name:
        return rules
    alternatives = {rule.native: rule for rule in INTERNLM2.tensor_rules(config)}
    return [rule._replace(alternative=alternatives[rule.native]) for rule in rules]


INTERNVL_CHAT = CheckpointFamily(
    "internvl_chat",
    VLM,
    _read_config,
    tensor_rules=_build_rules,
    **make_read_only(INTERNVL.name),
    add_settings=_add_image_token,
    chat_config=ChatConfig(
        "InternVLProcessor", "internvl", image_boundary_tokens=IMAGE_BOUNDARY_TOKENS, end_of_turn="<|im_end|>"
    ),
)
FAMILIES.register("internvl_chat", INTERNVL_CHAT)
