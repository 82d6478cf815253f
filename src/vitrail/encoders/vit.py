"""Vision transformer. Configs cover CLIP, SigLIP, SigLIP 2, DINOv2, DINOv3, AIMv2, EVA-02 and InternViT.

B batch, C channels, H, W pixels, P patch size, h × w patches, N = h·w, X prefix tokens (CLS, registers), D width
"""

import math
from collections.abc import Sequence
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import LayerCount
from vitrail.encoders.encoder import EncoderConfig
from vitrail.encoders.layer_selection import FeatureLayer, run_blocks, run_blocks_to_layers
from vitrail.errors import ConfigError, ImageError
from vitrail.nn import (
    Attention,
    AttentionPlan,
    BlockConfig,
    LearnedPositionEmbedding,
    PatchEmbed,
    RotaryConfig,
    RotaryEmbedding,
    Rotation,
    Workload,
    attention_plan,
    build_grid_positions,
    build_sincos_embedding,
    compute_attention,
    cost,
    patchify,
)
from vitrail.nn.block import Block, ResidualBranch
from vitrail.nn.norms import make_norm
from vitrail.nn.parameters import count_parameter_bytes, make_small_parameter
from vitrail.nn.position_embedding import Interpolation
from vitrail.registry import ENCODERS, MODELS

Grids = Tensor | Sequence[tuple[int, int]]
"""(h, w) patches of every image: a tensor (B, 2) or pairs."""


class ViTConfig(EncoderConfig, tag="vit", tag_field="kind"):
    """ViT settings.

    image_size              native image size; pixels beyond whole patches are cropped (SigLIP-So400M/14 at 384: six
                            pixels), also for other sizes with the same remainder
    patch_order             how a patch is flattened: channels first (as a convolution) or last (NaFlex)
    patch_bias              whether the patch embedding has a bias
    cls_token               whether there is a CLS token
    register_tokens         number of register tokens
    mask_token              whether there is a learned token for masked patches (DINOv2)
    positions               tokens with learned position embeddings; registers never have any; "sincos" for fixed
                            sines and cosines of the patches (AIMv2)
    position_interpolation  interpolation of position embeddings for other grids
    rotary                  rotary positions; None for none
    rotary_span             size to which rotary positions are scaled, for any grid (EVA-02: 16, as in training)
    rotary_centered         rotary positions are those of patch centers in an image from −2π to 2π (DINOv3)
    norm_patches            whether a norm follows the patch embedding, before positions are added (AIMv2)
    norm_first              whether a norm precedes the blocks (CLIP)
    norm_last               norm after the blocks: on every token, on the pooled vector only (CLIP, EVA-02), or none
    pool                    how `forward_pooled` pools the tokens; "query" is attention of one learned query without
                            projection, and no MLP (AIMv2)
    head_width              width of a linear layer with bias for the pooled vector: classes, or the embedding of
                            EVA-CLIP; 0 for none
    head_activation         activation after this layer: tanh in the pooler of the original ViT
    """

    layers: LayerCount
    block: BlockConfig
    image_size: int = 224
    patch_size: int = 16
    channels: int = 3
    patch_order: Literal["channels_first", "channels_last"] = "channels_first"
    patch_bias: bool = True
    cls_token: bool = False
    register_tokens: int = 0
    mask_token: bool = False
    positions: Literal["none", "patches", "cls_and_patches", "sincos"] = "patches"
    position_interpolation: Interpolation = "bicubic"
    rotary: RotaryConfig | None = None
    rotary_span: int | None = None
    rotary_centered: bool = False
    norm_patches: bool = False
    norm_first: bool = False
    norm_last: Literal["none", "tokens", "pooled"] = "tokens"
    pool: Literal["none", "cls", "mean", "attention", "query"] = "none"
    head_width: int = 0
    head_activation: Literal["none", "tanh"] = "none"

    @property
    def width(self) -> int:
        return self.block.width

    @property
    def num_prefix_tokens(self) -> int:
        """Number of CLS and register tokens."""
        return int(self.cls_token) + self.register_tokens

    @property
    def pooled_width(self) -> int:
        """Width of the output of `forward_pooled`."""
        return self.head_width or self.block.width

    @property
    def keeps_aspect_ratio(self) -> bool:
        """Whether images keep their aspect ratio (NaFlex) instead of becoming squares of `image_size`."""
        return self.patch_order == "channels_last"

    def __post_init__(self) -> None:
        if self.patch_size < 1:
            raise ConfigError(f"patch_size is {self.patch_size}", "use 1 or more")
        if self.grid_size < 1:
            raise ConfigError(f"image_size {self.image_size} is smaller than patch_size {self.patch_size}")
        if self.block.branches != ("self", "mlp"):
            raise ConfigError(f"a ViT block needs branches self, mlp, not {', '.join(self.block.branches)}")
        if not self.cls_token and (self.pool == "cls" or self.positions == "cls_and_patches"):
            raise ConfigError("pool or positions need a CLS token", "set cls_token, or change pool and positions")
        if self.pool == "none" and (self.norm_last == "pooled" or self.head_width):
            raise ConfigError("a pooled norm or a head needs pool", "set pool to cls, mean or attention")
        if self.rotary is None and (self.rotary_span is not None or self.rotary_centered):
            raise ConfigError("rotary_span or rotary_centered is set without rotary", "set rotary")
        if self.rotary_span is not None and self.rotary_centered:
            raise ConfigError("rotary_span and rotary_centered both scale rotary positions", "set only one of them")
        if self.positions == "sincos" and self.block.width % 4:
            raise ConfigError(f"positions 'sincos' need a width that is a multiple of 4, not {self.block.width}")
        channels = self.block.attention.resolve_head_dim(self.block.width)
        if self.rotary is not None and self.rotary.head_dim != channels:
            raise ConfigError(
                f"rotary.head_dim is {self.rotary.head_dim}, and the heads have {channels} channels",
                f"set rotary.head_dim to {channels}",
            )


class AttentionPool(nn.Module):
    """Attention pooling (SigLIP): one learned query attends to all patches, then an MLP."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.probe = make_small_parameter(config.width)
        self.attention = Attention(config.width, config.attention, "cross")
        self.mlp = ResidualBranch(config.replace(layer_scale=None), "mlp")

    def forward(self, x: Tensor, segments: Tensor | None = None) -> Tensor:
        """Pool x (B, N, D) to (B, D). `segments` (B, N) are 0 for real patches."""
        plan = AttentionPlan()
        if segments is not None:
            plan = attention_plan(segments.new_zeros(len(x), 1), key_segments=segments)
        probe = self.probe.expand(len(x), 1, -1)
        return self.mlp(self.attention(probe, plan, context=x))[:, 0]


class QueryPool(nn.Module):
    """Attention pooling (AIMv2): one learned query attends to all patches, then a linear layer."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        width, bias = config.width, config.attention.bias in ("qkv", "all")
        self.heads = config.attention.heads
        self.query = make_small_parameter(width)
        self.kv = nn.Linear(width, 2 * width, bias=bias)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, segments: Tensor | None = None) -> Tensor:
        """Pool x (B, N, D) to (B, D). `segments` (B, N) are 0 for real patches."""
        plan = AttentionPlan()
        if segments is not None:
            plan = attention_plan(segments.new_zeros(len(x), 1), key_segments=segments)
        k, v = self.kv(x).unflatten(-1, (2, self.heads, -1)).unbind(2)  # (B, N, H, D / H) each
        query = self.query.view(self.heads, -1).expand(len(x), 1, -1, -1)
        return self.out(compute_attention(query, k, v, plan).flatten(2))[:, 0]


POOLERS: dict[str, type[nn.Module]] = {"attention": AttentionPool, "query": QueryPool}


@ENCODERS.register("vit")
@MODELS.register("vit")
class ViT(nn.Module):
    """Vision transformer: pixels (B, C, H, W) → patch features (B, N, D).

    Images may have any size that is a multiple of the patch size; position embeddings are interpolated. Images of
    different sizes are passed as patches (B, N, C·P·P) with their `grids`: row b has h·w patches, then padding. No
    patch attends to padding, and features of padding are undefined.
    """

    Config = ViTConfig

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.config = config
        block, width = config.block, config.block.width
        self.embed = PatchEmbed((1, config.patch_size, config.patch_size), width, config.channels, config.patch_bias)
        self.cls = make_small_parameter(width) if config.cls_token else None
        self.registers = make_small_parameter(config.register_tokens, width) if config.register_tokens else None
        self.mask = make_small_parameter(width) if config.mask_token else None
        self.positions = (
            None
            if config.positions in ("none", "sincos")
            else LearnedPositionEmbedding(
                (config.grid_size, config.grid_size),
                width,
                int(config.positions == "cls_and_patches"),
                config.position_interpolation,
            )
        )
        self.rotary = None if config.rotary is None else RotaryEmbedding(config.rotary)
        self.norm_patches = make_norm(block.norm, width, block.eps) if config.norm_patches else nn.Identity()
        self.norm_first = make_norm(block.norm, width, block.eps) if config.norm_first else nn.Identity()
        self.blocks = nn.ModuleList([Block(block) for _ in range(config.layers)])
        self.norm_last = nn.Identity() if config.norm_last == "none" else make_norm(block.norm, width, block.eps)
        self.pooler = POOLERS[config.pool](block) if config.pool in POOLERS else None
        self.head = nn.Linear(width, config.head_width) if config.head_width else None

    @torch.no_grad()
    def fold_normalization(self, scale: Sequence[float], offset: Sequence[float]) -> None:
        """Fold a pixel normalization into the patch embedding: x then gives the features of scale · x + offset."""
        weight, bias = self.embed.proj.weight, self.embed.proj.bias
        by_channel = weight.double().unflatten(1, (self.config.channels, -1))  # (D, C, P·P)
        scales, offsets = (weight.new_tensor(values, dtype=torch.float64)[:, None] for values in (scale, offset))
        constant = (by_channel * offsets).sum((1, 2))  # (D,), equal for all patches
        if bias is not None:
            bias.add_(constant)
        elif self.positions is not None:
            self.positions.table[self.positions.num_prefix_tokens :] += constant.to(weight.dtype)
        elif constant.any():
            raise ConfigError(
                "the pixel normalization cannot be folded: the tower has no patch bias and no positions",
                "set patch_bias = true",
            )
        weight.copy_((by_channel * scales).flatten(1))

    def forward(
        self,
        pixels: Tensor,
        grids: Grids | None = None,
        *,
        layer: FeatureLayer = None,
        patch_mask: Tensor | None = None,
        covered_grids: Sequence[tuple[int, int]] | None = None,
    ) -> Tensor:
        """Return the patch features (B, N, D) of `layer` (see `resolve_depth`) or of the last layer.

        Features of an earlier layer are without the last norm; later blocks are not run. Features of several layers
        are concatenated. `patch_mask` (B, N) selects the patches that the mask token replaces. `covered_grids` are the
        (h, w) patches at the top left of each view that an image covers: only these are attended to, and positions are
        those of such a grid. Patches in padding have the first position.
        """
        return self.forward_tokens(pixels, grids, layer=layer, patch_mask=patch_mask, covered_grids=covered_grids)[
            :, self.config.num_prefix_tokens :
        ]

    def forward_tokens(
        self,
        pixels: Tensor,
        grids: Grids | None = None,
        *,
        layer: FeatureLayer = None,
        patch_mask: Tensor | None = None,
        covered_grids: Sequence[tuple[int, int]] | None = None,
    ) -> Tensor:
        """Return the features of all tokens (B, X + N, D): CLS, registers, patches."""
        return self._forward(pixels, grids, layer, patch_mask, covered_grids)[0]

    def forward_layers(self, pixels: Tensor, layers: Sequence[int], grids: Grids | None = None) -> list[Tensor]:
        """Return the features of all tokens (B, X + N, D) of several layers and, last, of the last layer, in one pass.

        Features of the given layers are without the last norm, like those of `forward_tokens` with a `layer`.
        """
        x, plan, rotation, _ = self._embed_tokens(pixels, grids, None)
        every = [*layers, len(self.blocks)]
        plans = [AttentionPlan() if plan is None else plan] * len(self.blocks)
        *taps, last = run_blocks_to_layers(self.blocks, x, every, plans, rotation)
        return [*taps, self.norm_last(last) if self.config.norm_last == "tokens" else last]

    def forward_pooled(self, pixels: Tensor, grids: Grids | None = None) -> Tensor:
        """Return one vector per image, (B, D) or (B, head_width)."""
        if self.config.pool == "none":
            raise ConfigError("this tower has no pooling", "set pool in its config to cls, mean or attention")
        x, segments = self._forward(pixels, grids, None, None)
        X = self.config.num_prefix_tokens
        patches, segments = x[:, X:], None if segments is None else segments[:, X:]
        if self.pooler is not None:
            pooled = self.pooler(patches, segments)
        elif self.config.pool == "cls":
            pooled = x[:, 0]
        else:
            pooled = _mean_pool(patches, segments)
        pooled = self.norm_last(pooled) if self.config.norm_last == "pooled" else pooled
        if self.head is None:
            return pooled
        return self.head(pooled).tanh() if self.config.head_activation == "tanh" else self.head(pooled)

    @property
    def pooling_modules(self) -> list[nn.Module | None]:
        """Modules that only `forward_pooled` uses."""
        return [self.pooler, self.head, self.norm_last if self.config.norm_last == "pooled" else None]

    def batch_images(self, images: Sequence[Tensor]) -> tuple[Tensor, list[tuple[int, int]] | None]:
        """Batch images (C, H, W), or stacks (B, C, H, W) of images of one size.

        Returns pixels (B, C, H, W) if all have one size, else padded patches (B, N, K) and the grid of each image.
        """
        stacks = [image if image.ndim == 4 else image[None] for image in images]
        if len({stack.shape[1:] for stack in stacks}) == 1:
            return torch.cat(stacks), None
        rows, grids = zip(*(cut_patches(stack, self.config) for stack in stacks), strict=True)
        longest = max(row.shape[1] for row in rows)
        padded = [F.pad(row, (0, 0, 0, longest - row.shape[1])) for row in rows]
        return torch.cat(padded), [grid for row, grid in zip(rows, grids, strict=True) for _ in row]

    def workload(self, batch_size: int = 1, height: int | None = None, width: int | None = None) -> Workload:
        """Return the workload of a batch. The default size is the native one."""
        P = self.config.patch_size
        rows = (height or self.config.image_size) // P
        columns = (width or height or self.config.image_size) // P
        return Workload.full_attention(self.config.num_prefix_tokens + rows * columns, batch_size)

    # ---- from pixels to tokens ----------------------------------------------------------------------------------

    def _forward(
        self,
        pixels: Tensor,
        grids: Grids | None,
        layer: FeatureLayer,
        masked: Tensor | None,
        covered: Sequence[tuple[int, int]] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        x, plan, rotation, segments = self._embed_tokens(pixels, grids, masked, covered)
        x = run_blocks(self.blocks, x, layer, plan=plan, rotation=rotation)
        last = layer is None and self.config.norm_last == "tokens"
        return self.norm_last(x) if last else x, segments

    def _embed_tokens(
        self,
        pixels: Tensor,
        grids: Grids | None,
        masked: Tensor | None,
        covered: Sequence[tuple[int, int]] | None = None,
    ) -> tuple[Tensor, AttentionPlan | None, Rotation | None, Tensor | None]:
        """Return the input of the first block (B, X + N, D), its plan and rotation, and the segments of padding."""
        patches, pairs = self._to_patches(pixels, grids)
        N = patches.shape[1]
        segments = self._padding_segments(pairs, N, patches.device)
        x = self.embed(patches.to(self.embed.proj.weight.dtype))  # (B, N, D)
        if masked is not None:
            if self.mask is None:
                raise ConfigError("this tower has no mask token", "set mask_token in its config")
            x = torch.where(masked[..., None], self.mask, x)
        if covered is not None:
            self._check_covered_grids(covered, pairs, len(x))
        x = self.norm_first(self._add_positions(self.norm_patches(x), pairs, covered))  # (B, X + N, D)
        rotation = None if self.rotary is None else self.rotary(self._rotary_positions(pairs, N, x.device))
        plan = None if segments is None else attention_plan(segments)
        if covered is not None and any(pair != pairs[0] for pair in covered):
            keys = self._uncovered_segments(covered, pairs[0], x.device)
            plan = attention_plan(torch.zeros_like(keys), key_segments=keys)
        return x, plan, rotation, segments

    def _to_patches(self, pixels: Tensor, grids: Grids | None) -> tuple[Tensor, list[tuple[int, int]]]:
        """Return patches (B, N, C·P·P) and their grids: one for all, or one per row."""
        P, C = self.config.patch_size, self.config.channels
        if pixels.ndim == 4 and grids is None:
            patches, grid = cut_patches(pixels, self.config)
            return patches, [grid]
        if pixels.ndim != 3 or grids is None:
            raise ImageError(
                f"the tower got {tuple(pixels.shape)} {'without' if grids is None else 'with'} grids",
                f"pass pixels (B, C, H, W), or patches (B, N, {C * P * P}) with their grids",
            )
        pairs = [(int(h), int(w)) for h, w in (grids.tolist() if isinstance(grids, Tensor) else grids)]
        B, N, K = pixels.shape
        if K != C * P * P or len(pairs) != B:
            raise ImageError(
                f"the tower got {B} rows of patches of {K} values and {len(pairs)} grids",
                f"pass patches of {C * P * P} values, and one grid per row",
            )
        for h, w in pairs:
            if h < 1 or w < 1 or h * w > N:
                raise ImageError(f"a grid of {h} × {w} patches does not fit a row of {N}")
        return pixels, pairs

    def _padding_segments(self, pairs: list[tuple[int, int]], N: int, device: torch.device) -> Tensor | None:
        """Return segments (B, X + N), 0 for real tokens and −1 for padding; None without padding."""
        if all(h * w == N for h, w in pairs):
            return None
        X = self.config.num_prefix_tokens
        real = torch.tensor([X + h * w for h, w in pairs], device=device)[:, None]  # (B, 1)
        return -(torch.arange(X + N, device=device) >= real).long()

    def _check_covered_grids(
        self, covered: Sequence[tuple[int, int]], pairs: list[tuple[int, int]], batch_size: int
    ) -> None:
        rows, columns = pairs[0]
        if self.positions is None or self.rotary is not None:
            raise ConfigError("covered_grids need learned positions, and no rotary ones", "use another tower")
        if len(pairs) != 1 or len(covered) != batch_size:
            raise ImageError(f"{len(covered)} covered grids for {batch_size} views", "pass one for each view (C, H, W)")
        for h, w in covered:
            if not (1 <= h <= rows and 1 <= w <= columns):
                raise ImageError(f"a covered grid of {h} × {w} patches does not fit a view of {rows} × {columns}")

    def _uncovered_segments(
        self, covered: Sequence[tuple[int, int]], grid: tuple[int, int], device: torch.device
    ) -> Tensor:
        """Return segments (B, X + N) of keys: 0 for prefix tokens and covered patches, −1 for patches in padding."""
        heights, widths = torch.tensor(covered, device=device)[:, :, None].unbind(1)  # (B, 1) each
        rows, columns = (torch.arange(size, device=device) for size in grid)
        uncovered = (rows >= heights)[:, :, None] | (columns >= widths)[:, None]  # (B, h, w)
        return F.pad(-uncovered.flatten(1).long(), (self.config.num_prefix_tokens, 0))

    def _add_positions(
        self, x: Tensor, pairs: list[tuple[int, int]], covered: Sequence[tuple[int, int]] | None = None
    ) -> Tensor:
        """Add learned positions and prepend the prefix tokens: (B, N, D) → (B, X + N, D)."""
        cls = self.cls
        if self.config.positions == "sincos":
            waves = {pair: build_sincos_embedding(*pair, x.shape[-1], x.device).to(x.dtype) for pair in set(pairs)}
            x = x + _stack_padded([waves[pair] for pair in pairs], x.shape[1])
        if self.positions is not None:
            lead = self.positions.num_prefix_tokens
            own = pairs if covered is None else [*covered]
            tables = {pair: self.positions(*pair) for pair in set(own)}  # (lead + h·w, D) each
            cells = {pair: table[lead:] for pair, table in tables.items()}
            if covered is not None:
                cells = {pair: _spread_cells(table, pair, pairs[0]) for pair, table in cells.items()}
            x = x + _stack_padded([cells[pair] for pair in own], x.shape[1])
            if cls is not None and lead:
                cls = cls + tables[own[0]][0]
        prefix = [p.view(-1, x.shape[-1]) for p in (cls, self.registers) if p is not None]
        return torch.cat([torch.cat(prefix).expand(len(x), -1, -1), x], dim=1) if prefix else x

    def _rotary_positions(self, pairs: list[tuple[int, int]], N: int, device: torch.device) -> Tensor:
        """Return rotary positions (1 or B, X + N, 3). Prefix tokens have position 0: no rotation."""
        tables, span = {}, self.config.rotary_span
        for h, w in set(pairs):
            cells = build_grid_positions(1, h, w, device=device).float()
            t, y, x = cells.unbind(-1)
            if span is not None:
                cells = torch.stack([t, y / h * span, x / w * span], dim=-1)
            if self.config.rotary_centered:
                y, x = (2 * math.pi * (2 * ((i + 0.5) / size) - 1) for i, size in ((y, h), (x, w)))
                cells = torch.stack([t, y, x], dim=-1)
            tables[h, w] = cells
        return F.pad(_stack_padded([tables[pair] for pair in pairs], N), (0, 0, self.config.num_prefix_tokens, 0))


def _mean_pool(x: Tensor, segments: Tensor | None) -> Tensor:
    """Return the mean of real patches: x (B, N, D), segments (B, N) → (B, D). Sums are in float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if segments is None:
        return x.mean(1, dtype=wide).to(x.dtype)
    real = segments.eq(0)[..., None]
    return (x.where(real, 0).sum(1, dtype=wide) / real.sum(1)).to(x.dtype)


def _spread_cells(cells: Tensor, pair: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """Place the cells (h·w, D) at the top left of a larger grid, and repeat the first one elsewhere."""
    rows, columns = (
        F.pad(torch.arange(size), (0, total - size), value=-1) for size, total in zip(pair, grid, strict=True)
    )
    places = rows[:, None] * pair[1] + columns
    return cells[places.where((rows[:, None] >= 0) & (columns >= 0), 0).flatten()]


def _stack_padded(tables: list[Tensor], N: int) -> Tensor:
    """Pad tables to N rows with zeros and stack them."""
    return torch.stack([t if len(t) == N else F.pad(t, (0, 0, 0, N - len(t))) for t in tables])


class PatchSettings(Protocol):
    """Protocol of configs of towers that take patches."""

    @property
    def image_size(self) -> int: ...

    @property
    def patch_size(self) -> int: ...

    @property
    def channels(self) -> int: ...

    @property
    def patch_order(self) -> str: ...


def cut_patches(pixels: Tensor, config: PatchSettings) -> tuple[Tensor, tuple[int, int]]:
    """Cut pixels (B, C, H, W) into patches (B, N, C·P·P) in the order of the tower; return them and their grid."""
    P, C = config.patch_size, config.channels
    if pixels.shape[1] != C:
        raise ImageError(f"the tower expects {C} channels, but pixels have shape {tuple(pixels.shape)}")
    pixels = crop_to_patches(pixels, P, config.image_size)
    patches = patchify(pixels, (1, P, P))
    if config.patch_order == "channels_last":
        patches = patches.unflatten(-1, (C, P * P)).mT.flatten(-2)
    return patches, (pixels.shape[2] // P, pixels.shape[3] // P)


def crop_to_patches(pixels: Tensor, patch_size: int, image_size: int) -> Tensor:
    """Crop the right and bottom pixels beyond whole patches, if the remainder is that of the native size."""
    remainder = image_size % patch_size
    crop = [
        slice(-remainder) if remainder and size % patch_size == remainder else slice(None) for size in pixels.shape[-2:]
    ]
    return pixels[..., crop[0], crop[1]]


# ---- costs ------------------------------------------------------------------------------------------------------


@cost.count_flops.register
def _(module: ViT, work: Workload) -> int:
    """FLOPs of `model(pixels)`, without pooling and head."""
    patches = work.tokens - work.sequences * module.config.num_prefix_tokens
    return cost.count_flops(module.embed, work.replace(tokens=patches)) + cost.count_flops(module.blocks, work)


@cost.count_bytes.register
def _(module: ViT, work: Workload) -> cost.MemoryBytes:
    """Bytes of `model(pixels)`, which reads neither the pooling modules nor the mask token."""
    return cost.sum_child_bytes(module, work) + cost.MemoryBytes(
        read=-count_parameter_bytes(*module.pooling_modules, module.mask)
    )


@cost.count_flops.register
def _(module: AttentionPool, work: Workload) -> int:
    """The workload counts patches without prefix tokens: the context of one query per image."""
    probes = Workload(tokens=work.sequences, attention_pairs=0, context_tokens=work.tokens, context_pairs=work.tokens)
    return cost.count_flops(module.attention, probes) + cost.count_flops(module.mlp, probes)


@cost.count_flops.register
def _(module: QueryPool, work: Workload) -> int:
    """The workload counts patches without prefix tokens: the keys of one query per image."""
    probes = work.replace(tokens=work.sequences)
    scores = 4 * work.tokens * module.out.in_features  # two products of the query with all keys and values
    return cost.count_flops(module.kv, work) + scores + cost.count_flops(module.out, probes)


cost.count_bytes.register(AttentionPool, cost.sum_child_bytes)
cost.count_bytes.register(QueryPool, cost.sum_child_bytes)
