"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL of transformers, dense and with experts: a tower for images and videos of any
size, a merger, and a language model with rotary positions over time, height and width (M-RoPE).

The position rule of videos is not part of config.json: it follows from the model type.
"""

from functools import partial
from typing import Any, NamedTuple

from vitrail.backbones.decoder import DecoderConfig
from vitrail.backbones.fusion import DeepStackConfig
from vitrail.connectors import MergerConfig
from vitrail.encoders.packed_vit import PackedViTConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.chat_config import ChatConfig
from vitrail.hub.checkpoint_family import (
    CheckpointFamily,
    build_round_trip_check,
    fill_defaults,
    reject_settings,
)
from vitrail.hub.config_schema import MAX_COUNT
from vitrail.hub.decoder_families import DECODER_FAMILIES, normalize_decoder_config
from vitrail.hub.qwen_vl_towers import QWEN_VL_TOWERS
from vitrail.hub.tensor_rules import TensorRule, add_prefix, rename_layer
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.nn import MoEConfig
from vitrail.processing import image_processors
from vitrail.processing.image_loading import NORMALIZATIONS
from vitrail.processing.resolution_policies import NativePolicy
from vitrail.registry import FAMILIES
from vitrail.stream import StreamRules

HFConfig = dict[str, Any]

LANGUAGE_MODELS = {row.name: row for row in DECODER_FAMILIES}
IMAGE_TOKEN_ID = 151_655
VISION_TOKEN_IDS = {"video": 151_656, "vision_start": 151_652, "vision_end": 151_653}
TOKENIZER_TOKENS = {f"{mark}_token": mark for mark in ("image", *VISION_TOKEN_IDS)}

TEXT_SIZE_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
)


def _build_text_defaults(*sizes: float, **fields: Any) -> HFConfig:
    return {**dict(zip(TEXT_SIZE_KEYS, sizes, strict=True)), "hidden_act": "silu", **fields}


# Defaults of transformers for the language model.
WINDOW_DEFAULTS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 80}
QWEN2_DEFAULTS = _build_text_defaults(152_064, 8192, 29_568, 80, 64, 8, 32_768, 1e-5, 1e6, **WINDOW_DEFAULTS)
QWEN3_DEFAULTS = _build_text_defaults(151_936, 4096, 22_016, 32, 32, 32, 128_000, 1e-6, 5e5, head_dim=128)
# The older key `num_experts` takes precedence if a file has it.
EXPERT_DEFAULTS = {"num_local_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
QWEN3_MOE_DEFAULTS = _build_text_defaults(151_936, 2048, 5632, 24, 16, 16, 128_000, 1e-6, 5e5, **EXPERT_DEFAULTS)


class QwenVLVariant(NamedTuple):
    """Differences between the model types of Qwen-VL.

    tower            family of the vision tower
    language_model   family of the language model
    text_defaults    defaults of its text_config
    rotary_layout    layout of the rotary sections
    mrope_sections   default sections for time, height and width
    position_rule    rule for the positions of a stream
    out_size_key     key of vision_config with the output width of the merger
    merger_names     tensor names of the merger's norm and its two layers
    prefixes         tensor name prefixes of the tower and of the language model
    normalization    pixel normalization
    pixel_range      default smallest and largest number of pixels of an image
    chat_config      chat template and processor settings
    image_token_id   default id of image tokens
    vision_token_ids default ids of the other vision tokens
    ignored_prefixes prefixes of tensors that are not read
    """

    name: str
    architecture: str
    tower: CheckpointFamily
    language_model: CheckpointFamily
    text_defaults: HFConfig
    rotary_layout: str
    mrope_sections: tuple[int, int, int]
    position_rule: str
    out_size_key: str
    merger_names: tuple[str, str, str]
    prefixes: tuple[str, str]
    normalization: str
    pixel_range: tuple[int, int]
    chat_config: ChatConfig
    image_token_id: int = IMAGE_TOKEN_ID
    vision_token_ids: dict[str, int] = VISION_TOKEN_IDS
    ignored_prefixes: tuple[str, ...] = ()


_QWEN2_SHARED: Any = {
    "language_model": LANGUAGE_MODELS["qwen2"],
    "text_defaults": QWEN2_DEFAULTS,
    "rotary_layout": "mrope",
    "mrope_sections": (16, 24, 24),
    "merger_names": ("ln_q", "mlp.0", "mlp.2"),
    "prefixes": ("visual.", "model."),
    "normalization": "clip",
    "pixel_range": (56 * 56, 28 * 28 * 16_384),
}
QWEN3_SHARED: Any = {
    "rotary_layout": "mrope_interleaved",
    "position_rule": "qwen3-vl",
    "out_size_key": "out_hidden_size",
    "merger_names": ("norm", "linear_fc1", "linear_fc2"),
    "prefixes": ("model.visual.", "model.language_model."),
    "normalization": "half",
    "pixel_range": (256 * 256, 4096 * 4096),
    "chat_config": ChatConfig(
        "Qwen3VLProcessor", "qwen2-vl", {"default_system": ""}, tokenizer_tokens=TOKENIZER_TOKENS
    ),
}
_QWEN2_VL: Any = {
    "tower": QWEN_VL_TOWERS["qwen2_vl"],
    "position_rule": "qwen2-vl",
    "out_size_key": "hidden_size",
    "chat_config": ChatConfig("Qwen2VLProcessor", "qwen2-vl", tokenizer_tokens=TOKENIZER_TOKENS),
}
_QWEN2_5_VL: Any = {
    "tower": QWEN_VL_TOWERS["qwen2_5_vl"],
    "position_rule": "qwen2.5-vl",
    "out_size_key": "out_hidden_size",
    "chat_config": ChatConfig("Qwen2_5_VLProcessor", "qwen2-vl", tokenizer_tokens=TOKENIZER_TOKENS),
}
QWEN_VL_VARIANTS = (
    QwenVLVariant("qwen2_vl", "Qwen2VLForConditionalGeneration", **_QWEN2_VL, **_QWEN2_SHARED),
    QwenVLVariant("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", **_QWEN2_5_VL, **_QWEN2_SHARED),
    QwenVLVariant(
        "qwen3_vl",
        "Qwen3VLForConditionalGeneration",
        language_model=LANGUAGE_MODELS["qwen3"],
        text_defaults=QWEN3_DEFAULTS,
        mrope_sections=(24, 20, 20),
        tower=QWEN_VL_TOWERS["qwen3_vl"],
        **QWEN3_SHARED,
    ),
    QwenVLVariant(
        "qwen3_vl_moe",
        "Qwen3VLMoeForConditionalGeneration",
        language_model=LANGUAGE_MODELS["qwen3_moe"],
        text_defaults=QWEN3_MOE_DEFAULTS,
        mrope_sections=(24, 20, 20),
        tower=QWEN_VL_TOWERS["qwen3_vl"],
        **QWEN3_SHARED,
    ),
)
DEFAULT_OUT_SIZE = 3584  # default output width of the merger


# ---- configs ----------------------------------------------------------------------------------------------------


def _read_config(variant: QwenVLVariant, hf_config: HFConfig) -> VLMConfig:
    vision = _read_part(hf_config, "vision_config", (variant.name, f"{variant.name}_vision"))
    _check_counts(vision)
    tower, decoder = variant.tower.from_hf_config(vision), _read_language_model(variant, hf_config)
    out_features, width = vision.get(variant.out_size_key) or DEFAULT_OUT_SIZE, decoder.block.width
    if out_features != width:
        raise CheckpointError(
            f"vision_config.{variant.out_size_key} is {out_features}, but the width of the language model is {width}",
            "use equal widths",
        )
    if tower.feature_layers:
        decoder = decoder.replace(fusion=DeepStackConfig(layer_indices=tuple(range(len(tower.feature_layers)))))
    normalization, min_pixels, max_pixels = NORMALIZATIONS[variant.normalization], *variant.pixel_range
    time_rules: HFConfig = (
        {"tokens_per_second": float(vision.get("tokens_per_second") or 4)}
        if variant.position_rule == "qwen2.5-vl"
        else {}
    )
    return VLMConfig(
        tower=tower,
        connector=_build_merger(tower, width),
        decoder=decoder,
        policy=NativePolicy(
            patch_size=tower.patch_size,
            merge_size=tower.spatial_merge_size,
            min_pixels=min_pixels,
            max_pixels=max_pixels,
        ),
        mean=normalization.mean,
        std=normalization.std,
        stack=_build_merger(tower, width, norm_position="after") if tower.feature_layers else None,
        rules=StreamRules(
            positions=variant.position_rule,
            vocab_size=decoder.vocab_size,
            fill_id=hf_config.get("image_token_id", variant.image_token_id),
            **time_rules,
        ),
        vision_token_ids={
            token: hf_config.get(f"{token}_token_id", default) for token, default in variant.vision_token_ids.items()
        },
    )


def _read_part(hf_config: HFConfig, key: str, names: tuple[str, ...]) -> HFConfig:
    """Return a part of config.json and check its model_type, if it has one."""
    settings = hf_config.get(key) or {}
    if settings.get("model_type", names[-1]) not in names:
        raise CheckpointError(f"{key}.model_type is {settings['model_type']!r}", f"expected: {names[-1]}")
    return settings


COUNT_KEYS = ("depth", "num_heads", "spatial_merge_size", "temporal_patch_size", "in_channels")
WIDTH_KEYS = ("embed_dim", "out_hidden_size", "window_size", "num_position_embeddings", "tokens_per_second")


def _check_counts(vision: HFConfig) -> None:
    """Check the keys that only these towers have; `hub.config_schema` checks all others."""
    for keys, max_value in ((COUNT_KEYS, MAX_COUNT), (WIDTH_KEYS, 2**20)):
        for key in keys:
            value = vision.get(key, 1)
            if value is not None and not (type(value) is int and 1 <= value <= max_value):
                raise CheckpointError(f"vision_config.{key} is {value!r}", f"give an integer in 1 … {max_value:,}")


def _read_language_model(variant: QwenVLVariant, hf_config: HFConfig) -> DecoderConfig:
    # Flat configs of the second generation.
    is_flat = variant.position_rule != "qwen3-vl" and hf_config.get("text_config") is None
    settings = hf_config if is_flat else _read_part(hf_config, "text_config", (f"{variant.name}_text",))
    text_config = fill_defaults(settings, variant.text_defaults)
    if settings.get("num_key_value_heads", 1) is None:
        text_config["num_key_value_heads"] = text_config["num_attention_heads"]
    if settings.get("sliding_window", 1) is None:
        text_config["sliding_window"] = None
    width, heads = text_config["hidden_size"], text_config["num_attention_heads"]
    text_config["head_dim"] = text_config.get("head_dim") or width // heads
    if variant.text_defaults is QWEN2_DEFAULTS and text_config["head_dim"] * heads != width:
        raise CheckpointError(f"{heads} heads of width {text_config['head_dim']} do not match hidden_size {width}")
    if variant.text_defaults is not QWEN2_DEFAULTS:
        if "sliding_attention" in (text_config.get("layer_types") or ()):
            reject_settings(settings, layer_types=f"{variant.name} has no sliding windows")
        reject_settings(text_config, use_sliding_window=f"{variant.name} has no sliding windows")
    rope = {**(text_config.pop("rope_scaling", None) or {}), **(text_config.get("rope_parameters") or {})}
    sections, interleaved = (
        rope.pop("mrope_section", variant.mrope_sections),
        variant.rotary_layout == "mrope_interleaved",
    )
    if rope.pop("mrope_interleaved", interleaved) != interleaved:
        raise CheckpointError(f"mrope_interleaved is {not interleaved}, but {variant.name} requires {interleaved}")
    for key in ("type", "rope_type"):
        if rope.get(key) == "mrope":  # older name; the sections imply it
            rope[key] = "default"
    tied = hf_config.get("tie_word_embeddings") or (interleaved is False and text_config.get("tie_word_embeddings"))
    renormalized = {"norm_topk_prob": True}  # always true for Qwen3-VL
    decoder = variant.language_model.from_hf_config(
        {**text_config, **renormalized, "rope_parameters": rope, "tie_word_embeddings": bool(tied)}
    )
    return decoder.replace(rotary=decoder.rotary.replace(layout=variant.rotary_layout, sections=tuple(sections)))


def _build_merger(tower: PackedViTConfig, width: int, **fields: Any) -> MergerConfig:
    norm = tower.block.norm
    return MergerConfig(
        in_features=tower.block.width,
        out_features=width,
        merge=tower.spatial_merge_size,
        norm=norm,
        order="blocks",
        **fields,
    )


def _write_config(variant: QwenVLVariant, config: VLMConfig) -> HFConfig:
    tower, decoder, rules = config.tower, config.decoder, config.rules
    if not isinstance(tower, PackedViTConfig) or not isinstance(config.policy, NativePolicy):
        raise ConfigError(f"{variant.name} needs a packed ViT and the policy Native")
    text_config = variant.language_model.to_hf_config(decoder)
    del text_config["architectures"], text_config["tie_word_embeddings"]  # keys of the top level
    text_config["rope_parameters"]["mrope_section"] = list(decoder.rotary.sections or ())
    if variant.rotary_layout == "mrope_interleaved":
        text_config["rope_parameters"]["mrope_interleaved"] = True
    vision_config = {**variant.tower.to_hf_config(tower), variant.out_size_key: config.connector.out_features}
    if variant.position_rule == "qwen2.5-vl":
        vision_config["tokens_per_second"] = round(rules.tokens_per_second)
    return {
        "architectures": [variant.architecture],
        "vision_config": {**vision_config, "model_type": f"{variant.name}_vision"},
        "text_config": {**text_config, "model_type": f"{variant.name}_text"},
        "image_token_id": rules.fill_id,
        **{f"{token}_token_id": id for token, id in (variant.vision_token_ids | config.vision_token_ids).items()},
        "tie_word_embeddings": decoder.tie_word_embeddings,
    }


def _normalize_config(variant: QwenVLVariant, config: VLMConfig) -> VLMConfig:
    """Return the equivalent config with all defaults filled in and the default position rule."""
    positions = config.rules.positions.removesuffix("/transformers")
    sampling, default_sampling = (
        config.resolved_video_sampling,
        config.replace(video_sampling=None).resolved_video_sampling,
    )
    if (
        sampling is not None and default_sampling is not None and sampling.rule == default_sampling.rule
    ):  # part of the video processor file
        config = config.replace(video_sampling=None)
    return config.replace(
        decoder=normalize_decoder_config(config.decoder),
        rules=config.rules.replace(positions=positions, vocab_size=config.decoder.vocab_size),
        vision_token_ids=variant.vision_token_ids | config.vision_token_ids,
    )


# ---- tensor rules -----------------------------------------------------------------------------------------------


def _build_rules(variant: QwenVLVariant, config: VLMConfig) -> list[TensorRule]:
    tower, (vision_prefix, language_prefix) = config.tower, variant.prefixes
    assert isinstance(tower, PackedViTConfig)
    merger = [
        *rename_layer("norm", variant.merger_names[0], tower.block.norm == "layer"),
        *rename_layer("layers.linears.0", variant.merger_names[1]),
        *rename_layer("layers.linears.1", variant.merger_names[2]),
    ]
    rules = add_prefix("tower.", vision_prefix, variant.tower.tensor_rules(tower)) + add_prefix(
        "connector.", f"{vision_prefix}merger.", merger
    )
    for k in range(len(tower.feature_layers)):
        rules += add_prefix(f"stack.{k}.", f"{vision_prefix}deepstack_merger_list.{k}.", merger)
    for rule in variant.language_model.tensor_rules(config.decoder):
        rules += add_prefix(
            "decoder.", "", [_add_language_prefix(_adapt_expert_rule(rule, config.decoder), language_prefix)]
        )
    return rules


def _add_language_prefix(rule: TensorRule, prefix: str) -> TensorRule:
    """Move the language model's names under its prefix; the head stays outside."""
    return rule.with_names(
        lambda name: name,
        lambda name: prefix + name.removeprefix("model.") if name.startswith("model.") else name,
    )


def _adapt_expert_rule(rule: TensorRule, config: DecoderConfig) -> TensorRule:
    """Adapt a rule to files with all experts in one tensor. That of Qwen3-VL is transposed in released files.

    transformers writes Qwen3.5 with one tensor for each expert, its authors with one for all.
    """
    prefix, separator, _ = rule.hf[0].partition(".mlp.experts.")
    mlp, width = config.block.mlp, config.block.width
    if not separator or not isinstance(mlp, MoEConfig):
        return rule
    is_up = rule.native[0].endswith("gate_up")
    shape = (
        (mlp.num_experts, 2 * mlp.intermediate_size, width)
        if is_up
        else (mlp.num_experts, width, mlp.intermediate_size)
    )
    return TensorRule(
        rule.native,
        (f"{prefix}.mlp.experts.{'gate_up' if is_up else 'down'}_proj",),
        lambda tensors: [x if tuple(x.shape) == shape else x.mT.contiguous() for x in tensors],
        list,
        alternative=rule,
    )


# Tensor names of newer transformers versions for the second generation.
NEWER_NAMES = (("visual.", "model.visual."), ("model.", "model.language_model."))


def build_qwen_vl_family(variant: QwenVLVariant) -> CheckpointFamily:
    """Build the family of a variant."""
    read_config, write_config, (_, language_prefix) = (
        partial(_read_config, variant),
        partial(_write_config, variant),
        variant.prefixes,
    )
    normalize = partial(_normalize_config, variant)
    return CheckpointFamily(
        variant.name,
        VLM,
        read_config,
        write_config,
        build_round_trip_check(read_config, write_config, normalize, image_processors.QWEN_VL),
        partial(_build_rules, variant),
        duplicate_tensors=(("lm_head.weight", f"{language_prefix}embed_tokens.weight"),),
        legacy_names=NEWER_NAMES if language_prefix == "model." else (),
        module_names=NEWER_NAMES if language_prefix == "model." else (),
        image_processor=image_processors.QWEN_VL,
        has_video_processor=True,
        chat_config=variant.chat_config,
        ignored_prefixes=variant.ignored_prefixes,
        part_defaults={"text_config": variant.text_defaults, "vision_config": variant.tower.class_defaults},
    )


QWEN2_VL, QWEN2_5_VL, QWEN3_VL, QWEN3_VL_MOE = map(build_qwen_vl_family, QWEN_VL_VARIANTS)
FAMILIES.register("qwen2_vl", QWEN2_VL)
FAMILIES.register("qwen2_5_vl", QWEN2_5_VL)
FAMILIES.register("qwen3_vl", QWEN3_VL)
FAMILIES.register("qwen3_vl_moe", QWEN3_VL_MOE)
