"""Expand preset names in plain data, such as a TOML table: whole models or parts, with overrides.

    preset = "llava-1.5-7b"                        # a whole model, and overrides:
    tower = "siglip-so400m-384"                    # another part
    decoder = { preset = "qwen2.5-7b", layers = 12 }
    connector = { layers = 3 }                     # changes to the same part

    without = ["vision_feature_layer"]             # keys of the preset to remove

A table with another `kind` (for a policy: `policy`) replaces the table of the preset. The input and output widths of
connectors need not be given: they follow from the parts before and after.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from vitrail.backbones.fusion import DeepStackConfig, PrefixFusionConfig, VisualExpertConfig
from vitrail.backbones.presets import DECODER_PRESETS
from vitrail.codecs.presets import CODEC_PRESETS
from vitrail.codecs.vit_autoencoder import ViTAutoencoderConfig
from vitrail.config import Config, convert_registered
from vitrail.connectors.presets import CONNECTOR_PRESETS as CONNECTORS
from vitrail.encoders.encoder import AnyEncoderConfig
from vitrail.encoders.layer_selection import count_layers
from vitrail.encoders.presets import (
    MULTI_TOWER_PRESETS,
    PACKED_VIT_PRESETS,
    SAM_PRESETS,
    TILED_VIT_PRESETS,
    VIT_PRESETS,
)
from vitrail.errors import ConfigError, suggest_name
from vitrail.models.presets import ALL_VLM_PRESETS, get_codec_encoder_config, get_codec_tower_config, get_vlm_config
from vitrail.models.vlm import VLMConfig
from vitrail.processing.resolution_policies import PRESETS as POLICY_PRESETS
from vitrail.registry import RESOLUTION_POLICIES

PlainConfig = dict[str, Any]

_VIT_CODECS = [name for name, codec in CODEC_PRESETS.items() if isinstance(codec.net, ViTAutoencoderConfig)]
ENCODER_PRESETS: dict[str, Config] = {**VIT_PRESETS, **{name: get_codec_encoder_config(name) for name in _VIT_CODECS}}
CODEC_TOWER_PRESETS: dict[str, Config] = {f"{name}-codes": get_codec_tower_config(name) for name in _VIT_CODECS}
"""Towers from codecs: the encoder has the codec's name, the tower of quantized codes the suffix `-codes`."""


def _parts_of_vlms(*way: str) -> dict[str, Config]:
    """Return a part of every model that has it, by model name."""
    parts: dict[str, Any] = dict(ALL_VLM_PRESETS)
    for step in way:
        parts = {name: part for name, config in parts.items() if (part := getattr(config, step, None)) is not None}
    return parts


PRESET_TABLES: dict[tuple[str, ...], Callable[[], Mapping[str, Config]]] = {
    ("tower",): lambda: {
        **_parts_of_vlms("tower"),
        **MULTI_TOWER_PRESETS,
        **PACKED_VIT_PRESETS,
        **TILED_VIT_PRESETS,
        **CODEC_TOWER_PRESETS,
        **ENCODER_PRESETS,
    },
    ("tower", "encoder"): lambda: ENCODER_PRESETS,
    ("tower", "towers", "vit"): lambda: ENCODER_PRESETS,
    ("tower", "low", "vit"): lambda: ENCODER_PRESETS,
    ("tower", "high"): lambda: SAM_PRESETS,
    ("connector",): lambda: {**_parts_of_vlms("connector"), **CONNECTORS},
    ("stack",): lambda: {**_parts_of_vlms("stack"), **CONNECTORS},
    ("queries",): lambda: {**_parts_of_vlms("queries"), **CONNECTORS},
    ("decoder",): lambda: {**_parts_of_vlms("decoder"), **DECODER_PRESETS},
    ("decoder", "fusion"): lambda: {
        **_parts_of_vlms("decoder", "fusion"),
        "prefix": PrefixFusionConfig(),
        "expert": VisualExpertConfig(),
        "deepstack": DeepStackConfig(),
    },
    ("policy",): lambda: {
        **_parts_of_vlms("policy"),
        **{name: kind() for name, kind in RESOLUTION_POLICIES.items()},
        **POLICY_PRESETS,
    },
}
"""Paths where a preset name is allowed, and the presets there: those of the part and those of whole models."""


def expand_presets(data: Any) -> Any:
    """Expand all presets in the plain data of a vision-language model; data without presets is unchanged."""
    if not isinstance(data, dict):
        return data
    base = get_vlm_config(str(data["preset"])).to_dict() if "preset" in data else {}
    filled = _merge_over(base, {key: value for key, value in data.items() if key != "preset"}, ())
    _fill_connector_widths(filled, data)
    return filled


def expand_model_presets(model: Any) -> Any:
    """Expand presets in [model] of a recipe, where `preset` is next to `config` and determines the model kind."""
    if not isinstance(model, dict) or (
        "preset" not in model and model.get("kind") not in ("vlm", "cross-attention-vlm")
    ):
        return model
    filled, config = {key: value for key, value in model.items() if key != "preset"}, model.get("config", {})
    if "preset" in model:
        kind = "vlm" if isinstance(get_vlm_config(str(model["preset"])), VLMConfig) else "cross-attention-vlm"
        if model.get("kind", kind) != kind:
            raise ConfigError(
                f"model.kind is {model['kind']!r}, but preset {model['preset']!r} is a {kind}", "remove kind"
            )
        filled["kind"], config = kind, {**config, "preset": model["preset"]}
    if "preset" in model or "config" in model:
        try:
            filled["config"] = expand_presets(config)
        except ConfigError as error:
            raise ConfigError(f"model.config: {error.problem}", error.remedy) from None
    return filled


def expand_part_names(model: Any) -> None:
    """Replace parts that are preset names by tables with that preset, so that dotted keys can change them."""
    config = model.get("config") if isinstance(model, dict) else None
    for way in PRESET_TABLES:
        node = config
        for step in way[:-1]:
            node = node.get(step) if isinstance(node, dict) else None
        if isinstance(node, dict) and isinstance(node.get(way[-1]), str):
            node[way[-1]] = {"preset": node[way[-1]]}


def _merge_over(base: Any, over: Any, way: tuple[str, ...]) -> Any:
    """Merge `over` into `base` recursively."""
    name = over if isinstance(over, str) else over.get("preset") if isinstance(over, dict) else None
    if way in PRESET_TABLES and isinstance(name, str):
        base, over = _get_preset(name, way), over if isinstance(over, dict) else {}
        over = {key: value for key, value in over.items() if key != "preset"}
    if isinstance(over, list | tuple):
        return type(over)(_merge_over({}, one, way) for one in over)
    if not isinstance(over, dict):
        return over
    others = any(over.get(tag, base.get(tag)) != base.get(tag) for tag in ("kind", "policy")) if base and way else False
    base = {} if others or not isinstance(base, dict) else base
    if base and "without" in over:  # TOML has no null value
        unknown = [key for key in over["without"] if key not in base]
        if unknown:
            raise ConfigError(f"without has the unknown key {unknown[0]!r}", suggest_name(unknown[0], base))
        base = {key: value for key, value in base.items() if key not in over["without"]}
        over = {key: value for key, value in over.items() if key != "without"}
    return {**base, **{key: _merge_over(base.get(key), value, (*way, key)) for key, value in over.items()}}


def _get_preset(name: str, way: tuple[str, ...]) -> PlainConfig:
    table = PRESET_TABLES[way]()
    if name not in table and way == ("tower",) and name.removesuffix("-codes") in CODEC_PRESETS:
        get_codec_encoder_config(name.removesuffix("-codes"))  # raises with the reason
    if name not in table:
        raise ConfigError(f"{'.'.join(way)} is {name!r}, which is not a preset", suggest_name(name, table))
    return table[name].to_dict()


def _fill_connector_widths(config_table: PlainConfig, given_config: PlainConfig) -> None:
    """Set the input and output widths of connectors that were not given."""
    errors = (msgspec.ValidationError, ConfigError, LookupError, TypeError, AttributeError)
    with contextlib.suppress(*errors):  # data of the wrong type; reported when it is read
        tower = msgspec.convert(config_table["tower"], AnyEncoderConfig, dec_hook=convert_registered)
        layer, decoder = config_table.get("vision_feature_layer"), config_table["decoder"]
        queries = config_table.get("queries")
        D = tower.width * count_layers(tuple(layer) if isinstance(layer, list) else layer)
        W = decoder.get("fusion", {}).get("context_width") or decoder["block"]["width"]
        between = W if queries is None else queries.get("in_features", D)
        connectors = {"connector": (D, between), "stack": (D, W), "queries": (between, W)}
        for name, widths in connectors.items():
            own = given_config.get(name)
            own = own if isinstance(own, dict) else {}
            if isinstance(config_table.get(name), dict):
                keys = ("in_features", "out_features")
                config_table[name] |= {k: v for k, v in zip(keys, widths, strict=True) if k not in own}
