"""Segment Anything's image encoder (ViTDet): windowed attention, a few blocks with full attention, and a neck.

B images, C channels, P patch size, h × w patches, N = h·w, W width, H heads, D head width, G output width
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Config, LayerCount, NonNegativeInt, PositiveInt
from vitrail.encoders.layer_selection import check_layer_indices, resolve_depth
from vitrail.encoders.vit import crop_to_patches
from vitrail.errors import ConfigError
from vitrail.nn import (
    Attention,
    AttentionPlan,
    BlockConfig,
    LearnedPositionEmbedding,
    PatchEmbed,
    Workload,
    compute_attention,
    cost,
)
from vitrail.nn.attention import apply_shared_layer
from vitrail.nn.block import ResidualBranch
from vitrail.nn.norms import make_norm
from vitrail.nn.parameters import count_parameter_bytes
from vitrail.registry import MODELS

EPS = 1e-6  # of the norms in the neck
CHANNEL_MULTIPLE = 8  # fused half-precision kernels need a multiple of this many channels


class SAMConfig(Config, tag="sam", tag_field="kind"):
    """SAM image encoder settings.

    image_size              native image size; pixels beyond whole patches are cropped, as in `ViT`
    window_size             side of attention windows in patches; 0 for none
    full_attention_layers   blocks without windows, counted from 0
    use_absolute_positions  whether to add learned position embeddings
    use_relative_positions  whether attention has learned relative positions of rows and columns
    out_features            output width of the neck
    """

    layers: LayerCount
    block: BlockConfig
    image_size: int = 1024
    patch_size: int = 16
    channels: int = 3
    window_size: NonNegativeInt = 14
    full_attention_layers: tuple[int, ...] = (2, 5, 8, 11)
    use_absolute_positions: bool = True
    use_relative_positions: bool = True
    out_features: PositiveInt = 256

    @property
    def grid_size(self) -> int:
        """Patches along a side of the native image."""
        return self.image_size // self.patch_size

    @property
    def width(self) -> int:
        """Width of the output features."""
        return self.out_features

    def __post_init__(self) -> None:
        if self.grid_size < 1:
            raise ConfigError(f"image_size {self.image_size} is smaller than patch_size {self.patch_size}")
        check_layer_indices("full_attention_layers", self.full_attention_layers, self.layers)
        block = self.block
        if (
            block.branches != ("self", "mlp")
            or block.norm_position != "before"
            or block.gated
            or block.layer_scale is not None
        ):
            raise ConfigError("a SAM block needs branches self, mlp, pre-norm, no gates and no layer scale")

    def is_windowed(self, block: int) -> bool:
        """Return whether a block has windowed attention."""
        return self.window_size > 0 and block not in self.full_attention_layers


class RelativePositionAttention(Attention):
    """Attention over a 2-D feature map with decomposed relative positions.

    The position terms are computed as extra channels: queries get their scores for all rows and columns, keys get
    one-hot rows and columns. One matrix product gives the scores, and a fused kernel needs no N × N bias.

    `grid_size` is the native size of the two learned tables, which are interpolated for others; 0 for no positions.
    """

    def __init__(self, config: BlockConfig, grid_size: int):
        super().__init__(config.width, config.attention)
        make = [nn.Parameter(torch.zeros(2 * grid_size - 1, self.head_dim)) if grid_size else None for _ in range(2)]
        self.rows, self.columns = make

    def forward(self, x: Tensor) -> Tensor:  # pyrefly: ignore
        """(B, h, w, W) → (B, h, w, W)"""
        h, w = x.shape[1:3]
        q, k, v, _ = self._project(x.flatten(1, 2), None, apply_shared_layer)  # (B, N, H, D)
        if self.rows is not None and self.columns is not None:
            q, k = self._append_relative_positions(
                q, k, get_relative_positions(self.rows, h), get_relative_positions(self.columns, w)
            )
            v = F.pad(v, (0, q.shape[-1] - self.head_dim))  # fused kernels need equal widths of q, k and v
        attended = compute_attention(q, k, v, AttentionPlan())[..., : self.head_dim]
        return self.out(attended.flatten(2)).unflatten(1, (h, w))

    def _append_relative_positions(self, q: Tensor, k: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """q, k (B, N, H, D), rows (h, h, D), columns (w, w, D) → padded (B, N, H, D + h + w)."""
        D, h, w = self.head_dim, len(rows), len(columns)
        cells, wide = q.unflatten(1, (h, w)), round_up_channels(D + h + w)
        down = torch.einsum("byxnd,yud->byxnu", cells, rows)  # (B, h, w, H, h)
        across = torch.einsum("byxnd,xud->byxnu", cells, columns)  # (B, h, w, H, w)
        # Attention scales by 1/√wide. Undo this: content scores need 1/√D and position scores no factor.
        queries = torch.cat([cells * (wide / D) ** 0.5, down * wide**0.5, across * wide**0.5], dim=-1).flatten(1, 2)
        y = torch.eye(h, dtype=k.dtype, device=k.device).repeat_interleave(w, 0)
        x = torch.eye(w, dtype=k.dtype, device=k.device).repeat(h, 1)
        one_hot = torch.cat([y, x], dim=-1)[:, None].expand(*k.shape[:3], -1)  # (B, N, H, h + w)
        k, padding = torch.cat([k, one_hot], dim=-1), (0, wide - D - h - w)
        return F.pad(queries, padding), F.pad(k, padding)


def round_up_channels(channels: int) -> int:
    """Round up to a multiple of `CHANNEL_MULTIPLE`."""
    return -(-channels // CHANNEL_MULTIPLE) * CHANNEL_MULTIPLE


def get_relative_positions(table: Tensor, size: int) -> Tensor:
    """Return the relative position embeddings of all pairs, (size, size, D).

    `table` has a row for each distance −(n − 1) … n − 1 and is interpolated to `size`.
    """
    if len(table) != 2 * size - 1:
        table = F.interpolate(table.float().T[None], size=2 * size - 1, mode="linear")[0].T.to(table.dtype)
    place = torch.arange(size, device=table.device)
    return table[place[:, None] - place + size - 1]


class SAMBlock(nn.Module):
    """Block with full or windowed attention and an MLP."""

    def __init__(self, config: SAMConfig, is_windowed: bool):
        super().__init__()
        block = config.block
        self.window_size = config.window_size if is_windowed else 0
        self.norm = make_norm(block.norm, block.width, block.eps)
        self.attention = RelativePositionAttention(
            block, (self.window_size or config.grid_size) if config.use_relative_positions else 0
        )
        self.mlp = ResidualBranch(block, "mlp")

    def forward(self, x: Tensor) -> Tensor:
        """(B, h, w, W) → (B, h, w, W)"""
        y = self.norm(x)
        return self.mlp(
            x + (run_in_windows(y, self.window_size, self.attention) if self.window_size else self.attention(y))
        )


def run_in_windows(x: Tensor, window_size: int, module: nn.Module) -> Tensor:
    """Run a module on windows of a feature map, (B, h, w, W) → (B, h, w, W).

    Windows at the right and bottom are padded with zeros, which take part in attention, as in training.
    """
    B, h, w = x.shape[:3]
    x = F.pad(x, (0, 0, 0, -w % window_size, 0, -h % window_size))
    a, b = x.shape[1] // window_size, x.shape[2] // window_size
    # (B·a·b, S, S, W)
    x = x.unflatten(1, (a, window_size)).unflatten(3, (b, window_size)).transpose(2, 3).flatten(0, 2)
    x = module(x).unflatten(0, (B, a, b)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return x[:, :h, :w]


class SAMNeck(nn.Module):
    """Neck: 1 × 1 and 3 × 3 convolutions with norms, (B, h, w, W) → (B, h, w, G)."""

    def __init__(self, width: int, out_features: int):
        super().__init__()
        self.conv1 = nn.Linear(width, out_features, bias=False)
        self.norm1 = nn.LayerNorm(out_features, eps=EPS)
        self.conv2 = nn.Conv2d(out_features, out_features, 3, padding=1, bias=False)
        self.norm2 = nn.LayerNorm(out_features, eps=EPS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.conv1(x)).movedim(-1, 1)
        return self.norm2(self.conv2(x).movedim(1, -1))


@MODELS.register("sam")
class SAM(nn.Module):
    """SAM image encoder: pixels (B, C, height, width) → features (B, N, G), for any multiple of the patch size."""

    Config = SAMConfig

    def __init__(self, config: SAMConfig):
        super().__init__()
        self.config = config
        width, side = config.block.width, config.grid_size
        self.embed = PatchEmbed((1, config.patch_size, config.patch_size), width, config.channels)
        self.positions = LearnedPositionEmbedding((side, side), width) if config.use_absolute_positions else None
        self.blocks = nn.ModuleList([SAMBlock(config, config.is_windowed(i)) for i in range(config.layers)])
        self.neck = SAMNeck(width, config.out_features)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.neck(*self.forward_layers(pixels)).flatten(1, 2)

    def forward_layers(self, pixels: Tensor, layers: Sequence[int | None] = (None,)) -> list[Tensor]:
        """Return the hidden states (B, h, w, W) of several layers (see `resolve_depth`), before the neck."""
        pixels = crop_to_patches(pixels, self.config.patch_size, self.config.image_size)
        h, w = (size // self.config.patch_size for size in pixels.shape[2:])
        x = self.embed(pixels.to(self.embed.proj.weight.dtype))  # (B, N, W)
        x = (x if self.positions is None else x + self.positions(h, w)).unflatten(1, (h, w))
        depths = [resolve_depth(layer, self.config.layers) for layer in layers]
        states = {0: x}
        for depth, block in enumerate(self.blocks, start=1):
            if depth > max(depths):
                break
            x = block(x)
            states[depth] = x
        return [states[depth] for depth in depths]

    def workload(self, batch_size: int = 1, height: int | None = None, width: int | None = None) -> "GridWorkload":
        """Return the workload of a batch. The default size is the native one."""
        P, native = self.config.patch_size, self.config.image_size
        return GridWorkload.from_grid((height or native) // P, (width or height or native) // P, batch_size)


# ---- costs ------------------------------------------------------------------------------------------------------


class GridWorkload(Workload):
    """Workload of feature maps of `height` × `width` cells."""

    height: int = 0
    width: int = 0

    @classmethod
    def from_grid(cls, height: int, width: int, batch: int) -> "GridWorkload":
        full = Workload.full_attention(height * width, batch)
        return cls(
            tokens=full.tokens, attention_pairs=full.attention_pairs, sequences=batch, height=height, width=width
        )


@cost.count_flops.register
def _(module: RelativePositionAttention, work: GridWorkload) -> int:
    heads, D = module.config.heads, module.head_dim
    places = 0 if module.rows is None else work.height + work.width
    wide = round_up_channels(D + places) if places else D
    scores = 2 * heads * (D * places * work.tokens + 2 * wide * work.attention_pairs)
    return cost.count_flops(module.qkv, work) + cost.count_flops(module.out, work) + scores


@cost.count_flops.register
def _(module: SAMBlock, work: GridWorkload) -> int:
    S, inside = module.window_size, work
    if S:
        inside = GridWorkload.from_grid(S, S, work.sequences * -(-work.height // S) * -(-work.width // S))
    return cost.count_flops(module.attention, inside) + cost.count_flops(module.mlp, work)


@cost.count_flops.register
def _(module: SAMNeck, work: Workload) -> int:
    return 2 * (module.conv1.weight.numel() + module.conv2.weight.numel()) * work.tokens


@cost.count_flops.register
def _(module: SAM, work: Workload) -> int:
    """FLOPs of `model(pixels)`, for the workload of `model.workload(…)`."""
    if not isinstance(work, GridWorkload):
        raise ConfigError("the cost of windows depends on the grid", "pass `model.workload(…)`")
    return sum(cost.count_flops(part, work) for part in (module.embed, *module.blocks, module.neck))


@cost.count_bytes.register
def _(module: SAMNeck, work: Workload) -> cost.MemoryBytes:
    size = count_parameter_bytes(module)
    return cost.MemoryBytes(weights=size, read=size)


for _kind in (SAMBlock, SAM):
    cost.count_bytes.register(_kind, cost.sum_child_bytes)
