"""Config of a vision-language model: parts, validation and token counts.

All checks run before a module is built.

Shapes: D width of the tower, W width of the decoder.
"""

from typing import Any, Literal, Self, TypeAlias

from vitrail.backbones.decoder import DecoderConfig
from vitrail.backbones.fusion import CrossAttentionFusionConfig, DeepStackConfig
from vitrail.config import Config
from vitrail.connectors import (
    AnyConnectorConfig,
    FusedQueryConfig,
    GatedMergerConfig,
    MergerConfig,
    PackedPoolConfig,
    ProjectorConfig,
)
from vitrail.connectors.feature_layout import count_features
from vitrail.connectors.feature_reduction import AnyReductionConfig, CellPoolingConfig, check_scores_readable
from vitrail.encoders.encoder import AnyEncoderConfig
from vitrail.encoders.layer_selection import FeatureLayer, count_layers, resolve_depth
from vitrail.encoders.packed_vit import PackedViTConfig
from vitrail.encoders.patch_tower import PatchTowerConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import ConfigError
from vitrail.processing.anyres import AnyResPolicy
from vitrail.processing.grid import Grid
from vitrail.processing.hd_tiles import DynamicHDPolicy
from vitrail.processing.image_layout import ImageLayout, to_row_layout
from vitrail.processing.image_loading import NORMALIZATIONS
from vitrail.processing.internvl_tiles import TilesPolicy
from vitrail.processing.overlapping_tiles import OverlapPolicy
from vitrail.processing.resolution_policies import (
    PACKED_POLICIES,
    UNEQUAL_POLICIES,
    AnyResolutionPolicy,
    LongestEdgePolicy,
    NaivePolicy,
    PatchLimitPolicy,
    TokenBudgetPolicy,
)
from vitrail.processing.split_tiles import SplitPolicy
from vitrail.processing.video_sampling import SamplingRule, VideoSamplingConfig
from vitrail.stream import POSITION_RULES, Part, StreamRules, image_part, video_part
from vitrail.stream import query_part as slots

VisualLayout: TypeAlias = ImageLayout | Grid

PROBE_SIZES = ((1, 1), (1, 4), (4, 1), (1, 100), (100, 1))
"""Image sizes (height, width) that are probed for the smallest token count. Tiling policies give thin images fewer
tokens; policies with one size give every image the same count."""
ROW_TOKENS = ("image_break", "image_end")
"""Names of the tokens after the rows of an image, and after its last row."""
NEWLINE_TOKEN = "image_newline"
"""Name of the token at newlines of a policy."""


class VLMConfig(Config):
    """Config of a `VLM`.

    policy                resolution policy: how an image of any size is prepared for the tower
    mean, std             pixel normalization of each channel
    vision_feature_layer  tower layer whose features are used (LLaVA: −2), or several layers, whose features are
                          concatenated (Molmo: −2 and −9); None: the last layer and its norm
    keep_prefix_tokens    keep CLS and register tokens along with the patches
    position_embedding    add a learned embedding of each grid position to the tower's features; it starts at zero
    padding_embedding     add a learned embedding to features of padding, and another one to those of patches with some
                          padding; for the policy overlap (Molmo)
    feature_reduction     training-free reduction of each view's features before the connector
    voco_tokens           number of learned VoCo tokens after each image, which text attends to instead of the image; 0:
                          none
    stack                 DeepStack connector for each feature layer of the tower
    stack_layers          feature layers of a ViT for DeepStack; a packed tower names its own
    queries               question-fused queries that condense the connector's tokens (token scaling)
    newline               append a learned vector at the end of each row of tiles (LLaVA-NeXT), and another between
                          views if the policy separates them (DeepSeek-VL2)
    merge                 whether visual tokens replace the embeddings of the image token, or are added to them (Molmo)
    rules                 how text and images form a stream
    vision_token_ids      ids of the special tokens for or around images and videos, by name. The token image_break
                          follows every row of an image but the last, which image_end follows (Pixtral). The token
                          image_newline is the newline of a policy with newlines (Molmo, Fuyu)
    video_sampling        which frames of a video are read, and at what size; None: the default of the model family
    """

    tower: AnyEncoderConfig
    connector: AnyConnectorConfig
    decoder: DecoderConfig
    policy: AnyResolutionPolicy = NaivePolicy()
    mean: tuple[float, ...] = NORMALIZATIONS["clip"].mean
    std: tuple[float, ...] = NORMALIZATIONS["clip"].std
    vision_feature_layer: FeatureLayer = None
    keep_prefix_tokens: bool = False
    position_embedding: bool = False
    padding_embedding: bool = False
    feature_reduction: AnyReductionConfig | None = None
    voco_tokens: int = 0
    stack: AnyConnectorConfig | None = None
    stack_layers: tuple[int, ...] = ()
    queries: FusedQueryConfig | None = None
    newline: bool = False
    merge: Literal["replace", "add"] = "replace"
    rules: StreamRules = StreamRules()
    vision_token_ids: dict[str, int] = {}
    video_sampling: VideoSamplingConfig | None = None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Read plain data in which models and parts may be preset names (see `vitrail.models.preset_expansion`)."""
        from vitrail.models.preset_expansion import expand_presets  # avoids a circular import

        return super().from_dict(expand_presets(data))

    def __post_init__(self) -> None:
        D, W = self.width, self.decoder.block.width
        between = W if self.queries is None else self.queries.in_features
        connectors = {
            "connector": (self.connector, D, between),
            "stack": (self.stack, D, W),
            "queries": (self.queries, between, W),
        }
        for name, (connector, input_width, output_width) in connectors.items():
            if connector is not None and (connector.in_features, connector.out_features) != (input_width, output_width):
                raise ConfigError(
                    f"{name} has in_features {connector.in_features} and out_features {connector.out_features}, "
                    f"but the model needs "
                    f"{input_width} and {output_width}",
                    f"set {name}.in_features = {input_width} and {name}.out_features = {output_width}",
                )
        if isinstance(self.connector, FusedQueryConfig):
            raise ConfigError(
                "connector is a fused query connector, which needs another connector before it",
                "set it as `queries`, and choose another connector",
            )
        self._check_fusion()
        self._check_video_sampling()
        self._check_tower()
        self._check_stack()
        self._check_reduce()
        self._check_voco()
        if not isinstance(self.policy, PACKED_POLICIES) and self.queries is None:
            self._check_newlines(self.policy.layout(1, 1))  # the kinds of spans do not depend on the image size
        rows = self.decoder.vocab_size + self.decoder.extra_embeddings
        if self.rules.fill_id >= rows:
            raise ConfigError(
                f"rules.fill_id is {self.rules.fill_id}, but the decoder embeds {rows} ids",
                f"set rules.fill_id to an id below {rows}",
            )
        for name in ROW_TOKENS if self.has_row_tokens else (NEWLINE_TOKEN,) if self.has_newline_token else ():
            if not 0 <= self.vision_token_ids.get(name, -1) < rows:
                raise ConfigError(
                    f"vision_token_ids has {self.vision_token_ids.get(name)} for {name}, but the decoder embeds {rows} "
                    "ids",
                    f"give an id below {rows}",
                )
        if self.decoder.rotary.layout == "1d" and not POSITION_RULES[self.rules.positions].is_1d:
            raise ConfigError(
                f"rules.positions = {self.rules.positions!r} has row and column positions, but the decoder's rotary "
                "layout is 1d",
                'set rules.positions = "1d", or set a rotary layout of three axes (mrope)',
            )
        if self.rules.vocab_size is not None and self.rules.vocab_size != self.decoder.vocab_size:
            raise ConfigError(
                f"rules.vocab_size is {self.rules.vocab_size}, but decoder.vocab_size is {self.decoder.vocab_size}",
                "set both to the same value, or leave rules.vocab_size out",
            )
        self._check_context()

    def _check_fusion(self) -> None:
        if isinstance(self.decoder.fusion, CrossAttentionFusionConfig):
            raise ConfigError(
                "decoder.fusion is cross-attention, which does not take images as tokens of the stream",
                'use the model kind = "cross-attention-vlm"',
            )

    def _check_video_sampling(self) -> None:
        if self.video_sampling is None:
            return
        usual = self._default_video_sampling
        if usual is None:
            raise ConfigError(f"{type(self.tower).__name__} does not support videos", "remove video_sampling")
        if self.video_sampling.rule != usual.rule and (self.video_sampling.is_square or usual.is_square):
            raise ConfigError(
                f"video_sampling.rule is {self.video_sampling.rule!r}, but this model needs {usual.rule!r}",
                "remove video_sampling to use the default",
            )
        if usual.is_square and self.video_sampling.square_size != usual.square_size:
            raise ConfigError(
                f"video_sampling has frames of {self.video_sampling.square_size} pixels, but the policy has tiles "
                f"of {usual.square_size}",
                "set both to the same size",
            )

    def _check_tower(self) -> None:
        if isinstance(self.tower, ViTConfig):
            resolve_depth(self.vision_feature_layer, self.tower.layers)  # raises if the layer does not exist
        elif self.vision_feature_layer is not None or self.keep_prefix_tokens:
            raise ConfigError(
                f"vision_feature_layer and keep_prefix_tokens need a ViT tower, not {type(self.tower).__name__}",
                "set the layer of each tower instead" if self.tower.normalizes_pixels else "remove them",
            )
        if self.tower.input_kind == "tiles":
            raise ConfigError(
                f"{type(self.tower).__name__} takes the tiles of a canvas, which a VLM does not have",
                'use the model kind = "cross-attention-vlm"',
            )
        if self.tower.normalizes_pixels and (any(self.mean) or set(self.std) != {1.0}):
            raise ConfigError(
                f"mean is {self.mean} and std is {self.std}, but {type(self.tower).__name__} normalizes pixels itself",
                "set mean = [0, 0, 0] and std = [1, 1, 1]",
            )
        if isinstance(self.tower, PackedViTConfig) != isinstance(self.policy, PACKED_POLICIES):
            raise ConfigError(
                f"{type(self.tower).__name__} does not support the policy {type(self.policy).__name__}",
                "use native, longest_edge, token_budget or patch_limit with a packed tower, and a policy with one view "
                "size with other towers",
            )
        if self.padding_embedding and (not isinstance(self.policy, OverlapPolicy) or self.feature_reduction):
            raise ConfigError(
                f"padding_embedding needs the policy overlap, not {type(self.policy).__name__}, and all features",
                "remove padding_embedding, or feature_reduction if the policy is overlap",
            )
        if self.merge == "add" and (self.newline or self.voco_tokens):
            raise ConfigError(
                'merge is "add", but newline and voco_tokens replace placeholders', 'set merge = "replace"'
            )
        if self.has_unequal_views:
            self._check_unequal_views()
        self._check_canvas()
        keys = {"patch_size": "patch_size"}  # of the policy, and of the tower
        if isinstance(self.tower, PackedViTConfig):
            keys["merge_size"] = "spatial_merge_size"
        for key, tower_key in keys.items():
            value, expected = getattr(self.policy, key, 1), getattr(self.tower, tower_key)
            if value != expected:
                raise ConfigError(
                    f"policy.{key} is {value}, but the tower has {expected}", f"set policy.{key} = {expected}"
                )
        self.tower.check_view(self.policy.layout(1, 1).views[0])
        if isinstance(self.tower, PackedViTConfig):
            if self.position_embedding:
                raise ConfigError(
                    "position_embedding needs one grid size, but a packed tower takes any grid",
                    "remove position_embedding",
                )
            for name, connector in (("connector", self.connector), ("stack", self.stack)):
                if connector is not None and not _supports_packed_blocks(connector, self.tower.spatial_merge_size):
                    raise ConfigError(
                        f"{name} does not merge the {self.tower.spatial_merge_size} × "
                        f"{self.tower.spatial_merge_size} blocks of the packed tower",
                        f'use a merger with order = "blocks" and merge = {self.tower.spatial_merge_size}'
                        f"{', or a projector' if self.tower.spatial_merge_size == 1 else ''}",
                    )

    def _check_canvas(self) -> None:
        """Check what views with padding that is not attended to, and learned separators do not support."""
        if self.masks_padding and (not isinstance(self.tower, ViTConfig) or self.feature_reduction is not None):
            raise ConfigError(
                f"the policy dynamic_hd needs a ViT and no feature_reduction, not {type(self.tower).__name__} with "
                f"{type(self.feature_reduction).__name__}",
                "use the policy anyres or tiles",
            )
        if self.has_separators and (self.newline or self.feature_reduction is not None or self.has_unequal_views):
            raise ConfigError(
                "connector.separators cannot be combined with newline, feature_reduction, or views of unequal sizes",
                "set connector.separators = false, or remove the other",
            )

    def _check_unequal_views(self) -> None:
        """Check what views of unequal sizes do not support."""
        policy = self.policy.__struct_config__.tag
        if not isinstance(self.tower, ViTConfig | PatchTowerConfig):
            raise ConfigError(
                f"{type(self.tower).__name__} does not support the policy {policy}", "use a ViT or patches"
            )
        for name, value in (
            ("position_embedding", self.position_embedding),
            ("feature_reduction", self.feature_reduction),
        ):
            if value:
                raise ConfigError(f"{name} needs one grid size, which {policy} does not give", f"remove {name}")
        try:
            for grid in (Grid(h=1, w=1), Grid(h=3, w=5), Grid(h=1, w=7)):
                self.connector.count_tokens(self.feature_layout(grid))
        except ConfigError:
            raise ConfigError(
                f"{type(self.connector).__name__} does not read grids of any size, which {policy} gives",
                "use a projector, a Q-Former or a resampler",
            ) from None

    def _check_stack(self) -> None:
        if self.stack_layers:
            self._check_stack_layers()
        num_feature_layers = len(self.deepstack_layers)
        num_layers = len(self.decoder.fusion.layer_indices) if isinstance(self.decoder.fusion, DeepStackConfig) else 0
        if num_feature_layers and self.queries is not None:
            raise ConfigError("queries and DeepStack cannot be combined", "remove queries or stack")
        if not (num_feature_layers == num_layers and (self.stack is not None) == bool(num_feature_layers)):
            raise ConfigError(
                f"DeepStack: the tower has {num_feature_layers} feature layers, there is "
                f"{'a' if self.stack else 'no'} stack connector, and the decoder adds features at {num_layers} layers",
                "set all three, with as many feature layers as decoder layers, or none",
            )

    def _check_stack_layers(self) -> None:
        if not isinstance(self.tower, ViTConfig):
            raise ConfigError(
                f"stack_layers needs a ViT tower, not {type(self.tower).__name__}",
                "set tower.feature_layers of a packed tower instead",
            )
        for layer in self.stack_layers:
            resolve_depth(layer, self.tower.layers)  # raises if the layer does not exist
        for name in ("vision_feature_layer", "padding_embedding", "feature_reduction", "voco_tokens", "newline"):
            if getattr(self, name):
                raise ConfigError(f"stack_layers cannot be combined with {name}", f"remove {name} or stack_layers")
        if self.has_unequal_views:
            raise ConfigError(
                f"stack_layers does not support views of unequal sizes, which {type(self.policy).__name__} gives",
                "use a policy whose views have one size",
            )
        layout = self.feature_layout(self.view_grid)
        if self.stack is not None and self.stack.count_tokens(layout) != self.connector.count_tokens(layout):
            raise ConfigError(
                f"stack gives {self.stack.count_tokens(layout)} tokens, and connector "
                f"{self.connector.count_tokens(layout)}",
                "use connectors with as many tokens",
            )

    def _check_reduce(self) -> None:
        if self.feature_reduction is None:
            return
        if isinstance(self.tower, PackedViTConfig):
            raise ConfigError(
                f"feature_reduction does not support a packed tower, which merges {self.tower.spatial_merge_size} × "
                f"{self.tower.spatial_merge_size} blocks of a whole grid",
                "remove feature_reduction, or lower policy.max_pixels",
            )
        reduction = self.active_reduction
        if reduction is None:
            return
        view_layout = self.feature_layout(self.view_grid)  # raises if the grid has too few cells
        try:
            self.connector.count_tokens(view_layout)
        except ConfigError:
            raise ConfigError(
                f"{type(self.connector).__name__} needs a full grid, but feature_reduction leaves features out",
                'use a projector, a Q-Former or a resampler, or a reduction of kind = "pool" to a divisible grid',
            ) from None
        if not reduction.uses_attention:
            return
        if not isinstance(self.tower, ViTConfig) or self.tower.rotary is not None:
            raise ConfigError(
                f"feature_reduction needs attention scores of one ViT without rotary positions, but the tower is "
                f"{type(self.tower).__name__}{' with rotary positions' if isinstance(self.tower, ViTConfig) else ''}",
                'use a reduction of kind = "pool", or a CLIP, SigLIP or DINOv2 tower',
            )
        if isinstance(self.vision_feature_layer, tuple) or not resolve_depth(
            self.vision_feature_layer, self.tower.layers
        ):
            raise ConfigError(
                f"feature_reduction needs attention scores of one block, but vision_feature_layer is "
                f"{self.vision_feature_layer}",
                "set one layer after the first block",
            )
        check_scores_readable(self.tower.block)

    def _check_voco(self) -> None:
        if self.voco_tokens < 0:
            raise ConfigError(f"voco_tokens is {self.voco_tokens}", "set 0 for none, or a positive number")
        if not self.voco_tokens:
            return
        if self.queries is not None or isinstance(self.tower, PackedViTConfig) or "image" in self.rules.bidirectional:
            raise ConfigError(
                "voco_tokens cannot be combined with queries, with a packed tower, or with "
                'rules.bidirectional = ["image"]',
                "set voco_tokens = 0, or remove the other",
            )

    def _check_newlines(self, layout: ImageLayout) -> None:
        if (
            self.active_reduction is None
            and not self.can_stitch_views(layout)
            and any(span.newline != "none" for span in layout.spans)
        ):
            raise ConfigError(
                f"{type(self.connector).__name__} does not keep rows, but the policy adds newlines at row ends",
                "use a projector, or the naive policy",
            )

    def _check_context(self) -> None:
        min_tokens, context = self.min_image_tokens, self.decoder.context_length
        if min_tokens < context:
            return
        if self.queries is not None:
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

    @property
    def width(self) -> int:
        """Width of the tower's features, of all layers together."""
        return self.tower.width * count_layers(self.vision_feature_layer)

    @property
    def deepstack_layers(self) -> tuple[int, ...]:
        """Feature layers of the tower for DeepStack."""
        return self.tower.feature_layers if isinstance(self.tower, PackedViTConfig) else self.stack_layers

    @property
    def resolved_policy(self) -> AnyResolutionPolicy:
        """The resolution policy, which other models resolve from their tower."""
        return self.policy

    @property
    def num_newline_rows(self) -> int:
        """Rows of the learned table of newlines: the second is a separator of views (DeepSeek-VL2)."""
        return 1 + any(span.newline == "row_and_end" for span in self.policy.layout(1, 1).spans)

    @property
    def image_token_id(self) -> int:
        """Id of the tokens that the features of an image replace."""
        return self.rules.fill_id

    @property
    def has_row_tokens(self) -> bool:
        """Whether special tokens follow the rows of an image."""
        return ROW_TOKENS[0] in self.vision_token_ids

    @property
    def has_newline_token(self) -> bool:
        """Whether a special token is the newline of the policy."""
        return NEWLINE_TOKEN in self.vision_token_ids

    @property
    def resolved_video_sampling(self) -> VideoSamplingConfig | None:
        """Video sampling config, given or default; None if the model does not support videos."""
        return self._default_video_sampling if self.video_sampling is None else self.video_sampling

    @property
    def _default_video_sampling(self) -> VideoSamplingConfig | None:
        if isinstance(self.policy, LongestEdgePolicy | TokenBudgetPolicy | PatchLimitPolicy):  # images only
            return None
        if isinstance(self.tower, PackedViTConfig):
            rules: dict[str, SamplingRule] = {"qwen3-vl": "qwen3-vl", "glm4v": "glm4v"}
            rule = rules.get(self.rules.positions, "qwen2-vl")
            return VideoSamplingConfig.default(rule, self.tower.patch_size * self.tower.spatial_merge_size)
        if self.queries is not None or self.voco_tokens:  # these support images only
            return None
        if isinstance(self.policy, TilesPolicy):
            return VideoSamplingConfig.default("internvl", self.policy.tile_size)
        if isinstance(self.policy, SplitPolicy) and self.policy.takes_videos:
            return VideoSamplingConfig.default("smolvlm", self.policy.tile_size)
        if isinstance(self.policy, AnyResPolicy) and self.policy.video_pool_size is not None:
            return VideoSamplingConfig.default("llava-next-video", self.policy.tile_size)
        if (
            isinstance(self.policy, AnyResPolicy) and self.policy.max_tiles and self.newline
        ):  # LLaVA-NeXT has no max_tiles
            return VideoSamplingConfig.default("llava-onevision", self.policy.tile_size)
        return None

    def count_tokens(self, layout: VisualLayout, num_questions: int = 1) -> int:
        """Count the visual tokens of an image or a video that the decoder reads, newlines and VoCo tokens included.

        With fused queries, count the tokens of all `num_questions` questions. No module is built.
        """
        num_tokens = self.count_connector_tokens(layout)
        return (
            num_tokens + self.voco_tokens
            if self.queries is None
            else self.queries.count_tokens(num_tokens, num_questions)
        )

    @property
    def min_image_tokens(self) -> int:
        """Smallest number of visual tokens of an image."""
        if self.queries is not None:
            return self.queries.first_queries
        return min(self.count_tokens(self.policy.layout(*shape)) for shape in PROBE_SIZES)

    def count_connector_tokens(self, layout: VisualLayout) -> int:
        """Count the visual tokens that the connector gives, newlines included."""
        if isinstance(layout, Grid):
            return layout.num_tokens + (layout.num_rows if self.has_row_tokens else 0)
        if self.can_stitch_views(layout):
            return layout.num_tokens
        return sum(self.count_view_tokens(layout))

    def can_stitch_views(self, layout: ImageLayout) -> bool:
        """Whether the connector keeps the grid, so that views can be stitched and rows can end with newlines.

        Reduced views are not stitched: their tokens follow one another without newlines, as in the released models.
        """
        return self.active_reduction is None and all(
            self.connector.count_tokens(self.feature_layout(view.grid)) == view.grid.num_tokens for view in layout.views
        )

    def feature_layout(self, grid: Grid) -> Grid | int:
        """Layout of a view's features that the connector reads: a grid, or a count with prefix tokens or after a
        reduction.
        """
        reduction = self.view_reduction(grid)
        remaining = grid if reduction is None else reduction.reduce_layout(grid)
        return self.num_prefix_tokens + count_features(remaining) if self.num_prefix_tokens else remaining

    @property
    def has_unequal_views(self) -> bool:
        """Whether views differ in size, though the tower is no packed one."""
        return isinstance(self.policy, UNEQUAL_POLICIES)

    @property
    def masks_padding(self) -> bool:
        """Whether the tower does not attend to patches in padding."""
        return isinstance(self.policy, DynamicHDPolicy)

    @property
    def has_separators(self) -> bool:
        """Whether the connector gives the tokens after rows and between views, which are then features of the image."""
        return isinstance(self.connector, MergerConfig) and self.connector.separators

    def count_view_tokens(self, layout: ImageLayout) -> list[int]:
        """Count the visual tokens of each view of an image, without newlines."""
        return [self.connector.count_tokens(self.feature_layout(view.grid)) for view in layout.views]

    @property
    def view_grid(self) -> Grid:
        """Grid of every view; with a packed tower, the grid of a small image."""
        return self.policy.layout(1, 1).views[0].grid

    @property
    def active_reduction(self) -> AnyReductionConfig | None:
        """The feature reduction, or None if a view has no more features than it keeps."""
        return (
            None
            if self.feature_reduction is None or self.feature_reduction.keep >= self.view_grid.num_patches
            else self.feature_reduction
        )

    def view_reduction(self, grid: Grid) -> AnyReductionConfig | None:
        """Reduction of a view with this grid: the feature reduction, or block means of a video frame."""
        if self.active_reduction is None and isinstance(self.policy, AnyResPolicy) and grid.merge_size > 1:
            return CellPoolingConfig(keep=grid.num_tokens)
        return self.active_reduction

    @property
    def num_prefix_tokens(self) -> int:
        """Number of the tower's prefix tokens that precede the patches of a view."""
        return self.tower.num_prefix_tokens if self.keep_prefix_tokens and isinstance(self.tower, ViTConfig) else 0

    def make_video_part(self, layout: VisualLayout, *, seconds: float = 1.0) -> Part:
        """Create the stream part of a video: a grid of frames or temporal patches, or a layout if it has newlines.

        Each temporal patch lasts `seconds`.
        """
        is_stitched = isinstance(self.policy, AnyResPolicy) and not isinstance(layout, Grid)
        if isinstance(layout, Grid) or (is_stitched and self.can_stitch_views(layout)):
            return video_part(layout, seconds=seconds)
        frames = len(layout.views)
        each = (
            layout.views[0].grid
            if self.can_stitch_views(layout)
            else Grid(h=1, w=self.count_connector_tokens(layout) // frames)
        )
        return video_part(each.replace(t=frames), seconds=seconds)

    def make_part(self, layout: VisualLayout, *, seconds: float = 1.0) -> Part:
        """Create the stream part of an image, or of a video: a grid with temporal patches of `seconds`."""
        if self.queries is not None:
            raise ConfigError("a model with fused queries has one part for each question", "use make_parts")
        if self.voco_tokens:
            raise ConfigError("a model with VoCo tokens has two parts for each image", "use make_parts")
        return self._make_image_part(layout, seconds)

    def _make_image_part(self, shape: VisualLayout, seconds: float = 1.0) -> Part:
        if isinstance(shape, Grid) and self.has_row_tokens:
            ids = [self.vision_token_ids[name] for name in ROW_TOKENS]
            newline_ids = (ids[0],) * (shape.num_rows - 1) + (ids[1],)
            return image_part(to_row_layout(shape, self.tower.patch_size), newline_id=newline_ids)
        if isinstance(shape, Grid):
            return video_part(shape, seconds=seconds) if shape.t > 1 else image_part(shape)
        self._check_newlines(shape)
        if not self.can_stitch_views(shape) or self.has_separators:
            return image_part(self.count_connector_tokens(shape))
        return image_part(shape, newline_id=self.vision_token_ids.get(NEWLINE_TOKEN))

    def make_parts(self, layout: VisualLayout, num_questions: int = 1) -> list[Part]:
        """Create the stream parts of one image, to be placed before each of its `num_questions` questions.

        Without fused queries there is one image part, and one part for its VoCo tokens. With them, each question has a
        part with its own queries, and all parts share one block of features.
        """
        if self.queries is None:
            return [self._make_image_part(layout), *([slots(self.voco_tokens)] if self.voco_tokens else [])]
        counts = self.queries.queries_per_question(num_questions)
        source = object()
        return [image_part(n, first_row=sum(counts[:k]), source=source) for k, n in enumerate(counts)]


def _supports_packed_blocks(connector: AnyConnectorConfig, merge: int) -> bool:
    """Whether the connector merges whole blocks of images packed in one row."""
    if isinstance(connector, MergerConfig | GatedMergerConfig):
        return connector.order == "blocks" and connector.merge == merge
    if isinstance(connector, PackedPoolConfig):
        return connector.merge == merge
    return isinstance(connector, ProjectorConfig) and merge == 1
