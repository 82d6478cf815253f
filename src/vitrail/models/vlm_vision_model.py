"""Vision half of a VLM: vision tower and connector, with everything that happens to features between them.

Shapes: V views, C channels, H, W pixels, N patches, K values of a patch, D width of the tower, M visual tokens,
W width of the decoder.
"""

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from vitrail.connectors import FusedQueryConnector, make_connector
from vitrail.connectors.feature_layout import FeatureLayout
from vitrail.connectors.feature_reduction import AnyReductionConfig, encode_with_scores
from vitrail.encoders.encoder import make_encoder
from vitrail.encoders.packed_vit import PackedViT, PackedViTConfig
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import ImageError
from vitrail.models.vision_inputs import VisionInputs
from vitrail.models.vlm_config import VisualLayout, VLMConfig
from vitrail.models.vlm_cost import add_workloads
from vitrail.nn import LearnedPositionEmbedding, Workload, make_small_parameter
from vitrail.processing.grid import Grid
from vitrail.processing.image_layout import ImageLayout


class VisionFeatures(NamedTuple):
    """Decoder inputs for `VisionInputs`: (M, W) for each image or video, and the same for each tower feature layer."""

    features: list[Tensor]
    deepstack_features: list[list[Tensor]]


class ViewReadout(NamedTuple):
    """How the connector reads the features of one view."""

    reduction: AnyReductionConfig | None  # applied to the features before the connector
    layout: FeatureLayout  # layout of the features that the connector reads


class ViewMetadata(NamedTuple):
    """What the tower and the connector know about views besides their pixels.

    covered_grids  rows and columns of patches of each view that the tower attends to; None for all
    patch_kinds    kinds of the patches of the views (V, N), for a padding embedding; None without padding
    """

    are_video_frames: bool = False
    covered_grids: Sequence[tuple[int, int]] | None = None
    patch_kinds: Tensor | None = None


PLAIN_VIEWS = ViewMetadata()
"""Views of images that the tower attends to wholly."""


class VLMVisionModel(nn.Module):
    """Vision tower, connector, and what is between them: the parts of a `VLM` that encode images and videos."""

    def __init__(self, config: VLMConfig):
        super().__init__()
        self._bind_config(config)
        self.tower = make_encoder(config.tower)
        self.position_embedding = None
        if config.position_embedding:
            grid = config.view_grid  # all views have this grid
            self.position_embedding = LearnedPositionEmbedding((grid.h, grid.w), config.width, config.num_prefix_tokens)
            nn.init.zeros_(self.position_embedding.table)
        self.padding_embedding = make_small_parameter(2, config.width) if config.padding_embedding else None
        self.connector = make_connector(config.connector)
        taps = config.deepstack_layers
        self.stack = nn.ModuleList([make_connector(config.stack) for _ in taps if config.stack is not None])
        self.queries = None if config.queries is None else FusedQueryConnector(config.queries)

    def _bind_config(self, config: VLMConfig) -> None:
        """Cache the config values that a forward pass needs, so that compiled code does not compute them."""
        self.config, self._grid, self._image_readout, self._frame_readout = config, None, None, None
        if not isinstance(config.tower, PackedViTConfig) and not config.has_unequal_views:
            policy, self._grid = config.policy, config.view_grid
            frame = self._grid if policy.video_rule is None else policy.layout_video(1).views[0].grid
            self._image_readout, self._frame_readout = (
                ViewReadout(config.view_reduction(grid), config.feature_layout(grid)) for grid in (self._grid, frame)
            )

    def encode_images(self, inputs: VisionInputs) -> VisionFeatures:
        """Encode images or videos to the visual tokens that the decoder reads."""
        features = self._encode_without_queries(inputs)
        if self.queries is None:
            return features
        query_groups = self.queries.forward_per_image(
            features.features, inputs.questions or [[]] * len(features.features)
        )
        return VisionFeatures([torch.cat(groups) for groups in query_groups], features.deepstack_features)

    def _encode_without_queries(self, inputs: VisionInputs) -> VisionFeatures:
        if isinstance(self.tower, PackedViT):
            grids = [shape for shape in inputs.layouts if isinstance(shape, Grid)]
            *taps, last = self.tower.forward_layers(inputs.pixels, grids)  # (N, D) each
            depths = [_project_packed(stack, tap, grids) for stack, tap in zip(self.stack, taps, strict=True)]
            return VisionFeatures(
                self._pool_videos(_project_packed(self.connector, last, grids), grids),
                [self._pool_videos(depth, grids) for depth in depths],
            )
        layouts = [shape for shape in inputs.layouts if isinstance(shape, ImageLayout)]
        views = [view for layout in layouts for view in layout.views]
        if self.config.has_unequal_views:
            view_tokens = iter(self._encode_unequal_views(inputs.pixels, [view.grid for view in views]))
            return VisionFeatures([torch.cat([next(view_tokens) for _ in layout.views]) for layout in layouts], [])
        if len(inputs.pixels) != len(views):
            raise ImageError(
                f"{len(inputs.pixels)} views were given, but the image layouts have {len(views)}",
                "build the inputs with prepare_images",
            )
        tokens, depths = self.encode_view_layers(inputs.pixels, self._describe_views(layouts))
        last, *deeper = (self._arrange_images(one, layouts) for one in (tokens, *depths))
        return VisionFeatures(last, deeper)

    def _describe_views(self, layouts: Sequence[ImageLayout]) -> ViewMetadata:
        policy = self.config.policy
        grids = [policy.list_covered_grids(layout.height, layout.width) for layout in layouts]
        kinds = [policy.classify_patches(layout) for layout in layouts] if self.config.padding_embedding else []
        return ViewMetadata(
            are_video_frames=layouts[0].views[0].grid != self._grid,
            covered_grids=[grid for own in grids if own is not None for grid in own] or None,
            patch_kinds=torch.cat([torch.from_numpy(own) for own in kinds]) if kinds else None,
        )

    def _pool_videos(self, tokens: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
        """Split the tokens (ΣM, W) of all items, and average adjacent temporal patches of videos."""
        pooled = []
        for grid, own in zip(grids, tokens.split([grid.num_tokens for grid in grids]), strict=True):
            steps = self.config.pool_grid(grid).t
            pooled.append(
                own if steps == grid.t else own.unflatten(0, (steps, grid.t // steps, -1)).mean(1).flatten(0, 1)
            )
        return pooled

    def _arrange_images(self, tokens: Tensor, layouts: Sequence[ImageLayout]) -> list[Tensor]:
        """Order the visual tokens (V, M, W) of all views as the decoder reads them: (M', W) for each image."""
        each = tokens.split([len(layout.views) for layout in layouts])
        return [self.arrange_views(own, layout) for own, layout in zip(each, layouts, strict=True)]

    def _encode_unequal_views(self, pixels: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
        """Encode the patches (N, K) of views with unequal grids to visual tokens, (M, W) for each view."""
        counts = [grid.num_patches for grid in grids]
        if len(pixels) != sum(counts):
            raise ImageError(
                f"{len(pixels)} patches were given, but the image layouts have {sum(counts)}",
                "build the inputs with prepare_images",
            )
        patches = pad_sequence(list(pixels.split(counts)), batch_first=True)  # (V, N, K)
        sizes = [(grid.h, grid.w) for grid in grids]
        if isinstance(self.tower, ViT):
            encode = self.tower.forward_tokens if self.config.keep_prefix_tokens else self.tower
            features = encode(patches, sizes, layer=self.config.vision_feature_layer)
        else:
            features = self.tower(patches, sizes)
        layouts = [self.config.feature_layout(grid) for grid in grids]
        tokens = self.connector(features, layouts)
        return [row[: self.config.connector.count_tokens(layout)] for row, layout in zip(tokens, layouts, strict=True)]

    def split_inputs(self, inputs: VisionInputs) -> list[VisionInputs]:
        """Split inputs into those of each image or video, which `encode_images` encodes alone to the same features."""
        if isinstance(self.tower, PackedViT):
            counts = [shape.num_patches for shape in inputs.layouts if isinstance(shape, Grid)]
        else:
            layouts = [shape for shape in inputs.layouts if isinstance(shape, ImageLayout)]
            sizes = [
                [view.grid.num_patches if self.config.has_unequal_views else 1 for view in layout.views]
                for layout in layouts
            ]
            counts = [sum(own) for own in sizes]
        pixels = inputs.pixels.split(counts)
        questions = [(one,) for one in inputs.questions] or [()] * len(counts)
        return [
            VisionInputs(part, (layout,), own)
            for part, layout, own in zip(pixels, inputs.layouts, questions, strict=True)
        ]

    def encode_views(self, pixels: Tensor) -> Tensor:
        """Encode image views (V, C, H, W) of one size to visual tokens (V, M, W)."""
        return self.encode_view_layers(pixels)[0]

    def encode_view_layers(self, pixels: Tensor, metadata: ViewMetadata = PLAIN_VIEWS) -> tuple[Tensor, list[Tensor]]:
        """Encode views (V, C, H, W) to visual tokens (V, M, W), and to those of each DeepStack layer of a ViT."""
        if self.config.has_unequal_views:  # all of these views have one size
            height, width = pixels.shape[2:]
            grid = Grid.from_pixels(height, width, self.config.tower.patch_size)
            return self.connector(self.forward_features(pixels), self.config.feature_layout(grid)), []
        readout = self._frame_readout if metadata.are_video_frames else self._image_readout
        assert readout is not None
        if self.config.stack_layers:
            *taps, features = self._forward_stack_layers(pixels)
        elif readout.reduction is not None:
            taps, features = [], self._reduce_features(pixels, readout.reduction)
        else:
            taps, features = [], self.forward_features(pixels, metadata.covered_grids)
        if metadata.patch_kinds is not None:
            features = features + self._embed_patch_kinds(metadata.patch_kinds.to(features.device))
        depths = [stack(tap, readout.layout) for stack, tap in zip(self.stack, taps, strict=True)]
        return self.connector(features, readout.layout), depths

    def _forward_stack_layers(self, pixels: Tensor) -> list[Tensor]:
        """Encode views to the features (V, N, D) of each DeepStack layer and of the last layer."""
        tower = self.tower
        assert isinstance(tower, ViT)
        start = 0 if self.config.keep_prefix_tokens else tower.config.num_prefix_tokens
        return [self._add_positions(one[:, start:]) for one in tower.forward_layers(pixels, self.config.stack_layers)]

    def _embed_patch_kinds(self, kinds: Tensor) -> Tensor:
        assert self.padding_embedding is not None
        table = torch.cat([torch.zeros_like(self.padding_embedding[:1]), self.padding_embedding])
        return table[kinds]

    def forward_features(self, pixels: Tensor, covered_grids: Sequence[tuple[int, int]] | None = None) -> Tensor:
        """Encode views (V, C, H, W) to tower features (V, N, D), learned position embeddings included."""
        if isinstance(self.tower, ViT):
            features = (self.tower.forward_tokens if self.config.keep_prefix_tokens else self.tower)(
                pixels, layer=self.config.vision_feature_layer, covered_grids=covered_grids
            )
        else:
            features = self.tower(pixels)
        return self._add_positions(features)

    def _add_positions(self, features: Tensor) -> Tensor:
        return (
            features
            if self.position_embedding is None
            else features + self.position_embedding(*self.position_embedding.grid_size)
        )

    def _reduce_features(self, pixels: Tensor, reduction: AnyReductionConfig) -> Tensor:
        """Return reduced features (V, n, D) of the views, preceded by the prefix tokens if they are kept."""
        scores, tower, layer = None, self.tower, self.config.vision_feature_layer
        if reduction.uses_attention:
            assert isinstance(tower, ViT) and not isinstance(layer, tuple)
            tokens, scores = encode_with_scores(tower, pixels, layer)
            features = self._add_positions(
                tokens if self.config.keep_prefix_tokens else tokens[:, tower.config.num_prefix_tokens :]
            )
        else:
            features = self.forward_features(pixels)
        prefix, patches = features.split(
            [self.config.num_prefix_tokens, features.shape[1] - self.config.num_prefix_tokens], dim=1
        )
        assert self._grid is not None
        return torch.cat([prefix, reduction.reduce(patches, scores, self._grid)], dim=1)

    def arrange_views(self, tokens: Tensor, layout: ImageLayout) -> Tensor:
        """Order the visual tokens (views, M, W) of one image as the decoder reads them: (M', W).

        Newlines are left out, except those of the connector.
        """
        if not self.config.can_stitch_views(layout):
            return tokens.flatten(0, 1)
        return self.connector.arrange_views(tokens, layout)

    # ---- costs --------------------------------------------------------------------------------------------------

    def vision_workloads(self, grids: list[Grid]) -> tuple[Workload, ...]:
        """Return the workloads of the tower and the connector for views with these grids."""
        if not grids:
            return ()
        if isinstance(self.tower, PackedViT):
            line = sum(grid.num_patches for grid in grids) // grids[0].merge_size  # see `_packed`
            return self.tower.workload(grids), self.connector.workload(
                Grid(h=grids[0].merge_size, w=line, merge_size=grids[0].merge_size)
            )
        V, num_prefix_tokens = len(grids), self.tower.config.num_prefix_tokens if isinstance(self.tower, ViT) else 0
        if self.config.has_unequal_views:
            works = (
                (
                    Workload.full_attention(num_prefix_tokens + grid.num_patches),
                    self.connector.workload(self.config.feature_layout(grid)),
                )
                for grid in grids
            )
            return reduce(add_workloads, works)
        return Workload.full_attention(num_prefix_tokens + grids[0].num_patches, V), self.connector.workload(
            self.config.feature_layout(grids[0]), V
        )

    def reduction_flops(self) -> int:
        """Count the FLOPs of selecting the features that remain of one view."""
        config, reduction = self.config, self.config.active_reduction
        tower = config.tower if isinstance(config.tower, ViTConfig) else None
        return 0 if reduction is None or tower is None else reduction.count_flops(tower, config.view_grid.num_patches)


def list_frame_grids(layout: VisualLayout) -> list[Grid]:
    """Return the grids that the tower encodes for an image or a video."""
    return [layout] if isinstance(layout, Grid) else [view.grid for view in layout.views]


def _project_packed(connector: nn.Module, features: Tensor, grids: Sequence[Grid]) -> Tensor:
    """Project features (N, D) of all items to (ΣM, W).

    The features of a block are contiguous, so all blocks form one row of a grid.
    """
    m = grids[0].merge_size
    return connector(features[None], Grid(h=m, w=len(features) // m, merge_size=m))[0]
