"""Config of a vision-language model: parts, stream parts and token counts.

Shapes: D width of the tower, W width of the decoder.
"""

from typing import Any, Literal, Self, TypeAlias

from vitrail.backbones.decoder import DecoderConfig
from vitrail.backbones.fusion import CrossAttentionFusionConfig
from vitrail.config import Config, PositiveInt
from vitrail.connectors import AnyConnectorConfig, FusedQueryConfig
from vitrail.connectors.feature_layout import count_features
from vitrail.connectors.feature_reduction import AnyReductionConfig, CellPoolingConfig
from vitrail.encoders.encoder import AnyEncoderConfig
from vitrail.encoders.layer_selection import FeatureLayer, count_layers
from vitrail.encoders.packed_vit import PackedViTConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import ConfigError
from vitrail.models.vlm_checks import check_newlines, check_vlm_config
from vitrail.processing.anyres import AnyResPolicy
from vitrail.processing.grid import Grid
from vitrail.processing.image_layout import ImageLayout, to_row_layout
from vitrail.processing.image_loading import NORMALIZATIONS
from vitrail.processing.resolution_policies import AnyResolutionPolicy, NaivePolicy, NativePolicy
from vitrail.processing.video_sampling import SamplingRule, VideoSamplingConfig
from vitrail.stream import Part, StreamRules, image_part, video_part
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
    temporal_pooling      temporal patches of a video whose tokens are averaged; for packed towers
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
    temporal_pooling: PositiveInt = 1

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Read plain data in which models and parts may be preset names (see `vitrail.models.preset_expansion`)."""
        from vitrail.models.preset_expansion import expand_presets  # avoids a circular import

        return super().from_dict(expand_presets(data))

    def __post_init__(self) -> None:
        check_vlm_config(self)

    def check_fusion(self) -> None:
        """Raise if images do not reach the decoder as tokens."""
        if isinstance(self.decoder.fusion, CrossAttentionFusionConfig):
            raise ConfigError(
                "decoder.fusion is cross-attention, which does not take images as tokens of the stream",
                'use the model kind = "cross-attention-vlm"',
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
    def required_token_names(self) -> tuple[str, ...]:
        """Names of the special tokens that stand for newlines."""
        return ROW_TOKENS if self.has_row_tokens else (NEWLINE_TOKEN,) if self.has_newline_token else ()

    @property
    def has_newline_token(self) -> bool:
        """Whether a special token is the newline of the policy."""
        return NEWLINE_TOKEN in self.vision_token_ids

    @property
    def resolved_video_sampling(self) -> VideoSamplingConfig | None:
        """Video sampling config, given or default; None if the model does not support videos."""
        return self.default_video_sampling if self.video_sampling is None else self.video_sampling

    @property
    def default_video_sampling(self) -> VideoSamplingConfig | None:
        """Video sampling config of the model family; None if it does not support videos."""
        if isinstance(self.tower, PackedViTConfig):
            if not isinstance(self.policy, NativePolicy):  # the others are of images only
                return None
            rules: dict[str, SamplingRule] = {"qwen3-vl": "qwen3-vl", "glm4v": "glm4v"}
            rule = rules.get(self.rules.positions, "qwen2-vl")
            return VideoSamplingConfig.default(rule, self.tower.patch_size * self.tower.spatial_merge_size)
        rule = self.policy.video_rule
        if rule is None or self.queries is not None or self.voco_tokens:  # these two support images only
            return None
        if rule == "llava-onevision" and not self.newline:
            return None
        return VideoSamplingConfig.default(rule, self.policy.layout_video(1).views[0].canvas_size[0])

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
            return self.pool_grid(layout).num_tokens + (layout.num_rows if self.has_row_tokens else 0)
        if self.can_stitch_views(layout):
            return layout.num_tokens
        return sum(self.count_view_tokens(layout))

    @property
    def frames_per_step(self) -> int:
        """Frames of a video whose tokens have one time: those of a temporal patch, times `temporal_pooling`."""
        S = self.tower.temporal_patch_size if isinstance(self.tower, PackedViTConfig) else 1
        return S * self.temporal_pooling

    def pool_grid(self, grid: Grid) -> Grid:
        """Return the grid of a video after temporal pooling; images do not change."""
        if grid.t > 1 and grid.t % self.temporal_pooling:
            raise ConfigError(
                f"a video of {grid.t} temporal patches does not divide into groups of {self.temporal_pooling}",
                f"repeat the last frame until it has a multiple of {self.frames_per_step} frames",
            )
        return grid if grid.t == 1 else grid.replace(t=grid.t // self.temporal_pooling)

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
        return self.policy.view_sizes == "unequal"

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
        if isinstance(layout, Grid):
            return video_part(self.pool_grid(layout), seconds=seconds)
        if is_stitched and self.can_stitch_views(layout):
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
            return self.make_video_part(shape, seconds=seconds) if shape.t > 1 else image_part(shape)
        check_newlines(self, shape)
        if not self.can_stitch_views(shape) or self.connector.has_separators:
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
