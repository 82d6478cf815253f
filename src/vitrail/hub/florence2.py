"""Florence-2: a DaViT tower, a projector, and BART's encoder and decoder.

Microsoft's files have names of their own for tensors and keys, and an embedding without the row of the image token,
which transformers appends. Both layouts are read; exports have the layout of transformers.
"""

import re
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from vitrail.backbones.decoder import DecoderConfig
from vitrail.backbones.fusion import CrossAttentionFusionConfig
from vitrail.connectors import PooledProjectorConfig
from vitrail.encoders.davit import DaViTConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.chat_config import ChatConfig
from vitrail.hub.checkpoint_family import ACTIVATIONS, CheckpointFamily, build_round_trip_check, fill_defaults
from vitrail.hub.decoder_families import normalize_decoder_config
from vitrail.hub.tensor_rules import TensorRule, add_prefix, fuse_layer, rename, rename_layer, transpose
from vitrail.models.encoder_decoder_vlm import EncoderDecoderVLM, EncoderDecoderVLMConfig
from vitrail.nn import AttentionConfig, BlockConfig, PlainMLPConfig, RotaryConfig
from vitrail.processing.image_loading import NORMALIZATIONS
from vitrail.processing.image_preprocessor import parse_square_size, read_preprocessor_config
from vitrail.processing.image_processors import LLAVA, HFImageProcessor
from vitrail.processing.resolution_policies import NaivePolicy
from vitrail.processing.tokenizer_files import read_added_tokens
from vitrail.registry import FAMILIES
from vitrail.stream import StreamRules

HFConfig = dict[str, Any]

POSITION_OFFSET = 2  # unused rows at the start of BART's position tables
EPS = 1e-5  # fixed; not part of the config
IMAGE_TOKEN = "<image>"
IMAGE_SIZE = 768  # of the released models

# Defaults of transformers for keys that a config.json leaves out.
TEXT_DEFAULTS: HFConfig = {
    "vocab_size": 50_265,
    "d_model": 1024,
    "encoder_layers": 12,
    "encoder_ffn_dim": 4096,
    "encoder_attention_heads": 16,
    "decoder_layers": 12,
    "decoder_ffn_dim": 4096,
    "decoder_attention_heads": 16,
    "activation_function": "gelu",
    "max_position_embeddings": 1024,
    "scale_embedding": False,
    "eos_token_id": 2,
}
VISION_DEFAULTS: HFConfig = {
    "in_channels": 3,
    "depths": [1, 1, 9, 1],
    "patch_size": [7, 3, 3, 3],
    "patch_stride": [4, 2, 2, 2],
    "patch_padding": [3, 1, 1, 1],
    "patch_prenorm": [False, True, True, True],
    "embed_dim": [128, 256, 512, 1024],
    "num_heads": [4, 8, 16, 32],
    "num_groups": [4, 8, 16, 32],
    "window_size": 12,
    "mlp_ratio": 4.0,
    "qkv_bias": True,
    "activation_function": "gelu",
    "projection_dim": 1024,
    "max_position_embeddings": 50,
}
TOWER_KEYS = {  # of the tower's config → of vision_config
    "widths": "embed_dim",
    "blocks": "depths",
    "heads": "num_heads",
    "groups": "num_groups",
    "kernel_sizes": "patch_size",
    "strides": "patch_stride",
    "paddings": "patch_padding",
    "norm_first": "patch_prenorm",
}
DEFAULTS: HFConfig = {"image_token_id": 51_289}
FEATURE_SOURCES = ["spatial_avg_pool", "temporal_avg_pool"]


def _read_config(hf_config: HFConfig) -> EncoderDecoderVLMConfig:
    vision, text = dict(hf_config.get("vision_config") or {}), hf_config.get("text_config") or {}
    is_original = "dim_embed" in vision
    if is_original:  # Microsoft's keys
        if vision.get("image_feature_source", FEATURE_SOURCES) != FEATURE_SOURCES:
            raise CheckpointError(
                f"image_feature_source is {vision['image_feature_source']}", f"known: {', '.join(FEATURE_SOURCES)}"
            )
        vision["embed_dim"] = vision["dim_embed"]
        vision["max_position_embeddings"] = (vision.get("image_pos_embed") or {}).get("max_pos_embeddings", 50)
    vision, text = fill_defaults(vision, VISION_DEFAULTS), fill_defaults(text, TEXT_DEFAULTS)
    if text.get("normalize_before") or text.get("add_final_layer_norm"):
        raise CheckpointError("text_config has norms before its branches (mBART)", "use a model with BART's norms")
    if (text.get("model_type") or "bart") not in ("bart", "florence2_language"):
        raise CheckpointError(f"text_config.model_type {text['model_type']!r} is not supported", "known: bart")
    image_token_id = hf_config.get("image_token_id")
    if image_token_id is None:
        image_token_id = text["vocab_size"] if is_original else DEFAULTS["image_token_id"]
    width, context, config = text["d_model"], text["max_position_embeddings"], fill_defaults(hf_config, DEFAULTS)
    if vision["projection_dim"] != width:
        raise CheckpointError(f"projection_dim {vision['projection_dim']} differs from d_model {width}")
    blocks = {part: _read_block(text, part) for part in ("encoder", "decoder")}
    layers = text["decoder_layers"]
    decoder = DecoderConfig(
        vocab_size=max(text["vocab_size"], image_token_id + 1) if is_original else text["vocab_size"],
        layers=layers,
        block=blocks["decoder"].replace(branches=("self",)),
        rotary=RotaryConfig(head_dim=blocks["decoder"].attention.resolve_head_dim(width), rotary_dim=0),
        learned_positions=context + POSITION_OFFSET,
        context_length=context,
        tie_word_embeddings=True,
        scale_embeddings=bool(text["scale_embedding"]),
        norm_embeddings=True,
        fusion=CrossAttentionFusionConfig(
            layer_indices=tuple(range(1, 2 * layers, 2)), placement="inserted", gated=False, encoder=True
        ),
    )
    stages: dict[str, Any] = {key: tuple(vision[name]) for key, name in TOWER_KEYS.items()}
    tower = DaViTConfig(
        **stages,
        image_size=config.get("image_size", IMAGE_SIZE),
        window_size=vision["window_size"],
        mlp_ratio=float(vision["mlp_ratio"]),
        activation=_read_activation(vision),  # pyrefly: ignore
        qkv_bias=bool(vision["qkv_bias"]),
        channels=vision["in_channels"],
    )
    return EncoderDecoderVLMConfig(
        tower=tower,
        connector=PooledProjectorConfig(
            in_features=tower.width, out_features=width, max_grid=vision["max_position_embeddings"]
        ),
        decoder=decoder,
        policy=NaivePolicy(image_size=tower.image_size, patch_size=tower.patch_size),
        mean=NORMALIZATIONS["imagenet"].mean,
        std=NORMALIZATIONS["imagenet"].std,
        rules=StreamRules(fill_id=image_token_id),
        encoder_layers=text["encoder_layers"],
        encoder_block=blocks["encoder"],
        end_of_prompt_id=text["eos_token_id"],
    )


def _read_block(text: HFConfig, part: str) -> BlockConfig:
    mlp = PlainMLPConfig(intermediate_size=text[f"{part}_ffn_dim"], activation=_read_activation(text))  # pyrefly: ignore
    attention = AttentionConfig(heads=text[f"{part}_attention_heads"], bias="all")
    return BlockConfig(width=text["d_model"], attention=attention, mlp=mlp, eps=EPS, norm_position="after")


def _read_activation(table: HFConfig) -> str:
    name = table["activation_function"]
    if name not in ACTIVATIONS:
        raise CheckpointError(f"activation_function {name!r} is not supported", f"known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _write_activation(native: str) -> str:
    return next(name for name, value in ACTIVATIONS.items() if value == native)


def _write_config(config: EncoderDecoderVLMConfig) -> HFConfig:
    tower, connector, decoder = config.tower, config.connector, config.decoder
    if not isinstance(tower, DaViTConfig) or not isinstance(connector, PooledProjectorConfig):
        raise ConfigError("Florence-2 needs a DaViT and a pooled projector")
    blocks = {"encoder": config.prompt_block, "decoder": decoder.block}
    text = {
        "model_type": "bart",
        "vocab_size": decoder.vocab_size,
        "d_model": decoder.block.width,
        "encoder_layers": config.encoder_layers,
        "decoder_layers": decoder.layers,
        **{f"{part}_ffn_dim": block.mlp.intermediate_size for part, block in blocks.items()},
        **{f"{part}_attention_heads": block.attention.heads for part, block in blocks.items()},
        "activation_function": _write_activation(decoder.block.mlp.activation),
        "max_position_embeddings": decoder.context_length,
        "scale_embedding": decoder.scale_embeddings,
        "eos_token_id": config.end_of_prompt_id,
        "decoder_start_token_id": config.end_of_prompt_id,
        "forced_eos_token_id": config.end_of_prompt_id,
    }
    vision = {
        "model_type": "florence_vision",
        **{name: list(getattr(tower, key)) for key, name in TOWER_KEYS.items()},
        "in_channels": tower.channels,
        "window_size": tower.window_size,
        "mlp_ratio": tower.mlp_ratio,
        "qkv_bias": tower.qkv_bias,
        "activation_function": _write_activation(tower.activation),
        "projection_dim": connector.out_features,
        "max_position_embeddings": connector.max_grid,
    }
    return {
        "architectures": ["Florence2ForConditionalGeneration"],
        "is_encoder_decoder": True,
        "image_token_id": config.rules.fill_id,
        "text_config": text,
        "vision_config": vision,
        "image_size": tower.image_size,  # not used by transformers
    }


def _add_settings(hf_config: HFConfig, folder: Path) -> HFConfig:
    """Add the image size, and the id of the image token, which Microsoft's config lacks, if other files have them."""
    tokens, (processor, _) = read_added_tokens(folder), read_preprocessor_config(folder)
    size = (processor or {}).get("size")
    found = {} if size is None else {"image_size": parse_square_size(size)}
    return found | ({"image_token_id": tokens[IMAGE_TOKEN]} if IMAGE_TOKEN in tokens else {}) | hf_config


def _normalize_config(config: EncoderDecoderVLMConfig) -> EncoderDecoderVLMConfig:
    """Return the equivalent config with all defaults filled in."""
    return config.replace(decoder=normalize_decoder_config(config.decoder), encoder_block=config.prompt_block)


# ---- tensors ----------------------------------------------------------------------------------------------------

ORIGINAL_NAMES = (  # patterns of transformers' names → Microsoft's
    (r"^model\.language_model\.", "language_model.model."),
    (r"^model\.multi_modal_projector\.image_position_embed\.", "image_pos_embed."),
    (r"^model\.multi_modal_projector\.", ""),
    (r"^image_projection\.weight$", "image_projection"),
    (r"^model\.vision_tower\.", "vision_tower."),
    (r"\.conv\.", ".proj."),
    (r"_block\.(conv[12])\.", r"_block.\1.fn.dw."),
    (r"spatial_block\.norm1\.", "spatial_block.window_attn.norm."),
    (r"channel_block\.norm1\.", "channel_block.channel_attn.norm."),
    (r"_block\.norm2\.", "_block.ffn.norm."),
    (r"_attn\.(qkv|proj)\.", r"_attn.fn.\1."),
    (r"ffn\.(fc[12])\.", r"ffn.fn.net.\1."),
)


def _to_original_name(name: str) -> str:
    if name.startswith("model.language_model."):
        return re.sub(*ORIGINAL_NAMES[0], name)
    for pattern, replacement in ORIGINAL_NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def _build_rules(config: EncoderDecoderVLMConfig) -> list[TensorRule]:
    text, vision, projector = "model.language_model.", "model.vision_tower.", "model.multi_modal_projector."
    rules = [
        *add_prefix("tower.", vision, _build_tower_rules(config.tower)),
        rename("connector.rows.weight", f"{projector}image_position_embed.row_embeddings.weight"),
        rename("connector.columns.weight", f"{projector}image_position_embed.column_embeddings.weight"),
        *rename_layer("connector.norm", f"{projector}image_proj_norm"),
    ]
    for part in ("encoder", "decoder"):
        rules += [
            rename(f"{part}.positions.weight", f"{text}{part}.embed_positions.weight"),
            *rename_layer(f"{part}.norm", f"{text}{part}.layernorm_embedding"),
        ]
    encoder, decoder = config.prompt_block, config.decoder.block
    for i in range(config.encoder_layers):
        block = [*_build_self_rules(encoder), *_build_mlp_rules()]
        rules += add_prefix(f"encoder.blocks.{i}.", f"{text}encoder.layers.{i}.", block)
    for i in range(config.decoder.layers):
        layer = f"{text}decoder.layers.{i}."
        rules += add_prefix(f"decoder.blocks.{i}.", layer, _build_self_rules(decoder))
        block = [*_build_cross_rules(decoder), *_build_mlp_rules()]
        rules += add_prefix(f"decoder.fusion.blocks.{i}.", layer, block)
    rules = [rule._replace(alternative=rule.with_names(str, _to_original_name)) for rule in rules]
    name, projection = f"{text}shared.weight", f"{projector}image_projection.weight"
    embedding = rename("decoder.embed.weight", name)
    padded = _pad_rows("decoder.embed.weight", _to_original_name(name), config.decoder.vocab_size)
    original = transpose("connector.proj.weight", _to_original_name(projection))
    return [
        *rules,
        embedding._replace(alternative=padded),
        rename("connector.proj.weight", projection)._replace(alternative=original),
    ]


def _pad_rows(native: str, hf: str, rows: int) -> TensorRule:
    """One external matrix, to which a zero row is appended if one is missing: that of the image token."""

    def pull(tensors: list[Tensor]) -> list[Tensor]:
        return [F.pad(tensors[0], (0, 0, 0, 1)) if len(tensors[0]) == rows - 1 else tensors[0]]

    return TensorRule((native,), (hf,), pull, list)


def _build_tower_rules(tower: DaViTConfig) -> list[TensorRule]:
    rules = []
    for stage, pairs in enumerate(tower.blocks):
        rules += rename_layer(f"convs.{stage}.conv", f"convs.{stage}.conv")
        rules += rename_layer(f"convs.{stage}.norm", f"convs.{stage}.norm")
        for i in range(2 * pairs):
            kind, attention = (("spatial_block", "window_attn"), ("channel_block", "channel_attn"))[i % 2]
            block = [
                *rename_layer("conv1", "conv1"),
                *rename_layer("norm", "norm1"),
                *rename_layer("attention.qkv", f"{attention}.qkv", tower.qkv_bias),
                *rename_layer("attention.out", f"{attention}.proj"),
                *rename_layer("conv2", "conv2"),
                *rename_layer("mlp.norm", "norm2"),
                *rename_layer("mlp.op.up", "ffn.fc1"),
                *rename_layer("mlp.op.down", "ffn.fc2"),
            ]
            rules += add_prefix(f"stages.{stage}.{i}.", f"blocks.{stage}.{i // 2}.{kind}.", block)
    return rules


def _build_self_rules(block: BlockConfig) -> list[TensorRule]:
    return [
        *rename_layer("branches.self.norm", "self_attn_layer_norm"),
        *fuse_layer("branches.self.op.qkv", [f"self_attn.{name}_proj" for name in "qkv"], [block.width] * 3),
        *rename_layer("branches.self.op.out", "self_attn.out_proj"),
    ]


def _build_cross_rules(block: BlockConfig) -> list[TensorRule]:
    return [
        *rename_layer("branches.cross.norm", "encoder_attn_layer_norm"),
        *rename_layer("branches.cross.op.q", "encoder_attn.q_proj"),
        *fuse_layer("branches.cross.op.kv", [f"encoder_attn.{name}_proj" for name in "kv"], [block.width] * 2),
        *rename_layer("branches.cross.op.out", "encoder_attn.out_proj"),
    ]


def _build_mlp_rules() -> list[TensorRule]:
    return [
        *rename_layer("branches.mlp.norm", "final_layer_norm"),
        *rename_layer("branches.mlp.op.up", "fc1"),
        *rename_layer("branches.mlp.op.down", "fc2"),
    ]


# ---- image processor --------------------------------------------------------------------------------------------


class Florence2ImageProcessor(HFImageProcessor):
    """CLIP's image processor, whose size is that of the tower, with the number of tokens of an image."""

    def apply_processor_config(self, config: Any, processor_config: HFConfig) -> Any:
        config = super().apply_processor_config(config, processor_config)
        return config.replace(tower=config.tower.replace(image_size=config.policy.image_size))

    def to_processor_config(self, config: Any) -> HFConfig:
        return super().to_processor_config(config) | {"image_seq_length": config.min_image_tokens}


PROCESSOR = Florence2ImageProcessor("CLIPImageProcessor", (NaivePolicy,), LLAVA.parse_policy, LLAVA.format_policy)
_EMBEDDINGS = ("shared", "encoder.embed_tokens", "decoder.embed_tokens")

FLORENCE2 = CheckpointFamily(
    "florence2",
    EncoderDecoderVLM,
    _read_config,
    _write_config,
    build_round_trip_check(_read_config, _write_config, _normalize_config, PROCESSOR),
    _build_rules,
    ignored_suffixes=("visual_temporal_embed.pos_idx_to_embed", "final_logits_bias"),  # constants
    duplicate_tensors=tuple(
        (name, f"{prefix}shared.weight")
        for prefix, head in (("model.language_model.", "lm_head"), ("language_model.model.", "language_model.lm_head"))
        for name in (f"{head}.weight", *(f"{prefix}{part}.weight" for part in _EMBEDDINGS[1:]))
    ),
    image_processor=PROCESSOR,
    chat_config=ChatConfig(
        "Florence2Processor",
        "florence2",
        tokenizer_tokens={"image_token": "image"},
        generation_tokens={"decoder_start_token_id": "eos", "forced_bos_token_id": "bos"},
        takes_chat_template=False,
        requires_pad_token=True,
    ),
    add_settings=_add_settings,
    class_defaults=DEFAULTS,
    part_defaults={"text_config": TEXT_DEFAULTS, "vision_config": VISION_DEFAULTS},
)
FAMILIES.register("florence2", FLORENCE2)
