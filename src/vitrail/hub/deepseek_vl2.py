"""DeepSeek-VL2, tiny, small and base: SigLIP over tiles, an MLP of 2 × 2 features, and a DeepSeek-V2 of experts.

transformers has no such models; they follow the published code. Exports have the published layout, for which other
libraries need the code files of the original repository. The language model of tiny has ordinary attention, that of
base routes as DeepSeek-V3. The config names no image token: its id is that of <image> in the tokenizer's files.
"""

import math
from pathlib import Path
from typing import Any

from vitrail.backbones.decoder import DecoderConfig
from vitrail.connectors import MergerConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.chat_config import ChatConfig, VisionTokens
from vitrail.hub.checkpoint_family import CheckpointFamily, build_round_trip_check, fill_defaults, reject_settings
from vitrail.hub.decoder_config import build_decoder_rules, read_decoder_config, write_decoder_config
from vitrail.hub.deepseek_text import (
    V2_DEFAULTS,
    V2_ROUTING,
    build_deepseek_mlp_rules,
    read_deepseek,
    read_dense_layers,
    read_experts,
    write_deepseek,
    write_experts,
)
from vitrail.hub.encoder_families import build_patch_embed_rules
from vitrail.hub.llava import normalize_llava_config
from vitrail.hub.tensor_rules import TensorRule, add_prefix, permute_columns, rename, rename_layer, stack, view
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.nn import AttentionConfig, BlockConfig, MoEConfig, PlainMLPConfig
from vitrail.processing.image_layout import Size
from vitrail.processing.image_preprocessor import PROCESSOR_FILE
from vitrail.processing.image_processors import mean_to_fill_colour
from vitrail.processing.padded_tiles import PaddedTilesPolicy
from vitrail.processing.tokenizer_files import read_added_tokens, read_json
from vitrail.registry import FAMILIES
from vitrail.stream import StreamRules

HFConfig = dict[str, Any]

ARCHITECTURE = "DeepseekVLV2ForCausalLM"
IMAGE_TOKEN, IMAGE_TOKEN_KEY, IMAGE_TOKEN_ID = "<image>", "image_token_id", 128_815
NORMALIZATION_KEYS = ("image_mean", "image_std")  # of processor_config.json
TOWER_EPS = 1e-6

# Defaults of the published config classes.
DEFAULTS: HFConfig = {
    "tile_tag": "2D",
    "global_view_pos": "head",
    "candidate_resolutions": [[384, 384]],
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
VISION_DEFAULTS: HFConfig = {
    "image_size": 384,
    "patch_size": 16,
    "width": 1024,
    "layers": 24,
    "heads": 16,
    "mlp_ratio": 4,
    "global_pool": "map",
    "ignore_head": True,
    "class_token": False,
}
PROJECTOR_DEFAULTS: HFConfig = {
    "projector_type": "downsample_mlp_gelu",
    "input_dim": 1152,
    "n_embed": 2048,
    "depth": 2,
    "mlp_ratio": 1,
    "downsample_ratio": 2,
}
LANGUAGE_DEFAULTS: HFConfig = {
    **V2_DEFAULTS,
    "num_hidden_layers": 30,
    "num_key_value_heads": 32,
    "n_shared_experts": None,
    "n_routed_experts": None,
    "use_mla": True,
}


# ---- config -----------------------------------------------------------------------------------------------------


def _require(settings: HFConfig, part: str, **supported: Any) -> None:
    """Raise an error if a setting has no supported value."""
    for key, value in supported.items():
        if settings[key] != value:
            raise CheckpointError(f"{part}{key} is {settings[key]!r}", f"only {value!r} is supported")


def _read_config(hf_config: HFConfig) -> VLMConfig:
    architectures = hf_config.get("architectures") or [ARCHITECTURE]
    if architectures != [ARCHITECTURE]:  # DeepSeek-OCR has the same model_type
        raise CheckpointError(
            f"architectures is {architectures}, which is not supported", f"use a checkpoint of a {ARCHITECTURE}"
        )
    hf_config = fill_defaults(hf_config, DEFAULTS)
    _require(hf_config, "", tile_tag="2D", global_view_pos="head")
    tower, decoder = _read_tower(hf_config.get("vision_config") or {}), _read_language_model(hf_config)
    connector = _read_projector(hf_config.get("projector_config") or {}, tower, decoder)
    mean, std = (tuple(hf_config[key]) for key in NORMALIZATION_KEYS)
    token_id = hf_config.get(IMAGE_TOKEN_KEY)
    return VLMConfig(
        tower=tower,
        connector=connector,
        decoder=decoder,
        policy=PaddedTilesPolicy(
            fill_colour=mean_to_fill_colour(mean),
            tile_size=tower.image_size,
            patch_size=tower.patch_size,
            unread_pixels=tower.image_size % tower.patch_size,
            merge_size=connector.merge,
            grids=_read_grids(hf_config["candidate_resolutions"], tower.image_size),
        ),
        mean=mean,
        std=std,
        newline=True,
        rules=StreamRules(fill_id=min(IMAGE_TOKEN_ID, decoder.vocab_size - 1) if token_id is None else token_id),
    )


def _read_tower(vision: HFConfig) -> ViTConfig:
    vision = fill_defaults(vision, VISION_DEFAULTS)
    _require(vision, "vision_config.", ignore_head=True, class_token=False)
    pools = {"map": "attention", "": "none"}
    if vision["global_pool"] not in pools:
        raise CheckpointError(f"vision_config.global_pool is {vision['global_pool']!r}", "known: map")
    for key in ("width", "layers", "heads"):
        if not isinstance(vision[key], int):
            raise CheckpointError(f"vision_config.{key} is {vision[key]!r}", "give a number, as in DeepSeek-VL2")
    return ViTConfig(
        layers=vision["layers"],
        block=BlockConfig(
            width=vision["width"],
            attention=AttentionConfig(heads=vision["heads"], bias="all"),
            mlp=PlainMLPConfig(intermediate_size=int(vision["width"] * vision["mlp_ratio"]), activation="gelu_tanh"),
            eps=TOWER_EPS,
        ),
        image_size=vision["image_size"],
        patch_size=vision["patch_size"],
        pool=pools[vision["global_pool"]],  # pyrefly: ignore[bad-argument-type]
    )


def _read_projector(settings: HFConfig, tower: ViTConfig, decoder: DecoderConfig) -> MergerConfig:
    settings = fill_defaults(settings, PROJECTOR_DEFAULTS)
    reject_settings(settings, token_pooling="a linear layer that pools tokens is not supported")
    width = decoder.block.width
    _require(
        settings,
        "projector_config.",
        projector_type=PROJECTOR_DEFAULTS["projector_type"],
        depth=2,
        input_dim=tower.block.width,
        n_embed=width,
    )
    return MergerConfig(
        in_features=tower.block.width,
        out_features=width,
        merge=settings["downsample_ratio"],
        intermediate_size=width * settings["mlp_ratio"],
        norm_position="none",
    )


def _read_language_model(hf_config: HFConfig) -> DecoderConfig:
    language = {**LANGUAGE_DEFAULTS, **(hf_config.get("language_config") or {})}
    if language.get("model_type", "deepseek_v2") != "deepseek_v2":
        raise CheckpointError(f"language_config.model_type is {language['model_type']!r}", "known: deepseek_v2")
    if language["use_mla"]:
        return read_deepseek(language, V2_ROUTING)
    return read_decoder_config(language, mlp=read_experts(language, V2_ROUTING), **read_dense_layers(language))


def _read_grids(resolutions: Any, tile_size: int) -> tuple[Size, ...]:
    """Read candidate_resolutions, (width, height) in pixels, as (rows, columns) of tiles."""
    pairs = resolutions if isinstance(resolutions, list) else []
    if not pairs or any(
        not isinstance(pair, list)
        or len(pair) != 2
        or any(not isinstance(side, int) or side < 1 or side % tile_size for side in pair)
        for pair in pairs
    ):
        raise CheckpointError(
            f"candidate_resolutions is {resolutions!r:.80}", f"give (width, height) pairs of multiples of {tile_size}"
        )
    return tuple((height // tile_size, width // tile_size) for width, height in pairs)


def _write_config(config: VLMConfig) -> HFConfig:
    tower, connector, policy = config.tower, config.connector, config.policy
    if not (
        isinstance(tower, ViTConfig) and isinstance(connector, MergerConfig) and isinstance(policy, PaddedTilesPolicy)
    ):
        raise ConfigError("DeepSeek-VL2 needs a ViT, a merger and padded tiles")
    return {
        "architectures": [ARCHITECTURE],
        "vision_config": _write_tower(tower),
        "projector_config": {
            "model_type": "mlp_projector",
            "projector_type": PROJECTOR_DEFAULTS["projector_type"],
            "input_dim": connector.in_features,
            "n_embed": connector.out_features,
            "depth": connector.layers,
            "mlp_ratio": (connector.intermediate_size or connector.block_width) // connector.out_features,
            "downsample_ratio": connector.merge,
        },
        "language_config": _write_language_model(config.decoder),
        "candidate_resolutions": _write_resolutions(policy),
        "tile_tag": "2D",
        "global_view_pos": "head",
        # not used by the published code
        **dict(zip(NORMALIZATION_KEYS, map(list, (config.mean, config.std)), strict=True)),
        IMAGE_TOKEN_KEY: config.rules.fill_id,
    }


def _write_tower(tower: ViTConfig) -> HFConfig:
    width, hidden = tower.block.width, tower.block.mlp.intermediate_size
    return {
        "model_type": "vision",
        "image_size": tower.image_size,
        "patch_size": tower.patch_size,
        "width": width,
        "layers": tower.layers,
        "heads": tower.block.attention.heads,
        "mlp_ratio": _find_ratio(hidden, width),
        "global_pool": "map" if tower.pool == "attention" else "",
    }


def _find_ratio(hidden: int, width: int) -> float:
    """Find the shortest mlp_ratio that gives a hidden width, which readers round down."""
    ratios = (math.ceil(hidden / width * 10**digits) / 10**digits for digits in range(16))
    return next((ratio for ratio in ratios if int(width * ratio) == hidden), hidden / width)


def _write_language_model(decoder: DecoderConfig) -> HFConfig:
    experts = decoder.block.mlp
    if not isinstance(experts, MoEConfig):
        raise ConfigError("DeepSeek-VL2 needs a language model of experts")
    method = {"best": "group_limited_greedy", "two_best": "greedy"}[experts.group_score]
    shared = {
        "model_type": "deepseek_v2",
        "use_mla": decoder.block.attention.latent is not None,
        "topk_method": "noaux_tc" if experts.correction_bias else method,
        "scoring_func": experts.scoring,
    }
    if decoder.block.attention.latent is not None:
        return {**write_deepseek(decoder, "DeepseekV2ForCausalLM"), **shared}
    no_latent = {"q_lora_rank": None, "kv_lora_rank": None, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0}
    written = write_decoder_config(decoder, "DeepseekV2ForCausalLM", "head_dim")
    return {**written, **no_latent, "v_head_dim": 0, **write_experts(decoder), **shared}


def _write_resolutions(policy: PaddedTilesPolicy) -> list[list[int]]:
    return [[columns * policy.tile_size, rows * policy.tile_size] for rows, columns in policy.grids]


def _write_processor_fields(config: Any, vision_tokens: VisionTokens) -> HFConfig:
    """Write the settings of the published processor, which has no preprocessor_config.json."""
    return {
        "candidate_resolutions": _write_resolutions(config.policy),
        "patch_size": config.tower.patch_size,
        "downsample_ratio": config.connector.merge,
        **dict(zip(NORMALIZATION_KEYS, map(list, (config.mean, config.std)), strict=True)),
        "normalize": True,
        "image_token": vision_tokens.get("image", IMAGE_TOKEN),
        "add_special_token": False,
        "sft_format": "deepseek",
        "mask_prompt": True,
        "ignore_id": -100,
    }


def _add_settings(hf_config: HFConfig, folder: Path) -> HFConfig:
    """Add the normalization of the processor's file, and the id of the image token by the tokenizer's files."""
    tokens, processor = read_added_tokens(folder), read_json(folder / PROCESSOR_FILE)
    found = {key: processor[key] for key in NORMALIZATION_KEYS if processor.get(key) is not None}
    for key, levels in found.items():
        if not isinstance(levels, list) or len(levels) != 3 or not all(isinstance(x, int | float) for x in levels):
            raise CheckpointError(f"{folder / PROCESSOR_FILE}: {key} is {levels!r:.80}", "give three numbers")
    found |= {IMAGE_TOKEN_KEY: tokens[IMAGE_TOKEN]} if IMAGE_TOKEN in tokens else {}
    return {**hf_config, **found}


# ---- tensor rules -----------------------------------------------------------------------------------------------


def _build_tower_rules(config: ViTConfig) -> list[TensorRule]:
    W, rows = config.block.width, config.grid_size**2
    block = [
        *rename_layer("branches.self.norm", "norm1"),
        *rename_layer("branches.mlp.norm", "norm2"),
        *rename_layer("branches.self.op.qkv", "attn.qkv"),
        *rename_layer("branches.self.op.out", "attn.proj"),
        *rename_layer("branches.mlp.op.up", "mlp.fc1"),
        *rename_layer("branches.mlp.op.down", "mlp.fc2"),
    ]
    rules = [
        *build_patch_embed_rules(config, "patch_embed.proj"),
        view("positions.table", "pos_embed", (rows, W), (1, rows, W)),
        *rename_layer("norm_last", "norm"),
    ]
    for i in range(config.layers):
        rules += add_prefix(f"blocks.{i}.", f"blocks.{i}.", block)
    if config.pool == "attention":  # stored, and not used
        pool = {"attention.q": "q", "attention.kv": "kv", "attention.out": "proj"}
        pool |= {"mlp.norm": "norm", "mlp.op.up": "mlp.fc1", "mlp.op.down": "mlp.fc2"}
        rules.append(view("pooler.probe", "attn_pool.latent", (W,), (1, 1, W)))
        for native, hf in pool.items():
            rules += rename_layer(f"pooler.{native}", f"attn_pool.{hf}")
    return rules


def _build_rules(config: VLMConfig) -> list[TensorRule]:
    tower, connector = config.tower, config.connector
    assert isinstance(tower, ViTConfig) and isinstance(connector, MergerConfig)
    first, last = "connector.layers.linears.0", "connector.layers.linears.1"
    return [
        *add_prefix("tower.", "vision.", _build_tower_rules(tower)),
        # The columns are channels × patches of a block in the file, and patches × channels here.
        permute_columns(
            f"{first}.weight", "projector.layers.0.weight", (connector.in_features, connector.merge**2), (1, 0)
        ),
        rename(f"{first}.bias", "projector.layers.0.bias"),
        *rename_layer(last, "projector.layers.2"),
        stack("newline", ["image_newline", "view_seperator"]),  # misspelt in the files
        *add_prefix("decoder.", "language.", build_decoder_rules(config.decoder, build_deepseek_mlp_rules)),
    ]


DEEPSEEK_VL2 = CheckpointFamily(
    "deepseek_vl_v2",
    VLM,
    _read_config,
    _write_config,
    build_round_trip_check(_read_config, _write_config, normalize_llava_config),
    _build_rules,
    add_settings=_add_settings,
    chat_config=ChatConfig("DeepseekVLV2Processor", "deepseek-vl2", processor_fields=_write_processor_fields),
)
FAMILIES.register("deepseek_vl_v2", DEEPSEEK_VL2)
