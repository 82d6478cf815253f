"""One ViT that is CLIP, SigLIP, SigLIP 2, DINOv2 and EVA-02 by config alone.

B batch, C channels, H, W pixels, P patch, h, w patches, N = h·w, X prefix tokens (CLS, registers), D width
"""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.encoders.depth import run_blocks
from vitrail.errors import ConfigError, ImageError
from vitrail.nn import (
    Attention,
    BlockConfig,
    LearnedPositions,
    PatchEmbed,
    Plan,
    Rotary,
    RotaryConfig,
    Work,
    attention_plan,
    cost,
    grid_positions,
    patchify,
)
from vitrail.nn.block import Block, Residual
from vitrail.nn.learned import small, weigh
from vitrail.nn.norms import make_norm
from vitrail.nn.positions import Resize

Grids = Tensor | Sequence[tuple[int, int]]
"""(h, w) of every picture: a tensor (B, 2) or pairs."""


class ViTConfig(Config, tag="vit", tag_field="kind"):
    """What the towers of the field differ in.

    image        side of the pictures it was made for; what patches leave over of it (SigLIP-So400M/14 at 384: six
                 pixels) goes unread, at that size and at any other that leaves as much over
    order        how a patch is flattened: channel by channel (a convolution) or pixel by pixel (NaFlex)
    mask         a learned token that stands for patches to be guessed (DINOv2)
    positions    which tokens have a learned position; registers never do
    rotary_span  patches that rotary positions span, however many there are (EVA-02: 16, as it was trained with)
    norm_first   a norm before the blocks (CLIP)
    norm_last    the norm after the blocks is on every token, on the pooled vector alone (CLIP, EVA-02), or absent
    head         width of a linear layer, with bias, for the pooled vector: classes, or EVA-CLIP's embedding; 0 for none
    """

    layers: int
    block: BlockConfig
    image: int = 224
    patch: int = 16
    channels: int = 3
    order: Literal["channels_first", "channels_last"] = "channels_first"
    patch_bias: bool = True
    cls: bool = False
    registers: int = 0
    mask: bool = False
    positions: Literal["none", "patches", "cls_and_patches"] = "patches"
    resize: Resize = "bicubic"
    rotary: RotaryConfig | None = None
    rotary_span: int | None = None
    norm_first: bool = False
    norm_last: Literal["none", "tokens", "pooled"] = "tokens"
    pool: Literal["none", "cls", "mean", "attention"] = "none"
    head: int = 0

    @property
    def side(self) -> int:
        """Patches along a side of the pictures it was made for."""
        return self.image // self.patch

    @property
    def prefix(self) -> int:
        return int(self.cls) + self.registers

    @property
    def pooled(self) -> int:
        """Width of what `pool` gives."""
        return self.head or self.block.width

    def __post_init__(self) -> None:
        if self.side < 1:
            raise ConfigError(f"a picture of {self.image} pixels holds no patch of {self.patch}")
        if self.block.chain != ("self", "mlp"):
            raise ConfigError(f"a ViT's block is self, mlp, not {', '.join(self.block.chain)}")
        if not self.cls and (self.pool == "cls" or self.positions == "cls_and_patches"):
            raise ConfigError("a CLS token is asked for and there is none", "set cls, or change pool and positions")
        if self.pool == "none" and (self.norm_last == "pooled" or self.head):
            raise ConfigError("a norm or a head for the pooled vector needs a pool", "choose cls, mean or attention")
        if self.rotary_span is not None and self.rotary is None:
            raise ConfigError("rotary_span stretches rotary positions, and there are none", "give `rotary`")
        channels = self.block.attention.channels(self.block.width)
        if self.rotary is not None and self.rotary.head_dim != channels:
            raise ConfigError(
                f"rotary positions for heads of {self.rotary.head_dim} channels do not fit heads of {channels}",
                f"set rotary.head_dim to {channels}",
            )


class AttentionPool(nn.Module):
    """One learned question to all patches (SigLIP's head): attention, then an MLP beside it."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.probe = small(config.width)
        self.attention = Attention(config.width, config.attention, "cross")
        self.mlp = Residual(config.with_(layer_scale=None), "mlp")

    def forward(self, x: Tensor, segments: Tensor | None = None) -> Tensor:
        """x (B, N, D), segments (B, N) with 0 where real → (B, D)"""
        plan = Plan()
        if segments is not None:
            plan = attention_plan(segments.new_zeros(len(x), 1), key_segments=segments)
        probe = self.probe.expand(len(x), 1, -1)
        return self.mlp(self.attention(probe, plan, context=x))[:, 0]


class ViT(nn.Module):
    """pixels (B, C, H, W) → features of the patches (B, N, D).

    Pictures of any size the patch divides will do: positions are resized. Unequal pictures come as patches already cut,
    (B, N, C·P·P) with the `grids` that say how they lie: row b holds h·w patches, and padding behind them, which no
    patch sees and whose features mean nothing.
    """

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.config = config
        block, width = config.block, config.block.width
        self.embed = PatchEmbed((1, config.patch, config.patch), width, config.channels, config.patch_bias)
        self.cls = small(width) if config.cls else None
        self.registers = small(config.registers, width) if config.registers else None
        self.mask = small(width) if config.mask else None
        self.positions = (
            None
            if config.positions == "none"
            else LearnedPositions(
                (config.side, config.side), width, int(config.positions == "cls_and_patches"), config.resize
            )
        )
        self.rotary = None if config.rotary is None else Rotary(config.rotary)
        self.norm_first = make_norm(block.norm, width, block.eps) if config.norm_first else nn.Identity()
        self.blocks = nn.ModuleList([Block(block) for _ in range(config.layers)])
        self.norm_last = nn.Identity() if config.norm_last == "none" else make_norm(block.norm, width, block.eps)
        self.pooler = AttentionPool(block) if config.pool == "attention" else None
        self.head = nn.Linear(width, config.head) if config.head else None

    @torch.no_grad()
    def read_through(self, scale: Sequence[float], offset: Sequence[float]) -> None:
        """Make x be read as scale · x + offset was, channel by channel: the same features of other pixels."""
        weight, bias = self.embed.proj.weight, self.embed.proj.bias
        by_channel = weight.double().unflatten(1, (self.config.channels, -1))  # (D, C, P·P)
        scales, offsets = (weight.new_tensor(values, dtype=torch.float64)[:, None] for values in (scale, offset))
        constant = (by_channel * offsets).sum((1, 2))  # (D,), of every patch alike
        if bias is not None:
            bias.add_(constant)
        elif self.positions is not None:
            self.positions.table[self.positions.prefix :] += constant.to(weight.dtype)
        elif constant.any():
            raise ConfigError(
                "this tower reads pixels of other levels, and has neither a bias nor positions to hold the difference",
                "set patch_bias = true",
            )
        weight.copy_((by_channel * scales).flatten(1))

    def forward(
        self, pixels: Tensor, grids: Grids | None = None, *, layer: int | None = None, masked: Tensor | None = None
    ) -> Tensor:
        """The patches' features (B, N, D), from `layer` (see `depth_of`) or from the end.

        An earlier layer's features are raw, without the last norm; later blocks are not run. `masked` (B, N) says which
        patches the mask token stands for.
        """
        return self.tokens(pixels, grids, layer=layer, masked=masked)[:, self.config.prefix :]

    def tokens(
        self, pixels: Tensor, grids: Grids | None = None, *, layer: int | None = None, masked: Tensor | None = None
    ) -> Tensor:
        """All tokens (B, X + N, D): CLS, registers, patches."""
        return self._run(pixels, grids, layer, masked)[0]

    def pool(self, pixels: Tensor, grids: Grids | None = None) -> Tensor:
        """One vector a picture, (B, D) or (B, head)."""
        if self.config.pool == "none":
            raise ConfigError("this tower has no pool", "choose one in its config: cls, mean or attention")
        x, segments = self._run(pixels, grids, None, None)
        X = self.config.prefix
        patches, segments = x[:, X:], None if segments is None else segments[:, X:]
        if self.pooler is not None:
            pooled = self.pooler(patches, segments)
        elif self.config.pool == "cls":
            pooled = x[:, 0]
        else:
            pooled = _mean(patches, segments)
        pooled = self.norm_last(pooled) if self.config.norm_last == "pooled" else pooled
        return pooled if self.head is None else self.head(pooled)

    @property
    def pooling(self) -> list[nn.Module | None]:
        """The parts that `pool` alone runs."""
        return [self.pooler, self.head, self.norm_last if self.config.norm_last == "pooled" else None]

    def work(self, batch: int = 1, height: int | None = None, width: int | None = None) -> Work:
        """What `cost` needs to know of so many pictures, of the native size unless told."""
        P = self.config.patch
        rows = (height or self.config.image) // P
        columns = (width or height or self.config.image) // P
        return Work.full(self.config.prefix + rows * columns, batch)

    # ---- from pixels to tokens ----------------------------------------------------------------------------------

    def _run(
        self, pixels: Tensor, grids: Grids | None, layer: int | None, masked: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        patches, pairs = self._cut(pixels, grids)
        N = patches.shape[1]
        segments = self._segments(pairs, N, patches.device)
        x = self.embed(patches.to(self.embed.proj.weight.dtype))  # (B, N, D)
        if masked is not None:
            if self.mask is None:
                raise ConfigError("this tower has no mask token", "set `mask` in its config")
            x = torch.where(masked[..., None], self.mask, x)
        x = self.norm_first(self._placed(x, pairs))  # (B, X + N, D)
        rotation = None if self.rotary is None else self.rotary(self._cells(pairs, N, x.device))
        plan = None if segments is None else attention_plan(segments)
        x = run_blocks(self.blocks, x, layer, plan=plan, rotation=rotation)
        last = layer is None and self.config.norm_last == "tokens"
        return self.norm_last(x) if last else x, segments

    def _cut(self, pixels: Tensor, grids: Grids | None) -> tuple[Tensor, list[tuple[int, int]]]:
        """Patches (B, N, C·P·P), and their grid: one for all, or one a row."""
        P, C = self.config.patch, self.config.channels
        if pixels.ndim == 4 and grids is None:
            if pixels.shape[1] != C:
                raise ImageError(f"the tower reads {C} channels, not {pixels.shape[1]}: {tuple(pixels.shape)}")
            pixels = whole_patches(pixels, P, self.config.image)
            patches = patchify(pixels, (1, P, P))
            if self.config.order == "channels_last":
                patches = patches.unflatten(-1, (C, P * P)).mT.flatten(-2)
            return patches, [(pixels.shape[2] // P, pixels.shape[3] // P)]
        if pixels.ndim != 3 or grids is None:
            raise ImageError(
                f"a tower reads pixels (B, C, H, W), or patches (B, N, {C * P * P}) with their grids",
                f"this is {tuple(pixels.shape)} {'without' if grids is None else 'with'} grids",
            )
        pairs = [(int(h), int(w)) for h, w in (grids.tolist() if isinstance(grids, Tensor) else grids)]
        B, N, K = pixels.shape
        if K != C * P * P or len(pairs) != B:
            raise ImageError(
                f"{B} rows of patches of {K} numbers and {len(pairs)} grids",
                f"the tower reads {C * P * P} numbers a patch, and every row needs its grid",
            )
        for h, w in pairs:
            if h < 1 or w < 1 or h * w > N:
                raise ImageError(f"a grid of {h} × {w} patches does not fit a row of {N}")
        return pixels, pairs

    def _segments(self, pairs: list[tuple[int, int]], N: int, device: torch.device) -> Tensor | None:
        """(B, X + N): 0 for what is real, −1 for padding; None without any."""
        if all(h * w == N for h, w in pairs):
            return None
        X = self.config.prefix
        real = torch.tensor([X + h * w for h, w in pairs], device=device)[:, None]  # (B, 1)
        return -(torch.arange(X + N, device=device) >= real).long()

    def _placed(self, x: Tensor, pairs: list[tuple[int, int]]) -> Tensor:
        """Add learned positions and put the prefix in front: (B, N, D) → (B, X + N, D)"""
        cls = self.cls
        if self.positions is not None:
            lead = self.positions.prefix
            tables = {pair: self.positions(*pair) for pair in set(pairs)}  # (lead + h·w, D) each
            x = x + _rows([tables[pair][lead:] for pair in pairs], x.shape[1])
            if cls is not None and lead:
                cls = cls + tables[pairs[0]][0]
        prefix = [p.view(-1, x.shape[-1]) for p in (cls, self.registers) if p is not None]
        return torch.cat([torch.cat(prefix).expand(len(x), -1, -1), x], dim=1) if prefix else x

    def _cells(self, pairs: list[tuple[int, int]], N: int, device: torch.device) -> Tensor:
        """(1 or B, X + N, 3) rotary positions. The prefix stands at 0, which turns nothing."""
        tables, span = {}, self.config.rotary_span
        for h, w in set(pairs):
            cells = grid_positions(1, h, w, device=device).float()
            if span is not None:
                t, y, x = cells.unbind(-1)
                cells = torch.stack([t, y / h * span, x / w * span], dim=-1)
            tables[h, w] = cells
        return F.pad(_rows([tables[pair] for pair in pairs], N), (0, 0, self.config.prefix, 0))


def _mean(x: Tensor, segments: Tensor | None) -> Tensor:
    """x (B, N, D), segments (B, N) with 0 where real → (B, D). Sums of halves pass what a half can hold."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if segments is None:
        return x.mean(1, dtype=wide).to(x.dtype)
    real = segments.eq(0)[..., None]
    return (x.where(real, 0).sum(1, dtype=wide) / real.sum(1)).to(x.dtype)


def _rows(tables: list[Tensor], N: int) -> Tensor:
    """Tables of at most N rows, filled up with zeros and stacked."""
    return torch.stack([t if len(t) == N else F.pad(t, (0, 0, 0, N - len(t))) for t in tables])


def whole_patches(pixels: Tensor, patch: int, image: int) -> Tensor:
    """Leave out the right and bottom pixels that patches leave over of a picture of side `image`; no others."""
    over = image % patch
    cut = [slice(-over) if over and size % patch == over else slice(None) for size in pixels.shape[-2:]]
    return pixels[..., cut[0], cut[1]]


# ---- costs ------------------------------------------------------------------------------------------------------


@cost.flops.register
def _(module: ViT, work: Work) -> int:
    """Of `model(pixels)`; pooling and the head have rules of their own."""
    patches = work.tokens - work.rows * module.config.prefix
    return cost.flops(module.embed, work.with_(tokens=patches)) + cost.flops(module.blocks, work)


@cost.bytes.register
def _(module: ViT, work: Work) -> cost.Bytes:
    """Of `model(pixels)`, which reads neither what `pool` alone runs nor the mask token."""
    return cost.sum_bytes(module, work) + cost.Bytes(read=-weigh(*module.pooling, module.mask))


@cost.flops.register
def _(module: AttentionPool, work: Work) -> int:
    """`work` is that of the tower without its prefix: the patches are the context of one probe a picture."""
    probes = Work(tokens=work.rows, pairs=0, context=work.tokens, context_pairs=work.tokens)
    return cost.flops(module.attention, probes) + cost.flops(module.mlp, probes)


@cost.bytes.register
def _(module: AttentionPool, work: Work) -> cost.Bytes:
    return cost.sum_bytes(module, work)
