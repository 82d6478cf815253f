"""The reference page of all recipe keys, generated from the configs: key, type, default and description."""

import inspect
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from vitrail.config import Config, describe_fields, list_registered_configs
from vitrail.data.scenes.config import SceneConfig
from vitrail.recipe.recipe_schema import Recipe
from vitrail.recipe.sweep import Sweep
from vitrail.registry import MODELS, TASKS

COMMON_DESCRIPTIONS = {
    "action_conditioning": "how actions enter: added to the codes of the frame, or as a token",
    "activation": "activation function",
    "alpha": "multiplier of low-rank updates, divided by the rank",
    "attention": "attention of the block",
    "attention_factor": "multiplier of the attention logits",
    "beta": "strength of the scale",
    "beta_fast": "rotations within the context above which a frequency does not change",
    "beta_slow": "rotations within the context below which a frequency is divided by the factor",
    "bias": "whether linear layers have a bias",
    "bits": "bits of a code",
    "block": "config of a transformer block",
    "causal": "whether tokens attend to earlier tokens only",
    "channels": "channels of the input",
    "checkpoint": "a folder, the name of a bundled model or a hub id",
    "cls_token_id": "id of the class token",
    "codebook_size": "number of codes",
    "codec": "config of the codec",
    "colours": "number of colours",
    "concepts": "number of concepts",
    "connector": "config of the connector",
    "context_length": "maximum number of tokens",
    "contextual_tokens": "number of merged tokens among those that remain",
    "decoder": "config of the decoder",
    "dense_mlp": "MLP of the layers without experts",
    "dim": "width of a code",
    "dynamics": "config of the dynamics model",
    "embed_dim": "width of the embeddings",
    "encoder": "config of the encoder",
    "enlarge_strips": "whether strips thinner than a block are enlarged to one",
    "eos_token_id": "id of the end token",
    "eps": "epsilon of the norms",
    "factor": "factor by which the context grows",
    "fill_colour": "colour of the padding, RGB in 0 … 255",
    "first_queries": "number of queries of the first question",
    "grids": "grids of tiles to choose from",
    "groups": "number of groups of channels, each with a codebook",
    "head_dim": "channels of an attention head",
    "heads": "number of attention heads",
    "high_freq_factor": "wavelengths below original_length / factor do not change",
    "high_res_size": "side of the larger view in pixels",
    "image": "config of the image tower",
    "image_size": "side of the image in pixels, or height and width",
    "important_fraction": "fraction of the remaining tokens that is selected by attention",
    "in_features": "width of the input features",
    "inner_norm": "norm before the output projection",
    "intermediate_size": "width of the hidden layer",
    "keep": "number of tokens that remain of each view",
    "latent": "config of the latent action model; none for known controls",
    "later_queries": "number of queries of each later question",
    "layer": "layer of the features; −2 is the output of the last but one block",
    "layer_indices": "layers that get the part, counted from 0",
    "layers": "number of layers",
    "levels": "number of levels of each channel",
    "log_scale": "initial logarithm of the logit scale",
    "longest_edge": "longer side of the resized image in pixels",
    "low_freq_factor": "wavelengths above original_length / factor are divided by the factor",
    "max_frames": "maximum number of frames",
    "max_height": "maximum height in pixels",
    "max_patches": "maximum number of patches",
    "max_pixels": "maximum number of pixels of an image",
    "max_side_patches": "maximum number of patches along a side",
    "max_slices": "maximum number of slices",
    "max_tiles": "maximum number of tiles",
    "max_tokens": "maximum number of tokens",
    "max_width": "maximum width in pixels",
    "mean": "mean of the pixel values, one for each channel",
    "merge": "side of the block of patches that becomes one token",
    "merge_size": "side of the block of patches that becomes one token",
    "min_frames": "minimum number of frames",
    "min_pixels": "minimum number of pixels of an image",
    "min_size": "minimum length of the short side in pixels",
    "min_tiles": "minimum number of tiles",
    "mlp": "config of the MLP",
    "momentum": "momentum of the running mean",
    "mscale": "factor of the attention scale, as in DeepSeek",
    "mscale_all_dim": "divisor of the attention scale, as in DeepSeek",
    "name": "name",
    "net": "config of encoder and decoder",
    "newline": "whether a learned token follows each row of patches",
    "norm": "kind of norm",
    "num_concepts": "number of concepts",
    "num_controls": "number of known controls; none for latent actions",
    "num_groups": "number of groups of experts",
    "num_latents": "number of learned queries",
    "num_queries": "number of learned queries",
    "num_special_concepts": "number of special concepts",
    "offset": "offset of the position",
    "original_length": "context length of the training",
    "out_features": "width of the output features",
    "output_projection": "whether the expert has its own attention output projection",
    "patch_bias": "whether the patch embedding has a bias",
    "patch_size": "side of a patch in pixels",
    "pre_quant": "map from features to the input of the quantizer",
    "qk_norm": "norm of queries and keys",
    "quantizer": "config of the quantizer",
    "rank": "rank of low-rank updates",
    "question_mode": "when the question is part of the input",
    "resample": "interpolation of the resize",
    "rotary": "rotary position embedding",
    "share": "fraction of the frequencies that rotates",
    "shift_factor": "offset of the latents for diffusion models",
    "shortest_edge": "shorter side of the resized image in pixels",
    "slice_size": "side of a slice in pixels",
    "spatial_window": "side of a pooled block of patches",
    "split": "whether images are cut into tiles",
    "std": "standard deviation of the pixel values, one for each channel",
    "takes_videos": "whether the policy accepts videos",
    "temporal_window": "number of pooled frames",
    "text": "config of the text tower",
    "theta": "base of the rotary frequencies",
    "tile_size": "side of a tile in pixels",
    "top_groups": "number of groups that a token can use",
    "tower": "config of the vision tower",
    "towers": "towers whose features are concatenated",
    "transformer": "config of the space-time transformer",
    "truncate": "whether the bounds of the interpolated channels are rounded",
    "unread_pixels": "pixels at the edge that no patch covers",
    "vit": "config of the ViT",
    "vlm": "config of the vision-language model",
    "vocab_size": "size of the vocabulary",
    "width": "number of channels",
    "widths": "channels at each resolution",
}
"""Key → description, for configs that do not describe the key themselves."""


def build_key_reference() -> Iterator[str]:
    """Yield the lines of a Markdown reference of all keys, one table for each config."""
    done: set[type[Config]] = set()

    def add_section(title: str, intro: str, configs: list[type[Config]]) -> Iterator[str]:
        yield from ("", f"## {title}", "", intro)
        for config in configs:
            if config not in done:
                done.add(config)
                yield from _build_table(config, config.__name__)

    yield from add_section(
        "Recipe", "The top level is [Recipe](#recipe-1).", [*_list_nested_configs(Recipe), SceneConfig]
    )
    yield from add_section("Sweep", "The top level is [Sweep](#sweep-1).", _list_nested_configs(Sweep))
    yield from ("", "## Task settings", "", "The keys of `[stages.settings]` depend on the task of the stage.")
    for task, spec in TASKS.items():
        if spec.settings_config is not Config:
            yield from _build_table(spec.settings_config, f"task `{task}`: {spec.settings_config.__name__}")
    kinds = ", ".join(f"`{kind}`: {model.Config.__name__}" for kind, model in MODELS.items())
    nested = [config for model in MODELS.values() for config in _list_nested_configs(model.Config)]
    yield from add_section("Model configs", f"The keys of `[model.config]` depend on `model.kind`. {kinds}.", nested)


def describe_keys(config: type[Config]) -> dict[str, str]:
    """Return the descriptions of all fields: from docstrings, or else the common description of the name."""
    found = describe_fields(config)
    return {name: found.get(name) or COMMON_DESCRIPTIONS.get(name, "") for name in config.__struct_fields__}


def _build_table(config: type[Config], title: str) -> Iterator[str]:
    tag, descriptions = config.__struct_config__.tag, describe_keys(config)
    yield from ("", f"### {title}", "")
    if summary := _summarize(config):
        yield from (summary, "")
    if tag is not None:
        yield from (f'`{config.__struct_config__.tag_field} = "{tag}"`', "")
    yield from ("| key | type | default | |", "|---|---|---|---|")
    for field in msgspec.structs.fields(config):
        default = "required" if field.required else _format_default(field)
        cells = (f"`{field.encode_name}`", _format_type(field.type), default, descriptions[field.name])
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _summarize(config: type[Config]) -> str:
    """Return the first paragraph of the docstring."""
    return " ".join(inspect.cleandoc(config.__dict__.get("__doc__") or "").partition("\n\n")[0].split())


def _format_default(field: Any) -> str:
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    value = value.to_dict() if isinstance(value, Config) else value
    if value is None:
        return "none"
    text = repr(list(value) if isinstance(value, tuple) else value)
    return f"`{text}`" if len(text) <= 60 else "see the code"


def _format_type(kind: Any) -> str:
    """Format a type as in TOML: text, whole number, number, true or false, list, table, choices."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _format_type(arguments[0]) + _format_limits(arguments[1])
    if origin is Literal:
        return " or ".join(f"`{argument!r}`".replace("'", '"') for argument in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_format_type(argument) for argument in arguments if argument is not NoneType)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return f"list of {len(arguments)}: {_format_type(arguments[0])}"
    if origin is tuple:
        return f"list: {_format_type(arguments[0])}"
    if origin is dict:
        return f"table: {_format_type(arguments[1])}"
    if configs := list_registered_configs(kind):
        return " or ".join(map(_format_link, configs))
    if isinstance(kind, type) and issubclass(kind, Config):
        return _format_link(kind)
    return {str: "text", int: "whole number", float: "number", bool: "true or false"}.get(kind, "any value")


def _format_link(config: type[Config]) -> str:
    name = config.__name__
    return f"[{name}](#{name.lower()})" if name not in ("Recipe", "Sweep") else name


def _format_limits(limits: msgspec.Meta) -> str:
    signs = {"≥": limits.ge, ">": limits.gt, "≤": limits.le, "<": limits.lt}
    return ",".join(f" {sign} {limit:,}" for sign, limit in signs.items() if limit is not None and limit < 2**31)


def _list_nested_configs(root: type[Config]) -> list[type[Config]]:
    """List a config and the configs of its fields, each once."""
    found: dict[type[Config], None] = {}

    def visit(kind: Any) -> None:
        if isinstance(kind, type) and issubclass(kind, Config) and not list_registered_configs(kind):
            if kind not in found and kind.__struct_fields__:
                found[kind] = None
                for field in msgspec.structs.fields(kind):
                    visit(field.type)
            return
        for part in (*get_args(kind), *list_registered_configs(kind)):
            visit(part)

    visit(root)
    return list(found)
