"""Vision-language model: vision tower, connector and decoder.

The tower encodes images, the connector projects their features to visual tokens, and the decoder processes these
tokens and the text tokens as one sequence. Tower, connector, fusion, resolution policy and positions are independent
choices.

Shapes: V views, C channels, H, W pixels, M visual tokens, W width of the decoder, B rows, L tokens of a row.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

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
from vitrail.connectors.feature_reduction import AnyReductionConfig
from vitrail.encoders.packed_vit import PackedViT
from vitrail.errors import ConfigError
from vitrail.models import vision_inputs, vlm_cost
from vitrail.models.vision_inputs import VisionInputs, get_image_layouts
from vitrail.models.vlm_config import VisualLayout, VLMConfig
from vitrail.models.vlm_vision_model import VisionFeatures, VLMVisionModel, list_frame_grids
from vitrail.nn import KVCache, Workload, cost, make_small_parameter
from vitrail.processing.batch_resize import get_fixed_view
from vitrail.processing.image_layout import ImageLayout
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


@MODELS.register("vlm")
class VLM(VLMVisionModel):
    """Vision-language model whose images are tokens of the stream.

    `model(batch, images)` returns logits (B, L, V) of a packed stream.
    """

    Config = VLMConfig

    def __init__(self, config: VLMConfig):
        super().__init__(config)
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

    # ---- pixels -------------------------------------------------------------------------------------------------

    def prepare_images(self, images: Sequence[Image.Image]) -> VisionInputs:
        """Preprocess RGB images for the tower."""
        return self._to_device(vision_inputs.prepare_images(self.config, images))

    def prepare_packed(self, visuals: Sequence[Tensor]) -> VisionInputs:
        """Cut normalized images (C, H, W) and videos (T, C, H, W) into patches for a packed tower."""
        return self._to_device(vision_inputs.prepare_packed(self.config, visuals))

    def prepare_videos(self, videos: Sequence[Tensor]) -> VisionInputs:
        """Convert normalized videos (T, C, H, W) to tower inputs: packed patches, or one view for each frame."""
        return self._to_device(vision_inputs.prepare_videos(self.config, videos))

    def _to_device(self, inputs: VisionInputs) -> VisionInputs:
        return inputs._replace(pixels=inputs.pixels.to(self.decoder.embed.weight))

    # ---- stream -------------------------------------------------------------------------------------------------

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
        arranged = self.arrange_views(torch.arange(V * M, dtype=torch.float64).view(V, M, 1), layout)[:, 0].long()
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
        image_grids = [grid for cut in cuts for grid in list_frame_grids(cut)] * batch_size
        frames = [grid for video_layout in videos for grid in list_frame_grids(video_layout)] * batch_size
        if isinstance(self.tower, PackedViT):
            vision_work = self.vision_workloads(image_grids + frames)
        else:  # video frames may have another readout
            vision_work = vlm_cost.add_workloads(self.vision_workloads(image_grids), self.vision_workloads(frames))
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
            reduction_flops=self.reduction_flops(),
        )


cost.count_flops.register(VLM, vlm_cost.count_flops)
cost.count_bytes.register(VLM, vlm_cost.count_bytes)
