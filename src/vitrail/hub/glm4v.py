"""GLM-4.1V of transformers: a tower for images and videos of any size, a gated merger, and a GLM-4 decoder with rotary
positions over time, height and width (M-RoPE).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from vitrail.backbones.decoder import DecoderConfig
from vitrail.connectors import GatedMergerConfig
from vitrail.encoders.packed_vit import PackedViT, PackedViTConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.chat_config import ChatConfig
from vitrail.hub.checkpoint_family import CheckpointFamily, build_round_trip_check, fill_defaults
from vitrail.hub.decoder_config import normalize_decoder_config
from vitrail.hub.glm4 import GLM4
from vitrail.hub.tensor_rules import TensorRule, add_prefix, flatten_kernel, fuse_layer, rename, rename_layer
from vitrail.hub.vlm_towers import build_tower_family, read_activation, read_square_size, to_hf_activation
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig
from vitrail.processing import image_processors
from vitrail.processing.image_loading import NORMALIZATIONS
from vitrail.processing.resolution_policies import NativePolicy
from vitrail.registry import FAMILIES
from vitrail.stream import StreamRules

HFConfig = dict[str, Any]

# Defaults of the config classes of transformers.
VISION_DEFAULTS: HFConfig = {
    "depth": 24,
    "hidden_size": 1536,
    "hidden_act": "silu",
    "attention_bias": False,
    "num_heads": 12,
    "in_channels": 3,
    "image_size": 336,
    "patch_size": 14,
    "rms_norm_eps": 1e-5,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 4096,
    "intermediate_size": 13_696,
}
TEXT_DEFAULTS: HFConfig = {
    "vocab_size": 151_552,
    "hidden_size": 4096,
    "intermediate_size": 13_696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
}
DEFAULTS: HFConfig = {
    "image_token_id": 151_343,
    "video_token_id": 151_344,
    "image_start_token_id": 151_339,
    "image_end_token_id": 151_340,
    "video_start_token_id": 151_341,
    "video_end_token_id": 151_342,
    "tie_word_embeddings": False,
}
MROPE_SECTIONS = (8, 12, 12)
VISION_TOKENS = ("video", "image_start", "image_end", "video_start", "video_end")
PIXEL_RANGE = (112**2 // 2, 28**2 * 15_000 // 2)  # smallest and largest number of pixels of an image


# ---- the tower --------------------------------------------------------------------------------------------------


def _read_tower(hf_config: HFConfig) -> PackedViTConfig:
    """Read the tower. The MLP of its blocks has the width of the merger, and the MLP of the merger that of the blocks:
    intermediate_size is a setting of the merger.
    """
    hf_config = fill_defaults(hf_config, VISION_DEFAULTS)
    rope = hf_config.get("rope_parameters") or {}
    if rope.get("rope_type", "axial") != "axial":
        raise CheckpointError(f"rope_type is {rope['rope_type']!r}", "only 'axial' is supported")
    patch_size = read_square_size(hf_config, "patch_size")
    return PackedViTConfig(
        layers=hf_config["depth"],
        block=BlockConfig(
            width=hf_config["hidden_size"],
            attention=AttentionConfig(
                heads=hf_config["num_heads"], bias="qkv" if hf_config["attention_bias"] else "none"
            ),
            mlp=GatedMLPConfig(intermediate_size=hf_config["out_hidden_size"], activation=read_activation(hf_config)),
            norm="rms",
            eps=hf_config["rms_norm_eps"],
        ),
        patch_size=patch_size,
        temporal_patch_size=read_square_size(hf_config, "temporal_patch_size"),
        spatial_merge_size=hf_config["spatial_merge_size"],
        channels=hf_config["in_channels"],
        patch_bias=True,
        theta=float(rope.get("rope_theta", 10_000.0)),
        norm_first=True,
        position_grid_size=read_square_size(hf_config, "image_size") // patch_size,
        interpolation="bicubic",
    )


def _write_tower(config: PackedViTConfig) -> HFConfig:
    """Write the tower without the settings of the merger."""
    block = config.block
    return {
        "depth": config.layers,
        "hidden_size": block.width,
        "hidden_act": to_hf_activation(block.mlp.activation),
        "attention_bias": block.attention.bias == "qkv",
        "num_heads": block.attention.heads,
        "in_channels": config.channels,
        "image_size": config.position_grid_size * config.patch_size,
        "patch_size": config.patch_size,
        "rms_norm_eps": block.eps,
        "spatial_merge_size": config.spatial_merge_size,
        "temporal_patch_size": config.temporal_patch_size,
        "out_hidden_size": block.mlp.intermediate_size,
        "rope_parameters": {"rope_type": "axial", "rope_theta": config.theta},
    }


def _build_tower_rules(config: PackedViTConfig) -> list[TensorRule]:
    W, P, hidden = config.block.width, config.patch_size, config.block.mlp.intermediate_size
    kernel = (W, config.channels, config.temporal_patch_size, P, P)
    block = [
        *rename_layer("branches.self.norm", "norm1", False),
        *rename_layer("branches.mlp.norm", "norm2", False),
        *rename_layer("branches.self.op.qkv", "attn.qkv", config.block.attention.bias == "qkv"),
        *rename_layer("branches.self.op.out", "attn.proj", False),
        *fuse_layer("branches.mlp.op.gate_up", ["mlp.gate_proj", "mlp.up_proj"], [hidden] * 2, False),
        *rename_layer("branches.mlp.op.down", "mlp.down_proj", False),
    ]
    rules = [
        flatten_kernel("embed.proj.weight", "patch_embed.proj.weight", kernel),
        rename("embed.proj.bias", "patch_embed.proj.bias"),
        *rename_layer("norm_first", "post_conv_layernorm", False),
        rename("positions.table", "embeddings.position_embedding.weight"),
    ]
    for i in range(config.layers):
        rules += add_prefix(f"blocks.{i}.", f"blocks.{i}.", block)
    return rules


GLM4V_VISION = build_tower_family(
    "glm4v_vision", PackedViT, _read_tower, _write_tower, _build_tower_rules, VISION_DEFAULTS
)


# ---- the model --------------------------------------------------------------------------------------------------


class GLM4VVariant(NamedTuple):
    """A model type of GLM-4V.

    language_model  family of the language model
    text_defaults   defaults of its text_config
    fixed_text      settings of the language model that text_config does not state
    defaults        defaults of the top level
    """

    name: str
    architecture: str
    language_model: CheckpointFamily
    text_defaults: HFConfig
    fixed_text: HFConfig
    defaults: HFConfig


def _read_config(variant: GLM4VVariant, hf_config: HFConfig) -> VLMConfig:
    vision, hf_config = hf_config.get("vision_config") or {}, fill_defaults(hf_config, variant.defaults)
    _check_model_type("vision_config", vision, f"{variant.name}_vision", variant.name)
    tower, decoder = GLM4V_VISION.from_hf_config(vision), _read_decoder(variant, hf_config)
    vision = fill_defaults(vision, VISION_DEFAULTS)
    if vision["out_hidden_size"] != decoder.block.width:
        raise CheckpointError(
            f"vision_config.out_hidden_size is {vision['out_hidden_size']}, but the width of the language model is "
            f"{decoder.block.width}",
            "use equal widths",
        )
    normalization = NORMALIZATIONS["clip"]
    return VLMConfig(
        tower=tower,
        connector=GatedMergerConfig(
            in_features=tower.block.width,
            out_features=decoder.block.width,
            intermediate_size=vision["intermediate_size"],
            merge=tower.spatial_merge_size,
            eps=tower.block.eps,
            activation=tower.block.mlp.activation,
        ),
        decoder=decoder,
        policy=NativePolicy(
            patch_size=tower.patch_size,
            merge_size=tower.spatial_merge_size,
            min_pixels=PIXEL_RANGE[0],
            max_pixels=PIXEL_RANGE[1],
            enlarge_strips=True,
        ),
        mean=normalization.mean,
        std=normalization.std,
        rules=StreamRules(positions="glm4v", vocab_size=decoder.vocab_size, fill_id=hf_config["image_token_id"]),
        vision_token_ids={name: hf_config[f"{name}_token_id"] for name in VISION_TOKENS},
    )


def _check_model_type(key: str, settings: Mapping[str, Any], *names: str) -> None:
    if settings.get("model_type") not in (None, *names):
        raise CheckpointError(f"{key}.model_type is {settings['model_type']!r}", f"expected: {names[0]}")


def _read_decoder(variant: GLM4VVariant, hf_config: HFConfig) -> DecoderConfig:
    """Read the language model, whose keys are those of text_config or, in the released file, of the top level."""
    settings = hf_config.get("text_config") or hf_config
    text = fill_defaults(settings, variant.text_defaults)
    _check_model_type("text_config", text, f"{variant.name}_text", variant.name)
    rope = {**(text.pop("rope_scaling", None) or {}), **(text.pop("rope_parameters", None) or {})}
    sections = tuple(rope.pop("mrope_section", MROPE_SECTIONS))
    decoder = variant.language_model.from_hf_config(
        {
            "partial_rotary_factor": 1.0,
            "head_dim": text["hidden_size"] // text["num_attention_heads"],
            **text,
            **variant.fixed_text,
            "rope_parameters": rope,
            "tie_word_embeddings": bool(hf_config["tie_word_embeddings"] or settings.get("tie_word_embeddings")),
        }
    )
    return decoder.replace(rotary=decoder.rotary.replace(layout="mrope", sections=sections))


def _write_config(variant: GLM4VVariant, config: VLMConfig) -> HFConfig:
    tower, connector, decoder = config.tower, config.connector, config.decoder
    if not isinstance(tower, PackedViTConfig) or not isinstance(connector, GatedMergerConfig):
        raise ConfigError("GLM-4V needs a packed ViT and a gated merger")
    text_config = variant.language_model.to_hf_config(decoder)
    for key in ("architectures", "tie_word_embeddings", *variant.fixed_text):
        del text_config[key]
    text_config["rope_parameters"]["mrope_section"] = list(decoder.rotary.sections or ())
    vision_config = {**GLM4V_VISION.to_hf_config(tower), "intermediate_size": connector.intermediate_size}
    return {
        "architectures": [variant.architecture],
        "vision_config": {**vision_config, "model_type": f"{variant.name}_vision"},
        "text_config": {**text_config, "model_type": f"{variant.name}_text"},
        "image_token_id": config.rules.fill_id,
        **{f"{name}_token_id": config.vision_token_ids[name] for name in VISION_TOKENS},
        "tie_word_embeddings": decoder.tie_word_embeddings,
    }


def _normalize_config(config: VLMConfig) -> VLMConfig:
    """Return the equivalent config with all defaults filled in. Video sampling is part of the video processor file."""
    sampling = config.resolved_video_sampling
    if sampling is not None and sampling.rule == "glm4v":
        config = config.replace(video_sampling=None)
    return config.replace(
        decoder=normalize_decoder_config(config.decoder),
        rules=config.rules.replace(vocab_size=config.decoder.vocab_size),
    )


def _build_rules(variant: GLM4VVariant, config: VLMConfig) -> list[TensorRule]:
    tower, connector = config.tower, config.connector
    assert isinstance(tower, PackedViTConfig) and isinstance(connector, GatedMergerConfig)
    merger = [
        *rename_layer("norm", "post_layernorm", False),
        _build_conv_rule(connector),
        rename("conv.bias", "downsample.bias"),
        *rename_layer("proj", "merger.proj", False),
        *rename_layer("proj_norm", "merger.post_projection_norm"),
        *fuse_layer(
            "mlp.gate_up", ["merger.gate_proj", "merger.up_proj"], [connector.intermediate_size] * 2, bias=False
        ),
        *rename_layer("mlp.down", "merger.down_proj", False),
    ]
    rules = add_prefix("tower.", "model.visual.", GLM4V_VISION.tensor_rules(tower))
    rules += add_prefix("connector.", "model.visual.", merger)
    for rule in variant.language_model.tensor_rules(config.decoder):  # the head stays outside
        hf = (name.replace("model.", "model.language_model.", 1) for name in rule.hf)
        rules += add_prefix("decoder.", "", [rule._replace(hf=tuple(hf))])
    return rules


def _build_conv_rule(config: GatedMergerConfig) -> TensorRule:
    """Build the rule of the convolution: the columns of the native matrix are the features of a block."""
    m, shape = config.merge, (config.out_features, config.in_features, config.merge, config.merge)

    def pull(tensors: list[Tensor]) -> list[Tensor]:
        if tuple(tensors[0].shape) != shape:
            raise CheckpointError(
                f"tensor 'downsample.weight' has shape {tuple(tensors[0].shape)}, the config requires {shape}"
            )
        return [tensors[0].permute(0, 2, 3, 1).flatten(1).contiguous()]

    def push(tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].unflatten(1, (m, m, -1)).permute(0, 3, 1, 2).contiguous()]

    return TensorRule(("conv.weight",), ("downsample.weight",), pull, push)


def build_glm4v_family(variant: GLM4VVariant) -> CheckpointFamily:
    """Build the family of a model type of GLM-4V."""
    read, write = partial(_read_config, variant), partial(_write_config, variant)
    return CheckpointFamily(
        variant.name,
        VLM,
        read,
        write,
        build_round_trip_check(read, write, _normalize_config, image_processors.GLM4V),
        partial(_build_rules, variant),
        duplicate_tensors=(("lm_head.weight", "model.language_model.embed_tokens.weight"),),
        image_processor=image_processors.GLM4V,
        has_video_processor=True,
        chat_config=ChatConfig(
            "Glm4vProcessor",
            "glm4v",
            end_of_turn="<|user|>",
            tokenizer_tokens={"image_token": "image", "video_token": "video"},
        ),
        class_defaults=variant.defaults,
        part_defaults={"text_config": variant.text_defaults, "vision_config": VISION_DEFAULTS},
    )


# q, k and v have biases, and the width of a head follows from the others.
FIXED_TEXT = {"attention_bias": True, "head_dim": None}
GLM4V = build_glm4v_family(
    GLM4VVariant("glm4v", "Glm4vForConditionalGeneration", GLM4, TEXT_DEFAULTS, FIXED_TEXT, DEFAULTS)
)
FAMILIES.register("glm4v", GLM4V)
