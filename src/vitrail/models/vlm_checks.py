"""Checks of a `VLMConfig`: which parts of a vision-language model fit together. All run before a module is built."""

from typing import TYPE_CHECKING

from vitrail.backbones.fusion import DeepStackConfig
from vitrail.connectors import FusedQueryConfig
from vitrail.connectors.feature_reduction import check_scores_readable
from vitrail.encoders.layer_selection import resolve_depth
from vitrail.encoders.packed_vit import PackedViTConfig
from vitrail.encoders.patch_tower import PatchTowerConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import ConfigError
from vitrail.processing.grid import Grid
from vitrail.processing.image_layout import ImageLayout
from vitrail.processing.overlapping_tiles import OverlapPolicy
from vitrail.stream import POSITION_RULES

if TYPE_CHECKING:
    from vitrail.models.vlm_config import VLMConfig


def check_vlm_config(config: "VLMConfig") -> None:
    """Raise if parts of the config do not fit together."""
    D, W = config.width, config.decoder.block.width
    between = W if config.queries is None else config.queries.in_features
    connectors = {
        "connector": (config.connector, D, between),
        "stack": (config.stack, D, W),
        "queries": (config.queries, between, W),
    }
    for name, (connector, input_width, output_width) in connectors.items():
        if connector is not None and (connector.in_features, connector.out_features) != (input_width, output_width):
            raise ConfigError(
                f"{name} has in_features {connector.in_features} and out_features {connector.out_features}, "
                f"but the model needs "
                f"{input_width} and {output_width}",
                f"set {name}.in_features = {input_width} and {name}.out_features = {output_width}",
            )
    if isinstance(config.connector, FusedQueryConfig):
        raise ConfigError(
            "connector is a fused query connector, which needs another connector before it",
            "set it as `queries`, and choose another connector",
        )
    config.check_fusion()
    _check_video_sampling(config)
    if config.temporal_pooling > 1 and not isinstance(config.tower, PackedViTConfig):
        raise ConfigError(
            f"temporal_pooling is {config.temporal_pooling}, but {type(config.tower).__name__} encodes single frames",
            "use a packed tower, or set temporal_pooling = 1 and sample fewer frames",
        )
    _check_tower(config)
    _check_stack(config)
    _check_reduce(config)
    _check_voco(config)
    if config.policy.view_sizes != "native" and config.queries is None:
        check_newlines(config, config.policy.layout(1, 1))  # the kinds of spans do not depend on the image size
    rows = config.decoder.vocab_size + config.decoder.extra_embeddings
    if config.rules.fill_id >= rows:
        raise ConfigError(
            f"rules.fill_id is {config.rules.fill_id}, but the decoder embeds {rows} ids",
            f"set rules.fill_id to an id below {rows}",
        )
    for name in config.required_token_names:
        if not 0 <= config.vision_token_ids.get(name, -1) < rows:
            raise ConfigError(
                f"vision_token_ids has {config.vision_token_ids.get(name)} for {name}, but the decoder embeds {rows} "
                "ids",
                f"give an id below {rows}",
            )
    if config.decoder.rotary.layout == "1d" and not POSITION_RULES[config.rules.positions].is_1d:
        raise ConfigError(
            f"rules.positions = {config.rules.positions!r} has row and column positions, but the decoder's rotary "
            "layout is 1d",
            'set rules.positions = "1d", or set a rotary layout of three axes (mrope)',
        )
    if config.rules.vocab_size is not None and config.rules.vocab_size != config.decoder.vocab_size:
        raise ConfigError(
            f"rules.vocab_size is {config.rules.vocab_size}, but decoder.vocab_size is {config.decoder.vocab_size}",
            "set both to the same value, or leave rules.vocab_size out",
        )
    _check_context(config)


def _check_video_sampling(config: "VLMConfig") -> None:
    if config.video_sampling is None:
        return
    usual = config.default_video_sampling
    if usual is None:
        raise ConfigError(f"{type(config.tower).__name__} does not support videos", "remove video_sampling")
    if config.video_sampling.rule != usual.rule and (config.video_sampling.is_square or usual.is_square):
        raise ConfigError(
            f"video_sampling.rule is {config.video_sampling.rule!r}, but this model needs {usual.rule!r}",
            "remove video_sampling to use the default",
        )
    if usual.is_square and config.video_sampling.square_size != usual.square_size:
        raise ConfigError(
            f"video_sampling has frames of {config.video_sampling.square_size} pixels, but the policy has tiles "
            f"of {usual.square_size}",
            "set both to the same size",
        )


def _check_tower(config: "VLMConfig") -> None:
    if isinstance(config.tower, ViTConfig):
        resolve_depth(config.vision_feature_layer, config.tower.layers)  # raises if the layer does not exist
    elif config.vision_feature_layer is not None or config.keep_prefix_tokens:
        raise ConfigError(
            f"vision_feature_layer and keep_prefix_tokens need a ViT tower, not {type(config.tower).__name__}",
            "set the layer of each tower instead" if config.tower.normalizes_pixels else "remove them",
        )
    if config.tower.input_kind == "tiles":
        raise ConfigError(
            f"{type(config.tower).__name__} takes the tiles of a canvas, which a VLM does not have",
            'use the model kind = "cross-attention-vlm"',
        )
    if config.tower.normalizes_pixels and (any(config.mean) or set(config.std) != {1.0}):
        raise ConfigError(
            f"mean is {config.mean} and std is {config.std}, but {type(config.tower).__name__} normalizes pixels "
            "itself",
            "set mean = [0, 0, 0] and std = [1, 1, 1]",
        )
    if isinstance(config.tower, PackedViTConfig) != (config.policy.view_sizes == "native"):
        raise ConfigError(
            f"{type(config.tower).__name__} does not support the policy {type(config.policy).__name__}",
            "use native, longest-edge, token-budget or patch-limit with a packed tower, and a policy with one view "
            "size with other towers",
        )
    if config.padding_embedding and (not isinstance(config.policy, OverlapPolicy) or config.feature_reduction):
        raise ConfigError(
            f"padding_embedding needs the policy overlap, not {type(config.policy).__name__}, and all features",
            "remove padding_embedding, or feature_reduction if the policy is overlap",
        )
    if config.merge == "add" and (config.newline or config.voco_tokens):
        raise ConfigError('merge is "add", but newline and voco_tokens replace placeholders', 'set merge = "replace"')
    if config.has_unequal_views:
        _check_unequal_views(config)
    _check_canvas(config)
    keys = {"patch_size": "patch_size"}  # of the policy, and of the tower
    if isinstance(config.tower, PackedViTConfig):
        keys["merge_size"] = "spatial_merge_size"
    for key, tower_key in keys.items():
        value, expected = getattr(config.policy, key, 1), getattr(config.tower, tower_key)
        if value != expected:
            raise ConfigError(
                f"policy.{key} is {value}, but the tower has {expected}", f"set policy.{key} = {expected}"
            )
    config.tower.check_view(config.policy.layout(1, 1).views[0])
    if isinstance(config.tower, PackedViTConfig):
        if config.position_embedding:
            raise ConfigError(
                "position_embedding needs one grid size, but a packed tower takes any grid",
                "remove position_embedding",
            )
        for name, connector in (("connector", config.connector), ("stack", config.stack)):
            if connector is not None and not connector.supports_packed_blocks(config.tower.spatial_merge_size):
                raise ConfigError(
                    f"{name} does not merge the {config.tower.spatial_merge_size} × "
                    f"{config.tower.spatial_merge_size} blocks of the packed tower",
                    f'use a merger with order = "blocks" and merge = {config.tower.spatial_merge_size}'
                    f"{', or a projector' if config.tower.spatial_merge_size == 1 else ''}",
                )


def _check_canvas(config: "VLMConfig") -> None:
    """Check what views with padding that is not attended to, and learned separators do not support."""
    if config.policy.masks_padding and (
        not isinstance(config.tower, ViTConfig) or config.feature_reduction is not None
    ):
        raise ConfigError(
            f"the policy dynamic-hd needs a ViT and no feature_reduction, not {type(config.tower).__name__} with "
            f"{type(config.feature_reduction).__name__}",
            "use the policy anyres or tiles",
        )
    if config.connector.has_separators and (
        config.newline or config.feature_reduction is not None or config.has_unequal_views
    ):
        raise ConfigError(
            "connector.separators cannot be combined with newline, feature_reduction, or views of unequal sizes",
            "set connector.separators = false, or remove the other",
        )


def _check_unequal_views(config: "VLMConfig") -> None:
    """Check what views of unequal sizes do not support."""
    policy = config.policy.__struct_config__.tag
    if not isinstance(config.tower, ViTConfig | PatchTowerConfig):
        raise ConfigError(f"{type(config.tower).__name__} does not support the policy {policy}", "use a ViT or patches")
    for name, value in (
        ("position_embedding", config.position_embedding),
        ("feature_reduction", config.feature_reduction),
    ):
        if value:
            raise ConfigError(f"{name} needs one grid size, which {policy} does not give", f"remove {name}")
    try:
        for grid in (Grid(h=1, w=1), Grid(h=3, w=5), Grid(h=1, w=7)):
            config.connector.count_tokens(config.feature_layout(grid))
    except ConfigError:
        raise ConfigError(
            f"{type(config.connector).__name__} does not read grids of any size, which {policy} gives",
            "use a projector, a Q-Former or a resampler",
        ) from None


def _check_stack(config: "VLMConfig") -> None:
    if config.stack_layers:
        _check_stack_layers(config)
    num_feature_layers = len(config.deepstack_layers)
    num_layers = len(config.decoder.fusion.layer_indices) if isinstance(config.decoder.fusion, DeepStackConfig) else 0
    if num_feature_layers and config.queries is not None:
        raise ConfigError("queries and DeepStack cannot be combined", "remove queries or stack")
    if not (num_feature_layers == num_layers and (config.stack is not None) == bool(num_feature_layers)):
        raise ConfigError(
            f"DeepStack: the tower has {num_feature_layers} feature layers, there is "
            f"{'a' if config.stack else 'no'} stack connector, and the decoder adds features at {num_layers} layers",
            "set all three, with as many feature layers as decoder layers, or none",
        )


def _check_stack_layers(config: "VLMConfig") -> None:
    if not isinstance(config.tower, ViTConfig):
        raise ConfigError(
            f"stack_layers needs a ViT tower, not {type(config.tower).__name__}",
            "set tower.feature_layers of a packed tower instead",
        )
    for layer in config.stack_layers:
        resolve_depth(layer, config.tower.layers)  # raises if the layer does not exist
    for name in ("vision_feature_layer", "padding_embedding", "feature_reduction", "voco_tokens", "newline"):
        if getattr(config, name):
            raise ConfigError(f"stack_layers cannot be combined with {name}", f"remove {name} or stack_layers")
    if config.has_unequal_views:
        raise ConfigError(
            f"stack_layers does not support views of unequal sizes, which {type(config.policy).__name__} gives",
            "use a policy whose views have one size",
        )
    layout = config.feature_layout(config.view_grid)
    if config.stack is not None and config.stack.count_tokens(layout) != config.connector.count_tokens(layout):
        raise ConfigError(
            f"stack gives {config.stack.count_tokens(layout)} tokens, and connector "
            f"{config.connector.count_tokens(layout)}",
            "use connectors with as many tokens",
        )


def _check_reduce(config: "VLMConfig") -> None:
    if config.feature_reduction is None:
        return
    if isinstance(config.tower, PackedViTConfig):
        raise ConfigError(
            f"feature_reduction does not support a packed tower, which merges {config.tower.spatial_merge_size} × "
            f"{config.tower.spatial_merge_size} blocks of a whole grid",
            "remove feature_reduction, or lower policy.max_pixels",
        )
    reduction = config.active_reduction
    if reduction is None:
        return
    view_layout = config.feature_layout(config.view_grid)  # raises if the grid has too few cells
    try:
        config.connector.count_tokens(view_layout)
    except ConfigError:
        raise ConfigError(
            f"{type(config.connector).__name__} needs a full grid, but feature_reduction leaves features out",
            'use a projector, a Q-Former or a resampler, or a reduction of kind = "pool" to a divisible grid',
        ) from None
    if not reduction.uses_attention:
        return
    if not isinstance(config.tower, ViTConfig) or config.tower.rotary is not None:
        raise ConfigError(
            f"feature_reduction needs attention scores of one ViT without rotary positions, but the tower is "
            f"{type(config.tower).__name__}{' with rotary positions' if isinstance(config.tower, ViTConfig) else ''}",
            'use a reduction of kind = "pool", or a CLIP, SigLIP or DINOv2 tower',
        )
    if isinstance(config.vision_feature_layer, tuple) or not resolve_depth(
        config.vision_feature_layer, config.tower.layers
    ):
        raise ConfigError(
            f"feature_reduction needs attention scores of one block, but vision_feature_layer is "
            f"{config.vision_feature_layer}",
            "set one layer after the first block",
        )
    check_scores_readable(config.tower.block)


def _check_voco(config: "VLMConfig") -> None:
    if config.voco_tokens < 0:
        raise ConfigError(f"voco_tokens is {config.voco_tokens}", "set 0 for none, or a positive number")
    if not config.voco_tokens:
        return
    if config.queries is not None or isinstance(config.tower, PackedViTConfig) or "image" in config.rules.bidirectional:
        raise ConfigError(
            'voco_tokens cannot be combined with queries, with a packed tower, or with rules.bidirectional = ["image"]',
            "set voco_tokens = 0, or remove the other",
        )


def check_newlines(config: "VLMConfig", layout: ImageLayout) -> None:
    """Raise if the policy adds newlines to a layout whose rows the connector does not keep."""
    if (
        config.active_reduction is None
        and not config.can_stitch_views(layout)
        and any(span.newline != "none" for span in layout.spans)
    ):
        raise ConfigError(
            f"{type(config.connector).__name__} does not keep rows, but the policy adds newlines at row ends",
            "use a projector, or the naive policy",
        )


def _check_context(config: "VLMConfig") -> None:
    min_tokens, context = config.min_image_tokens, config.decoder.context_length
    if min_tokens < context:
        return
    if config.queries is not None:
        reason, remedy_setting = (
            f"the first question about an image has {min_tokens} queries",
            "queries.first_queries",
        )
    else:
        reason = f"an image has at least {min_tokens} tokens"
        remedy_setting = "the image size of the policy, or use a connector with fewer tokens"
    raise ConfigError(
        f"{reason}, which fills the decoder's context of {context} tokens",
        f"set decoder.context_length to more than {min_tokens}, or lower {remedy_setting}",
    )
