"""MiniCPM-V 2.5, 2.6, 4 and 4.5: SigLIP over slices of an image, a resampler, and Llama, Qwen2 or Qwen3.

transformers has no such models; they follow the published code. Exports have the published layout, for which other
libraries need the code files of the original repository. The config names no image token: it is <unk>, which no text
contains, and whose id is read from the tokenizer's files.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vitrail.connectors import GridResamplerConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.chat_config import ChatConfig
from vitrail.hub.checkpoint_family import CheckpointFamily, build_round_trip_check, fill_defaults, reject_settings
from vitrail.hub.decoder_families import LLAMA, QWEN2, QWEN3
from vitrail.hub.encoder_families import SIGLIP_VISION
from vitrail.hub.llava import find_part_family, normalize_llava_config
from vitrail.hub.tensor_rules import TensorRule, add_prefix, rename, rename_layer, split, transpose
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.processing import image_processors
from vitrail.processing.image_layout import ImageLayout
from vitrail.processing.image_loading import NORMALIZATIONS
from vitrail.processing.slices import SlicePolicy
from vitrail.processing.tokenizer_files import read_added_tokens
from vitrail.registry import FAMILIES
from vitrail.stream import StreamRules

HFConfig = dict[str, Any]

IMAGE_TOKEN, IMAGE_TOKEN_KEY = "<unk>", "unk_token_id"
HEAD_DIM = 128  # of the resampler; fixed, not part of the config
LANGUAGE_MODELS = {"2.5": LLAMA, "2.6": QWEN2, "4.0": LLAMA, "4.5": QWEN3}
TOWER_MODEL_TYPES = {"2.5": "idefics2", "2.6": "siglip"}  # siglip_vision_model in later versions

# Defaults of the published config class.
DEFAULTS: HFConfig = {
    "query_num": 64,
    "drop_vision_last_layer": True,
    "slice_mode": True,
    "use_image_id": True,
}
SLICE_DEFAULTS: HFConfig = {"max_slice_nums": 9, "scale_resolution": 448}


def _get_version(hf_config: HFConfig) -> str:
    version = str(hf_config.get("version", "2"))
    if version not in LANGUAGE_MODELS:
        raise CheckpointError(
            f"version {version} of MiniCPM-V is not supported", f"known: {', '.join(LANGUAGE_MODELS)}"
        )
    return version


def _read_config(hf_config: HFConfig) -> VLMConfig:
    version, hf_config = _get_version(hf_config), fill_defaults(hf_config, DEFAULTS)
    slices = fill_defaults(hf_config.get("slice_config") or {}, SLICE_DEFAULTS)
    if not hf_config["slice_mode"]:
        raise CheckpointError("slice_mode is false", "set it to true; limit the slices by slice_config.max_slice_nums")
    reject_settings(hf_config, init_audio="audio is not supported")
    vision = {**hf_config["vision_config"], "vision_use_head": False}
    if hf_config["drop_vision_last_layer"]:
        vision["num_hidden_layers"] -= 1
    tower = SIGLIP_VISION.from_hf_config(vision).replace(position_interpolation="bucket")
    decoder = LANGUAGE_MODELS[version].from_hf_config(hf_config)
    width, normalization = decoder.block.width, NORMALIZATIONS["half"]
    return VLMConfig(
        tower=tower,
        connector=GridResamplerConfig(
            in_features=tower.width,
            out_features=width,
            num_queries=hf_config["query_num"],
            heads=max(width // HEAD_DIM, 1),
        ),
        decoder=decoder,
        policy=SlicePolicy(
            slice_size=slices["scale_resolution"],
            patch_size=tower.patch_size,
            max_slices=slices["max_slice_nums"],
            numbered=version != "2.5" and hf_config["use_image_id"],
        ),
        mean=normalization.mean,
        std=normalization.std,
        rules=StreamRules(fill_id=hf_config.get(IMAGE_TOKEN_KEY, 0)),
    )


def _write_config(config: VLMConfig, versions: tuple[str, ...]) -> HFConfig:
    tower, connector, policy = config.tower, config.connector, config.policy
    if not (
        isinstance(tower, ViTConfig)
        and isinstance(connector, GridResamplerConfig)
        and isinstance(policy, SlicePolicy)
        and tower.pool == "none"
    ):
        raise ConfigError("MiniCPM-V needs a ViT without pooling, slices and a grid resampler")
    family = find_part_family(
        config.decoder, {LANGUAGE_MODELS[version].name: LANGUAGE_MODELS[version] for version in versions}
    )
    version = next(version for version in versions if LANGUAGE_MODELS[version] is family)
    tower_type = TOWER_MODEL_TYPES.get(version, SIGLIP_VISION.name)
    vision = SIGLIP_VISION.to_hf_config(tower)
    return {
        **family.to_hf_config(config.decoder),
        "architectures": ["MiniCPMV"],
        "version": version if version == "2.5" else float(version),
        "vision_config": {
            key: value for key, value in vision.items() if key not in ("architectures", "vision_use_head")
        }
        | {"model_type": tower_type},
        "query_num": connector.num_queries,
        "patch_size": tower.patch_size,
        "image_size": policy.slice_size,
        "drop_vision_last_layer": False,
        "slice_mode": True,
        "slice_config": {
            "model_type": "minicpmv",
            "patch_size": tower.patch_size,
            "max_slice_nums": policy.max_slices,
            "scale_resolution": policy.slice_size,
        },
        "use_image_id": policy.numbered,
        IMAGE_TOKEN_KEY: config.rules.fill_id,  # not used by the published code
    }


def _add_image_token(hf_config: HFConfig, folder: Path) -> HFConfig:
    """Add the id of the image token, if the folder has a file of the tokenizer with it."""
    tokens = read_added_tokens(folder)
    return {**hf_config, IMAGE_TOKEN_KEY: tokens[IMAGE_TOKEN]} if IMAGE_TOKEN in tokens else hf_config


def _build_rules(config: VLMConfig) -> list[TensorRule]:
    connector, tower = config.connector, config.tower
    assert isinstance(connector, GridResamplerConfig)
    assert isinstance(tower, ViTConfig)
    width, attention = connector.out_features, "connector.attention"
    language_family = find_part_family(config.decoder, {family.name: family for family in LANGUAGE_MODELS.values()})
    rules = [
        *add_prefix("tower.", "vpm.", SIGLIP_VISION.tensor_rules(tower)),
        rename("connector.queries", "resampler.query"),
        *rename_layer("connector.query_norm", "resampler.ln_q"),
        *rename_layer("connector.context_norm", "resampler.ln_kv"),
        *rename_layer("connector.norm", "resampler.ln_post"),
        *(
            split(
                [f"{attention}.q.{part}", f"{attention}.kv.{part}"],
                f"resampler.attn.in_proj_{part}",
                [width, 2 * width],
            )
            for part in ("weight", "bias")
        ),
        *rename_layer(f"{attention}.out", "resampler.attn.out_proj"),
        transpose("connector.proj.weight", "resampler.proj"),
        *add_prefix("decoder.", "llm.", language_family.tensor_rules(config.decoder)),
    ]
    if connector.in_features != width:
        rules += rename_layer("connector.width_proj", "resampler.kv_proj", bias=False)
    return rules


def write_slice_text(layout: ImageLayout, number: int) -> list[str]:
    """Write the texts before each view of an image, and after the last one. Rows of slices are lines."""
    texts, columns = [f"<image_id>{number}</image_id><image>"], _count_columns(layout)
    for n in range(len(layout.views) - 1):
        end = "</image>" if n == 0 else "</slice>"
        texts.append(end + "\n" * (n > 0 and n % columns == 0) + "<slice>")
    return [*texts, "</slice>" if len(layout.views) > 1 else "</image>"]


def write_nested_slice_text(layout: ImageLayout, number: int) -> list[str]:
    """Write the texts of version 2.5: each slice is written like an image, and one tag encloses all slices."""
    texts, columns = ["<image>"], _count_columns(layout)
    for n in range(len(layout.views) - 1):
        line_end = "\n" * (n > 0 and n % columns == 0)
        texts.append("</image>" + ("<slice>" if n == 0 else line_end) + "<image>")
    return [*texts, "</image>" + "</slice>" * (len(layout.views) > 1)]


def _count_columns(layout: ImageLayout) -> int:
    """Count the columns of slices."""
    last = layout.views[-1]
    return last.resized_size[1] // last.canvas_size[1]


def _make_family(
    versions: tuple[str, ...], image_text: Callable[[ImageLayout, int], list[str]], variants: dict[str, str]
) -> CheckpointFamily:
    is_numbered = image_text is write_slice_text

    def write(config: VLMConfig) -> HFConfig:
        if isinstance(config.policy, SlicePolicy) and config.policy.numbered != is_numbered:
            raise ConfigError(f"policy.numbered is {config.policy.numbered}", f"set it to {is_numbered}")
        return _write_config(config, versions)

    return CheckpointFamily(
        "minicpmv",
        VLM,
        _read_config,
        write,
        build_round_trip_check(_read_config, write, normalize_llava_config, image_processors.MINICPMV),
        _build_rules,
        image_processor=image_processors.MINICPMV,
        add_settings=_add_image_token,
        variants=variants,
        chat_config=ChatConfig(
            "MiniCPMVProcessor",
            "minicpm-v",
            image_boundary_tokens=("<image>", "</image>"),
            image_text=image_text,
            end_of_turn="<|im_end|>" if is_numbered else "<|eot_id|>",
            takes_chat_template=False,
        ),
    )


MINICPMV = _make_family(("2.6", "4.0", "4.5"), write_slice_text, {"idefics2": "minicpmv-2.5"})
MINICPMV_25 = _make_family(("2.5",), write_nested_slice_text, {})
FAMILIES.register("minicpmv", MINICPMV)
FAMILIES.register("minicpmv-2.5", MINICPMV_25)
