"""Vision-language model: vision tower, connector and decoder.

The tower encodes images, the connector projects their features to visual tokens, and the decoder processes these
tokens and the text tokens as one sequence. Tower, connector, fusion, resolution policy and positions are independent
choices.

Shapes: V views, C channels, H, W pixels, N patches, K values of a patch, D width of the tower, M visual tokens,
W width of the decoder, B rows, L tokens of a row.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from vitrail.backbones.decoder import Decoder
from vitrail.backbones.fusion import (
    DeepStackConfig,
    DeepStackInputs,
    FusionInputs,
    ImageLoRAConfig,
    ImageLoRAInputs,
    VisualExpertConfig,
    VisualExpertInputs,
)
from vitrail.connectors import FusedQueryConnector, make_connector
from vitrail.connectors.feature_layout import FeatureLayout
from vitrail.connectors.feature_reduction import AnyReductionConfig, encode_with_scores
from vitrail.connectors.merger import Merger
from vitrail.connectors.view_stitching import stitch_spans, stitch_views
from vitrail.encoders.encoder import make_encoder
from vitrail.encoders.packed_vit import PackedViT, PackedViTConfig
from vitrail.encoders.patch_tower import PatchTowerConfig
from vitrail.encoders.vit import ViT, ViTConfig, cut_patches
from vitrail.errors import ConfigError, ImageError
from vitrail.models import vlm_cost
from vitrail.models.vlm_config import VisualLayout, VLMConfig
from vitrail.nn import KVCache, LearnedPositionEmbedding, Workload, cost, make_small_parameter
from vitrail.processing.anyres import AnyResPolicy
from vitrail.processing.batch_resize import get_fixed_view
from vitrail.processing.grid import Grid
from vitrail.processing.hd_tiles import DynamicHDPolicy
from vitrail.processing.image_layout import ImageLayout
from vitrail.processing.internvl_tiles import TilesPolicy
from vitrail.processing.overlapping_tiles import find_padding
from vitrail.processing.patchify import patchify_blocks
from vitrail.processing.split_tiles import SplitPolicy
from vitrail.registry import MODELS
from vitrail.stream import (
    TOKEN_KINDS,
    PackedBatch,
    RowTemplate,
    Stream,
    TemplateRows,
    build_row_template,
    build_stream,
    merge_features,
    pack_streams,
    text_part,
    voco_groups,
    voco_plan,
)

VISUAL_KINDS = ("image", "video")


class VisionInputs(NamedTuple):
    """Images or videos as the tower takes them, in the order of the stream parts they fill."""

    pixels: Tensor  # views (V, C, H, W) of one size; for packed towers and unequal views, patches (N, K)
    layouts: tuple[VisualLayout, ...]
    questions: tuple[Sequence[Tensor], ...] = ()  # ids (T,) of the questions about each image, for fused queries


class VisionFeatures(NamedTuple):
    """Decoder inputs for `VisionInputs`: (M, W) for each image or video, and the same for each tower feature layer."""

    features: list[Tensor]
    deepstack_features: list[list[Tensor]]


class ViewReadout(NamedTuple):
    """How the connector reads the features of one view."""

    reduction: AnyReductionConfig | None  # applied to the features before the connector
    layout: FeatureLayout  # layout of the features that the connector reads


@MODELS.register("vlm")
class VLM(nn.Module):
    """Vision-language model whose images are tokens of the stream.

    `model(batch, images)` returns logits (B, L, V) of a packed stream.
    """

    Config = VLMConfig

    def __init__(self, config: VLMConfig):
        super().__init__()
        self._bind_config(config)
        self.tower = make_encoder(config.tower)
        self.position_embedding = None
        if config.position_embedding:
            grid = config.policy.layout(1, 1).views[0].grid  # all views have this grid
            self.position_embedding = LearnedPositionEmbedding((grid.h, grid.w), config.width, config.num_prefix_tokens)
            nn.init.zeros_(self.position_embedding.table)
        self.padding_embedding = make_small_parameter(2, config.width) if config.padding_embedding else None
        self.connector = make_connector(config.connector)
        taps = config.deepstack_layers
        self.stack = nn.ModuleList([make_connector(config.stack) for _ in taps if config.stack is not None])
        self.queries = None if config.queries is None else FusedQueryConnector(config.queries)
        self.decoder = Decoder(config.decoder)
        self.newline = None
        if config.newline:
            self.newline = make_small_parameter(config.num_newline_rows, config.decoder.block.width)
        self.voco = make_small_parameter(config.voco_tokens, config.decoder.block.width) if config.voco_tokens else None

    def with_reduction(self, reduction: AnyReductionConfig | None) -> "VLM":
        """Return a model with the same weights and another feature reduction; None keeps all features."""
        other = copy.copy(self)
        other._bind_config(self.config.replace(feature_reduction=reduction))  # validates the new config
        return other

    def _bind_config(self, config: VLMConfig) -> None:
        """Cache the config values that a forward pass needs, so that compiled code does not compute them."""
        self.config, self._grid, self._image_readout, self._frame_readout = config, None, None, None
        if not isinstance(config.tower, PackedViTConfig) and not config.has_unequal_views:
            policy, self._grid = config.policy, config.view_grid
            frame = policy.layout_video(1).views[0].grid if isinstance(policy, AnyResPolicy) else self._grid
            self._image_readout, self._frame_readout = (
                ViewReadout(config.view_reduction(grid), config.feature_layout(grid)) for grid in (self._grid, frame)
            )

    # ---- pixels -------------------------------------------------------------------------------------------------

    def prepare_images(self, images: Sequence[Image.Image]) -> VisionInputs:
        """Preprocess RGB images for the tower."""
        return self._to_device(prepare_images(self.config, images))

    def prepare_packed(self, visuals: Sequence[Tensor]) -> VisionInputs:
        """Cut normalized images (C, H, W) and videos (T, C, H, W) into patches for a packed tower."""
        return self._to_device(_prepare_packed(self.config, visuals))

    def prepare_videos(self, videos: Sequence[Tensor]) -> VisionInputs:
        """Convert normalized videos (T, C, H, W) to tower inputs: packed patches, or one view for each frame."""
        return self._to_device(prepare_videos(self.config, videos))

    def _to_device(self, inputs: VisionInputs) -> VisionInputs:
        return inputs._replace(pixels=inputs.pixels.to(self.decoder.embed.weight))

    # ---- features -----------------------------------------------------------------------------------------------

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
            counts = [grid.num_tokens for grid in grids]
            depths = [_project_packed(stack, tap, grids) for stack, tap in zip(self.stack, taps, strict=True)]
            return VisionFeatures(
                list(_project_packed(self.connector, last, grids).split(counts)),
                [list(d.split(counts)) for d in depths],
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
        policy, covered = self.config.policy, None
        if isinstance(policy, DynamicHDPolicy):
            covered = [pair for layout in layouts for pair in policy.list_covered_grids(layout.height, layout.width)]
        padding = None
        if self.padding_embedding is not None:
            kinds = [find_padding(layout, self.config.tower.patch_size) for layout in layouts]
            padding = torch.cat([torch.from_numpy(one) for one in kinds])
        tokens, depths = self.encode_view_layers(
            inputs.pixels, video_frames=views[0].grid != self._grid, covered_grids=covered, padding=padding
        )
        last, *deeper = (self._arrange_images(one, layouts) for one in (tokens, *depths))
        return VisionFeatures(last, deeper)

    def _arrange_images(self, tokens: Tensor, layouts: Sequence[ImageLayout]) -> list[Tensor]:
        """Order the visual tokens (V, M, W) of all views as the decoder reads them: (M', W) for each image."""
        pairs = zip(_split_by_layout(tokens, layouts), layouts, strict=True)
        return [self._arrange_views(image_tokens, layout) for image_tokens, layout in pairs]

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

    def encode_views(
        self,
        pixels: Tensor,
        *,
        video_frames: bool = False,
        covered_grids: Sequence[tuple[int, int]] | None = None,
        padding: Tensor | None = None,
    ) -> Tensor:
        """Encode views (V, C, H, W) of images or videos to visual tokens (V, M, W).

        For `covered_grids`, see `ViT`. `padding` (V, N) are the kinds of the patches, see `find_padding`; None: no
        patch has padding.
        """
        if self.config.has_unequal_views:  # all of these views have one size
            height, width = pixels.shape[2:]
            grid = Grid.from_pixels(height, width, self.config.tower.patch_size)
            return self.connector(self.forward_features(pixels), self.config.feature_layout(grid))
        readout = self._frame_readout if video_frames else self._image_readout
        assert readout is not None
        features = (
            self.forward_features(pixels, covered_grids)
            if readout.reduction is None
            else self._reduce_features(pixels, readout.reduction)
        )
        if padding is not None and self.padding_embedding is not None:
            table = torch.cat([torch.zeros_like(self.padding_embedding[:1]), self.padding_embedding])
            features = features + table[padding.to(features.device)]
        return self.connector(features, readout.layout)

    def encode_view_layers(
        self,
        pixels: Tensor,
        *,
        video_frames: bool = False,
        covered_grids: Sequence[tuple[int, int]] | None = None,
        padding: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Encode views (V, C, H, W) to visual tokens (V, M, W), and to those of each DeepStack layer of a ViT."""
        if not self.config.stack_layers:
            tokens = self.encode_views(pixels, video_frames=video_frames, covered_grids=covered_grids, padding=padding)
            return tokens, []
        readout, tower = self._frame_readout if video_frames else self._image_readout, self.tower
        assert readout is not None and isinstance(tower, ViT)
        start = 0 if self.config.keep_prefix_tokens else tower.config.num_prefix_tokens
        features = tower.forward_layers(pixels, self.config.stack_layers)
        *taps, last = (self._add_positions(one[:, start:]) for one in features)
        depths = [stack(tap, readout.layout) for stack, tap in zip(self.stack, taps, strict=True)]
        return self.connector(last, readout.layout), depths

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

    def _arrange_views(self, tokens: Tensor, layout: ImageLayout) -> Tensor:
        """Order the visual tokens (views, M, W) of one image as the decoder reads them: (M', W).

        Newlines are left out, except those of the connector.
        """
        if isinstance(self.connector, Merger) and self.config.has_separators:
            return stitch_spans(tokens, layout, *self.connector.project_separators())
        if not self.config.can_stitch_views(layout):
            return tokens.flatten(0, 1)
        return torch.cat([stitch_views(tokens, layout, span) for span in layout.spans])

    # ---- words --------------------------------------------------------------------------------------------------

    def forward_hidden(
        self,
        batch: PackedBatch,
        images: VisionInputs | None = None,
        videos: VisionInputs | None = None,
        *,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Return the hidden states (B, L, W) before the output head.

        With a cache, every row is one sample from its first token. With VoCo tokens, the cache then keeps these and not
        the image tokens.
        """
        features = {
            feed: self.encode_images(inputs)
            for feed, inputs in zip(VISUAL_KINDS, (images, videos), strict=True)
            if inputs
        }
        embeds, fusion_inputs = self.embed_stream(batch, features)
        positions = batch.positions[..., 0] if self.config.decoder.rotary.layout == "1d" else batch.positions
        if self.voco is not None and features:
            return self._forward_voco(batch, embeds, positions.to(embeds.device), fusion_inputs, cache)
        attention: dict[str, Any] = {"plan": batch.attention_plan().to(embeds.device)}
        if cache is not None:
            counts = torch.tensor(batch.one_sample_per_row.lengths)  # on the host, where the cache reads them
            spans = (
                batch.spans.to(embeds.device) if bool(batch.spans.any()) else None
            )  # without spans, no mask is needed
            attention = {"cache": cache, "counts": counts, "spans": spans}
        return self.decoder.forward_hidden(
            embeds=embeds, positions=positions.to(embeds.device), fusion_inputs=fusion_inputs, **attention
        )

    def embed_stream(
        self, batch: PackedBatch, features: dict[str, VisionFeatures]
    ) -> tuple[Tensor, FusionInputs | None]:
        """Return the embeddings (B, L, W) of a stream with the features of its images and videos, and fusion inputs."""
        learned = {"newline": self.newline, "query": self.voco}
        tables = {feed: table for feed, table in learned.items() if table is not None}
        embeds = self.decoder.embed(batch.ids.to(self.decoder.embed.weight.device))
        blocks = {feed: one.features for feed, one in features.items()} | tables
        embeds = merge_features(embeds, blocks, batch, add=self.config.merge == "add")
        return embeds, self._fusion_inputs(batch, features, embeds)

    def _forward_voco(
        self,
        batch: PackedBatch,
        embeds: Tensor,
        positions: Tensor,
        fusion_inputs: FusionInputs | None,
        cache: KVCache | None,
    ) -> Tensor:
        """Run the decoder with VoCo tokens, and drop cached image tokens that no later token attends to."""
        image_mask = batch.kinds == TOKEN_KINDS["image"].id
        groups = voco_groups(image_mask, batch.kinds == TOKEN_KINDS["query"].id)
        if cache is not None:
            cache.extend(embeds.shape[1], torch.tensor(batch.one_sample_per_row.lengths))
        plan = voco_plan(groups, batch.segments).to(embeds.device)
        hidden = self.decoder.forward_embeddings(embeds, positions, plan, cache, fusion_inputs)
        if cache is not None:
            cache.select_tokens(~image_mask)
        return hidden

    def _fusion_inputs(
        self, batch: PackedBatch, features: dict[str, VisionFeatures], embeds: Tensor
    ) -> FusionInputs | None:
        """Build the inputs of the fusion point from the vision features."""
        kinds = torch.tensor([TOKEN_KINDS[feed].id for feed in VISUAL_KINDS], device=batch.kinds.device)
        if not features:
            return None
        match self.config.decoder.fusion:
            case VisualExpertConfig():
                return VisualExpertInputs(torch.isin(batch.kinds, kinds).to(embeds.device))
            case ImageLoRAConfig():
                mask = torch.isin(batch.kinds, kinds)
                return ImageLoRAInputs.from_image_mask(mask, batch.segments.to(mask.device)).to(embeds.device)
            case DeepStackConfig(layer_indices=at):
                mask = torch.isin(batch.kinds, kinds).to(embeds.device)
                # DeepStack features are scattered like the visual tokens, then gathered in mask order.
                depth_features = [
                    merge_features(
                        torch.zeros_like(embeds),
                        {feed: one.deepstack_features[k] for feed, one in features.items()},
                        batch,
                    )[mask]
                    for k in range(len(at))
                ]
                return DeepStackInputs(mask, depth_features)
        return None

    def forward(
        self, batch: PackedBatch, images: VisionInputs | None = None, videos: VisionInputs | None = None
    ) -> Tensor:
        return self.decoder.compute_logits(self.forward_hidden(batch, images, videos))

    def find_next_position(self, stream: Stream) -> int:
        """Return the position of the token that the decoder generates after a stream."""
        return int(stream.positions.max()) + 1

    # ---- rows of one shape --------------------------------------------------------------------------------------

    def make_row_template(
        self,
        prefix_ids: Sequence[int],
        text_length: int,
        num_questions: int = 1,
        image_shape: tuple[int, int] | None = None,
    ) -> RowTemplate:
        """Make the template of training rows: a text prefix, one image, and text with questions about the image.

        `image_shape` is the height and width of all images, for a policy that gives them several views or native sizes.
        """
        config = self.config
        if config.rules.bidirectional_prompt:
            raise ConfigError(
                "rows of one shape are causal, but the model has rules.bidirectional_prompt", 'use task = "chat"'
            )
        layout = config.policy.layout(*(image_shape or get_fixed_view(config.policy).canvas_size))
        parts = config.make_parts(layout)
        groups = () if config.queries is None else config.queries.queries_per_question(num_questions)
        template = build_row_template(prefix_ids, parts, text_length, config.rules, groups)
        return template if image_shape is None else replace(template, feature_order=self._order_features(layout))

    def _order_features(self, layout: ImageLayout) -> Tensor:
        """Return the index of each image token (n,) among the visual tokens of all views; newlines have the last."""
        unsupported = {
            "queries": self.queries is not None,
            "interpolated tokens": any(span.size != span.window[2:] for span in layout.spans),
            "newline tokens": self.config.has_newline_token,
            "padding_embedding": self.config.padding_embedding,
        }
        for name, is_used in unsupported.items():
            if is_used:
                raise ConfigError(
                    f"rows of one shape with several views of an image do not support {name}",
                    'use task = "chat", or a policy with one view of one size',
                )
        V, M = len(layout.views), self.config.count_view_tokens(layout)[0]
        arranged = self._arrange_views(torch.arange(V * M, dtype=torch.float64).view(V, M, 1), layout)[:, 0].long()
        stream = build_stream([self.config.make_parts(layout)[0], text_part([0])], self.config.rules)
        fill = pack_streams([stream], len(stream)).feature_placements["image"]
        return torch.full((len(stream) - 1,), V * M).scatter(0, fill.token_indices, arranged[fill.rows])

    def forward_rows(
        self,
        template: RowTemplate,
        pixels: Tensor,
        ids: Tensor,
        questions: Tensor | None = None,
        turn_starts: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states (B, L, W) of text ids (B, L) after images (B, C, H, W), or all their views
        (B, V, C, H, W).

        `questions` (B, K, T) are the ids of the questions for fused queries, padded with −1. For `turn_starts`, see
        `RowTemplate.build_rows`. With fewer images than rows, adjacent rows share an image.
        """
        visual, depths = self._encode_row_images(pixels, template.feature_order)  # (B, M, W)
        text = self.decoder.embed(ids)  # (B, L, W)
        if len(ids) != len(pixels):  # several rows share an image
            visual = visual.repeat_interleave(len(ids) // len(pixels), 0)
        if self.queries is not None:
            visual = self.queries(visual, None, template.num_questions if questions is None else questions.unbind(1))
        if self.voco is not None:
            visual = torch.cat([visual, self.voco.expand(len(ids), -1, -1)], 1)
        if self.config.merge == "add":
            visual = visual + self.decoder.embed.weight[self.config.rules.fill_id]
        prefix = self.decoder.embed(template.ids[: template.num_prefix_ids].expand(len(ids), -1))
        is_1d = self.config.decoder.rotary.layout == "1d"
        rows = template.build_rows(prefix, visual.to(text.dtype), text, turn_starts, is_1d=is_1d)
        return rows.select_text(
            self.decoder.forward_embeddings(
                rows.layout.embeds,
                rows.layout.positions,
                rows.layout.plan,
                fusion_inputs=self._row_fusion_inputs(rows, template.num_prefix_ids, depths),
            )
        )

    def _encode_row_images(self, pixels: Tensor, order: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """Encode images to visual tokens (B, M, W), and to those of each DeepStack layer, in the order of the rows."""
        tokens, depths = self.encode_view_layers(pixels if pixels.ndim == 4 else pixels.flatten(0, 1))
        if order is None:
            return tokens, depths
        tokens, *depths = (one.reshape(len(pixels), -1, one.shape[-1]) for one in (tokens, *depths))
        if self.newline is not None:
            tokens = torch.cat([tokens, self.newline.expand(len(pixels), 1, -1)], 1)
        return tokens[:, order], [depth[:, order] for depth in depths]

    def _row_fusion_inputs(self, rows: TemplateRows, start: int, depths: Sequence[Tensor]) -> FusionInputs | None:
        """Build the inputs of the fusion point for rows whose image starts at `start`; `depths` are (B, M, W) each."""
        match self.config.decoder.fusion:
            case VisualExpertConfig():
                return VisualExpertInputs(rows.image_mask)
            case ImageLoRAConfig():  # every row has an image
                return ImageLoRAInputs(torch.ones_like(rows.image_mask))
            case DeepStackConfig():
                (B, L), M, device = rows.image_mask.shape, depths[0].shape[1], rows.image_mask.device
                columns = start + torch.arange(M, device=device)
                places = torch.arange(B, device=device)[:, None] * L + columns  # (B, M) among all B·L tokens
                return DeepStackInputs(places.flatten(), [depth.flatten(0, 1) for depth in depths])
        return None

    def forward_text(self, ids: Tensor) -> Tensor:
        """Return the hidden states (B, L, W) of text ids (B, L) without an image."""
        return self.decoder.forward_hidden(ids)

    # ---- costs --------------------------------------------------------------------------------------------------

    def workload(
        self,
        image_sizes: Sequence[tuple[int, int]],
        num_text_tokens: int,
        batch_size: int = 1,
        num_questions: int = 1,
        videos: Sequence[VisualLayout] = (),
        image_counts: Sequence[int] | None = None,
    ) -> vlm_cost.VLMWorkload:
        """Return the workload of a prefill: images, videos and text, with the logits of the last token.

        `image_sizes` are (height, width) in pixels. The prompt is counted `batch_size` times. Fused queries cost more
        with more questions about each image. For `image_counts`, see `get_image_layouts`.
        """
        config = self.config
        cuts = get_image_layouts(config, image_sizes, image_counts)
        image_tokens = [config.count_tokens(cut, num_questions) for cut in cuts]
        video_tokens = [config.count_tokens(video_layout) for video_layout in videos]
        entering = sum(image_tokens) + sum(video_tokens)
        prompt = Workload.prefill(num_text_tokens + entering, batch_size)
        if config.rules.bidirectional_prompt:
            prompt = prompt.replace(attention_pairs=batch_size * (num_text_tokens + entering) ** 2)
        for kind, counts in zip(VISUAL_KINDS, (image_tokens, video_tokens), strict=True):
            if kind in config.rules.bidirectional:
                ahead = batch_size * sum(n * (n - 1) // 2 for n in counts)
                prompt = prompt.replace(
                    attention_pairs=prompt.attention_pairs + ahead, span_pairs=prompt.span_pairs + ahead
                )
        if config.voco_tokens:
            unseen = self._count_unseen_pairs(image_tokens, num_text_tokens)
            cached = prompt.cached_tokens - batch_size * self._count_dropped_tokens(image_sizes)
            prompt = prompt.replace(attention_pairs=prompt.attention_pairs - batch_size * unseen, cached_tokens=cached)
        image_grids = [grid for cut in cuts for grid in _frame_grids(cut)] * batch_size
        frames = [grid for video_layout in videos for grid in _frame_grids(video_layout)] * batch_size
        if isinstance(self.tower, PackedViT):
            vision_work = self._vision_workloads(image_grids + frames)
        else:  # video frames may have another readout
            vision_work = vlm_cost.add_workloads(self._vision_workloads(image_grids), self._vision_workloads(frames))
        if self.queries is not None and cuts:  # all text tokens belong to the questions
            question_lengths = (num_text_tokens, *[0] * (num_questions - 1))
            vision_work += (
                self.queries.workload(config.count_connector_tokens(cuts[0]), batch_size * len(cuts), question_lengths),
            )
        return vlm_cost.VLMWorkload.from_decoder_workload(
            prompt.replace(context_tokens=batch_size * entering), *vision_work
        )

    def decode_step_workload(
        self, length: int, image_sizes: Sequence[tuple[int, int]], batch_size: int = 1
    ) -> Workload:
        """Return the workload of decoding the `length`-th token after such images.

        Image tokens that were dropped from the cache do not count.
        """
        return Workload.decode(max(1, length - self._count_dropped_tokens(image_sizes)), batch_size)

    def _count_dropped_tokens(self, sizes: Sequence[tuple[int, int]]) -> int:
        """Count the image tokens that the cache does not keep."""
        return (
            sum(map(self.config.count_connector_tokens, get_image_layouts(self.config, sizes)))
            if self.config.voco_tokens
            else 0
        )

    def _count_unseen_pairs(self, image_tokens: Sequence[int], text_tokens: int) -> int:
        """Count the attention pairs that VoCo masking removes from a causal row."""
        num_later, pairs = text_tokens, 0
        for n in reversed(image_tokens):
            pairs += (n - self.config.voco_tokens) * num_later
            num_later += n
        return pairs

    def _vision_workloads(self, grids: list[Grid]) -> tuple[Workload, ...]:
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
            return reduce(vlm_cost.add_workloads, works)
        return Workload.full_attention(num_prefix_tokens + grids[0].num_patches, V), self.connector.workload(
            self.config.feature_layout(grids[0]), V
        )

    def cost_components(self, workload: Workload) -> dict[str, vlm_cost.CostComponent]:
        """Return the cost components of the model by name."""
        connectors = [
            self.connector,
            *self.stack,
            *([] if self.position_embedding is None else [self.position_embedding]),
        ]
        return vlm_cost.make_cost_components(
            workload,
            self.tower,
            connectors,
            self.decoder,
            vision_feature_layer=self.config.vision_feature_layer,
            extra_parameters=[
                table for table in (self.padding_embedding, self.newline, self.voco) if table is not None
            ],
            queries=self.queries,
            reduction_flops=self._reduction_flops(),
        )

    def _reduction_flops(self) -> int:
        """Count the FLOPs of selecting the features that remain of one view."""
        config, reduction = self.config, self.config.active_reduction
        tower = config.tower if isinstance(config.tower, ViTConfig) else None
        return 0 if reduction is None or tower is None else reduction.count_flops(tower, config.view_grid.num_patches)


cost.count_flops.register(VLM, vlm_cost.count_flops)
cost.count_bytes.register(VLM, vlm_cost.count_bytes)


def prepare_images(config: VLMConfig, images: Sequence[Image.Image], num_images: int | None = None) -> VisionInputs:
    """Preprocess RGB images for the tower of this config, in float32 on the CPU; no weights are needed.

    `num_images` is the number of images of the conversation, by default of these.
    """
    num_images = len(images) if num_images is None else num_images
    policy = config.policy.for_images(num_images)
    views = [view for image in images for view in policy.to_pixel_values(image, config.mean, config.std)]
    if not views:
        raise ImageError("there is no image", "give at least one image, or omit the images argument")
    if isinstance(config.tower, PackedViTConfig):
        return _prepare_packed(config, views)
    layouts = get_image_layouts(config, [(image.height, image.width) for image in images], [num_images] * len(images))
    if config.has_unequal_views:
        assert isinstance(config.tower, ViTConfig | PatchTowerConfig)
        return VisionInputs(torch.cat([cut_patches(view[None], config.tower)[0][0] for view in views]), layouts)
    return VisionInputs(torch.stack(views), layouts)


def prepare_videos(config: VLMConfig, videos: Sequence[Tensor]) -> VisionInputs:
    """Convert normalized videos (T, C, H, W) to inputs of the tower of this config."""
    policy = config.policy
    if not isinstance(policy, TilesPolicy | AnyResPolicy | SplitPolicy):
        return _prepare_packed(config, videos)
    return VisionInputs(torch.cat(list(videos)), tuple(policy.layout_video(len(item)) for item in videos))


def get_image_layouts(
    config: VLMConfig, image_sizes: Sequence[tuple[int, int]], image_counts: Sequence[int] | None = None
) -> tuple[VisualLayout, ...]:
    """Return the layouts of images with these sizes (height, width).

    `image_counts` are the numbers of images of their conversations; by default all are of one.
    """
    image_counts = [len(image_sizes)] * len(image_sizes) if image_counts is None else image_counts
    cuts = [
        config.policy.for_images(count).layout(*size) for size, count in zip(image_sizes, image_counts, strict=True)
    ]
    return tuple(cut.views[0].grid if isinstance(config.tower, PackedViTConfig) else cut for cut in cuts)


def _prepare_packed(config: VLMConfig, items: Sequence[Tensor]) -> VisionInputs:
    tower = config.tower
    if not isinstance(tower, PackedViTConfig):
        raise ConfigError(f"{type(tower).__name__} takes views of one size, not patches", "use prepare_images")
    cut = [
        patchify_blocks(
            item, tower.patch_size, merge_size=tower.spatial_merge_size, temporal_patch_size=tower.temporal_patch_size
        )
        for item in items
    ]
    return VisionInputs(torch.cat([patches for patches, _ in cut]), tuple(grid for _, grid in cut))


def _frame_grids(layout: VisualLayout) -> list[Grid]:
    """Return the grids that the tower encodes for an image or a video."""
    return [layout] if isinstance(layout, Grid) else [view.grid for view in layout.views]


def _project_packed(connector: nn.Module, features: Tensor, grids: Sequence[Grid]) -> Tensor:
    """Project features (N, D) of all items to (ΣM, W).

    The features of a block are contiguous, so all blocks form one row of a grid.
    """
    m = grids[0].merge_size
    return connector(features[None], Grid(h=m, w=len(features) // m, merge_size=m))[0]


def _split_by_layout(tokens: Tensor, layouts: Sequence[ImageLayout]) -> Sequence[Tensor]:
    return tokens.split([len(layout.views) for layout in layouts])
