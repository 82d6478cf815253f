"""LLaVA-1.5 and LLaVA-NeXT of transformers: a tower, an MLP projector and a language model."""

from collections.abc import Callable
from typing import Any

from vitrail.connectors import ProjectorConfig
from vitrail.encoders.layer_selection import count_layers
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.chat_config import ChatConfig, VisionTokens
from vitrail.hub.checkpoint_family import ACTIVATIONS, CheckpointFamily, build_round_trip_check, fill_defaults
from vitrail.hub.decoder_families import DECODER_FAMILIES, normalize_decoder_config
from vitrail.hub.encoder_families import ENCODER_FAMILIES
from vitrail.hub.tensor_rules import TensorRule, add_prefix, rename_layer, view
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.processing import image_processors
from vitrail.processing.anyres import AnyResPolicy
from vitrail.processing.image_loading import NORMALIZATIONS
from vitrail.processing.resolution_policies import CropPolicy, NaivePolicy
from vitrail.registry import FAMILIES
from vitrail.stream import StreamRules

HFConfig = dict[str, Any]

VISION_TOWERS = {row.name: row for row in ENCODER_FAMILIES if row.name.endswith("vision_model")}
LANGUAGE_MODELS = {row.name: row for row in DECODER_FAMILIES}
TOWER_NORMALIZATION = {"clip_vision_model": "clip", "siglip_vision_model": "half"}
DEFAULT_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]

# Defaults of transformers for keys that a config.json leaves out.
DEFAULTS: HFConfig = {
    "image_token_index": 32_000,
    "projector_hidden_act": "gelu",
    "vision_feature_select_strategy": "default",
    "vision_feature_layer": -2,
    "multimodal_projector_bias": True,
}
NEXT_DEFAULTS: HFConfig = {**DEFAULTS, "image_grid_pinpoints": DEFAULT_PINPOINTS}
CLIP_L_336: HFConfig = {  # of a config.json without vision_config
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "patch_size": 14,
    "image_size": 336,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}


def read_part(
    hf_config: HFConfig, key: str, families: dict[str, CheckpointFamily], default: str
) -> tuple[CheckpointFamily, Any]:
    """Read a part of a model: its family and its config."""
    settings = hf_config.get(key) or {}
    name = settings.get("model_type") or default
    if name not in families:
        raise CheckpointError(f"{key}.model_type {name!r} is not supported", f"known: {', '.join(families)}")
    return families[name], families[name].from_hf_config(settings)


def find_part_family(config: Any, families: dict[str, CheckpointFamily]) -> CheckpointFamily:
    """Find the first family that a part can be written as."""
    for family in families.values():
        if family.supports(config):
            return family
    raise ConfigError(
        f"no family of transformers matches this {type(config).__name__}", f"known: {', '.join(families)}"
    )


def write_part(family: CheckpointFamily, config: Any) -> HFConfig:
    """Write the config of a part, with its model_type."""
    return {"model_type": family.name, **family.to_hf_config(config)}


def _read_config(hf_config: HFConfig) -> VLMConfig:
    if hf_config.get("image_token_id") is not None:  # the newer key
        hf_config = {**hf_config, "image_token_index": hf_config["image_token_id"]}
    hf_config = fill_defaults(hf_config, DEFAULTS)
    hf_config.setdefault("vision_config", CLIP_L_336)
    tower_family, tower = read_part(hf_config, "vision_config", VISION_TOWERS, "clip_vision_model")
    _, decoder = read_part(hf_config, "text_config", LANGUAGE_MODELS, "llama")
    if hf_config.get("tie_word_embeddings") and not decoder.tie_word_embeddings:  # either key is valid
        decoder = decoder.replace(tie_word_embeddings=True)
    strategy = hf_config["vision_feature_select_strategy"]
    if strategy not in ("default", "full"):
        raise CheckpointError(f"vision_feature_select_strategy is {strategy!r}", "known: default, full")
    layer = hf_config["vision_feature_layer"]
    layer = tuple(layer) if isinstance(layer, list) else layer
    # "default" drops the first token. SigLIP has no CLS token and needs "full".
    if (strategy == "full") != (tower.num_prefix_tokens == 0) and strategy == "default":
        raise CheckpointError("vision_feature_select_strategy 'default' would drop a patch: the tower has no CLS token")
    activation = hf_config["projector_hidden_act"]
    if activation not in ACTIVATIONS:
        raise CheckpointError(
            f"projector_hidden_act {activation!r} is not supported", f"known: {', '.join(ACTIVATIONS)}"
        )
    width = decoder.block.width
    connector = ProjectorConfig(
        in_features=tower.block.width * count_layers(layer),
        out_features=width,
        activation=ACTIVATIONS[activation],  # pyrefly: ignore
        bias=hf_config["multimodal_projector_bias"],
    )
    normalization = NORMALIZATIONS[TOWER_NORMALIZATION.get(tower_family.name, "half")]
    return VLMConfig(
        tower=tower,
        connector=connector,
        decoder=decoder,
        policy=_read_policy(hf_config, tower),
        mean=normalization.mean,
        std=normalization.std,
        vision_feature_layer=layer,
        keep_prefix_tokens=strategy == "full" and tower.num_prefix_tokens > 0,
        newline="image_grid_pinpoints" in hf_config or hf_config.get("model_type") == "llava_next",
        rules=StreamRules(fill_id=hf_config["image_token_index"]),
    )


def _read_policy(hf_config: HFConfig, tower: ViTConfig) -> CropPolicy | NaivePolicy | AnyResPolicy:
    unread = tower.image_size % tower.patch_size
    if hf_config.get("model_type") != "llava_next" and "image_grid_pinpoints" not in hf_config:
        if tower.num_prefix_tokens:
            return CropPolicy(image_size=tower.image_size, patch_size=tower.patch_size, unread_pixels=unread)
        return NaivePolicy(image_size=tower.image_size, patch_size=tower.patch_size, unread_pixels=unread)
    pinpoints = hf_config.get("image_grid_pinpoints") or DEFAULT_PINPOINTS
    invalid = [size for size in pinpoints if size[0] % tower.image_size or size[1] % tower.image_size]
    if invalid:
        raise CheckpointError(
            f"image_grid_pinpoints {invalid[0]} is not a multiple of the tile size {tower.image_size}"
        )
    grids = tuple((size[0] // tower.image_size, size[1] // tower.image_size) for size in pinpoints)
    return AnyResPolicy(tile_size=tower.image_size, patch_size=tower.patch_size, unread_pixels=unread, grids=grids)


def _write_config(config: VLMConfig) -> HFConfig:
    if not isinstance(config.tower, ViTConfig) or not isinstance(config.connector, ProjectorConfig):
        raise ConfigError("LLaVA needs a ViT and a projector")
    activation = next(name for name, native in ACTIVATIONS.items() if native == config.connector.activation)
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "vision_config": write_part(find_part_family(config.tower, VISION_TOWERS), config.tower),
        "text_config": write_part(find_part_family(config.decoder, LANGUAGE_MODELS), config.decoder),
        "image_token_index": config.rules.fill_id,
        "projector_hidden_act": activation,
        "multimodal_projector_bias": config.connector.bias,
        "vision_feature_layer": config.vision_feature_layer,
        "vision_feature_select_strategy": _get_select_strategy(config),
        "tie_word_embeddings": config.decoder.tie_word_embeddings,
    }


def _get_select_strategy(config: Any) -> str:
    return "full" if config.keep_prefix_tokens or not config.tower.num_prefix_tokens else "default"


def _write_processor_fields(config: Any, vision_tokens: VisionTokens) -> HFConfig:
    """Write the settings from which the processor computes the number of image tokens."""
    return {
        "patch_size": config.tower.patch_size,
        "num_additional_image_tokens": config.tower.num_prefix_tokens,
        "vision_feature_select_strategy": _get_select_strategy(config),
        **{f"{token}_token": vision_tokens[token] for token in ("image", "video") if token in vision_tokens},
    }


def _write_next(config: VLMConfig) -> HFConfig:
    if not isinstance(config.policy, AnyResPolicy):
        raise ConfigError("LLaVA-NeXT needs the policy AnyRes")
    return _write_config(config) | {
        "architectures": ["LlavaNextForConditionalGeneration"],
        "image_grid_pinpoints": image_processors.to_grid_pinpoints(config.policy),
    }


def _build_rules(config: VLMConfig) -> list[TensorRule]:
    tower_family, language_family = (
        find_part_family(config.tower, VISION_TOWERS),
        find_part_family(config.decoder, LANGUAGE_MODELS),
    )
    assert isinstance(config.connector, ProjectorConfig)
    rules = [
        *add_prefix("tower.", "vision_tower.vision_model.", tower_family.tensor_rules(config.tower)),
        *rename_layer("connector.layers.linears.0", "multi_modal_projector.linear_1", config.connector.bias),
        *rename_layer("connector.layers.linears.1", "multi_modal_projector.linear_2", config.connector.bias),
        *add_prefix("decoder.", "language_model.", language_family.tensor_rules(config.decoder)),
    ]
    width = config.decoder.block.width
    return [*rules, view("newline", "image_newline", (1, width), (width,))] if config.newline else rules


def check_grid_features(hf_config: HFConfig) -> None:
    """Raise an error if the tower's CLS token would be part of the features, which must form a grid."""
    if (
        hf_config["vision_feature_select_strategy"] == "full"
        and read_part(hf_config, "vision_config", VISION_TOWERS, "")[1].num_prefix_tokens
    ):
        raise CheckpointError(
            "vision_feature_select_strategy 'full' keeps the CLS token, which does not fit into a grid of tokens",
            "known for this tower: default",
        )


def read_video_token_id(hf_config: HFConfig, default: int) -> dict[str, int]:
    """Read the video token id."""
    return {"video": hf_config.get("video_token_id", hf_config.get("video_token_index", default))}


def build_video_normalizer(default_token_id: int) -> Callable[[VLMConfig], VLMConfig]:
    """Build `normalize_llava_config` for models with videos and a default video token."""

    def normalize(config: VLMConfig) -> VLMConfig:
        token_ids = {"video": default_token_id} | config.vision_token_ids
        # Video sampling is part of the processor file.
        return normalize_llava_config(config).replace(video_sampling=None, vision_token_ids=token_ids)

    return normalize


def normalize_llava_config(config: VLMConfig) -> VLMConfig:
    """Return the equivalent config with all defaults filled in."""
    policy = config.policy
    if isinstance(policy, CropPolicy) and policy.shortest_edge == policy.image_size:
        policy = policy.replace(shortest_edge=None)
    return config.replace(decoder=normalize_decoder_config(config.decoder), policy=policy)


# Names in files that transformers 4.52 and later wrote; the released files and exports have the older ones.
LEGACY_NAMES = (
    ("vision_tower.vision_model.", "vision_tower."),
    ("vision_tower.vision_model.", "model.vision_tower.vision_model."),
    ("vision_tower.vision_model.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
    ("image_newline", "model.image_newline"),
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head.", "lm_head."),
)
MODULE_NAMES = (("vision_tower.", "model.vision_tower."), *LEGACY_NAMES)
DUPLICATE_TENSORS = (
    ("language_model.lm_head.weight", "language_model.model.embed_tokens.weight"),
    ("lm_head.weight", "model.language_model.embed_tokens.weight"),
)

LLAVA = tuple(
    CheckpointFamily(
        name,
        VLM,
        _read_config,
        write,
        build_round_trip_check(_read_config, write, normalize_llava_config, default_image_size),
        _build_rules,
        duplicate_tensors=DUPLICATE_TENSORS,
        legacy_names=LEGACY_NAMES,
        module_names=MODULE_NAMES,
        image_processor=default_image_size,
        chat_config=ChatConfig(
            processor, "vicuna", processor_fields=_write_processor_fields, tokenizer_tokens={"image_token": "image"}
        ),
        variants=variants,
        class_defaults=defaults,
        part_defaults={"vision_config": CLIP_L_336},
    )
    for name, write, default_image_size, processor, variants, defaults in [
        ("llava", _write_config, image_processors.LLAVA, "LlavaProcessor", {"pixtral": "llava_pixtral"}, DEFAULTS),
        ("llava_next", _write_next, image_processors.LLAVA_NEXT, "LlavaNextProcessor", {}, NEXT_DEFAULTS),
    ]
)
LLAVA_15, LLAVA_NEXT = LLAVA
FAMILIES.register("llava", LLAVA_15)
FAMILIES.register("llava_next", LLAVA_NEXT)
