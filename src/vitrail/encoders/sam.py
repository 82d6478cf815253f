"""Segment Anything's image tower (ViTDet): windows, a few blocks that see the whole picture, a neck of convolutions.

B pictures, C channels, P patch, h, w patches along the sides, N = h·w, W width, H heads, D head width, G width it gives
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.encoders.depth import depth_of
from vitrail.encoders.vit import whole_patches
from vitrail.errors import ConfigError
from vitrail.nn import Attention, BlockConfig, LearnedPositions, PatchEmbed, Plan, Work, attend, cost
from vitrail.nn.attention import shared
from vitrail.nn.block import Residual
from vitrail.nn.norms import make_norm

EPS = 1e-6  # of the neck's norms
LANES = 8  # channels are filled up to a multiple of this, which fused kernels ask for in half precision


class SAMConfig(Config, tag="sam", tag_field="kind"):
    """
    image      side of the pictures it was made for; what patches leave over goes unread, as in a `ViT`
    window     side of the windows that attention keeps to, in patches; 0 for none
    full       blocks that see the whole picture all the same, counted from 0
    positions  whether each patch has a learned position
    relative   whether attention knows how many rows and how many columns lie between two patches
    gives      width of the features that leave the neck
    """

    layers: int
    block: BlockConfig
    image: int = 1024
    patch: int = 16
    channels: int = 3
    window: int = 14
    full: tuple[int, ...] = (2, 5, 8, 11)
    positions: bool = True
    relative: bool = True
    gives: int = 256

    @property
    def side(self) -> int:
        """Patches along a side of the pictures it was made for."""
        return self.image // self.patch

    @property
    def width(self) -> int:
        """Of the features it gives."""
        return self.gives

    def __post_init__(self) -> None:
        if self.side < 1:
            raise ConfigError(f"a picture of {self.image} pixels holds no patch of {self.patch}")
        if self.window < 0 or self.gives < 1:
            raise ConfigError(f"window {self.window}, gives {self.gives}", "use window 0 for none, and give at least 1")
        if self.full and not 0 <= min(self.full) <= max(self.full) < self.layers:
            raise ConfigError(f"a tower of {self.layers} blocks has not all of {self.full}", "count from 0")
        block = self.block
        if block.chain != ("self", "mlp") or block.norm_at != "before" or block.gated or block.layer_scale is not None:
            raise ConfigError("a block of this tower is self, mlp, with norms before them and nothing that weighs them")

    def windowed(self, block: int) -> bool:
        return self.window > 0 and block not in self.full


class MapAttention(Attention):
    """Attention among the cells of a map that knows how far apart they lie. What a query makes of each row and column
    it could look at stands as further channels beside it, and beside a key those that say where it stands: so scores
    come from one product, and a fused kernel needs no N × N table of them.

    `side` is that of the maps it was made for: two learned tables, resized for others. 0 for none.
    """

    def __init__(self, config: BlockConfig, side: int):
        super().__init__(config.width, config.attention)
        make = [nn.Parameter(torch.zeros(2 * side - 1, self.head_dim)) if side else None for _ in range(2)]
        self.rows, self.columns = make

    def forward(self, x: Tensor) -> Tensor:  # pyrefly: ignore
        """(B, h, w, W) → (B, h, w, W)"""
        h, w = x.shape[1:3]
        q, k, v = self._project(x.flatten(1, 2), None, shared)  # (B, N, H, D)
        if self.rows is not None and self.columns is not None:
            q, k = self._placed(q, k, apart(self.rows, h), apart(self.columns, w))
            v = F.pad(v, (0, q.shape[-1] - self.head_dim))  # fused kernels want one width of all three
        seen = attend(q, k, v, Plan())[..., : self.head_dim]
        return self.out(seen.flatten(2)).unflatten(1, (h, w))

    def _placed(self, q: Tensor, k: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """q, k (B, N, H, D), rows (h, h, D), columns (w, w, D) → (B, N, H, D + h + w, filled up)"""
        D, h, w = self.head_dim, len(rows), len(columns)
        cells, wide = q.unflatten(1, (h, w)), filled(D + h + w)
        down = torch.einsum("byxnd,yud->byxnu", cells, rows)  # (B, h, w, H, h)
        across = torch.einsum("byxnd,xud->byxnu", cells, columns)  # (B, h, w, H, w)
        # `attend` divides by the root of all channels, and only those of q and k are to be divided, by that of D.
        looks = torch.cat([cells * (wide / D) ** 0.5, down * wide**0.5, across * wide**0.5], dim=-1).flatten(1, 2)
        y = torch.eye(h, dtype=k.dtype, device=k.device).repeat_interleave(w, 0)
        x = torch.eye(w, dtype=k.dtype, device=k.device).repeat(h, 1)
        stands = torch.cat([y, x], dim=-1)[:, None].expand(*k.shape[:3], -1)  # (B, N, H, h + w)
        k, room = torch.cat([k, stands], dim=-1), (0, wide - D - h - w)
        return F.pad(looks, room), F.pad(k, room)


def filled(channels: int) -> int:
    return -(-channels // LANES) * LANES


def apart(table: Tensor, side: int) -> Tensor:
    """A row for each distance, −(n − 1) … n − 1, resized to `side` → that of every two places (side, side, D)"""
    if len(table) != 2 * side - 1:
        table = F.interpolate(table.float().T[None], size=2 * side - 1, mode="linear")[0].T.to(table.dtype)
    place = torch.arange(side, device=table.device)
    return table[place[:, None] - place + side - 1]


class MapBlock(nn.Module):
    """Attention over a map, or window by window, and an MLP, each beside the stream."""

    def __init__(self, config: SAMConfig, windowed: bool):
        super().__init__()
        block = config.block
        self.window = config.window if windowed else 0
        self.norm = make_norm(block.norm, block.width, block.eps)
        self.attention = MapAttention(block, (self.window or config.side) if config.relative else 0)
        self.mlp = Residual(block, "mlp")

    def forward(self, x: Tensor) -> Tensor:
        """(B, h, w, W) → (B, h, w, W)"""
        y = self.norm(x)
        return self.mlp(x + (in_windows(y, self.window, self.attention) if self.window else self.attention(y)))


def in_windows(x: Tensor, S: int, run: nn.Module) -> Tensor:
    """`run` over windows of S × S cells, (B, h, w, W) → (B, h, w, W). Those at the far edges are filled up with zeros,
    which are seen, as they were in training."""
    B, h, w = x.shape[:3]
    x = F.pad(x, (0, 0, 0, -w % S, 0, -h % S))
    a, b = x.shape[1] // S, x.shape[2] // S
    x = x.unflatten(1, (a, S)).unflatten(3, (b, S)).transpose(2, 3).flatten(0, 2)  # (B·a·b, S, S, W)
    x = run(x).unflatten(0, (B, a, b)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return x[:, :h, :w]


class Neck(nn.Module):
    """(B, h, w, W) → (B, h, w, G): fewer channels, then 3 × 3 neighbours together, each with a norm."""

    def __init__(self, width: int, gives: int):
        super().__init__()
        self.narrow = nn.Linear(width, gives, bias=False)
        self.norm1 = nn.LayerNorm(gives, eps=EPS)
        self.around = nn.Conv2d(gives, gives, 3, padding=1, bias=False)
        self.norm2 = nn.LayerNorm(gives, eps=EPS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.narrow(x)).movedim(-1, 1)
        return self.norm2(self.around(x).movedim(1, -1))


class SAM(nn.Module):
    """pixels (B, C, height, width) → features of the patches (B, N, G). Any size that the patch divides will do."""

    def __init__(self, config: SAMConfig):
        super().__init__()
        self.config = config
        width, side = config.block.width, config.side
        self.embed = PatchEmbed((1, config.patch, config.patch), width, config.channels)
        self.positions = LearnedPositions((side, side), width) if config.positions else None
        self.blocks = nn.ModuleList([MapBlock(config, config.windowed(i)) for i in range(config.layers)])
        self.neck = Neck(width, config.gives)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.neck(*self.states(pixels)).flatten(1, 2)

    def states(self, pixels: Tensor, layers: Sequence[int | None] = (None,)) -> list[Tensor]:
        """What leaves several layers (see `depth_of`) in one pass, before the neck: (B, h, w, W) each"""
        pixels = whole_patches(pixels, self.config.patch, self.config.image)
        h, w = (size // self.config.patch for size in pixels.shape[2:])
        x = self.embed(pixels.to(self.embed.proj.weight.dtype))  # (B, N, W)
        x = (x if self.positions is None else x + self.positions(h, w)).unflatten(1, (h, w))
        depths = [depth_of(layer, self.config.layers) for layer in layers]
        states = {0: x}
        for depth, block in enumerate(self.blocks, start=1):
            if depth > max(depths):
                break
            states[depth] = x = block(x)
        return [states[depth] for depth in depths]

    def work(self, batch: int = 1, height: int | None = None, width: int | None = None) -> "MapWork":
        """What `cost` needs to know of so many pictures, of the native size unless told."""
        P, native = self.config.patch, self.config.image
        return MapWork.of((height or native) // P, (width or height or native) // P, batch)


# ---- costs ------------------------------------------------------------------------------------------------------


class MapWork(Work):
    """Maps of `height` × `width` cells."""

    height: int = 0
    width: int = 0

    @classmethod
    def of(cls, height: int, width: int, batch: int) -> "MapWork":
        whole = Work.full(height * width, batch)
        return cls(tokens=whole.tokens, pairs=whole.pairs, rows=batch, height=height, width=width)


@cost.flops.register
def _(module: MapAttention, work: MapWork) -> int:
    heads, D = module.config.heads, module.head_dim
    places = 0 if module.rows is None else work.height + work.width
    wide = filled(D + places) if places else D
    found = 2 * heads * (D * places * work.tokens + 2 * wide * work.pairs)
    return cost.flops(module.qkv, work) + cost.flops(module.out, work) + found


@cost.flops.register
def _(module: MapBlock, work: MapWork) -> int:
    S, inside = module.window, work
    if S:
        inside = MapWork.of(S, S, work.rows * -(-work.height // S) * -(-work.width // S))
    return cost.flops(module.attention, inside) + cost.flops(module.mlp, work)


@cost.flops.register
def _(module: Neck, work: Work) -> int:
    return 2 * (module.narrow.weight.numel() + module.around.weight.numel()) * work.tokens


@cost.flops.register
def _(module: SAM, work: Work) -> int:
    """Of `model(pixels)`, with the work that `model.work(…)` gives."""
    if not isinstance(work, MapWork):
        raise ConfigError("the cost of windows depends on how patches lie", "give the work of `model.work(…)`")
    return sum(cost.flops(part, work) for part in (module.embed, *module.blocks, module.neck))


@cost.bytes.register(MapBlock)
@cost.bytes.register(SAM)
def _(module: nn.Module, work: Work) -> cost.Bytes:
    return cost.sum_bytes(module, work)


@cost.bytes.register
def _(module: Neck, work: Work) -> cost.Bytes:
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    return cost.Bytes(weights=size, read=size)
