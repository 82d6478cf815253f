"""Vision-language model with cross-attention to image features (Flamingo, Idefics, Llama-3.2-Vision).

Gated blocks between the decoder layers attend to the image features. In the stream, one token marks the position of
each image.

Shapes: P images, T tiles, C channels, H, W pixels, N features of an image, D width of the features, B rows, L tokens
of a row, S features of a row, V vocabulary size.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.backbones.fusion import CrossAttentionFusionConfig, CrossAttentionInputs, make_image_plan
from vitrail.config import Config
from vitrail.connectors import AnyConnectorConfig, FusedQueryConfig, make_connector
from vitrail.encoders.encoder import AnyEncoderConfig, make_encoder
from vitrail.encoders.layer_selection import resolve_depth
from vitrail.encoders.tiled_vit import TiledViT, TiledViTConfig
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import ConfigError, ImageError, StreamError
from vitrail.models import vlm_cost
from vitrail.nn import AttentionPlan, KVCache, LearnedPositionEmbedding, Workload, cost
from vitrail.processing.batch_resize import get_fixed_view
from vitrail.processing.image_layout import ResolutionPolicy
from vitrail.processing.image_loading import NORMALIZATIONS, to_pixel_values
from vitrail.processing.mllama_canvas import CanvasPolicy
from vitrail.processing.resolution_policies import AnyResolutionPolicy, NaivePolicy
from vitrail.registry import MODELS
from vitrail.stream import PackedBatch, RowPart, RowTemplate, Stream, build_row_template, build_rows, image_part


class CrossAttentionVLMConfig(Config):
    """Config of a `CrossAttentionVLM`.

    connector             projects the tower's features before cross-attention; None: features are used as they are
    image_token_id        id of the token at the position of an image: <|image|> in Llama-3.2-V, <image> in Idefics
    join_adjacent         text after adjacent images attends to all of them (Llama-3.2-V), not to the last one only
    vision_feature_layer  ViT layer whose features are used; None: the last layer and its norm
    keep_prefix_tokens    keep a ViT's CLS and register tokens (Idefics); a tiled tower always keeps CLS
    position_embedding    add a learned embedding of each grid position to a ViT's features; it starts at zero
    policy                resolution policy; None: a canvas of tiles for a tiled tower, else a plain resize
    mean, std             pixel normalization of each channel
    """

    tower: AnyEncoderConfig
    decoder: DecoderConfig
    image_token_id: int
    connector: AnyConnectorConfig | None = None
    join_adjacent: bool = False
    vision_feature_layer: int | None = None
    keep_prefix_tokens: bool = False
    position_embedding: bool = False
    policy: AnyResolutionPolicy | None = None
    mean: tuple[float, ...] = NORMALIZATIONS["clip"].mean
    std: tuple[float, ...] = NORMALIZATIONS["clip"].std

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Read plain data in which models and parts may be preset names (see `vitrail.models.preset_expansion`)."""
        from vitrail.models.preset_expansion import expand_presets  # avoids a circular import

        return super().from_dict(expand_presets(data))

    def __post_init__(self) -> None:
        D, num_ids = self.width, self.decoder.vocab_size + self.decoder.extra_embeddings
        if not 0 <= self.image_token_id < num_ids:
            raise ConfigError(
                f"image_token_id is {self.image_token_id}, but the decoder embeds {num_ids} ids",
                f"set an id below {num_ids}",
            )
        connector_input, connector_output = (
            (D, D) if self.connector is None else (self.connector.in_features, self.connector.out_features)
        )
        if (self.tower.width, connector_output) != (connector_input, D):
            raise ConfigError(
                f"widths do not match: tower {self.tower.width}, connector {connector_input} → {connector_output}, "
                f"cross-attention {D}",
                "set connector.in_features, connector.out_features and fusion.context_width to matching widths",
            )
        if isinstance(self.connector, FusedQueryConfig):
            raise ConfigError("connector is a fused query connector, which this model does not support", "use another")
        if self.tower.input_kind == "patches" or self.tower.normalizes_pixels:
            raise ConfigError(
                f"tower is a {type(self.tower).__name__}, which this model does not support", "use a ViT or a tiled ViT"
            )
        if isinstance(self.tower, ViTConfig):
            resolve_depth(self.vision_feature_layer, self.tower.layers)  # raises if the layer does not exist
        elif self.vision_feature_layer is not None or self.keep_prefix_tokens:
            raise ConfigError(
                "vision_feature_layer and keep_prefix_tokens need a ViT tower", "set `feature_layers` of a tiled tower"
            )
        elif self.position_embedding and self.tower.input_kind == "tiles":
            raise ConfigError("a tiled tower has its own position embedding", "remove position_embedding")
        if self.policy is not None:
            self._check_policy(self.policy)

    def _check_policy(self, policy: ResolutionPolicy) -> None:
        usual = self._default_policy()
        canvas_keys, view_keys = ("tile_size", "max_tiles", "patch_size"), ("image_size", "patch_size", "unread_pixels")
        keys = canvas_keys if isinstance(usual, CanvasPolicy) else view_keys
        if isinstance(policy, CanvasPolicy) != isinstance(usual, CanvasPolicy) or not all(
            hasattr(policy, key) for key in keys
        ):
            raise ConfigError(
                f"{type(self.tower).__name__} does not support the policy {type(policy).__name__}",
                "use canvas with a tiled tower, and a policy with one view for each image with a ViT",
            )
        for key in keys:
            value, expected = getattr(policy, key), getattr(usual, key)
            if value != expected:
                raise ConfigError(
                    f"policy.{key} is {value}, but the tower has {expected}", f"set policy.{key} = {expected}"
                )

    def _default_policy(self) -> CanvasPolicy | NaivePolicy:
        tower = self.tower
        if isinstance(tower, TiledViTConfig):
            return CanvasPolicy(tile_size=tower.image_size, patch_size=tower.patch_size, max_tiles=tower.max_tiles)
        return NaivePolicy(
            image_size=tower.image_size, patch_size=tower.patch_size, unread_pixels=tower.image_size % tower.patch_size
        )

    @property
    def resolved_policy(self) -> ResolutionPolicy:
        """The resolution policy, given or default."""
        return self.policy or self._default_policy()

    @property
    def cross_attention(self) -> CrossAttentionFusionConfig:
        if not isinstance(self.decoder.fusion, CrossAttentionFusionConfig):
            raise ConfigError(
                f"decoder.fusion is {type(self.decoder.fusion).__name__}, not cross-attention",
                'set fusion.kind = "cross", or use the model kind = "vlm"',
            )
        return self.decoder.fusion

    @property
    def width(self) -> int:
        """Width of the features that cross-attention reads."""
        return self.cross_attention.context_width or self.decoder.block.width


class ImageViews(NamedTuple):
    """Images in the order of the samples and of their image tokens."""

    pixels: Tensor  # (P, C, H, W) or, for a tiled tower, (P, T, C, H, W)
    aspect_ratios: Sequence[tuple[int, int]] = ()  # rows and columns of tiles of each image, for a tiled tower


@MODELS.register("cross-attention-vlm")
class CrossAttentionVLM(nn.Module):
    """Vision-language model whose decoder attends to image features outside the stream.

    `model(batch, images)` returns logits (B, L, V) of a packed text stream.
    """

    Config = CrossAttentionVLMConfig

    def __init__(self, config: CrossAttentionVLMConfig):
        super().__init__()
        self.config = config
        self.tower: Any = make_encoder(config.tower)
        self.position_embedding = None
        if config.position_embedding:
            side, num_prefix_tokens = (
                config.tower.grid_size,
                config.tower.num_prefix_tokens if config.keep_prefix_tokens else 0,
            )
            self.position_embedding = LearnedPositionEmbedding((side, side), config.tower.width, num_prefix_tokens)
            nn.init.zeros_(self.position_embedding.table)
        self.connector = None if config.connector is None else make_connector(config.connector)
        self.decoder = Decoder(config.decoder)

    def prepare_images(self, images: Sequence[Image.Image]) -> ImageViews:
        """Preprocess RGB images for the tower."""
        config, policy, weight = self.config, self.config.resolved_policy, self.decoder.embed.weight
        if not images:
            raise ImageError("there is no image", "give at least one image, or omit the images argument")
        views = [
            torch.stack([to_pixel_values(view, config.mean, config.std) for view in policy.apply(image)]).to(weight)
            for image in images
        ]  # (1 or number of tiles, C, H, W) each
        if not isinstance(config.tower, TiledViTConfig):
            return ImageViews(torch.cat(views))
        T = config.tower.max_tiles
        pixels = torch.stack([F.pad(tiles, (0, 0) * 3 + (0, T - len(tiles))) for tiles in views])  # (P, T, C, H, W)
        return ImageViews(pixels, [policy.layout(image.height, image.width).spans[0].view_grid for image in images])

    def encode_images(self, images: ImageViews) -> list[Tensor]:
        """Encode images to features (N, D) each; N differs between images with different numbers of tiles."""
        if isinstance(self.tower, TiledViT):
            features = self.tower(images.pixels, images.aspect_ratios).flatten(1, 2)  # (P, T·tokens, ·)
            counts = [rows * columns * self.tower.config.tokens_per_tile for rows, columns in images.aspect_ratios]
        else:
            if images.aspect_ratios:
                raise ImageError("aspect_ratios were given, but the tower has no tiles", "leave aspect_ratios out")
            features = self.forward_features(images.pixels)  # (P, N, ·)
            counts = [features.shape[1]] * len(features)
        if self.connector is not None:
            features = self.connector(features, counts)
            counts = [self.connector.config.count_tokens(count) for count in counts]
        return [one[:count] for one, count in zip(features, counts, strict=True)]

    def forward_features(self, pixels: Tensor) -> Tensor:
        """Encode images (P, C, H, W) with the ViT to features (P, N, ·), with learned position embeddings if the model
        has them.
        """
        if isinstance(self.tower, ViT):
            encode = self.tower.forward_tokens if self.config.keep_prefix_tokens else self.tower
            features = encode(pixels, layer=self.config.vision_feature_layer)
        else:
            features = self.tower(pixels)
        return (
            features
            if self.position_embedding is None
            else features + self.position_embedding(*self.position_embedding.grid_size)
        )

    def forward_hidden(
        self, batch: PackedBatch, images: ImageViews | None = None, *, cache: KVCache | None = None
    ) -> Tensor:
        """Return the hidden states (B, L, width) before the output head.

        With a cache, every row is one sample from its first token. Later calls of `model.decoder(ids, cache=cache)`
        attend to the image features of the last token.
        """
        device = self.decoder.embed.weight.device
        attention: dict = {"plan": batch.attention_plan().to(device)}
        if cache is not None:
            attention = {"cache": cache, "counts": torch.tensor(batch.one_sample_per_row.lengths)}
        positions = batch.positions[..., 0].to(device)
        inputs = self._build_cross_attention_inputs(batch, [] if images is None else self.encode_images(images))
        return self.decoder.forward_hidden(batch.ids.to(device), positions=positions, fusion_inputs=inputs, **attention)

    def forward(self, batch: PackedBatch, images: ImageViews | None = None) -> Tensor:
        return self.decoder.compute_logits(self.forward_hidden(batch, images))

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
        """Make the template of training rows: a text prefix, one image token, and text.

        Image features do not depend on the questions, so `num_questions` changes nothing. No policy of this model needs
        an `image_shape`.
        """
        view = get_fixed_view(self.config.resolved_policy)
        template = build_row_template(prefix_ids, [image_part(1, [self.config.image_token_id])], text_length)
        if not prefix_ids:
            return template
        image_mask = F.pad(template.image_mask, (len(prefix_ids), text_length))
        return replace(
            template, context_plan=make_image_plan(image_mask, sum(self._count_features([view.canvas_size])))
        )

    def forward_rows(
        self,
        template: RowTemplate,
        pixels: Tensor,
        ids: Tensor,
        questions: Tensor | None = None,
        turn_starts: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states (B, L, W) of text ids (B, L) after images (B, C, H, W), whatever the `questions`.

        With `turn_starts` (B, L), turns do not attend to each other.
        """
        x = self.decoder.embed(torch.cat([template.ids.expand(len(ids), -1), ids], 1))
        shared, text = x.tensor_split([template.prefix_length], 1)
        rows = build_rows(
            [RowPart(shared), RowPart(text, turn_starts=turn_starts)],
            is_1d=self.config.decoder.rotary.layout == "1d",
        )
        features = self.forward_features(pixels)
        features = features if self.connector is None else self.connector(features)
        # Copy the plan: it caches masks, and masks from a CUDA graph capture must not be reused.
        plan = None if template.context_plan is None else template.context_plan.to(ids.device)
        images = CrossAttentionInputs(features, plan)
        hidden = self.decoder.forward_embeddings(rows.embeds, rows.positions, rows.plan, fusion_inputs=images)
        return hidden[:, template.prefix_length :]

    def forward_text(self, ids: Tensor) -> Tensor:
        """Return the hidden states (B, L, W) of text ids (B, L) without an image."""
        return self.decoder.forward_hidden(ids, fusion_inputs=self.empty_image_inputs(*ids.shape))

    def _build_cross_attention_inputs(
        self, batch: PackedBatch, features: Sequence[Tensor]
    ) -> CrossAttentionInputs | None:
        """Arrange the image features row by row, with the plan of which token attends to which image."""
        image_mask = (batch.ids == self.config.image_token_id) & (batch.segments >= 0)  # (B, L), without padding
        row, at = image_mask.nonzero(as_tuple=True)
        if len(row) != len(features):
            raise StreamError(
                f"there are {len(features)} images, but {len(row)} image tokens (id {self.config.image_token_id}) "
                f"in the stream",
                "write one image token for each image",
            )
        weight = self.decoder.embed.weight
        if not features:
            return self.empty_image_inputs(*image_mask.shape)
        # Rows hold samples in packed order; images are given in sample order.
        order = batch.segments[row, at].argsort(stable=True).argsort()
        ordered = [features[i] for i in order.tolist()]
        row_features = [
            torch.cat([weight.new_zeros(0, self.config.width), *own]) for own in _split_by_row(ordered, image_mask)
        ]
        sizes = torch.tensor([len(one) for one in ordered], device=image_mask.device)
        plan = make_image_plan(image_mask, sizes, join_adjacent=self.config.join_adjacent, segments=batch.segments)
        padded = pad_sequence(row_features, batch_first=True)  # (B, S, D)
        return CrossAttentionInputs(padded, plan.to(weight.device))

    def empty_image_inputs(self, num_rows: int, num_tokens: int) -> CrossAttentionInputs | None:
        """Return the cross-attention inputs of `num_rows` text rows without images."""
        if self.config.cross_attention.without_image == "skip":
            return None
        # Tokens without an image still pass through the MLPs of the cross-attention blocks: give them masked features.
        weight = self.decoder.embed.weight
        segments = torch.zeros(num_rows, num_tokens, dtype=torch.long, device=weight.device)
        none = AttentionPlan(segments=segments, key_segments=torch.full_like(segments[:, :1], -1))
        return CrossAttentionInputs(weight.new_zeros(num_rows, 1, self.config.width), none)

    # ---- costs --------------------------------------------------------------------------------------------------

    def workload(
        self, image_sizes: Sequence[tuple[int, int]], num_text_tokens: int, batch_size: int = 1
    ) -> vlm_cost.VLMWorkload:
        """Return the workload of a prefill: images, one image token each, and text, with the logits of the last token.

        `image_sizes` are (height, width) in pixels. The prompt is counted `batch_size` times.
        """
        counts = self._count_features(image_sizes)
        prompt = Workload.prefill(num_text_tokens + len(image_sizes), batch_size)
        if not counts:
            return vlm_cost.VLMWorkload.from_decoder_workload(prompt)
        visible = [self._count_visible_features(counts[: i + 1]) for i in range(len(counts))]  # for each image token
        pairs = batch_size * (sum(visible) + num_text_tokens * visible[-1])
        prompt = prompt.replace(context_tokens=batch_size * sum(counts), context_pairs=pairs)
        return vlm_cost.VLMWorkload.from_decoder_workload(prompt, *self._vision_workloads(image_sizes, batch_size))

    def decode_step_workload(
        self, length: int, image_sizes: Sequence[tuple[int, int]], batch_size: int = 1
    ) -> Workload:
        """Return the workload of decoding the `length`-th token after such images; their keys and values are cached."""
        return (
            Workload.decode(length, batch_size)
            .with_context(self._count_visible_features(self._count_features(image_sizes)), batch_size)
            .replace(context_tokens=0)
        )

    def _count_visible_features(self, counts: Sequence[int]) -> int:
        """Count the features that a token after these images attends to."""
        return sum(counts if self.config.join_adjacent else counts[-1:])

    def _count_features(self, sizes: Sequence[tuple[int, int]]) -> list[int]:
        """Count the cross-attention features of each image."""
        counts = [self._count_tiles(size) * self._features_per_tile for size in sizes]
        return counts if self.connector is None else [self.connector.config.count_tokens(count) for count in counts]

    def _vision_workloads(self, sizes: Sequence[tuple[int, int]], batch: int) -> tuple[Workload, Workload | None]:
        """Return the workloads of the tower and the connector. Empty tiles are computed too."""
        P, tower = batch * len(sizes), self.config.tower
        tower_work, tiles = self.tower.workload(P), 1
        if isinstance(tower, TiledViTConfig):
            tiles, all_tokens = tower.max_tiles, tower.max_tiles * tower.padded_tokens_per_tile
            # These do not attend to each other.
            empty = [all_tokens - self._count_tiles(size) * tower.tokens_per_tile for size in sizes]
            tower_work = tower_work.replace(
                attention_pairs=batch * sum(all_tokens**2 - empty_tokens**2 for empty_tokens in empty)
            )
        return tower_work, None if self.connector is None else self.connector.workload(
            tiles * self._features_per_tile, P
        )

    def _count_tiles(self, size: tuple[int, int]) -> int:
        """Count the tiles of an image of this size; 1 for a ViT."""
        return len(self.config.resolved_policy.layout(*size).views)

    @property
    def _features_per_tile(self) -> int:
        """Number of tower features of one tile."""
        tower = self.config.tower
        if isinstance(tower, TiledViTConfig):
            return tower.tokens_per_tile
        return tower.grid_size**2 + (tower.num_prefix_tokens if self.config.keep_prefix_tokens else 0)

    def cost_components(self, workload: Workload) -> dict[str, vlm_cost.CostComponent]:
        """Return the cost components of the model by name."""
        connectors = [part for part in (self.connector, self.position_embedding) if part is not None]
        return vlm_cost.make_cost_components(
            workload, self.tower, connectors, self.decoder, vision_feature_layer=self.config.vision_feature_layer
        )


cost.count_flops.register(CrossAttentionVLM, vlm_cost.count_flops)
cost.count_bytes.register(CrossAttentionVLM, vlm_cost.count_bytes)


def _split_by_row(items: Sequence[Tensor], marks: Tensor) -> list[Sequence[Tensor]]:
    ends = marks.sum(1).cumsum(0).tolist()
    return [items[start:end] for start, end in zip([0, *ends], ends, strict=False)]
