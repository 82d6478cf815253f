"""ViT over all tiles of an image: the vision tower of Llama-3.2-Vision.

Attention spans all tiles of an image. A few gated global blocks follow. The output concatenates the states of several
layers. Tile positions are learned, with one table per aspect ratio.

B images, T tiles, C channels, P patch size, L = 1 + patches of a tile (CLS first), D width, A feature layers
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import LayerCount, OptionalLayerCount
from vitrail.encoders.encoder import EncoderConfig, InputKind
from vitrail.encoders.layer_selection import resolve_depth, run_blocks_to_layers
from vitrail.errors import ConfigError, ImageError
from vitrail.nn import AttentionPlan, BlockConfig, PatchEmbed, Workload, cost
from vitrail.nn.block import Block
from vitrail.nn.parameters import make_small_parameter
from vitrail.registry import ENCODERS, MODELS

TOKEN_MULTIPLE = (
    8  # a tile's tokens are padded with zeros to a multiple of this, as in training; 1 + n² is never a multiple
)
EPS = 1e-5  # of the norms before and after the blocks


class TiledViTConfig(EncoderConfig, tag="tiled-vit", tag_field="kind"):
    """Tiled ViT settings.

    layers          blocks before the last norm
    global_layers   gated blocks after the last norm
    image_size      tile size
    max_tiles       largest number of tiles of an image
    aspect_ratios   supported (rows, columns) of tiles
    feature_layers  layers (see `resolve_depth`) whose features are concatenated to the last ones
    """

    layers: LayerCount
    global_layers: OptionalLayerCount
    block: BlockConfig
    image_size: int = 560
    patch_size: int = 14
    channels: int = 3
    max_tiles: int = 4
    aspect_ratios: tuple[tuple[int, int], ...] = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1))
    feature_layers: tuple[int, ...] = (3, 7, 15, 23, 30)

    @property
    def tokens_per_tile(self) -> int:
        """Tokens of a tile, with CLS."""
        return 1 + (self.image_size // self.patch_size) ** 2

    @property
    def input_kind(self) -> InputKind:
        return "tiles"

    @property
    def width(self) -> int:
        """Width of the output features."""
        return self.block.width * (1 + len(self.feature_layers))

    @property
    def padded_tokens_per_tile(self) -> int:
        """Tokens of a tile, with padding."""
        return -(-self.tokens_per_tile // TOKEN_MULTIPLE) * TOKEN_MULTIPLE

    def __post_init__(self) -> None:
        if self.block.branches != ("self", "mlp") or self.block.gated:
            raise ConfigError("a tiled ViT block needs branches self, mlp and gated = false; global blocks are gated")
        if self.image_size < self.patch_size or self.image_size % self.patch_size:
            raise ConfigError(f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}")
        wrong = [ratio for ratio in self.aspect_ratios if min(ratio) < 1 or ratio[0] * ratio[1] > self.max_tiles]
        if wrong or not self.aspect_ratios:
            raise ConfigError(
                f"aspect_ratios {wrong} do not fit max_tiles {self.max_tiles}", "use ratios with fewer tiles"
            )
        for layer in self.feature_layers:
            resolve_depth(layer, self.layers)


class _PaddedTilePlan(AttentionPlan):
    """Plan in which only padding (segment −1) cannot attend to padding.

    The released tower was trained with this mask: real tokens attend to padding too.
    """

    def allows(self, q, k, qs, ks, qp, kp):
        return (qs >= 0) | (ks >= 0)


@ENCODERS.register("tiled-vit")
@MODELS.register("tiled-vit")
class TiledViT(nn.Module):
    """Tiled ViT: tiles (B, T, C, H, W) of images with `aspect_ratios` (rows, columns) → (B, T, L, D·(1 + A)).

    T is `max_tiles`. Unused tiles are padding, usually zeros, and their features are undefined.
    """

    Config = TiledViTConfig

    def __init__(self, config: TiledViTConfig):
        super().__init__()
        self.config = config
        block, D = config.block, config.block.width
        R, T, L = len(config.aspect_ratios) + 1, config.max_tiles, config.tokens_per_tile  # row 0 is unused
        self.embed = PatchEmbed((1, config.patch_size, config.patch_size), D, config.channels, bias=False)
        self.cls = make_small_parameter(D)
        self.positions = make_small_parameter(L, D)
        self.tile_positions = make_small_parameter(R, T, L, D)
        self.before, self.after = make_small_parameter(R, T, D), make_small_parameter(R, T, D)
        # All gates start at 0: tile positions have no effect at first.
        self.positions_gate, self.before_gate, self.after_gate = (nn.Parameter(torch.zeros(1)) for _ in range(3))
        self.norm_first, self.norm_last = nn.LayerNorm(D, eps=EPS), nn.LayerNorm(D, eps=EPS)
        self.blocks = nn.ModuleList([Block(block) for _ in range(config.layers)])
        self.global_blocks = nn.ModuleList([Block(block.replace(gated=True)) for _ in range(config.global_layers)])

    def forward(self, tiles: Tensor, aspect_ratios: Sequence[tuple[int, int]]) -> Tensor:
        """Return (B, T, L, D·(1 + A)): the last features, then those of `feature_layers`, interleaved by channel."""
        B, T, L = len(tiles), self.config.max_tiles, self.config.tokens_per_tile
        row = torch.tensor(self._ratio_rows(tiles, aspect_ratios), device=tiles.device)  # (B,)
        x = self._embed_tiles(tiles, row)  # (B, T, L, D)
        x = F.pad(x, (0, 0, 0, self.config.padded_tokens_per_tile - L)).flatten(1, 2)
        plan = self._plan(aspect_ratios, tiles.device)
        *taps, x = run_blocks_to_layers(
            self.blocks, x, (*self.config.feature_layers, None), [plan] * self.config.layers
        )
        x = self.norm_last(x).unflatten(1, (T, -1))
        x = (x + self.after_gate.tanh() * self.after[row][:, :, None]).flatten(1, 2)
        for block in self.global_blocks:
            x = block(x, plan=plan)
        intermediate = torch.stack(taps, dim=-1).flatten(2) if taps else x[..., :0]  # (B, ·, D·A)
        return torch.cat([x, intermediate], dim=-1).view(B, T, self.config.padded_tokens_per_tile, -1)[:, :, :L]

    def workload(self, batch_size: int = 1) -> Workload:
        """Return the workload of images with all tiles. Padding is computed too."""
        real, filled = (
            self.config.max_tiles * n for n in (self.config.tokens_per_tile, self.config.padded_tokens_per_tile)
        )
        pairs = filled**2 - (filled - real) ** 2
        return Workload(tokens=batch_size * filled, attention_pairs=batch_size * pairs, sequences=batch_size)

    def _ratio_rows(self, tiles: Tensor, ratios: Sequence[tuple[int, int]]) -> list[int]:
        """Return the row of each image in the tile position tables."""
        side, shape = self.config.image_size, tuple(tiles.shape)
        if len(shape) != 5 or shape[1:] != (self.config.max_tiles, self.config.channels, side, side):
            raise ImageError(
                f"the tower expects (B, {self.config.max_tiles}, {self.config.channels}, {side}, {side}), not {shape}",
                "pad with tiles of zeros",
            )
        if len(ratios) != len(tiles):
            raise ImageError(f"got {len(tiles)} images and {len(ratios)} aspect ratios")
        for ratio in ratios:
            if tuple(ratio) not in self.config.aspect_ratios:
                raise ImageError(
                    f"aspect ratio {tuple(ratio)} of tiles is not supported",
                    f"use one of {', '.join(map(str, self.config.aspect_ratios))}",
                )
        return [1 + self.config.aspect_ratios.index(tuple(ratio)) for ratio in ratios]

    def _embed_tiles(self, tiles: Tensor, row: Tensor) -> Tensor:
        """Embed tiles and add tile and patch positions: (B, T, L, D)."""
        B, T = tiles.shape[:2]
        x = self.embed(tiles.flatten(0, 1).to(self.embed.proj.weight.dtype)).unflatten(0, (B, T))
        x = x + self.before_gate.tanh() * self.before[row][:, :, None]
        x = torch.cat([self.cls.expand(B, T, 1, -1), x], dim=2)
        gate = self.positions_gate.tanh()
        return self.norm_first(x + (1 - gate) * self.positions + gate * self.tile_positions[row])

    def _plan(self, ratios: Sequence[tuple[int, int]], device: torch.device) -> AttentionPlan:
        counts = torch.tensor([h * w for h, w in ratios], device=device)[:, None, None]
        tile = torch.arange(self.config.max_tiles, device=device)[:, None] < counts  # (B, T, 1)
        token = torch.arange(self.config.padded_tokens_per_tile, device=device) < self.config.tokens_per_tile
        segments = (tile & token).flatten(1).long() - 1  # (B, T·filled)
        return _PaddedTilePlan(segments=segments, key_segments=segments)


@cost.count_flops.register
def _(module: TiledViT, work: Workload) -> int:
    """FLOPs of `model(tiles, aspect_ratios)`. CLS and padding need no patch embedding."""
    config = module.config
    patches = work.sequences * config.max_tiles * (config.tokens_per_tile - 1)
    return (
        cost.count_flops(module.embed, work.replace(tokens=patches))
        + cost.count_flops(module.blocks, work)
        + cost.count_flops(module.global_blocks, work)
    )


cost.count_bytes.register(TiledViT, cost.sum_child_bytes)
