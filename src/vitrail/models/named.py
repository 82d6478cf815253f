"""Presets by name in plain data, a TOML table above all: a whole system, or a part of one, with changes laid over it.

    preset = "llava-1.5-7b"                        # a system, and over it:
    tower = "siglip-so400m-384"                    # another part
    decoder = { preset = "qwen2.5-7b", layers = 12 }
    connector = { layers = 3 }                     # the same part, altered

    without = ["layer"]                            # what the preset says, and shall not be said

A table whose `kind` (of a policy: `policy`) is another than that of what it is laid over takes its place. What the
connectors read and give need not be said: it is what stands before and behind them.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from vitrail.backbones.fusion import DeepStackConfig, ExpertConfig, PrefixConfig
from vitrail.backbones.presets import DECODERS
from vitrail.codecs.presets import CODECS
from vitrail.codecs.vit import ViTPairConfig
from vitrail.config import Config
from vitrail.connectors.presets import PRESETS as CONNECTORS
from vitrail.encoders import TiledViTConfig
from vitrail.encoders.presets import PACKED, SAMS, TILED, TOWERS, VITS
from vitrail.errors import ConfigError, nearest
from vitrail.models.presets import SYSTEMS, codes_of, encoder_of, vlm_named
from vitrail.models.vlm import VLMConfig
from vitrail.models.vlm_config import TowerConfig
from vitrail.processing.resolution import POLICIES
from vitrail.processing.resolution import PRESETS as FITTED

Plain = dict[str, Any]

_CODECS = [name for name, codec in CODECS.items() if isinstance(codec.net, ViTPairConfig)]
ENCODERS: dict[str, Config] = {**VITS, **{name: encoder_of(name) for name in _CODECS}}
CODES: dict[str, Config] = {f"{name}-codes": codes_of(name) for name in _CODECS}
"""A codec's encoder is a tower by the codec's name, and what its quantizer leaves of a picture one with `-codes`."""


def _of_systems(*way: str) -> dict[str, Config]:
    """A part of every system that has it."""
    found: dict[str, Any] = dict(SYSTEMS)
    for step in way:
        found = {name: part for name, whole in found.items() if (part := getattr(whole, step, None)) is not None}
    return found


TABLES: dict[tuple[str, ...], Callable[[], Mapping[str, Config]]] = {
    ("tower",): lambda: {**_of_systems("tower"), **TOWERS, **PACKED, **TILED, **CODES, **ENCODERS},
    ("tower", "encoder"): lambda: ENCODERS,
    ("tower", "towers", "vit"): lambda: ENCODERS,
    ("tower", "low", "vit"): lambda: ENCODERS,
    ("tower", "high"): lambda: SAMS,
    ("connector",): lambda: {**_of_systems("connector"), **CONNECTORS},
    ("stack",): lambda: {**_of_systems("stack"), **CONNECTORS},
    ("queries",): lambda: {**_of_systems("queries"), **CONNECTORS},
    ("decoder",): lambda: {**_of_systems("decoder"), **DECODERS},
    ("decoder", "fusion"): lambda: {
        **_of_systems("decoder", "fusion"),
        "prefix": PrefixConfig(),
        "expert": ExpertConfig(),
        "deepstack": DeepStackConfig(),
    },
    ("policy",): lambda: {**_of_systems("policy"), **{name: kind() for name, kind in POLICIES.items()}, **FITTED},
}
"""Where a name may stand, and the presets that it can be of: those of the part, and a system's own."""


def fill(data: Any) -> Any:
    """The plain data of a vision-language model with every preset in it written out; without one it is as it was."""
    if not isinstance(data, dict):
        return data
    base = vlm_named(str(data["preset"])).plain() if "preset" in data else {}
    filled = _laid(base, {key: value for key, value in data.items() if key != "preset"}, ())
    _fit(filled, data)
    return filled


def fill_model(model: Any) -> Any:
    """The same for [model] of a recipe: `preset` stands beside `config`, and says of which kind the model is."""
    if not isinstance(model, dict) or ("preset" not in model and model.get("kind") not in ("vlm", "looking-vlm")):
        return model
    filled, config = {key: value for key, value in model.items() if key != "preset"}, model.get("config", {})
    if "preset" in model:
        kind = "vlm" if isinstance(vlm_named(str(model["preset"])), VLMConfig) else "looking-vlm"
        if model.get("kind", kind) != kind:
            raise ConfigError(f"model.kind is {model['kind']!r}, and {model['preset']!r} is a {kind}", "leave kind out")
        filled["kind"], config = kind, {**config, "preset": model["preset"]}
    if "preset" in model or "config" in model:
        try:
            filled["config"] = fill(config)
        except ConfigError as error:
            raise ConfigError(f"model.config: {error.problem}", error.remedy) from None
    return filled


def spell_out(model: Any) -> None:
    """A part that is a name becomes a table with that preset, so that a dotted key leads into it."""
    config = model.get("config") if isinstance(model, dict) else None
    for way in TABLES:
        node = config
        for step in way[:-1]:
            node = node.get(step) if isinstance(node, dict) else None
        if isinstance(node, dict) and isinstance(node.get(way[-1]), str):
            node[way[-1]] = {"preset": node[way[-1]]}


def _laid(base: Any, over: Any, way: tuple[str, ...]) -> Any:
    """`over` laid over `base`, as deep as there are tables in both."""
    name = over if isinstance(over, str) else over.get("preset") if isinstance(over, dict) else None
    if way in TABLES and isinstance(name, str):
        base, over = _named(name, way), over if isinstance(over, dict) else {}
        over = {key: value for key, value in over.items() if key != "preset"}
    if isinstance(over, list | tuple):
        return type(over)(_laid({}, one, way) for one in over)
    if not isinstance(over, dict):
        return over
    others = any(over.get(tag, base.get(tag)) != base.get(tag) for tag in ("kind", "policy")) if base and way else False
    base = {} if others or not isinstance(base, dict) else base
    if base and "without" in over:  # TOML has no word for nothing
        unknown = [key for key in over["without"] if key not in base]
        if unknown:
            raise ConfigError(f"without names {unknown[0]!r}, which is not there", nearest(unknown[0], base))
        base = {key: value for key, value in base.items() if key not in over["without"]}
        over = {key: value for key, value in over.items() if key != "without"}
    return {**base, **{key: _laid(base.get(key), value, (*way, key)) for key, value in over.items()}}


def _named(name: str, way: tuple[str, ...]) -> Plain:
    table = TABLES[way]()
    if name not in table and way == ("tower",) and name.removesuffix("-codes") in CODECS:
        encoder_of(name.removesuffix("-codes"))  # which says why not
    if name not in table:
        raise ConfigError(f"{'.'.join(way)} is {name!r}, and no preset is called so", nearest(name, table))
    return table[name].plain()


def _fit(filled: Plain, said: Plain) -> None:
    """Give the connectors the widths that stand before and behind them, where none was said."""
    with contextlib.suppress(msgspec.ValidationError, ConfigError, KeyError, TypeError):  # reading says what is wrong
        tower: Any = msgspec.convert(filled["tower"], TowerConfig | TiledViTConfig)
        D, decoder, queries = (
            getattr(tower, "width", None) or tower.block.width,
            filled["decoder"],
            filled.get("queries"),
        )
        W = decoder.get("fusion", {}).get("context_width") or decoder["block"]["width"]
        between = W if queries is None else queries.get("reads", D)
        ways = {"connector": (D, between), "stack": (D, W), "queries": (between, W)}
        for name, widths in ways.items():
            own = said.get(name)
            own = own if isinstance(own, dict) else {}
            if isinstance(filled.get(name), dict):
                filled[name] |= {k: v for k, v in zip(("reads", "gives"), widths, strict=True) if k not in own}
