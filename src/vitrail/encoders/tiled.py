"""A ViT over the tiles of one picture, which see each other: the tower of Llama-3.2-Vision.

Blocks over all tiles of a picture together, then a few more behind gates; the states of some blocks on the way go
along with the last ones. Where a tile stands is learned, one table for each ratio of rows to columns.

B pictures, T tiles, C channels, P patch, L = 1 + patches of a tile (CLS first), D width, A the taps
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.encoders.depth import depth_of, run_depths
from vitrail.errors import ConfigError, ImageError
from vitrail.nn import BlockConfig, PatchEmbed, Plan, Work, cost
from vitrail.nn.block import Block
from vitrail.nn.learned import small

ROUND = (
    8  # a tile's tokens are filled up with zeros to a multiple of this, and were so in training; 1 + n² never is one
)
EPS = 1e-5  # of the norms around the blocks


class TiledViTConfig(Config, tag="tiled_vit", tag_field="kind"):
    """
    layers    blocks before the last norm    over  gated blocks after it
    image     side of a tile
    tiles     the most a picture has
    ratios    the (rows, columns) a picture may be cut into
    taps      layers (see `depth_of`) whose features go along with the last ones
    """

    layers: int
    over: int
    block: BlockConfig
    image: int = 560
    patch: int = 14
    channels: int = 3
    tiles: int = 4
    ratios: tuple[tuple[int, int], ...] = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1))
    taps: tuple[int, ...] = (3, 7, 15, 23, 30)

    @property
    def tokens(self) -> int:
        """Of a tile, CLS included."""
        return 1 + (self.image // self.patch) ** 2

    @property
    def width(self) -> int:
        """Of a token's features."""
        return self.block.width * (1 + len(self.taps))

    @property
    def filled(self) -> int:
        """Tokens of a tile with what fills it up."""
        return -(-self.tokens // ROUND) * ROUND

    def __post_init__(self) -> None:
        if self.layers < 1 or self.over < 0:
            raise ConfigError(f"{self.layers} layers and {self.over} over them", "give at least 1, and 0 or more")
        if self.block.chain != ("self", "mlp") or self.block.gated:
            raise ConfigError("a tiled ViT's block is self, mlp, without gates: those behind the norm get theirs")
        if self.image < self.patch or self.image % self.patch:
            raise ConfigError(f"a tile of {self.image} pixels is not cut by patches of {self.patch}")
        wrong = [ratio for ratio in self.ratios if min(ratio) < 1 or ratio[0] * ratio[1] > self.tiles]
        if wrong or not self.ratios:
            raise ConfigError(f"ratios {wrong} do not fit {self.tiles} tiles", "give (rows, columns) that do")
        for layer in self.taps:
            depth_of(layer, self.layers)


class _Padded(Plan):
    """Padding (segment −1) sees all that is real, and what is real sees everything, padding too.

    So the released tower was trained: its mask keeps padding from padding alone.
    """

    def sees(self, q, k, qs, ks, qp, kp):
        return (qs >= 0) | (ks >= 0)


class TiledViT(nn.Module):
    """tiles (B, T, C, H, W) of pictures cut into `ratios` (rows, columns) → features (B, T, L, D·(1 + A)).

    T is the config's; tiles beyond a picture's own are padding, zeros by custom, and their features mean nothing.
    """

    def __init__(self, config: TiledViTConfig):
        super().__init__()
        self.config = config
        block, D = config.block, config.block.width
        R, T, L = len(config.ratios) + 1, config.tiles, config.tokens  # row 0 stands for no picture
        self.embed = PatchEmbed((1, config.patch, config.patch), D, config.channels, bias=False)
        self.cls = small(D)
        self.positions = small(L, D)
        self.tile_positions = small(R, T, L, D)
        self.before, self.after = small(R, T, D), small(R, T, D)
        # Each starts shut: a tile's place counts for nothing until it is learned.
        self.positions_gate, self.before_gate, self.after_gate = (nn.Parameter(torch.zeros(1)) for _ in range(3))
        self.norm_first, self.norm_last = nn.LayerNorm(D, eps=EPS), nn.LayerNorm(D, eps=EPS)
        self.blocks = nn.ModuleList([Block(block) for _ in range(config.layers)])
        self.over = nn.ModuleList([Block(block.with_(gated=True)) for _ in range(config.over)])

    def forward(self, tiles: Tensor, ratios: Sequence[tuple[int, int]]) -> Tensor:
        """(B, T, L, D·(1 + A)): the last features, then channel by channel those of the taps."""
        B, T, L = len(tiles), self.config.tiles, self.config.tokens
        row = torch.tensor(self._rows(tiles, ratios), device=tiles.device)  # (B,)
        x = self._placed(tiles, row)  # (B, T, L, D)
        x = F.pad(x, (0, 0, 0, self.config.filled - L)).flatten(1, 2)
        plan = self._plan(ratios, tiles.device)
        *taps, x = run_depths(self.blocks, x, (*self.config.taps, None), [plan] * self.config.layers)
        x = self.norm_last(x).unflatten(1, (T, -1))
        x = (x + self.after_gate.tanh() * self.after[row][:, :, None]).flatten(1, 2)
        for block in self.over:
            x = block(x, plan=plan)
        aside = torch.stack(taps, dim=-1).flatten(2) if taps else x[..., :0]  # (B, ·, D·A)
        return torch.cat([x, aside], dim=-1).view(B, T, self.config.filled, -1)[:, :, :L]

    def work(self, batch: int = 1) -> Work:
        """What `cost` needs to know of so many pictures of all their tiles: what fills them up is computed too."""
        real, filled = (self.config.tiles * n for n in (self.config.tokens, self.config.filled))
        pairs = filled**2 - (filled - real) ** 2
        return Work(tokens=batch * filled, pairs=batch * pairs, rows=batch)

    def _rows(self, tiles: Tensor, ratios: Sequence[tuple[int, int]]) -> list[int]:
        """The row of every picture in the tables of tiles."""
        side, shape = self.config.image, tuple(tiles.shape)
        if len(shape) != 5 or shape[1:] != (self.config.tiles, self.config.channels, side, side):
            raise ImageError(
                f"the tower reads (B, {self.config.tiles}, {self.config.channels}, {side}, {side}), not {shape}",
                "fill up with tiles of zeros",
            )
        if len(ratios) != len(tiles):
            raise ImageError(f"{len(tiles)} pictures and {len(ratios)} ratios")
        for ratio in ratios:
            if tuple(ratio) not in self.config.ratios:
                raise ImageError(
                    f"a picture is cut into {tuple(ratio)} rows and columns of tiles",
                    f"the tower knows {', '.join(map(str, self.config.ratios))}",
                )
        return [1 + self.config.ratios.index(tuple(ratio)) for ratio in ratios]

    def _placed(self, tiles: Tensor, row: Tensor) -> Tensor:
        """Tokens that know their tile and their place in it, (B, T, L, D)."""
        B, T = tiles.shape[:2]
        x = self.embed(tiles.flatten(0, 1).to(self.embed.proj.weight.dtype)).unflatten(0, (B, T))
        x = x + self.before_gate.tanh() * self.before[row][:, :, None]
        x = torch.cat([self.cls.expand(B, T, 1, -1), x], dim=2)
        gate = self.positions_gate.tanh()
        return self.norm_first(x + (1 - gate) * self.positions + gate * self.tile_positions[row])

    def _plan(self, ratios: Sequence[tuple[int, int]], device: torch.device) -> Plan:
        held = torch.tensor([h * w for h, w in ratios], device=device)[:, None, None]
        tile = torch.arange(self.config.tiles, device=device)[:, None] < held  # (B, T, 1)
        token = torch.arange(self.config.filled, device=device) < self.config.tokens
        segments = (tile & token).flatten(1).long() - 1  # (B, T·filled)
        return _Padded(segments=segments, key_segments=segments)


@cost.flops.register
def _(module: TiledViT, work: Work) -> int:
    """Of `model(tiles, ratios)`; only patches, neither CLS nor what fills up, are embedded."""
    config = module.config
    patches = work.rows * config.tiles * (config.tokens - 1)
    return (
        cost.flops(module.embed, work.with_(tokens=patches))
        + cost.flops(module.blocks, work)
        + cost.flops(module.over, work)
    )


@cost.bytes.register
def _(module: TiledViT, work: Work) -> cost.Bytes:
    return cost.sum_bytes(module, work)
