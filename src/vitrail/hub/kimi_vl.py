"""Kimi-VL, whose published code is followed, and Kimi-K2.5 of transformers: the tower MoonViT for images of any size,
an MLP of 2 × 2 features, and a DeepSeek-V3. Videos are not supported.

Both have the released weight names. Exports of Kimi-VL have the published layout, for which other libraries need the
code files of the original repository.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from vitrail.connectors import MergerConfig
from vitrail.encoders.packed_vit import PackedViTConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.chat_config import ChatConfig
from vitrail.hub.checkpoint_family import CheckpointFamily, build_round_trip_check, fill_defaults
from vitrail.hub.deepseek_text import DEEPSEEK_V3
from vitrail.hub.llava import normalize_llava_config
from vitrail.hub.tensor_rules import TensorRule, add_prefix, flatten_kernel, rename, rename_layer, view
from vitrail.hub.vlm_towers import read_activation, read_square_size, to_hf_activation
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.nn import AttentionConfig, BlockConfig, PlainMLPConfig
from vitrail.processing.image_loading import NORMALIZATIONS
from vitrail.processing.image_processors import HFImageProcessor, check_match
from vitrail.processing.resolution_policies import PatchLimitPolicy
from vitrail.registry import FAMILIES
from vitrail.stream import StreamRules

HFConfig = dict[str, Any]

EPS = 1e-5  # of the norms of the tower; fixed, not part of the config
LANGUAGE_MODELS = (DEEPSEEK_V3.name, "kimi_k2")

# Defaults of the config classes of transformers, and of the published one of Kimi-VL.
VISION_DEFAULTS: HFConfig = {
    "patch_size": 14,
    "pos_emb_height": 64,
    "pos_emb_width": 64,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "hidden_act": "gelu_pytorch_tanh",
    "merge_kernel_size": [2, 2],
}
K25_DEFAULTS: HFConfig = {
    "projection_hidden_size": 1152,
    "projection_layer_norm_eps": 1e-5,
    "image_token_id": 163_605,
    "video_token_id": 163_840,
    "vision_start_token_id": 163_602,
    "vision_end_token_id": 163_604,
    "tie_word_embeddings": True,
}
VL_DEFAULTS: HFConfig = {"media_placeholder_token_id": 163_605}

# Keys of the released files → those of transformers.
RELEASED_VISION_KEYS = {
    **{f"vt_{key}": key for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")},
    **{f"init_{key}": key for key in ("pos_emb_height", "pos_emb_width", "pos_emb_time")},
}
RELEASED_CHOICES = {
    "pos_emb_type": "divided_fixed",
    "merge_type": "sd2_tpool",
    "video_attn_type": "spatial_temporal",
    "mm_projector_type": "patchmerger",
    "projector_hidden_act": "gelu",
}
"""Keys of a released vision_config with the only supported value."""
BOUNDARY_TOKENS = ("video", "vision_start", "vision_end")


# ---- the tower --------------------------------------------------------------------------------------------------


def _read_tower(vision: HFConfig) -> PackedViTConfig:
    for key, value in RELEASED_CHOICES.items():
        if vision.get(key) not in (None, value):
            raise CheckpointError(f"vision_config.{key} is {vision[key]!r}", f"only {value!r} is supported")
    vision = fill_defaults(
        {RELEASED_VISION_KEYS.get(key, key): value for key, value in vision.items()}, VISION_DEFAULTS
    )
    rope = vision.get("rope_parameters") or {}
    if rope.get("rope_type", "axial") != "axial":
        raise CheckpointError(f"vision_config.rope_type is {rope['rope_type']!r}", "only 'axial' is supported")
    if vision["pos_emb_height"] != vision["pos_emb_width"]:
        raise CheckpointError(
            f"vision_config.pos_emb_height is {vision['pos_emb_height']}, and pos_emb_width {vision['pos_emb_width']}",
            "only a square position embedding is supported",
        )
    return PackedViTConfig(
        layers=vision["num_hidden_layers"],
        block=BlockConfig(
            width=vision["hidden_size"],
            attention=AttentionConfig(heads=vision["num_attention_heads"], bias="all"),
            mlp=PlainMLPConfig(intermediate_size=vision["intermediate_size"], activation=read_activation(vision)),
            eps=EPS,
        ),
        patch_size=read_square_size(vision, "patch_size"),
        temporal_patch_size=1,
        spatial_merge_size=read_square_size(vision, "merge_kernel_size"),
        patch_bias=True,
        theta=float(rope.get("rope_theta") or 10_000.0),
        rotary_layout="2d_interleaved",
        norm_last=True,
        position_grid_size=vision["pos_emb_height"],
        interpolation="bicubic",
    )


def _write_tower(tower: PackedViTConfig) -> HFConfig:
    block = tower.block
    return {
        "hidden_size": block.width,
        "intermediate_size": block.mlp.intermediate_size,
        "num_attention_heads": block.attention.heads,
        "num_hidden_layers": tower.layers,
        "patch_size": tower.patch_size,
        "merge_kernel_size": [tower.spatial_merge_size] * 2,
    }


def _build_tower_rules(tower: PackedViTConfig) -> list[TensorRule]:
    W, P, side = tower.block.width, tower.patch_size, tower.position_grid_size
    names = {
        "self.norm": "norm0",
        "mlp.norm": "norm1",
        "self.op.qkv": "wqkv",
        "self.op.out": "wo",
        "mlp.op.up": "mlp.fc0",
        "mlp.op.down": "mlp.fc1",
    }
    block = [rule for native, hf in names.items() for rule in rename_layer(f"branches.{native}", hf)]
    return [
        flatten_kernel("embed.proj.weight", "patch_embed.proj.weight", (W, tower.channels, P, P)),
        rename("embed.proj.bias", "patch_embed.proj.bias"),
        view("positions.table", "patch_embed.pos_emb.weight", (side * side, W), (side, side, W)),
        *(rule for i in range(tower.layers) for rule in add_prefix(f"blocks.{i}.", f"encoder.blocks.{i}.", block)),
        *rename_layer("norm_last", "encoder.final_layernorm"),
    ]


# ---- image processors -------------------------------------------------------------------------------------------


def _parse_token_limit(config: Any, json_config: HFConfig) -> PatchLimitPolicy:
    policy = config.policy
    merge = [policy.merge_size] * 2
    check_match(json_config, patch_size=policy.patch_size, merge_kernel_size=merge, pad_input=True)
    return policy.replace(max_patches=json_config["in_token_limit"])


def _format_token_limit(config: Any) -> HFConfig:
    policy = config.policy
    return {
        "in_token_limit": policy.max_patches,
        "patch_size": policy.patch_size,
        "merge_kernel_size": [policy.merge_size] * 2,
        "pad_input": True,
    }


class KimiImageProcessor(HFImageProcessor):
    """Image processor of Kimi-K2.5. The keys of the released file have other names, and lie in media_proc_cfg."""

    RELEASED_KEYS = {
        "max_patches": "in_patch_limit",
        "patch_size": "patch_size",
        "merge_size": "merge_kernel_size",
        "image_mean": "image_mean",
        "image_std": "image_std",
    }

    def apply_processor_config(self, config: Any, processor_config: HFConfig) -> Any:
        released = processor_config.get("media_proc_cfg")
        if isinstance(released, dict):
            renamed = {key: released.get(name) for key, name in self.RELEASED_KEYS.items()}
            if (side := released.get("patch_limit_on_one_side")) is not None:
                renamed["size"] = {"max_height": side, "max_width": side}
            processor_config = {**processor_config, **renamed}
        return super().apply_processor_config(config, processor_config)


def _parse_patch_limit(config: Any, json_config: HFConfig) -> PatchLimitPolicy:
    """Read the limits. `size` counts patches."""
    policy, size = config.policy, json_config["size"]
    check_match(json_config, patch_size=policy.patch_size, merge_size=policy.merge_size)
    side = size.get("max_height") if isinstance(size, dict) else None
    if side is None or size.get("max_width") != side:
        raise CheckpointError(f"size is {size!r}", "give max_height and max_width in patches, both alike")
    return policy.replace(max_patches=json_config["max_patches"], max_side_patches=side)


def _format_patch_limit(config: Any) -> HFConfig:
    policy = config.policy
    return {
        "max_patches": policy.max_patches,
        "patch_size": policy.patch_size,
        "merge_size": policy.merge_size,
        "size": {"max_height": policy.max_side_patches, "max_width": policy.max_side_patches},
    }


# ---- the models -------------------------------------------------------------------------------------------------


class KimiVariant(NamedTuple):
    """A model type with this tower.

    projector   names of the norm and of the two layers of the projector
    max_patches  limit of an image, if there is no processor file
    """

    name: str
    architecture: str
    projector: tuple[str, str, str]
    max_patches: int


VL = KimiVariant(
    "kimi_vl",
    "KimiVLForConditionalGeneration",
    tuple(f"multi_modal_projector.{name}" for name in ("pre_norm", "linear_1", "linear_2")),  # pyrefly: ignore
    4096,
)
K25 = KimiVariant(
    "kimi_k25",
    "Kimi_K25ForConditionalGeneration",
    tuple(f"mm_projector.{name}" for name in ("pre_norm", "proj.0", "proj.2")),  # pyrefly: ignore
    16_384,
)


def _read_shared(variant: KimiVariant, hf_config: HFConfig, eps: float, **rules: Any) -> VLMConfig:
    """Read tower and language model. `eps` is that of the projector's norm, `rules` are settings of the stream."""
    text, tower = hf_config.get("text_config") or {}, _read_tower(hf_config.get("vision_config") or {})
    if text.get("model_type", DEEPSEEK_V3.name) not in LANGUAGE_MODELS:
        raise CheckpointError(
            f"text_config.model_type {text['model_type']!r} is not supported", f"known: {', '.join(LANGUAGE_MODELS)}"
        )
    decoder, normalization = DEEPSEEK_V3.from_hf_config(text), NORMALIZATIONS["half"]
    return VLMConfig(
        tower=tower,
        connector=MergerConfig(
            in_features=tower.width,
            out_features=decoder.block.width,
            merge=tower.spatial_merge_size,
            eps=eps,
            order="blocks",
        ),
        decoder=decoder,
        policy=PatchLimitPolicy(
            patch_size=tower.patch_size, merge_size=tower.spatial_merge_size, max_patches=variant.max_patches
        ),
        mean=normalization.mean,
        std=normalization.std,
        rules=StreamRules(**rules),
    )


def _check_parts(config: VLMConfig) -> tuple[PackedViTConfig, MergerConfig]:
    if not isinstance(config.tower, PackedViTConfig) or not isinstance(config.connector, MergerConfig):
        raise ConfigError("Kimi needs a packed ViT and a merger")
    return config.tower, config.connector


def _read_vl(hf_config: HFConfig) -> VLMConfig:
    hf_config = fill_defaults(hf_config, VL_DEFAULTS)
    return _read_shared(VL, hf_config, EPS, fill_id=hf_config["media_placeholder_token_id"])


def _write_vl(config: VLMConfig) -> HFConfig:
    tower, _ = _check_parts(config)
    if config.vision_token_ids:
        raise ConfigError("vision_token_ids are given, which Kimi-VL has not", "remove them")
    return {
        "architectures": [VL.architecture],
        "vision_config": {
            "model_type": "moonvit",
            **_write_tower(tower),
            "init_pos_emb_height": tower.position_grid_size,
            "init_pos_emb_width": tower.position_grid_size,
        },
        "text_config": {"model_type": DEEPSEEK_V3.name, **DEEPSEEK_V3.to_hf_config(config.decoder)},
        "media_placeholder_token_id": config.rules.fill_id,
        "tie_word_embeddings": config.decoder.tie_word_embeddings,
    }


def _read_k25(hf_config: HFConfig) -> VLMConfig:
    vision = hf_config.get("vision_config") or {}
    released = {
        "image_token_id": hf_config.get("media_placeholder_token_id"),
        "projection_layer_norm_eps": vision.get("projector_ln_eps"),
        "projection_hidden_size": vision.get("mm_hidden_size"),
    }
    hf_config = fill_defaults(hf_config, fill_defaults(released, K25_DEFAULTS))
    config = _read_shared(K25, hf_config, hf_config["projection_layer_norm_eps"], fill_id=hf_config["image_token_id"])
    if hf_config["projection_hidden_size"] != config.tower.width:
        raise CheckpointError(
            f"projection_hidden_size is {hf_config['projection_hidden_size']}, but the tower has {config.tower.width}",
            "use equal widths",
        )
    return config.replace(
        decoder=config.decoder.replace(tie_word_embeddings=bool(hf_config["tie_word_embeddings"])),
        vision_token_ids={name: hf_config[f"{name}_token_id"] for name in BOUNDARY_TOKENS},
    )


def _write_k25(config: VLMConfig) -> HFConfig:
    tower, connector = _check_parts(config)
    if missing := [name for name in BOUNDARY_TOKENS if name not in config.vision_token_ids]:
        raise ConfigError(f"vision_token_ids lacks {missing[0]!r}", "add the ids of the tokens around an image")
    return {
        "architectures": [K25.architecture],
        "vision_config": {
            "model_type": "kimi_k25_vision",
            **_write_tower(tower),
            "hidden_act": to_hf_activation(tower.block.mlp.activation),
            "pos_emb_height": tower.position_grid_size,
            "pos_emb_width": tower.position_grid_size,
            "rope_parameters": {"rope_type": "axial", "rope_theta": tower.theta},
        },
        "text_config": {"model_type": DEEPSEEK_V3.name, **DEEPSEEK_V3.to_hf_config(config.decoder)},
        "projection_hidden_size": tower.width,
        "projection_layer_norm_eps": connector.eps,
        "image_token_id": config.rules.fill_id,
        "media_placeholder_token_id": config.rules.fill_id,  # of the released file
        **{f"{name}_token_id": config.vision_token_ids[name] for name in BOUNDARY_TOKENS},
        "tie_word_embeddings": config.decoder.tie_word_embeddings,
    }


def _build_rules(variant: KimiVariant, config: VLMConfig) -> list[TensorRule]:
    assert isinstance(config.tower, PackedViTConfig)
    connector = ("norm", "layers.linears.0", "layers.linears.1")
    return [
        *add_prefix("tower.", "vision_tower.", _build_tower_rules(config.tower)),
        *(
            rule
            for native, hf in zip(connector, variant.projector, strict=True)
            for rule in rename_layer(f"connector.{native}", hf)
        ),
        *add_prefix("decoder.", "language_model.", DEEPSEEK_V3.tensor_rules(config.decoder)),
    ]


def _make_family(
    variant: KimiVariant,
    read: Callable[[HFConfig], VLMConfig],
    write: Callable[[VLMConfig], HFConfig],
    image_processor: HFImageProcessor,
    chat_config: ChatConfig,
    **family_fields: Any,
) -> CheckpointFamily:
    return CheckpointFamily(
        variant.name,
        VLM,
        read,
        write,
        build_round_trip_check(read, write, normalize_llava_config, image_processor),
        partial(_build_rules, variant),
        image_processor=image_processor,
        chat_config=chat_config,
        **family_fields,
    )


KIMI_VL = _make_family(
    VL,
    _read_vl,
    _write_vl,
    HFImageProcessor("KimiVLImageProcessor", (PatchLimitPolicy,), _parse_token_limit, _format_token_limit),
    ChatConfig("KimiVLProcessor", "kimi", end_of_turn="<|im_end|>"),
)
KIMI_K25 = _make_family(
    K25,
    _read_k25,
    _write_k25,
    KimiImageProcessor("Kimi_K25ImageProcessor", (PatchLimitPolicy,), _parse_patch_limit, _format_patch_limit),
    ChatConfig(
        "Kimi_K25Processor",
        "kimi",
        {
            "before": "<|media_begin|>image<|media_content|>",
            "after": "<|media_end|>\n",
            "default_system": "",
            "reply_start": "<think></think>",
        },
        end_of_turn="<|im_end|>",
        tokenizer_tokens={"image_token": "image"},
    ),
    class_defaults=K25_DEFAULTS,
    part_defaults={"vision_config": VISION_DEFAULTS},
)
FAMILIES.register("kimi_vl", KIMI_VL)
FAMILIES.register("kimi_k25", KIMI_K25)
