"""Fuyu: patches of images of any size are projected to tokens of Persimmon, without a vision encoder.

The released config names neither the image token, |SPEAKER|, nor the newline token, |NEWLINE|. Their ids are read from
the tokenizer's files if they list these tokens, and are otherwise those of the released tokenizer.
"""

from pathlib import Path
from typing import Any

from vitrail.connectors import ProjectorConfig
from vitrail.encoders.patch_tower import PatchTowerConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.chat_config import ChatConfig
from vitrail.hub.checkpoint_family import CheckpointFamily, build_round_trip_check, fill_defaults
from vitrail.hub.llava import LEGACY_NAMES, normalize_llava_config
from vitrail.hub.persimmon import PERSIMMON
from vitrail.hub.tensor_rules import TensorRule, add_prefix, rename_layer
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.models.vlm_config import NEWLINE_TOKEN
from vitrail.processing.image_loading import NORMALIZATIONS
from vitrail.processing.image_processors import HFImageProcessor
from vitrail.processing.shrink_to_fit import ShrinkPolicy
from vitrail.processing.tokenizer_files import FUYU_IMAGE_TOKEN, FUYU_NEWLINE_TOKEN, read_added_tokens
from vitrail.registry import FAMILIES
from vitrail.stream import StreamRules

HFConfig = dict[str, Any]

NEWLINE_KEY = "image_newline_id"
TOKEN_KEYS = {FUYU_IMAGE_TOKEN: "image_token_id", FUYU_NEWLINE_TOKEN: NEWLINE_KEY}
NEWLINE_ID = 71_019  # in the released tokenizer
DEFAULTS: HFConfig = {  # of transformers
    "image_size": 300,
    "patch_size": 30,
    "num_channels": 3,
    "tie_word_embeddings": False,
    "image_token_id": 71_011,
}
TEXT_KEYS = (*PERSIMMON.class_defaults, "rope_theta", "rope_scaling", "rope_parameters")


def _read_config(hf_config: HFConfig) -> VLMConfig:
    hf_config = fill_defaults(hf_config, DEFAULTS)
    text = {key: hf_config[key] for key in TEXT_KEYS if key in hf_config}  # old files list these keys themselves
    text |= {key: value for key, value in (hf_config.get("text_config") or {}).items() if key != "tie_word_embeddings"}
    decoder, patch_size = PERSIMMON.from_hf_config(text), hf_config["patch_size"]
    tower = PatchTowerConfig(
        image_size=hf_config["image_size"], patch_size=patch_size, channels=hf_config["num_channels"]
    )
    height, width = (side // patch_size * patch_size for side in (1080, 1920))
    return VLMConfig(
        tower=tower,
        connector=ProjectorConfig(in_features=tower.width, out_features=decoder.block.width, layers=1),
        decoder=decoder,
        policy=ShrinkPolicy(patch_size=patch_size, max_height=height, max_width=width),
        mean=NORMALIZATIONS["half"].mean,
        std=NORMALIZATIONS["half"].std,
        rules=StreamRules(fill_id=hf_config["image_token_id"]),
        vision_token_ids={NEWLINE_TOKEN: hf_config.get(NEWLINE_KEY, NEWLINE_ID)},
    )


def _write_config(config: VLMConfig) -> HFConfig:
    if not isinstance(config.tower, PatchTowerConfig) or not isinstance(config.connector, ProjectorConfig):
        raise ConfigError("Fuyu needs a patch tower and a projector")
    text = PERSIMMON.to_hf_config(config.decoder)
    return {
        **{key: value for key, value in text.items() if key in TEXT_KEYS},  # as in the released file
        "architectures": ["FuyuForCausalLM"],
        "text_config": {"model_type": PERSIMMON.name, **text},
        "image_size": config.tower.image_size,
        "patch_size": config.tower.patch_size,
        "num_channels": config.tower.channels,
        "image_token_id": config.rules.fill_id,
        NEWLINE_KEY: config.vision_token_ids.get(NEWLINE_TOKEN),  # not used by transformers
    }


def _add_tokens(hf_config: HFConfig, folder: Path) -> HFConfig:
    """Add the ids that the config lacks, if the tokenizer's files list the tokens among the added ones."""
    tokens = read_added_tokens(folder)
    return {key: tokens[token] for token, key in TOKEN_KEYS.items() if token in tokens} | hf_config


def _build_rules(config: VLMConfig) -> list[TensorRule]:
    return [
        *rename_layer("connector.layers.linears.0", "vision_embed_tokens"),
        *add_prefix("decoder.", "language_model.", PERSIMMON.tensor_rules(config.decoder)),
    ]


# ---- image processor --------------------------------------------------------------------------------------------


class FuyuImageProcessor(HFImageProcessor):
    """Image processor of Fuyu: one number for all channels, and other keys of the size in old files."""

    def apply_processor_config(self, config: Any, processor_config: HFConfig) -> Any:
        json_config = self.to_processor_config(config) | processor_config
        for key in ("image_mean", "image_std"):
            if isinstance(json_config.get(key), float | int):
                json_config[key] = [json_config[key]] * 3
        if "target_height" in json_config and "target_width" in json_config:
            json_config["size"] = {"height": json_config["target_height"], "width": json_config["target_width"]}
        return super().apply_processor_config(config, json_config)

    def to_processor_config(self, config: Any) -> HFConfig:
        written = super().to_processor_config(config)
        for key in ("image_mean", "image_std"):
            if len(set(written[key])) == 1:  # as transformers writes it
                written[key] = written[key][0]
        return written


def _parse_shrink(config: Any, json_config: HFConfig) -> ShrinkPolicy:
    for key, value in _format_shrink(config).items():
        if key in ("do_pad", "padding_mode", "patch_size") and json_config[key] != value:
            raise CheckpointError(f"{key} is {json_config[key]!r}", f"the model needs {value!r}")
    size, padding = json_config["size"], json_config["padding_value"]
    if not isinstance(size, dict) or not all(isinstance(size.get(key), int) for key in ("height", "width")):
        raise CheckpointError(f"size is {size!r}", "give height and width in pixels")
    if padding != int(padding) or not 0 <= padding <= 255:
        raise CheckpointError(f"padding_value is {padding!r}", "give an integer of 0 … 255")
    colour = (int(padding),) * 3
    return config.policy.replace(max_height=size["height"], max_width=size["width"], fill_colour=colour)


def _format_shrink(config: Any) -> HFConfig:
    policy = config.policy
    if len(set(policy.fill_colour)) != 1:
        raise ConfigError(f"fill_colour is {policy.fill_colour}", "Fuyu pads with one value for all channels")
    return {
        "size": {"height": policy.max_height, "width": policy.max_width},
        "patch_size": {"height": policy.patch_size, "width": policy.patch_size},
        "do_pad": True,
        "padding_mode": "constant",
        "padding_value": float(policy.fill_colour[0]),
    }


IMAGE_PROCESSOR = FuyuImageProcessor("FuyuImageProcessor", (ShrinkPolicy,), _parse_shrink, _format_shrink)
FUYU = CheckpointFamily(
    "fuyu",
    VLM,
    _read_config,
    _write_config,
    build_round_trip_check(_read_config, _write_config, normalize_llava_config, IMAGE_PROCESSOR),
    _build_rules,
    legacy_names=(*LEGACY_NAMES, ("vision_embed_tokens.", "model.vision_embed_tokens.")),
    image_processor=IMAGE_PROCESSOR,
    add_settings=_add_tokens,
    chat_config=ChatConfig("FuyuProcessor", "fuyu", takes_chat_template=False),
    class_defaults=DEFAULTS,
)
FAMILIES.register("fuyu", FUYU)
